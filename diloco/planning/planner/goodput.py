"""Expected goodput of the islands of a plan, by the fleet simulator.

An island is an elastic job that nobody else waits for, so each is followed on
its own over two thousand of its failures, whatever the length of the run. The
interval is two standard errors of the mean over seeds: it says how well the
simulation has converged, not how much luck one run has.
"""

import functools
from collections.abc import Sequence

import numpy as np

from diloco.planning.fleet import defaults, failures, jobs
from diloco.planning.fleet import fleet as fleet_lib
from diloco.planning.planner import resources
from diloco.planning.planner.efficiency import Interval

_FAILURES = 2000  # of an island, per seed
_ERRORS = 2  # standard errors on either side


def expected(
  islands: Sequence[resources.Island], *, seeds: int, mtbi_factor: float = 1.0
) -> Interval:
  """Useful share of the islands' time, weighted by their speed.

  Over so many seeds, at least 2; chips live `mtbi_factor` times as long as the
  fleet file says.
  """
  total = sum(island.flops for island in islands)
  draws = np.zeros(seeds)
  for island in islands:
    years = mtbi_factor * island.hardware.mtbi_years
    draws += np.array(_of_job(island.chips, island.slices, years, seeds)) * (
      island.flops / total
    )
  mean = float(draws.mean())
  error = _ERRORS * float(draws.std(ddof=1)) / seeds**0.5
  return Interval(mean, max(0.0, mean - error), min(1.0, mean + error))


@functools.cache
def _of_job(
  chips: int, slices: int, mtbi_years: float, seeds: int
) -> tuple[float, ...]:
  """Goodput of one island, for each seed; equal islands are followed once."""
  times = defaults.Times()
  fleet = fleet_lib.Fleet(chips=chips, slices=slices)
  model = failures.FailureModel(mtbi_years=mtbi_years)
  horizon = _FAILURES * mtbi_years * fleet_lib.SECS_PER_YEAR / chips
  found = []
  for seed in range(seeds):
    rng = np.random.default_rng([seed, chips, slices])
    events = failures.sample(model, fleet, times.repair, horizon, rng)
    history = jobs.run(jobs.Shape(slices), times, events, horizon, elastic=True)
    found.append(history.goodput)
  return tuple(found)
