"""Swapping a global version in between two steps.

What an island learned on a fragment while its publication was under way is in
its parameters but not in the new version. Three ways to treat it:

    overwrite   theta <- G
    blend       theta <- alpha theta + (1 - alpha) G
    carry       theta <- theta + (G - R)

Symbols: G the new global value; R the island's value as last published, or
the value it started from where nothing was published since.

Reference: overwrite, Decoupled DiLoCo, arXiv 2604.21428; blend, Streaming
DiLoCo, arXiv 2501.18512, equation 3.
"""

import functools
from collections.abc import Mapping

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


class Swap:
  """Applies one way of adoption; holds R where it needs it."""

  def __init__(self, adoption: core.Adoption, blend_alpha: float):
    """Args: the way, and alpha of "blend"."""
    self._adoption = adoption
    self._alpha = jnp.float32(blend_alpha)
    self._references: dict[int, Params] = {}

  def copy(self, params: Params) -> dict[str, jax.Array]:
    """Starts device copies that nobody will donate."""
    return {name: _copy(value) for name, value in params.items()}

  def started(self, fragment: int, params: Params) -> None:
    """The island's fragment now equals a global version."""
    if self._adoption == "carry":
      self._references[fragment] = self.copy(params)

  def published(self, fragment: int, copies: Params) -> None:
    """The island published these values, which stay undonated."""
    if self._adoption == "carry":
      self._references[fragment] = copies

  def adopt(
    self, fragment: int, local: Params, adopted: Params
  ) -> dict[str, jax.Array]:
    """Returns the new parameters; `local` is donated to it.

    The caller gives `adopted` away as well.
    """
    if self._adoption == "overwrite":
      return dict(adopted)
    if self._adoption == "blend":
      return {n: _blend(local[n], x, self._alpha) for n, x in adopted.items()}
    reference = self._references[fragment]
    new = {n: _carry(local[n], x, reference[n]) for n, x in adopted.items()}
    self._references[fragment] = adopted
    return new
