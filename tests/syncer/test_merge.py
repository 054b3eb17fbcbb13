"""The merge against a slow float64 reference, and what it must never do."""

import math
import tracemalloc

import hypothesis
import ml_dtypes
import numpy as np
import oracles
import pytest
import tracing
from hypothesis import strategies as st

from diloco import errors
from diloco.snapshots import arrays
from diloco.syncer import merge, outer_optimizer, passes, sources

PLAIN = outer_optimizer.OuterOptimizer(learning_rate=1.0, momentum=0.0)
NESTEROV = outer_optimizer.OuterOptimizer(learning_rate=0.7, momentum=0.9)


ELEMENTWISE = ["mean", "median", "trimmed_mean"]
METHODS = ["rda", *ELEMENTWISE]


def vectors_of(count, shape, seed=0):
  rng = np.random.default_rng(seed)
  return [
    rng.standard_normal(shape, dtype=np.float32) * np.float32(i + 1)
    for i in range(count)
  ]


def norm_of(vector):
  return float(np.linalg.norm(vector.astype(np.float64)))


def apply(vectors, weights, method="rda", outer=PLAIN, norms=None, theta=None):
  """Merges into zeros; returns theta and outcome."""
  vectors = [np.asarray(v) for v in vectors]
  if theta is None:
    theta = np.zeros(vectors[0].shape, np.float32)
  buffers = [np.zeros_like(theta) for _ in outer.buffers]
  norms = norms or [norm_of(v) for v in vectors]
  contributions = [
    merge.Input(sources.MemorySource(v), w, n)
    for v, w, n in zip(vectors, weights, norms, strict=True)
  ]
  outcome = merge.Merger(outer).apply(contributions, method, theta, buffers)
  return theta, outcome


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_cosine_is_the_mean_over_pairs(method, count):
  common = vectors_of(1, (40, 9), seed=9)[0]
  vectors = [0.7 * common + v for v in vectors_of(count, (40, 9))]
  weights = [2.0 + i for i in range(count)]
  _, outcome = apply(vectors, weights, method)
  flat = [v.ravel().astype(np.float64) for v in vectors]
  lengths = [np.linalg.norm(v) for v in flat]
  parts = np.array(weights) * (1.0 if method == "rda" else lengths)
  pairs = [(i, j) for i in range(count) for j in range(i)]
  cosines = [flat[i] @ flat[j] / (lengths[i] * lengths[j]) for i, j in pairs]
  expected = np.average(
    cosines, weights=[parts[i] * parts[j] for i, j in pairs]
  )
  assert outcome.cosine == pytest.approx(expected, abs=1e-5)


def test_cosine_needs_two_with_a_direction():
  one, nothing = np.ones((3, 3), np.float32), np.zeros((3, 3), np.float32)
  for method in ("rda", "mean"):
    for vectors, weights, cosine in (
      ([one], [1.0], None),
      ([one, nothing], [1.0, 1.0], None),
      ([one, one], [1.0, 0.0], None),
      ([one, 2 * one], [1.0, 3.0], pytest.approx(1.0)),
      ([one, -one], [1.0, 3.0], pytest.approx(-1.0)),
      ([one, -one], [1.0, 1.0], pytest.approx(-1.0)),
    ):
      assert apply(vectors, weights, method)[1].cosine == cosine


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (1,), (7, 11), (80, 90), (2, 3, 4)])
def test_merge_equals_reference(method, count, shape):
  vectors = vectors_of(count, shape)
  weights = [2.0 + i for i in range(count)]
  theta, outcome = apply(vectors, weights, method)
  expected = oracles.merge(vectors, weights, method)
  scale = np.linalg.norm(expected)
  # A float32 rounding in each of M terms and in the last scaling.
  np.testing.assert_allclose(-theta.ravel(), expected, atol=1e-6 * scale)
  assert outcome.norm == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("method", ["rda", "mean"])
def test_merge_moves_towards_the_island(method):
  # The global parameter is 10. The island started there and went to 7: it
  # moved by -3, so its outer gradient is 10 - 7 = 3.
  theta = np.array([10.0], np.float32)
  apply([np.array([3.0], np.float32)], [1.0], method, theta=theta)
  assert theta[0] == 7.0


@pytest.mark.parametrize("method", ["rda", "mean"])
def test_single_island_is_adopted_as_it_is(method):
  rng = np.random.default_rng(3)
  anchor = rng.standard_normal(5000, dtype=np.float32)
  island = anchor + 0.01 * rng.standard_normal(5000, dtype=np.float32)
  theta = anchor.copy()
  apply([anchor - island], [123.0], method, theta=theta)
  # Two roundings of numbers around 1: the difference and the step.
  np.testing.assert_allclose(theta, island, rtol=0, atol=5e-7)


def test_golden_trajectory_by_hand():
  # Two islands, weights 3 and 1; v = (4, 0) and (0, 8): norms 4 and 8.
  # Mean norm (3*4 + 8) / 4 = 5; mean direction (3/4, 1/4), its length
  # sqrt(10)/4; g = 5 (3, 1) / sqrt(10).
  vectors = [np.array(v, np.float32) for v in ([4, 0], [0, 8])]
  outer = outer_optimizer.OuterOptimizer(0.5, 0.5)
  theta, momentum = np.zeros((2, 2), np.float32)
  merger = merge.Merger(outer)
  contributions = [
    merge.Input(sources.MemorySource(v), w, norm_of(v))
    for v, w in zip(vectors, (3, 1), strict=True)
  ]
  g = 5 * np.array([3, 1]) / math.sqrt(10)
  # b = g, theta = -0.5 (1.5 g); b = 1.5 g, theta -= 0.5 (g + 0.75 g).
  for expected_b, expected_theta in [(g, -0.75 * g), (1.5 * g, -1.625 * g)]:
    outcome = merger.apply(contributions, "rda", theta, [momentum])
    np.testing.assert_allclose(momentum, expected_b, rtol=1e-6)
    np.testing.assert_allclose(theta, expected_theta, rtol=1e-6)
    assert outcome.norm == pytest.approx(5.0)
    assert outcome.agreement == pytest.approx(math.sqrt(10) / 4)


def test_rda_norm_is_the_mean_norm_and_mean_shrinks():
  vectors = vectors_of(8, 20000)
  vectors = [v / np.float32(np.linalg.norm(v)) for v in vectors]
  _, rda = apply(vectors, [1.0] * 8, "rda")
  _, mean = apply(vectors, [1.0] * 8, "mean")
  assert rda.norm == pytest.approx(1.0, rel=1e-5)
  # Unrelated directions: 1 / sqrt(M), within a few parts in sqrt(size).
  assert mean.norm == pytest.approx(1 / math.sqrt(8), rel=0.05)
  assert mean.agreement == pytest.approx(mean.norm, rel=1e-5)
  assert rda.agreement == pytest.approx(mean.agreement, rel=1e-5)


@pytest.mark.parametrize("method", ["rda", "mean"])
@pytest.mark.parametrize("exponent", [-100, -70, -20, 20, 80])
def test_powers_of_two_scale_through(method, exponent):
  vectors = vectors_of(3, 1000)
  base, _ = apply(vectors, [1.0, 2.0, 3.0], method)
  factor = np.float32(2.0) ** np.float32(exponent)
  scaled, _ = apply([v * factor for v in vectors], [1.0, 2.0, 3.0], method)
  # Squares leave the range of float32: norms are then summed in float64,
  # which rounds otherwise.
  np.testing.assert_allclose(scaled / factor, base, rtol=2e-6, atol=1e-6)


def test_only_ratios_of_weights_matter():
  vectors = vectors_of(3, 1000)
  for scale in (1e-12, 1e18):
    theta, _ = apply(vectors, [scale, 2 * scale, 3 * scale])
    expected, _ = apply(vectors, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(theta, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_zero_weight_is_absence(method):
  vectors = vectors_of(3, (30, 40))
  found, _ = apply(vectors, [1.0, 0.0, 2.0], method)
  expected, _ = apply([vectors[0], vectors[2]], [1.0, 2.0], method)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found, expected, atol=1e-6 * scale)


@pytest.mark.parametrize("method", METHODS)
def test_contributions_without_any_weight_are_refused_by_name(method):
  with pytest.raises(passes.ContributionError, match="no_weight") as caught:
    apply(vectors_of(2, (30, 40)), [0.0, 0.0], method)
  assert set(caught.value.reasons) == {0, 1}


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  method=st.sampled_from(METHODS),
  weights=st.lists(st.integers(1, 9), min_size=2, max_size=6),
  random=st.randoms(use_true_random=False),
)
def test_order_of_islands_changes_nothing(method, weights, random):
  vectors = vectors_of(len(weights), (5, 7))
  pairs = list(zip(vectors, weights, strict=True))
  random.shuffle(pairs)
  expected, before = apply(vectors, weights, method)
  found, after = apply(*zip(*pairs, strict=True), method)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found, expected, atol=1e-5 * scale)
  right = oracles.merge(vectors, weights, method)
  np.testing.assert_allclose(-found.ravel(), right, atol=1e-5 * scale)
  assert after.agreement == pytest.approx(before.agreement, rel=1e-5)
  assert after.cosine == pytest.approx(before.cosine, abs=1e-5)


@pytest.mark.parametrize("method", ["rda", *ELEMENTWISE])
@pytest.mark.parametrize("count", [1, 4])
def test_equal_islands_are_their_mean_and_plain_sgd_adopts_it(method, count):
  (vector,) = vectors_of(1, 1000)
  theta, outcome = apply([vector] * count, range(1, count + 1), method)
  np.testing.assert_allclose(-theta, vector, rtol=1e-6)
  assert outcome.agreement == pytest.approx(1.0, rel=1e-6)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  method=st.sampled_from(ELEMENTWISE),
  at=st.integers(1, 99),
  count=st.integers(1, 5),
)
def test_splitting_a_tensor_changes_nothing_element_by_element(
  method, at, count
):
  vectors = vectors_of(count, 100)
  weights = [2.0 + i for i in range(count)]
  whole, _ = apply(vectors, weights, method)
  parts = [
    apply([v[part] for v in vectors], weights, method)[0]
    for part in (slice(at), slice(at, None))
  ]
  np.testing.assert_array_equal(np.concatenate(parts), whole)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8),
  seed=st.integers(0, 99),
)
def test_rda_is_as_long_as_contributions_are_on_average(weights, seed):
  vectors = vectors_of(len(weights), 300, seed)
  theta, outcome = apply(vectors, weights, "rda")
  norms = [np.linalg.norm(v) for v in vectors]
  expected = np.average(norms, weights=weights)
  assert np.linalg.norm(theta) == pytest.approx(expected, rel=1e-5)
  assert outcome.norm == pytest.approx(expected, rel=1e-5)


def test_one_wild_island_of_four_moves_median_and_trimmed_mean_little():
  vectors = [*vectors_of(1, 1000) * 3, np.full(1000, 1e6, np.float32)]
  for method in ("median", "trimmed_mean"):
    theta, _ = apply(vectors, [1.0] * 4, method)
    np.testing.assert_allclose(-theta, vectors[0], rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_shortened_contributions_merge_as_shorter_ones(method):
  vectors = vectors_of(3, (6, 5))
  scales = (1.0, 0.25, 0.5)
  norms = [norm_of(v) for v in vectors]  # as they were written
  theta = np.zeros((6, 5), np.float32)
  inputs = [
    merge.Input(sources.MemorySource(v), 1.0 + i, n, s)
    for i, (v, n, s) in enumerate(zip(vectors, norms, scales, strict=True))
  ]
  found = merge.Merger(PLAIN).apply(inputs, method, theta, ())
  short = [v * np.float32(s) for v, s in zip(vectors, scales, strict=True)]
  expected, outcome = apply(short, [1.0, 2.0, 3.0], method)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(theta, expected, atol=2e-6 * scale)
  assert found.agreement == pytest.approx(outcome.agreement, rel=1e-5)
  assert found.cosine == pytest.approx(outcome.cosine, abs=1e-5)


def test_opposite_directions_fall_back_to_the_mean():
  vector = vectors_of(1, 1000)[0]
  vectors = [vector, np.float32(-3) * vector]
  theta, outcome = apply(vectors, [1.0, 1.0], "rda")
  assert outcome.agreement < merge.CANCELLATION
  np.testing.assert_allclose(theta, vector, rtol=1e-6)
  assert outcome.norm == pytest.approx(np.linalg.norm(vector), rel=1e-5)
  # Just off the threshold the common direction still counts.
  theta, _ = apply([vector, np.float32(-3) * vector], [1.0, 0.99], "rda")
  length = (1 + 3 * 0.99) / 1.99
  np.testing.assert_allclose(-theta, length * vector, rtol=1e-4)


def test_zero_vectors_have_no_direction_but_count_in_the_norm():
  vector = vectors_of(1, 1000)[0]
  theta, outcome = apply([vector, np.zeros_like(vector)], [1.0, 3.0], "rda")
  # Mean norm is a quarter, along the only direction there is.
  np.testing.assert_allclose(-theta, vector / 4, rtol=1e-6)
  assert outcome.agreement == pytest.approx(0.25)


@pytest.mark.parametrize("method", METHODS)
def test_all_zero_contributions_only_coast(method):
  outer = outer_optimizer.OuterOptimizer(0.5, 0.5)
  theta, momentum = np.zeros((2, 10), np.float32)
  momentum[:] = 4
  source = sources.MemorySource(np.zeros(10, np.float32))
  outcome = merge.Merger(outer).apply(
    [merge.Input(source, 1.0, 0.0)] * 2, method, theta, [momentum]
  )
  assert outcome.norm == 0
  np.testing.assert_array_equal(momentum, 2)
  np.testing.assert_array_equal(theta, -0.5)


def test_one_by_one_every_contribution_is_a_step_and_its_own_fault_alone():
  outer = outer_optimizer.OuterOptimizer(
    0.7, 0.9, optimizer="delayed_nesterov", delay=2
  )
  vectors = vectors_of(3, 50)
  inputs = [
    merge.Input(sources.MemorySource(v), w, norm_of(v))
    for v, w in zip(vectors, (3.0, 1.0, 9.0), strict=True)  # count for nothing
  ]
  theta, *buffers = (np.zeros(50, np.float32) for _ in range(3))
  merger = merge.Merger(outer, merge.Rules(one_by_one=True))
  found = merger.apply(inputs, "rda", theta, buffers)
  *_, expected = oracles.outer_steps(
    "delayed_nesterov", vectors, rate=0.7, mu=0.9, n=2
  )
  np.testing.assert_allclose(theta, expected, rtol=1e-5, atol=1e-6)
  assert found.norm == pytest.approx(math.hypot(*map(norm_of, vectors)))
  inputs[1] = inputs[1]._replace(norm=0.0)
  with pytest.raises(passes.ContributionError) as caught:
    merger.apply(inputs, "rda", theta, buffers)
  assert list(caught.value.reasons) == [1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_contribution_is_named_and_nothing_changes(method, bad):
  vectors = vectors_of(3, 200_000)
  norms = [norm_of(v) for v in vectors]
  vectors[1][150_000] = bad
  theta = np.ones(200_000, np.float32)
  with pytest.raises(passes.ContributionError, match="not_finite") as caught:
    apply(vectors, [1.0] * 3, method, norms=norms, theta=theta)
  assert list(caught.value.reasons) == [1]
  np.testing.assert_array_equal(theta, 1)


def test_norms_are_checked_against_their_records():
  vectors = vectors_of(3, 1000)
  norms = [norm_of(v) for v in vectors]
  expected, _ = apply(vectors, [1.0] * 3)
  # Cut into other blocks, a sum may be off by a little.
  theta, _ = apply(vectors, [1.0] * 3, norms=[n * 1.00005 for n in norms])
  np.testing.assert_allclose(theta, expected, rtol=1e-3, atol=1e-3)
  for wrong in (norms[2] * 2, norms[2] * 1.001, 0.0, math.nan, math.inf):
    with pytest.raises(passes.ContributionError, match="its record") as caught:
      apply(vectors, [1.0] * 3, norms=[*norms[:2], wrong])
    assert 2 in caught.value.reasons


def test_overflow_of_the_sum_is_not_applied():
  # Both fit into float32, but the long one lends the short one's direction a
  # length that does not.
  wide = np.full(10, 3e38, np.float32)
  narrow = np.zeros(10, np.float32)
  narrow[0] = 3e38
  theta = np.zeros(10, np.float32)
  with pytest.raises(passes.ContributionError, match="norm_overflow") as caught:
    apply([narrow, wide], [1.0, 1.0], theta=theta)
  assert list(caught.value.reasons) == [1]
  np.testing.assert_array_equal(theta, 0)


def test_bfloat16_merges_as_its_float32_values():
  vectors = [v.astype(ml_dtypes.bfloat16) for v in vectors_of(3, 200_001)]
  theta, _ = apply(
    vectors, [1.0, 2.0, 3.0], theta=np.zeros(200_001, np.float32)
  )
  expected, _ = apply([v.astype(np.float32) for v in vectors], [1.0, 2.0, 3.0])
  assert theta.tobytes() == expected.tobytes()


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  size=st.integers(1, 400),
  block=st.sampled_from([16, 32, 64]),
  method=st.sampled_from(["rda", *ELEMENTWISE]),
)
def test_no_element_is_skipped_at_block_edges(size, block, method):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(passes, "BLOCK", block)
    vectors = vectors_of(3, size, seed=size)
    theta, _ = apply(vectors, [1.0, 2.0, 3.0], method)
  expected = oracles.merge(vectors, [1.0, 2.0, 3.0], method)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(-theta, expected, atol=3e-6 * scale)


@pytest.mark.parametrize("method", ["rda", "median"])
def test_storage_changes_no_bit(tmp_path, method):
  shape = (6, 128, 1024)  # twelve blocks
  vectors = vectors_of(3, shape)
  norms = [norm_of(v) for v in vectors]
  store = arrays.ArrayStore(tmp_path)
  stored = []
  for i, (vector, shard) in enumerate(
    zip(vectors, [shape, (3, 128, 512), (1, 64, 1024)], strict=True)
  ):
    layout = arrays.Layout.of(shape, np.float32, shard)
    tensor = arrays.Tensor(f"v{i}", layout, [(None, vector)])
    store.write("p", [tensor])
    stored.append(sources.StoreSource(store.open("p", f"v{i}")))
  results = set()
  for tensors in ([sources.MemorySource(v) for v in vectors], stored):
    theta, momentum = np.ones((2, *shape), np.float32)
    merge.Merger(NESTEROV).apply(
      [merge.Input(s, 1.0 + i, norms[i]) for i, s in enumerate(tensors)],
      method,
      theta,
      [momentum],
    )
    results.add(theta.tobytes() + momentum.tobytes())
  assert len(results) == 1


class FailingSource:
  """Breaks after some blocks."""

  def __init__(self, size, good_blocks, error):
    self.size = size
    self._good_blocks = good_blocks
    self._error = error

  def blocks(self, step):
    for n, begin in enumerate(range(0, self.size, step)):
      if n == self._good_blocks:
        raise self._error
      yield np.ones(min(step, self.size - begin), np.float32)


@pytest.mark.parametrize("good_blocks", [0, 1])
@pytest.mark.parametrize(
  ("error", "expected"),
  [
    (errors.CorruptSnapshotError("torn"), passes.ContributionError),
    (OSError("gone"), OSError),
  ],
)
def test_failing_source_leaves_theta_alone(error, expected, good_blocks):
  size = 5 * passes.BLOCK + 3
  good = sources.MemorySource(np.ones(size, np.float32))
  bad = FailingSource(size, good_blocks, error)
  theta, momentum = np.full((2, size), 2, np.float32)
  merger, norm = merge.Merger(NESTEROV), math.sqrt(size)
  contributions = [merge.Input(s, 1.0, norm) for s in (good, bad)]
  for method in ("rda", "mean"):
    with pytest.raises(expected) as caught:
      merger.apply(contributions, method, theta, [momentum])
    if isinstance(caught.value, passes.ContributionError):
      assert caught.value.reasons == {1: "corrupt: torn"}
  np.testing.assert_array_equal(theta, 2)
  np.testing.assert_array_equal(momentum, 2)
  # The same merger goes on without the bad one.
  merger.apply([merge.Input(good, 1.0, norm)], "rda", theta, [momentum])
  assert theta[0] != 2


@pytest.mark.parametrize("method", ["rda", "trimmed_mean"])
def test_peak_memory_is_one_accumulator(method):
  size = 64 * passes.BLOCK
  vectors = vectors_of(4, size)
  theta, momentum = np.zeros((2, size), np.float32)
  contributions = [
    merge.Input(sources.MemorySource(v), 1.0, norm_of(v)) for v in vectors
  ]
  with tracing.traced():
    merge.Merger(NESTEROV).apply(contributions, method, theta, [momentum])
    peak = tracemalloc.get_traced_memory()[1]
  # On top: a scratch block and the sums per block.
  assert 4 * size <= peak < 4 * size + 4 * 4 * passes.BLOCK


def test_peak_memory_from_the_store_is_two_slabs_each(tmp_path):
  size = 48 * passes.BLOCK  # six chunks
  store = arrays.ArrayStore(tmp_path)
  vectors = vectors_of(2, size)
  store.write(
    "p", [arrays.Tensor.whole(f"{i}", v) for i, v in enumerate(vectors)]
  )
  stored = [store.open("p", f"{i}") for i in range(2)]
  chunk_bytes = 4 * math.prod(stored[0].layout.chunk_shape)
  theta, momentum = np.zeros((2, size), np.float32)
  contributions = [
    merge.Input(sources.StoreSource(s), 1.0, norm_of(v))
    for s, v in zip(stored, vectors, strict=True)
  ]
  with tracing.traced():
    merge.Merger(NESTEROV).apply(contributions, "rda", theta, [momentum])
    peak = tracemalloc.get_traced_memory()[1]
  # Buffers of the store's own decoder are not numpy's and not counted.
  slabs = 2 * 2 * chunk_bytes
  assert peak < 4 * size + slabs + 4 * 4 * passes.BLOCK
