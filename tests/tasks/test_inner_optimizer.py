"""What one step of each inner optimizer is, against NumPy in float64."""

import dataclasses

import jax
import numpy as np
import pytest

from diloco import errors
from diloco.tasks import inner_optimizer

_OPTIONS = inner_optimizer.Options(
  learning_rate=0.1, warmup_steps=0, weight_decay=0.5, clip_norm=1e9
)


def _params(seed):
  rng = np.random.default_rng(seed)
  shapes = {
    "embedding": (5, 4),
    "wide": (3, 6),
    "experts": (2, 4, 3),
    "norm": (4,),
  }
  return {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def _polynomial(matrix):
  """Newton and Schulz's, five times, on the singular values."""
  left, singular, right = np.linalg.svd(matrix, full_matrices=False)
  singular /= np.linalg.norm(singular)
  for _ in range(5):
    singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
  return left @ np.diag(singular) @ right


def _first_direction(name, gradient, optimizer):
  """The first step's, in which moments are the gradient's own."""
  if optimizer == "adamw" or name in ("embedding", "norm"):
    return np.sign(gradient)
  # The look ahead weighs the one gradient, and a matrix's weight is lost.
  matrices = gradient.reshape(-1, *gradient.shape[-2:]).astype(np.float64)
  scale = 0.2 * np.sqrt(max(gradient.shape[-2:]))
  return np.reshape([scale * _polynomial(m) for m in matrices], gradient.shape)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_first_step_is_the_direction_and_the_decay(optimizer):
  options = dataclasses.replace(_OPTIONS, optimizer=optimizer)
  made = inner_optimizer.make(options, 10, lambda path: path == "embedding")
  params, gradients = _params(0), _params(1)
  updates, _ = jax.jit(made.update)(gradients, made.init(params), params)
  for name, update in updates.items():
    direction = _first_direction(name, gradients[name], optimizer)
    decay = 0.0 if name == "norm" else 0.5
    # float32, through five matrix polynomials.
    np.testing.assert_allclose(
      update, -0.1 * (direction + decay * params[name]), atol=2e-5
    )


def test_muon_has_one_moment_of_matrices_and_two_of_the_rest():
  made = inner_optimizer.make(
    dataclasses.replace(_OPTIONS, optimizer="muon"),
    10,
    lambda path: path == "embedding",
  )
  state = jax.eval_shape(made.init, _params(0))
  shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
  assert {s: shapes.count(s) for s in ((3, 6), (2, 4, 3), (5, 4), (4,))} == {
    (3, 6): 1,
    (2, 4, 3): 1,
    (5, 4): 2,
    (4,): 2,
  }


@pytest.mark.parametrize(
  ("changes", "what", "why"),
  [
    ({"optimizer": "muons"}, "optimizer='muons'", "not known"),
    ({"muon_momentum": 1.0}, "muon_momentum=1.0", "below 1"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1", "at least 0"),
    ({"warmup_steps": 1.5}, "warmup_steps=1.5", "float, not a int"),
  ],
)
def test_options_that_cannot_work_are_refused(changes, what, why):
  with pytest.raises(errors.UserError) as caught:
    dataclasses.replace(_OPTIONS, **changes)
  assert what in caught.value.what and why in caught.value.why
