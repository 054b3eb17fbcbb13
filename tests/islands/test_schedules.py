"""Schedules follow an island's steps, whatever they are wrapped in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.islands import schedules
from diloco.tasks import inner_optimizer

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(())}
RATE = optax.linear_schedule(1.0, 0.0, 20)
STEPS = 7


def chained():
  return optax.adam(RATE)


def injected():
  return optax.inject_hyperparams(optax.adam)(learning_rate=RATE)


def accumulated():
  return optax.MultiSteps(optax.adam(RATE), 3)


def accumulated_ever_more():
  return optax.MultiSteps(optax.sgd(RATE), lambda step: 1 + step)


def accumulated_and_injected():
  return optax.MultiSteps(injected(), 2)


def by_label():
  return optax.multi_transform(
    {"fast": optax.adam(RATE), "slow": optax.sgd(RATE)},
    {"w": "fast", "b": "slow"},
  )


def masked_in_a_chain():
  return optax.chain(
    optax.clip(1.0), optax.masked(injected(), {"w": True, "b": False})
  )


def muon():
  options = inner_optimizer.Options(optimizer="muon", warmup_steps=2)
  return inner_optimizer.make(options, 20, lambda path: path == "b")


def if_finite():
  return optax.apply_if_finite(optax.adam(RATE), 3)


def trained(optimizer, steps):
  state = optimizer.init(PARAMS)
  update = jax.jit(optimizer.update)
  for _ in range(steps):
    state = update(PARAMS, state, PARAMS)[1]
  return state


@pytest.mark.parametrize(
  "make",
  [
    chained,
    injected,
    accumulated,
    accumulated_ever_more,
    accumulated_and_injected,
    by_label,
    masked_in_a_chain,
    muon,
    if_finite,
  ],
)
def test_counts_of_schedules_are_those_after_so_many_steps(make):
  optimizer = make()
  fresh = optimizer.init(PARAMS)
  moved = schedules.set_step(optimizer, fresh, PARAMS, STEPS)
  assert jax.tree.structure(moved) == jax.tree.structure(fresh)
  expected = schedules._counts(trained(optimizer, STEPS))
  assert schedules._counts(moved) == expected
  assert any(expected)
  # All else is as it was: moments, and the counts that are their age.
  back = schedules._with_counts(moved, schedules._counts(fresh))
  for before, after in zip(
    jax.tree.leaves(fresh), jax.tree.leaves(back), strict=True
  ):
    np.testing.assert_array_equal(before, after)


def test_recovered_schedule_goes_on_at_its_rate():
  optimizer = injected()
  fresh = optimizer.init(PARAMS)
  moved = schedules.set_step(optimizer, fresh, PARAMS, STEPS)
  after = optimizer.update(PARAMS, moved, PARAMS)[1]
  rate = after.hyperparams["learning_rate"]
  assert rate == pytest.approx(float(RATE(STEPS)))


def test_schedule_over_several_batches_follows_the_updates():
  optimizer = accumulated()
  fresh = optimizer.init(PARAMS)
  moved = schedules.set_step(optimizer, fresh, PARAMS, STEPS)
  # What was accumulated is not there any more: the batches are counted anew.
  assert (moved.gradient_step, moved.mini_step) == (STEPS // 3, 0)


def test_age_of_moments_stays():
  optimizer = chained()
  state = trained(optimizer, 3)
  moved = schedules.set_step(optimizer, state, PARAMS, STEPS)
  counts = [int(x) for x in jax.tree.leaves(moved) if x.dtype == jnp.int32]
  assert sorted(counts) == [3, STEPS]


def test_constant_rate_has_nothing_to_move():
  constant = optax.adam(0.1)
  state = constant.init(PARAMS)
  assert schedules.set_step(constant, state, PARAMS, STEPS) is state
