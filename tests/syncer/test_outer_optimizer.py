"""The outer step, by hand and against optax."""

import numpy as np
import optax
import pytest

from diloco.syncer import outer_optimizer


def test_two_nesterov_steps_by_hand():
  outer = outer_optimizer.OuterOptimizer(learning_rate=0.5, momentum=0.5)
  theta = np.array([8.0], np.float32)
  momentum = np.zeros(1, np.float32)
  gradient = np.array([4.0], np.float32)
  # b = 4, theta = 8 - 0.5 (4 + 0.5 * 4) = 5
  outer.step(theta, momentum, gradient)
  assert (theta[0], momentum[0]) == (5.0, 4.0)
  # b = 0.5 * 4 + 4 = 6, theta = 5 - 0.5 (4 + 0.5 * 6) = 1.5
  outer.step(theta, momentum, gradient)
  assert (theta[0], momentum[0]) == (1.5, 6.0)
  assert gradient[0] == 4.0


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_trajectory_equals_optax(nesterov, momentum):
  rng = np.random.default_rng(0)
  outer = outer_optimizer.OuterOptimizer(0.7, momentum, nesterov)
  theta = rng.standard_normal(50, dtype=np.float32)
  velocity = np.zeros_like(theta)
  reference = optax.sgd(0.7, momentum=momentum, nesterov=nesterov)
  expected = theta.copy()
  state = reference.init(expected)
  for _ in range(20):
    gradient = rng.standard_normal(50, dtype=np.float32)
    outer.step(theta, velocity, gradient)
    updates, state = reference.update(gradient, state)
    expected = np.asarray(optax.apply_updates(expected, updates))
    # Same operations in the same order; XLA may fuse a multiply and an add,
    # which saves one rounding of 6e-8 each.
    np.testing.assert_allclose(theta, expected, rtol=2e-6, atol=2e-6)


def test_scratch_changes_nothing():
  outer = outer_optimizer.OuterOptimizer(0.7, 0.9)
  gradient = np.arange(5, dtype=np.float32)
  results = []
  for scratch in (None, np.full(5, np.nan, np.float32)):
    theta, momentum = np.ones(5, np.float32), np.ones(5, np.float32)
    outer.step(theta, momentum, gradient, scratch)
    results.append((theta.tobytes(), momentum.tobytes()))
  assert results[0] == results[1]


@pytest.mark.parametrize(
  ("rate", "momentum"),
  [(0.0, 0.5), (-1.0, 0.5), (float("nan"), 0.5), (1.0, 1.0), (1.0, -0.1)],
)
def test_impossible_settings_are_refused(rate, momentum):
  with pytest.raises(ValueError, match="outer"):
    outer_optimizer.OuterOptimizer(rate, momentum)


def test_other_dtypes_and_shapes_are_refused():
  outer = outer_optimizer.OuterOptimizer(0.7, 0.9)
  good = np.ones(3, np.float32)
  for bad in (np.ones(3), np.ones(1, np.float32)):
    with pytest.raises(ValueError, match="float32 of one shape"):
      outer.step(good, good.copy(), bad)
