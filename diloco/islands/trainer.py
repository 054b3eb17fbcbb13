"""The deterministic half of an island: state, inner steps, swaps.

A trainer has no threads, clocks, store or tape. What it does follows from its
calls alone, bit by bit, so that a live island and a replay of it are the same
code driven by a core and by a tape.
"""

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from diloco import config as config_lib
from diloco import errors
from diloco.islands import inner_step, schedules
from diloco.islands import learner as learner_lib
from diloco.tasks import task as task_lib


class Trainer(learner_lib.Learner):
  """Trains one island's share of the data; see the module."""

  # By the steps of the schedule in it, and the tokens of a batch.
  _compiled: dict[tuple[int, int], inner_step.Step]
  _compiling: dict[object, threading.Lock]  # by what is compiled under it

  def __init__(
    self,
    config: config_lib.RunConfig,
    task: task_lib.Task,
    island: int,
    topology: Sequence[int],
    devices: Sequence[jax.Device],
    like: "Trainer | None" = None,
  ):
    """As a `learner.Learner`; `island` chooses the data too."""
    self._schedule_steps = schedule_steps(config, task, island)
    self._optimizer = task.optimizer(self._schedule_steps)
    super().__init__(config, task, island, topology, devices, like)
    self._compiled = like._compiled if like else {}
    self._compiling = like._compiling if like else {}
    self._stream = task.batches(
      "train",
      share=island,
      num_shares=config.fleet.islands,
      seed=config.seed,
    )

  def _initial_optimizer(self, params: inner_step.FlatParams) -> Any:
    return inner_step.init_opt_state(self._optimizer, params, self.placement)

  @functools.cached_property
  def _step_fn(self) -> inner_step.Step:
    kind = self._schedule_steps, self.task.tokens_per_batch
    with self._alone(kind):
      if kind not in self._compiled:
        self._compiled[kind] = self._compile_step()
    return self._compiled[kind]

  def _alone(self, kind: object) -> threading.Lock:
    """Held by who compiles what all those like it need."""
    return self._compiling.setdefault(kind, threading.Lock())

  def _compile_step(self) -> inner_step.Step:
    position = self._stream.position
    batch = self.take_batch()
    self._stream.seek(position)
    step = inner_step.make_step(
      self.task, self._optimizer, self.tree, self._schedule_steps
    )
    replicated = self.placement.replicated()
    return inner_step.compile_step(step, self.state, batch, replicated)

  def compile(self) -> None:
    """See `learner.Learner`."""
    self._step_fn  # noqa: B018
    with self._alone("fragments"):
      super().compile()

  def take_batch(self) -> Mapping[str, jax.Array]:
    """Returns the next batch, on the mesh."""
    batch = task_lib.drawn(self._stream)
    with task_lib.own_code(f"the task's batch {self._stream.position}"):
      return self.placement.put_batch(batch)

  def do_step(self, batch: Mapping[str, jax.Array]) -> inner_step.Metrics:
    """Dispatches one inner step; returns its metrics, not waiting for them."""
    try:
      self.state, metrics = self._step_fn(self.state, batch)
    except TypeError as error:
      self._stream.seek(0)
      first, this = map(inner_step.described, (self.take_batch(), batch))
      if (found := inner_step.changed(first, this)) is None:
        raise
      leaf, old, new = found
      raise errors.OwnCodeError(
        f"the task's batch {self.step + 1}",
        f"it has {new} for the {old} of the first one at {leaf!r}",
        "keep every shape, dtype and name from batch to batch",
      ) from error
    self.step += 1
    return metrics

  def _seek(self, step: int) -> None:
    with task_lib.own_code(f"seek({step}) of the task's batches"):
      self._stream.seek(step)

  def _at_step(self, opt_state: Any) -> Any:
    return schedules.set_step(
      self._optimizer, opt_state, self.state.params, self.scheduled
    )

  @property
  def scheduled(self) -> int:
    """See `learner.Learner`; steps of a job by what its slices have trained."""
    by_tokens = getattr(self.task, "scheduled", None)
    return self.step if by_tokens is None else by_tokens(self.step)

  def bare_loop(self, num_steps: int, state: Any) -> Any:
    """Steps from `state` without an island around, for comparison.

    It runs the same compiled step on the same data, and reads the metrics of a
    step while the next one runs. Returns the state.
    """
    last = None
    for _ in range(num_steps):
      state, metrics = self._step_fn(state, self.take_batch())
      if last is not None:
        float(last["loss"])
      last = metrics
    return jax.block_until_ready(state)

  def close(self) -> None:
    """Releases the data stream."""
    self._stream.close()


def schedule_steps(
  config: config_lib.RunConfig, task: task_lib.Task, island: int
) -> int:
  """Inner steps an island of its speed does in the run."""
  tokens = config.total_tokens * config.speed_share(island)
  return max(1, round(tokens / task.tokens_per_batch))
