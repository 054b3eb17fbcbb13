"""The shared snapshot store of a run.

Records are small keys written by compare-and-set or once; tensors are chunked
arrays beside them. Every process reaches the store by its URL alone; where
things are in it says `diloco.snapshots.keys`.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any, TypeVar

import tensorstore as ts

from diloco import crash, errors
from diloco.fragments import partition
from diloco.snapshots import arrays, locations, operations, records, requests

R = TypeVar("R", bound=records.Record)
T = TypeVar("T")


_WIDTH = 24
_BLANKS = 64
_AS_BLANKS = str.maketrans("01", " \t")
# Longer than TensorStore tries again for; what hangs then, hangs. Tensors have
# no such limit: their memory may be let go of only when TensorStore has.
_PATIENCE_SECS = 60.0


def _finish(future: Any) -> Any:
  """Waits for TensorStore; what goes wrong there is a `StoreError`.

  It raises ValueError for a full disk and other failures of the store.
  """
  try:
    return future.result(timeout=_PATIENCE_SECS)
  except TimeoutError as error:
    text = f"no answer of the snapshot store within {_PATIENCE_SECS:g} s"
    raise errors.StoreError(text) from error
  except ValueError as error:
    raise errors.StoreError(f"the snapshot store failed: {error}") from error


def _remove(folder: pathlib.Path) -> None:
  """Removes a directory, which others may remove, or write in, as well."""
  while folder.exists():
    try:
      shutil.rmtree(folder)
    except FileNotFoundError:
      continue  # somebody was faster; the rest is left
    except OSError as error:
      if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
        raise errors.StoreError(f"{folder} is not deleted: {error}") from error
      return  # what was written meanwhile is theirs


class SnapshotStore:
  """Records and tensors under one URL. Thread-safe."""

  width = 1  # how many requests it is worth having under way at once

  def __init__(self, url: str):
    """Opens a store; see `locations`, or `memory://`.

    Raises:
      OSError: it cannot be opened. Many a store opens and then fails.
    """
    self.url = url
    self._root = locations.directory(url)
    self._beat: Callable[[], None] = lambda: None
    locations.bound_requests(url)
    place = locations.kvstore(url)
    self._is_bucket = not isinstance(place, str)
    if self._is_bucket:
      self.width = _WIDTH
    try:
      self.arrays = arrays.ArrayStore(place)
      self._kvs = self.arrays.kvstore
    except ValueError as error:
      raise errors.StoreError(f"{url} cannot be opened: {error}") from error

  def watched(self, beat: Callable[[], None]) -> SnapshotStore:
    """The same store; `beat` is called as procedures and tensors get on."""
    twin = copy.copy(self)
    twin.arrays = self.arrays.watched(beat)
    twin._beat = beat
    return twin

  def read(self, key: str, kind: type[R]) -> R | None:
    """Returns a record, or None where there is none."""
    return self.read_for_update(key, kind)[0]

  def read_for_update(self, key: str, kind: type[R]) -> tuple[R | None, bytes]:
    """Returns a record and the generation to compare-and-set against.

    Raises:
      CorruptSnapshotError: it is damaged, or lies under the key of another
        record; the error has the generation.
    """
    result = _finish(self._kvs.read(key))
    generation = result.stamp.generation
    if result.state == "missing":
      return None, generation
    try:
      record = kind.from_bytes(result.value)
      records.check_key(record, key)
      return record, generation
    except errors.CorruptSnapshotError as error:
      error.generation = generation
      raise

  def write(self, key: str, record: records.Record) -> None:
    """Writes a record unconditionally."""
    _finish(self._kvs.write(key, self._bytes_of(record)))

  def _bytes_of(self, record: records.Record) -> bytes:
    """A record as it is written, which no other write is.

    In a bucket a generation is a checksum of what is there. A writer that has
    to tell its own write from an equal one, or from what was there before,
    could not. So there blanks follow the record, in an order drawn for each.
    """
    data = record.to_bytes()
    if self._is_bucket:
      drawn = f"{secrets.randbits(_BLANKS):0{_BLANKS}b}"
      data += drawn.translate(_AS_BLANKS).encode()
    return data

  def compare_and_set(
    self, key: str, record: records.Record, generation: bytes
  ) -> bool:
    """Writes only if the key is still at `generation`; says whether it was.

    What counts is what is read back: some object stores report success to two
    writers of one key, and a write that is asked for again, here or by who
    carries it, as its answer was lost, finds its condition broken by itself.

    Raises:
      OSError: the store failed; the record may be there.
    """
    data = self._bytes_of(record)
    stamp = _finish(self._kvs.write(key, data, if_equal=generation))
    refused = not stamp.generation
    if refused:
      requests.refused(self.url)
    if refused and not self._is_bucket:
      return False  # no answer gets lost there, and another's may be equal
    found = _finish(self._kvs.read(key)).value
    if found == data:
      return True
    if refused:
      return False
    try:
      type(record).from_bytes(found)
    except errors.CorruptSnapshotError as error:
      # It was there: this writer has not lost against another one.
      raise errors.StoreError(
        f"{key} was written and is damaged: {error}"
      ) from error
    return False

  def keys(self, prefix: str) -> list[str]:
    """All keys below `prefix/`, sorted, without the prefix; of "" all."""
    start, end = (prefix + "/", prefix + "0") if prefix else ("", "")
    found = _finish(
      self._kvs.list(
        ts.KvStore.KeyRange(start, end),  # "0" follows "/"
        strip_prefix_length=len(start),
      )
    )
    return sorted(key.decode() for key in found)

  def names(self, prefix: str) -> list[str]:
    """Names directly below `prefix/`, sorted; cheap enough to poll.

    On a file system they may include what others left there.
    """
    if self._root is None:
      return sorted({key.split("/")[0] for key in self.keys(prefix)})
    try:
      return sorted(os.listdir(self._root / prefix))
    except FileNotFoundError:
      return []

  def put(self, key: str, data: bytes) -> None:
    """Writes what is no record: pieces of files."""
    _finish(self._kvs.write(key, data))

  def get(self, key: str) -> bytes | None:
    """Reads what `put` has written; None where nothing is."""
    result = _finish(self._kvs.read(key))
    return None if result.state == "missing" else bytes(result.value)

  def delete(self, key: str) -> None:
    """Deletes one key; one that is not there is no error."""
    _finish(self._kvs.write(key, None))

  def delete_tree(self, prefix: str) -> None:
    """Deletes everything below `prefix/`; it is no error if nothing is.

    Raises:
      OSError: some of it is left.
    """
    if self._root is not None:
      # TensorStore would leave the empty directories behind.
      return _remove(self._root / prefix)
    _finish(
      self._kvs.delete_range(ts.KvStore.KeyRange(prefix + "/", prefix + "0"))
    )

  def execute(self, operation: operations.Operation) -> Any:
    """Does one operation of a procedure that moves no tensors.

    Shells with tensors or crash points handle those and pass the rest on.
    """
    self._beat()
    match operation:
      case operations.Read(key, kind):
        return self.read_for_update(key, kind)
      case operations.Write(key, record):
        return self.write(key, record)
      case operations.CompareAndSet(key, record, generation):
        return self.compare_and_set(key, record, generation)
      case operations.Delete(key):
        return self.delete(key)
      case operations.DeleteTree(prefix):
        return self.delete_tree(prefix)
      case operations.Names(prefix):
        return self.names(prefix)
      case operations.Compute(work):
        return work()
      case operations.Point(name):
        return crash.point(name)
    raise TypeError(f"this store does not do {type(operation).__name__}")

  def perform(self, procedure: operations.Procedure[T]) -> T:
    """Runs a procedure that moves no tensors."""
    return operations.perform(procedure, self.execute)

  def each(
    self, procedures: Iterable[operations.Procedure[Any]]
  ) -> operations.Procedure[list[Any]]:
    """An `operations.Each`: side by side, where an answer takes its time.

    What raises there has not stopped the others; of several the first raises.
    """
    if self.width == 1:
      return (yield from operations.in_turn(procedures))
    waiting = list(procedures)

    def perform_all() -> list[Any]:
      if len(waiting) < 2:
        return [self.perform(procedure) for procedure in waiting]
      with futures.ThreadPoolExecutor(min(self.width, len(waiting))) as pool:
        begun = [pool.submit(self.perform, one) for one in waiting]
      return [one.result() for one in begun]

    found: list[Any] = yield operations.Compute(perform_all)
    return found

  def write_plan(self, plan: partition.FragmentPlan) -> None:
    """Stores the fragment plan, or checks it against the stored one.

    Raises:
      UserError: the run was started with another plan.
    """
    found = self.read_plan()
    if found is None:
      data = json.dumps({"format": records.FORMAT} | plan.to_json())
      _finish(self._kvs.write("plan", data))
    elif found.hash != plan.hash:
      raise errors.UserError(
        f"a fragment plan with hash {plan.hash}",
        f"the run at {self.url} was started with plan {found.hash}: its"
        " tensors or sync.num_fragments differ",
        "restore the model and sync.num_fragments, or use a new --workdir",
      )

  def read_plan(self) -> partition.FragmentPlan | None:
    """Returns the stored fragment plan, or None in a fresh store."""
    result = _finish(self._kvs.read("plan"))
    if result.state == "missing":
      return None
    try:
      data: dict[str, Any] = json.loads(result.value)
      if data["format"] != records.FORMAT:
        raise errors.UserError(
          f"the store at {self.url}",
          f"it has format {data['format']}, this version reads"
          f" {records.FORMAT}",
          "use the version of diloco that wrote it, or a new --workdir",
        )
      return partition.FragmentPlan.from_json(data)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      if isinstance(error, errors.UserError):
        raise
      raise errors.CorruptSnapshotError(
        f"the fragment plan in {self.url} cannot be read: {error!r}"
      ) from error
