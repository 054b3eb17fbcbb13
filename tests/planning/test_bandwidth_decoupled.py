import dataclasses
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from diloco.planning.bandwidth import (
  decoupled,
  methods,
  published,
  workload,
)

# 24 fragments of 1 Gbit each at one bit a parameter, one each second.
SYNC = decoupled.Sync(
  params=24e9 / workload.WIRE_OVERHEAD,
  every=24,
  num_fragments=24,
  overlap_steps=2,
  up_bits=1.0,
  down_bits=2.0,
)
NEAR = decoupled.Link(4.0)
HUB = decoupled.Link(100.0, islands=0)
exactly = pytest.approx


def test_traffic_of_a_site_is_a_fragment_each_way_each_step():
  site, hub = decoupled.traffic(SYNC, [NEAR, HUB], syncer_site=1)
  assert (site.sent_gbps, site.received_gbps) == (exactly(1), exactly(2))
  assert (hub.sent_gbps, hub.received_gbps) == (exactly(2), exactly(1))
  assert site.load == exactly(0.5)
  assert hub.load == exactly(0.02)


def test_round_trip_is_both_transfers_and_four_latencies_and_the_merge():
  sync = dataclasses.replace(SYNC, merge_secs=0.5)
  link = decoupled.Link(4.0, latency_secs=0.1, step_secs=2.0)
  site, _ = decoupled.traffic(sync, [link, HUB], syncer_site=1)
  assert site.round_trip_secs == exactly(3 / 4 + 0.4 + 0.5)
  assert site.round_trip_steps == exactly(site.round_trip_secs / 2)


def test_link_of_the_syncers_site_carries_everybody_else():
  sites = decoupled.traffic(SYNC, [NEAR] * 3, syncer_site=0)
  assert sites[0].sent_gbps == exactly(2 * sites[1].received_gbps)
  assert sites[0].load == exactly(1.0)
  assert sites[0].round_trip_secs == 0
  # Half of the hub's link is less than the site's own.
  assert sites[1].round_trip_secs == exactly(3 / 2)


def test_island_beside_the_syncer_uses_no_link():
  sites = decoupled.traffic(SYNC, [NEAR, NEAR], syncer_site=0)
  alone = decoupled.traffic(
    SYNC, [decoupled.Link(4.0, islands=7), NEAR], syncer_site=0
  )
  assert sites == alone


def test_two_islands_of_a_site_share_its_link():
  two = decoupled.Link(4.0, islands=2)
  site, _ = decoupled.traffic(SYNC, [two, HUB], syncer_site=1)
  assert site.load == exactly(1.0)
  assert site.round_trip_secs == exactly(2 * 3 / 4)


@pytest.mark.parametrize(
  ("change", "needed"),
  [
    ({}, 2.0),  # the load: 2 Gbit/s down
    ({"num_fragments": 8}, 4.5),  # the round trip: 9 Gbit within 2 s
    ({"num_fragments": 8, "overlap_steps": 6}, 2.0),
    ({"every": 48}, 1.5),
    ({"merge_secs": 2.0}, math.inf),
  ],
)
def test_needed_bandwidth_meets_both_conditions(change, needed):
  sync = dataclasses.replace(SYNC, **change)
  assert decoupled.needed_gbps(sync, NEAR) == exactly(needed)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(
  st.floats(1e8, 1e12),
  st.integers(1, 200),
  st.integers(1, 200),
  st.integers(1, 20),
  st.floats(0.01, 10),
  st.floats(0, 0.2),
  st.integers(1, 4),
)
def test_needed_bandwidth_is_enough_and_no_more(
  params, every, fragments, tau, step_secs, latency, islands
):
  sync = decoupled.Sync(params, every, fragments, tau)
  link = decoupled.Link(1.0, latency, islands, step_secs)
  gbps = decoupled.needed_gbps(sync, link)
  hypothesis.assume(math.isfinite(gbps))
  hub = decoupled.Link(1e9, islands=0)

  def fits(scale):
    exact = dataclasses.replace(link, gbps=scale * gbps)
    site, _ = decoupled.traffic(sync, [exact, hub], syncer_site=1)
    return site.load <= 1 and site.round_trip_steps <= tau

  assert fits(1.001)
  assert not fits(0.999)


def test_eight_sites_need_about_the_published_share_of_bandwidth():
  # Published: 0.84 against 198 Gbit/s. Which model, step and utilisation is
  # not known: a step for which data parallel takes 198 at 95 % is found, and
  # the islands' int4 traffic follows. It comes out 5 % too high.
  def data_parallel(step_secs):
    work = workload.Workload(params=1e9, step_secs=step_secs, sites=8)
    method = methods.METHODS["data_parallel"]
    return methods.utilisation(method, work, np.array([198.0]))[0]

  low, high = 0.01, 1.0
  for _ in range(40):
    middle = (low + high) / 2
    low, high = (
      (low, middle) if data_parallel(middle) > 0.95 else (middle, high)
    )
  int4 = workload.CODEC_BITS["int4"]
  sync = decoupled.Sync(1e9, 24, 24, 2, up_bits=int4, down_bits=int4)
  got = decoupled.mean_gbps(sync, decoupled.Link(1.0, step_secs=high))
  assert got == pytest.approx(0.84, rel=0.06)


@pytest.mark.parametrize("gbps", [2.0, 5.0])
@pytest.mark.parametrize("step_secs", [1.0, 2.5])
def test_twelve_billion_over_four_sites_gain_more_than_twenty_times(
  gbps, step_secs
):
  work = workload.Workload(12e9, 55, step_secs, 24, sites=4)
  method = methods.METHODS["data_parallel"]
  shared = methods.utilisation(method, work, np.array([gbps]))[0]
  assert 1 / shared > 20


def test_published_models_are_what_the_paper_names():
  assert {m: w.layers for m, w in published.MODELS.items()} == {
    "1B": 24,
    "10B": 48,
    "100B": 108,
  }
