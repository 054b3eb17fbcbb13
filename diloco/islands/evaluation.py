"""Held-out loss of local or global parameters, on an island's own mesh."""

import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from diloco import errors
from diloco.fragments import partition
from diloco.islands import bootstrap, heartbeat, inner_step
from diloco.islands import placement as placement_lib
from diloco.snapshots import records, store
from diloco.tasks import task as task_lib

_READ_ATTEMPTS = 5


class Evaluator:
  """Evaluates on the first held-out batches, the same ones every time."""

  def __init__(
    self,
    task: task_lib.Task,
    tree: inner_step.ParamTree,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    placement: placement_lib.Placement,
    progress: heartbeat.Progress,
    compile_secs: float,
  ):
    """Prepares; nothing is compiled or read before the first use.

    Args:
      task: what is evaluated.
      tree: from flat parameters to the task's own.
      snapshots: the store, with the global versions.
      plan: of the fragments.
      placement: the island's mesh.
      progress: moves with every fragment read and every batch.
      compile_secs: how long a compilation may take.
    """
    self._task = task
    self._store = snapshots
    self._plan = plan
    self._placement = placement
    self._progress = progress
    self._compile_secs = compile_secs
    self._eval_fn = jax.jit(
      lambda flat, batch: task.eval_loss(tree.unflatten(flat), batch)
    )

  def evaluate(
    self, params: inner_step.FlatParams | None, num_batches: int
  ) -> dict[str, Any]:
    """Returns the held-out loss.

    Args:
      params: parameters on the mesh; None for the newest global versions.
      num_batches: how many held-out batches.

    Returns:
      `loss` in nats per token, `tokens`, `bits_per_token`, `secs`, and for
      global parameters `version`, the smallest over fragments.
    """
    started = time.monotonic()
    result: dict[str, Any] = {}
    if params is None:
      params, result["version"] = self._read_global()
    stream = self._task.batches("heldout", share=0, num_shares=1, seed=0)
    try:
      sums = [self._dispatch(params, next(stream)) for _ in range(num_batches)]
    finally:
      stream.close()
    nats = tokens = 0.0
    for batch_nats, batch_tokens in sums:
      nats += float(np.asarray(batch_nats))
      tokens += float(np.asarray(batch_tokens))
      self._progress.moved()
    loss = nats / tokens
    return result | {
      "loss": loss,
      "tokens": int(tokens),
      "bits_per_token": loss / math.log(2),
      "secs": time.monotonic() - started,
    }

  def _dispatch(
    self, params: inner_step.FlatParams, batch: task_lib.Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Starts on a batch; the first one of all is compiled for."""
    placed = self._placement.put_batch(batch)
    with self._progress.may_take(self._compile_secs):
      return self._eval_fn(params, placed)

  def _read_global(self) -> tuple[inner_step.FlatParams, int]:
    # A version may be retired while it is read; then there is a newer one.
    for attempt in range(_READ_ATTEMPTS):
      heads = bootstrap.read_heads(self._store, self._plan)
      try:
        params = {
          name: value
          for head, tensors in zip(heads, self._plan.fragments, strict=True)
          for name, value in self._read_fragment(head, tensors).items()
        }
        return params, min(head.version for head in heads)
      except errors.CorruptSnapshotError:
        if attempt == _READ_ATTEMPTS - 1:
          raise
    raise AssertionError("unreachable")

  def _read_fragment(
    self, head: records.Head, tensors: Sequence[partition.Tensor]
  ) -> inner_step.FlatParams:
    held = placement_lib.read_fragment(
      self._store, head, tensors, self._placement
    )
    self._progress.moved()
    return {name: self._placement.put(value) for name, value in held.items()}
