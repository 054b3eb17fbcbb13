"""Decoupled islands on a star of links: what must fit, since nobody waits.

Islands send outer gradients to the syncer's site and fetch new versions from
there. An island never waits, so its utilisation is 1 whatever the link. Too
little bandwidth shows in other ways, and two conditions keep it away:

    load = Gbit/s to be carried / Gbit/s of the link <= 1, in each direction
    round trip = N/P (up / B_up + down / B_down) + merge + 4 latency <= tau T

Symbols: N parameters, P fragments, H steps between two syncs of a fragment, T
seconds of a step, up and down bits a parameter, B the slower of the site's own
link and its share of the syncer's. Each of the two transfers asks and answers,
hence four latencies. On average an island sends and fetches N/H parameters a
step. Links are full duplex. Islands at the syncer's own site use no link.

Beyond a load of 1, publications replace one another in the queue and H grows
by that factor; beyond tau, adoption comes late. Neither slows training.
"""

import dataclasses
from collections.abc import Sequence

from diloco.planning.bandwidth import workload


@dataclasses.dataclass(frozen=True)
class Link:
  """Of one site to all others."""

  gbps: float  # in each direction
  latency_secs: float = 0.0  # one way, to the syncer's site
  islands: int = 1  # that train at this site
  step_secs: float = 1.0  # of their inner steps


@dataclasses.dataclass(frozen=True)
class Sync:
  """What islands exchange, and how often."""

  params: float  # N
  every: int = 24  # H
  num_fragments: int = 24  # P
  overlap_steps: int = 2  # tau
  # Of a parameter in a published outer gradient.
  up_bits: float = workload.CODEC_BITS["bf16"]
  # Of a parameter in a global version.
  down_bits: float = workload.CODEC_BITS["f32"]
  merge_secs: float = 0.0  # reading, merging and committing one fragment


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Of one site."""

  sent_gbps: float  # mean
  received_gbps: float  # mean
  load: float  # of the busier direction, of the link's capacity
  # Of a fragment; but for merging it is 0 where the syncer is and where no
  # island is.
  round_trip_secs: float
  round_trip_steps: float  # the same in inner steps of this site


def traffic(
  sync: Sync, links: Sequence[Link], syncer_site: int
) -> tuple[Traffic, ...]:
  """Computes each site's traffic; syncer and store are at `syncer_site`."""
  size = sync.params * workload.WIRE_OVERHEAD / 1e9
  rates = [_rate(sync, link) for link in links]
  remote = sum(r for s, r in enumerate(rates) if s != syncer_site)
  hub = links[syncer_site]
  found = []
  for site, (link, rate) in enumerate(zip(links, rates, strict=True)):
    at_hub = site == syncer_site
    rate = remote if at_hub else rate
    up, down = rate * sync.up_bits, rate * sync.down_bits
    sent, received = (down, up) if at_hub else (up, down)
    trip = sync.merge_secs
    if not at_hub and link.islands:
      gbps = min(link.gbps, hub.gbps * rate / remote)
      bits = sync.up_bits + sync.down_bits
      bits *= link.islands  # they may all be due together
      trip += size / sync.num_fragments * bits / gbps + 4 * link.latency_secs
    load = max(sent, received) / link.gbps
    steps = trip / link.step_secs
    found.append(Traffic(sent, received, load, trip, steps))
  return tuple(found)


def needed_gbps(sync: Sync, link: Link) -> float:
  """The least bandwidth of one remote site that meets both conditions.

  Infinite where merging and latency alone take longer than tau steps.
  """
  size = sync.params * workload.WIRE_OVERHEAD / 1e9
  left = sync.overlap_steps * link.step_secs
  left -= sync.merge_secs + 4 * link.latency_secs
  if left <= 0:
    return float("inf")
  bits = sync.up_bits + sync.down_bits
  trip = size / sync.num_fragments * link.islands * bits / left
  return max(mean_gbps(sync, link), trip)


def mean_gbps(sync: Sync, link: Link) -> float:
  """What a remote site moves in its busier direction, on average."""
  rate = _rate(sync, link)
  return rate * max(sync.up_bits, sync.down_bits)


def _rate(sync: Sync, link: Link) -> float:
  """1e9 parameters a second, in each direction."""
  size = sync.params * workload.WIRE_OVERHEAD / 1e9
  return size / sync.every * link.islands / link.step_secs
