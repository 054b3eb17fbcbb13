"""Passes over tensors in blocks: how the syncer reads, sums and measures.

All blocks have one size, each is summed in one order, and sums over blocks run
in block order in float64. So no way of storing a tensor changes a bit; another
kind of processor may still round otherwise. BLAS sees only rows too short for
it to share among threads of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diloco import errors
from diloco.fragments import norms
from diloco.syncer import sources

BLOCK = norms.BLOCK


class Measure(NamedTuple):
  """What one pass over a contribution's tensor finds."""

  norm: float  # L2, summed in float64; inf or nan if not finite
  finite: bool


class ContributionError(RuntimeError):
  """Contributions that cannot be merged; nothing has been changed."""

  def __init__(self, reasons: Mapping[int, str]):
    super().__init__(
      "; ".join(f"contribution {i}: {why}" for i, why in reasons.items())
    )
    self.reasons = dict(reasons)  # by place of the contribution in the call


def lockstep(
  contributions: Sequence[sources.Source],
) -> Iterator[tuple[np.ndarray, ...]]:
  """Yields block after block, that of each contribution.

  Raises:
    ContributionError: one is damaged.
    OSError: the store could not be reached.
  """
  streams = [_stream(i, c) for i, c in enumerate(contributions)]
  return zip(*streams, strict=True)


def _stream(index: int, source: sources.Source) -> Iterator[np.ndarray]:
  """Blocks of one contribution; damage names it."""
  try:
    yield from source.blocks(BLOCK)
  except errors.CorruptSnapshotError as error:
    raise ContributionError({index: f"corrupt: {error}"}) from error


def measured(squares: np.ndarray) -> Measure:
  """The measure of a tensor from the sums of squares of its blocks."""
  # A float64 holds the square of any float32: only inf and nan are not finite.
  total = float(squares.sum())
  return Measure(math.sqrt(total), math.isfinite(total))
