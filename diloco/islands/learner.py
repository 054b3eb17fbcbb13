"""Whoever does the inner steps, as the exchange knows it.

The exchange needs named arrays, a step count and an inner optimizer's state
that can be copied and mended. Whose loop moves them, on which data and by which
task is nothing to it: `diloco.islands.trainer` is one such loop.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco.fragments import partition
from diloco.islands import swap as swap_lib


class Snapshot(NamedTuple):
  """A learner's state at one step, in memory nobody donates.

  Attributes:
    step: inner steps done.
    progress: parameters and references.
    opt_state: the inner optimizer's state.
  """

  step: int
  progress: swap_lib.Progress
  opt_state: Any


class Learner(abc.ABC):
  """Parameters that are trained and exchanged; only one thread may use it.

  Attributes:
    step: inner steps done, over all lives.
    plan: how the parameters are divided into fragments.
    swap: their end of the exchange.
  """

  step: int
  plan: partition.FragmentPlan
  swap: swap_lib.Swap

  @property
  @abc.abstractmethod
  def params(self) -> swap_lib.Live:
    """The parameters as they are, by leaf; adoptions change them in place."""

  @property
  @abc.abstractmethod
  def opt_state(self) -> Any:
    """The inner optimizer's state."""

  @abc.abstractmethod
  def replace_optimizer(self, opt_state: Any) -> None:
    """Goes on with another state of the inner optimizer."""

  def optimizer_is_finite(self) -> bool:
    """Whether the inner optimizer's state is; waits for the devices."""
    return all(map(_finite, jax.tree.leaves(self.opt_state)))

  def mend_optimizer(self, healthy: Any | None = None) -> int:
    """Replaces what is not finite in the inner optimizer's state.

    Args:
      healthy: another state to take it from; None, or where that one is not
        finite either, gives zeros.

    Returns:
      Leaves replaced.
    """
    opt_state, replaced = _mended(self.opt_state, healthy)
    if replaced:
      self.replace_optimizer(opt_state)
    return replaced

  def snapshot(self) -> Snapshot:
    """Starts copies of the whole state in host memory; waits for nothing."""
    params = swap_lib.copy_to_host_memory(self.params)
    residuals = self.swap.residuals(self.step)
    progress = swap_lib.Progress(params, self.swap.references(), residuals)
    return Snapshot(self.step, progress, self.opt_state_copy())

  def opt_state_copy(self) -> Any:
    """Starts copies of the inner optimizer's state in host memory."""
    return swap_lib.copy_to_host_memory(self.opt_state)

  def poison(self, fragment: int) -> None:
    """Makes a fragment's values not finite: a fault for tests of the rest."""
    self.swap.poison(self.params, fragment)


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
