"""A whole run in virtual time: islands, syncers, controller, faulty store.

`run` plays one schedule: training under faults until enough versions are
committed, then calm: faults stop, islands drain, and everything published
must be resolved.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection
from typing import Any

from diloco import timing
from diloco.snapshots import keys, records
from diloco.syncer import core, grace, quorum
from diloco.verification import (
  controller_role,
  deaths,
  delays,
  evaluations,
  faults,
  faulty_store,
  invariants,
  island_recovery,
  island_role,
  mover,
  rare,
  rollback,
  schedules,
  session_end,
  syncer_role,
  values,
)
from diloco.verification import kernel as kernel_lib

_DEADLINE_SECS = 90.0  # of training under faults
_ROUNDS_AFTER = 8  # versions to commit after a return to a cut
_RESTORE_SECS = 10.0  # it may take, deaths included
_BACK_SECS = 20.0  # until a version is due in another session
_RETURN_SECS = 60.0  # until damage is mended, deaths of the controller included
_SUSPENDED_SECS = 40.0  # by a gate, as often as schedules offend
_RESOLVE_SECS = 60.0  # of calm, until all is resolved


@dataclasses.dataclass(frozen=True)
class Played:
  """How a schedule went."""

  violation: str  # the rule that was broken, in one line; empty if none
  rounds: int  # versions committed
  secs: float  # of virtual time
  events: int  # resumptions of threads
  struck: dict[str, int]  # faults that happened, by kind and by operation
  seen: dict[str, int]  # rare states, counted


def run(schedule: schedules.Schedule, trace: list[str] | None = None) -> Played:
  """Plays one schedule."""
  world = World(schedule, trace)
  violation = ""
  try:
    world.play()
  except kernel_lib.Violation as found:
    violation = str(found)
  except Exception as error:
    # A process of the real system would have died of it.
    violation = f"{type(error).__name__}: {error}"
    if trace is not None:
      import traceback

      trace.append(traceback.format_exc())
  if violation:
    world.kernel.log("", f"VIOLATION {violation}")
  kernel, checker = world.kernel, world.checker
  outcome = Played(
    violation,
    checker.rounds,
    kernel.now,
    kernel.events,
    kernel.struck,
    {
      **checker.seen,
      "struck_at_parts": rare.struck_at_parts(kernel.struck),
      "moved": world.slices.moved,
    },
  )
  world.forget()
  return outcome


class World:
  """State of one simulated run."""

  boot_secs = 0.3
  heartbeat_secs = 2.0
  lease_ttl_secs = 1.5
  times = timing.Timing(
    takeover_secs=4.0,
    round_trip_secs=0.0,
    heartbeat_secs=heartbeat_secs,
    lease_ttl_secs=lease_ttl_secs,
    member_ttl_secs=5.0,
    standby_poll_secs=0.9,
    retry_secs=0.2,
    hang_secs=6.0,
    start_secs=60.0,
    orphan_secs=60.0,
    drain_secs=60.0,
  )
  damage_secs = 14.0  # damage stands for less before the controller acts
  save_every = 9

  def __init__(
    self, schedule: schedules.Schedule, trace: list[str] | None = None
  ):
    self.schedule = schedule
    self.store = faulty_store.FaultyStore()
    self.kernel = kernel_lib.Kernel(
      self.store, fine=schedule.fine, trace=trace, exited=self._exited
    )
    self.checker = invariants.Checker(self)
    self.store.observer = self.checker
    self.draining = False
    self.swell = 1.0  # how many times too long everybody's progress is
    self.calm_since = 0.0
    uniform = random.Random(schedule.seed).random
    self.step_secs = [0.27 * 2.5 ** uniform() for _ in range(schedule.islands)]
    slowest = max(self.step_secs)
    round_secs = schedule.sync_every * slowest + schedule.wait_secs
    self.liveness_secs = 15.0 + 4 * round_secs
    self.core_settings = core_settings(schedule)
    self.saved: list[list[island_recovery.Saved]] = [
      [] for _ in range(schedule.islands)
    ]
    # Whether the store breaks promises in this schedule.
    self.damaging = any(
      f.kind in faults.BEYOND_CONTRACT for f in schedule.faults
    )
    self.cut_states: dict[tuple[int, int], island_recovery.Saved] = {}
    self.told_cuts: set[int] = set()  # whose end is on a tape
    self.copies = mover.Copies(self)
    self.unreadable = [0.0] * schedule.islands  # saved state, until then
    self.trained = [0] * schedule.islands  # furthest row ever trained
    self.exits = {
      (fault.role, int(fault.at)): fault
      for fault in schedule.faults
      if fault.kind in faults.EXITS
    }
    self.slices = deaths.Slices(schedule)
    self._make_roles()
    self._make_heads()
    self._arm()

  def _make_roles(self) -> None:
    seed = self.schedule.seed
    self.roles = [
      # By name, so that one role's draws do not depend on who else is there.
      kernel_lib.Role(i, name, seed * 64 + _draws(name))
      for i, name in enumerate(self.schedule.roles)
    ]
    self.by_name = {role.name: role for role in self.roles}
    self.islands = self.roles[: self.schedule.islands]
    self.controller = self.by_name["controller"]
    self.seats = [r for r in self.roles if r.name in ("syncer", "standby")]
    self.restorers = [r for r in self.roles if r.name.startswith(rollback.NAME)]
    if self.schedule.within:
      self.restorers = [self.controller]
    self.restorer = self.by_name.get(rollback.NAME)
    self.restoring = self.restored = False
    self.spoiled = ""  # key or payload of a newest version that is
    self.refused = ""  # why the run cannot go back
    self.ending: session_end.Ending | None = None
    self.budget = self.schedule.budget  # of this session; 0 for endless
    self.evaluations = evaluations.Evaluations(self)
    self.told: tuple[Any, ...] = ()  # of a return to a cut that is not over
    self.start(self.controller)  # which starts the others

  def _make_heads(self) -> None:
    for fragment in range(self.schedule.fragments):
      version = values.Version(fragment, 0, {})
      version.committed = True
      self.checker.versions.append([version])
      prefix = keys.global_prefix(fragment, 0, "i0.1")
      self.store.seed(prefix, version)
      head = records.Head(fragment, 0, 0, prefix, [[1]], {}, {})
      self.store.seed(keys.head_key(fragment), head)

  def _arm(self) -> None:
    strikes: dict[str, list[faults.Fault]] = {}
    for fault in self.schedule.faults:
      if fault.kind in faults.AT_OPERATION:
        strikes.setdefault(fault.role, []).append(fault)
      elif fault.kind in faults.AT_TIME or fault.kind in faults.SPOILING:
        self.kernel.at(fault.at, self._begin(fault))
    for name, found in strikes.items():
      role = self.by_name[name]
      role.strikes = sorted(found, key=lambda f: -f.at)
      role.arm()

  # Processes

  def start(self, role: kernel_lib.Role) -> None:
    """Starts a new process for a role."""
    self.checker.deaths.starts(role)
    role.lives += 1
    uniform = role.random
    life = kernel_lib.Life(role, 0.97 + 0.06 * uniform(), 1000 * uniform())
    role.life = life
    shell: Any
    if role is self.controller:
      shell = controller_role.Controller(self, life)
    elif role in self.restorers:
      moves = self.schedule.moves
      shell = (mover.Mover if moves else rollback.Restorer)(self, life)
    elif role.name[0] == "i":
      shell = island_role.Island(self, life, role.index)
    else:
      shell = syncer_role.Syncer(self, life)
    life.shell = shell
    self.kernel.log(role.name, f"starts, incarnation {life.incarnation}")
    self.kernel.start(life, shell.run())
    if (fault := self.exits.get((role.name, life.incarnation))) is not None:
      why = deaths.words(fault)
      self.kernel.at(
        self.kernel.now + fault.secs, lambda: self.kernel.kill(life, why)
      )

  def _exited(self, life: kernel_lib.Life, why: str) -> None:
    role = life.role
    self.disturbed(3.0)
    if why.startswith("fenced"):
      self.checker.seen["fenced"] += 1
    self.checker.deaths.died(life)
    if role.name[0] == "i":
      self.checker.died(life.shell)
    within = self.schedule.within
    if role in self.restorers and not within:
      rollback.again(self, role)
      return
    if self.restoring and not self.restored and not within:
      return
    if role is self.controller and why == session_end.LEFT:
      return  # the session is over
    if role is self.controller:
      delay = controller_role.outside_secs(role.random)
      self.disturbed(delay + 5.0)
      self.kernel.at(self.kernel.now + delay, lambda: self._revive(role))
    elif self.controller.life is not None:
      cause, _, error = why.partition(": ")
      if cause != deaths.EXIT:
        cause = "exit 0" if why == session_end.LEFT else "SIGKILL"
        error = ""
      else:
        self.kernel.struck["exit"] = self.kernel.struck.get("exit", 0) + 1
      self.controller.life.shell.died(life, cause, error)

  def _revive(self, role: kernel_lib.Role) -> None:
    free = self.restoring == self.restored or self.schedule.within
    if role.life is None and free:
      self.start(role)

  def nudge_syncers(self) -> None:
    """A commit record appeared; a syncer's next look will find it."""
    for role in self.seats:
      if role.life is not None:
        self.kernel.nudge(role.life.shell.thread, 0.03, 0.12)

  def nudge_islands(self, but: Collection[int]) -> None:
    """The board changed; the islands' next look will find it.

    Those in `but` would find nothing of interest.
    """
    for role in self.islands:
      if role.index not in but and role.life is not None:
        self.kernel.nudge(role.life.shell.adopter, 0.02, 0.1)

  # Faults of time

  def disturbed(self, secs: float) -> None:
    """Something is wrong, and will be for so long."""
    self.calm_since = max(self.calm_since, self.kernel.now + secs)

  def begins_again(self) -> None:
    """A session begins, and is not at work before its roles are."""
    since = max(self.kernel.now, self.evaluations.struck_until)
    self.calm_since = since + _BACK_SECS

  def _begin(self, fault: faults.Fault) -> Callable[[], None]:
    def begin() -> None:
      if self.draining:
        return
      spoils = fault.kind in faults.SPOILING
      if spoils and not rollback.may_spoil(self, fault):
        return
      self.kernel.log(fault.role, f"fault: {fault}")
      struck = self.kernel.struck
      struck[fault.kind] = struck.get(fault.kind, 0) + 1
      # Whose progress is too long may be suspended for a while.
      outlying = fault.kind in faults.OUTLYING
      self.disturbed(_SUSPENDED_SECS if outlying else fault.secs + 1.0)
      if spoils:
        rollback.spoil(self, fault)
      else:
        self.happen(fault)

    return begin

  def happen(self, fault: faults.Fault) -> None:
    """Lets a fault of time begin."""
    kernel, kind = self.kernel, fault.kind
    role = self.by_name.get(fault.role)
    life = role.life if role else None
    if kind == faults.KILL and life:
      kernel.kill(life, "killed")
    elif kind == faults.PAUSE and life:
      kernel.stop(life, fault.secs)
    elif kind in (faults.PARTITION, faults.OUTAGE):
      struck = [role] if role else self.roles
      self._interval(fault, lambda sign: _cut_off(struck, sign))
    elif kind == faults.DISK_FULL:
      self._interval(fault, self._fill)
    elif kind == faults.STALE and role:
      self.store.stale[role.name] = self.store.listings()
      kernel.at(
        kernel.now + fault.secs, lambda: self.store.stale.pop(role.name, None)
      )
    elif kind == faults.POISON and life:
      life.shell.poison()
    elif kind == faults.OUTLIER and life:
      life.shell.swell(fault.secs)
    elif kind == faults.OUTLIERS:
      self.swell = fault.secs
    elif kind == faults.UNREADABLE and role:
      self.unreadable[role.index] = kernel.now + fault.secs

  def _interval(
    self, fault: faults.Fault, change: Callable[[int], None]
  ) -> None:
    kernel = self.kernel
    change(1)
    kernel.trouble(1)

    def end() -> None:
      if kernel.troubled:
        change(-1)
        kernel.trouble(-1)

    kernel.at(kernel.now + fault.secs, end)

  def _fill(self, sign: int) -> None:
    self.store.full += sign

  # The run

  def play(self) -> None:
    """Plays the schedule to its end."""
    checker, schedule = self.checker, self.schedule
    kernel = self.kernel
    checker.wanted = schedule.rounds
    kernel.run(_DEADLINE_SECS)
    kernel.done = False
    checker.look()
    if self.refused:
      return
    for _ in range(schedule.set_back):
      if schedule.within:
        self._await_return()
      else:
        self._go_back()
      if self.refused:
        return
    if schedule.ends:
      session_end.play(self)
      self._train_on()
    self.calm()
    # An operation that a fault made slow may be under way.
    last = max(kernel.now, kernel.late_until) + _RESOLVE_SECS
    while not (resolved := self.resolved()) and kernel.now < last:
      kernel.run(kernel.now + 0.5)
      if self.refused:
        return
    if not resolved:
      raise kernel_lib.Violation(
        f"{_RESOLVE_SECS:.0f} s after the last fault: {self.unresolved}"
      )
    checker.finish()
    delays.check_answers(self)

  def _go_back(self) -> None:
    """Kills everything, goes back to the last cut, and trains on."""
    kernel, checker = self.kernel, self.checker
    self.restored = False
    if self.schedule.moves:
      mover.play(self, whole=False)
    else:
      rollback.begin(self)
      self.disturbed(_RESTORE_SECS)
    checker.wanted = checker.rounds + _ROUNDS_AFTER
    kernel.run(kernel.now + _DEADLINE_SECS)
    kernel.done = False
    if self.refused:
      return
    if not self.restored:
      raise kernel_lib.Violation("the restore never ended")
    self.spoiled = ""  # no cut that is left points to it
    checker.look()

  def _await_return(self) -> None:
    """A version that is damaged must be mended from within."""
    kernel = self.kernel
    if not self.spoiled:
      return
    last = kernel.now + _RETURN_SECS
    while (damaged := rollback.stands(self)) and kernel.now < last:
      kernel.run(kernel.now + 0.5)
      kernel.done = False
      if self.refused:
        return
    if damaged:
      raise kernel_lib.Violation(
        f"nobody has mended {self.spoiled} in {_RETURN_SECS:.0f} s"
      )
    self._train_on()

  def _train_on(self) -> None:
    kernel, checker = self.kernel, self.checker
    checker.wanted = checker.rounds + _ROUNDS_AFTER
    kernel.run(kernel.now + _DEADLINE_SECS)
    kernel.done = False
    checker.look()

  def ended(self) -> None:
    """The controller's core has ended the run, which cannot go on."""
    alike = self.checker.deaths.failed_alike
    if not (alike or self.checker.deaths.may_be_over()):
      raise kernel_lib.Violation("the controller ends a run that can go on")
    self.checker.seen["failed_alike" if alike else "failed"] += 1
    self.refused = "it cannot go on"
    self.kernel.done = True

  def calm(self) -> None:
    """From now on nothing goes wrong, and islands drain."""
    self.kernel.log("", "calm: no more faults, islands drain")
    self.draining = True
    self.checker.wanted = 0  # no version is one too many now
    for role in self.roles:
      role.strikes = []
      role.arm()
      role.cut_off = 0
      if role.life is not None:
        role.life.stopped_until = min(role.life.stopped_until, self.kernel.now)
    self.store.full = 0
    self.store.stale.clear()
    self.kernel.trouble(-self.kernel.troubled)

  def forget(self) -> None:
    """Lets go of everything, so that its memory is used again at once."""
    for role in self.roles:
      life, role.life = role.life, None
      if life is not None:
        life.threads.clear()
        life.shell.forget()
    self.kernel.forget()
    self.checker.__dict__.clear()
    self.store.__dict__.clear()
    self.__dict__.clear()

  def resolved(self) -> bool:
    """Whether nothing published waits for anything but a quorum."""
    self.unresolved = ""
    for role in self.islands:
      shell = role.life.shell if role.life else None
      if shell is None and self.checker.deaths.may_be_given_up(role):
        continue
      if shell is None or not shell.draining:
        self.unresolved = f"{role.name} has not drained"
      elif shell.outbox.waiting or shell.outbox.busy:
        self.unresolved = f"{role.name} has not published all"
    for role in self.seats:
      if role.life is None and not self.checker.deaths.may_be_given_up(role):
        self.unresolved = f"{role.name} is not started again"
    if self.checker.deaths.is_over():
      self.unresolved = "too few are left, and the run has not ended"
    self.unresolved = self.unresolved or self.contributions_left()
    return not self.unresolved

  def contributions_left(self) -> str:
    """What waits although there is a quorum of it; empty if nothing does."""
    waiting: dict[int, set[int]] = {}
    for name in self.store.directories["contributions"]:
      fragment, island = map(int, name.split(".")[:2])
      waiting.setdefault(fragment, set()).add(island)
    for fragment, islands in waiting.items():
      if len(islands) >= self.schedule.quorum:
        return (
          f"contributions of islands {sorted(islands)} to fragment {fragment}"
          " wait"
        )
    return ""


def _draws(name: str) -> int:
  kind, _, number = name.partition("-")
  return {"syncer": 61, "standby": 62, "controller": 63}.get(kind, 0) + int(
    number or 0
  )


def _cut_off(roles: list[kernel_lib.Role], sign: int) -> None:
  for role in roles:
    role.cut_off = max(0, role.cut_off + sign)


def core_settings(schedule: schedules.Schedule) -> core.Settings:
  """Policies of a schedule's syncers."""
  policy: grace.GracePolicy
  if schedule.grace == "adaptive":
    policy = grace.AdaptiveGrace(schedule.overlap_steps, 0.8)
  else:
    policy = grace.FixedGrace(float(schedule.grace))
  return core.Settings(
    schedule.fragments,
    quorum.MinimumQuorum(schedule.quorum),
    policy,
    schedule.max_staleness,
    stale_opens=schedule.own_answers,
    retry_secs=World.times.retry_secs,
  )
