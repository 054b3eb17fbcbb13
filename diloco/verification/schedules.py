"""A schedule: all that determines one simulated run.

The seed gives latencies and speeds; everything that goes wrong is listed, with
its coordinate. Two worlds built from equal schedules go the same way.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from typing import Any

from diloco import errors
from diloco.verification import faults as faults_lib


@dataclasses.dataclass(frozen=True)
class Schedule:
  """One simulated run."""

  seed: int  # of latencies, speeds and clocks
  rounds: int = 20  # versions to commit before the faults stop
  islands: int = 4  # M
  fragments: int = 2  # P
  sync_every: int = 3  # H
  overlap_steps: int = 2  # tau
  quorum: int = 1  # K
  max_staleness: int = 2  # in versions
  adoption: str = "overwrite"  # overwrite, blend or carry
  merge: str = "rda"  # rda, mean or median
  grace: str = "adaptive"  # "adaptive", or the window in seconds
  # Whether islands join rounds that would close without them.
  follow: bool = True
  # How long islands wait for an answer before they go on.
  wait_secs: float = 0.0
  standby: bool = True  # whether a second syncer process waits
  # Whether every single operation takes time; otherwise procedures do.
  fine: bool = False
  cuts: float = 0.0  # seconds between two cuts; 0 for none
  # How often everything is killed once the rounds are done, and the run goes
  # back to its last complete cut, if there is one, and goes on.
  set_back: int = 0
  resumers: int = 1  # controllers that then go on with the run; one of them may
  # Nobody kills everything: the run's own controller goes back to a cut when a
  # version is spoiled. A restorer's faults at operations strike it then,
  # counted from its return's first.
  within: bool = False
  # The run goes on in another directory then, or after its session's end. A
  # restorer is a user who has it go on there.
  moves: bool = False
  # Whether the controller kills who is silent for long.
  supervised: bool = False
  # Whether the user ends the session once the rounds are done, in order, and
  # goes on with the run in another.
  ends: bool = False
  # Inner steps, of all islands, after which the session ends by itself instead,
  # with a last evaluation; 0 for never.
  budget: int = 0
  # In a row, after which the controller gives a role up; 0 for never.
  restarts: int = 0
  spares: int = 0  # slices beside those of the islands
  faults: tuple[faults_lib.Fault, ...] = ()  # what goes wrong

  def to_json(self) -> str:
    """One line that `from_json` understands."""
    fields = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if getattr(self, field.name) != field.default
    }
    fields["faults"] = [list(fault) for fault in self.faults]
    return json.dumps(fields, separators=(",", ":"))

  @classmethod
  def from_json(cls, text: str) -> Schedule:
    """Parses what `to_json` gave.

    Raises:
      UserError: it is no schedule.
    """
    try:
      fields: Mapping[str, Any] = json.loads(text)
      listed = tuple(faults_lib.Fault(*fault) for fault in fields["faults"])
      return _checked(cls(**{**fields, "faults": listed}))
    except (ValueError, KeyError, TypeError) as error:
      raise errors.UserError(
        "--schedule", f"it is no schedule ({error})", "copy the whole line"
      ) from error

  def replace(self, **changes: Any) -> Schedule:
    """The same schedule with some fields changed."""
    return dataclasses.replace(self, **changes)

  @property
  def own_answers(self) -> bool:
    """As of a run's configuration."""
    alone = self.quorum < self.islands
    return self.adoption != "carry" and alone and self.wait_secs > 0

  @property
  def roles(self) -> tuple[str, ...]:
    """Names of all roles."""
    islands = tuple(f"island-{m}" for m in range(self.islands))
    seats = ("syncer", "standby") if self.standby else ("syncer",)
    resumers = range(2, self.resumers + 1)
    restorers = ("restorer", *(f"restorer-{n}" for n in resumers))
    return (
      *islands,
      *seats,
      "controller",
      *(restorers if self.set_back or self.moves else ()),
    )

  @property
  def targets(self) -> tuple[str, ...]:
    """What a fault can strike: "" for all, a role or a fragment."""
    fragments = tuple(f"fragment-{p}" for p in range(self.fragments))
    return ("", *self.roles, *fragments)


def _checked(schedule: Schedule) -> Schedule:
  for fault in schedule.faults:
    spoiling = fault.kind in faults_lib.SPOILING
    known = fault.kind in (
      *(*faults_lib.AT_OPERATION, *faults_lib.AT_TIME),
      *(faults_lib.KILL_ENDING, *faults_lib.OF_THE_ASKED),
      *(*faults_lib.EXITS, faults_lib.BAD_SLICE, faults_lib.MACHINE_LOST),
    )
    if not (known or spoiling) or fault.role not in schedule.targets:
      raise ValueError(f"unknown fault or role in {fault}")
    if spoiling != fault.role.startswith("fragment-"):
      raise ValueError(f"{fault.kind} cannot strike {fault.role or 'all'}")
    if fault.kind in faults_lib.OUTLYING and not fault.secs > 0:
      raise ValueError(f"{fault.kind} needs a factor above 0")
    if spoiling and not schedule.set_back:
      raise ValueError(f"{fault.kind} needs set_back")
  for name in ("rounds", "islands", "fragments", "sync_every", "quorum"):
    if getattr(schedule, name) < 1:
      raise ValueError(f"{name} must be at least 1")
  if schedule.set_back < 0:
    raise ValueError("set_back cannot be negative")
  if schedule.resumers not in (1, 2):
    raise ValueError("resumers must be 1 or 2")
  if schedule.restarts and schedule.set_back:
    raise ValueError("restarts and set_back exclude each other")
  if schedule.ends and (schedule.restarts or schedule.set_back):
    raise ValueError("ends excludes restarts and set_back")
  if schedule.budget and not schedule.ends:
    raise ValueError("budget needs ends")
  if schedule.moves and (schedule.within or schedule.set_back > 1):
    raise ValueError("moves excludes within, and more than one set_back")
  if schedule.moves and not (schedule.set_back or schedule.ends):
    raise ValueError("moves needs set_back or ends")
  if schedule.within and (schedule.resumers > 1 or not schedule.set_back):
    raise ValueError("within needs set_back, and one resumer")
  bad = sum(f.kind == faults_lib.BAD_SLICE for f in schedule.faults)
  if bad > schedule.spares:
    raise ValueError("more bad slices than spares")
  if schedule.fragments > schedule.sync_every:
    raise ValueError("more fragments than steps between two syncs")
  return schedule


def draw(
  seed: int, *, may_wait: bool = True, may_return: bool = True
) -> Schedule:
  """Draws the schedule of a seed.

  Args:
    seed: whose.
    may_wait: whether islands that wait are drawn.
    may_return: whether returns to a cut from within are, roles given up, and
      sessions that end.
  """
  rng = random.Random(seed)
  uniform = rng.random
  islands = 4 if uniform() < 0.7 else 1 + int(uniform() * 4)
  fragments = 1 + int(uniform() * 3)
  sync_every = fragments + int(uniform() ** 2 * 3)
  base = Schedule(
    seed=seed,
    islands=islands,
    fragments=fragments,
    sync_every=sync_every,
    overlap_steps=1 + int(uniform() * 2),
    quorum=1 + int(uniform() ** 2 * islands),
    max_staleness=int(uniform() * 4),
    adoption=("overwrite", "carry", "blend")[int(uniform() * 3)],
    grace="adaptive" if uniform() < 0.8 else "0.2",
    follow=uniform() < 0.8,
    standby=uniform() < 0.9,
    fine=uniform() < 0.08,
    cuts=1.5 + round(3 * uniform(), 3) if uniform() < 0.18 else 0.0,
  )
  if base.cuts and uniform() < 0.6:
    base = base.replace(set_back=1, rounds=14)
  count = 0 if uniform() < 0.05 else 1 + int(uniform() ** 2 * 9)
  # About as long as twenty rounds take.
  horizon = 20.0 * sync_every / fragments * 0.5
  # Syncers twice: what goes wrong there is harder to survive.
  roles = base.roles + base.roles[islands:-1]
  drawn = faults_lib.draw(rng, roles, count, horizon, 100)
  if base.set_back and uniform() < 0.5:
    kind = (faults_lib.KILL_BEFORE, faults_lib.KILL_AFTER)[rng.random() < 0.5]
    at = float(1 + int(uniform() * 60))
    drawn = (*drawn, faults_lib.Fault(kind, "restorer", at))
  if base.set_back and uniform() < 0.25:
    spoiling = faults_lib.draw_spoiling(rng, fragments, horizon)
    drawn = (*drawn, spoiling)
    # It ends the rounds, which may be done before there is a cut.
    base = base.replace(rounds=30)
  # Of their own source, so that what was drawn before stays what it was.
  rng = random.Random(seed + (1 << 40))
  drawn += faults_lib.draw_outliers(rng, islands, fragments, horizon)
  draw = rng.random()
  method = "rda" if draw < 0.7 else "mean" if draw < 0.85 else "median"
  if rng.random() < 0.1:
    drawn += faults_lib.draw_unlisted(rng, islands, horizon / 2)
  drawn += faults_lib.draw_unexpected(rng, base.roles, 100)
  drawn += faults_lib.draw_rare(rng, base.roles, horizon)
  if base.cuts:
    drawn += faults_lib.draw_around_cuts(rng, base.roles, horizon)
  if base.set_back and base.rounds < 30 and rng.random() < 0.2:
    drawn += faults_lib.draw_long_spoiling(rng, fragments, horizon)
    base = base.replace(rounds=30)
  if rng.random() < 0.06 and may_wait:
    wait_secs = 1.0 + round(3 * rng.random(), 3)
    base = base.replace(
      fragments=1,
      quorum=islands if rng.random() < 0.6 else base.quorum,
      adoption="overwrite",
      wait_secs=wait_secs,
    )
    drawn = tuple(f for f in drawn if f.role in base.targets)
  # Of a source of their own again.
  rng = random.Random(seed + (1 << 41))
  if base.set_back and rng.random() < 0.4:
    base = base.replace(resumers=2)
    drawn += faults_lib.draw_deposing(rng)
  rng = random.Random(seed + (1 << 42))
  if rng.random() < 0.15:
    base = base.replace(supervised=True)
    drawn += faults_lib.draw_hanging(rng, base.roles, horizon)
  rng = random.Random(seed + (1 << 43))
  alone = base.set_back and base.resumers == 1
  if alone and may_return and rng.random() < 0.3:
    base = base.replace(within=True, rounds=30)
    drawn += faults_lib.draw_long_spoiling(rng, base.fragments, horizon)
    drawn += faults_lib.draw_returning(rng)
  rng = random.Random(seed + (1 << 44))
  if may_return and not base.set_back and rng.random() < 0.04:
    base = base.replace(restarts=1 + int(2 * rng.random()))
    drawn += faults_lib.draw_fatal(rng, base.roles, base.restarts, horizon)
  rng = random.Random(seed + (1 << 45))
  free = not base.set_back and not base.restarts
  if may_return and free and rng.random() < 0.08:
    base = base.replace(ends=True)
    drawn += faults_lib.draw_ending(rng, base.roles)
  rng = random.Random(seed + (1 << 46))
  drawn += faults_lib.draw_near(rng, base.roles, base.cuts > 0)
  rng = random.Random(seed + (1 << 47))
  free = free and not base.ends
  if may_return and free and rng.random() < 0.05:
    # In rounds like those that are wanted, or before they are done.
    steps = 20 * islands * sync_every / base.fragments
    base = base.replace(
      ends=True, budget=int(steps * (0.4 + 0.6 * rng.random()))
    )
    drawn += faults_lib.draw_ending(rng, base.roles)
    drawn += faults_lib.draw_asked(rng, base.supervised)
  rng = random.Random(seed + (1 << 48))
  free = not base.set_back and not base.ends
  if may_return and free and rng.random() < 0.06:
    drawn += faults_lib.draw_exits(rng, base.roles)
  if may_return and free and rng.random() < 0.04:
    base = base.replace(spares=1 + int(2 * rng.random()))
    drawn += faults_lib.draw_bad_slices(rng, islands, base.spares)
  rng = random.Random(seed + (1 << 49))
  spoils = any(f.kind in faults_lib.SPOILING for f in drawn)
  alone = base.set_back == 1 and not (spoils or base.within)
  share = 0.4 if alone else 0.15
  if may_return and (alone or base.ends) and rng.random() < share:
    users = max(base.resumers, 1 + int(1.4 * rng.random()))
    base = base.replace(moves=True, resumers=users)
    drawn += faults_lib.draw_moving(rng, base.resumers, base.ends)
  return dataclasses.replace(base, merge=method, faults=drawn)
