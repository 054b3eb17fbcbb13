"""The outer optimizers: steps of the global parameters along outer gradients.

They run in the syncer, on host memory, block by block of one tensor. There is
no JAX here: a syncer that restarts must not wait for it.

    sgd               theta <- theta - eta g                without momentum
    nesterov          b <- mu b + g;  theta <- theta - eta (g + mu b)
    heavy_ball        b <- mu b + g;  theta <- theta - eta b
    ema               b <- mu b + (1 - mu) g;  theta <- theta - eta b
    delayed_nesterov  d <- d + g; at every N-th merge b <- mu b + d / N,
                      d <- 0, theta <- theta - eta ((1 - c N + c) mu b + g / N);
                      at the others theta <- theta - eta (c mu b + g / N)

Symbols: g is the outer gradient, eta the learning rate, mu the momentum, b and
d are `config.OuterConfig.buffers`. The outer gradient is anchor minus island
parameters, so subtracting it moves theta towards the islands.

References: DiLoCo, arXiv 2311.08105, section 2; Asynchronous Local-SGD, arXiv
2401.09135, algorithm 3 (delayed Nesterov); Sutskever et al., "On the importance
of initialization and momentum in deep learning", ICML 2013, in the form of
arXiv 1212.0901.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from diloco import config


@dataclasses.dataclass(frozen=True)
class OuterOptimizer(config.OuterConfig):
  """An outer step; what it keeps between steps is the caller's.

  The names are those of the configuration. "sgd" with a momentum is "nesterov"
  or "heavy_ball", as `nesterov` says.
  """

  def step(
    self,
    theta: np.ndarray,
    buffers: Sequence[np.ndarray],
    outer_grad: np.ndarray,
    scratch: np.ndarray,
    arrival: int = 1,
  ) -> None:
    """Takes one step in place.

    The operations and their order are those of optax in float32, where it has
    the transformation: `optax.sgd`, `optax.ema` without its correction.

    Args:
      theta: any shape, float32; updated.
      buffers: as theta, those named by `buffers`; updated.
      outer_grad: as theta; left alone.
      scratch: as theta, overwritten.
      arrival: which merge of its fragment this is, from 1; modulo `delay`.
    """
    if self.optimizer == "delayed_nesterov":
      turn = arrival % self.delay == 0
      self._delayed_step(theta, buffers, outer_grad, scratch, turn)
      return
    rate, decay = np.float32(self.learning_rate), np.float32(self.momentum)
    if not buffers:
      np.multiply(outer_grad, rate, out=scratch)
      np.subtract(theta, scratch, out=theta)
      return
    (momentum,) = buffers
    np.multiply(momentum, decay, out=momentum)
    if self.optimizer == "ema":
      np.multiply(outer_grad, np.float32(1 - self.momentum), out=scratch)
      np.add(scratch, momentum, out=momentum)
    else:
      np.add(outer_grad, momentum, out=momentum)
    if self.looks_ahead:
      np.multiply(momentum, decay, out=scratch)
      np.add(outer_grad, scratch, out=scratch)
      np.multiply(scratch, rate, out=scratch)
    else:
      np.multiply(momentum, rate, out=scratch)
    np.subtract(theta, scratch, out=theta)

  def _delayed_step(
    self,
    theta: np.ndarray,
    buffers: Sequence[np.ndarray],
    outer_grad: np.ndarray,
    scratch: np.ndarray,
    turn: bool,
  ) -> None:
    share = np.float32(1 / self.delay)
    np.multiply(outer_grad, np.float32(self.learning_rate) * share, out=scratch)
    np.subtract(theta, scratch, out=theta)
    if not buffers:
      return
    momentum, delayed = buffers
    np.add(delayed, outer_grad, out=delayed)
    ahead = self.delay_c
    if turn:
      ahead += 1 - self.delay_c * self.delay
      np.multiply(momentum, np.float32(self.momentum), out=momentum)
      np.multiply(delayed, share, out=delayed)
      np.add(momentum, delayed, out=momentum)
      delayed[...] = 0
    factor = np.float32(self.learning_rate * ahead * self.momentum)
    np.multiply(momentum, factor, out=scratch)
    np.subtract(theta, scratch, out=theta)
