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
from typing import Protocol

import numpy as np

from diloco.snapshots import arrays


class Source(Protocol):
  """One tensor of one contribution: an outer gradient."""

  @property
  def size(self) -> int:
    """Number of elements."""
    ...

  def blocks(self, start: int, stop: int, step: int) -> Iterator[np.ndarray]:
    """Yields the flattened elements [start, stop) in order.

    Safe to call from several threads at once.

    Args:
      start: first element.
      stop: end, at most `size`.
      step: elements per block; the last one may be shorter.

    Yields:
      [<= step] float32 blocks; each is overwritten when the next is taken.

    Raises:
      CorruptSnapshotError: the contribution is damaged.
      OSError: the store could not be reached.
    """
    ...


class MemorySource:
  """A tensor in memory or in a memory map; float32 or bfloat16."""

  def __init__(self, values: np.ndarray):
    """Refers to the values.

    Args:
      values: C-contiguous, any shape; must not change while it is merged.
    """
    if not values.flags.c_contiguous:
      raise ValueError(
        f"source of shape {values.shape} is not contiguous; copy it first"
      )
    self._flat = values.reshape(-1)

  @property
  def size(self) -> int:
    """Number of elements."""
    return self._flat.size

  def blocks(self, start: int, stop: int, step: int) -> Iterator[np.ndarray]:
    """See `Source.blocks`; float32 is not copied."""
    return _as_float32(rechunk([self._flat[start:stop]], step), step)


class StoreSource:
  """A tensor in the snapshot store; every chunk is read and checked once.

  While one slab is merged the next is read, so a pass holds two slabs. A slab
  is a row of stored chunks: one chunk where shards do not divide the trailing
  axes.
  """

  def __init__(self, stored: arrays.StoredArray):
    """Wraps an opened array."""
    self._stored = stored
    self._slabs = Slabs(stored.layout)

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self._stored.layout.shape)

  def blocks(self, start: int, stop: int, step: int) -> Iterator[np.ndarray]:
    """See `Source.blocks`."""
    return _as_float32(rechunk(self._read(start, stop), step), step)

  def _read(self, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yields the parts of successive slabs that lie in [start, stop)."""
    dtype = self._stored.layout.numpy_dtype
    buffers = itertools.cycle(
      [np.empty(self._slabs.max_size, dtype) for _ in range(2)]
    )

    def begin(slab: tuple[int, arrays.Index]):
      first, box = slab
      shape = tuple(part.stop - part.start for part in box)
      values = next(buffers)[: math.prod(shape)]
      return first, values, self._stored.begin_read(values.reshape(shape), box)

    pending = None
    for slab in itertools.chain(self._slabs.covering(start, stop), [None]):
      # The buffer that `begin` takes is the one yielded last; its reader is
      # done with it once it asks for more.
      following = begin(slab) if slab is not None else None
      if pending is not None:
        first, values, read = pending
        read.finish()
        yield values[max(0, start - first) : stop - first]
      pending = following


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
    self._row_size = math.prod(self._shape[axis + 1 :])
    self._length = self._shape[axis] if chunk else 1
    self.max_size = min(self._rows, self._length) * self._row_size

  def covering(
    self, start: int, stop: int
  ) -> Iterator[tuple[int, arrays.Index]]:
    """Yields (first element, box) of the slabs that touch [start, stop)."""
    outer_size = self._length * self._row_size
    per_outer = math.ceil(self._length / self._rows)
    slab_size = self._rows * self._row_size
    outer, rest = divmod(start, outer_size)
    number = outer * per_outer + rest // slab_size
    while True:
      outer, inner = divmod(number, per_outer)
      first = outer * outer_size + inner * slab_size
      if first >= stop:
        return
      yield first, self._box(outer, inner * self._rows)
      number += 1

  def _box(self, outer: int, row: int) -> arrays.Index:
    if not self._shape:
      return ()
    leading = np.unravel_index(outer, self._shape[: self._axis] or (1,))
    return (
      *(slice(int(i), int(i) + 1) for i in leading[: self._axis]),
      slice(row, min(row + self._rows, self._length)),
      *(slice(0, size) for size in self._shape[self._axis + 1 :]),
    )


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
