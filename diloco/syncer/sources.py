"""Where a merge reads a contribution from, block by block.

A *source* yields one tensor as consecutive float32 blocks of its flattened
values, so that a merge never holds a whole contribution. The blocks it yields
do not depend on how the tensor is stored: two sources with equal values lead
to equal bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from diloco.snapshots import arrays

T = TypeVar("T")


class Source(Protocol):
  """One tensor of one contribution: an outer gradient."""

  @property
  def size(self) -> int:
    """Number of elements."""
    ...

  def blocks(self, step: int) -> Iterator[np.ndarray]:
    """Yields the flattened elements in order, `step` to a block but the last.

    Blocks are float32; each is overwritten when the next is taken.

    Raises:
      CorruptSnapshotError: the contribution is damaged.
      OSError: the store could not be reached.
    """
    ...


class MemorySource:
  """A tensor in memory or in a memory map; float32 or bfloat16."""

  def __init__(self, values: np.ndarray):
    """Args: C-contiguous values; they must not change while merged."""
    self._flat = values.reshape(-1)

  @property
  def size(self) -> int:
    """Number of elements."""
    return self._flat.size

  def blocks(self, step: int) -> Iterator[np.ndarray]:
    """See `Source.blocks`; float32 is not copied."""
    return _as_float32(rechunk([self._flat], step), step)


class StoreSource:
  """A tensor in the snapshot store; every chunk is read and checked once.

  While one slab is merged the next is read, so a pass holds two slabs. A slab
  is a row of stored chunks: one chunk where shards do not divide the trailing
  axes.
  """

  def __init__(self, stored: arrays.StoredArray):
    self._stored = stored
    self._slabs = Slabs(stored.layout)

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self._stored.layout.shape)

  def blocks(self, step: int) -> Iterator[np.ndarray]:
    """See `Source.blocks`."""
    return _as_float32(rechunk(self._read(), step), step)

  def _read(self) -> Iterator[np.ndarray]:
    dtype = self._stored.layout.numpy_dtype
    buffers = itertools.cycle(
      [np.empty(self._slabs.max_size, dtype) for _ in range(2)]
    )

    def begin(box: arrays.Index) -> tuple[np.ndarray, arrays.Read]:
      shape = tuple(part.stop - part.start for part in box)
      values = next(buffers)[: math.prod(shape)]
      return values, self._stored.begin_read(values.reshape(shape), box)

    # The buffer that `begin` takes is the one yielded last; its reader is done
    # with it once it asks for more.
    for values, read in ahead(map(begin, self._slabs.boxes())):
      read.finish()
      yield values


class Slabs:
  """Boxes of whole chunks that are contiguous in the flattened tensor.

  Attributes:
    max_size: elements of the largest.
  """

  def __init__(self, layout: arrays.Layout):
    """Finds the axis that divides the tensor into slabs."""
    self._shape = layout.shape
    chunk = layout.chunk_shape
    # Axes before this one have chunks one element thick.
    thick = (axis for axis, size in enumerate(chunk) if size > 1)
    axis = self._axis = next(thick, max(0, len(chunk) - 1))
    self._rows = chunk[axis] if chunk else 1
    self._length = self._shape[axis] if chunk else 1
    row_size = math.prod(self._shape[axis + 1 :])
    self.max_size = min(self._rows, self._length) * row_size

  def boxes(self) -> Iterator[arrays.Index]:
    """Yields the box of each slab, in order."""
    if not self._shape:
      yield ()
      return
    trailing = [slice(0, size) for size in self._shape[self._axis + 1 :]]
    for leading in np.ndindex(*self._shape[: self._axis]):
      for row in range(0, self._length, self._rows):
        rows = slice(row, min(row + self._rows, self._length))
        yield (*(slice(i, i + 1) for i in leading), rows, *trailing)


def ahead(begun: Iterable[T]) -> Iterator[T]:
  """Yields what is begun, each once the next has begun too."""
  waiting: list[T] = []
  for one in begun:
    waiting.append(one)
    if len(waiting) > 1:
      yield waiting.pop(0)
  yield from waiting


def rechunk(parts: Iterable[np.ndarray], step: int) -> Iterator[np.ndarray]:
  """Cuts consecutive 1-D parts into blocks of `step` elements.

  Only blocks that straddle two parts are copied.
  """
  joint, filled = None, 0
  for part in parts:
    position = 0
    if joint is not None and filled:
      position = min(step - filled, part.size)
      joint[filled : filled + position] = part[:position]
      filled += position
      if filled < step:
        continue
      yield joint
    whole = position + (part.size - position) // step * step
    for begin in range(position, whole, step):
      yield part[begin : begin + step]
    filled = part.size - whole
    if filled:
      if joint is None:
        joint = np.empty(step, part.dtype)
      joint[:filled] = part[whole:]
  if joint is not None and filled:
    yield joint[:filled]


def _as_float32(
  blocks: Iterator[np.ndarray], step: int
) -> Iterator[np.ndarray]:
  """Converts blocks that are not float32, into one buffer."""
  buffer = None
  for block in blocks:
    if block.dtype == np.float32:
      yield block
      continue
    if buffer is None:
      buffer = np.empty(step, np.float32)
    buffer[: block.size] = block
    yield buffer[: block.size]
