"""What becomes of one block of all contributions: weighted sums and quantiles.

    trimmed_mean  by coordinate, over what lies between the quantiles `trim` and
                  1 - trim of the contributions' weights
    median        the same between two quantiles beside 1/2

Reference: Yin et al., "Byzantine-robust distributed learning: towards optimal
statistical rates", arXiv 1803.01498.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Of the weights, around the middle: what a median is the mean of. Where two
# contributions meet there, it is halfway between them.
_MIDDLE = 1e-7

_PIECE = 1 << 12  # elements compared at a time

Blocks = Sequence[np.ndarray]

# Fills the second argument with the merge of blocks, using the third. Returns
# the block of the weighted mean, or of directions, whose length tells how far
# the contributions agree.
Combine = Callable[[Blocks, np.ndarray, np.ndarray], np.ndarray]


class Mix(NamedTuple):
  """How contributions enter a merge."""

  shares: Sequence[float]  # [M], weights that sum to 1
  scales: Sequence[float]  # [M], what each is shortened to before

  def lengths(self, norms: Sequence[float]) -> list[float]:
    """Norms of what enters, from those of the contributions."""
    return [s * n for s, n in zip(self.scales, norms, strict=True)]

  def linear(self, parts: Sequence[float]) -> Combine:
    """Sums contributions with coefficients."""
    factors = np.multiply(parts, self.scales).astype(np.float32)

    def combine(
      blocks: Blocks, target: np.ndarray, scratch: np.ndarray
    ) -> np.ndarray:
      for i, block in enumerate(blocks):
        term = scratch[: block.size] if i else target
        np.multiply(block, factors[i], out=term)
        if i:
          np.add(target, term, out=target)
      return target

    return combine

  def trimmed(self, trim: float) -> Combine:
    """Means between the quantiles `trim` and 1 - trim, by coordinate."""
    low, parts = min(trim, 0.5 - _MIDDLE), np.array(self.shares)[:, None]
    scales = np.array(self.scales, np.float32)[:, None]

    def combine(
      blocks: Blocks, target: np.ndarray, scratch: np.ndarray
    ) -> np.ndarray:
      mean = scratch[: target.size]
      for start in range(0, target.size, _PIECE):
        piece = slice(start, start + _PIECE)
        values = np.stack([b[piece] for b in blocks]) * scales
        mean[piece] = (parts * values).sum(axis=0)
        kept = _weights_below(values, self.shares)
        above = np.minimum(kept + parts, 1 - low)
        np.subtract(above, np.maximum(kept, low, out=kept), out=kept)
        np.maximum(kept, 0, out=kept)
        target[piece] = (kept * values).sum(axis=0) / kept.sum(axis=0)
      return mean

    return combine


def _weights_below(values: np.ndarray, shares: Sequence[float]) -> np.ndarray:
  """By coordinate, the summed shares [M] of what is less than each of [M, N].

  Equal ones count as less in their order. All pairs are compared, which for so
  few values is several times as fast as to sort them.
  """
  below = np.zeros(values.shape)
  below += np.cumsum([0.0, *shares[:-1]])[:, None]
  moved = np.empty(values.shape[1])
  for i, j in itertools.combinations(range(len(shares)), 2):
    swapped = values[j] < values[i]
    below[i] += np.multiply(swapped, shares[j], out=moved)
    below[j] -= np.multiply(swapped, shares[i], out=moved)
  return below
