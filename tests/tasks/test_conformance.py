"""What every task must keep to. A task joins by adding one row to `_TASKS`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.tasks import language_model, task, vision
from experiments.configs import own_task


class _LineStream:
  """Random points of a line, computed from the position alone."""

  def __init__(self, entropy):
    self.position = 0
    self._entropy = entropy

  def __next__(self) -> task.Batch:
    rng = np.random.default_rng([*self._entropy, self.position])
    self.position += 1
    x = rng.normal(size=(4, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=-1)}

  def seek(self, position: int) -> None:
    self.position = position

  def close(self) -> None:
    pass


class _LineTask:
  """Linear regression in plain JAX: the smallest complete task."""

  tokens_per_batch = 4

  def init(self, rng: jax.Array) -> task.Params:
    return {"weight": jax.random.normal(rng, (3,)), "bias": jnp.zeros(())}

  def loss(self, params: task.Params, batch: task.Batch):
    loss = jnp.mean(self._errors(params, batch))
    return loss, {"squared_error": loss}

  def eval_loss(self, params: task.Params, batch: task.Batch):
    squared = self._errors(params, batch)
    return jnp.sum(squared), jnp.float32(squared.size)

  def optimizer(self, schedule_steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.linear_schedule(0.1, 0.0, schedule_steps))

  def batches(
    self, split: task.Split, *, share: int, num_shares: int, seed: int
  ) -> _LineStream:
    return _LineStream([split == "train", share, num_shares, seed])

  def is_embedding(self, path: str) -> bool:
    del path
    return False

  def _errors(self, params, batch):
    predicted = batch["x"] @ params["weight"] + params["bias"]
    return jnp.square(predicted - batch["y"])


def _tiny_language_model(**changes) -> task.Task:
  options = dict(d_model=16, num_layers=1, num_heads=2, d_ff=16)
  options |= dict(seq_len=16, batch_size=2, **changes)
  config = language_model.LanguageModelConfig(**options)
  return language_model.LanguageModel(config)


_TASKS = {
  "language_model": _tiny_language_model,
  "language_model_of_experts_in_bfloat16": lambda: _tiny_language_model(
    compute_dtype="bfloat16", mlp="swiglu", num_experts=3
  ),
  "vision": lambda: vision.Vision(
    vision.VisionConfig(
      d_model=16, num_layers=1, num_heads=2, d_ff=16, batch_size=2
    )
  ),
  "plain_jax_line": _LineTask,
  "own_task": lambda: own_task.ModularAddition({"modulus": 13, "width": 4}),
}


@pytest.fixture(scope="module", params=sorted(_TASKS))
def joined(request) -> task.Task:
  return _TASKS[request.param]()


@pytest.fixture(scope="module")
def params(joined) -> task.Params:
  return joined.init(jax.random.key(3))


@pytest.fixture(scope="module")
def stepped(joined, params):
  """Loss, metrics and gradients of a first batch."""
  (batch,) = _take(_stream(joined), 1)
  step = jax.jit(jax.value_and_grad(joined.loss, has_aux=True))
  (loss, metrics), gradients = step(params, batch)
  return loss, metrics, gradients


def _stream(joined, split="train", share=0, seed=0):
  return joined.batches(split, share=share, num_shares=2, seed=seed)


def _take(stream, count):
  batches = [next(stream) for _ in range(count)]
  stream.close()
  return batches


def _equal(first, second) -> bool:
  return jax.tree.all(jax.tree.map(np.array_equal, first, second))


def test_equal_seeds_give_equal_float32_params(joined, params):
  assert _equal(params, joined.init(jax.random.key(3)))
  assert not _equal(params, joined.init(jax.random.key(4)))
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_loss_and_gradients_are_finite_float32(params, stepped):
  loss, metrics, gradients = stepped
  assert loss.shape == () and loss.dtype == jnp.float32
  assert all(np.shape(value) == () for value in metrics.values())
  assert jax.tree.structure(gradients) == jax.tree.structure(params)
  for leaf in (loss, *jax.tree.leaves(gradients)):
    assert leaf.dtype == jnp.float32
    assert np.all(np.isfinite(leaf))


def test_eval_loss_counts_what_it_sums(joined, params):
  (batch,) = _take(_stream(joined, "heldout"), 1)
  total, tokens = jax.jit(joined.eval_loss)(params, batch)
  assert total.dtype == tokens.dtype == jnp.float32
  assert total.shape == tokens.shape == ()
  assert tokens == joined.tokens_per_batch
  assert total > 0


def test_optimizer_moves_every_leaf_and_keeps_its_dtype(
  joined, params, stepped
):
  optimizer = joined.optimizer(10)
  _, _, gradients = stepped
  update = jax.jit(optimizer.update)
  updates, _ = update(gradients, optimizer.init(params), params)
  moved = optax.apply_updates(params, updates)
  for before, after in zip(
    jax.tree.leaves(params), jax.tree.leaves(moved), strict=True
  ):
    assert after.dtype == jnp.float32
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_position_is_a_checkpoint_of_the_stream(joined, split):
  expected = _take(_stream(joined, split), 6)
  stream = _stream(joined, split)
  assert stream.position == 0
  stream.seek(4)
  assert _equal(next(stream), expected[4])
  assert stream.position == 5
  stream.seek(1)
  assert _equal(_take(stream, 5), expected[1:])


def test_batches_are_numpy_with_one_leading_axis(joined):
  (batch,) = _take(_stream(joined), 1)
  leaves = list(batch.values())
  assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
  assert len({leaf.shape[0] for leaf in leaves}) == 1


def test_shares_and_seeds_give_other_batches(joined):
  first = _take(_stream(joined), 2)
  assert not _equal(first, _take(_stream(joined, share=1), 2))
  assert not _equal(first, _take(_stream(joined, seed=1), 2))


def test_is_embedding_answers_for_every_leaf(joined, params):
  for path, _ in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    assert joined.is_embedding(name) in (True, False)
