"""Held-out loss of local or global parameters, on an island's own mesh."""

import functools
import math
import numbers
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from diloco import errors, heartbeat, timing, workers
from diloco.islands import inner_step, protocol, runner
from diloco.islands import learner as learner_lib
from diloco.snapshots import operations, store
from diloco.tasks import task as task_lib


def held_out_loss(
  task: task_lib.Task,
  num_batches: int,
  dispatch: Callable[[task_lib.Batch], tuple[jax.Array, jax.Array]],
  split: Any = task_lib.HELDOUT,
  moved: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
  """Returns the loss over the first held-out batches, the same every time.

  No more than have no row twice, as far as the task's stream tells, and all
  that there are if it ends.

  To `dispatch` is to start `task.eval_loss` on a batch; `moved` is called with
  every batch that is done.

  Returns:
    `loss` in nats per token, `tokens` and `bits_per_token`.

  Raises:
    UserError: no token was counted.
  """
  stream = task.batches(split, share=0, num_shares=1, seed=0)
  try:
    count = getattr(stream, "num_batches", None)  # theirs may mean all else
    if not isinstance(count, numbers.Integral) or count < 1:
      count = num_batches
    first = _first(stream, min(num_batches, int(count)))
    sums = [dispatch(batch) for batch in first]
  finally:
    stream.close()
  nats = tokens = 0.0
  for batch_nats, batch_tokens in sums:
    nats += float(np.asarray(batch_nats))
    tokens += float(np.asarray(batch_tokens))
    moved()
  if not tokens > 0:
    raise errors.UserError(
      f"the loss of {len(sums)} held-out batches",
      f"the task's eval_loss counted {tokens:g} tokens in them",
      "return the number of tokens that the loss is the sum of",
    )
  loss = nats / tokens
  return {
    "loss": loss,
    "tokens": int(tokens),
    "bits_per_token": loss / math.log(2),
  }


def _first(
  stream: task_lib.BatchStream, count: int
) -> Iterator[task_lib.Batch]:
  """Some batches of a stream, or all if there are fewer, but at least one."""
  for i in range(count):
    try:
      batch = task_lib.drawn(stream)
    except errors.EndedStreamError:
      if i:
        return
      raise
    yield batch


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
    placed = self._learner.placement.put_rest(batch)
    with self._progress.may_take(self._compile_secs):
      return self._learner.tree.eval_fn(params, placed)

  def read(self) -> Found:
    """Reads the newest global versions.

    Raises:
      CorruptSnapshotError: a global version cannot be read, however often.
      OSError: the store cannot be reached.
    """
    return operations.perform(self.reading(lambda: True), self.execute)

  def reading(self, wanted: Callable[[], bool]) -> operations.Script[Found]:
    """As `read`, and as long as they are wanted; any thread may."""
    num_fragments = self._learner.plan.num_fragments
    found = yield from protocol.fetch_all(
      num_fragments, self._retry_secs, wanted
    )
    tensors = {k: v for one in found for k, v in one.content.items()}
    versions = [one.head.version for one in found]
    return Found(self._learner.swap.assemble(tensors), versions)

  def execute(self, operation: operations.Operation | float) -> Any:
    """Does one operation, or pause, of `reading`."""
    if isinstance(operation, float):
      return self._sleep(operation)
    return self._fetcher.execute(operation)


class Reading(runner.Reading):
  """See there; in a thread."""

  def __init__(self, evaluator: Evaluator, threads: workers.Threads):
    """Begins."""
    super().__init__(evaluator.reading)
    self._worker = threads.once(
      "evaluation",
      lambda: operations.perform(self.reading(), evaluator.execute),
    )

  @property
  def done(self) -> bool:
    """See base; raises what nobody expected."""
    self._worker.check()
    return super().done
