"""A task whose batch is that of several shares: a data-parallel step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from diloco.tasks import task as task_lib


class Replicated:
  """A task as one synchronous job has it; see `task.Task`.

  Its step t takes rows t of all shares, so it sees what as many islands see
  that take one share each.
  """

  def __init__(self, made: task_lib.Task, replicas: int):
    """Args: the task of one share; how many there are."""
    self._task = made
    self._replicas = replicas
    self.tokens_per_batch = replicas * made.tokens_per_batch

  def __getattr__(self, name: str) -> Any:
    """All else is the task's."""
    return getattr(self._task, name)

  def batches(
    self, split: Any, *, share: int, num_shares: int, seed: int
  ) -> task_lib.BatchStream:
    """See `task.Task`; held-out batches are those of the task."""
    count = self._replicas
    if split != "train":
      return self._task.batches(
        split, share=share, num_shares=num_shares, seed=seed
      )
    return _Joined(
      [
        self._task.batches(
          split,
          share=share * count + i,
          num_shares=num_shares * count,
          seed=seed,
        )
        for i in range(count)
      ]
    )


class _Joined:
  """Batches of several streams, one after another along the first axis."""

  def __init__(self, streams: Sequence[task_lib.BatchStream]):
    self._streams = streams
    self.position = 0

  def __next__(self) -> task_lib.Batch:
    parts = [next(stream) for stream in self._streams]
    self.position += 1
    return {
      name: np.concatenate([part[name] for part in parts]) for name in parts[0]
    }

  def seek(self, position: int) -> None:
    self.position = position
    for stream in self._streams:
      stream.seek(position)

  def close(self) -> None:
    for stream in self._streams:
      stream.close()
