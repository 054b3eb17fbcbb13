"""The deterministic half of an island: state, inner steps, swaps.

A trainer has no threads, clocks, store or tape. What it does follows from its
calls alone, bit by bit, so that a live island and a replay of it are the same
code driven by a core and by a tape.
"""

import functools
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diloco import config as config_lib
from diloco.islands import (
  eager,
  feedback,
  inner_step,
  learner,
  packing,
  schedules,
  swap,
)
from diloco.islands import placement as placement_lib
from diloco.tasks import task as task_lib


class Trainer(learner.Learner):
  """Trains one island's share of the data; see the module.

  Attributes:
    task: what it trains.
    placement: on which mesh, and how divided.
    tree: between the task's parameters and named leaves.
    state: what a step consumes and produces.
  """

  placement: placement_lib.Placement
  tree: inner_step.ParamTree
  state: inner_step.TrainState
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
    """Starts from the run's initial parameters, which are version 0.

    Args:
      config: the run's configuration.
      task: what to train.
      island: which share of the data to take.
      topology: devices along each axis of the mesh.
      devices: at least as many as the topology holds.
      like: another one for this configuration, task, topology and devices, that
        has made no step; its programs and initial values are used again.

    Raises:
      UserError: the task does not fit the topology or the fragments.
    """
    self.task = task
    self._schedule_steps = schedule_steps(config, task, island)
    self._optimizer = task.optimizer(self._schedule_steps)
    if like is None:
      self._make(config, topology, devices)
    else:
      self.placement, self.tree = like.placement, like.tree
      self.plan, self._compiled = like.plan, like._compiled
      self._compiling = like._compiling
      self.state = jax.tree.map(jnp.copy, like.state)
    self.step = 0
    self.swap = swap.Swap(
      self.plan,
      self.state.params,
      config.sync.adoption,
      config.sync.blend_alpha,
      packing.of(config.sync),
      (config.seed, island),
      config.sync.max_staleness,
      eager.own_step(config.outer, config.fleet.islands),
    )
    self._stream = task.batches(
      "train",
      share=island,
      num_shares=config.fleet.islands,
      seed=config.seed,
    )

  def _make(
    self,
    config: config_lib.RunConfig,
    topology: Sequence[int],
    devices: Sequence[jax.Device],
  ) -> None:
    """Computes the initial state, and what it is divided by."""
    task = self.task
    self.placement = placement_lib.Placement(
      topology, devices, placement_lib.Rules.of(task)
    )
    self.tree = inner_step.ParamTree(task, config.seed)
    self.plan = self.tree.plan(config.sync)
    params = self.tree.init(self.placement)
    self.state = inner_step.TrainState(
      params,
      inner_step.init_opt_state(self._optimizer, params, self.placement),
      jax.device_put(_step_array(0), self.placement.replicated()),
    )
    self._compiled = {}
    self._compiling = {}

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
    return inner_step.compile_step(step, self.state, batch)

  def compile(self) -> None:
    """Compiles everything that steps will call."""
    self._step_fn  # noqa: B018
    with self._alone("fragments"):
      self.swap.rehearse()

  @property
  def params(self) -> inner_step.FlatParams:
    """See `learner.Learner`."""
    return self.state.params

  @property
  def opt_state(self) -> Any:
    """See `learner.Learner`."""
    return self.state.opt_state

  def replace_optimizer(self, opt_state: Any) -> None:
    """See `learner.Learner`."""
    self.state = self._placed(self.state.params, opt_state)

  def take_batch(self) -> Mapping[str, jax.Array]:
    """Returns the next batch, on the mesh."""
    return self.placement.put_batch(next(self._stream))

  def do_step(self, batch: Mapping[str, jax.Array]) -> inner_step.Metrics:
    """Dispatches one inner step; returns its metrics, not waiting for them."""
    self.state, metrics = self._step_fn(self.state, batch)
    self.step += 1
    return metrics

  def resume(
    self,
    step: int,
    anchors: Sequence[swap.Params],
    first_steps: Sequence[int],
    *,
    opt_state: Any | None = None,
    saved: swap.Progress | None = None,
    carried: Collection[int] = (),
    news: Sequence[feedback.News] = (),
  ) -> None:
    """Goes on after `step`, before any step of this life.

    Args:
      step: inner steps done in earlier lives.
      anchors: as for `swap.Swap.restore`, like the others.
      first_steps: [P].
      opt_state: of the inner optimizer; None for a new one.
      saved: progress that never left the island.
      carried: fragments with such progress.
      news: [P], what the anchors tell of publications, for error feedback.
    """
    params = self.state.params
    self.swap.restore(params, anchors, first_steps, saved, carried, news)
    self.step = step
    if opt_state is not None:
      shardings = jax.tree.map(lambda x: x.sharding, self.state.opt_state)
      # The one before goes first, for a device may not hold both; the given one
      # is not this trainer's to give away.
      self.state = self.state._replace(opt_state=None)
      placed = jax.device_put(opt_state, shardings, may_alias=False)
      self.state = self.state._replace(opt_state=placed)
    moved = self.state.opt_state
    if step or opt_state is not None:  # a new one is at step 0
      moved = schedules.set_step(self._optimizer, moved, params, step)
    self.state = self._placed(params, moved)
    self._stream.seek(step)

  def _placed(
    self, params: inner_step.FlatParams, opt_state: Any
  ) -> inner_step.TrainState:
    """A state of these values, where the compiled step expects them."""
    shardings = jax.tree.map(lambda x: x.sharding, self.state)
    state = inner_step.TrainState(params, opt_state, _step_array(self.step))
    return jax.device_put(state, shardings)

  def bare_loop(self, num_steps: int, state: Any) -> Any:
    """Steps from `state` without an island around, for comparison.

    It runs the same compiled step and the same data, and reads the metrics of
    a step while the next one runs. Returns the state.
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
  of_a_step: int = getattr(task, "scheduled_tokens", task.tokens_per_batch)
  return max(1, round(tokens / of_a_step))


def _step_array(step: int) -> jax.Array:
  return jnp.asarray(step, jnp.int32)
