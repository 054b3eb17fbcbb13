"""Merging a round from records and tensors in a store."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest
from cut_builder import contribution

from diloco import config as config_lib
from diloco import errors
from diloco.fragments import codec, partition
from diloco.islands import fetching, packing
from diloco.snapshots import (
  arrays,
  digest,
  keys,
  operations,
  records,
  store,
  verify,
)
from diloco.syncer import merge as merge_lib
from diloco.syncer import outer_optimizer, protocol, round_merge

PLAN = partition.partition([partition.Tensor("w", (4, 3), "mean")], 1)
OUTER = outer_optimizer.OuterOptimizer(0.5, 0.9)


@pytest.fixture
def snapshots(tmp_path):
  return store.SnapshotStore(tmp_path.as_uri())


@pytest.fixture
def merger(snapshots):
  return round_merge.RoundMerger(snapshots, PLAN, "mean", OUTER)


def head(merger, version, payload):
  return records.Head(
    fragment=0,
    version=version,
    token=1,
    payload=payload,
    chunks=merger.chunks(0),
    clock={},
    merged={},
  )


def write(snapshots, prefix, values):
  snapshots.arrays.write(prefix, [arrays.Tensor.whole("w", values)])


def contribute(snapshots, merger, values, island=0):
  record = contribution(
    island=island,
    plan_hash=PLAN.hash,
    payload=f"payloads/{island}",
    chunks=merger.chunks(0),
    num_bytes=values.nbytes,
    norms=[float(np.linalg.norm(values))],
  )
  write(snapshots, record.payload, values)
  return record


def normal(seed):
  rng = np.random.default_rng(seed)
  return rng.standard_normal((4, 3), np.float32)


def merge(merger, before, payload, *records_and_weights):
  contributions, weights = zip(*records_and_weights, strict=True)
  return merger.merge(operations.Merge(before, payload, contributions, weights))


def test_version_is_what_the_outer_step_gives(snapshots, merger):
  theta, grads = normal(0), (normal(1), normal(2))
  first = keys.global_prefix(0, 0, "i0.1")
  write(snapshots, f"{first}/params", theta)
  shares = [
    (contribute(snapshots, merger, g, i), w)
    for i, (g, w) in enumerate(zip(grads, (3.0, 1.0), strict=True))
  ]
  payload = keys.global_prefix(0, 1, "s1.0")
  merged = merge(merger, head(merger, 0, first), payload, *shares)
  found = snapshots.arrays.read(f"{payload}/params", "w")
  mean = 0.75 * grads[0] + 0.25 * grads[1]
  # Nesterov from a momentum of zero; float32 against a formula in doubt.
  np.testing.assert_allclose(found, theta - 0.5 * 1.9 * mean, rtol=1e-5)
  assert merged.digest == digest.tensors([("w", found)])
  cosine = np.vdot(*grads) / np.prod([np.linalg.norm(g) for g in grads])
  assert merged.cosine == pytest.approx(cosine, abs=1e-5)


def test_contribution_of_another_form_is_named_and_nothing_is_merged(
  snapshots, merger
):
  first = keys.global_prefix(0, 0, "i0.1")
  write(snapshots, f"{first}/params", normal(0))
  good, bad = (contribute(snapshots, merger, normal(1), i) for i in (0, 1))
  bad = dataclasses.replace(bad, chunks=[])
  payload = keys.global_prefix(0, 1, "s1.0")
  with pytest.raises(protocol.RefusedError) as caught:
    merge(merger, head(merger, 0, first), payload, (good, 1.0), (bad, 1.0))
  (reason,) = caught.value.reasons.items()
  assert reason[0] == bad.key and reason[1].startswith("corrupt: ")
  assert not snapshots.keys(payload)


def test_cosine_of_a_version_is_the_mean_of_its_tensors_by_size(snapshots):
  tensors = [partition.Tensor(n, (k,), "mean") for n, k in (("a", 9), ("b", 3))]
  plan = partition.partition(tensors, 1)
  merger = round_merge.RoundMerger(snapshots, plan, "mean", OUTER)

  def store_all(prefix, signs):
    whole = [
      arrays.Tensor.whole(t.name, np.full(t.shape, sign, np.float32))
      for t, sign in zip(tensors, signs, strict=True)
    ]
    snapshots.arrays.write(prefix, whole)

  first = keys.global_prefix(0, 0, "i0.1")
  store_all(f"{first}/params", (0, 0))
  shares = []
  for island, signs in enumerate([(1, 1), (1, -1)]):
    record = contribute(snapshots, merger, np.ones((4, 3), np.float32), island)
    norms, chunks = [3.0, 3.0**0.5], merger.chunks(0)
    record = dataclasses.replace(
      record, payload=f"payloads/two{island}", norms=norms, chunks=chunks
    )
    store_all(record.payload, signs)
    shares.append((record, 1.0))
  payload = keys.global_prefix(0, 1, "s1.0")
  merged = merge(merger, head(merger, 0, first), payload, *shares)
  # They agree in nine elements, and are opposed in three.
  assert merged.cosine == pytest.approx((9 - 3) / 12, abs=1e-5)


def test_head_set_back_to_the_first_version_starts_without_momentum(
  snapshots, merger
):
  first = keys.global_prefix(0, 0, "i0.1")
  write(snapshots, f"{first}/params", normal(0))
  share = contribute(snapshots, merger, normal(1)), 1.0
  digests = {
    merge(merger, head(merger, version, first), payload, share).digest
    for version, payload in ((0, "globals/0000/1.a"), (7, "globals/0000/8.a"))
  }
  assert len(digests) == 1


def test_momentum_of_the_version_before_is_used(snapshots, merger):
  first = keys.global_prefix(0, 0, "i0.1")
  write(snapshots, f"{first}/params", normal(0))
  share = contribute(snapshots, merger, normal(1)), 1.0
  second, third = (keys.global_prefix(0, v, "s1.0") for v in (1, 2))
  merge(merger, head(merger, 0, first), second, share)
  merge(merger, head(merger, 1, second), third, share)
  moved = [
    snapshots.arrays.read(f"{p}/params", "w") for p in (first, second, third)
  ]
  steps = np.diff(np.stack(moved), axis=0)
  # g then mu g + g; Nesterov: (1 + mu) g, then (1 + mu (1 + mu)) g.
  ratio = (1 + 0.9 * 1.9) / 1.9
  np.testing.assert_allclose(steps[1], ratio * steps[0], rtol=1e-4)


def test_delayed_momentum_outlives_its_syncer_and_a_return_to_a_cut(snapshots):
  config = config_lib.from_mapping(
    {
      "sync": {"merge": "mean"},
      "outer": {
        **dict(optimizer="delayed_nesterov", delay=3, delay_c=0.2),
        **dict(learning_rate=0.5, momentum=0.9),
      },
    }
  )
  payloads = [keys.global_prefix(0, v, "s1.0") for v in range(9)]
  write(snapshots, f"{payloads[0]}/params", np.zeros((4, 3), np.float32))
  grads = [normal(seed) for seed in range(1, 9)]

  def step(before, after, number, grad):
    # A new one each time, as after a take-over.
    merger = round_merge.RoundMerger.of(snapshots, PLAN, config)
    share = contribute(snapshots, merger, grad, after), 1.0
    found = head(merger, number, payloads[before])
    merge(merger, found, payloads[after], share)
    return snapshots.arrays.read(f"{payloads[after]}/params", "w")

  found = [step(n, n + 1, n, grads[n]) for n in range(5)]
  settings = {"rate": 0.5, "mu": 0.9, "n": 3, "c": 0.2}
  right = oracles.outer_steps("delayed_nesterov", grads[:5], **settings)
  np.testing.assert_allclose(found, list(right), rtol=1e-5, atol=1e-6)
  # Back to version 2, whose values the head then has under a larger number.
  line = [*grads[:2], *grads[5:8]]
  *_, right = oracles.outer_steps("delayed_nesterov", line, **settings)
  step(2, 6, 9, grads[5])
  step(6, 7, 10, grads[6])
  theta = step(7, 8, 11, grads[7])
  np.testing.assert_allclose(theta, right, rtol=1e-5, atol=1e-6)


def test_damaged_contribution_is_named_and_nothing_is_written(
  snapshots, merger
):
  first = keys.global_prefix(0, 0, "i0.1")
  write(snapshots, f"{first}/params", normal(0))
  good = contribute(snapshots, merger, normal(1), 0)
  bad = contribute(snapshots, merger, normal(2), 1)
  snapshots.delete_tree(bad.payload)
  payload = keys.global_prefix(0, 1, "s1.0")
  with pytest.raises(protocol.RefusedError) as refused:
    merge(merger, head(merger, 0, first), payload, (good, 1.0), (bad, 1.0))
  assert list(refused.value.reasons) == [bad.key]
  assert snapshots.names(payload) == []


@pytest.mark.parametrize("embeddings", ["rda", "mean"])
@pytest.mark.parametrize("body", ["rda", "mean"])
def test_embeddings_and_body_are_merged_each_in_its_way(
  tmp_path, body, embeddings
):
  snapshots = store.SnapshotStore(tmp_path.as_uri())
  rows = {"embedding": "mean", "w": "rda"}
  plan = partition.partition(
    [partition.Tensor(name, (2,), merge) for name, merge in rows.items()], 1
  )
  config = config_lib.from_mapping(
    {"sync": {"merge": body, "merge_embeddings": embeddings}}
  )
  merger = round_merge.RoundMerger.of(snapshots, plan, config)

  def put(prefix, values):
    tensor = np.asarray(values, np.float32)
    snapshots.arrays.write(
      prefix, [arrays.Tensor.whole(name, tensor) for name in rows]
    )

  first, payload = (keys.global_prefix(0, v, "x") for v in (0, 1))
  put(f"{first}/params", [0, 0])
  sent = []
  for island, grad in enumerate(([4, 0], [0, 4])):
    record = contribute(snapshots, merger, normal(1), island)
    put(record.payload, grad)
    sent.append((dataclasses.replace(record, norms=[4.0, 4.0]), 1.0))
  merged = merge(merger, head(merger, 0, first), payload, *sent)
  # Half the way, and by RDA in direction only: length 4 as before.
  moved = {"mean": 2.0, "rda": 8**0.5}
  for name, method in (("embedding", embeddings), ("w", body)):
    values = snapshots.arrays.read(f"{payload}/params", name)
    np.testing.assert_allclose(values, [-moved[method]] * 2, rtol=1e-6)
  lengths = [moved[m] * 2**0.5 for m in (body, embeddings)]
  assert merged.outer_grad_norm == pytest.approx(np.hypot(*lengths))
  assert merged.cosine == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("scales", [(1, 1, 9), (0, 0, 5), (0, 0, 0)])
def test_contributions_longer_than_most_are_shortened(snapshots, scales):
  config = config_lib.from_mapping(
    {"sync": {"merge": "mean", "merge_clip": 1.5}}
  )
  merger = round_merge.RoundMerger.of(snapshots, PLAN, config)
  merger.set_learning_rate(0.5)  # which leaves the other rules as they were
  first, payload = (keys.global_prefix(0, v, "x") for v in (0, 1))
  write(snapshots, f"{first}/params", np.zeros((4, 3), np.float32))
  grads = [scale * normal(i) for i, scale in enumerate(scales, 1)]
  sent = [
    (contribute(snapshots, merger, g, i), 1.0) for i, g in enumerate(grads)
  ]
  merge(merger, head(merger, 0, first), payload, *sent)
  found = snapshots.arrays.read(f"{payload}/params", "w")
  right = np.mean(oracles.clipped(grads, 1.5), axis=0)
  np.testing.assert_allclose(found, -0.5 * right, rtol=1e-4, atol=1e-6)


def test_every_tensor_is_held_to_its_own_norm(tmp_path):
  snapshots = store.SnapshotStore(tmp_path.as_uri())
  sizes = {"long": 9, "short": 4}
  plan = partition.partition(
    [partition.Tensor(name, (size,), "mean") for name, size in sizes.items()],
    1,
  )
  outer = outer_optimizer.OuterOptimizer(1.0, 0.0)
  merger = round_merge.RoundMerger(snapshots, plan, "mean", outer)

  def put(prefix, value):
    snapshots.arrays.write(
      prefix,
      [
        arrays.Tensor.whole(name, np.full(size, value, np.float32))
        for name, size in sizes.items()
      ],
    )

  first, payload = (keys.global_prefix(0, v, "x") for v in (0, 1))
  put(f"{first}/params", 0)
  record = contribute(snapshots, merger, normal(1))
  put(record.payload, 2)
  lengths = [2 * sizes[t.name] ** 0.5 for t in plan.fragments[0]]
  sound = dataclasses.replace(record, norms=lengths)
  merged = merge(merger, head(merger, 0, first), payload, (sound, 1.0))
  assert merged.outer_grad_norm == pytest.approx(2 * 13**0.5)
  for wrong in ([lengths[0]] * 2, [lengths[1]] * 2):
    lying = dataclasses.replace(record, norms=wrong)
    with pytest.raises(protocol.RefusedError, match="norm_mismatch"):
      merge(merger, head(merger, 0, first), payload, (lying, 1.0))


@pytest.mark.parametrize(
  ("counted", "alone", "rate", "share"),
  [
    (True, False, 0.3, 1 / 4),
    (False, False, 0.4, 1 / 3),
    # In outer steps of one island each, three of four are absent.
    (True, True, 0.1, 1 / 4),
    (False, True, 0.4, 1),
  ],
)
def test_islands_that_are_absent_count_as_zeros_where_they_are_counted(
  snapshots, counted, alone, rate, share
):
  outer = outer_optimizer.OuterOptimizer(0.4, 0.0, count_absent=counted)
  rules = merge_lib.Rules(one_by_one=alone)
  merger = round_merge.RoundMerger(snapshots, PLAN, "mean", outer, rules)
  first = "globals/0000/000000000.i0.1"
  write(snapshots, f"{first}/params", np.zeros((4, 3), np.float32))
  sent = [contribute(snapshots, merger, normal(m), m) for m in range(3)]
  weights = (1.0, 1.0, 1.0)
  for payload in ("globals/b", "globals/a"):  # of each round anew
    merged = merger.merge(
      operations.Merge(
        head(merger, 0, first), payload, tuple(sent), weights, 0.75
      )
    )
    assert merged.learning_rate == pytest.approx(rate)
  found = snapshots.arrays.read("globals/a/params", "w")
  expected = -0.4 * share * sum(normal(m) for m in range(3))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_learning_rate_set_during_a_merge_is_of_the_next(
  snapshots, merger, monkeypatch
):
  first = "globals/0000/000000000.i0.1"
  write(snapshots, f"{first}/params", np.zeros((4, 3), np.float32))
  sent = contribute(snapshots, merger, np.ones((4, 3), np.float32))
  read = merger._read

  def meanwhile(*args):
    merger.set_learning_rate(0.25)  # by the thread that leads
    return read(*args)

  with monkeypatch.context() as patch:
    patch.setattr(merger, "_read", meanwhile)
    merged = merge(merger, head(merger, 0, first), "globals/a", (sent, 1.0))
  assert merged.learning_rate == 0.5
  after = merge(merger, head(merger, 0, first), "globals/b", (sent, 1.0))
  assert after.learning_rate == 0.25
  values = [
    snapshots.arrays.read(f"globals/{name}/params", "w") for name in "ab"
  ]
  np.testing.assert_allclose(values[0], 2 * values[1], rtol=1e-6)


def test_versions_in_bfloat16_are_decoded_from_a_master_that_moves_on(
  tmp_path, snapshots
):
  step = outer_optimizer.OuterOptimizer(0.01, 0.0)  # shorter than a place
  merger = round_merge.RoundMerger(
    snapshots, PLAN, "mean", step, down_codec="bf16"
  )
  theta = 1 + np.abs(normal(0))
  before = head(merger, 0, keys.global_prefix(0, 0, "i0.1"))
  write(snapshots, f"{before.payload}/params", theta)
  grad = np.full((4, 3), 0.1, np.float32)
  sent = contribute(snapshots, merger, grad), 1.0
  plain = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  fetcher = fetching.Fetcher(snapshots, PLAN, {"w": plain})
  verifier = verify.Verifier(tmp_path, snapshots, PLAN, buffers=())
  for version in range(1, 9):
    payload = keys.global_prefix(0, version, "s1.0")
    merged = merge(merger, before, payload, sent)
    before = dataclasses.replace(
      head(merger, version, payload), codec="bf16", digest=merged.digest
    )
    verifier.check_version(before)
    theta = theta - np.float32(0.01) * grad
    decoded = theta.astype(ml_dtypes.bfloat16).astype(np.float32)
    adopted = np.asarray(fetcher.read(before)["w"])
    np.testing.assert_array_equal(adopted, decoded)
    assert merged.digest == digest.tensors([("w", adopted)])
  master = snapshots.arrays.read(f"{before.payload}/master", "w")
  np.testing.assert_array_equal(master, theta)
  assert np.any(master != decoded)
  snapshots.delete_tree(f"{before.payload}/master")
  with pytest.raises(errors.CorruptSnapshotError):
    verifier.check_version(before)


def test_four_bits_of_difference_lead_to_what_everybody_else_adopts(snapshots):
  merger = round_merge.RoundMerger(
    snapshots,
    PLAN,
    "mean",
    outer_optimizer.OuterOptimizer(0.5, 0.0),
    down_codec="int4:8",
  )
  theta = normal(0)
  before = dataclasses.replace(
    head(merger, 0, keys.global_prefix(0, 0, "i0.1")), digest="first"
  )
  write(snapshots, f"{before.payload}/params", theta)
  plain = {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
  # One adopts each version, one every second, and one comes late.
  always, seldom, late = (
    fetching.Fetcher(snapshots, PLAN, plain) for _ in range(3)
  )
  for fetcher in (always, seldom):
    fetcher.hold(0, "first", {"w": jnp.asarray(theta)})
  for version in range(1, 9):
    grad = normal(version)
    payload = keys.global_prefix(0, version, "s1.0")
    share = contribute(snapshots, merger, grad), 1.0
    merged = merge(merger, before, payload, share)
    theta = theta - np.float32(0.5) * grad
    deltas = [*before.deltas, [before.digest, payload]][-3:]
    before = dataclasses.replace(
      head(merger, version, payload),
      digest=merged.digest,
      deltas=deltas,
      delta_codec=merger.delta_codec,
    )
    whole = snapshots.arrays.read(f"{payload}/params", "w")
    for fetcher, every, size in ((always, 1, 1), (seldom, 2, 2)):
      if version % every == 0:
        found = np.asarray(fetcher.read(before)["w"])
        assert found.tobytes() == whole.tobytes()
        assert fetcher.bytes_read == size * (6 + 2 * 2)  # twelve values
    # It is off by the rounding of the last difference alone.
    assert np.abs(whole - theta).max() < 0.5 * 0.1 * 8
    master = snapshots.arrays.read(f"{payload}/master", "w")
    np.testing.assert_array_equal(master, theta)
  found = np.asarray(late.read(before)["w"])
  assert found.tobytes() == whole.tobytes()
  assert late.bytes_read == whole.nbytes
  # What is retired or damaged is made up for by the whole.
  lost = dataclasses.replace(before, deltas=[[merged.digest, "gone"]])
  assert np.asarray(always.read(lost)["w"]).tobytes() == whole.tobytes()
  assert always.bytes_read == whole.nbytes
  spoilt = dataclasses.replace(before, deltas=[[merged.digest, payload]])
  assert np.asarray(always.read(spoilt)["w"]).tobytes() == whole.tobytes()
  assert always.bytes_read == whole.nbytes


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("size", [1, 7, 128, 1000, 70_000])
def test_syncer_encodes_to_the_nearest_as_the_devices_do(name, size):
  rng = np.random.default_rng(size)
  values = rng.standard_normal(size).astype(np.float32)
  values[rng.random(size) < 0.1] = 0
  coded = codec.of(name, 16)
  row = coded.encode(values)
  (device,), decoded = packing.encode(
    packing.Encoding(coded), jnp.asarray(values), (size,), None
  )
  assert row.tobytes() == np.asarray(device).tobytes()
  found = np.empty(size, np.float32)
  coded.decode(row, found)
  np.testing.assert_array_equal(found, decoded)
