"""The mixture of experts against loops in NumPy, and divided over a mesh."""

import jax
import numpy as np
import pytest

from diloco.islands import inner_step, placement
from diloco.tasks import language_model
from diloco.tasks.models import experts, transformer

_SIZES = transformer.TransformerConfig(
  vocab=256, d_model=8, num_layers=1, num_heads=2, d_ff=6, mlp="swiglu"
)
_OPTIONS = language_model.LanguageModelConfig(
  d_model=16, num_layers=1, num_heads=2, d_ff=8, seq_len=16, batch_size=4,
  num_experts=4, capacity_factor=1.0,
  z_loss=0.0, balance_loss=0.5, router_z_loss=0.25,
)  # fmt: skip


def _reference(params, x, k, capacity):
  """One token after another; returns outputs and what the router did."""
  p = {n: np.float64(v) for n, v in params.items() if n != "norm"}
  count = p["router"].shape[1]
  outputs, probabilities, chosen = np.zeros_like(x), [], np.zeros(count, int)
  for token, value in enumerate(x):
    normed = value / np.sqrt(np.mean(value**2) + 1e-6)
    logits = normed @ p["router"]
    probabilities.append(np.exp(logits) / np.exp(logits).sum())
    for e in np.argsort(-logits)[:k]:
      chosen[e] += 1
      if chosen[e] <= capacity:
        gate = normed @ p["gate"][e]
        hidden = gate / (1 + np.exp(-gate)) * (normed @ p["up"][e])
        outputs[token] += probabilities[-1][e] * (hidden @ p["down"][e])
  share = chosen / (k * len(x))
  balance = count * share @ np.mean(probabilities, axis=0)
  return outputs, share, balance, np.maximum(chosen - capacity, 0).sum()


@pytest.mark.parametrize(
  ("k", "factor", "capacity"), [(1, 1.0, 6), (2, 2.0, 24)]
)
def test_tokens_go_where_loops_send_them(k, factor, capacity):
  routing = experts.RoutingConfig(4, k, factor)
  rng = np.random.default_rng(0)
  shapes = {"router": (8, 4), "gate": (4, 8, 6), "up": (4, 8, 6)}
  shapes |= {"down": (4, 6, 8)}
  params = {n: rng.normal(size=s).astype("f") for n, s in shapes.items()}
  params["norm"] = {"scale": np.zeros(8, "f")}
  x = rng.normal(size=(2, 12, 8)).astype("f")
  apply = jax.jit(
    experts.Experts(_SIZES, routing).apply, static_argnames="mutable"
  )
  made, collections = apply({"params": params}, x, mutable=experts.MUTABLE)
  done = experts.routed(collections)
  outputs, share, balance, dropped = _reference(
    params, np.float64(x).reshape(-1, 8), k, capacity
  )
  assert routing.capacity(24) == capacity
  # float32 sums of products of up to 8 terms.
  np.testing.assert_allclose(made.reshape(-1, 8), outputs, atol=1e-4)
  np.testing.assert_allclose(done.share[0], share, rtol=1e-6)
  np.testing.assert_allclose(done.balance[0], balance, rtol=1e-5)
  np.testing.assert_allclose(done.dropped[0], dropped / (24 * k), atol=1e-6)
  assert (dropped > 0) == (factor < 4 / k)


@pytest.fixture(scope="module")
def task():
  return language_model.LanguageModel(_OPTIONS)


@pytest.fixture(scope="module")
def params(task):
  return task.init(jax.random.key(0))


@pytest.fixture(scope="module")
def loss(task):
  return jax.jit(task.loss)


@pytest.fixture
def batch():
  rng = np.random.default_rng(0)
  return {"tokens": rng.integers(0, 256, (4, 17)).astype(np.int32)}


def test_loss_is_the_sum_of_its_parts(params, loss, batch):
  total, metrics = loss(params, batch)
  parts = [metrics[name] for name in ("nll", "balance", "router_z")]
  np.testing.assert_allclose(total, np.dot(parts, [1, 0.5, 0.25]), rtol=1e-6)
  shares = [metrics[f"expert_{e}_share"] for e in range(4)]
  np.testing.assert_allclose(sum(shares), 1.0, rtol=1e-6)
  assert metrics["busiest_share"] >= max(shares)


def test_other_rows_matter_in_training_alone(task, params, loss, batch):
  turned = {"tokens": batch["tokens"][::-1]}
  one, other = (loss(params, rows)[1] for rows in (batch, turned))
  # Who comes last is dropped.
  assert one["dropped"] > 0 and abs(one["nll"] - other["nll"]) > 1e-5
  evaluate = jax.jit(task.eval_loss)
  totals = [evaluate(params, rows)[0] for rows in (batch, turned)]
  np.testing.assert_allclose(*totals, rtol=1e-6)


def test_experts_on_two_devices_lose_what_they_lose_on_one(
  task, params, loss, batch
):
  where = placement.Placement((1, 2), jax.devices(), placement.Rules.of(task))
  tree = inner_step.ParamTree(task, 0)
  placed = {
    name: jax.device_put(leaf, where.param(name, leaf.shape))
    for name, leaf in tree.flatten(params).items()
  }
  gate, rows = placed["layer_0/mlp/gate"], where.put_batch(batch)
  assert gate.sharding.shard_shape(gate.shape) == (2, 16, 8)
  assert placed["layer_0/attention/query"].is_fully_replicated
  assert rows["tokens"].sharding.shard_shape((4, 17)) == (2, 17)
  one, two = loss(params, batch), loss(tree.unflatten(placed), rows)
  for expected, found in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    # float32 sums in another order.
    np.testing.assert_allclose(found, expected, rtol=2e-5)
