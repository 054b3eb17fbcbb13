"""A run that goes on in another directory, in the simulated world.

Its machine is lost: all roles are killed, and of the tapes there is what was
copied last. Before that, or after it, users on other machines have the run go
on, by production scripts (`controller.move`): whoever watches while it is still
alive is refused, of several who try one has it, and what the copies do not tell
of must not have happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from diloco import errors
from diloco.controller import move
from diloco.snapshots import keys, lease, operations, records, restore
from diloco.verification import faults, rollback
from diloco.verification import kernel as kernel_lib

_COPY_SECS = 3.0  # between two copies of the tapes
_AGAIN_SECS = 2.0  # until a user who was refused tries again
_RENEW_SECS = 1.5
_MOVE_SECS = 200.0  # in which a run is moved, deaths and refusals included


class Copies:
  """What was copied of the tapes of a run."""

  def __init__(self, world: Any):
    self._world = world
    self._told: dict[int, float] = {}  # completed cuts, and when that was told
    self.whole = False  # whether the session ended in order
    self.is_lost = False  # whether nothing lives where it was
    self._until = 0.0

  def told(self, cut: int) -> None:
    """The controller puts on its tape that a cut is complete."""
    self._told.setdefault(cut, self._world.kernel.now)

  def lost(self) -> None:
    """The machine is gone, and with it what was not copied yet."""
    self._until = self._world.kernel.now // _COPY_SECS * _COPY_SECS
    self.is_lost = True

  @property
  def cuts(self) -> list[int]:
    """Complete cuts that the copies tell of, newest first."""
    told = [cut for cut, at in self._told.items() if at <= self._until]
    return sorted(told, reverse=True)


class _Watch(lease.LeaseWatch):
  """It cannot be told who lives, elsewhere."""

  def __init__(
    self, ttl_secs: float, check: Callable[[records.Lease], None] | None = None
  ):
    super().__init__(ttl_secs)
    self._check = check

  def lives(self, owner: str) -> bool | None:
    """See `tenure.Watch`."""
    return None

  def expired(self, lease: records.Lease | None, now: float) -> bool:
    """See `tenure.Watch`."""
    if lease is not None and self._check is not None:
      self._check(lease)
    return super().expired(lease, now)


class Mover(move.Move):
  """A user who has the run go on in a directory of their own."""

  def __init__(self, world: Any, life: kernel_lib.Life):
    self.world = world
    self.life = life
    self.what, self.run_name = "the run", ""
    self.each = operations.in_turn
    self.times = world.times
    self.before = ""
    self.token = 0
    self.owner = f"{life.role.name}.{life.incarnation}"
    self._tries = 0
    self._passed_over: set[int] = set()
    self._renewals: kernel_lib.Thread | None = None
    self.watch = _Watch(self.times.control_ttl_secs, self.check)

  def forget(self) -> None:
    """Lets go of everything."""
    self.__dict__.clear()

  def clock(self) -> float:
    """Its process's own."""
    return self.world.kernel.clock(self.life)

  def say(self, text: str) -> None:
    """Nobody listens."""

  @property
  def _home(self) -> str:
    """Id of its directory; each attempt has a new one."""
    return f"{self.owner}.{self._tries}"

  def run(self) -> kernel_lib.Script:
    """Tries until the run is here, or in another directory."""
    world, seen = self.world, self.world.checker.seen
    while not (world.restored or world.refused):
      self._tries += 1
      self._has_watched = False
      self.watch = _Watch(self.times.control_ttl_secs, self.check)
      try:
        set_back = yield from self.moving()
        if set_back == world.copies.whole:
          raise kernel_lib.Violation(
            f"a run of whose tapes {world.copies.cuts} was copied goes on"
            f" {'from a cut' if set_back else 'as it was'}"
          )
        yield from self._leave(self._home)
        yield from self._go_on()
      except errors.UserError as error:
        seen["refused_alive"] += "alive" in error.why
        yield from self._leave(self.before)
        yield _AGAIN_SECS
      except errors.FencedError:
        yield _AGAIN_SECS
      except (OSError, restore.ChangedError):
        yield from self._leave(self.before)
        yield _AGAIN_SECS

  def told_cuts(self) -> list[int] | None:
    """See base."""
    copies = self.world.copies
    self._passed_over.clear()
    kernel = self.world.kernel
    # While nobody can write, nobody gives signs of life.
    speaks_at = kernel.calm_at + self.times.member_ttl_secs
    silenced = kernel.troubled or kernel.now < speaks_at
    if not (copies.is_lost or silenced):
      raise kernel_lib.Violation("the run is moved while it is alive")
    if copies.whole:
      return None
    if not copies.cuts:
      raise self.torn("they tell of none")
    return list(copies.cuts)

  def _refuse(self, why: str) -> None:
    world = self.world
    if not world.restored:
      world.checker.seen["not_moved"] += 1
      world.refused, world.kernel.done = why, True

  def take(self) -> operations.Script[int]:
    """See base."""
    yield from self._take(self.watch)
    yield from restore.hold(self.token)
    return self.token

  def _take(self, watch: _Watch) -> operations.Script[None]:
    ttl_secs = self.times.control_ttl_secs
    self.token = yield from move.taking(
      *(self.owner, self._home, self.what, ttl_secs, watch),
      *(self.clock, self.say),
    )
    self._renewals = self.world.kernel.start(self.life, self._renew())

  def _renew(self) -> kernel_lib.Script:
    held = True
    while held:
      yield _RENEW_SECS
      with contextlib.suppress(*operations.FAILURES):
        held = yield from lease.renew(
          keys.CONTROLLER_LEASE, self.owner, self.token
        )

  def _leave(self, home: str) -> kernel_lib.Script:
    """Gives the lease up, as `Tenure` does."""
    if self._renewals is not None:
      self._renewals.token, self._renewals = -1, None
    token, self.token = self.token, 0
    if token:
      with contextlib.suppress(*operations.FAILURES):
        yield from lease.release(keys.CONTROLLER_LEASE, self.owner, token, home)

  def go_back(self, cut: int, token: int) -> operations.Script[str]:
    """See base; as `restorer.Restorer` does."""
    world = self.world
    while True:
      choice = yield from rollback.choose(world, self.life, token, cut)
      if choice.parts is None:
        self._passed_over.add(cut)
        return dict(choice.passed_over)[cut]
      try:
        facts = yield from restore.restore(
          choice, lambda name, record: None, lambda facts: None
        )
      except restore.ChangedError:
        continue
      yield from lease.fence(keys.CONTROLLER_LEASE, token)
      self._check_back(facts.cut)
      world.checker.restored(choice.parts, facts)
      if facts.cut == cut:
        return ""

  def _check_back(self, cut: int) -> None:
    """It is the newest that the tapes tell of, of those that will do."""
    told = [c for c in self.world.copies.cuts if c not in self._passed_over]
    if cut not in told[:1]:
      raise kernel_lib.Violation(
        f"the run goes back to cut {cut}, its tapes tell of {told}"
      )

  def torn(self, why: str) -> errors.UserError:
    """See base."""
    if self.world.copies.cuts and not self.world.damaging:
      raise kernel_lib.Violation(f"the run cannot be moved: {why}")
    self._refuse(why)
    return errors.UserError(self.what, why, "start anew")

  def _go_on(self) -> kernel_lib.Script:
    """What `diloco resume` does in the directory that the run is in now."""
    home = self._home
    yield from self._take(
      _Watch(
        self.times.control_ttl_secs,
        lambda held: move.check_home(
          *(held, home, self.what), lambda: False, lambda owner: None
        ),
      )
    )
    yield from restore.hold(self.token)
    world = self.world
    if world.restored:
      raise kernel_lib.Violation("the run goes on in two directories")
    world.restored = True
    world.checker.seen["moved_away"] += 1
    world.start(world.controller)
    # Which may die, and leave the lease to whoever wants it.
    yield from self._leave(home)


def play(world: Any, whole: bool) -> None:
  """Users have a run go on elsewhere, whose machine dies some time."""
  kernel: kernel_lib.Kernel = world.kernel
  world.copies.whole = whole
  world.restored = False
  kernel.log("", "users have the run go on elsewhere")

  def lose() -> None:
    rollback.kill_roles(world, world.restorers)
    world.copies.lost()

  lost = [f for f in world.schedule.faults if f.kind == faults.MACHINE_LOST]
  if lost and not whole:
    world.disturbed(lost[0].at)
    kernel.at(kernel.now + lost[0].at, lose)
  else:
    lose()
  for role in world.restorers:
    world.start(role)
  world.disturbed(_MOVE_SECS)
  last = kernel.now + _MOVE_SECS
  while not (world.restored or world.refused) and kernel.now < last:
    kernel.run(kernel.now + 0.5)
    kernel.done = False
  if not (world.restored or world.refused):
    raise kernel_lib.Violation(f"nobody moves the run in {_MOVE_SECS:.0f} s")
  world.begins_again()
