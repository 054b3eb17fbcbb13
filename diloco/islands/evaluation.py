"""Held-out loss of local or global parameters, on an island's own mesh."""

import math
import time
from typing import Any

import jax
import numpy as np

from diloco import errors
from diloco.fragments import partition
from diloco.islands import bootstrap, inner_step
from diloco.islands import placement as placement_lib
from diloco.snapshots import store
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
  ):
    """Prepares; nothing is compiled or read before the first use."""
    self._task = task
    self._store = snapshots
    self._plan = plan
    self._placement = placement
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
      sums = [
        self._eval_fn(params, self._placement.put_batch(next(stream)))
        for _ in range(num_batches)
      ]
    finally:
      stream.close()
    nats = sum(float(np.asarray(s)) for s, _ in sums)
    tokens = sum(float(np.asarray(n)) for _, n in sums)
    loss = nats / tokens
    return result | {
      "loss": loss,
      "tokens": int(tokens),
      "bits_per_token": loss / math.log(2),
      "secs": time.monotonic() - started,
    }

  def _read_global(self) -> tuple[inner_step.FlatParams, int]:
    # A version may be retired while it is read; then there is a newer one.
    for attempt in range(_READ_ATTEMPTS):
      heads = bootstrap.read_heads(self._store, self._plan)
      try:
        params = {
          name: self._placement.put(held)
          for head, tensors in zip(heads, self._plan.fragments, strict=True)
          for name, held in placement_lib.read_fragment(
            self._store, head, tensors, self._placement
          ).items()
        }
        return params, min(head.version for head in heads)
      except errors.CorruptSnapshotError:
        if attempt == _READ_ATTEMPTS - 1:
          raise
    raise AssertionError("unreachable")
