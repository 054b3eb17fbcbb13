"""A task of two leaves whose every step can be computed by hand.

Its loss is x (sum(a) + sum(b)) for the number x of the batch, so both leaves
lose `LEARNING_RATE` times the momentum of x in each step; x is 1, 2, 3, ... for
island 0, and 100 more for each island after it.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco import config as config_lib
from diloco import workers
from diloco.islands import trainer as trainer_lib

LEARNING_RATE = 0.5
FRAGMENT = {"b": 0, "a": 1}  # of `config`, by the leaf that is in it


def setting(**parts):
  """What a thread of an island works with, as far as it asks for it."""
  return types.SimpleNamespace(threads=workers.Threads(), **parts)


class Stream:
  """Batches of one number, known from their position."""

  def __init__(self, start):
    self.position = 0
    self.closed = False
    self._start = start

  def __next__(self):
    self.position += 1
    return {"x": np.full((2,), self._start + self.position, np.float32)}

  def seek(self, position):
    self.position = position

  def close(self):
    self.closed = True


class Task:
  """See the module; `momentum` is of its inner optimizer."""

  tokens_per_batch = 10

  def __init__(self, momentum=0.0):
    self._momentum = momentum

  def init(self, rng):
    return {"a": jnp.zeros((2,)), "b": jnp.ones((3,))}

  def loss(self, params, batch):
    x = jnp.mean(batch["x"])
    return x * (jnp.sum(params["a"]) + jnp.sum(params["b"])), {"x": x}

  def eval_loss(self, params, batch):
    return jnp.float32(0), jnp.float32(1)

  def optimizer(self, schedule_steps):
    return optax.sgd(LEARNING_RATE, momentum=self._momentum)

  def batches(self, split, *, share, num_shares, seed):
    return Stream(100 * share)

  def is_embedding(self, path):
    return path == "b"


def make(options):
  """The task, by the name of this function; for other processes too."""
  return Task(**options)


def config(islands=1, **sync):
  """A run of this task, of two fragments: one for each leaf."""
  return config_lib.from_mapping(
    {
      "total_tokens": 1000,
      "fleet": {"slices": [{"kind": "cpu", "topology": "1"}] * islands},
      "sync": {"num_fragments": 2, "every": 4} | sync,
    }
  )


def moved(first, last, momentum=0.0, velocity=0.0):
  """What steps (first, last] add to every element, and the momentum then."""
  change = 0.0
  for x in range(first + 1, last + 1):
    velocity = momentum * velocity + x
    change -= LEARNING_RATE * velocity
  return change, velocity


def make_trainer(task=None, island=0, islands=1, **sync):
  """A trainer of it on one device."""
  return trainer_lib.Trainer(
    config(islands, **sync), task or Task(), island, (1,), jax.devices()[:1]
  )


def step(trainer, count=1):
  """Does inner steps; returns the last one's metrics."""
  for _ in range(count):
    metrics = trainer.do_step(trainer.take_batch())
  return metrics


def publish(trainer, name):
  """The outer gradient of this leaf for a publication of this step."""
  return trainer.swap.publish(
    trainer.state.params, FRAGMENT[name], trainer.step
  )


def adopt(trainer, name, value, kept_from=0):
  """Swaps a version of this leaf in."""
  trainer.swap.adopt(
    trainer.state.params, FRAGMENT[name], anchor(name, value), kept_from
  )


def start_over(trainer, name, value, first_step):
  """Sets this leaf to a version."""
  trainer.swap.start_over(
    trainer.state.params, FRAGMENT[name], anchor(name, value), first_step
  )


def anchor(name, value):
  """A version of the fragment of this leaf."""
  shape = {"a": (2,), "b": (3,)}[name]
  return {name: jnp.full(shape, value, jnp.float32)}


def held(tensors):
  """The one value that all elements of a leaf have, by leaf."""
  found = {}
  for name, value in tensors.items():
    (found[name],) = set(np.asarray(value).ravel().tolist())
  return found
