"""The planner's parts: division, memory, sample efficiency, goodput."""

import dataclasses
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from diloco import errors
from diloco.planning.planner import (
  efficiency,
  exchange,
  goodput,
  memory,
  model,
  plan,
  resources,
  text,
)

FAST = resources.Slices("fast", "4x4", 4, memory_gb=32, teraflops=300)
SLOW = resources.Slices("slow", "16", 2, memory_gb=32, teraflops=100)


def fleet(*groups, gbps=10.0):
  return resources.Fleet(
    tuple(
      resources.Site(f"site {i}", (group,), link_gbps=gbps)
      for i, group in enumerate(groups)
    )
  )


@pytest.mark.parametrize(
  ("islands", "slices"),
  [
    (1, [4]),  # the fastest group alone
    (2, [4, 2]),
    (3, [2, 2, 2]),
    (4, [1, 1, 2, 2]),
    (5, [1, 1, 1, 1, 2]),
    (6, [1, 1, 1, 1, 1, 1]),
    (7, [1, 1, 1, 1, 1, 1]),  # no more than slices
  ],
)
def test_every_group_gets_an_island_then_the_fastest(islands, slices):
  made = resources.divide(fleet(FAST, SLOW), islands)
  assert [island.slices for island in made] == slices


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(
  st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 20)
)
def test_division_uses_every_slice_of_a_group_once(counts, islands):
  groups = [dataclasses.replace(FAST, count=count) for count in counts]
  made = resources.divide(fleet(*groups), islands)
  assert len(made) == min(islands, sum(counts))
  for site, count in enumerate(counts):
    own = [island.slices for island in made if island.site == site]
    assert not own or sum(own) == count
    assert not own or max(own) - min(own) <= 1


def test_step_takes_the_batchs_operations():
  island = resources.Island(0, FAST, 2)
  made = model.make(1e9, batch_tokens=3200 * 2048, tokens=1e12, mfu=0.5)
  # 6 N tokens / (32 chips * 300 Tflop/s * mfu), a quarter of the batch.
  secs = 6e9 * 800 * 2048 / (32 * 300e12 * 0.5)
  assert model.step_secs(island, 4, made) == pytest.approx(secs)


def test_memory_counts_state_once_over_all_chips():
  made = model.make(1e9)
  island = resources.Island(0, FAST, 4)
  choice = exchange.Exchange(0, "bf16", 24, 24, 2, ())
  held = memory.of_island(made, island, choice)
  share = 1e9 / 64
  assert held.parameters + held.optimizer + held.gradients == 18 * share
  # Anchor, values, outer gradient; version, reference.
  assert held.in_flight == pytest.approx((3 + 2) * 4 * share / 24)
  assert (held.host_anchors, held.host_published) == (4e9, 4e9)
  slow = dataclasses.replace(choice, overlap_steps=3)
  carried = memory.of_island(made, island, slow)
  assert carried.host_published == 12e9 and carried.chip == held.chip


def test_model_is_filled_in_by_rules():
  made = model.make(10e9)
  assert (made.layers, made.tokens) == (52, 200e9)
  assert made.batch_tokens % model.SEQUENCE == 0
  assert 12 * made.layers * made.width**2 == pytest.approx(10e9)


def test_fit_follows_the_table_it_was_made_from():
  found = efficiency.fit()
  for islands, losses in efficiency.LOSSES.items():
    for size, loss, one in zip(
      efficiency.SIZES, losses, efficiency.LOSSES[1], strict=True
    ):
      # A tenth of the gap, which is 0.4 % of the loss at most.
      gap = math.log(loss / one)
      assert found.gap(size, islands) == pytest.approx(gap, rel=0.1, abs=1e-12)
  assert found.alpha == pytest.approx(0.1, abs=0.005)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(
  st.floats(1e7, 1e12), st.integers(1, 32), st.integers(1, 1000)
)
def test_more_islands_and_longer_periods_never_make_tokens_worth_more(
  params, islands, every
):
  got = efficiency.expected(params, islands, every)
  assert 0 < got.low <= got.mean <= got.high <= 1
  more = efficiency.expected(params, islands + 1, every)
  longer = efficiency.expected(params, islands, every + 10)
  assert all(m <= g for m, g in zip(more, got, strict=True))
  assert all(m <= g for m, g in zip(longer, got, strict=True))


def test_measured_size_is_not_extrapolated():
  got = efficiency.expected(efficiency.MEASURED_PARAMS, 8, 24)
  assert got.mean == got.low < got.high == 1.0
  larger = efficiency.expected(12e9, 8, 24)
  assert larger.low == got.low < larger.mean


def test_what_a_codec_may_cost_is_part_of_what_a_token_is_worth():
  worth = []
  for codec in ("int8", "int4"):
    request = plan.Request(
      fleet(FAST, FAST, gbps=100),
      model.make(1e9),
      codecs=(codec,),
      seeds=2,
    )
    worth.append(plan.evaluate(request, 2).efficiency)
  loss = 2 / efficiency.fit().alpha * exchange.CODEC_LOSS["int4"]
  assert worth[1].mean == pytest.approx(worth[0].mean * math.exp(-loss))
  assert worth[1].low < worth[0].low and worth[1].high == worth[0].high


def test_fleet_that_fails_all_the_time_is_no_plan():
  dying = dataclasses.replace(FAST, mtbi_years=1e-7)
  request = plan.Request(fleet(dying), model.make(1e9), seeds=2)
  with pytest.raises(errors.UserError, match="chips fail so often"):
    plan.best(request, plan.weigh(request))


def test_goodput_is_the_fleet_simulators():
  # Published for M = 8 at 1.2 million chips: 88 %.
  chips = resources.Slices("v", "16x16", 4688, 32, 900)
  eight = resources.divide(fleet(chips), 8)
  got = goodput.expected(eight, seeds=2)
  assert got.low <= got.mean <= got.high
  assert got.mean == pytest.approx(0.88, abs=0.03)
  one = goodput.expected(resources.divide(fleet(chips), 1), seeds=2)
  assert one.high < got.low
  sturdy = goodput.expected(eight, seeds=2, mtbi_factor=4)
  assert sturdy.low > got.high


def chosen(gbps, latency_ms=0.0, codecs=("bf16",), down="f32", islands=2):
  sites = tuple(
    dataclasses.replace(site, latency_ms=latency_ms)
    for site in fleet(FAST, FAST, gbps=gbps).sites
  )
  there = resources.Fleet(sites)
  made = resources.divide(there, islands)
  return exchange.choose(there, made, model.make(1e9), codecs, down)


def test_wide_links_keep_the_default_period():
  choice = chosen(gbps=100)
  assert (choice.every, choice.num_fragments) == (24, 24)
  assert choice.overlap_steps == 1
  assert not choice.carry


def test_thinner_links_lengthen_the_period_and_stay_within_it():
  periods = []
  for gbps in (30, 3, 1, 0.3):
    choice = chosen(gbps=gbps)
    assert choice.load <= exchange.MOST_LOAD
    assert choice.overlap_steps <= max(1, choice.every // 4)
    assert choice.num_fragments <= choice.every
    periods.append(choice.every)
  assert periods == sorted(periods)
  assert periods[0] < periods[-1]


def test_fewer_bits_both_ways_shorten_the_period():
  thin = chosen(gbps=1)
  both = chosen(gbps=1, codecs=("bf16", "int4"), down="int4")
  assert both.every < thin.every
  assert both.codec == "int4"
  # Fewer bits up alone gain nothing: versions in f32 fill the link.
  assert chosen(gbps=1, codecs=("bf16", "int4")).every == thin.every


def test_latency_beyond_a_quarter_of_the_longest_period_is_refused():
  found = chosen(gbps=100, latency_ms=1e7)
  assert isinstance(found, exchange.Shortage)
  assert "a fragment is back only after" in found.why
  assert found.excess > 1


def test_single_site_needs_no_link():
  alone = resources.Fleet((resources.Site("here", (FAST,), link_gbps=0.001),))
  islands = resources.divide(alone, 2)
  choice = exchange.choose(alone, islands, model.make(1e9))
  assert isinstance(choice, exchange.Exchange)
  assert (choice.load, choice.every) == (0, 24)


def test_syncer_stands_where_the_wide_link_is():
  # At a site of its own link it would have the others' traffic on that.
  store = resources.Site("store", link_gbps=50)
  there = resources.Fleet((*fleet(FAST, FAST, FAST, gbps=2).sites, store))
  islands = resources.divide(there, 3)
  choice = exchange.choose(there, islands, model.make(1e9))
  assert choice.syncer_site == 3


@pytest.mark.parametrize(
  ("amount", "told"),
  [(0, "no price"), (0.4321, "0.432 "), (91_234, "91,200 "), (99.96, "100 ")],
)
def test_little_money_is_not_told_as_none(amount, told):
  assert text._money(amount).startswith(told)
