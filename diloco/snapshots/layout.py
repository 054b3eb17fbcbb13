"""How a tensor is laid out in the snapshot store: the zarr3 chunk grid.

The chunk grid is a function of shape, dtype and shard shape alone, so that all
writers of one tensor agree on it without talking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from diloco.fragments import codec as codec_lib

Index = tuple[slice, ...]
CHECKSUM_BYTES = 4  # behind every stored chunk

# Measured on two cores: smaller chunks are written slower; larger ones gain
# nothing and cost a streaming reader memory, some five chunks per tensor.
MAX_CHUNK_BYTES = 2 << 20
# A merge reads rows of whole chunks; where rows span several shards, chunks
# shrink down to this so that its buffers do not grow with the shards.
MIN_CHUNK_BYTES = 1 << 20

_DTYPES = {
  dtype.name: dtype
  for dtype in map(
    np.dtype,
    (
      *(np.float32, np.float16, ml_dtypes.bfloat16, np.bool_),
      *(np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32),
    ),
  )
}


class Layout(NamedTuple):
  """What the store must know of a tensor; equal on all its writers."""

  shape: tuple[int, ...]
  dtype: str  # one of `_DTYPES`
  chunk_shape: tuple[int, ...]

  @classmethod
  def of(
    cls,
    shape: Sequence[int],
    dtype: Any,
    shard_shape: Sequence[int] | None = None,
  ) -> Layout:
    """Chooses chunks that tile every shard exactly.

    Two writers then never share a chunk, and no write has to read first.

    They hold at most `MAX_CHUNK_BYTES` where an axis can be divided that far.

    Args:
      shape: global shape; `()` is a scalar.
      dtype: one of `_DTYPES`, by name or as a numpy dtype.
      shard_shape: shape of the piece one device holds; default: all of it.

    Raises:
      ValueError: for another dtype, an empty axis or shards that do not tile.
    """
    shape = tuple(int(size) for size in shape)
    shard = shape if shard_shape is None else tuple(map(int, shard_shape))
    name = np.dtype(dtype).name
    if name not in _DTYPES:
      raise ValueError(
        f"dtype {name} is not stored; convert to one of {sorted(_DTYPES)}"
      )
    if 0 in shape:
      raise ValueError(f"shape {shape} has an empty axis; leave the tensor out")
    if len(shard) != len(shape) or any(
      not 0 < part <= size or size % part
      for part, size in zip(shard, shape, strict=True)
    ):
      raise ValueError(
        f"shards of shape {shard} do not tile shape {shape}; every axis must"
        " divide evenly"
      )
    return cls(shape, name, _chunk_shape(shape, shard, _DTYPES[name].itemsize))

  @property
  def numpy_dtype(self) -> np.dtype:
    """The dtype as numpy has it."""
    return _DTYPES[self.dtype]

  def box(self, index: Index | None = None) -> Index:
    """The index with all bounds spelled out; None is all of the tensor.

    Raises:
      ValueError: if it is no box inside the shape.
    """
    if index is None:
      return tuple(slice(0, size) for size in self.shape)
    box = tuple(
      slice(*part.indices(size)[:2])
      for part, size in zip(index, self.shape, strict=False)
    )
    if (
      len(index) != len(self.shape)
      or any(part.step not in (None, 1) for part in index)
      or any(part.start >= part.stop for part in box)
    ):
      raise ValueError(f"index {index} is no box of shape {self.shape}")
    return box

  def stored(self) -> dict[str, Any]:
    """A `zarr.json` by which chunks are rows of bytes, their checksums too.

    For a tensor of two axes or more that is divided along the first alone.
    """
    num_chunks = -(-self.shape[0] // self.chunk_shape[0])
    row = math.prod(self.chunk_shape) * self.numpy_dtype.itemsize
    chunk = (*[1] * (len(self.shape) - 1), row + CHECKSUM_BYTES)
    found = Layout((num_chunks, *chunk[1:]), "uint8", chunk).metadata()
    return found | {"codecs": found["codecs"][:1]}

  def metadata(self) -> dict[str, Any]:
    """The array's `zarr.json`: little-endian bytes, CRC-32C, no compression."""
    return {
      "zarr_format": 3,
      "node_type": "array",
      "shape": list(self.shape),
      "data_type": self.dtype,
      "chunk_grid": {
        "name": "regular",
        "configuration": {"chunk_shape": list(self.chunk_shape)},
      },
      "chunk_key_encoding": {
        "name": "default",
        # All chunks in one directory: to make one costs as much as a file.
        "configuration": {"separator": "."},
      },
      "fill_value": False if self.dtype == "bool" else 0,
      "codecs": [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "crc32c"},
      ],
    }


def packed(
  codec: codec_lib.Codec, shape: Sequence[int], part: Sequence[int]
) -> Layout:
  """Of what a packed codec stores of a tensor: a row of bytes for each part.

  A chunk of it holds as many values as one of float32 would, so that who reads
  a tensor in slabs reads few chunks twice.

  Raises:
    ValueError: parts that do not tile the shape.
  """
  Layout.of(shape, np.float32, part)
  size = math.prod(part)
  row = codec.num_bytes(size)
  most = MAX_CHUNK_BYTES // 4 // codec.block * codec.block_bytes
  chunk = min(row, most)
  return Layout((math.prod(shape) // size, row), "uint8", (1, chunk))


def of_record(
  codec: str, shape: Sequence[int], chunks: Sequence[int]
) -> Layout:
  """Of a tensor that a commit record or a head describes.

  `chunks` are the record's: a chunk's shape, or of a packed codec a part's.

  Raises:
    ValueError: a record that cannot be true.
  """
  found = codec_lib.parse(codec)
  if found.packed:
    return packed(found, shape, chunks)
  dtype = codec_lib.FLOATS[found.name].name
  return Layout(tuple(shape), dtype, tuple(chunks))


def _chunk_shape(
  shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
  """Divides a shard along its leading axes until a chunk is small enough."""
  chunk = list(shard)
  for axis, rows in enumerate(shard):
    row_bytes = math.prod(shard[axis + 1 :]) * itemsize
    across = math.prod(shape[axis + 1 :]) // math.prod(shard[axis + 1 :])
    budget = max(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES // across)
    if rows * row_bytes <= budget:
      break
    fitting = max(1, budget // row_bytes)
    if shape[axis] == rows:
      # Nobody else writes along this axis: a ragged last chunk is fine, and
      # zarr pads it by less than one row per chunk.
      chunk[axis] = math.ceil(rows / math.ceil(rows / fitting))
    else:
      chunk[axis] = next(n for n in range(fitting, 0, -1) if rows % n == 0)
    if chunk[axis] < fitting // 16:
      # No divisor comes near: one large chunk beats thousands of files.
      chunk[axis] = rows
    if row_bytes <= budget:
      break
  return tuple(chunk)
