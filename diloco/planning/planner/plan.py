"""The plan: every M weighed, the best one chosen, and what would better it.

Tokens a second do not depend on M: the batch is divided, not multiplied. What
M changes is how much of the time counts (goodput), what a token is worth
(sample efficiency) and which chips are used at all. The best M has the shortest

    seconds to quality = tokens / (tokens a second * goodput * efficiency)

which is how long it takes to the loss that one job without a failure or a
second island would have after the token budget.
"""

import dataclasses
import math

import numpy as np

from diloco import errors
from diloco.planning.bandwidth import methods, workload
from diloco.planning.planner import (
  efficiency,
  exchange,
  goodput,
  memory,
  resources,
)
from diloco.planning.planner import model as model_lib
from diloco.planning.planner.efficiency import Interval

CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SECS_PER_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Request:
  """What is to be planned."""

  fleet: resources.Fleet  # what there is
  model: model_lib.Model  # what is trained
  codecs: tuple[str, ...] = exchange.CODECS  # to choose from
  down_codec: str = "f32"  # of new versions
  islands: int = 0  # M if it is given, else 0
  # Of a chip, in place of the fleet's; None: the fleet's.
  price_per_hour: float | None = None
  seeds: int = 5  # of the goodput
  mtbi_factor: float = 1.0  # chips live so many times as long as the fleet says

  def price(self, island: resources.Island) -> float:
    """Of one chip of an island for an hour."""
    given, own = self.price_per_hour, island.hardware.price_per_hour
    return own if given is None else given


@dataclasses.dataclass(frozen=True)
class Prospect:
  """What M islands would come to."""

  islands: tuple[resources.Island, ...]  # all of them
  exchange: exchange.Exchange  # how they exchange fragments
  memory: tuple[memory.Memory, ...]  # of each island's chips
  goodput: Interval  # useful share of the islands' time
  efficiency: Interval  # useful share of a token
  tokens_per_sec: float  # while all islands train
  secs_to_tokens: Interval  # until the budget is trained
  # Until a perfect job's loss at the budget is reached.
  secs_to_quality: Interval
  cost_per_hour: float  # of all chips of islands

  @property
  def chips(self) -> int:
    """Of all islands."""
    return sum(island.chips for island in self.islands)

  def cost(self, secs: float) -> float:
    """Of so many seconds."""
    return self.cost_per_hour * secs / _SECS_PER_HOUR


@dataclasses.dataclass(frozen=True)
class Misfit:
  """M islands that cannot be, and by how much: above 1 is too much."""

  num_islands: int
  why: str
  excess: float
  remedy: str = "plan for a smaller model, or add what is short"


def evaluate(request: Request, num_islands: int) -> Prospect | Misfit:
  """Works M islands out, or says what does not fit."""
  model = request.model
  islands = resources.divide(request.fleet, num_islands)
  if len(islands) < num_islands:
    why = f"the fleet has {len(islands)} slices, and an island needs one"
    return Misfit(num_islands, why, num_islands / len(islands))
  most = max(island.chips for island in islands)
  sequences = model.batch_tokens / num_islands / model_lib.SEQUENCE
  if sequences < most:
    return Misfit(
      num_islands,
      f"an island of {most} chips would have {sequences:.3g} sequences of"
      f" {model_lib.SEQUENCE} tokens a step, and a chip works on a whole one",
      most / sequences,
      "give a larger batch or fewer chips",
    )
  found = exchange.choose(
    request.fleet, islands, model, request.codecs, request.down_codec
  )
  choice = found.choice if isinstance(found, exchange.Shortage) else found
  held = tuple(memory.of_island(model, one, choice) for one in islands)
  misfit = _too_big(request, islands, held)
  if misfit is not None:
    return misfit
  if isinstance(found, exchange.Shortage):
    return Misfit(num_islands, found.why, found.excess)
  useful = goodput.expected(
    islands, seeds=request.seeds, mtbi_factor=request.mtbi_factor
  )
  if not useful.low:
    why = f"chips fail so often that goodput is {useful.mean:.2%}"
    return Misfit(num_islands, why, math.inf)
  worth = efficiency.expected(
    model.params, num_islands, choice.every, exchange.CODEC_LOSS[choice.codec]
  )
  speed = sum(model.tokens_per_sec(island.flops) for island in islands)
  perfect = model.tokens / speed
  return Prospect(
    islands=islands,
    exchange=choice,
    memory=held,
    goodput=useful,
    efficiency=worth,
    tokens_per_sec=speed,
    secs_to_tokens=Interval(
      perfect / useful.mean, perfect / useful.high, perfect / useful.low
    ),
    secs_to_quality=Interval(
      perfect / useful.mean / worth.mean,
      perfect / useful.high / worth.high,
      perfect / useful.low / worth.low,
    ),
    cost_per_hour=sum(
      island.chips * request.price(island) for island in islands
    ),
  )


def _too_big(
  request: Request,
  islands: tuple[resources.Island, ...],
  held: tuple[memory.Memory, ...],
) -> Misfit | None:
  excesses = [
    of.chip / (1e9 * island.hardware.memory_gb)
    for island, of in zip(islands, held, strict=True)
  ]
  worst = int(np.argmax(excesses))
  if excesses[worst] <= 1:
    return None
  island = islands[worst]
  return Misfit(
    len(islands),
    f"a chip of an island of {island.chips} x {island.hardware.kind} at"
    f" {request.fleet.sites[island.site].name} would hold"
    f" {held[worst].chip / 1e9:.3g} GB, and it has"
    f" {island.hardware.memory_gb:g}",
    excesses[worst],
  )


def weigh(request: Request) -> tuple[Prospect | Misfit, ...]:
  """Every M that is considered, or the one asked for."""
  slices = sum(group.count for _, group in request.fleet.groups)
  counts = [m for m in CANDIDATES if m <= slices]
  if request.islands:
    counts = [request.islands]
  return tuple(evaluate(request, m) for m in counts)


def best(request: Request, weighed: tuple[Prospect | Misfit, ...]) -> Prospect:
  """The one that is soonest at the quality; refuses when nothing fits."""
  outcomes = [w for w in weighed if isinstance(w, Prospect)]
  if outcomes:
    return min(outcomes, key=lambda outcome: outcome.secs_to_quality.mean)
  misfits = [w for w in weighed if isinstance(w, Misfit)]
  nearest = min(misfits, key=lambda misfit: misfit.excess)
  raise errors.UserError(
    f"--params={request.model.params:g} on {request.fleet.chips} chips",
    f"with {nearest.num_islands} islands, the closest, {nearest.why}",
    nearest.remedy,
  )


def synchronous_utilisation(request: Request, outcome: Prospect) -> float:
  """Of one job over all these sites and links; 1 where there is one site."""
  used = {island.site for island in outcome.islands}
  if len(used) == 1:
    return 1.0
  sites = [request.fleet.sites[number] for number in used]
  work = workload.Workload(
    params=request.model.params,
    layers=request.model.layers,
    step_secs=request.model.batch_tokens / outcome.tokens_per_sec,
    sites=len(sites),
    latency_secs=1e-3 * max(site.latency_ms for site in sites),
  )
  slowest = np.array([min(site.link_gbps for site in sites)])
  method = methods.METHODS["data_parallel"]
  return float(methods.utilisation(method, work, slowest)[0])
