"""The inner step: a pure function that knows nothing of islands.

Parameters are held as a flat mapping from a '/'-joined path to an array, in
which fragments are easy to name; the task sees its own pytree.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diloco.fragments import partition
from diloco.islands import placement as placement_lib
from diloco.tasks import task as task_lib

FlatParams = dict[str, jax.Array]


class TrainState(NamedTuple):
  """What one inner step consumes and produces; donated to it."""

  params: FlatParams
  opt_state: Any
  step: jax.Array  # [], int32, inner steps of this island


Step = Callable[
  [TrainState, Mapping[str, Any]], tuple[TrainState, dict[str, jax.Array]]
]


class ParamTree:
  """Between a task's parameter pytree and the flat mapping."""

  def __init__(self, task: task_lib.Task, seed: int):
    """Traces `task.init` abstractly; no array is made."""
    self._task = task
    self._seed = seed
    shapes = jax.eval_shape(lambda: task.init(jax.random.key(seed)))
    leaves, self._treedef = jax.tree_util.tree_flatten_with_path(shapes)
    self._names = [
      jax.tree_util.keystr(path, simple=True, separator="/")
      for path, _ in leaves
    ]
    self.shapes = {
      name: leaf.shape
      for name, (_, leaf) in zip(self._names, leaves, strict=True)
    }

  def tensors(self) -> list[partition.Tensor]:
    """Every parameter leaf, with its way to merge."""
    return [
      partition.Tensor(
        name, shape, "mean" if self._task.is_embedding(name) else "rda"
      )
      for name, shape in self.shapes.items()
    ]

  def flatten(self, params: task_lib.Params) -> FlatParams:
    """Pytree to mapping."""
    return dict(zip(self._names, jax.tree.leaves(params), strict=True))

  def unflatten(self, flat: Mapping[str, Any]) -> task_lib.Params:
    """Mapping to pytree."""
    return jax.tree.unflatten(self._treedef, [flat[n] for n in self._names])

  def init(self, placement: placement_lib.Placement) -> FlatParams:
    """Initial parameters, float32, on their devices; equal for equal seeds."""
    shardings = {n: placement.param(s) for n, s in self.shapes.items()}

    def init():
      flat = self.flatten(self._task.init(jax.random.key(self._seed)))
      return {n: x.astype(jnp.float32) for n, x in flat.items()}

    return jax.jit(init, out_shardings=shardings)()


def init_opt_state(
  optimizer: optax.GradientTransformation,
  params: FlatParams,
  placement: placement_lib.Placement,
) -> Any:
  """Inner optimizer state, sharded like the parameters it belongs to."""
  shapes = jax.eval_shape(optimizer.init, params)
  shardings = optax.tree_utils.tree_map_params(
    optimizer,
    lambda _, param: placement.param(param.shape),
    shapes,
    params,
    transform_non_params=lambda _: placement.replicated(),
  )
  return jax.jit(optimizer.init, out_shardings=shardings)(params)


def set_schedule_step(opt_state: Any, step: int) -> Any:
  """Moves learning-rate schedules to `step`, leaving moments alone.

  A schedule follows the island's cumulative steps. Adam's own count belongs to
  its moments, which may be older than that after a recovery.
  """

  def is_schedule(path: Any, _: Any) -> bool:
    return any(
      getattr(key, "tuple_name", "") == "ScaleByScheduleState" for key in path
    )

  if not optax.tree_utils.tree_get_all_with_path(
    opt_state, "count", is_schedule
  ):
    return opt_state  # a constant learning rate
  return optax.tree_utils.tree_set(
    opt_state, is_schedule, count=jnp.asarray(step, jnp.int32)
  )


def compile_step(
  task: task_lib.Task,
  optimizer: optax.GradientTransformation,
  tree: ParamTree,
  state: TrainState,
  batch: Mapping[str, jax.Array],
) -> Step:
  """Returns the compiled step; it donates its state and is never retraced.

  Args:
    task: gives the loss.
    optimizer: the inner optimizer.
    tree: between the flat mapping and the task's pytree.
    state: an example; every step returns its state sharded like it.
    batch: an example.
  """
  shardings = jax.tree.map(lambda x: x.sharding, state)

  def step(state: TrainState, batch: Mapping[str, Any]):
    def loss_fn(flat: FlatParams):
      return task.loss(tree.unflatten(flat), batch)

    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {**aux, "loss": loss, "grad_norm": optax.tree.norm(grads)}
    return TrainState(params, opt_state, state.step + 1), metrics

  jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
  return jitted.lower(state, batch).compile()
