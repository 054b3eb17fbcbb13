"""The outer optimizer: SGD with Nesterov momentum over outer gradients.

It runs in the syncer, on host memory, one tensor at a time. There is no JAX
here: a syncer that restarts must not wait for it.

Reference: DiLoCo, arXiv 2311.08105, section 2.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class OuterOptimizer:
  """Configuration of the outer step; its state is one momentum per tensor.

  Attributes:
    learning_rate: eta, above 0.
    momentum: mu, in [0, 1).
    nesterov: look ahead along the new momentum; False is heavy-ball SGD.
  """

  learning_rate: float
  momentum: float
  nesterov: bool = True

  def __post_init__(self) -> None:
    if not 0 < self.learning_rate < float("inf"):
      raise ValueError(
        f"outer learning rate {self.learning_rate} must be above 0 and finite"
      )
    if not 0 <= self.momentum < 1:
      raise ValueError(f"outer momentum {self.momentum} must be in [0, 1)")

  def step(
    self,
    theta: np.ndarray,
    momentum: np.ndarray,
    outer_grad: np.ndarray,
    scratch: np.ndarray | None = None,
  ) -> None:
    """Takes one step in place.

        b <- mu b + g
        theta <- theta - eta (g + mu b)   with Nesterov
        theta <- theta - eta b            without

    Symbols: g is `outer_grad`, b is `momentum`, eta is `learning_rate`, mu is
    the configured momentum. The outer gradient is anchor minus island
    parameters, so subtracting it moves theta towards the islands.

    The operations and their order are those of `optax.sgd` in float32.

    Args:
      theta: any shape, float32; updated.
      momentum: as theta; updated.
      outer_grad: as theta; left alone.
      scratch: as theta, overwritten; default a fresh array.

    Reference: Sutskever et al., "On the importance of initialization and
      momentum in deep learning", ICML 2013, in the form of arXiv 1212.0901.
    """
    for array in (theta, momentum, outer_grad):
      if array.dtype != np.float32 or array.shape != theta.shape:
        raise ValueError(
          f"outer step over {array.dtype}{array.shape} and"
          f" {theta.dtype}{theta.shape}; all must be float32 of one shape"
        )
    if scratch is None:
      scratch = np.empty_like(theta)
    rate, decay = np.float32(self.learning_rate), np.float32(self.momentum)
    np.multiply(momentum, decay, out=momentum)
    np.add(outer_grad, momentum, out=momentum)
    if self.nesterov:
      np.multiply(momentum, decay, out=scratch)
      np.add(outer_grad, scratch, out=scratch)
      np.multiply(scratch, rate, out=scratch)
    else:
      np.multiply(momentum, rate, out=scratch)
    np.subtract(theta, scratch, out=theta)
