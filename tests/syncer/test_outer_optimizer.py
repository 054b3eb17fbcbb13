"""The outer steps: by hand, against optax and against float64 formulas."""

import hypothesis
import numpy as np
import optax
import oracles
import pytest
from hypothesis import strategies as st

from diloco.syncer import outer_optimizer


def optimizer(kind, rate, mu, n=1, c=0.0):
  return outer_optimizer.OuterOptimizer(
    rate, mu, optimizer=kind, delay=n, delay_c=c
  )


def trajectory(outer, gradients, theta=None):
  """Yields theta and the buffers after every step."""
  theta = np.zeros_like(gradients[0]) if theta is None else theta
  buffers = [np.zeros_like(theta) for _ in outer.buffers]
  for arrival, gradient in enumerate(gradients, start=1):
    before = gradient.copy()
    scratch = np.full_like(theta, np.nan)
    outer.step(theta, buffers, gradient, scratch, arrival)
    assert gradient.tobytes() == before.tobytes()
    yield theta.copy(), [buffer.copy() for buffer in buffers]


# How far each step goes where every outer gradient is 1; by hand.
GOLDEN = [
  (("sgd", 0.5, 0.0), [0.5, 0.5, 0.5, 0.5]),
  (("nesterov", 0.5, 0.5), [0.75, 0.875, 0.9375, 0.96875]),
  (("sgd", 0.5, 0.5), [0.75, 0.875, 0.9375, 0.96875]),
  (("heavy_ball", 0.5, 0.5), [0.5, 0.75, 0.875, 0.9375]),
  (("ema", 0.5, 0.5), [0.25, 0.375, 0.4375, 0.46875]),
  (("delayed_nesterov", 0.5, 0.5, 2, 0.0), [0.25, 0.5, 0.25, 0.625]),
  (("delayed_nesterov", 0.5, 0.5, 2, 0.5), [0.25, 0.375, 0.375, 0.4375]),
  (("delayed_nesterov", 0.5, 0.0, 2, 0.0), [0.25, 0.25, 0.25, 0.25]),
]


@pytest.mark.parametrize(("settings", "lengths"), GOLDEN)
def test_steps_along_a_constant_gradient(settings, lengths):
  ones = [np.ones(3, np.float32)] * 4
  found = [theta[0] for theta, _ in trajectory(optimizer(*settings), ones)]
  assert np.diff([0.0, *found]).tolist() == [-step for step in lengths]


@pytest.mark.parametrize("settings", [settings for settings, _ in GOLDEN])
def test_gain_is_what_steps_grow_to(settings):
  outer = optimizer(*settings)
  ones = [np.ones(1, np.float32)] * 64
  moved = [theta[0] for theta, _ in trajectory(outer, ones)]
  # Delayed steps are of unequal lengths: their mean over a turn.
  assert (moved[-9] - moved[-1]) / 8 == pytest.approx(outer.gain, rel=1e-5)


def test_heavy_ball_is_sgd_that_does_not_look_ahead():
  ones = [np.ones(2, np.float32)] * 5
  plain = outer_optimizer.OuterOptimizer(0.5, 0.5, nesterov=False)
  for a, b in zip(
    trajectory(plain, ones),
    trajectory(optimizer("heavy_ball", 0.5, 0.5), ones),
    strict=True,
  ):
    assert a[0].tobytes() == b[0].tobytes()


OPTAX = {
  "nesterov": lambda mu: optax.trace(mu, nesterov=True),
  "heavy_ball": lambda mu: optax.trace(mu, nesterov=False),
  "sgd": lambda mu: optax.trace(mu, nesterov=True),
  "ema": lambda mu: optax.ema(mu, debias=False),
}


@pytest.mark.parametrize("kind", OPTAX)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_trajectory_equals_optax(kind, momentum):
  rng = np.random.default_rng(0)
  gradients = rng.standard_normal((20, 50), dtype=np.float32)
  expected = rng.standard_normal(50, dtype=np.float32)
  reference = optax.chain(OPTAX[kind](momentum), optax.scale(-0.7))
  state = reference.init(expected)
  outer = optimizer(kind, 0.7, momentum)
  steps = trajectory(outer, gradients, theta=expected.copy())
  for gradient, (theta, buffers) in zip(gradients, steps, strict=True):
    updates, state = reference.update(gradient, state)
    expected = np.asarray(optax.apply_updates(expected, updates))
    # Same operations in the same order; XLA may fuse a multiply and an add,
    # which saves one rounding of 6e-8 each.
    np.testing.assert_allclose(theta, expected, rtol=2e-6, atol=2e-6)
    for buffer in buffers:
      kept = state[0].ema if kind == "ema" else state[0].trace
      np.testing.assert_allclose(buffer, kept, rtol=2e-6, atol=2e-6)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  kind=st.sampled_from(list(OPTAX) + ["delayed_nesterov"] * 4),
  mu=st.floats(0, 0.95),
  n=st.integers(1, 6),
  share=st.floats(0, 1),
  seed=st.integers(0, 99),
)
def test_every_step_is_that_of_its_formula(kind, mu, n, share, seed):
  gradients = np.random.default_rng(seed).standard_normal((13, 4), np.float32)
  known = {"sgd": "nesterov"}.get(kind, kind)  # `nesterov` is on
  expected = oracles.outer_steps(
    known, gradients, rate=0.7, mu=mu, n=n, c=share / n
  )
  outer = optimizer(kind, 0.7, mu, n, share / n)
  for (theta, _), right in zip(
    trajectory(outer, gradients), expected, strict=True
  ):
    # Some roundings of 6e-8 a step, of values of about 1 / (1 - mu).
    np.testing.assert_allclose(theta, right, rtol=1e-4, atol=1e-4)
