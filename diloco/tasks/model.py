"""A model for a loop of one's own: a `Task` without what trains it."""

import dataclasses
from collections.abc import Callable, Collection

import jax

from diloco.tasks import task


@dataclasses.dataclass(frozen=True)
class Model:
  """What a run must know of a model whose steps `config.loop` does.

  A function of the options that returns one is named in `config.task.name`. A
  class with the same attributes will do as well, and may have further ones of
  `diloco.tasks.task.Task`, such as those that divide it over a mesh.

  Attributes:
    init: gives initial parameters, a pytree of float32 arrays, from a key of
      `jax.random`; equal ones for equal keys.
    eval_loss: gives (sum of cross-entropy in nats, number of tokens), float32,
      of parameters and a held-out batch.
    heldout: gives held-out batch i, numpy arrays by name with the batch as the
      leading axis; the same one for the same i in any process.
    tokens_per_batch: tokens that each step of the loop counts as, at least 1.
    embeddings: '/'-joined paths of leaves that merge by plain weighted mean.
  """

  init: Callable[[jax.Array], task.Params]
  eval_loss: Callable[[task.Params, task.Batch], tuple[jax.Array, jax.Array]]
  heldout: Callable[[int], task.Batch]
  tokens_per_batch: int
  embeddings: Collection[str] = ()

  def batches(
    self, split: task.Split, *, share: int, num_shares: int, seed: int
  ) -> task.BatchStream:
    """Returns the held-out batches, whole; a loop has its own for training.

    Raises:
      ValueError: others are asked for.
    """
    if split != task.HELDOUT:
      raise ValueError("a diloco.Model has held-out batches alone")
    return _Numbered(self.heldout)

  def is_embedding(self, path: str) -> bool:
    """See `diloco.tasks.task.Task`."""
    return path in self.embeddings


class _Numbered:
  """Batches by their number; a `task.BatchStream`."""

  def __init__(self, batch: Callable[[int], task.Batch]):
    self.position = 0
    self._batch = batch

  def __next__(self) -> task.Batch:
    found = self._batch(self.position)
    self.position += 1
    return found

  def seek(self, position: int) -> None:
    self.position = position

  def close(self) -> None:
    """There is nothing to release."""
