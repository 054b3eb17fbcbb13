"""The inner step: a pure function that knows nothing of islands.

Parameters are held as a flat mapping from a '/'-joined path to an array, in
which fragments are easy to name; the task sees its own pytree.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco import config as config_lib
from diloco import errors
from diloco.fragments import partition
from diloco.islands import compilation
from diloco.islands import placement as placement_lib
from diloco.snapshots import arrays
from diloco.tasks import task as task_lib

FlatParams = dict[str, jax.Array]


class TrainState(NamedTuple):
  """What one inner step consumes and produces; donated to it."""

  params: FlatParams
  opt_state: Any
  step: jax.Array  # [], int32, inner steps of this island


Metrics = dict[str, Any]  # of scalars; those of the task are one deeper
Step = Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, Metrics]]


def is_saveable(value: Any) -> bool:
  """Whether a checkpoint can hold this leaf: no key, and not empty."""
  is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
  return not is_key and value.size > 0


def is_real(value: Any) -> bool:
  """Whether it can be told as one real number, if it is a scalar."""
  dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
  kinds = (np.floating, np.integer, np.bool_)
  return any(jnp.issubdtype(dtype, kind) for kind in kinds)


class ParamTree:
  """Between a task's parameter pytree and the flat mapping."""

  def __init__(self, task: task_lib.Task, seed: int):
    """Traces `task.init` abstractly; no array is made.

    Raises:
      UserError: a parameter is not float32, is empty, or has no name of its own
        that a store can keep.
    """
    self._task = task
    self._seed = seed
    shapes = jax.eval_shape(lambda: task.init(jax.random.key(seed)))
    leaves, self._treedef = jax.tree_util.tree_flatten_with_path(shapes)
    self._names = [
      jax.tree_util.keystr(path, simple=True, separator="/")
      for path, _ in leaves
    ]
    for i, (name, (_, leaf)) in enumerate(
      zip(self._names, leaves, strict=True)
    ):
      why, remedy = "", "give it another name"
      if leaf.dtype != jnp.float32:
        why = f"init gives it as {leaf.dtype}, and parameters are float32"
        remedy = "cast it in init; loss may compute in any type"
      elif not leaf.size:
        why = (
          f"init gives it the shape {leaf.shape}, without elements, so there"
          " is nothing to merge"
        )
        remedy = "leave it out of the parameters"
      elif name in self._names[:i]:
        why = "another one has this name, once keys are joined by '/'"
      elif not arrays.is_name(name):
        why = "it is no name for a folder, which it has in the store"
        remedy = "have init return a dict with short names"
      if why:
        raise errors.UserError(f"the task's parameter {name!r}", why, remedy)
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

  def plan(self, sync: config_lib.SyncConfig) -> partition.FragmentPlan:
    """The fragments a run divides them into.

    Raises:
      UserError: see `partition.partition`.
    """
    return partition.partition(
      self.tensors(),
      sync.num_fragments,
      split=sync.split_tensors,
      by=sync.fragments_by,
      apart=sync.embeddings_apart,
    )

  def flatten(self, params: task_lib.Params) -> FlatParams:
    """Pytree to mapping."""
    return self.named(jax.tree.leaves(params))

  def named(self, leaves: Sequence[jax.Array]) -> FlatParams:
    """The mapping of the pytree's leaves."""
    return dict(zip(self._names, leaves, strict=True))

  def unflatten(self, flat: Mapping[str, Any]) -> task_lib.Params:
    """Mapping to pytree."""
    return jax.tree.unflatten(self._treedef, [flat[n] for n in self._names])

  @functools.cached_property
  def eval_fn(self) -> Callable[[FlatParams, Any], tuple[Any, Any]]:
    """The task's `eval_loss` of the mapping, compiled when first used."""
    return jax.jit(
      lambda flat, batch: self._task.eval_loss(self.unflatten(flat), batch)
    )

  def init(self, placement: placement_lib.Placement) -> FlatParams:
    """Initial parameters, float32, on their devices; equal for equal seeds."""
    shardings = {n: placement.param(n, s) for n, s in self.shapes.items()}

    def init(key: jax.Array) -> FlatParams:
      return self.flatten(self._task.init(key))

    key = jax.random.key(self._seed)  # not in the program: seeds share it
    jitted = jax.jit(init, out_shardings=shardings)
    return compilation.compiled(jitted, key)(key)


def init_opt_state(
  optimizer: optax.GradientTransformation,
  params: FlatParams,
  placement: placement_lib.Placement,
) -> Any:
  """Inner optimizer state, sharded like the parameters it belongs to."""

  def is_of_params(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == params.keys()

  def place(node: Any) -> Any:
    """As the parameter it is of, if it has that one's shape.

    Not by `optax.tree_utils.tree_map_params`: what that gives the optimizer has
    no names, and an optimizer may choose leaves by these.
    """
    if not is_of_params(node):
      return placement.replicated()

    def of(param: jax.Array, moment: Any) -> jax.sharding.Sharding:
      like = moment.shape == param.shape
      return param.sharding if like else placement.replicated()

    return {
      name: jax.tree.map(functools.partial(of, param), node[name])
      for name, param in params.items()
    }

  shapes = jax.eval_shape(optimizer.init, params)
  shardings = jax.tree.map(place, shapes, is_leaf=is_of_params)
  jitted = jax.jit(optimizer.init, out_shardings=shardings)
  return compilation.compiled(jitted, params)(params)


def make_step(
  task: task_lib.Task,
  optimizer: optax.GradientTransformation,
  tree: ParamTree,
  schedule_steps: int,
) -> Step:
  """Returns the step, not compiled.

  Beside the new state it gives `loss`, the norms of gradient and update, the
  learning rate where it is known, and as `task` the scalars that the task's
  loss returns.
  """
  rate_of = getattr(task, "learning_rate", None)
  schedule = rate_of(schedule_steps) if callable(rate_of) else None

  def step(state: TrainState, batch: Mapping[str, Any]):
    def loss_fn(flat: FlatParams):
      return task.loss(tree.unflatten(flat), batch)

    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      "loss": loss,
      "grad_norm": optax.tree.norm(grads),
      "update_norm": optax.tree.norm(updates),
      "task": dict(aux),
    }
    if schedule is not None:
      metrics["learning_rate"] = schedule(state.step)
    else:  # as `optax.inject_hyperparams` holds it, if that is there
      rates = optax.tree_utils.tree_get_all_with_path(
        opt_state, "learning_rate"
      )
      if rates:
        metrics["learning_rate"] = rates[0][1]
    return TrainState(params, opt_state, state.step + 1), metrics

  return step


def compile_step(
  step: Step,
  state: TrainState,
  batch: Mapping[str, Any],
  replicated: jax.sharding.Sharding,
) -> Step:
  """Returns the compiled step; it donates its state and is never retraced.

  Steps that differ only in numbers of their schedules, as those of islands of
  unequal speed or of the points of a sweep, are one program. Their numbers are
  held where `replicated` says. State and batch are examples; every step returns
  its state sharded like this one.
  """
  numbers, general = compilation.numbers_apart(step, state, batch)
  numbers = jax.device_put(numbers, replicated)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  jitted = jax.jit(general, donate_argnums=1, out_shardings=(shardings, None))
  compiled = compilation.compiled(jitted, numbers, state, batch)
  return functools.partial(compiled, numbers)


def described(tree: Any) -> dict[str, str]:
  """Dtype and shape of every leaf, by its '/'-joined path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): (
      f"{value.dtype}{list(value.shape)}"
      if hasattr(value, "dtype")
      else type(value).__name__
    )
    for path, value in jax.tree_util.tree_leaves_with_path(tree)
  }


def changed(
  given: Mapping[str, str], found: Mapping[str, str]
) -> tuple[str, str, str] | None:
  """The first leaf that is not as `described`: its path, what it was and is."""
  for leaf in sorted(given.keys() | found.keys()):
    old, new = given.get(leaf, "nothing"), found.get(leaf, "nothing")
    if old != new:
      return leaf, old, new
  return None
