"""The plan of a campaign: which faults, in which order, at which coordinates.

A plan is a function of the seed, the number of faults and the size of the
fleet alone. Moments are relative, a pause after the run has recovered from the
fault before, because wall time cannot be repeated.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from diloco import crash, errors

# Kinds of faults and how often each is drawn.
KINDS = {
  "sigkill": 40,  # one role
  "crash_point": 25,  # at a named instant
  "sigstop": 12,  # one role stands still for a while
  "corrupt": 8,  # an object of the store
  "all_islands": 5,  # killed at once
  "everything": 4,  # controller included
  "disk_full": 3,  # of the store, for a while
  "read_only": 3,  # the same
}
NEED_MOUNT = ("disk_full", "read_only")

# Objects whose damage is survived, and the damage. Not survived, and therefore
# not done: a commit record that vanishes (what it held stays pending: nobody
# knows of it), a head or a global version (a return to a cut is what it takes),
# the fragment plan.
DAMAGES = tuple(
  (what, how)
  for what in ("payload", "record", "member", "board")
  for how in ("flip", "truncate", "delete")
  if (what, how) != ("record", "delete")
)

# Points no running fleet passes by itself, and what makes it pass.
TRIGGERS = {
  "after_lease": "kill_leader",
  "mid_fence": "kill_leader",
  "after_fence": "kill_leader",
  "mid_recovery": "kill_island",
  "controller_start_role": "kill_island",
  "mid_restore": "restore",
  "controller_stopping": "end",
}
# Rare passes: the first one is the one.
_ONCE = (
  "after_lease",
  "after_fence",
  "mid_recovery",
  "mid_checkpoint",
  "after_checkpoint",
  "mid_cut",
  "mid_restore",
  "before_cut_complete",
  "controller_start_role",
  "controller_stopping",
)
_MAX_OCCURRENCE = 6
_PAUSE_SECS = (0.2, 3.0)
_HOLD_SECS = (0.5, 4.0)
LEADER = "leader"  # whichever syncer leads at that moment
STANDBY = "standby"  # one that does not


@dataclasses.dataclass(frozen=True)
class Fault:
  """One fault by its coordinates."""

  serial: int  # its number in the plan, from 0
  kind: str  # one of `KINDS`
  # A role ("leader" and "standby" are resolved when it is done), for
  # "corrupt" a class of objects.
  target: str = ""
  point: str = ""  # for "crash_point"
  occurrence: int = 1  # which pass of the point
  damage: str = ""  # for "corrupt"
  pause_secs: float = 0.0  # after the recovery from the fault before
  hold_secs: float = 0.0  # how long a role stands still or the store is shut

  @property
  def ends_run(self) -> bool:
    """Whether it can only happen when a run is wound down."""
    return TRIGGERS.get(self.point) == "end"

  @property
  def trigger(self) -> str:
    """What must be done so that its point is passed; empty if nothing."""
    return TRIGGERS.get(self.point, "")

  def to_json(self) -> dict[str, Any]:
    """Returns its coordinates without those that do not apply."""
    fields = dataclasses.asdict(self)
    return {k: v for k, v in fields.items() if v or k in ("serial", "kind")}


def plan(
  seed: int,
  trials: int,
  num_islands: int,
  kinds: Sequence[str] = tuple(KINDS),
) -> list[Fault]:
  """Returns `trials` faults; the same for the same arguments.

  With at least as many faults as there are crash points, every point is among
  them (if the kind "crash_point" is).

  Raises:
    UserError: there is no such kind.
  """
  for kind in kinds:
    if kind not in KINDS:
      raise errors.UserError(
        f"--kinds={kind}",
        "there is no such kind of fault",
        f"choose of {', '.join(KINDS)}",
      )
  rng = random.Random(seed)
  points = list(crash.POINTS)
  rng.shuffle(points)
  drawn: list[tuple[str, str]] = []
  if "crash_point" in kinds and trials >= len(points):
    drawn = [("crash_point", point) for point in points]
  weights = [KINDS[kind] for kind in kinds]
  for kind in rng.choices(kinds, weights, k=trials - len(drawn)):
    point = rng.choice(points) if kind == "crash_point" else ""
    drawn.append((kind, point))
  rng.shuffle(drawn)
  return [
    _fault(rng, serial, kind, point, num_islands)
    for serial, (kind, point) in enumerate(drawn)
  ]


def _fault(
  rng: random.Random, serial: int, kind: str, point: str, num_islands: int
) -> Fault:
  island = f"island-{rng.randrange(num_islands)}"
  pause_secs = round(rng.uniform(*_PAUSE_SECS), 2)
  hold_secs = round(rng.uniform(*_HOLD_SECS), 2)
  fault = Fault(serial, kind, pause_secs=pause_secs)
  if kind == "crash_point":
    passes = 1 if point in _ONCE else rng.randint(1, _MAX_OCCURRENCE)
    role = island if crash.POINTS[point] == "island" else crash.ANY_ROLE
    return dataclasses.replace(
      fault, target=role, point=point, occurrence=passes
    )
  if kind == "corrupt":
    target, damage = rng.choice(DAMAGES)
    return dataclasses.replace(fault, target=target, damage=damage)
  if kind == "sigkill":
    role = rng.choice([island, island, LEADER, STANDBY, "controller"])
    return dataclasses.replace(fault, target=role)
  if kind == "sigstop":
    role = rng.choice([island, LEADER])
    return dataclasses.replace(fault, target=role, hold_secs=hold_secs)
  if kind in NEED_MOUNT:
    return dataclasses.replace(fault, hold_secs=hold_secs)
  return fault


def share(queue: list[Fault], per_run: int) -> tuple[list[Fault], list[Fault]]:
  """Takes the faults of the next run off the queue; returns them, and the rest.

  A fault that ends a run comes last in it, and there is one at most.
  """
  ending = [fault for fault in queue if fault.ends_run][:1]
  others = [fault for fault in queue if not fault.ends_run]
  taken = others[: per_run - len(ending)]
  chosen = [*taken, *ending]
  return chosen, [fault for fault in queue if fault not in chosen]
