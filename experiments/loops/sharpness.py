"""Sharpness-aware minimization, as a loop of one's own.

A step takes two gradients: at the parameters, and where the loss is highest
within `_RADIUS` of them by the first. It is the second one that AdamW follows.
A task's own steps have one gradient; so these are no optimizer's but a loop's.

Reference: Foret et al., arXiv 2010.01412, algorithm 1.
"""

import functools
from typing import Any

import jax
import optax

import diloco

_RADIUS = 0.05  # rho


def train(island: diloco.Link) -> None:
  """Trains the run's task, such as the language model, on its own batches."""
  task = island.task
  rate = task.learning_rate(island.num_steps)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95)
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Any, state: Any, batch: Any, number: int) -> Any:
    gradient = jax.value_and_grad(task.loss, has_aux=True)
    (loss, _), uphill = gradient(params, batch)
    reach = _RADIUS / optax.tree.norm(uphill)
    highest = jax.tree.map(lambda p, g: p + reach * g, params, uphill)
    (above, _), downhill = gradient(highest, batch)
    updates, state = optimizer.update(downhill, state)
    # The schedule goes by the island's step: after a death, what is restored of
    # the state may be older.
    updates = jax.tree.map(lambda u: -rate(number) * u, updates)
    scalars = {"loss": loss, "sharpness": above - loss}
    return optax.apply_updates(params, updates), state, scalars

  params, state = island.begin(optimizer.init)
  stream = task.batches(
    "train",
    share=island.index,
    num_shares=island.num_islands,
    seed=island.seed,
  )
  stream.seek(island.step)
  while True:
    batch = island.put(next(stream))
    params, state, scalars = step(params, state, batch, island.step)
    params, state = island.exchange(params, state, scalars)
