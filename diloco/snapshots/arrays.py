"""Tensors in the snapshot store: chunked zarr3 arrays without compression.

Every writer stores only the *pieces* it holds and a reader takes any box. A
stored chunk carries a CRC-32C and a missing chunk is an error, never zeros, so
that a torn or corrupt tensor cannot enter a merge.

An array is not a snapshot: it may be half written. It becomes one by the
commit record that names it (`diloco.snapshots.records`).
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import tensorstore as ts

from diloco import errors
from diloco.snapshots import layout as layouts

Index = layouts.Index
Layout = layouts.Layout

_CORRUPT_STATUSES = frozenset(
  ["DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND"]
)
_MAX_NAME = 255  # bytes of a folder's name, on most file systems
# Bytes of a chunk from which on its checksum is taken by instructions that
# processors have for it. TensorStore's packages are built without them, and
# there it is more than half of what reading costs.
_LARGE = 1 << 19
_STRICT = {
  "fill_missing_data_reads": False,
  "store_data_equal_to_fill_value": True,
}


class Tensor(NamedTuple):
  """What this process holds of one tensor."""

  name: str  # unique within its prefix; any text but `.` and `..`
  layout: Layout  # the same on all processes that write pieces of it
  # (box, values) pairs; boxes begin and end on chunk bounds.
  pieces: Sequence[tuple[Index | None, np.ndarray]]
  # Whether `zarr.json` is written too. Without it only who knows the layout can
  # read the tensor.
  described: bool = True

  @classmethod
  def whole(cls, name: str, values: np.ndarray) -> Tensor:
    """A tensor this process holds alone."""
    layout = Layout.of(values.shape, values.dtype)
    return cls(name, layout, [(None, values)])


class StoredArray:
  """One opened array; safe to use from several threads."""

  def __init__(
    self,
    dataset: ts.TensorStore,
    context: ts.Context,
    beat: Callable[[], None],
  ):
    self._dataset = dataset
    self._context = context
    self._beat = beat
    chunk_shape: Any = dataset.chunk_layout.read_chunk.shape
    self.layout = Layout(
      tuple(dataset.shape), dataset.dtype.name, tuple(chunk_shape or ())
    )

  def begin_read(self, out: np.ndarray, index: Index | None = None) -> Read:
    """Starts to fill `out`, which stays the reader's until `finish`."""
    box = self.layout.box(index)
    shape = tuple(part.stop - part.start for part in box)
    if out.shape != shape or out.dtype != self.layout.numpy_dtype:
      raise ValueError(
        f"out is {out.dtype}{out.shape}; the box {box} needs"
        f" {self.layout.dtype}{shape}"
      )
    count = self._num_whole(box) if out.flags.c_contiguous else 0
    if not count:
      return Read([self._begin([out], self._dataset[box])], self._beat)
    length = self.layout.chunk_shape[0]
    first, rows = box[0].start // length, count * length
    axes = [1] * (out.ndim - 2)
    whole = out[:rows].reshape(-1).view(np.uint8).reshape(count, *axes, -1)
    sums = np.empty((count, *axes, layouts.CHECKSUM_BYTES), np.uint8)
    stored = self._stored[first : first + count]
    futures = [self._begin([whole, sums], stored)]
    if rows < len(out):  # what of the last chunk is in the box
      rest = slice(box[0].start + rows, box[0].stop), *box[1:]
      futures.append(self._begin([out[rows:]], self._dataset[rest]))
    return Read(futures, self._beat, whole.reshape(count, -1), sums)

  def _begin(self, views: Sequence[np.ndarray], part: Any) -> Any:
    """Starts to read a part into views, which lie side by side in it."""
    # Writing the dataset into a view of `out` decodes straight into it;
    # `dataset.read()` allocates fresh pages each time and is half as fast.
    made = [ts.array(view, context=self._context) for view in views]
    return (ts.concat(made, axis=-1) if made[1:] else made[0]).write(part)

  def _num_whole(self, box: Index) -> int:
    """Chunks at the start of a box whose checksums are taken here.

    Those are large, whole, rows of the tensor, and there are instructions.
    """
    chunk = self.layout.chunk_shape
    size = math.prod(chunk) * self.layout.numpy_dtype.itemsize
    rows = len(box) > 1 and chunk[1:] == self.layout.shape[1:]
    rows = rows and box[1:] == self.layout.box()[1:]
    if not rows or size < _LARGE or google_crc32c.implementation != "c":
      return 0
    start, stop = box[0].start, box[0].stop
    return 0 if start % chunk[0] else (stop - start) // chunk[0]

  @functools.cached_property
  def _stored(self) -> Any:
    """The same chunks as bytes, with the checksums behind them."""
    metadata = self.layout.stored()
    return _open(self._dataset.kvstore, metadata, self._context)

  def read(
    self, index: Index | None = None, out: np.ndarray | None = None
  ) -> np.ndarray:
    """Reads a box, or all; after an error the contents of `out` are undefined.

    Raises:
      CorruptSnapshotError: a chunk is missing, torn or fails its checksum.
      OSError: the store could not be reached.
    """
    if out is None:
      box = self.layout.box(index)
      shape = tuple(part.stop - part.start for part in box)
      out = np.empty(shape, self.layout.numpy_dtype)
    self.begin_read(out, index).finish()
    return out


class Read:
  """A read under way."""

  def __init__(
    self,
    futures: Sequence[Any],
    beat: Callable[[], None],
    chunks: np.ndarray = np.empty((0, 0), np.uint8),
    sums: np.ndarray = np.empty(0, np.uint8),
  ):
    """Reads `chunks`, a row each, and their checksums."""
    self._futures = futures
    self._beat = beat
    self._chunks = chunks
    self._sums = sums

  def finish(self) -> None:
    """Waits; raises as `StoredArray.read` does."""
    try:
      for future in self._futures:
        future.result()
    except (ValueError, OSError) as error:
      raise _read_error(error) from error
    sums = self._sums.reshape(-1).view("<u4").tolist()
    for chunk, told in zip(self._chunks, sums, strict=True):
      if google_crc32c.value(chunk) != told:
        raise errors.CorruptSnapshotError("a chunk's CRC-32C differs")
    self._beat()


class ArrayStore:
  """Arrays under one key-value store.

  Keys are `prefix/name/...` where the name is percent-encoded into a single
  path component, so that no tensor's name can collide with another's chunks.
  """

  def __init__(self, base: str | os.PathLike[str] | Mapping[str, Any]):
    """Describes the store; nothing is touched yet.

    Args:
      base: a `pathlib.Path`, a URL (`file:///...`, `memory://`, `s3://...`) or
        a TensorStore key-value store specification.
    """
    if isinstance(base, os.PathLike):
      path = os.path.abspath(os.fspath(base))
      base = {"driver": "file", "path": os.path.join(path, "")}
    self._context = ts.Context(
      {
        # A killed process loses nothing without it. A power cut may lose files
        # that a commit record names already; readers then find them corrupt.
        "file_io_sync": False,
        # Snapshots are immutable and read once; a cache only costs memory.
        "cache_pool": {"total_bytes_limit": 0},
      }
    )
    kvstore = ts.KvStore.open(base, context=self._context).result()
    if kvstore.path and not kvstore.path.endswith("/"):
      kvstore = kvstore + "/"
    self.kvstore = kvstore
    self._beat: Callable[[], None] = lambda: None

  def watched(self, beat: Callable[[], None]) -> ArrayStore:
    """The same store; `beat` is called with every part read or written.

    For who must tell a tensor that takes long from a store that hangs.
    """
    twin = copy.copy(self)
    twin._beat = beat
    return twin

  def write(self, prefix: str, tensors: Iterable[Tensor]) -> None:
    """Writes all pieces, all of them in flight together.

    Pieces need not be copied first: nothing refers to them once this returns.

    Raises:
      ValueError: a piece does not fit its box or splits a chunk.
      OSError: the store could not be written.
    """
    tensors = list(tensors)
    for tensor in tensors:
      _check_pieces(tensor)
    writes: list[Any] = []
    try:
      for tensor in tensors:
        writes.extend(self._begin_write(prefix, tensor))
    finally:
      failures = []
      for write in writes:
        failures.append(write.exception())
        self._beat()
    for failure in failures:
      if failure is not None:
        raise errors.StoreError(
          f"writing {prefix} failed: {failure}"
        ) from failure

  def _begin_write(self, prefix: str, tensor: Tensor) -> list[Any]:
    """Starts all writes of one tensor and returns their futures."""
    kvstore = self._at(prefix, tensor.name)
    writes = []
    if tensor.described:
      # The metadata is written blindly: every writer writes the same bytes, and
      # TensorStore's own create would read first.
      metadata = json.dumps(tensor.layout.metadata())
      writes.append(kvstore.write("zarr.json", metadata))
    dataset = self._dataset(kvstore, tensor.layout)
    for index, values in tensor.pieces:
      box = tensor.layout.box(index)
      write = dataset[box].write(
        values, can_reference_source_data_indefinitely=True
      )
      writes.append(write)
    return writes

  def open(
    self, prefix: str, name: str, layout: Layout | None = None
  ) -> StoredArray:
    """Opens one array.

    With a layout, from a commit record, the stored metadata, which has no
    checksum, is not read at all.

    Raises:
      CorruptSnapshotError: its metadata is missing or unreadable.
      OSError: the store could not be reached.
    """
    kvstore = self._at(prefix, name)
    try:
      dataset = self._dataset(kvstore, layout)
    except (ValueError, OSError) as error:
      raise _read_error(error) from error
    return StoredArray(dataset, self._context, self._beat)

  def read(self, prefix: str, name: str) -> np.ndarray:
    """Opens an array and reads all of it; see `StoredArray.read`."""
    return self.open(prefix, name).read()

  def _at(self, prefix: str, name: str) -> ts.KvStore:
    if not is_name(name):
      raise ValueError(f"a tensor cannot be named {name!r}; give it a name")
    return self.kvstore / prefix / f"{_component(name)}/"

  def _dataset(self, kvstore: ts.KvStore, layout: Layout | None) -> Any:
    return _open(kvstore, layout and layout.metadata(), self._context)


def _component(name: str) -> str:
  return urllib.parse.quote(name, safe="")


def is_name(name: str) -> bool:
  """Whether a tensor can have this name, as a folder of any file system."""
  component = _component(name)
  return component not in (".", "..") and 0 < len(component) <= _MAX_NAME


def _open(kvstore: Any, metadata: Any, context: ts.Context) -> Any:
  """Opens an array; without metadata, it is read."""
  spec: dict[str, Any] = {"driver": "zarr3", **_STRICT}
  if metadata is not None:
    spec["metadata"] = metadata
  # Not by the JSON of the store's specification: TensorStore never
  # frees what `to_json` makes, and a syncer opens arrays for months.
  return ts.open(
    spec,
    kvstore=kvstore,
    open=True,
    assume_metadata=metadata is not None,
    context=context,
  ).result()


def _check_pieces(tensor: Tensor) -> None:
  """Raises ValueError unless each piece fills whole chunks of its tensor."""
  layout = tensor.layout
  for index, values in tensor.pieces:
    box = layout.box(index)
    shape = tuple(part.stop - part.start for part in box)
    if values.shape != shape or values.dtype != layout.numpy_dtype:
      raise ValueError(
        f"piece of {tensor.name!r} is {values.dtype}{values.shape}; its box"
        f" {box} needs {layout.dtype}{shape}"
      )
    for part, size, chunk in zip(
      box, layout.shape, layout.chunk_shape, strict=True
    ):
      if part.start % chunk or (part.stop % chunk and part.stop != size):
        raise ValueError(
          f"piece {box} of {tensor.name!r} splits a chunk of shape"
          f" {layout.chunk_shape}; pass the shard shape to Layout.of"
        )


def _read_error(error: Exception) -> Exception:
  """Tells a damaged array from a store out of reach."""
  status = str(error).partition(":")[0]
  if status in _CORRUPT_STATUSES:
    return errors.CorruptSnapshotError(str(error))
  return errors.StoreError(f"reading failed: {error}")
