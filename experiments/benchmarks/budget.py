"""How long a fleet takes to a token budget.

Tokens are counted in slice-seconds at the speed of the fleet's fastest slice:
what they are in tokens, the model says.
"""

from collections.abc import Iterator

import numpy as np

from diloco.planning.fleet import fleet as fleet_lib
from diloco.planning.fleet import jobs, outcome, simulator
from diloco.planning.fleet import scenario as scenario_lib


def secs_to(
  scenario: scenario_lib.Scenario, seed: int, budget: float
) -> float | None:
  """Simulates until a token budget is trained.

  Args:
    scenario: its horizon is the longest time to wait.
    seed: of the simulation.
    budget: slice-seconds at speed 1.

  Returns:
    Seconds, or None if the horizon was too short.
  """
  result = simulator.simulate_seed(scenario, seed)
  moments, changes = [], []
  for m, job in enumerate(result.jobs):
    for start, end, rate in _rates(scenario.fleet, m, job):
      moments += [start, end]
      changes += [rate, -rate]
  order = np.argsort(moments, kind="stable")
  times = np.array(moments)[order]
  rates = np.cumsum(np.array(changes)[order])
  trained = np.concatenate(([0.0], np.cumsum(np.diff(times) * rates[:-1])))
  if trained[-1] < budget:
    return None
  last = int(np.searchsorted(trained, budget)) - 1
  return float(times[last] + (budget - trained[last]) / rates[last])


def _rates(
  fleet: fleet_lib.Fleet, number: int, job: outcome.Job
) -> Iterator[tuple[float, float, float]]:
  """Yields (start, end, tokens a second) of stretches of training."""
  history = job.history
  first, last = fleet.block(number) if number < fleet.islands else (0, 0)
  slices = (last - first) or round(
    history.allocated / max(history.end_secs - history.start_secs, 1e-9)
  )
  stretches = list(_stretches(history, slices))
  trained = sum((end - start) * size for start, end, size in stretches)
  kept = history.useful / trained if trained else 0.0
  for start, end, size in stretches:
    pace = job.pace
    if fleet.islands == 1:  # all wait for the slowest of those that are there
      there = [
        e.speed for e in fleet.extras if e.start_secs <= start < e.end_secs
      ]
      pace = min([pace, *there])
    yield start, end, size * pace * kept


def _stretches(
  history: jobs.History, slices: int
) -> Iterator[tuple[float, float, int]]:
  """Yields (start, end, active slices) between pauses."""
  stops: list[float] = []
  end = -1.0
  for begin, until, _ in history.pauses:
    if begin != end:
      stops.append(begin)
    end = until
  starts = [(history.start_secs, slices), *history.sizes]
  if len(stops) < len(starts):  # it was training at the end
    stops.append(history.end_secs)
  for (start, size), stop in zip(starts, stops, strict=True):
    yield start, stop, size
