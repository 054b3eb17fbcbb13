"""Goodput: chip-seconds of useful training over chip-seconds allocated.

Useful are the seconds each step needs, its compute or its pace if its speed is
emulated, of all steps that were not in vain: lost with an island, done again or
rolled back; a step in vain for some of its fragments counts for the others.
Allocated is the wall time of all sessions of the run, start-up, evaluation and
outages included, for every island of the fleet; an island that came later
counts from when it came. Both are multiplied by the chips of the island, those
of one job by its slices, and what is useful of an elastic job by the share of
its slices that were there.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

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
  lost_spans: Mapping[int, Sequence[painting.LifeSpan]],
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
    kept = 1.0 - _lost_share(one, lost_spans.get(island, ()), num_fragments)
    busy = one.steps.column("busy_secs")
    lives = one.steps.column("incarnation")
    there = np.array([one.lives[life].share for life in lives.tolist()])
    useful += chips * float(np.nansum(busy * kept * there))
    allocated += chips * _allocated_secs(view, one)
    lost["in vain"] += chips * float(np.nansum(busy * (1.0 - kept) * there))
    lost["slices away"] += chips * float(np.nansum(busy * (1.0 - there)))
    lost["stalls"] += chips * one.stall_secs
    for span in one.spans(view.last_wall_secs):
      if span.state != "training":
        lost[span.state] += chips * _on_secs(view, span)
  lost["other"] = max(allocated - useful - sum(lost.values()), 0.0)
  causes = {cause: secs for cause, secs in lost.items() if secs > 0}
  return Goodput(useful, allocated, causes)


def _on_secs(view: view_lib.RunView, span: island_view.Span) -> float:
  """How long a span lasted while the run was on."""
  return sum(
    max(min(session.end, span.end) - max(session.start, span.start), 0.0)
    for session in view.sessions.all
  )


def _lost_share(
  island: island_view.IslandView,
  spans: Sequence[painting.LifeSpan],
  num_fragments: int,
) -> np.ndarray:
  """Returns for each row of steps the share of its fragments that was lost."""
  steps = island.steps.column("step")
  counts = island.steps.column("count")
  lives = island.steps.column("incarnation")
  lost = np.zeros(len(steps))
  for incarnation, first, last in spans:
    inside = np.minimum(steps, last) - np.maximum(steps - counts, first)
    lost += (lives == incarnation) * np.maximum(inside, 0.0) / counts
  return np.minimum(lost / num_fragments, 1.0)


def _allocated_secs(
  view: view_lib.RunView, island: island_view.IslandView
) -> float:
  born = [life.born for life in island.lives.values() if life.born is not None]
  came = -np.inf
  if island.island >= view.initial_islands and born:
    came = min(born)
  return sum(
    max(session.end - max(session.start, came), 0.0)
    for session in view.sessions.all
  )
