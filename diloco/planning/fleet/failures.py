"""When what fails: chips one by one, groups together, the services.

Chips are alike and independent and do not age, so their failures together are
a Poisson process: time and memory grow with failures, not with chips.

Racks and sites fail as Poisson processes of their own, and take all their
slices with them. Syncer and store outages stop no island; they stop
merges.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from diloco import errors
from diloco.planning.fleet import defaults, traces
from diloco.planning.fleet import fleet as fleet_lib

CAUSES = ("chip", "rack", "site", "trace")
CHIP = 0
_MOST = 20_000_000  # failures; beyond it memory would not do


class Failures(NamedTuple):
  """Failures in the order of time; arrays of one length."""

  secs: np.ndarray
  first: np.ndarray  # slice
  last: np.ndarray  # slice, excluded
  repair_secs: np.ndarray
  cause: np.ndarray  # index into CAUSES

  def within(self, first: int, last: int) -> "Failures":
    """Returns the failures that touch slices [first, last), cut to them."""
    touched = (self.first < last) & (self.last > first)
    part = Failures(*(column[touched] for column in self))
    return part._replace(
      first=np.maximum(part.first, first), last=np.minimum(part.last, last)
    )


class Services(NamedTuple):
  """Outages of what merges, as (start, end) pairs in seconds."""

  syncer: list[tuple[float, float]]
  store: list[tuple[float, float]]

  @property
  def merged(self) -> list[tuple[float, float]]:
    """Stretches without merges, in order, overlaps joined."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted([*self.syncer, *self.store]):
      if joined and start <= joined[-1][1]:
        joined[-1] = (joined[-1][0], max(joined[-1][1], end))
      else:
        joined.append((start, end))
    return joined


@dataclasses.dataclass(frozen=True)
class FailureModel:
  """What fails how often; a mean time of 0 turns a kind off.

  Attributes:
    mtbi_years: mean time between interruptions of one chip; 0 for never.
    rack_mtbi_years: of one rack.
    site_mtbi_years: of one site, which holds one island.
    group_repair_secs: mean repair of a rack or site.
    syncer_mtbi_days: between two deaths of the syncer.
    syncer_outage_secs: until a successor merges.
    store_mtbi_days: between two outages of the store.
    store_outage_secs: how long one lasts.
    trace: failures from a file, instead of all drawn ones.
  """

  mtbi_years: float = 1.0
  rack_mtbi_years: float = 0.0
  site_mtbi_years: float = 0.0
  group_repair_secs: float = 3600.0
  syncer_mtbi_days: float = 0.0
  syncer_outage_secs: float = 2.0
  store_mtbi_days: float = 0.0
  store_outage_secs: float = 60.0
  trace: tuple[traces.Entry, ...] | None = None

  def __post_init__(self) -> None:
    errors.check_amounts(self)


def number(expected: float, rng: np.random.Generator) -> int:
  """Draws how many of a kind there are; refuses more than can be followed."""
  errors.require(
    expected <= _MOST,
    f"{expected:.3g} expected failures",
    f"at most {_MOST:.3g} can be followed",
    "simulate fewer chips or days, or a longer time between failures",
  )
  return int(rng.poisson(expected))


def sample(
  model: FailureModel,
  fleet: fleet_lib.Fleet,
  repair: defaults.ExponentiatedWeibull,
  horizon_secs: float,
  rng: np.random.Generator,
) -> Failures:
  """Draws all failures of a fleet, or takes them from the trace.

  Extra slices fail only while they are there.
  """
  found = _Draw(model, fleet, repair, horizon_secs, rng).all()
  there = np.ones(len(found.secs), bool)
  for extra, first, last in fleet.extra_blocks():
    away = (found.secs < extra.start_secs) | (found.secs >= extra.end_secs)
    there &= ~(away & (found.first >= first) & (found.last <= last))
  return Failures(*(column[there] for column in found))


@dataclasses.dataclass(frozen=True)
class _Draw:
  """Arguments of `sample`."""

  model: FailureModel
  fleet: fleet_lib.Fleet
  repair: defaults.ExponentiatedWeibull
  horizon_secs: float
  rng: np.random.Generator

  def all(self) -> Failures:
    model, fleet = self.model, self.fleet
    if model.trace is not None:
      return self._traced(model.trace)
    chips = self._chips()  # first: it refuses what is too large to be listed
    sites = [fleet.block(m) for m in range(fleet.islands)]
    racks = fleet.racks() if model.rack_mtbi_years else [(0, 0)]
    parts = [
      chips,
      *self._groups(1, model.rack_mtbi_years, *np.array(racks).T),
      *self._groups(2, model.site_mtbi_years, *np.array(sites).T),
    ]
    columns = [np.concatenate(c) for c in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Failures(*(column[order] for column in columns))

  def _moments(self, expected: float) -> np.ndarray:
    return self.rng.random(number(expected, self.rng)) * self.horizon_secs

  def _chips(self) -> Failures:
    fleet, years = self.fleet, self.model.mtbi_years
    slices = fleet.all_slices
    chips = round(slices * fleet.slice_chips)
    simulated = self.horizon_secs / fleet_lib.SECS_PER_YEAR
    expected = chips * simulated / years if years else 0.0
    secs = self._moments(expected)
    chip = self.rng.integers(chips, size=len(secs))
    first = np.minimum((chip / fleet.slice_chips).astype(np.int64), slices - 1)
    repair = self.repair.sample(self.rng, len(secs))
    return _columns(secs, first, first + 1, repair, CHIP)

  def _groups(
    self, cause: int, years: float, starts: np.ndarray, ends: np.ndarray
  ) -> Iterator[Failures]:
    """Failures of groups of slices, if they fail at all."""
    if years:
      expected = len(starts) * self.horizon_secs
      secs = self._moments(expected / (years * fleet_lib.SECS_PER_YEAR))
      which = self.rng.integers(len(starts), size=len(secs))
      mean_secs = self.model.group_repair_secs
      repair = self.rng.exponential(mean_secs, len(secs))
      yield _columns(secs, starts[which], ends[which], repair, cause)

  def _traced(self, trace: tuple[traces.Entry, ...]) -> Failures:
    rows, causes = [], []
    together = Counter(entry.secs for entry in trace if not entry.service)
    drawn = self.repair.sample(self.rng, len(trace))
    for entry, draw in zip(trace, drawn, strict=True):
      if not entry.service and entry.secs < self.horizon_secs:
        delay = draw if entry.repair_secs is None else entry.repair_secs
        rows.append((entry.secs, *_slices_of(entry, self.fleet), delay))
        alone = entry.island is None and together[entry.secs] == 1
        causes.append(CHIP if alone else CAUSES.index("trace"))
    secs, first, last, repair = np.array(rows, float).reshape(-1, 4).T
    found = _columns(secs, first, last, repair, CHIP)
    return found._replace(cause=np.array(causes, np.int8))


def _slices_of(entry: traces.Entry, fleet: fleet_lib.Fleet) -> tuple[int, int]:
  if entry.island is not None:
    errors.require(
      entry.island < fleet.islands,
      f"trace target island-{entry.island}",
      f"the fleet has {fleet.islands} islands, counted from 0",
      "correct the trace or --islands",
    )
    return fleet.block(entry.island)
  assert entry.slice is not None
  errors.require(
    entry.slice < fleet.all_slices,
    f"trace target {entry.slice}",
    f"the fleet has {fleet.all_slices} slices, counted from 0",
    "correct the trace or the fleet",
  )
  return entry.slice, entry.slice + 1


def _columns(
  secs: np.ndarray,
  first: np.ndarray,
  last: np.ndarray,
  repair_secs: np.ndarray,
  cause: int,
) -> Failures:
  return Failures(
    secs,
    first.astype(np.int64),
    last.astype(np.int64),
    repair_secs,
    np.full(len(secs), cause, np.int8),
  )


def sample_services(
  model: FailureModel, horizon_secs: float, rng: np.random.Generator
) -> Services:
  """Draws outages of syncer and store, or takes them from the trace."""
  kinds = {
    "syncer": (model.syncer_mtbi_days, model.syncer_outage_secs),
    "store": (model.store_mtbi_days, model.store_outage_secs),
  }
  if model.trace is None:
    return Services(
      **{n: _outages(*kind, horizon_secs, rng) for n, kind in kinds.items()}
    )
  found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
  for entry in model.trace:
    if entry.service and entry.secs < horizon_secs:
      secs = entry.repair_secs
      secs = kinds[entry.service][1] if secs is None else secs
      found[entry.service].append((entry.secs, entry.secs + secs))
  return Services(**found)


def _outages(
  days: float, secs: float, horizon_secs: float, rng: np.random.Generator
) -> list[tuple[float, float]]:
  if not days:
    return []
  count = number(horizon_secs / (days * fleet_lib.SECS_PER_DAY), rng)
  starts = np.sort(rng.random(count) * horizon_secs)
  return [(start, start + secs) for start in starts.tolist()]
