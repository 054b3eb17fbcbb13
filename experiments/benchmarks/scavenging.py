"""Extra capacity for part of a run: time to a token budget.

Question: a fleet of 1.2 million chips needs 20 days. From day 5 to day 15 there
are 25 to 300 % more chips to be had. How much sooner is it done, as one elastic
job and as 8 islands to which further islands are added? The extra chips are
either like the fleet's, or of a kind 40 % slower.

`ideal` is the time if extra chips trained as well as the fleet's own do.

Command: `python -m experiments.benchmarks.scavenging`. Two minutes on one core.
Paper: Decoupled DiLoCo, arXiv 2604.21428.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from diloco.planning.fleet import fleet as fleet_lib
from diloco.planning.fleet import jobs, outcome, simulator
from diloco.planning.fleet import scenario as scenario_lib

CHIPS = 1_200_000
SHARES = (0.25, 0.5, 1.0, 2.0, 3.0)
DAYS, START_DAY, END_DAY = 20.0, 5.0, 15.0
_DAY = fleet_lib.SECS_PER_DAY


def run(
  shares: Sequence[float] = SHARES,
  seeds: Sequence[int] = (0, 1, 2),
  chips: int = CHIPS,
) -> dict[str, Any]:
  """Runs the study.

  Args:
    shares: extra capacity as a share of the fleet.
    seeds: of the simulations.
    chips: of the fleet.

  Returns:
    For each way to train, speed of extra chips and share: days to the budget,
    the same if extra chips were ideal, and the share of the ideal saving.
  """
  rows = []
  for name, islands in (("elastic", 1), ("islands", 8)):
    plain = [_goodput(chips, islands, seed) for seed in seeds]
    for speed in (1.0, 0.6):
      for share in shares:
        extra = fleet_lib.Extra(share, START_DAY * _DAY, END_DAY * _DAY, speed)
        days = [
          _days(chips, islands, extra, seed, rate)
          for seed, rate in zip(seeds, plain, strict=True)
        ]
        found, ideal = outcome.interval(days), _ideal(share * speed)
        assert found["mean"] is not None
        rows.append(
          {
            "method": name,
            "extra": share,
            "extra_speed": speed,
            "days": found,
            "ideal_days": ideal,
            "saving_of_ideal": (DAYS - found["mean"]) / (DAYS - ideal),
          }
        )
  return {"chips": chips, "days_without": DAYS, "rows": rows}


def _ideal(extra: float) -> float:
  """Days to what the fleet alone trains in `DAYS`."""
  rest = DAYS - START_DAY
  if rest <= (END_DAY - START_DAY) * (1 + extra):
    return START_DAY + rest / (1 + extra)
  return DAYS - (END_DAY - START_DAY) * extra


def _scenario(
  chips: int, islands: int, extras: tuple[fleet_lib.Extra, ...]
) -> scenario_lib.Scenario:
  fleet = fleet_lib.Fleet(chips=chips, islands=islands, extras=extras)
  return scenario_lib.Scenario(fleet=fleet, days=1.5 * DAYS, windows=0)


def _goodput(chips: int, islands: int, seed: int) -> float:
  scenario = _scenario(chips, islands, ())
  return simulator.simulate_seed(scenario, seed).goodput


def _days(
  chips: int,
  islands: int,
  extra: fleet_lib.Extra,
  seed: int,
  goodput: float,
) -> float:
  scenario = _scenario(chips, islands, (extra,))
  work = goodput * scenario.fleet.num_slices * DAYS * _DAY
  secs = secs_to(scenario, seed, work)
  assert secs is not None
  return secs / _DAY


def secs_to(
  scenario: scenario_lib.Scenario, seed: int, budget: float
) -> float | None:
  """Simulates until a token budget is trained.

  Tokens are counted in slice-seconds at the speed of the fleet's fastest
  slice: what they are in tokens, the model says.

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


if __name__ == "__main__":
  json.dump(run(), sys.stdout, indent=2)
  print()
