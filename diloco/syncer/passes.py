"""Passes over tensors in blocks: how the syncer reads, sums and measures.

All blocks have one size, each is summed in one order, and sums over blocks run
in block order in float64. So no number of threads and no way of storing a
tensor changes a bit; another kind of processor may still round otherwise. BLAS
sees only rows too short for it to share among threads of its own, and matrices
that are decomposed, for which it has one thread (`diloco/__init__.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
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
  """Contributions that cannot be merged; nothing has been changed.

  Attributes:
    reasons: by place of the contribution in the call.
  """

  def __init__(self, reasons: Mapping[int, str]):
    """Takes the reason for each contribution."""
    super().__init__(
      "; ".join(f"contribution {i}: {why}" for i, why in reasons.items())
    )
    self.reasons = dict(reasons)


def measure(
  contributions: Sequence[sources.Source], threads: int = 1
) -> tuple[Measure, ...]:
  """Reads the same tensor of several contributions once, side by side.

  Raises:
    ContributionError: one is damaged.
    OSError: the store could not be reached.
  """
  size = contributions[0].size
  squares = np.zeros((num_blocks(size), len(contributions)))

  def work(first: int, last: int) -> None:
    for n, blocks in lockstep(contributions, first, last):
      squares[n] = [norms.square(block) for block in blocks]

  share(work, len(squares), threads)
  return tuple(measured(column) for column in squares.T)


def dots(tensors: Sequence[sources.Source], threads: int = 1) -> list[float]:
  """Products of each tensor with the last one, that one's own included.

  Raises:
    ContributionError: one is damaged.
    OSError: the store could not be reached.
  """
  sums = np.zeros((num_blocks(tensors[0].size), len(tensors)))

  def work(first: int, last: int) -> None:
    for n, blocks in lockstep(tensors, first, last):
      sums[n] = [norms.product(block, blocks[-1]) for block in blocks]

  share(work, len(sums), threads)
  return [float(column.sum()) for column in sums.T]


def lockstep(
  contributions: Sequence[sources.Source], first: int, last: int
) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
  """Yields block number and that block of each contribution.

  Raises:
    ContributionError: one is damaged.
    OSError: the store could not be reached.
  """
  streams = [_stream(i, c, first, last) for i, c in enumerate(contributions)]
  rounds = zip(*streams, strict=True)
  return zip(range(first, last), rounds, strict=True)


def _stream(
  index: int, source: sources.Source, first: int, last: int
) -> Iterator[np.ndarray]:
  """Blocks [first, last) of one contribution; damage names it."""
  stop = min(last * BLOCK, source.size)
  try:
    yield from source.blocks(first * BLOCK, stop, BLOCK)
  except errors.CorruptSnapshotError as error:
    raise ContributionError({index: f"corrupt: {error}"}) from error


def share(work: Callable[[int, int], None], count: int, threads: int) -> None:
  """Runs work(first, last) over ranges of `count` blocks, one per thread."""

  def quiet(first: int, last: int) -> None:
    # Overflow and nan are measured, not warned about.
    with np.errstate(all="ignore"):
      work(first, last)

  threads = min(threads, count)
  if threads <= 1:
    quiet(0, count)
    return
  bounds = [count * i // threads for i in range(threads + 1)]
  with futures.ThreadPoolExecutor(threads) as pool:
    pending = [
      pool.submit(quiet, first, last)
      for first, last in itertools.pairwise(bounds)
    ]
  for future in pending:
    future.result()


def num_blocks(size: int) -> int:
  """How many blocks a tensor of `size` elements has."""
  return -(-size // BLOCK)


def measured(squares: np.ndarray) -> Measure:
  """The measure of a tensor from the sums of squares of its blocks."""
  # A float64 holds the square of any float32: only inf and nan are not finite.
  total = float(squares.sum())
  return Measure(math.sqrt(total), math.isfinite(total))
