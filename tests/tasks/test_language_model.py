"""The language model learns, starts where it should, and refuses nonsense."""

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest

from diloco import errors
from diloco.tasks import language_model

_TINY = language_model.LanguageModelConfig(
  d_model=32,
  num_layers=1,
  num_heads=2,
  d_ff=48,
  seq_len=32,
  batch_size=8,
  learning_rate=1e-2,
  warmup_steps=5,
)


@pytest.fixture(scope="module")
def corpus_glob(tmp_path_factory):
  root = tmp_path_factory.mktemp("corpus")
  for index in range(8):
    lines = (f"island {index} step {n}\n" for n in range(100))
    (root / f"{index}.txt").write_text("".join(lines))
  return str(root / "*.txt")


def _find_state(state, kind):
  found = [
    node
    for node in jax.tree.leaves(state, is_leaf=lambda n: isinstance(n, kind))
    if isinstance(node, kind)
  ]
  assert len(found) == 1
  return found[0]


def test_initial_loss_is_that_of_a_uniform_guess(corpus_glob):
  config = dataclasses.replace(
    _TINY, d_model=128, num_layers=2, data_glob=corpus_glob
  )
  model = language_model.LanguageModel(config)
  stream = model.batches("train", share=0, num_shares=1, seed=0)
  params = model.init(jax.random.key(0))
  loss, metrics = jax.jit(model.loss)(params, next(stream))
  stream.close()
  # Small random logits cost a little more than none.
  assert math.log(256) - 0.05 < metrics["nll"] < math.log(256) + 0.15
  # The z-loss of logits near zero is z_loss * ln(256)^2.
  assert float(loss - metrics["nll"]) == pytest.approx(
    config.z_loss * math.log(256) ** 2, rel=0.1
  )


def test_training_lowers_the_heldout_loss(corpus_glob):
  config = dataclasses.replace(
    _TINY, data_glob=corpus_glob, heldout_fraction=0.3
  )
  model = language_model.LanguageModel(config)
  optimizer = model.optimizer(60)
  params = model.init(jax.random.key(0))
  state = optimizer.init(params)

  @jax.jit
  def step(params, state, batch):
    _, gradients = jax.value_and_grad(model.loss, has_aux=True)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  evaluate = jax.jit(model.eval_loss)
  heldout = model.batches("heldout", share=0, num_shares=1, seed=0)
  batch = next(heldout)
  before, tokens = evaluate(params, batch)
  train = model.batches("train", share=0, num_shares=1, seed=0)
  for _ in range(60):
    params, state = step(params, state, next(train))
  after, _ = evaluate(params, batch)
  train.close()
  heldout.close()
  assert tokens == config.batch_size * config.seq_len
  # From 5.5 nats; such repetitive text costs well below 2 once learned.
  assert after / tokens < 2.0 < before / tokens


def test_schedule_and_adam_count_apart():
  model = language_model.LanguageModel(_TINY)
  optimizer = model.optimizer(100)
  params = {"kernel": np.ones((2, 2), np.float32)}
  state = optimizer.init(params)
  assert _find_state(state, optax.ScaleByAdamState).count == 0
  assert _find_state(state, optax.ScaleByScheduleState).count == 0


def test_schedule_warms_up_then_ends_at_its_fraction():
  config = dataclasses.replace(_TINY, weight_decay=0.0, b1=0.0, b2=0.0)
  model = language_model.LanguageModel(config)
  optimizer = model.optimizer(40)
  params = {"kernel": np.ones((2, 2), np.float32)}
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  rates = []
  for _ in range(42):
    # With b1 = b2 = 0 Adam's step is the gradient's sign.
    updates, state = update(params, state, params)
    rates.append(-float(updates["kernel"][0, 0]))
  assert rates[0] == pytest.approx(config.learning_rate / 6, rel=1e-4)
  assert np.argmax(rates) == config.warmup_steps
  assert max(rates) == pytest.approx(config.learning_rate, rel=1e-4)
  end = config.learning_rate * config.final_lr_fraction
  assert rates[40] == rates[41] == pytest.approx(end, rel=1e-4)


@pytest.mark.parametrize("schedule_steps", [1, 2, 7])
def test_short_schedules_still_work(schedule_steps):
  optimizer = language_model.LanguageModel(_TINY).optimizer(schedule_steps)
  params = {"kernel": np.ones((2, 2), np.float32)}
  state = optimizer.init(params)
  for _ in range(schedule_steps + 1):
    updates, state = optimizer.update(params, state, params)
    assert np.all(np.isfinite(updates["kernel"]))


def test_weight_decay_spares_vectors():
  config = dataclasses.replace(_TINY, weight_decay=0.5)
  optimizer = language_model.LanguageModel(config).optimizer(10)
  params = {
    "kernel": np.ones((2, 2), np.float32),
    "scale": np.ones(2, np.float32),
  }
  zeros = jax.tree.map(np.zeros_like, params)
  updates, _ = optimizer.update(zeros, optimizer.init(params), params)
  assert np.all(updates["kernel"] < 0)
  assert np.all(updates["scale"] == 0)


def test_tokens_may_be_bytes():
  model = language_model.LanguageModel(_TINY)
  params = model.init(jax.random.key(0))
  tokens = np.arange(18, dtype=np.uint8).reshape(2, 9)
  evaluate = jax.jit(model.eval_loss)
  as_bytes = evaluate(params, {"tokens": tokens})
  as_ints = evaluate(params, {"tokens": tokens.astype(np.int32)})
  assert as_bytes == as_ints


def test_only_the_embedding_merges_as_one():
  model = language_model.LanguageModel(_TINY)
  params = jax.eval_shape(model.init, jax.random.key(0))
  paths = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]
  assert [p for p in paths if model.is_embedding(p)] == ["embedding"]


@pytest.mark.parametrize(
  ("changes", "what", "why"),
  [
    ({"d_model": 0}, "d_model=0", "at least 1"),
    ({"seq_len": 0}, "seq_len=0", "at least 1"),
    ({"num_layers": 2.0}, "num_layers=2.0", "float, not a int"),
    ({"batch_size": True}, "batch_size=True", "bool, not a int"),
    ({"data_glob": 3}, "data_glob=3", "int, not a str"),
    ({"d_model": 30, "num_heads": 4}, "num_heads=4", "same even number"),
    ({"vocab": 100}, "vocab=100", "256"),
    ({"num_experts": -1}, "num_experts=-1", "at least 0"),
    ({"num_experts": 1}, "experts_per_token=2", "only num_experts=1"),
    ({"capacity_factor": 0.5}, "capacity_factor=0.5", "at least 1"),
    ({"mlp": "relu"}, "mlp='relu'", "not known"),
    ({"compute_dtype": "float16"}, "'float16'", "not known"),
    ({"learning_rate": 0.0}, "learning_rate=0.0", "above 0"),
    ({"learning_rate": math.nan}, "learning_rate=nan", "above 0"),
    ({"clip_norm": -1.0}, "clip_norm=-1.0", "above 0"),
    ({"z_loss": -1.0}, "z_loss=-1.0", "at least 0"),
    ({"b1": 1.0}, "b1=1.0", "below 1"),
    ({"final_lr_fraction": 1.5}, "final_lr_fraction=1.5", "between 0 and 1"),
    ({"heldout_fraction": 0.0}, "heldout_fraction=0.0", "exclusive"),
  ],
)
def test_options_that_cannot_work_are_refused(changes, what, why):
  with pytest.raises(errors.UserError) as caught:
    dataclasses.replace(_TINY, **changes)
  assert what in caught.value.what
  assert why in caught.value.why
  assert "\n" not in str(caught.value)


def test_integers_serve_as_floats():
  assert dataclasses.replace(_TINY, clip_norm=1).clip_norm == 1


def test_a_missing_corpus_is_noticed_at_once(tmp_path):
  config = dataclasses.replace(_TINY, data_glob=str(tmp_path / "none*.txt"))
  with pytest.raises(errors.UserError, match="no file matches"):
    language_model.LanguageModel(config)
