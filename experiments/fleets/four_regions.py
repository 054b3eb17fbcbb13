"""Four regions over a WAN, as in the 12B run of Decoupled DiLoCo.

Question: how to train 12 billion parameters over four regions that are joined
by 2 to 5 Gbit/s?

Command: `diloco plan --fleet=experiments/fleets/four_regions.py --params=12e9
--wan_gbps=3`. A second on one core.

The store and the syncer can stand in a region of their own with a wide link.
Sizes, prices and latencies are made up but of the usual order; chips are those
of public data sheets.
"""

from diloco.planning.planner import resources


def get_fleet() -> resources.Fleet:
  """Returns three regions of v5p, one of v6e, and one with storage only."""
  v5p = resources.Slices(
    kind="v5p",
    topology="4x4x8",
    count=2,
    memory_gb=95,
    teraflops=459,
    price_per_hour=4.2,
  )
  v6e = resources.Slices(
    kind="v6e",
    topology="8x8",
    count=2,
    memory_gb=32,
    teraflops=918,
    price_per_hour=2.7,
  )
  return resources.Fleet(
    sites=(
      resources.Site("east", (v5p,), link_gbps=5, latency_ms=15),
      resources.Site("west", (v5p,), link_gbps=4, latency_ms=35),
      resources.Site("europe", (v5p,), link_gbps=3, latency_ms=50),
      resources.Site("asia", (v6e,), link_gbps=2, latency_ms=80),
      resources.Site("storage", link_gbps=100, latency_ms=5),
    )
  )
