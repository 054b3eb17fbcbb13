"""The default times against the published cells, and how they are found."""

import dataclasses

import numpy as np
import pytest

from diloco.planning.fleet import defaults, scenario, simulator
from diloco.planning.fleet import fleet as fleet_lib
from experiments.benchmarks import calibrate

FEW = 8_000  # failures in each cell: half a point of noise


def test_defaults_reproduce_the_ten_published_cells():
  found = calibrate.cells(defaults.Times(), num_failures=FEW)
  errors = np.abs(found - np.array(calibrate.RIGID + calibrate.ELASTIC))
  assert errors.mean() < 1.5
  assert errors.max() < 4


def test_some_island_trains_when_one_job_of_all_chips_would_stand_still():
  uptime = {}
  for islands in (1, 8):
    fleet = fleet_lib.Fleet(chips=1_200_000, islands=islands)
    facts = simulator.simulate_seed(
      scenario.Scenario(fleet=fleet, days=3, windows=0), 0
    )
    uptime[islands] = facts.uptime
  assert uptime[1] < 0.9
  assert uptime[8] == pytest.approx(1, abs=1e-3)


def test_islands_are_like_one_elastic_job_with_fewer_chips():
  islands = scenario.Scenario(
    fleet=fleet_lib.Fleet(chips=1_200_000, islands=4), days=3, windows=0
  )
  alone = scenario.Scenario(
    fleet=fleet_lib.Fleet(chips=300_000), days=6, windows=0
  )
  found = simulator.simulate_seed(islands, 0).goodput
  assert found == pytest.approx(
    simulator.simulate_seed(alone, 0).goodput, abs=0.01
  )


def test_a_fit_that_begins_at_round_times_comes_to_the_defaults():
  guess = dataclasses.replace(defaults.Times(), **calibrate.GUESS)
  found = calibrate.fit(rounds=12, num_failures=1000)
  before = calibrate.cells(guess, num_failures=1000)
  wrong = np.abs(before - np.array(calibrate.RIGID + calibrate.ELASTIC)).mean()
  assert found.mean_error < 2 < 5 < wrong
  for name, share in found.relative_errors.items():
    assert 0 < share < 2
    log = np.log(getattr(found.times, name) / getattr(defaults.Times(), name))
    assert abs(log) < 2 * share


def test_constant_cost_cannot_reproduce_the_cells():
  """Why coalescing is modelled: the best constant misses by twice as much."""
  secs = np.array([fleet_lib.SECS_PER_YEAR / c for c in calibrate.CHIPS])
  for row in (calibrate.RIGID, calibrate.ELASTIC):
    best = min(
      np.abs(100 * secs / (secs + cost) - row).mean()
      for cost in np.linspace(5, 150, 300)
    )
    assert best > 1.5
