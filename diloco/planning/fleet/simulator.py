"""The fleet simulator: a scenario in, goodput and rounds out.

Failures, repairs and every job's way through them are followed over the whole
horizon. Rounds of merging are a thousand times denser: where the horizon is
short they are followed whole, else in windows spread over it, and how much of
it the windows cover is part of the outcome.
"""

import bisect
import dataclasses
import itertools
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
  facts["chips"] = scenario.fleet.chips
  facts["slices"] = scenario.fleet.num_slices
  facts["islands"] = scenario.islands
  return facts


def simulate_seed(
  scenario: scenario_lib.Scenario, seed: int
) -> outcome.Outcome:
  """Simulates a scenario under one seed."""
  return _Simulation(scenario, seed).run()


def trace(scenario: scenario_lib.Scenario, seed: int) -> list[traces.Entry]:
  """What fails under a seed, slice by slice, for a trace."""
  drawn = _Simulation(scenario, seed)
  found = [
    traces.Entry(secs, slice=index, repair_secs=repair_secs)
    for secs, first, last, repair_secs, _ in zip(
      *(column.tolist() for column in drawn.events), strict=True
    )
    for index in range(first, last)
  ]
  for service, outages in drawn.services._asdict().items():
    found += [
      traces.Entry(start, service=service, repair_secs=end - start)
      for start, end in outages
    ]
  return sorted(found, key=lambda entry: entry.secs)


class _Simulation:
  """A scenario under a seed."""

  def __init__(self, scenario: scenario_lib.Scenario, seed: int):
    """Draws what fails."""
    self._scenario, self._fleet = scenario, scenario.fleet
    self._horizon = scenario.horizon_secs
    self._rng = np.random.default_rng(seed)
    model, repair = scenario.failures, scenario.times.repair
    self.events = failures_lib.sample(
      model, self._fleet, repair, self._horizon, self._rng
    )
    self.services = failures_lib.sample_services(
      model, self._horizon, self._rng
    )

  def run(self) -> outcome.Outcome:
    found = self._jobs()
    tallies, covered = self._rounds(found)
    return outcome.Outcome(
      tuple(found),
      tuple(tallies),
      self._horizon,
      len(self.events.secs),
      len(self.services.syncer) + len(self.services.store),
      covered,
    )

  def _jobs(self) -> list[outcome.Job]:
    fleet, least = self._fleet, self._scenario.min_share
    if fleet.islands == 1:
      extras = tuple(
        jobs.Block(first, last, extra.start_secs, extra.end_secs)
        for extra, first, last in fleet.extra_blocks()
      )
      shape = jobs.Shape(fleet.num_slices, extras, min_share=least)
      return [self._job(self.events, 0, shape, 0.0)]
    found = []
    blocks: list[tuple[fleet_lib.Extra | None, int, int]] = [
      (None, *fleet.block(m)) for m in range(fleet.islands)
    ]
    for extra, first, last in [
      *blocks,
      *scenario_lib.extra_islands(self._scenario),
    ]:
      shape, speed = jobs.Shape(last - first, min_share=least), 0.0
      if extra:
        if extra.start_secs >= self._horizon:
          continue
        speed = extra.speed
        shape = dataclasses.replace(
          shape, start_secs=extra.start_secs, end_secs=extra.end_secs
        )
      part = self.events.within(first, last)
      found.append(self._job(part, first, shape, speed))
    return found

  def _with_extras(self, pace: float, share: float) -> float:
    """Useful share of a single job's slices, extra ones among them.

    All go at the pace of the slowest that is there.
    """
    base, horizon = self._fleet.num_slices, self._horizon
    blocks = [
      (e, last - first) for e, first, last in self._fleet.extra_blocks()
    ]
    moments = [t for e, _ in blocks for t in (e.start_secs, e.end_secs)]
    bounds = sorted({0.0, horizon, *(min(t, horizon) for t in moments)})
    useful = allocated = 0.0
    for start, end in itertools.pairwise(bounds):
      there = [b for b in blocks if b[0].start_secs <= start < b[0].end_secs]
      slowest = min([pace, *(extra.speed for extra, _ in there)])
      steps = base * share / pace + sum(n / extra.speed for extra, n in there)
      useful += (end - start) * slowest * steps
      allocated += (end - start) * (base + sum(n for _, n in there))
    return useful / allocated

  def _job(
    self,
    events: failures_lib.Failures,
    first: int,
    shape: jobs.Shape,
    speed: float,
  ) -> outcome.Job:
    own = events._replace(first=events.first - first, last=events.last - first)
    scenario = self._scenario
    history = jobs.run(
      shape, scenario.times, own, self._horizon, elastic=scenario.elastic
    )
    pace, share = self._pace(range(first, first + shape.slices), speed)
    if shape.extras:
      share = self._with_extras(pace, share)
    share *= self._straggling(history, shape.slices)
    return outcome.Job(history, pace, share)

  def _pace(self, block: range, speed: float) -> tuple[float, float]:
    """Speed of a synchronous job, and the share of its slices' that is."""
    fleet = self._fleet
    if not speed and len(set(fleet.speeds)) == 1 and not fleet.speed_spread:
      return fleet.speeds[0], 1.0
    speeds = np.array([speed or fleet.speed_of(index) for index in block])
    if fleet.speed_spread:
      spread = self._rng.normal(1.0, fleet.speed_spread, len(speeds))
      speeds *= np.maximum(spread, 0.1)
    pace = float(speeds.min())
    return pace, float(np.mean(pace / speeds))

  def _straggling(self, history: jobs.History, slices: int) -> float:
    """Share of full speed while slices of the job are slow now and then.

    Spells come as a Poisson process of rate r and last d on average, so some
    slice is slow for a share 1 - exp(-r d) of the time; what is drawn is how
    many came, and they overlap as they do in the mean.
    """
    model, rng = self._scenario.stragglers, self._rng
    span = history.end_secs - history.start_secs
    if not model.mtbi_years or span <= 0:
      return 1.0
    chips = slices * self._fleet.slice_chips
    rate = chips / (model.mtbi_years * fleet_lib.SECS_PER_YEAR)
    spells = rng.exponential(
      model.secs, failures_lib.number(rate * span, rng)
    ).sum()
    slow = -math.expm1(-spells / span)
    return 1 - slow * (1 - model.factor)

  def _rounds(
    self, found: Sequence[outcome.Job]
  ) -> tuple[list[traffic.Tally], float]:
    """Follows rounds, whole or in windows; returns how much they cover."""
    scenario, horizon = self._scenario, self._horizon
    if len(found) == 1 or not scenario.windows:
      return [], 0.0
    steps = [scenario.times.step_secs / job.pace for job in found]
    config, outages = scenario.config, self.services.merged
    warm = 2 * scenario.sync.every * max(steps)
    length = scenario.window_steps * max(steps)
    few = sum(horizon / secs for secs in steps) <= _WHOLE_STEPS
    if few or warm + scenario.windows * length >= horizon:
      spans = [(0.0, 0.0, horizon)]
    else:
      room = (horizon - warm - length) / scenario.windows
      draws = self._rng.random(scenario.windows)
      starts = (np.arange(scenario.windows) + draws) * room
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
        self._rng,
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
