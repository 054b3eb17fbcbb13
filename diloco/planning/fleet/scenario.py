"""A scenario: everything a simulation of a fleet depends on, but its seed."""

import dataclasses
import itertools

from diloco import config as config_lib
from diloco import errors
from diloco.planning.fleet import defaults, traffic
from diloco.planning.fleet import failures as failures_lib
from diloco.planning.fleet import fleet as fleet_lib


@dataclasses.dataclass(frozen=True)
class Stragglers:
  """Slices that are slow for a while, and their whole job with them.

  Attributes:
    mtbi_years: mean time between two such spells of one chip; 0 for never.
    factor: speed meanwhile, against its own.
    secs: mean length of a spell.
  """

  mtbi_years: float = 0.0
  factor: float = 0.5
  secs: float = 600.0

  def __post_init__(self) -> None:
    rules = {
      "at least 0": ["mtbi_years", "secs"],
      "above 0 and at most 1": ["factor"],
    }
    errors.check(self, rules, "straggler_")


@dataclasses.dataclass(frozen=True)
class Scenario:
  """Everything a simulation depends on, but its seed.

  Attributes:
    fleet: the hardware.
    failures: what fails how often.
    times: how long things take; the defaults are the calibrated ones.
    stragglers: slices that are slow for a while.
    sync: fragments, quorum, grace and the like, as in a run's configuration.
    links: delays of rounds.
    elastic: whether a job goes on without failed slices.
    min_share: of its slices that a job cannot train without.
    days: simulated.
    windows: in which rounds are followed, if the horizon is long.
    window_steps: length of one, after a warm-up.
  """

  fleet: fleet_lib.Fleet = dataclasses.field(default_factory=fleet_lib.Fleet)
  failures: failures_lib.FailureModel = dataclasses.field(
    default_factory=failures_lib.FailureModel
  )
  times: defaults.Times = dataclasses.field(default_factory=defaults.Times)
  stragglers: Stragglers = dataclasses.field(default_factory=Stragglers)
  sync: config_lib.SyncConfig = dataclasses.field(
    default_factory=config_lib.SyncConfig
  )
  links: traffic.Links = dataclasses.field(default_factory=traffic.Links)
  elastic: bool = True
  min_share: float = 0.5
  days: float = 30.0
  windows: int = 6
  window_steps: int = 120

  def __post_init__(self) -> None:
    rules = {"above 0": ["days"], "between 0 and 1": ["min_share"]}
    errors.check(self, rules)
    errors.require(
      self.windows > 0 or self.islands == 1 or not self.links.lockstep,
      "lockstep with windows = 0",
      "what it costs is found by following rounds",
      "give windows, or leave lockstep out",
    )
    self.config  # noqa: B018 - refuses what the production configuration does

  @property
  def horizon_secs(self) -> float:
    """Simulated time."""
    return self.days * fleet_lib.SECS_PER_DAY

  @property
  def islands(self) -> int:
    """Jobs: M, and further ones on extra capacity if M > 1."""
    return self.fleet.islands + len(extra_islands(self))

  @property
  def config(self) -> config_lib.RunConfig:
    """The production configuration of the rounds."""
    values = {
      "sync": dataclasses.asdict(self.sync),
      "fleet": {"slices": tuple({} for _ in range(self.islands))},
    }
    return config_lib.from_mapping(values)

  @property
  def expected_failures(self) -> float:
    """Failures of chips and groups to be expected."""
    model, fleet, secs = self.failures, self.fleet, self.horizon_secs
    if model.trace is not None:
      return float(sum(e.secs < secs and not e.service for e in model.trace))
    years = secs / fleet_lib.SECS_PER_YEAR
    counts = (
      (model.mtbi_years, fleet.chips),
      (model.rack_mtbi_years, fleet.num_slices / fleet.rack_slices),
      (model.site_mtbi_years, fleet.islands),
    )
    return sum(years * count / mean for mean, count in counts if mean)


def check_length(scenario: Scenario) -> None:
  """Refuses a horizon in which nothing is expected to fail or to merge."""
  expected = scenario.expected_failures
  if expected < 1 and _can_fail(scenario.failures):
    longer = f"{scenario.days / expected:.3g}" if expected else "more"
    raise errors.UserError(
      f"days = {scenario.days:g}",
      f"too short for any failure: {expected:.2g} expected",
      f"simulate {longer} days or more, or set mtbi_years to 0 for no failures",
    )
  every = scenario.sync.every
  days = every * scenario.times.step_secs / fleet_lib.SECS_PER_DAY
  if days > scenario.days and scenario.windows and scenario.islands > 1:
    raise errors.UserError(
      f"every = {every}",
      f"islands would publish every {days:.3g} days, and {scenario.days:g} are"
      " simulated",
      "take fewer steps or more days",
    )


def _can_fail(model: failures_lib.FailureModel) -> bool:
  if model.trace is not None:
    return any(not entry.service for entry in model.trace)
  kinds = (model.mtbi_years, model.rack_mtbi_years, model.site_mtbi_years)
  return any(kinds)


def extra_islands(
  scenario: Scenario,
) -> list[tuple[fleet_lib.Extra, int, int]]:
  """Extra capacity, cut into islands of about the size of the others."""
  fleet = scenario.fleet
  if fleet.islands == 1:
    return []
  found = []
  for extra, first, last in fleet.extra_blocks():
    count = max(1, round((last - first) / fleet.island_slices))
    count = min(count, last - first)
    bounds = [first + i * (last - first) // count for i in range(count + 1)]
    found += [(extra, a, b) for a, b in itertools.pairwise(bounds)]
  return found
