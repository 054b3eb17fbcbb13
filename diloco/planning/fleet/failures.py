"""When what fails: chips one by one, groups together, the services.

Chips are alike and independent and do not age, so their failures together are
a Poisson process: time and memory grow with failures, not with chips.

Racks and sites fail as Poisson processes of their own, and take all their
slices with them. Syncer and store outages stop no island; they stop
merges.
"""

import dataclasses
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
    mtbi_years: mean time between interruptions of one chip.
    rack_mtbi_years: of one rack.
    site_mtbi_years: of one site, which holds one island.
    group_repair_secs: mean repair of a rack or site.
    syncer_mtbi_days: between two deaths of the syncer.
    syncer_outage_secs: until a successor merges.
    store_mtbi_days: between two outages of the store.
    store_outage_secs: how long one lasts.
    trace: failures from a file, instead of drawn ones of chips and groups.
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
    fleet_lib.require_amounts(self)


def sample(
  model: FailureModel,
  fleet: fleet_lib.Fleet,
  repair: defaults.ExponentiatedWeibull,
  horizon_secs: float,
  rng: np.random.Generator,
) -> Failures:
  """Draws all failures of a fleet, or takes them from the trace."""
  if model.trace is not None:
    return _from_trace(model.trace, fleet, repair, horizon_secs, rng)
  parts = [_chips(model, fleet, repair, horizon_secs, rng)]
  groups = (
    (1, model.rack_mtbi_years, fleet.rack_slices),
    (2, model.site_mtbi_years, 0),
  )
  for cause, years, slices in groups:
    if years:
      parts.append(
        _groups(cause, years, slices, model, fleet, horizon_secs, rng)
      )
  columns = [np.concatenate(c) for c in zip(*parts, strict=True)]
  order = np.argsort(columns[0], kind="stable")
  return Failures(*(column[order] for column in columns))


def _chips(
  model: FailureModel,
  fleet: fleet_lib.Fleet,
  repair: defaults.ExponentiatedWeibull,
  horizon_secs: float,
  rng: np.random.Generator,
) -> Failures:
  slices = fleet.all_slices
  chips = round(slices * fleet.slice_chips)
  years = horizon_secs / fleet_lib.SECS_PER_YEAR
  expected = chips * years / model.mtbi_years if model.mtbi_years else 0.0
  if expected > _MOST:
    raise errors.UserError(
      f"{expected:.3g} expected failures",
      f"at most {_MOST:.3g} can be followed",
      "simulate fewer chips or days, or a longer mtbi_years",
    )
  secs = rng.random(rng.poisson(expected)) * horizon_secs
  chip = rng.integers(chips, size=len(secs))
  first = np.minimum((chip / fleet.slice_chips).astype(np.int64), slices - 1)
  return _columns(secs, first, first + 1, repair.sample(rng, len(secs)), CHIP)


def _groups(
  cause: int,
  years: float,
  slices: int,
  model: FailureModel,
  fleet: fleet_lib.Fleet,
  horizon_secs: float,
  rng: np.random.Generator,
) -> Failures:
  if slices:
    starts = np.arange(0, fleet.all_slices, slices)
    ends = np.minimum(starts + slices, fleet.all_slices)
  else:
    bounds = [fleet.block(m) for m in range(fleet.islands)]
    starts, ends = np.array(bounds).T
  expected = len(starts) * horizon_secs / (years * fleet_lib.SECS_PER_YEAR)
  secs = rng.random(rng.poisson(expected)) * horizon_secs
  which = rng.integers(len(starts), size=len(secs))
  repair = rng.exponential(model.group_repair_secs, len(secs))
  return _columns(secs, starts[which], ends[which], repair, cause)


def _from_trace(
  trace: tuple[traces.Entry, ...],
  fleet: fleet_lib.Fleet,
  repair: defaults.ExponentiatedWeibull,
  horizon_secs: float,
  rng: np.random.Generator,
) -> Failures:
  drawn = repair.sample(rng, len(trace))
  rows = []
  for entry, draw in zip(trace, drawn, strict=True):
    if entry.service or entry.secs >= horizon_secs:
      continue
    first, last = _slices_of(entry, fleet)
    delay = draw if entry.repair_secs is None else entry.repair_secs
    rows.append((entry.secs, first, last, delay))
  table = np.array(rows, float).reshape(-1, 4)
  cause = CAUSES.index("trace")
  return _columns(table[:, 0], table[:, 1], table[:, 2], table[:, 3], cause)


def _slices_of(entry: traces.Entry, fleet: fleet_lib.Fleet) -> tuple[int, int]:
  if entry.island is not None:
    if entry.island >= fleet.islands:
      raise errors.UserError(
        f"trace target island-{entry.island}",
        f"the fleet has {fleet.islands} islands, counted from 0",
        "correct the trace or --islands",
      )
    return fleet.block(entry.island)
  assert entry.slice is not None
  if entry.slice >= fleet.all_slices:
    raise errors.UserError(
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
  if model.trace is not None:
    found: dict[str, list[tuple[float, float]]] = {"syncer": [], "store": []}
    outage = {
      "syncer": model.syncer_outage_secs,
      "store": model.store_outage_secs,
    }
    for entry in model.trace:
      if entry.service and entry.secs < horizon_secs:
        secs = entry.repair_secs
        secs = outage[entry.service] if secs is None else secs
        found[entry.service].append((entry.secs, entry.secs + secs))
    return Services(**found)
  return Services(
    _outages(
      model.syncer_mtbi_days, model.syncer_outage_secs, horizon_secs, rng
    ),
    _outages(model.store_mtbi_days, model.store_outage_secs, horizon_secs, rng),
  )


def _outages(
  days: float, secs: float, horizon_secs: float, rng: np.random.Generator
) -> list[tuple[float, float]]:
  if not days:
    return []
  count = rng.poisson(horizon_secs / (days * fleet_lib.SECS_PER_DAY))
  starts = np.sort(rng.random(count) * horizon_secs)
  return [(start, start + secs) for start in starts.tolist()]
