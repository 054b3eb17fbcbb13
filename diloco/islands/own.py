"""What a loop of the user's own trains, as the exchange knows it.

The loop does the steps; here are the parameters and the loop's own state
between two of them, checked to be what they were.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.islands import inner_step
from diloco.islands import learner as learner_lib


class Own(learner_lib.Learner):
  """Holds what a loop gives back after each of its steps."""

  def _initial_optimizer(self, params: inner_step.FlatParams) -> Any:
    return None  # until the loop begins

  def _renew_optimizer(self) -> None:
    """Only the loop could make another: what is not finite becomes zero."""
    sound = jax.tree.map(
      lambda x: x if learner_lib.finite(x) else jnp.zeros_like(x),
      self.opt_state,
    )
    self.state = self.state._replace(opt_state=sound)

  @property
  def pair(self) -> tuple[Any, Any]:
    """Parameters, as the task's pytree, and the loop's own state."""
    return self.tree.unflatten(self.state.params), self.state.opt_state

  def begin(self, state: Any) -> None:
    """Takes the loop's own state, a pytree of arrays, before its first step.

    What is not on the island's devices is copied to each of them.

    Raises:
      TypeError: a leaf is no array.
      ValueError: a leaf is one that cannot be saved.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    leaves: list[jax.Array] = []
    taken = {id(value) for value in self.params.values()}
    for path, leaf in paths:
      value = self._saveable(path, leaf)
      # The parameters themselves, say, which a step may give away beside it.
      leaves.append(jnp.copy(value) if id(value) in taken else value)
      taken.add(id(value))
    held = jax.tree.unflatten(structure, leaves)
    self.state = self.state._replace(opt_state=held)
    self._forms = [_Form("params", self.pair[0]), _Form("state", held)]

  def _saveable(self, path: Any, leaf: Any) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    value = jnp.asarray(leaf)
    if not inner_step.is_saveable(value):
      raise ValueError(
        f"the leaf {name!r} of its state is {value.dtype}{list(value.shape)},"
        " which cannot be saved: keep jax.random.key_data of a key, and"
        " nothing without elements"
      )
    whole = self.placement.replicated()
    divided = isinstance(value.sharding, jax.sharding.NamedSharding)
    if divided and value.sharding.device_set == whole.device_set:
      return value
    return jax.device_put(value, whole)

  def take(self, params: Any, state: Any) -> None:
    """Goes on with what a step of the loop has made.

    Raises:
      ValueError: it is not of the form that it was given, or the run's first
        step gave parameters that are not finite.
    """
    given = params, state
    leaves, held = (
      f.leaves(x) for f, x in zip(self._forms, given, strict=True)
    )
    named = self.tree.named(leaves)
    for name, value in named.items():
      # Later it may be no mistake of the loop's.
      if not self.step and not np.isfinite(np.asarray(value)).all():
        raise ValueError(f"the first step makes {name!r} not finite")
    self.state = inner_step.TrainState(
      named,
      jax.tree.unflatten(jax.tree.structure(state), held),
      self.state.step,
    )
    self.step += 1


class _Form:
  """Shapes, dtypes and places of a pytree's leaves."""

  def __init__(self, name: str, like: Any):
    self._name = name
    leaves, self._structure = jax.tree.flatten(like)
    self._leaves = [(x.shape, x.dtype, x.sharding) for x in leaves]
    self._described = inner_step.described(like)

  def leaves(self, tree: Any) -> Sequence[jax.Array]:
    """The leaves of such a tree, in their places; `ValueError` for another."""
    leaves, structure = jax.tree.flatten(tree)
    if structure != self._structure or any(
      getattr(x, "shape", ()) != shape or getattr(x, "dtype", None) != dtype
      for x, (shape, dtype, _) in zip(leaves, self._leaves, strict=True)
    ):
      raise ValueError(self._difference(tree))
    return [
      self._placed(x, sharding)
      for x, (_, _, sharding) in zip(leaves, self._leaves, strict=True)
    ]

  def _difference(self, tree: Any) -> str:
    changed = inner_step.changed(self._described, inner_step.described(tree))
    what = "another kind of pytree"
    if changed is not None:
      leaf, old, new = changed
      what = f"{new} for the {old} at {leaf!r}"
    return (
      f"exchange was given {what} in {self._name}: keep every shape, dtype and"
      " name from step to step"
    )

  def _placed(self, value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(value, np.ndarray | np.generic):
      return jax.device_put(value, sharding)
    if value.is_deleted():
      raise ValueError(
        f"exchange was given {self._name} that a step has used up: give it what"
        " the step returned, not what was donated to it"
      )
    if value.sharding == sharding or value.sharding.is_equivalent_to(
      sharding, value.ndim
    ):
      return value
    return jax.device_put(value, sharding)
