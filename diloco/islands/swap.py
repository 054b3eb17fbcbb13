"""Swapping a global version in between two steps.

What an island learned on a fragment while its publication was under way is in
its parameters but not in the new version. Three ways to treat it:

    overwrite   theta <- G
    blend       theta <- alpha theta + (1 - alpha) G
    carry       theta <- theta + (G - R)

Symbols: G the new global value; R the island's own value at the last step of
its that G contains or that is on its way, or the value it started from where
nothing was published since.

Reference: overwrite, Decoupled DiLoCo, arXiv 2604.21428; blend, Streaming
DiLoCo, arXiv 2501.18512, equation 3.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from diloco.islands import core

Params = Mapping[str, jax.Array]

_copy = jax.jit(jnp.copy)


@functools.partial(jax.jit, donate_argnums=0)
def _blend(local: jax.Array, adopted: jax.Array, alpha: jax.Array) -> jax.Array:
  return alpha * local + (1 - alpha) * adopted


@functools.partial(jax.jit, donate_argnums=0)
def _carry(
  local: jax.Array, adopted: jax.Array, reference: jax.Array
) -> jax.Array:
  return local + (adopted - reference)


@jax.jit
def _carried(
  local: jax.Array, adopted: jax.Array, reference: jax.Array
) -> jax.Array:
  return local + (adopted - reference)


def carry_over(
  local: Params, adopted: Params, reference: Params
) -> dict[str, jax.Array]:
  """Computes theta + (G - R) of every tensor; nothing is donated."""
  return {n: _carried(local[n], x, reference[n]) for n, x in adopted.items()}


def copy_tree(tree: Any) -> Any:
  """Starts device copies of all arrays that nobody will donate."""
  return jax.tree.map(_copy, tree)


def copy_to_host_memory(tree: Any) -> Any:
  """Starts copies of all arrays to memory that costs the devices nothing."""

  def copy(value: jax.Array) -> jax.Array:
    if next(iter(value.devices())).platform == "cpu":
      return _copy(value)
    pinned = value.sharding.with_memory_kind("pinned_host")
    return jax.device_put(value, pinned)

  return jax.tree.map(copy, tree)


class Swap:
  """Applies one way of adoption; holds R where it needs it."""

  def __init__(self, adoption: core.Adoption, blend_alpha: float):
    """Args: the way, and alpha of "blend"."""
    self._adoption = adoption
    self._alpha = jnp.float32(blend_alpha)
    self._references: dict[int, dict[int, Params]] = {}  # by step, in order

  def copy(self, params: Params) -> dict[str, jax.Array]:
    """Starts device copies that nobody will donate."""
    return {name: _copy(value) for name, value in params.items()}

  def rehearse(self, params: Params) -> None:
    """Compiles what publications and adoptions of these tensors will call."""
    copies = self.copy(params)
    if self._adoption == "blend":
      for name, value in params.items():
        _blend(copies[name], value, self._alpha)
    elif self._adoption == "carry":
      for name, value in params.items():
        _carry(copies[name], value, value)

  def started(self, fragment: int, step: int, params: Params) -> None:
    """At `step` the island's fragment equals a global version."""
    if self._adoption == "carry":
      self._references[fragment] = {step: self.copy(params)}

  def published(self, fragment: int, step: int, copies: Params) -> None:
    """The island published its values of `step`, which stay undonated."""
    if self._adoption == "carry":
      first, *published = self._references[fragment].items()
      kept = published[: core.PUBLICATIONS_KEPT - 1]
      self._references[fragment] = dict([first, *kept, (step, copies)])

  def adopt(
    self, fragment: int, kept_from: int, local: Params, adopted: Params
  ) -> dict[str, jax.Array]:
    """Returns the new parameters; `local` is donated to it.

    Args:
      fragment: which.
      kept_from: step of R, from `core.Adopt`.
      local: the island's values now.
      adopted: the global version; the caller gives it away as well.
    """
    if self._adoption == "overwrite":
      return dict(adopted)
    if self._adoption == "blend":
      return {n: _blend(local[n], x, self._alpha) for n, x in adopted.items()}
    reference = self._references[fragment][kept_from]
    new = {n: _carry(local[n], x, reference[n]) for n, x in adopted.items()}
    self._references[fragment] = {kept_from: adopted}
    return new
