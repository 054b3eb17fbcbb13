"""Incidents: injected faults and deaths nobody ordered, and who felt them.

The claim to check is that an incident on one role holds no other up. So for
each incident and each *surviving* island, one that was training before and
is not the target, the longest gap between two of its steps in a window around
the incident is set against the median of all its gaps.
"""

import bisect
import dataclasses
import math

import numpy as np

from diloco.report import clock as clock_lib
from diloco.report import island_view
from diloco.report import view as view_lib
from diloco.tape import events

_BEFORE_SECS = 1.0
_AFTER_SECS = 10.0
_AFTER_MEDIANS = 10
_ATTRIBUTED_SECS = 120.0  # a death so long after a fault is its effect

_LEADER, _STANDBY = "syncer", "standby"


@dataclasses.dataclass
class Incident:
  """A fault, or a death without one."""

  wall_secs: float  # when it was recorded
  kind: str  # of the fault, or "died"
  target: str  # the role it hit
  injected: bool  # whether the run did it to itself on purpose
  at_tokens: int  # tokens trained by all islands then
  cause: str = ""  # of the death that followed, if one did
  # From here to the target's next step, to the moment a syncer leads again,
  # to a standby's next start, or to where a poisoned island has replaced its
  # values, of the time the run was on; None if there was none.
  back_secs: float | None = None
  # By surviving island, its longest gap around it over its median gap.
  gap_over_median: dict[int, float] = dataclasses.field(default_factory=dict)

  @property
  def island(self) -> int | None:
    """The target's number if it is an island."""
    role, _, number = self.target.partition("-")
    return int(number) if role == "island" and number.isdecimal() else None

  @property
  def worst_gap(self) -> float | None:
    """The longest gap of any survivor, in its medians."""
    return max(self.gap_over_median.values(), default=None)


def find(view: view_lib.RunView) -> list[Incident]:
  """Returns the incidents of a run in the order they happened."""
  found = [
    Incident(
      line["wall_secs"],
      line["kind"],
      line["target"],
      injected=True,
      at_tokens=line.get("at_tokens") or 0,
    )
    for line in view.faults
  ]
  waiting = list(found)
  for line in view.deaths:
    wall, target = line["wall_secs"], _STANDBY
    if line["event"] == events.ISLAND_DIED:
      target = f"island-{line['island']}"
    elif line.get("led", True):
      target = _LEADER
    fault = _cause_of(wall, target, waiting)
    if fault is None:
      tokens = int(view.tokens_at(np.array([wall]))[0])
      fault = Incident(wall, "died", target, False, tokens)
      found.append(fault)
    else:
      waiting.remove(fault)
    fault.cause = str(line.get("cause", ""))
  found.sort(key=lambda incident: incident.wall_secs)
  clock = clock_lib.RunClock(view)
  backs: dict[tuple[str, bool], list[float]] = {}  # one role may die often
  for incident in found:
    hit = incident.target, incident.kind == "poison"
    if hit not in backs:
      backs[hit] = sorted(_backs(view, incident))
    after = bisect.bisect_right(backs[hit], incident.wall_secs)
    for back in backs[hit][after : after + 1]:
      begun = clock.secs_at(incident.wall_secs)
      incident.back_secs = clock.secs_at(back) - begun
    incident.gap_over_median = _gaps(view, incident)
  return found


def _cause_of(
  wall: float, target: str, faults: list[Incident]
) -> Incident | None:
  """Returns the fault a death is the effect of."""
  for fault in faults:
    late = wall - fault.wall_secs
    if fault.target == target and 0 <= late < _ATTRIBUTED_SECS:
      return fault
  return None


def _backs(view: view_lib.RunView, incident: Incident) -> list[float]:
  """Returns all moments at which the target of an incident was back."""
  if incident.kind == "poison":
    # Nobody died: it is over once the island has healed.
    return [wall for wall, m in view.resyncs if m == incident.island]
  if incident.island is None:
    waited = incident.target == _STANDBY
    return list(view.syncer_starts if waited else view.syncer_leads)
  island = view.islands.get(incident.island)
  lives = island.lives.values() if island else ()
  return [life.first_step for life in lives if life.first_step is not None]


def _gaps(view: view_lib.RunView, incident: Incident) -> dict[int, float]:
  gaps = {}
  for number, island in view.islands.items():
    if number == incident.island or not _trained_at(island, incident):
      continue
    median = island.percentile("gap_secs", 50)
    if not median:
      continue
    longest = _longest_gap(view, island, incident.wall_secs, median)
    if longest is not None:
      gaps[number] = longest / median
  return gaps


def _trained_at(island: island_view.IslandView, incident: Incident) -> bool:
  """Whether an island was in the middle of a life then."""
  for life in island.lives.values():
    gone = [m for m in (life.died, life.stopped) if m is not None]
    over = min(gone, default=math.inf)
    if life.first_step is not None and (
      life.first_step <= incident.wall_secs < over
    ):
      return True
  return False


def _longest_gap(
  view: view_lib.RunView,
  island: island_view.IslandView,
  wall_secs: float,
  median: float,
) -> float | None:
  """Returns the longest gap that touches the window around a moment."""
  ends = island.steps.column("wall_secs")
  gaps = island.steps.column("longest_gap")
  # A row of several steps begins where the one before it ended.
  alone = island.steps.column("count") == 1
  before = np.concatenate([[-math.inf], ends])[:-1]
  begins = np.where(alone, ends - gaps, before)
  first = wall_secs - _BEFORE_SECS
  last = wall_secs + max(_AFTER_SECS, _AFTER_MEDIANS * median)
  touching = gaps[(ends >= first) & (begins <= last) & np.isfinite(gaps)]
  longest = touching.tolist()
  training = island.num_steps and island.state == "training"
  if training and island.last_wall_secs <= last:  # a gap still open
    longest.append(view.last_wall_secs - island.last_wall_secs)
  return max(longest, default=None)
