"""What must go on: rules broken by something that does not happen.

Each function looks at one thing that an island owes, and raises `Violation`.
"""

from __future__ import annotations

from typing import Any

from diloco.islands import core, outbox
from diloco.snapshots import keys
from diloco.verification import faults, values
from diloco.verification import kernel as kernel_lib

_KEEP_UP_SECS = 8.0  # until a version is adopted, or a cut taken part in
_LOOK_SECS = 4.0  # between two looks of a leader at heads, at most
# Faults after which nobody can say who has left a payload behind.
_LITTERING = (faults.DUPLICATE, faults.KILL_LATE, faults.STALE)


def check_publication(island: Any, held: values.Fragment, step: int) -> None:
  """Progress waits for its publication at most H steps.

  With carry it may wait longer, for a version or for an answer.
  """
  shape = island.world.schedule
  waited = step - max(held.references[-1], island.started_at)
  if shape.adoption != "carry" and waited > shape.sync_every:
    raise kernel_lib.Violation(
      f"island {island.index} publishes {waited} steps after it last did, or"
      f" last gave its progress up; every {shape.sync_every} are due"
    )


def check_wait(island: Any) -> None:
  """An island that waits does no step before an answer, while there is time."""
  world, (step, held, anchor, at) = island.world, island.spoken
  if step != island.core.step or held.anchor is not anchor:
    return
  world.checker.seen["waited_out"] += 1
  waited_secs = island.clock() - at
  if waited_secs < world.schedule.wait_secs and not world.draining:
    raise kernel_lib.Violation(
      f"island {island.index} goes on {waited_secs:.2f} s after it published,"
      " and nobody has answered"
    )


def check_answer(
  island: Any, action: core.Adopt, fetched: Any, held: values.Fragment
) -> None:
  """Where others' versions cost an island its steps, it waits for its own."""
  shape = island.world.schedule
  if not shape.own_answers or action.resync or action.muted_until:
    return
  _, *published = held.references
  merged_step = fetched.head.clock.get(str(island.index), 0)
  behind = action.version - held.anchor.number
  if not published or (
    merged_step < published[-1] == island.core.step
    and behind <= shape.max_staleness
  ):
    raise kernel_lib.Violation(
      f"island {island.index} adopts version {action.version} at step"
      f" {island.core.step}, which has its steps up to {merged_step} and not"
      f" those up to {published[-1:] or 'its next publication'}"
    )


def check_save_lost(
  island: Any, step: int, positions: Any, dropped: list[core.Publish]
) -> None:
  """A saved state is given up only for a publication that it counts on."""
  island.world.checker.seen["saves_lost"] += 1
  counted_on = [
    outbox.Entry(
      core.Publish(p, at.base, at.first_step, at.published, "schedule"), None
    )
    for p, at in enumerate(positions)
  ]
  if not any(
    outbox.Entry(action, None).contains(entry)
    for action in dropped
    for entry in counted_on
  ):
    raise kernel_lib.Violation(
      f"the state of island {island.index} at step {step} was given up, and"
      " nothing it counts on was lost"
    )


def watch_leader(world: Any, spoiled: int, payload: str, secs: float) -> None:
  """A leader tells of damaged tensors, whether anybody sends or not."""
  kernel: kernel_lib.Kernel = world.kernel
  struck = dict(kernel.struck)
  turn_secs = _LOOK_SECS * world.schedule.fragments
  stood_secs = kernel.now - world.checker.moved_at.get(spoiled, 0.0)
  if kernel.troubled or secs < max(2 * turn_secs, stood_secs) + turn_secs:
    return
  lives = [role.life for role in world.seats if role.life is not None]
  # One that is stopped finds nothing out.
  awake = [life for life in lives if life.stopped_until <= kernel.now]
  leading = list(filter(_leads, awake))

  def look() -> None:
    if world.restoring or kernel.struck != struck:
      return
    for life in filter(_leads, leading):
      world.checker.seen["watched_leaders"] += 1
      heads = life.shell.heads
      found = heads.records[spoiled]
      if found.payload == payload and spoiled not in heads.standing:
        raise kernel_lib.Violation(
          f"{life.role.name} has led for {secs:.0f} s and not found out that"
          f" version {found.version} of fragment {spoiled} is damaged"
        )

  kernel.at(kernel.now + secs - 0.1, look)


def _leads(life: Any) -> bool:
  heads = getattr(life.shell, "heads", None) if life.alive else None
  return heads is not None and bool(heads.held) and not life.shell.fenced


def watch_bystanders(world: Any, spoiled: int, secs: float) -> None:
  """One spoiled fragment holds up no other, nor cuts."""
  kernel: kernel_lib.Kernel = world.kernel
  if secs < 2 * _KEEP_UP_SECS:
    return
  struck = dict(kernel.struck)
  quiet = not kernel.troubled

  def mark() -> None:
    numbers = [v[-1].number for v in world.checker.versions]
    cut = _newest_cut(world)
    lives = [role.life for role in world.islands]
    kernel.at(kernel.now + _KEEP_UP_SECS, lambda: look(numbers, cut, lives))

  def look(numbers: list[int], cut: int, lives: list[Any]) -> None:
    if world.restoring or kernel.struck != struck or not quiet:
      return
    world.checker.seen["bystanders"] += 1
    for life in lives:
      if life is None or not life.alive or not life.shell.present:
        continue
      island = life.shell
      if island.core.resyncing:
        continue
      for fragment, number in enumerate(numbers):
        found = island.fragments[fragment].anchor.number
        if fragment != spoiled and found < number:
          raise kernel_lib.Violation(
            f"island {island.index} has had version {found} of fragment"
            f" {fragment} for {_KEEP_UP_SECS:.0f} s, {number} is there and only"
            f" fragment {spoiled} is damaged"
          )
      if island.cut < cut:
        raise kernel_lib.Violation(
          f"island {island.index} has not heard of cut {cut} in"
          f" {_KEEP_UP_SECS:.0f} s, only fragment {spoiled} is damaged"
        )

  kernel.at(kernel.now + secs - _KEEP_UP_SECS - 0.1, mark)


def _newest_cut(world: Any) -> int:
  names = world.store.directories["cuts"]
  return max((int(n) for n in names if n.isdecimal()), default=0)


def check_answers(world: Any) -> None:
  """No answer to a peer is left behind by those who could have deleted it."""
  if any(f.kind in _LITTERING for f in world.schedule.faults):
    return
  lives = {
    (role.index, role.life.incarnation): role.life.shell
    for role in world.islands
    if role.life is not None
  }
  for prefix in world.store.payloads:
    if not prefix.startswith(keys.PEER_PAYLOADS):
      continue
    caller, sender = (
      tuple(map(int, name.split(".")[:2])) for name in prefix.split("/")[-2:]
    )
    if caller not in lives or sender not in lives:
      continue
    if lives[sender].answering or not (
      lives[caller].cleaned_up and lives[sender].answered
    ):
      continue
    raise kernel_lib.Violation(
      f"an answer to island {caller[0]} was left behind by island {sender[0]}"
    )
