"""Whole simulations: what must hold of every scenario."""

import dataclasses
import json
import weakref

import numpy as np
import pytest

from diloco import config as config_lib
from diloco import errors
from diloco.planning.fleet import (
  defaults,
  failures,
  outcome,
  scenario,
  simulator,
  timeline,
  traffic,
)
from diloco.planning.fleet import fleet as fleet_lib
from experiments.benchmarks import scavenging

SMALL = scenario.Scenario(
  fleet=fleet_lib.Fleet(chips=100_000, islands=4),
  days=2,
  windows=2,
  window_steps=40,
)


def change(**fields):
  return dataclasses.replace(SMALL, **fields)


def goodput(one, seed=0):
  return simulator.simulate_seed(one, seed).goodput


def test_same_seed_same_outcome_and_other_seed_another():
  first = simulator.simulate(SMALL, [0, 1])
  assert first == simulator.simulate(SMALL, [0, 1])
  assert goodput(SMALL, 0) != goodput(SMALL, 1)


def test_goodput_and_losses_add_up():
  one = change(
    stragglers=scenario.Stragglers(mtbi_years=1.0),
    links=traffic.Links(lockstep=True, jitter=0.2),
    sync=config_lib.SyncConfig(quorum=4, follow=False),
    fleet=fleet_lib.Fleet(
      chips=100_000, islands=4, speed_spread=0.05, speeds=(1.0, 0.9)
    ),
  )
  result = simulator.simulate_seed(one, 0)
  assert result.goodput + sum(result.losses.values()) == pytest.approx(1)
  assert result.losses["stragglers"] > 0 and result.losses["rounds"] > 0


def test_island_that_stands_still_is_not_also_waiting():
  model = failures.FailureModel(mtbi_years=0, site_mtbi_years=3e-5)
  one = scenario.Scenario(
    fleet=fleet_lib.Fleet(2048, islands=8, slices=8),
    failures=dataclasses.replace(model, group_repair_secs=600),
    sync=config_lib.SyncConfig(quorum=8, grace="0", follow=False),
    links=traffic.Links(lockstep=True, publish_secs=2),
    days=0.1,
  )
  result = simulator.simulate_seed(one, 0)
  assert 0.5 < result.waiting < 1
  assert result.goodput + sum(result.losses.values()) == pytest.approx(1)


def test_low_and_high_enclose_the_mean():
  facts = simulator.simulate(change(windows=0), [0, 1, 2])
  for name in ("goodput", "uptime"):
    value = facts[name]
    assert 0 < value["low"] <= value["mean"] <= value["high"] <= 1
  json.dumps(facts, allow_nan=False)


def test_many_seeds_are_not_all_in_memory(monkeypatch):
  simulate_seed, alive = simulator.simulate_seed, weakref.WeakSet()

  def once(scenario, seed):
    assert len(alive) <= 1  # the one before, until this one takes its place
    made = simulate_seed(scenario, seed)
    alive.add(made)
    return made

  monkeypatch.setattr(simulator, "simulate_seed", once)
  monkeypatch.setattr(outcome.Outcome, "__hash__", object.__hash__)
  assert simulator.simulate(change(), range(5))["seeds"] == [*range(5)]


def test_goodput_falls_with_chips_and_rises_with_reliability():
  sizes = [
    goodput(change(fleet=fleet_lib.Fleet(chips=chips), windows=0))
    for chips in (50_000, 200_000, 800_000)
  ]
  assert sizes[0] > sizes[1] > sizes[2]
  years = [
    goodput(change(failures=failures.FailureModel(mtbi_years=y), windows=0))
    for y in (0.25, 1, 4)
  ]
  assert years[0] < years[1] < years[2]


def test_more_islands_never_deliver_less():
  found = [
    goodput(change(fleet=fleet_lib.Fleet(400_000, m), windows=0))
    for m in (1, 2, 4, 8)
  ]
  assert found == sorted(found)


def test_rigid_job_delivers_less_than_an_elastic_one():
  one = change(fleet=fleet_lib.Fleet(200_000), windows=0)
  assert goodput(dataclasses.replace(one, elastic=False)) < goodput(one)


@pytest.mark.parametrize(
  "name", ["downscale_secs", "upscale_secs", "repair_scale_secs"]
)
def test_slower_recovery_delivers_less(name):
  times = defaults.Times()
  slow = dataclasses.replace(times, **{name: 3 * getattr(times, name)})
  assert goodput(change(times=slow, windows=0)) < goodput(change(windows=0))


def test_without_failures_all_is_useful():
  never = failures.FailureModel(mtbi_years=0)
  result = simulator.simulate_seed(change(failures=never), 0)
  assert result.goodput == 1 and result.uptime == 1 and result.failures == 0


def test_job_goes_at_the_pace_of_its_slowest_slice():
  never = failures.FailureModel(mtbi_years=0)
  fleet = fleet_lib.Fleet(chips=2560, speeds=(1.0, 0.5))
  one = scenario.Scenario(fleet=fleet, failures=never, days=1)
  assert goodput(one) == pytest.approx(0.75)
  islands = dataclasses.replace(fleet, islands=2)
  assert goodput(dataclasses.replace(one, fleet=islands, windows=0)) == 1


def test_islands_have_their_own_speeds_where_slices_do_not_divide():
  never = failures.FailureModel(mtbi_years=0)
  fleet = fleet_lib.Fleet(2560, islands=3, slices=10, speeds=(0.5, 1.0, 0.8))
  one = change(fleet=fleet, failures=never, windows=0)
  found = simulator.simulate_seed(one, 0).jobs
  assert [(job.pace, job.share) for job in found] == [
    *((0.5, 1.0), (1.0, 1.0), (0.8, 1.0))
  ]


@pytest.mark.parametrize(
  ("speed", "extras", "share"),
  [
    (1.0, [(0.1, 0.5), (0.1, 0.5)], (100 * 0.5 + 20) / 120),
    (0.5, [(1.0, 1.0)], (100 + 100 * 0.5) / 200),
    (0.5, [(0.5, 0.5)], 1.0),
  ],
)
def test_job_with_extra_slices_goes_at_the_pace_of_the_slowest(
  speed, extras, share
):
  end = SMALL.horizon_secs
  fleet = fleet_lib.Fleet(
    *(25_600, 1, 100, 4, (speed,)),
    extras=tuple(fleet_lib.Extra(n, 0.0, end, of) for n, of in extras),
  )
  never = failures.FailureModel(mtbi_years=0)
  times = defaults.Times(upscale_secs=0)
  found = goodput(change(fleet=fleet, failures=never, times=times))
  assert found == pytest.approx(share)


def test_uptime_counts_time_in_which_any_island_trains():
  model = failures.FailureModel(mtbi_years=0, site_mtbi_years=0.01)
  fleet = fleet_lib.Fleet(chips=512, islands=2, slices=2)
  one = scenario.Scenario(fleet=fleet, failures=model, days=100, windows=0)
  result = simulator.simulate_seed(one, 0)
  down = 1 - result.goodput
  assert result.losses["outage"] > 0.01
  # Sites fail each for itself, so both are out about as often as that.
  assert 1 - result.uptime < 3 * down * down
  alone = dataclasses.replace(fleet, islands=1, slices=1)
  single = simulator.simulate_seed(dataclasses.replace(one, fleet=alone), 0)
  assert single.uptime == pytest.approx(single.goodput, abs=1e-4)


def test_rounds_are_whole_when_short_and_sampled_when_long():
  short = simulator.simulate(change(days=0.05), [0])["rounds"]
  long = simulator.simulate(SMALL, [0])["rounds"]
  assert short["windows"] == 1 and short["covered"] == 1
  assert long["windows"] == 2 and long["covered"] < 0.01
  assert long["contributors_error"] is not None
  assert short["contributors_error"] is None


def test_windows_longer_than_the_horizon_are_the_whole_of_it(monkeypatch):
  monkeypatch.setattr(simulator, "_WHOLE_STEPS", 100)
  found = simulator.simulate(change(days=0.005, window_steps=400), [0])
  rounds = found["rounds"]
  assert rounds["covered"] == 1 and rounds["secs"] == pytest.approx(432)


def test_error_of_few_windows_is_that_of_student():
  tallies = []
  for size in (4, 6, 8):
    made = traffic.Tally(*np.zeros((4, 1)))
    made.contributors[size] += 1
    tallies.append(made)
  found = outcome._windows(tallies, [1.0])["contributors_error"]
  # Three values: t(2, 0.975) = 4.30265, s / sqrt(3) = 2 / sqrt(3).
  assert found == pytest.approx(4.30265 * 2 / 3**0.5, rel=1e-5)


def test_syncer_outages_cost_merges_but_no_goodput():
  model = failures.FailureModel(
    mtbi_years=0, syncer_mtbi_days=0.005, syncer_outage_secs=200
  )
  never = failures.FailureModel(mtbi_years=0)
  out = simulator.simulate_seed(change(days=0.05, failures=model), 0)
  well = simulator.simulate_seed(change(days=0.05, failures=never), 0)
  assert out.goodput == 1
  assert out.tallies[0].merges < 0.9 * well.tallies[0].merges


def test_extra_islands_speed_a_budget_up_and_slow_slices_hold_a_job_back():
  extra = fleet_lib.Extra(1.0, 0.25 * 86_400, 86_400, speed=0.5)
  secs = {}
  for islands in (1, 4):
    for extras in ((), (extra,)):
      fleet = fleet_lib.Fleet(100_000, islands, extras=extras)
      one = change(fleet=fleet, windows=0)
      work = 0.5 * 86_400 * fleet.num_slices
      secs[islands, len(extras)] = scavenging.secs_to(one, 0, work)
  assert secs[4, 1] < 0.9 * secs[4, 0]
  assert secs[1, 1] > 0.97 * secs[1, 0]
  assert scavenging.secs_to(change(windows=0), 0, 1e12) is None


def test_timeline_spends_all_time_of_every_island():
  history = simulator.simulate_seed(change(windows=0), 0).jobs[0].history
  shares = timeline.shares(history, 0, SMALL.horizon_secs, 50)
  assert shares.sum(axis=0) == pytest.approx(np.ones(50))
  paused = shares[1:5].sum() * SMALL.horizon_secs / 50
  assert paused == pytest.approx(sum(b - a for a, b, _ in history.pauses))


def test_interval_leaves_out_what_is_not_known():
  nothing = outcome.interval([float("nan")])
  assert nothing == {"mean": None, "low": None, "high": None}
  assert outcome.interval([1.0, 3.0]) == {"mean": 2.0, "low": 1.0, "high": 3.0}


@pytest.mark.parametrize("days", [0.001, 1e-9])
def test_too_short_a_time_is_refused(days):
  with pytest.raises(errors.UserError, match="too short for any failure"):
    scenario.check_length(change(days=days))


def test_steps_between_publications_that_never_pass_are_refused():
  def asked(**fields):
    sync = dataclasses.replace(SMALL.sync, every=10**15)
    scenario.check_length(change(sync=sync, **fields))

  with pytest.raises(errors.UserError, match="islands would publish every"):
    asked()
  asked(windows=0)  # no rounds are followed
