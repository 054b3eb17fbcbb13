"""How islands exchange fragments: H, P, tau, K, codec and the syncer's place.

For each place of the syncer and each codec, the shortest period H at which the
links carry the traffic with a fifth to spare and fragments are back within a
quarter of H. Among those the one of least loss of quality; of equal ones that
of fewest bits, then of shortest overlap, then of least load. Then

    P      24, or more, up to two fragments a layer, where that lowers tau
    tau    the slowest round trip and half a step for grace, rounded up
    K      1 with adaptive grace: an island that is down delays nobody
    carry  where tau is more than a tenth of H, and overwriting would lose that
           share of what is learned; else overwrite
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from diloco.planning.bandwidth import decoupled, workload
from diloco.planning.planner import efficiency, resources
from diloco.planning.planner import model as model_lib

PERIODS = (24, 30, 36, 48, 60, 72, 100, 144, 200, 300, 500, 750, 1000)
MOST_LOAD = 0.8
_DEFAULT_FRAGMENTS = 24
_OVERLAP_SHARE = 0.25  # of H
_OVERWRITE_SHARE = 0.1
_GRACE_STEPS = 0.5  # slack that the adaptive grace window can spend
# What a codec adds to ln L. Streaming DiLoCo saw nothing in four bits, others
# up to 0.09 %. Fewer bits cost too much to be offered.
CODEC_LOSS = {"f32": 0.0, "bf16": 0.0, "int8": 0.0, "int4": 0.0009}
CODECS = tuple(sorted(CODEC_LOSS, key=lambda c: workload.CODEC_BITS[c]))


@dataclasses.dataclass(frozen=True)
class Exchange:
  """A choice."""

  syncer_site: int  # number of its site
  codec: str  # of outer gradients
  every: int  # H
  num_fragments: int  # P
  overlap_steps: int  # tau
  traffic: tuple[decoupled.Traffic, ...]  # of each site

  @property
  def carry(self) -> bool:
    """Whether progress under way is carried over."""
    return self.overlap_steps > _OVERWRITE_SHARE * self.every

  @property
  def load(self) -> float:
    """Of the busiest link."""
    return max(site.load for site in self.traffic)


@dataclasses.dataclass(frozen=True)
class Shortage:
  """Nothing fits; the closest choice, and what is above 1 of it."""

  choice: Exchange
  why: str
  excess: float


def links(
  fleet: resources.Fleet,
  islands: Sequence[resources.Island],
  model: model_lib.Model,
) -> list[decoupled.Link]:
  """Links of all sites; a site's islands count with their mean step."""
  found = []
  for number, site in enumerate(fleet.sites):
    secs = [
      model_lib.step_secs(island, len(islands), model)
      for island in islands
      if island.site == number
    ]
    rate = sum(1 / s for s in secs)
    found.append(
      decoupled.Link(
        gbps=site.link_gbps,
        latency_secs=1e-3 * site.latency_ms,
        islands=len(secs),
        step_secs=len(secs) / rate if secs else 1.0,
      )
    )
  return found


def choose(
  fleet: resources.Fleet,
  islands: Sequence[resources.Island],
  model: model_lib.Model,
  codecs: Sequence[str] = CODECS,
  down_codec: str = "f32",
) -> Exchange | Shortage:
  """The best choice, or why there is none.

  Codecs are of outer gradients, to choose from; `down_codec` of new versions.
  """
  star = links(fleet, islands, model)
  best: tuple[tuple[float, ...], Exchange] | None = None
  nearest: Exchange | None = None
  for site, codec in itertools.product(range(len(star)), codecs):
    for every in PERIODS:
      choice = _best_fragments(star, site, codec, model, down_codec, every)
      if fits(choice.load, choice.overlap_steps, choice.every):
        loss = CODEC_LOSS[codec] + efficiency.period_loss(choice.every).mean
        bits = workload.CODEC_BITS[codec]
        key = (loss, bits, choice.overlap_steps / choice.every, choice.load)
        if best is None or key < best[0]:
          best = (key, choice)
        break
      if nearest is None or _excess(choice) < _excess(nearest):
        nearest = choice
  if best is not None:
    return best[1]
  assert nearest is not None
  return Shortage(nearest, _why(fleet, nearest), _excess(nearest))


def _best_fragments(
  star: Sequence[decoupled.Link],
  site: int,
  codec: str,
  model: model_lib.Model,
  down_codec: str,
  every: int,
) -> Exchange:
  found = []
  for fragments in sorted(
    {min(_DEFAULT_FRAGMENTS, every), min(2 * model.layers, every)}
  ):
    sync = decoupled.Sync(
      params=model.params,
      every=every,
      num_fragments=fragments,
      up_bits=workload.CODEC_BITS[codec],
      down_bits=workload.CODEC_BITS[down_codec],
    )
    traffic = decoupled.traffic(sync, star, site)
    slowest = max(
      t.round_trip_steps
      for t, link in zip(traffic, star, strict=True)
      if link.islands
    )
    tau = overlap_steps(slowest)
    found.append(Exchange(site, codec, every, fragments, tau, traffic))
  # The first of equal ones, thus the default, wins.
  return min(found, key=lambda choice: choice.overlap_steps)


def overlap_steps(round_trip_steps: float) -> int:
  """tau: a fragment's round trip in steps, and some for the grace window."""
  return math.ceil(round_trip_steps + _GRACE_STEPS)


def _most_overlap(every: int) -> int:
  return max(1, int(_OVERLAP_SHARE * every))


def fits(load: float, overlap: int, every: int) -> bool:
  """Whether links are loaded, and fragments back, as this module asks for."""
  return load <= MOST_LOAD and overlap <= _most_overlap(every)


def _excess(choice: Exchange) -> float:
  return max(
    choice.load / MOST_LOAD,
    choice.overlap_steps / _most_overlap(choice.every),
  )


def _why(fleet: resources.Fleet, choice: Exchange) -> str:
  worst = max(range(len(choice.traffic)), key=lambda s: choice.traffic[s].load)
  site, traffic = fleet.sites[worst], choice.traffic[worst]
  if traffic.load > MOST_LOAD:
    busier = max(traffic.sent_gbps, traffic.received_gbps)
    return (
      f"even with {choice.codec} and H = {choice.every} the link of"
      f" {site.name} would carry {busier:.3g} of its {site.link_gbps:g} Gbit/s,"
      f" above the {MOST_LOAD:.0%} it may"
    )
  return (
    f"even with {choice.codec} and H = {choice.every} a fragment is back only"
    f" after {choice.overlap_steps} steps, and a quarter of H is"
    f" {_most_overlap(choice.every)}"
  )
