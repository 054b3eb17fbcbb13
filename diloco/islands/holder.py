"""Parameters on a mesh with an optimizer's state beside them.

What an island's learners have in common, whoever does their inner steps: the
task's own (`diloco.islands.trainer`), or a loop of the user's
(`diloco.islands.link`).
"""

import abc
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diloco import config as config_lib
from diloco.islands import eager, feedback, inner_step, learner, packing, swap
from diloco.islands import placement as placement_lib
from diloco.tasks import task as task_lib


class Holder(learner.Learner):
  """See the module.

  Attributes:
    task: what is trained.
    placement: on which mesh, and how divided.
    tree: between the task's parameters and named leaves.
    state: what a step consumes and produces.
  """

  placement: placement_lib.Placement
  tree: inner_step.ParamTree
  state: inner_step.TrainState

  def __init__(
    self,
    config: config_lib.RunConfig,
    task: task_lib.Task,
    island: int,
    topology: Sequence[int],
    devices: Sequence[jax.Device],
    like: "Holder | None" = None,
  ):
    """Starts from the run's initial parameters, which are version 0.

    Args:
      config: the run's configuration.
      task: what to train.
      island: which one this is.
      topology: devices along each axis of the mesh.
      devices: at least as many as the topology holds.
      like: another one for this configuration, task, topology and devices, that
        has made no step; its initial values are used again.

    Raises:
      UserError: the task does not fit the topology or the fragments.
    """
    self.task = task
    if like is None:
      self.placement = placement_lib.Placement(
        topology, devices, placement_lib.Rules.of(task)
      )
      self.tree = inner_step.ParamTree(task, config.seed)
      self.plan = self.tree.plan(config.sync)
      params = self.tree.init(self.placement)
      step = jax.device_put(_step_array(0), self.placement.replicated())
      opt_state = self._initial_optimizer(params)
      self.state = inner_step.TrainState(params, opt_state, step)
    else:
      self.placement, self.tree = like.placement, like.tree
      self.plan = like.plan
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

  @abc.abstractmethod
  def _initial_optimizer(self, params: inner_step.FlatParams) -> Any:
    """The inner optimizer's state before the first step."""

  def next_step(self) -> inner_step.Metrics:
    """Dispatches an inner step; returns its metrics, not waiting for them.

    Raises:
      NotImplementedError: somebody else does the steps.
    """
    raise NotImplementedError

  def compile(self) -> None:
    """Compiles everything that steps will call."""
    self.swap.rehearse()

  def close(self) -> None:
    """Releases what steps read from."""

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
      # is not this learner's to give away.
      self.state = self.state._replace(opt_state=None)
      placed = jax.device_put(opt_state, shardings, may_alias=False)
      self.state = self.state._replace(opt_state=placed)
    moved = self.state.opt_state
    if step or opt_state is not None:  # a new one is at step 0
      moved = self._at_step(moved)
    self.state = self._placed(params, moved)
    self._seek(step)

  def _seek(self, step: int) -> None:
    """Has the next step read what follows this one."""

  def _at_step(self, opt_state: Any) -> Any:
    """An optimizer's state that may be older, for the step reached."""
    return opt_state

  def _placed(
    self, params: inner_step.FlatParams, opt_state: Any
  ) -> inner_step.TrainState:
    """A state of these values, where steps expect them."""
    shardings = jax.tree.map(lambda x: x.sharding, self.state)
    state = inner_step.TrainState(params, opt_state, _step_array(self.step))
    return jax.device_put(state, shardings)


def _step_array(step: int) -> jax.Array:
  return jnp.asarray(step, jnp.int32)
