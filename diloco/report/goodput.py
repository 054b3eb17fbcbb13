"""Goodput: chip-seconds of useful training over chip-seconds allocated.

Useful are the seconds each step needs, its compute or its pace if its speed is
emulated, of all steps that were not in vain: lost with an island, done again or
rolled back; a step in vain for some of its fragments counts for the others.
Allocated is the wall time of all sessions of the run, start-up, evaluation and
outages included, for every island of the fleet; an island that came later
counts from when it came. Both are multiplied by the chips of the island, those
of one job by its slices, and what is useful of an elastic job by the share of
its slices that were there. A step of one job is useful as long as it lasts, on
all of these: what a faster slice waits in it for the slowest, and all for the
sum of gradients, is not taken off. So among slices of unequal speed, or over a
slow link, its goodput is no measure of it against islands; tokens a second are.
"""

import collections
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from diloco.report import island_view
from diloco.report import view as view_lib
from diloco.tape import painting


class Goodput(NamedTuple):
  """Chip-seconds of a run."""

  useful_chip_secs: float
  allocated_chip_secs: float
  lost_chip_secs: Mapping[str, float]  # allocated and not useful, by cause

  @property
  def ratio(self) -> float | None:
    """Useful over allocated; None if nothing was allocated."""
    if self.allocated_chip_secs <= 0:
      return None
    return self.useful_chip_secs / self.allocated_chip_secs


def goodput(
  view: view_lib.RunView,
  lost_spans: Mapping[int, Iterable[painting.LifeSpan]],
  num_fragments: int,
) -> Goodput:
  """Sums useful and allocated chip-seconds over all islands.

  `lost_spans` are step ranges trained in vain, one entry for each fragment.
  """
  useful = allocated = 0.0
  lost: collections.defaultdict[str, float] = collections.defaultdict(float)
  for island in range(view.num_islands):
    one = view.islands.get(island) or island_view.IslandView(island)
    chips = one.devices * view.job_slices
    spans: dict[int, list[painting.LifeSpan]] = collections.defaultdict(list)
    for span in lost_spans.get(island, ()):
      spans[span.incarnation].append(span)
    for life in one.lives.values():
      busy = chips * life.busy_secs
      in_vain = _lost_share(life, spans[life.incarnation], num_fragments)
      useful += busy * life.share * (1.0 - in_vain)
      lost["in vain"] += busy * life.share * in_vain
      lost["slices away"] += busy * (1.0 - life.share)
    allocated += chips * view.sessions.secs_on(_came(view, one))
    lost["stalls"] += chips * one.stall_secs
    lost["waiting"] += chips * one.waited_secs
    for stretch in one.spans(view.last_wall_secs):
      if stretch.state != "training":
        on_secs = view.sessions.secs_on(stretch.start, stretch.end)
        lost[stretch.state] += chips * on_secs
  lost["other"] = max(allocated - useful - sum(lost.values()), 0.0)
  causes = {cause: secs for cause, secs in lost.items() if secs > 0}
  return Goodput(useful, allocated, causes)


def _lost_share(
  life: island_view.Life,
  spans: Iterable[painting.LifeSpan],
  num_fragments: int,
) -> float:
  """Returns the share of what a life logged that was lost."""
  begun = life.newest_step - life.steps
  lost = sum(
    max(min(life.newest_step, last) - max(begun, first), 0)
    for _, first, last in spans
  )
  return min(lost / max(num_fragments * life.steps, 1), 1.0)


def _came(view: view_lib.RunView, island: island_view.IslandView) -> float:
  """From when on an island of the fleet counts."""
  if island.island < view.initial_islands:
    return -math.inf
  born = (life.born for life in island.lives.values())
  return min((b for b in born if b is not None), default=-math.inf)
