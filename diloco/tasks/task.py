"""The `Task` protocol: what a model must offer to be trained on islands.

A task knows nothing of islands, fragments or the store. Any Flax or plain JAX
model joins a run by implementing these few pure functions.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import jax
import optax

from diloco import errors

Params = Any  # a pytree of float32 arrays
Batch = Mapping[str, Any]  # of numpy arrays; leading axis is the batch
HELDOUT = "heldout"
Split = Literal["train", "heldout"]  # or one of a task's `heldout_sets`


class BatchStream(Protocol):
  """An endless, seekable stream of batches; a held-out one may end.

  `position` counts the batches already taken. Seeking to a position and
  reading gives the same batches in any process, so a position is a complete
  checkpoint of the stream.

  Where it ends, `__next__` raises StopIteration: of training it ends the run.
  It may have `num_batches`, of how many no row comes twice: no evaluation takes
  more.
  """

  position: int

  def __next__(self) -> Batch:
    """Returns the batch at `position` and advances by one."""
    ...

  def seek(self, position: int) -> None:
    """Continues at `position`, counted in batches from the start."""
    ...

  def close(self) -> None:
    """Releases prefetch threads and files."""
    ...


def drawn(stream: BatchStream) -> Batch:
  """Returns a stream's next batch.

  Raises:
    EndedStreamError: there is none.
    OwnCodeError: the stream cannot make it.
  """
  position = getattr(stream, "position", 0)
  with own_code(f"the task's batch {position + 1}"):
    try:
      return next(stream)
    except StopIteration as error:
      raise errors.EndedStreamError(
        "the task's batches",
        f"they ended after {position}, and a stream never does",
        "repeat the data without end, as .repeat() of a Grain dataset does",
      ) from error


@contextlib.contextmanager
def own_code(what: str) -> Iterator[None]:
  """What is wrong in code of the user's is told as theirs.

  Raises:
    OwnCodeError: it is, and `what` was made or done.
  """
  try:
    yield
  except errors.UserError:
    raise
  except Exception as error:
    if not errors.is_mistake(error):
      raise
    raise errors.OwnCodeError(
      what, f"it raised {errors.with_place(error)}", "correct the task"
    ) from error


class Task(Protocol):
  """One model, its data and its inner optimizer.

  A task may also have `learning_rate(schedule_steps)`, which returns the
  schedule of its optimizer; the metric log then has the learning rate of every
  step, as it has for optimizers of `optax.inject_hyperparams`.

  `heldout_sets` may name further held-out sets for `diloco evaluate`; `batches`
  then takes their names as splits. A task over bytes may have `logits(params,
  tokens)`, which gives the next byte's [B, L, 256] for tokens [B, L], and
  `context`, the most tokens L it knows; `diloco sample` then writes with it.

  A task may say how it is divided over a mesh. `mesh_axes` names the axes, in
  the order of a topology's numbers; default ("data", "model"). `batch_axes`
  names those that batches are divided among; default the first.
  `sharding(path, shape)` gives the `jax.sharding.PartitionSpec` of the leaf at
  a '/'-joined path; by default its largest divisible axis is divided along the
  last axis of the mesh. An optimizer's moments are divided as their parameters.
  """

  tokens_per_batch: int  # tokens of one training batch

  def init(self, rng: jax.Array) -> Params:
    """Returns initial parameters, float32, equal for equal `rng`."""
    ...

  def loss(
    self, params: Params, batch: Batch
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns the scalar training loss in nats and a dict of scalars.

    The metric log has them all.
    """
    ...

  def eval_loss(
    self, params: Params, batch: Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of cross-entropy in nats, number of tokens), float32."""
    ...

  def optimizer(self, schedule_steps: int) -> optax.GradientTransformation:
    """Returns the inner optimizer, its schedule ending at `schedule_steps`.

    It is given parameters and gradients as one dict by '/'-joined paths, not as
    `init` made them: masks and labels of leaves go by these.
    """
    ...

  def batches(
    self, split: Split, *, share: int, num_shares: int, seed: int
  ) -> BatchStream:
    """Returns share `share` of `num_shares` disjoint, seeded streams."""
    ...

  def is_embedding(self, path: str) -> bool:
    """Whether the leaf at '/'-joined `path` merges by plain weighted mean."""
    ...
