"""A small task for runs in which processes are what is looked at, not models.

Its held-out loss falls as long as it is trained, ever more slowly. It needs
neither Flax nor Grain, and is traced and compiled in no time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

_LEAVES = "abcd"
_HELDOUT = 1 << 20  # no training share has this number


class Stream:
  """Batches of numbers, known from their share and position."""

  def __init__(self, share, seed):
    self.position = 0
    self._key = share, seed

  def __next__(self):
    drawn = np.random.default_rng([*self._key, self.position])
    self.position += 1
    return {"x": drawn.uniform(0.5, 1.5, 4).astype(np.float32)}

  def seek(self, position):
    self.position = position

  def close(self):
    pass


class Bowl:
  """See the module."""

  tokens_per_batch = 128

  def __init__(self, side=8):
    """Of square leaves; those of 64 and more are divided over a mesh."""
    self._shape = side, side

  def init(self, rng):
    keys = jax.random.split(rng, len(_LEAVES))
    return {
      name: 0.1 * jax.random.normal(key, self._shape)
      for name, key in zip(_LEAVES, keys, strict=True)
    }

  def loss(self, params, batch):
    return sum(jnp.mean(self._nats(w, batch)) for w in params.values()), {}

  def eval_loss(self, params, batch):
    loss, _ = self.loss(params, batch)
    return loss * self.tokens_per_batch, jnp.float32(self.tokens_per_batch)

  def optimizer(self, schedule_steps):
    return optax.sgd(3.0, momentum=0.9)

  def batches(self, split, *, share, num_shares, seed):
    return Stream(share if split == "train" else _HELDOUT, seed)

  def is_embedding(self, path):
    return path == "a"

  def _nats(self, w, batch):
    return jax.nn.softplus(-w * jnp.mean(batch["x"]))


def make(options):
  """The task, by the name of this function; for other processes too."""
  return Bowl(**options)
