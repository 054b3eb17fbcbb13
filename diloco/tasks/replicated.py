"""A task whose batch is that of several shares: a data-parallel step."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diloco.tasks import task as task_lib


class Replicated:
  """A task as one synchronous job has it; see `task.Task`.

  Its step t takes rows t of all shares, so it sees what as many islands see
  that take one share each. While slices of an elastic job are away, it takes
  rows t of the others, and theirs are never read.

  Attributes:
    made: the task of one share.
    replicas: how many shares there are.
    scheduled: after how many steps of this batch schedules are, by the steps
      of the job; None: after as many.
  """

  def __init__(
    self,
    made: task_lib.Task,
    replicas: int,
    present: Sequence[int] | None = None,
    scheduled: Callable[[int], int] | None = None,
  ):
    self.scheduled = scheduled
    self.made = made
    self.replicas = replicas
    self._present = tuple(range(replicas) if present is None else present)
    self.tokens_per_batch = len(self._present) * made.tokens_per_batch

  def __getattr__(self, name: str) -> Any:
    """All else is the task's."""
    return getattr(self.made, name)

  def batches(
    self, split: Any, *, share: int, num_shares: int, seed: int
  ) -> task_lib.BatchStream:
    """See `task.Task`; held-out batches are those of the task."""
    count = self.replicas
    if split != "train":
      return self.made.batches(
        split, share=share, num_shares=num_shares, seed=seed
      )
    return _Joined(
      [
        self.made.batches(
          split,
          share=share * count + i,
          num_shares=num_shares * count,
          seed=seed,
        )
        for i in self._present
      ]
    )


def on(
  task: task_lib.Task,
  present: Sequence[int],
  scheduled: Callable[[int], int],
) -> task_lib.Task:
  """The task of a job on some of its slices; of none named, the task itself."""
  if not present:
    return task
  assert isinstance(task, Replicated)
  return Replicated(task.made, task.replicas, present, scheduled)


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
