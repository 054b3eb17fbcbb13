"""Held-out loss of local or global parameters, on an island's own mesh."""

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from diloco import timing, workers
from diloco.islands import heartbeat, inner_step, protocol
from diloco.islands import learner as learner_lib
from diloco.snapshots import operations, store
from diloco.tasks import task as task_lib

logger = logging.getLogger(__name__)

_READ_ATTEMPTS = 5


def held_out_loss(
  task: task_lib.Task,
  num_batches: int,
  dispatch: Callable[[task_lib.Batch], tuple[jax.Array, jax.Array]],
  split: Any = task_lib.HELDOUT,
  moved: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
  """Returns the loss over the first held-out batches, the same every time.

  To `dispatch` is to start `task.eval_loss` on a batch; `moved` is called with
  every batch that is done.

  Returns:
    `loss` in nats per token, `tokens` and `bits_per_token`.
  """
  stream = task.batches(split, share=0, num_shares=1, seed=0)
  try:
    sums = [dispatch(next(stream)) for _ in range(num_batches)]
  finally:
    stream.close()
  nats = tokens = 0.0
  for batch_nats, batch_tokens in sums:
    nats += float(np.asarray(batch_nats))
    tokens += float(np.asarray(batch_tokens))
    moved()
  loss = nats / tokens
  return {
    "loss": loss,
    "tokens": int(tokens),
    "bits_per_token": loss / math.log(2),
  }


class Found(NamedTuple):
  """Parameters on an island's mesh; of global ones each fragment's version."""

  params: inner_step.FlatParams
  versions: Sequence[int] = ()


class Evaluator:
  """Evaluates on the first held-out batches, the same ones every time."""

  def __init__(
    self,
    task: task_lib.Task,
    learner: learner_lib.Learner,
    snapshots: store.SnapshotStore,
    progress: heartbeat.Progress,
    times: timing.Timing,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Prepares; nothing is compiled or read before the first use."""
    self._task = task
    self._learner = learner
    self._fetcher = learner.fetcher(snapshots)
    self._progress = progress
    self._compile_secs = times.start_secs
    self._retry_secs = times.retry_secs
    self._sleep = sleep
    self._clock = clock

  def evaluate(self, found: Found, num_batches: int) -> dict[str, Any]:
    """Returns what `held_out_loss` does, and `secs`.

    For global parameters there are `version` and `newest_version`, the smallest
    and the largest over fragments.
    """
    started = self._clock()
    result: dict[str, Any] = {}
    if found.versions:
      result["version"] = min(found.versions)
      result["newest_version"] = max(found.versions)
    result |= held_out_loss(
      self._task,
      num_batches,
      functools.partial(self._dispatch, found.params),
      moved=self._progress.moved,
    )
    return result | {"secs": self._clock() - started}

  def _dispatch(
    self, params: inner_step.FlatParams, batch: task_lib.Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Starts on a batch; the first one of all is compiled for."""
    placed = self._learner.placement.put_batch(batch)
    with self._progress.may_take(self._compile_secs):
      return self._learner.tree.eval_fn(params, placed)

  def read(self, wanted: Callable[[], bool] = lambda: True) -> Found:
    """Reads the newest global versions, as long as they are wanted.

    Any thread may.

    Raises:
      CorruptSnapshotError: a global version cannot be read, however often.
      OSError: the store cannot be reached.
    """
    tensors: dict[str, jax.Array] = {}
    versions = []
    for fragment in range(self._learner.plan.num_fragments):
      found = self._newest(fragment, wanted)
      versions.append(found.head.version)
      tensors |= found.content
    return Found(self._learner.swap.assemble(tensors), versions)

  def _newest(
    self, fragment: int, wanted: Callable[[], bool]
  ) -> protocol.Fetched:
    for _ in range(_READ_ATTEMPTS - 1):
      try:
        return self._fetcher.newest(fragment)
      except operations.FAILURES as error:
        logger.warning("read_failed fragment=%d error=%s", fragment, error)
        if not wanted():
          raise
        self._sleep(self._retry_secs)
    return self._fetcher.newest(fragment)


class Reading:
  """Global versions that are read in the background, while training goes on.

  A store that answers nobody makes an island wait for nothing: what it cannot
  read is a figure it cannot tell.
  """

  def __init__(self, evaluator: Evaluator, threads: workers.Threads):
    """Begins."""
    self._evaluator = evaluator
    self._wanted = True
    self._found: Found | Exception | None = None
    self._worker = threads.once("evaluation", self._read)

  def _read(self) -> None:
    try:
      self._found = self._evaluator.read(lambda: self._wanted)
    except operations.FAILURES as error:
      self._found = error

  @property
  def done(self) -> bool:
    """Whether there is something to take; raises what nobody expected."""
    self._worker.check()
    return self._found is not None

  def take(self) -> Found:
    """What was read, once it is done; raises as `Evaluator.read` does."""
    if isinstance(self._found, Exception):
      raise self._found
    assert self._found is not None
    return self._found

  def give_up(self) -> None:
    """Nobody will take it; the store is not tried again."""
    self._wanted = False
