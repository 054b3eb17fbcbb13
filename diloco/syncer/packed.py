"""A packed contribution as a source of a merge: decoded slab by slab.

A part's values lie in its row as they lie in the part, so where a slab of the
tensor and a part meet, they meet in one range of that row: it is read from the
block that holds its first value to the one that holds its last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from diloco.fragments import codec as codec_lib
from diloco.snapshots import arrays
from diloco.syncer import sources


class _Piece(NamedTuple):
  """What a slab has of one part, on its way."""

  read: arrays.Read
  stored: np.ndarray  # uint8, of whole blocks
  before: int  # values in them before the first that is wanted
  shape: tuple[int, ...]  # of what is wanted
  columns: arrays.Index  # where that is in the slab


class _Slab(NamedTuple):
  shape: tuple[int, ...]
  pieces: list[_Piece]


class PackedSource:
  """A tensor of small integers and scales; see `sources.Source`.

  While one slab is decoded the next is read.
  """

  def __init__(
    self,
    stored: arrays.StoredArray,
    codec: codec_lib.Codec,
    shape: Sequence[int],
    part: Sequence[int],
  ):
    """Wraps an opened array: a row of bytes for each part of a tensor."""
    self._stored = stored
    self._codec = codec
    self._shape = tuple(shape)
    self._part = tuple(part)
    pairs = zip(shape, part, strict=True)
    self._grid = tuple(whole // size for whole, size in pairs)
    self._slabs = sources.Slabs(arrays.Layout.of(shape, np.float32, part))

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self._shape)

  def blocks(self, step: int) -> Iterator[np.ndarray]:
    """See `Source.blocks`."""
    values = np.empty(self._slabs.max_size, np.float32)
    begun = sources.ahead(map(self._begin, self._slabs.boxes()))
    return sources.rechunk((self._decode(s, values) for s in begun), step)

  def _begin(self, box: arrays.Index) -> _Slab:
    """Starts to read a slab: it is whole along all axes after its thick one."""
    shape = tuple(side.stop - side.start for side in box)
    # Only what a slab spans whole can lie in several parts.
    spans = [
      range(side.start // size, (side.stop - 1) // size + 1)
      for side, size in zip(box, self._part, strict=True)
    ]
    return _Slab(
      shape, [self._piece(at, box) for at in itertools.product(*spans)]
    )

  def _piece(self, at: tuple[int, ...], box: arrays.Index) -> _Piece:
    """Starts to read what a slab's box has of the part at this place."""
    inside = [
      slice(max(b.start - n * size, 0), min(b.stop - n * size, size))
      for b, n, size in zip(box, at, self._part, strict=True)
    ]
    columns = tuple(
      slice(s.start + n * size - b.start, s.stop + n * size - b.start)
      for s, b, n, size in zip(inside, box, at, self._part, strict=True)
    )
    shape = tuple(s.stop - s.start for s in inside)
    start = _flat([s.start for s in inside], self._part)
    codec, row = self._codec, _flat(at, self._grid)
    blocks = start // codec.block, -(-(start + math.prod(shape)) // codec.block)
    length = self._stored.layout.shape[1]
    span = slice(
      blocks[0] * codec.block_bytes, min(blocks[1] * codec.block_bytes, length)
    )
    stored = np.empty((1, span.stop - span.start), np.uint8)
    read = self._stored.begin_read(stored, (slice(row, row + 1), span))
    before = start - blocks[0] * codec.block
    return _Piece(read, stored[0], before, shape, columns)

  def _decode(self, slab: _Slab, values: np.ndarray) -> np.ndarray:
    """Finishes reading; gives the slab's values in order."""
    found = values[: math.prod(slab.shape)]
    for piece in slab.pieces:
      piece.read.finish()
      count = math.prod(piece.shape)
      direct = len(slab.pieces) == 1 and not piece.before
      out = found if direct else np.empty(piece.before + count, np.float32)
      self._codec.decode(piece.stored, out)
      if not direct:
        part = out[piece.before :].reshape(piece.shape)
        found.reshape(slab.shape)[piece.columns] = part
    return found


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
  """Place of an element in the flattened array."""
  return int(np.ravel_multi_index(tuple(index), tuple(shape))) if shape else 0
