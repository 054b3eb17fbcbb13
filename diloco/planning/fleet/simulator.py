"""The fleet simulator: a scenario in, goodput and rounds out.

Failures, repairs and every job's way through them are followed over the whole
horizon. Rounds of merging are a thousand times denser: where the horizon is
short they are followed whole, else in windows spread over it, and how much of
it the windows cover is part of the outcome.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from diloco.planning.fleet import failures as failures_lib
from diloco.planning.fleet import fleet as fleet_lib
from diloco.planning.fleet import (
  jobs,
  outcome,
  rounds,
  traces,
  traffic,
)
from diloco.planning.fleet import scenario as scenario_lib

_WHOLE_STEPS = 40_000  # of all islands; up to this many, rounds are not sampled


def simulate(
  scenario: scenario_lib.Scenario, seeds: Sequence[int]
) -> dict[str, Any]:
  """Simulates a scenario under several seeds; returns plain values."""
  outcomes = (simulate_seed(scenario, seed) for seed in seeds)
  facts = outcome.combine(outcomes, scenario.sync.num_fragments)
  facts["seeds"] = list(seeds)
  facts["days"] = scenario.days
  facts["slices"] = scenario.fleet.num_slices
  return facts


def simulate_seed(
  scenario: scenario_lib.Scenario, seed: int
) -> outcome.Outcome:
  """Simulates a scenario under one seed."""
  horizon = scenario.horizon_secs
  events, services, rng = _drawn(scenario, seed)
  found = _jobs(scenario, events, rng)
  tallies, covered = _rounds(scenario, found, services, rng)
  return outcome.Outcome(
    tuple(found),
    tuple(tallies),
    horizon,
    len(events.secs),
    len(services.syncer) + len(services.store),
    covered,
  )


def _drawn(
  scenario: scenario_lib.Scenario, seed: int
) -> tuple[failures_lib.Failures, failures_lib.Services, np.random.Generator]:
  """What fails under a seed, and what is drawn after that."""
  rng, horizon = np.random.default_rng(seed), scenario.horizon_secs
  events = failures_lib.sample(
    scenario.failures, scenario.fleet, scenario.times.repair, horizon, rng
  )
  services = failures_lib.sample_services(scenario.failures, horizon, rng)
  return events, services, rng


def trace(scenario: scenario_lib.Scenario, seed: int) -> list[traces.Entry]:
  """What fails under a seed, slice by slice, for a trace."""
  events, services, _ = _drawn(scenario, seed)
  found = [
    traces.Entry(secs, slice=index, repair_secs=repair_secs)
    for secs, first, last, repair_secs, _ in zip(
      *(column.tolist() for column in events), strict=True
    )
    for index in range(first, last)
  ]
  for service, outages in services._asdict().items():
    found += [
      traces.Entry(start, service=service, repair_secs=end - start)
      for start, end in outages
    ]
  return sorted(found, key=lambda entry: entry.secs)


def _jobs(
  scenario: scenario_lib.Scenario,
  events: failures_lib.Failures,
  rng: np.random.Generator,
) -> list[outcome.Job]:
  fleet = scenario.fleet
  if fleet.islands == 1:
    blocks = fleet.extra_blocks()
    shape = jobs.Shape(
      fleet.num_slices,
      tuple(
        jobs.Block(first, last, extra.start_secs, extra.end_secs)
        for extra, first, last in blocks
      ),
      min_share=scenario.min_share,
    )
    job = _job(scenario, events, 0, shape, 0.0, rng)
    held = _held_back(scenario, job.pace)
    return [dataclasses.replace(job, share=job.share * held)]
  found = []
  for m in range(fleet.islands):
    first, last = fleet.block(m)
    shape = jobs.Shape(last - first, min_share=scenario.min_share)
    part = events.within(first, last)
    found.append(_job(scenario, part, first, shape, 0.0, rng))
  for extra, first, last in scenario_lib.extra_islands(scenario):
    if extra.start_secs >= scenario.horizon_secs:
      continue
    shape = jobs.Shape(
      last - first,
      start_secs=extra.start_secs,
      end_secs=extra.end_secs,
      min_share=scenario.min_share,
    )
    part = events.within(first, last)
    found.append(_job(scenario, part, first, shape, extra.speed, rng))
  return found


def _held_back(scenario: scenario_lib.Scenario, pace: float) -> float:
  """Useful share of a single job that waits for slower extra slices."""
  fleet, horizon = scenario.fleet, scenario.horizon_secs
  allocated, lost = fleet.num_slices * horizon, 0.0
  for extra, first, last in fleet.extra_blocks():
    secs = max(min(extra.end_secs, horizon) - extra.start_secs, 0.0)
    allocated += (last - first) * secs
    lost += fleet.num_slices * secs * max(1 - extra.speed / pace, 0.0)
  return max(1 - lost / allocated, 0.0)


def _job(
  scenario: scenario_lib.Scenario,
  events: failures_lib.Failures,
  first: int,
  shape: jobs.Shape,
  speed: float,
  rng: np.random.Generator,
) -> outcome.Job:
  own = events._replace(first=events.first - first, last=events.last - first)
  history = jobs.run(
    shape, scenario.times, own, scenario.horizon_secs, elastic=scenario.elastic
  )
  pace, share = _pace(scenario.fleet, (first, first + shape.slices), speed, rng)
  share *= _straggling(scenario, history, shape.slices, rng)
  return outcome.Job(history, pace, share)


def _pace(
  fleet: fleet_lib.Fleet,
  block: tuple[int, int],
  speed: float,
  rng: np.random.Generator,
) -> tuple[float, float]:
  """Speed of a synchronous job, and the share of its slices' that is."""
  if not speed and len(set(fleet.speeds)) == 1 and not fleet.speed_spread:
    return fleet.speeds[0], 1.0
  first, last = block
  speeds = np.array(
    [speed or fleet.speed_of(index) for index in range(first, last)]
  )
  if fleet.speed_spread:
    spread = rng.normal(1.0, fleet.speed_spread, len(speeds))
    speeds *= np.maximum(spread, 0.1)
  pace = float(speeds.min())
  return pace, float(np.mean(pace / speeds))


def _straggling(
  scenario: scenario_lib.Scenario,
  history: jobs.History,
  slices: int,
  rng: np.random.Generator,
) -> float:
  """Share of full speed while slices of the job are slow now and then.

  Spells come as a Poisson process of rate r and last d on average, so some
  slice is slow for a share 1 - exp(-r d) of the time; what is drawn is how
  many came, and they overlap as they do in the mean.
  """
  model = scenario.stragglers
  span = history.end_secs - history.start_secs
  if not model.mtbi_years or span <= 0:
    return 1.0
  chips = slices * scenario.fleet.slice_chips
  rate = chips / (model.mtbi_years * fleet_lib.SECS_PER_YEAR)
  spells = rng.exponential(model.secs, rng.poisson(rate * span)).sum()
  slow = -math.expm1(-spells / span)
  return 1 - slow * (1 - model.factor)


def _rounds(
  scenario: scenario_lib.Scenario,
  found: Sequence[outcome.Job],
  services: failures_lib.Services,
  rng: np.random.Generator,
) -> tuple[list[traffic.Tally], float]:
  """Follows rounds, whole or in windows; returns how much they cover."""
  if len(found) == 1 or not scenario.windows:
    return [], 0.0
  horizon = scenario.horizon_secs
  steps = [scenario.times.step_secs / job.pace for job in found]
  config = scenario.config
  outages = services.merged
  if sum(horizon / secs for secs in steps) <= _WHOLE_STEPS:
    spans = [(0.0, 0.0, horizon)]
  else:
    warm = 2 * scenario.sync.every * max(steps)
    length = scenario.window_steps * max(steps)
    room = (horizon - warm - length) / scenario.windows
    starts = (np.arange(scenario.windows) + rng.random(scenario.windows)) * room
    spans = [(s, s + warm, s + warm + length) for s in starts.tolist()]
  tallies = []
  for start, count_from, end in spans:
    tracks = [
      traffic.Track(secs, _stops(job.history, start, end))
      for job, secs in zip(found, steps, strict=True)
    ]
    world = rounds.World(
      config,
      scenario.links,
      tracks,
      rng,
      outages=[o for o in outages if o[1] > start and o[0] < end],
      start_secs=start,
      count_from=count_from,
    )
    tallies.append(world.run(end))
  covered = sum(end - begin for _, begin, end in spans) / horizon
  return tallies, covered


def _stops(
  history: jobs.History, start: float, end: float
) -> list[traffic.Stop]:
  """A job's pauses in a window, those that touch joined."""
  stops: list[traffic.Stop] = []
  if history.start_secs > start:
    stops.append(traffic.Stop(start, history.start_secs))
  ends = history.pauses
  first = bisect.bisect_right(ends, start, key=lambda pause: pause[1])
  for begin, until, _ in ends[first:]:
    if begin >= end:
      break
    if stops and begin <= stops[-1].end:
      stops[-1] = traffic.Stop(stops[-1].start, until)
    else:
      stops.append(traffic.Stop(begin, until))
  if history.end_secs < end:
    stops.append(traffic.Stop(history.end_secs, math.inf))
  return stops
