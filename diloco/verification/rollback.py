"""Everything is killed, and the run goes back to its last complete cut.

What `diloco resume --cut=last` does, in the simulated world: the production
restore procedure, which may itself die at any operation and be started again,
then all roles anew. What was in flight when everything died may still land in
the store, before or after the restore. A second controller may be about, which
goes on as `diloco resume` does, under the production lease: one that is stopped
until the other has it wakes in the middle of what it did.

Before that the newest version of a fragment may be *spoiled*: the store has
damaged or lost its head or its payload. Nobody in the run can mend that, and
the next restore must pass over every cut that points to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

from diloco import errors
from diloco.snapshots import (
  cut_parts,
  keys,
  lease,
  operations,
  records,
  restore,
)
from diloco.verification import delays, faults
from diloco.verification import kernel as kernel_lib

NAME = "restorer"
_LATE_SECS = 4.0  # until the last write of a dead process lands
_AGAIN_SECS = 0.5  # until a restore that died is started again
_STANDSTILL_SECS = 20.0  # for which a run may stand still for its return
_LOOK_SECS = 0.3  # between two looks at the lease, and two renewals


class Restorer:
  """One attempt to set the run back."""

  __slots__ = ("life", "token", "world")

  def __init__(self, world: Any, life: kernel_lib.Life):
    self.world = world
    self.life = life
    self.token = 0

  def forget(self) -> None:
    """Holds nothing that holds it."""

  def run(self) -> kernel_lib.Script:
    """Chooses a cut, restores it and starts everything."""
    world = self.world
    if len(world.restorers) > 1:
      yield from self._control()
    while not (world.restored or world.refused):
      try:
        yield from self._go_on()
      except OSError:
        yield _AGAIN_SECS
      except restore.ChangedError:
        continue

  def _go_on(self) -> kernel_lib.Script:
    """Goes back to a cut, if need be, and starts everything."""
    world, role = self.world, self.life.role
    asked = role is world.restorer or world.spoiled
    found = None
    if asked or (yield from restore.unfinished()):
      found = yield from self._go_back()
    yield from lease.fence(keys.CONTROLLER_LEASE, self.token)
    if found:
      world.checker.restored(*found)
    if world.refused:
      return
    world.restored = True
    if world.controller.life is None:
      world.start(world.controller)

  def _control(self) -> kernel_lib.Script:
    """Takes the run's lease, as any controller does first."""
    world, life = self.world, self.life
    owner = f"{life.role.name}.{life.incarnation}"
    watch = lease.LeaseWatch(world.lease_ttl_secs)
    while not world.restored:
      try:
        if not self.token:
          above = yield from restore.newest_token()
          self.token = yield from lease.acquire(
            keys.CONTROLLER_LEASE,
            owner,
            watch,
            lambda: world.kernel.clock(life),
            above=above,
          )
          if self.token:
            world.kernel.start(life, self._renew(owner))
        if self.token:
          yield from restore.hold(self.token)
          return
      except operations.FAILURES:
        pass
      yield _LOOK_SECS

  def _renew(self, owner: str) -> kernel_lib.Script:
    """The thread that renews the lease; nobody asks it."""
    held = True
    while held:
      yield _LOOK_SECS
      with contextlib.suppress(*operations.FAILURES):
        held = yield from lease.renew(keys.CONTROLLER_LEASE, owner, self.token)

  def _go_back(self) -> kernel_lib.Script:
    world = self.world
    choice = yield from choose(world, self.life, self.token)
    if choice.parts is None and world.spoiled and not world.restored:
      refuse(world, choice)
    if choice.parts is None:
      return None
    facts = yield from restore.restore(
      choice, lambda name, record: None, lambda facts: None
    )
    return choice.parts, facts


def choose(
  world: Any, life: kernel_lib.Life, token: int, wanted: int | None = None
) -> kernel_lib.Script:
  """Chooses the cut to go back to; the checker hears of it."""

  def check(parts: cut_parts.Parts) -> str:
    return damage(world, parts)

  def check_sent(sent: records.Contribution) -> str:
    try:
      world.store.content(sent.payload)
    except errors.CorruptSnapshotError as error:
      return str(error)
    return ""

  name, listings = life.role.name, world.store.stale
  stale = name in listings
  choice = yield from restore.choose(check, check_sent, wanted, token)
  stale = stale or name in listings  # it may have been stopped meanwhile
  if choice.parts is None and world.spoiled and stale:
    raise OSError("an old listing has no cut: somebody resumes again later")
  roles = (*world.islands, *world.seats)
  living = any(role.life is not None for role in roles)
  # Else what it chose comes to nothing, or the living have deleted a cut of it.
  if not world.restored and not living:
    world.checker.passed_over(choice.passed_over, choice.begun)
    world.checker.left_out(choice.left_out)
  return choice


def refuse(world: Any, choice: restore.Choice) -> None:
  """The run is damaged, and no cut will do."""
  world.checker.refused(choice.passed_over)
  world.refused = "no cut can be restored"
  world.kernel.done = True


def damage(world: Any, parts: cut_parts.Parts) -> str:
  """Why what a cut's records point to will not do; empty if it will.

  What `verify.Verifier.check_cut` does, in the simulated world.
  """
  try:
    for head in parts.heads:
      world.store.content(head.payload)
  except errors.CorruptSnapshotError as error:
    return str(error)
  for island in parts.islands:
    if (parts.request.cut, island) not in world.cut_states:
      return f"the saved state of island {island} is gone"
  return ""


def set_back(
  world: Any, life: kernel_lib.Life, end_roles: Callable[[], kernel_lib.Script]
) -> kernel_lib.Script:
  """What a controller does that finds its own run damaged; whether it was.

  The simulated world's `diloco.controller.restorer.Restorer.set_back`;
  `end_roles` ends all roles, and says whether any lived.
  """

  def tell(facts: restore.Restored) -> None:
    world.told = choice.parts, facts

  while True:
    begun = yield from restore.unfinished()
    if not begun and not (yield from is_damaged(world)):
      _finished(world)  # by one that died, or did not hear of it
      return False
    world.restored = False
    _strike(world, life.role)
    choice = yield from choose(world, life, 0)
    if choice.parts is not None and (yield from end_roles()):
      # They may have gone on meanwhile, and deleted an old cut.
      choice = yield from choose(world, life, 0)
    if choice.parts is None:
      refuse(world, choice)
      return False
    try:
      yield from restore.restore(choice, lambda name, record: None, tell)
    except restore.ChangedError:
      continue
    _finished(world)
    return True


def _finished(world: Any) -> None:
  """The checker hears of a return, once it has taken effect."""
  if world.told:
    world.checker.restored(*world.told)
    world.checker.seen["set_back_within"] += 1
    world.told, world.spoiled = (), ""
  world.restored = world.restoring


def _strike(world: Any, role: kernel_lib.Role) -> None:
  """Who sets the run back is struck by what was meant for a restorer."""
  restorer: kernel_lib.Role = world.restorer
  for fault in restorer.strikes:
    role.strikes.append(fault._replace(at=fault.at + role.operations))
  role.strikes.sort(key=lambda fault: -fault.at)
  restorer.strikes = []
  role.arm()


def is_damaged(world: Any) -> kernel_lib.Script:
  """Whether a fragment's newest version cannot be read."""
  for fragment in range(world.schedule.fragments):
    try:
      head, _ = yield operations.Read(keys.head_key(fragment), records.Head)
      if head is None:
        return True
      world.store.content(head.payload)
    except errors.CorruptSnapshotError:
      return True
  return False


def stands(world: Any) -> bool:
  """Whether a version is damaged now, whoever could know."""
  found: bool = operations.perform(is_damaged(world), _execute(world))
  return found


def _execute(world: Any) -> Callable[[Any], Any]:
  """Performs operations at once, undisturbed."""
  nobody = kernel_lib.Life(world.restorer, 1.0, 0.0)

  def execute(operation: Any) -> Any:
    return world.store.handlers[type(operation)](operation, nobody)

  return execute


def may_spoil(world: Any, fault: faults.Fault) -> bool:
  """Whether the run can go back to a cut without what is to be spoiled."""
  if world.restorer is None or world.restoring or world.spoiled:
    return False
  spoiled = _target(world, fault)

  def check(parts: cut_parts.Parts) -> str:
    if any(head.payload == spoiled for head in parts.heads):
      return "spoiled"
    return damage(world, parts)

  choice: restore.Choice = operations.perform(
    restore.choose(check, lambda sent: ""), _execute(world)
  )
  return choice.parts is not None


def spoil(world: Any, fault: faults.Fault) -> None:
  """Spoils a fragment's newest version, and sets the run back `secs` later."""
  world.spoiled = spoiled = _target(world, fault)
  fragment = int(fault.role.partition("-")[2])
  world.checker.spoiled(fragment)
  lost = fault.kind in (faults.HEAD_LOST, faults.GLOBAL_LOST)
  other = (fragment + 1) % world.schedule.fragments
  if fault.kind == faults.HEAD_SWAPPED and other != fragment:
    world.store.swap(spoiled, keys.head_key(other))
  else:
    world.store.spoil(spoiled, lost=lost)
  kernel: kernel_lib.Kernel = world.kernel
  secs = fault.secs
  if world.schedule.within:
    secs = min(secs, world.damage_secs)
    world.disturbed(world.damage_secs + _STANDSTILL_SECS)
  delays.watch_bystanders(world, fragment, secs)
  if not fault.kind.startswith("head"):
    delays.watch_leader(world, fragment, spoiled, secs)
  if world.schedule.within:
    return

  def end() -> None:
    if not world.restoring:
      kernel.done = True

  kernel.at(kernel.now + fault.secs, end)


def _target(world: Any, fault: faults.Fault) -> str:
  """Key of a head, or prefix of the payload it points to."""
  key = keys.head_key(int(fault.role.partition("-")[2]))
  if fault.kind.startswith("head"):
    return key
  return str(world.store.peek(key).payload)


def begin(world: Any) -> None:
  """Kills everything, lets late writes fly, and starts the restore."""
  kernel: kernel_lib.Kernel = world.kernel
  kernel.log("", "everything is killed")
  kill_roles(world)
  for role in world.restorers:
    world.start(role)


def kill_roles(world: Any, spared: Collection[kernel_lib.Role] = ()) -> bool:
  """Kills all for a return to a cut, but some; says whether any lived."""
  for role in world.islands:
    # Who goes on as it is starts islands that would meet what flies for long.
    if role.life is not None and len(world.restorers) == 1:
      _let_fly(world, role.life)
  world.restoring = True
  living = [
    role for role in world.roles if role.life is not None and role not in spared
  ]
  for role in living:
    world.kernel.kill(role.life, "everything is killed")
  return bool(living)


def again(world: Any, role: kernel_lib.Role) -> None:
  """Starts a restore again that died."""

  def start() -> None:
    if role.life is None and not world.restored:
      world.start(role)

  world.kernel.at(world.kernel.now + _AGAIN_SECS, start)


def _let_fly(world: Any, life: kernel_lib.Life) -> None:
  """The publisher may have gone on for a while, and land what it did late.

  Publications leave an island one after the other, so only the next ones do:
  none of them if the publisher is stuck.
  """
  kernel, shell = world.kernel, life.shell
  if shell.outbox.busy:
    return
  secs = 0.0
  for entry in shell.outbox.waiting:
    if life.role.random() < 0.5:
      break
    record = shell.record_of(entry.action, entry.content)
    late = operations.WritePayload(record.payload, entry.content)
    proof = operations.Write(f"contributions/{record.key}", record)
    secs += (_LATE_SECS - secs) * life.role.random()
    kernel.land_later(life, late, secs)
    kernel.land_later(life, proof, secs)
