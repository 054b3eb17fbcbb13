"""A snapshot store in the memory of one process, without a byte of encoding.

It keeps records and arrays as they are, so it costs next to nothing, and it
never fails. `keep` writes what is in it to a store that others can open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from diloco import errors
from diloco.fragments import partition
from diloco.snapshots import arrays, records, store


class MemoryStore(store.SnapshotStore):
  """See `store.SnapshotStore`; for one thread."""

  def __init__(self) -> None:
    self.url = "memory://"
    self.tree = _Tree()
    self.arrays = _Arrays(self.tree)  # type: ignore[assignment]
    self._plan: partition.FragmentPlan | None = None

  def watched(self, beat: Callable[[], None]) -> MemoryStore:
    """Returns itself: nothing in it takes so long that it could hang."""
    return self

  def _beat(self) -> None:
    pass

  def read_for_update(self, key: str, kind: Any) -> tuple[Any, bytes]:
    """See `SnapshotStore`."""
    found: tuple[Any, bytes] = self.tree.found.get(key, (None, b""))
    return found

  def write(self, key: str, record: records.Record) -> None:
    """See `SnapshotStore`."""
    self.tree.put(key, record)

  def compare_and_set(
    self, key: str, record: records.Record, generation: bytes
  ) -> bool:
    """See `SnapshotStore`."""
    if self.tree.found.get(key, (None, b""))[1] != generation:
      return False
    self.tree.put(key, record)
    return True

  def keys(self, prefix: str) -> list[str]:
    """See `SnapshotStore`."""
    start = prefix + "/"
    below = self.tree.below(prefix)
    return sorted(key[len(start) :] for key in below)

  def names(self, prefix: str) -> list[str]:
    """See `SnapshotStore`."""
    return sorted(self.tree.children.get(prefix, ()))

  def delete(self, key: str) -> None:
    """See `SnapshotStore`."""
    self.tree.remove(key)

  def delete_tree(self, prefix: str) -> None:
    """See `SnapshotStore`."""
    for key in self.tree.below(prefix):
      self.tree.remove(key)

  def write_plan(self, plan: partition.FragmentPlan) -> None:
    """See `SnapshotStore`."""
    self._plan = plan

  def read_plan(self) -> partition.FragmentPlan | None:
    """See `SnapshotStore`."""
    return self._plan

  def keep(self, other: store.SnapshotStore) -> None:
    """Writes all of it to another store."""
    if self._plan is not None:
      other.write_plan(self._plan)
    tensors: dict[str, list[arrays.Tensor]] = {}
    written: dict[str, records.Record] = {}
    for key, (value, _) in self.tree.found.items():
      if isinstance(value, _Array):
        prefix, _, _ = key.rpartition("/")
        found = arrays.Tensor(value.name, value.layout, [(None, value.values)])
        tensors.setdefault(prefix, []).append(found)
      else:
        written[key] = value
    for prefix, below in tensors.items():
      other.arrays.write(prefix, below)
    for key, record in written.items():
      other.write(key, record)


class _Tree:
  """Values by keys, and what is directly below each prefix.

  Attributes:
    found: value and generation by key.
    children: names by prefix; those of keys, and of prefixes of keys.
    moved: bytes of tensors written and read so far.
  """

  def __init__(self) -> None:
    self.found: dict[str, tuple[Any, bytes]] = {}
    self.children: dict[str, dict[str, None]] = {}
    self.moved = 0
    self._generation = 0

  def put(self, key: str, value: Any) -> None:
    self._generation += 1
    if key not in self.found:
      path = key
      while "/" in path:
        path, _, name = path.rpartition("/")
        siblings = self.children.setdefault(path, {})
        if name in siblings:
          break
        siblings[name] = None
    self.found[key] = value, b"%d" % self._generation

  def remove(self, key: str) -> None:
    if self.found.pop(key, None) is None:
      return
    path = key
    while "/" in path:
      path, _, name = path.rpartition("/")
      siblings = self.children[path]
      del siblings[name]
      if siblings:
        break
      del self.children[path]

  def below(self, prefix: str) -> list[str]:
    keys = []
    for name in self.children.get(prefix, ()):
      path = f"{prefix}/{name}"
      keys += [path] if path in self.found else []
      keys += self.below(path)
    return keys


@dataclasses.dataclass(eq=False)
class _Array:
  """One tensor; as `arrays.StoredArray`."""

  name: str  # as it was given
  layout: arrays.Layout
  values: np.ndarray
  tree: _Tree

  def begin_read(
    self, out: np.ndarray, index: arrays.Index | None = None
  ) -> _Array:
    self.read(index, out)
    return self

  def finish(self) -> None:
    """Nothing is under way."""

  def read(
    self, index: arrays.Index | None = None, out: np.ndarray | None = None
  ) -> np.ndarray:
    found = self.values[self.layout.box(index)]
    self.tree.moved += found.nbytes
    if out is None:
      return np.array(found, order="C")  # `found.copy()` of a scalar is none
    out[...] = found
    return out


class _Arrays:
  """Arrays of a memory store; as `arrays.ArrayStore`."""

  def __init__(self, tree: _Tree):
    self._tree = tree

  def write(self, prefix: str, tensors: Iterable[arrays.Tensor]) -> None:
    for tensor in tensors:
      name, layout = tensor.name, tensor.layout
      values = np.empty(layout.shape, layout.numpy_dtype)
      for index, piece in tensor.pieces:
        values[layout.box(index)] = piece
        self._tree.moved += piece.nbytes
      key = f"{prefix}/{name.replace('/', '%2F')}"
      self._tree.put(key, _Array(name, layout, values, self._tree))

  def open(
    self, prefix: str, name: str, layout: arrays.Layout | None = None
  ) -> _Array:
    key = f"{prefix}/{name.replace('/', '%2F')}"
    if key not in self._tree.found:
      raise errors.CorruptSnapshotError(f"there is no {key}")
    found: _Array = self._tree.found[key][0]
    return found

  def read(self, prefix: str, name: str) -> np.ndarray:
    return self.open(prefix, name).read()
