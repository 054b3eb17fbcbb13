"""Whoever does the inner steps: parameters on a mesh, an optimizer's state.

The exchange needs named arrays, a step count and an inner optimizer's state
that can be copied and mended. Whose loop moves them, on which data, is nothing
to it: the task's own (`diloco.islands.trainer`), or a loop of the user's
(`diloco.islands.own`).
"""

import abc
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco import config as config_lib
from diloco.fragments import partition
from diloco.islands import eager, feedback, fetching, inner_step, packing
from diloco.islands import placement as placement_lib
from diloco.islands import swap as swap_lib
from diloco.snapshots import store
from diloco.tasks import task as task_lib


class Snapshot(NamedTuple):
  """A learner's state after `step`, in memory nobody donates."""

  step: int
  progress: swap_lib.Progress
  opt_state: Any


class Learner(abc.ABC):
  """Parameters that are trained and exchanged; only one thread may use it.

  Attributes:
    step: inner steps done, over all lives.
    plan: how the parameters are divided into fragments.
    swap: their end of the exchange.
    task: what is trained.
    placement: on which mesh, and how divided.
    tree: between the task's parameters and named leaves.
    state: what a step consumes and produces.
  """

  plan: partition.FragmentPlan
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
    like: "Learner | None" = None,
  ):
    """Starts from the run's initial parameters, which are version 0.

    Those are the ones of `like`, if there is one: a learner for this
    configuration, task, topology and devices, that has made no step.

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
      step = jax.device_put(jnp.int32(0), self.placement.replicated())
      opt_state = self._initial_optimizer(params)
      self.state = inner_step.TrainState(params, opt_state, step)
    else:
      self.placement, self.tree = like.placement, like.tree
      self.plan = like.plan
      self.state = jax.tree.map(jnp.copy, like.state)
    self.step = 0
    self.swap = swap_lib.Swap(
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

  def compile(self) -> None:
    """Compiles everything that steps will call."""
    self.swap.rehearse()

  def close(self) -> None:  # noqa: B027
    """Releases what steps read from."""

  @property
  def scheduled(self) -> int:
    """The steps that learning-rate schedules have gone."""
    return self.step

  @property
  def params(self) -> inner_step.FlatParams:
    """The parameters as they are, by leaf; adoptions change them in place."""
    return self.state.params

  @property
  def opt_state(self) -> Any:
    """The inner optimizer's state."""
    return self.state.opt_state

  def resume(
    self,
    step: int,
    anchors: Sequence[swap_lib.Params],
    first_steps: Sequence[int],
    *,
    opt_state: Any | None = None,
    saved: swap_lib.Progress | None = None,
    carried: Collection[int] = (),
    news: Sequence[feedback.News] = (),
  ) -> None:
    """Goes on after `step`, before any step of this life.

    Without an `opt_state` the inner optimizer begins anew; for the others see
    `swap_lib.Swap.restore`.
    """
    params = self.state.params
    self.swap.restore(params, anchors, first_steps, saved, carried, news)
    self.step = step
    if opt_state is not None:
      self._take_optimizer(opt_state)
    moved = self.state.opt_state
    if step or opt_state is not None:  # a new one is at step 0
      moved = self._at_step(moved)
    self.state = self._placed(params, moved)
    self._seek(step)

  def _seek(self, step: int) -> None:  # noqa: B027
    """Has the next step read what follows this one."""

  def _at_step(self, opt_state: Any) -> Any:
    """An optimizer's state that may be older, for the step reached."""
    return opt_state

  def _placed(
    self, params: inner_step.FlatParams, opt_state: Any
  ) -> inner_step.TrainState:
    """A state of these values, where steps expect them."""
    shardings = jax.tree.map(lambda x: x.sharding, self.state)
    state = inner_step.TrainState(params, opt_state, jnp.int32(self.scheduled))
    return jax.device_put(state, shardings)

  def optimizer_is_finite(self) -> bool:
    """Whether the inner optimizer's state is; waits for the devices."""
    return finite(self.opt_state)

  def mend_optimizer(self, healthy: Any | None = None) -> int:
    """Replaces the inner optimizer's state if some of it is not finite.

    All of it, for moments and the count that corrects their bias are of one
    age: by a `healthy` one, or by a new one where that is not finite either.
    Returns the number of leaves that were not finite.
    """
    replaced = sum(not finite(x) for x in jax.tree.leaves(self.opt_state))
    if replaced:
      if healthy is not None and finite(healthy):
        self._take_optimizer(healthy)
      else:
        self._renew_optimizer()
      self.state = self._placed(self.params, self._at_step(self.opt_state))
    return replaced

  def _take_optimizer(self, opt_state: Any) -> None:
    """Copies the state of another one, whose it stays."""
    shardings = jax.tree.map(lambda x: x.sharding, self.state.opt_state)
    # The one before goes first, for a device may not hold both.
    self.state = self.state._replace(opt_state=None)
    placed = jax.device_put(opt_state, shardings, may_alias=False)
    self.state = self.state._replace(opt_state=placed)

  def _renew_optimizer(self) -> None:
    """Begins the inner optimizer anew."""
    self.state = self.state._replace(opt_state=None)
    fresh = self._initial_optimizer(self.params)
    self.state = self.state._replace(opt_state=fresh)

  def snapshot(self) -> Snapshot:
    """Starts copies of the whole state in host memory; waits for nothing."""
    params = swap_lib.copy_to_host_memory(self.params)
    residuals = self.swap.residuals(self.step)
    progress = swap_lib.Progress(params, self.swap.references(), residuals)
    return Snapshot(self.step, progress, self.opt_state_copy())

  def opt_state_copy(self) -> Any:
    """Starts copies of the inner optimizer's state in host memory."""
    return swap_lib.copy_to_host_memory(self.opt_state)

  def fetcher(self, snapshots: store.SnapshotStore) -> fetching.Fetcher:
    """What reads global versions for this one from a store."""
    return fetching.Fetcher(snapshots, self.plan, self.swap.shardings)

  def adopt(
    self, action: Any, anchor: swap_lib.Params, news: feedback.News
  ) -> None:
    """Swaps a version in, as a `core.Adopt`, or a line of the tape, says."""
    params, fragment = self.params, action.fragment
    self.swap.settle(fragment, None if action.muted_until else news)
    if action.muted_until or action.resync:
      step = max(action.muted_until, self.step)
      self.swap.start_over(params, fragment, anchor, step)
    else:
      self.swap.adopt(params, fragment, anchor, action.kept_from)


def finite(tree: Any) -> bool:
  """Whether all elements of all arrays are; waits for the devices."""
  return all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(tree))
