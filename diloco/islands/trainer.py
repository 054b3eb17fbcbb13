"""The deterministic half of an island: state, inner steps, swaps.

A trainer has no threads, clocks, store or tape. What it does follows from its
calls alone, bit by bit, so that a live island and a replay of it are the same
code driven by a core and by a tape.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from diloco import config as config_lib
from diloco.fragments import partition
from diloco.islands import inner_step, schedules, swap
from diloco.islands import placement as placement_lib
from diloco.tasks import task as task_lib

Held: TypeAlias = jax.Array | placement_lib.HostTensor


class Snapshot(NamedTuple):
  """A trainer's state at one step, in memory nobody donates.

  Attributes:
    step: inner steps done.
    params: every tensor's value.
    opt_state: the inner optimizer's state.
    references: every tensor's value at its fragment's last publication, or
      the global version where nothing was published since; what was learned
      after it, `params - references`, has not left the island yet.
  """

  step: int
  params: Mapping[str, jax.Array]
  opt_state: Any
  references: Mapping[str, Held]


class Trainer:
  """Trains one island's share of the data; see the module."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    task: task_lib.Task,
    island: int,
    topology: Sequence[int],
    devices: Sequence[jax.Device],
  ):
    """Starts from the run's initial parameters, which are version 0.

    Args:
      config: the run's configuration.
      task: what to train.
      island: which share of the data to take.
      topology: devices along each axis of the mesh.
      devices: at least as many as the topology holds.

    Raises:
      UserError: the task does not fit the topology or the fragments.
    """
    self.task = task
    self.placement = placement_lib.Placement(topology, devices)
    self.tree = inner_step.ParamTree(task, config.seed)
    self.plan = partition.partition(
      self.tree.tensors(), config.sync.num_fragments
    )
    self._schedule_steps = schedule_steps(config, task, island)
    self._optimizer = task.optimizer(self._schedule_steps)
    params = self.tree.init(self.placement)
    self.state = inner_step.TrainState(
      params,
      inner_step.init_opt_state(self._optimizer, params, self.placement),
      jax.device_put(_step_array(0), self.placement.replicated()),
    )
    self.step = 0
    self.anchors: list[placement_lib.HostFragment] = []
    self._published: dict[int, swap.Params] = {}  # last since the anchor
    self._swap = swap.Swap(config.sync.adoption, config.sync.blend_alpha)
    for fragment, tensors in enumerate(self.plan.fragments):
      names = [t.name for t in tensors]
      held = {n: placement_lib.to_host(n, params[n]) for n in names}
      # On a CPU the host copy is the device's memory, which is given away.
      self.anchors.append({n: t.owned() for n, t in held.items()})
      self._swap.started(fragment, 0, self._values(fragment))
    self._stream = task.batches(
      "train",
      share=island,
      num_shares=config.fleet.islands,
      seed=config.seed,
    )

  @functools.cached_property
  def _step_fn(self) -> inner_step.Step:
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
    for fragment in range(self.plan.num_fragments):
      self._swap.rehearse(self._values(fragment))
    self.opt_state_copy()

  def _values(self, fragment: int) -> dict[str, jax.Array]:
    params = self.state.params
    return {t.name: params[t.name] for t in self.plan.fragments[fragment]}

  def take_batch(self) -> Mapping[str, jax.Array]:
    """Returns the next batch, on the mesh."""
    return self.placement.put_batch(next(self._stream))

  def do_step(self, batch: Mapping[str, jax.Array]) -> inner_step.Metrics:
    """Dispatches one inner step; returns its metrics, not waiting for them."""
    self.state, metrics = self._step_fn(self.state, batch)
    self.step += 1
    return metrics

  def copies(self, fragment: int) -> swap.Params:
    """Starts copies of a fragment for a publication of this step."""
    copies = self._swap.copy(self._values(fragment))
    self._swap.published(fragment, self.step, copies)
    self._published[fragment] = copies
    return copies

  def adopt(
    self,
    fragment: int,
    anchor: placement_lib.HostFragment,
    kept_from: int,
    *,
    muted_until: int = 0,
    resync: bool = False,
    params: swap.Params | None = None,
  ) -> None:
    """Swaps a global version in.

    Args:
      fragment: which.
      anchor: the version's values.
      kept_from: from `core.Adopt`.
      muted_until: from `core.Adopt`.
      resync: from `core.Adopt`.
      params: the version's values on the mesh, to be given away; otherwise
        they are put there now.
    """
    self.anchors[fragment] = anchor
    self._published.pop(fragment, None)
    if params is None:
      params = self.put(anchor)
    if muted_until or resync:
      self._start_over(fragment, max(muted_until, self.step), params)
      return
    local = self._values(fragment)
    adopted = self._swap.adopt(fragment, kept_from, local, params)
    self.state.params.update(adopted)

  def put(self, anchor: placement_lib.HostFragment) -> swap.Params:
    """Copies a fragment's values to the mesh."""
    return {name: self.placement.put(held) for name, held in anchor.items()}

  def rebase(self, fragment: int) -> None:
    """Sets a fragment to its anchor: what it learned since is given up."""
    self._published.pop(fragment, None)
    self._start_over(fragment, self.step, self.put(self.anchors[fragment]))

  def _start_over(
    self, fragment: int, first_step: int, params: swap.Params
  ) -> None:
    self.state.params.update(params)
    self._swap.started(fragment, first_step, params)

  def optimizer_is_finite(self) -> bool:
    """Whether the inner optimizer's state is; waits for the devices."""
    return all(map(_finite, jax.tree.leaves(self.state.opt_state)))

  def mend_optimizer(self, healthy: Any | None = None) -> int:
    """Replaces what is not finite in the inner optimizer's state.

    Args:
      healthy: another state to take it from; None, or where that one is not
        finite either, gives zeros.

    Returns:
      Leaves replaced.
    """
    opt_state, replaced = _mended(self.state.opt_state, healthy)
    if replaced:
      self.state = self._placed(self.state.params, opt_state)
    return replaced

  def resume(
    self,
    step: int,
    anchors: Sequence[placement_lib.HostFragment],
    first_steps: Sequence[int],
    *,
    opt_state: Any | None = None,
    saved: Snapshot | None = None,
    carried: Collection[int] = (),
  ) -> None:
    """Goes on after `step`, before any step of this life.

    Args:
      step: inner steps done in earlier lives.
      anchors: [P], global versions to start from.
      first_steps: [P], the step each fragment's progress counts from.
      opt_state: of the inner optimizer; None for a new one.
      saved: where progress that never left the island is taken from.
      carried: fragments with such progress: theta <- theta_s + (G - R_s).
    """
    for fragment, anchor in enumerate(anchors):
      values = self.put(anchor)
      self._swap.started(fragment, first_steps[fragment], values)
      if fragment in carried:
        assert saved is not None
        values = swap.carry_over(
          self._on_mesh(saved.params, anchor),
          values,
          self._on_mesh(saved.references, anchor),
        )
      self.anchors[fragment] = anchor
      self.state.params.update(values)
    self._published.clear()
    if opt_state is None:
      opt_state = self.state.opt_state
    self.step = step
    # Copies: the given state is not this trainer's to give away.
    copies = swap.copy_tree(opt_state)
    params = self.state.params
    moved = schedules.set_step(self._optimizer, copies, params, step)
    self.state = self._placed(params, moved)
    self._stream.seek(step)

  def _on_mesh(
    self, values: Mapping[str, Held], names: Collection[str]
  ) -> dict[str, jax.Array]:
    found = {}
    for name in names:
      value = values[name]
      if isinstance(value, placement_lib.HostTensor):
        value = self.placement.put(value)
      found[name] = value
    return found

  def _placed(
    self, params: inner_step.FlatParams, opt_state: Any
  ) -> inner_step.TrainState:
    """A state of these values, where the compiled step expects them."""
    shardings = jax.tree.map(lambda x: x.sharding, self.state)
    state = inner_step.TrainState(params, opt_state, _step_array(self.step))
    return jax.device_put(state, shardings)

  def snapshot(self) -> Snapshot:
    """Starts copies of the whole state in host memory; waits for nothing."""
    references: dict[str, Held] = {}
    for fragment, anchor in enumerate(self.anchors):
      references.update(self._published.get(fragment, anchor))
    return Snapshot(
      self.step,
      swap.copy_to_host_memory(self.state.params),
      self.opt_state_copy(),
      references,
    )

  def opt_state_copy(self) -> Any:
    """Starts copies of the inner optimizer's state in host memory."""
    return swap.copy_to_host_memory(self.state.opt_state)

  def poison(self, fragment: int) -> None:
    """Makes a fragment's values not finite: a fault for tests of the rest."""
    params = self.state.params
    params.update(
      {name: x * jnp.nan for name, x in self._values(fragment).items()}
    )

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
  return max(1, round(tokens / task.tokens_per_batch))


def _mended(opt_state: Any, healthy: Any | None) -> tuple[Any, int]:
  """Replaces leaves that are not finite; returns how many as well."""
  replaced = 0

  def mend(value: jax.Array, spare: jax.Array) -> jax.Array:
    nonlocal replaced
    if _finite(value):
      return value
    replaced += 1
    return spare if _finite(spare) else jnp.zeros_like(value)

  if healthy is None:
    healthy = jax.tree.map(jnp.zeros_like, opt_state)
  return jax.tree.map(mend, opt_state, healthy), replaced


def _finite(value: jax.Array) -> bool:
  return bool(np.isfinite(np.asarray(value)).all())


def _step_array(step: int) -> jax.Array:
  return jnp.asarray(step, jnp.int32)
