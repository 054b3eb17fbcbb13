"""A task of one's own, whole in one file: addition modulo 97 in plain JAX.

Question: what must somebody write to train their own model on islands? The
class below, named in `config.task.name`; it reads no files and knows nothing of
islands. A token here is one sum.

Command: `diloco train --config=experiments/configs/own_task.py --workdir=DIR`.
Cost: not measured; the pace makes it about a minute. `:smoke` 14 s of processor
time.
Expected: not measured on islands. The same million sums in one plain loop end
at 0.01 held-out bits a sum (one seed); guessing costs 6.6.
Reference: the task is that of Power et al., arXiv 2201.02177.

Variants: `:smoke` trains for some seconds.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from diloco.tasks import task


class Sums:
  """Pairs of numbers and their sum, drawn by the position alone."""

  def __init__(self, pairs: np.ndarray, modulus: int, seed: tuple[int, ...]):
    """Args: [N, 2] pairs to draw from, the modulus, and what tells streams."""
    self.position = 0
    self._pairs, self._modulus, self._seed = pairs, modulus, seed

  def __next__(self) -> task.Batch:
    """Returns 256 sums; the same at the same position in any process."""
    rng = np.random.default_rng([*self._seed, self.position])
    self.position += 1
    pairs = self._pairs[rng.integers(len(self._pairs), size=256)]
    return {"pairs": pairs, "sums": pairs.sum(axis=-1) % self._modulus}

  def seek(self, position: int) -> None:
    """Goes on at a position."""
    self.position = position

  def close(self) -> None:
    """There is nothing to release."""


class ModularAddition:
  """A network with one hidden layer that learns to add modulo a number."""

  tokens_per_batch = 256

  def __init__(self, options: Mapping[str, Any]):
    """Args: `modulus` and `width`, from `config.task.options`."""
    self._modulus, self._width = options["modulus"], options["width"]
    numbers = np.arange(self._modulus, dtype=np.int32)
    pairs = np.stack(np.meshgrid(numbers, numbers), axis=-1).reshape(-1, 2)
    pairs = np.random.default_rng(0).permutation(pairs)
    kept = len(pairs) // 10
    self._pairs = {task.HELDOUT: pairs[:kept], "train": pairs[kept:]}

  def init(self, rng: jax.Array) -> task.Params:
    """Returns initial parameters."""
    keys = jax.random.split(rng, 3)
    shapes = {
      "embedding": (self._modulus, self._width),
      "hidden": (2 * self._width, 4 * self._width),
      "output": (4 * self._width, self._modulus),
    }
    return {
      name: jax.random.normal(key, shape) / jnp.sqrt(shape[0])
      for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

  def loss(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean loss in nats."""
    return jnp.mean(self._nats(params, batch)), {}

  def eval_loss(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of losses and their number."""
    nats = self._nats(params, batch)
    return jnp.sum(nats), jnp.float32(nats.size)

  def optimizer(self, schedule_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with a cosine schedule."""
    schedule = optax.cosine_decay_schedule(3e-3, schedule_steps)
    return optax.adamw(schedule, weight_decay=0.1)

  def batches(
    self, split: task.Split, *, share: int, num_shares: int, seed: int
  ) -> Sums:
    """Returns the stream of an island, which has pairs of its own."""
    pairs = self._pairs[split][share::num_shares]
    return Sums(pairs, self._modulus, (seed, share, num_shares))

  def is_embedding(self, path: str) -> bool:
    """Embeddings merge by the weighted mean."""
    return path == "embedding"

  def _nats(self, params: task.Params, batch: task.Batch) -> jax.Array:
    pairs_Bx2 = jnp.asarray(batch["pairs"])
    hidden = params["embedding"][pairs_Bx2].reshape(len(pairs_Bx2), -1)
    logits = jax.nn.relu(hidden @ params["hidden"]) @ params["output"]
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, jnp.asarray(batch["sums"])
    )


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  if variant not in ("", "smoke"):
    raise ValueError(f"variant {variant!r}: there is only 'smoke'")
  config = ml_collections.ConfigDict()
  config.name = "own_task"
  config.total_tokens = 100_000 if variant == "smoke" else 1_000_000
  config.task = ml_collections.ConfigDict(
    dict(
      name="experiments.configs.own_task:ModularAddition",
      options=dict(modulus=97, width=64),
    )
  )
  config.fleet = ml_collections.ConfigDict(
    dict(
      slices=(dict(topology="1"), dict(topology="1", relative_speed=0.7)),
      pace_step_secs=0.02,
    )
  )
  config.sync = ml_collections.ConfigDict(dict(num_fragments=3, every=12))
  config.programs = ml_collections.ConfigDict(
    dict(window_steps=12, eval_every_tokens=50_000, final_eval_batches=4)
  )
  return config
