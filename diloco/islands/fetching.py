"""Reading global versions: only this host's shards, and only if undamaged."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from diloco import errors
from diloco.fragments import codec as codec_lib
from diloco.fragments import partition
from diloco.islands import shards
from diloco.snapshots import digest, keys, operations, records, store
from diloco.snapshots import layout as layouts

Values: TypeAlias = Mapping[str, jax.Array]  # of a fragment's tensors


class Fetcher:
  """Fetches fragments of one plan for one mesh. Thread-safe if it holds none.

  Attributes:
    bytes_read: by the last `read`, where a thread reads alone.
  """

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    shardings: shards.Shardings,
  ):
    self._store = snapshots
    self._plan = plan
    self._shardings = shardings
    self._held: dict[int, tuple[str, Values]] = {}
    self.bytes_read = 0

  def hold(self, fragment: int, digest: str, values: Values) -> None:
    """What is new is enough from now on; it must not be donated."""
    self._held[fragment] = digest, values

  def execute(self, operation: operations.Operation) -> Any:
    """Does one operation of a procedure that reads global versions."""
    if isinstance(operation, operations.ReadPayload):
      return self.read(operation.head)
    return self._store.execute(operation)

  def read(self, head: records.Head) -> dict[str, jax.Array]:
    """Reads what a head points to.

    Raises:
      CorruptSnapshotError: it is damaged.
      OSError: the store could not be reached.
    """
    found = self._add_to_held(head)
    if found is None or _is_other(found, head):
      tensors = self._plan.fragments[head.fragment]
      found = shards.read_fragment(self._store, head, tensors, self._shardings)
      size = sum(tensor.size for tensor in tensors)
      self.bytes_read = codec_lib.parse(head.codec).num_bytes(size)
      if _is_other(found, head):
        raise errors.CorruptSnapshotError(
          f"version {head.version} of fragment {head.fragment} is not what was"
          " committed: its digest differs"
        )
    held = shards.hold(found, self._shardings)
    if head.fragment in self._held:
      self.hold(head.fragment, head.digest, held)
    return held

  def _add_to_held(self, head: records.Head) -> shards.HostFragment | None:
    """The version as what is held and what is new; None if it must be read.

    Of what is new a host reads all, be it of other hosts' shards: its blocks go
    through the whole tensor.
    """
    digest, values = self._held.get(head.fragment, ("", {}))
    starts = [start for start, _ in head.deltas]
    if not digest or digest not in starts:
      return None
    payloads = [p for _, p in head.deltas[starts.index(digest) :]]
    codec = codec_lib.parse(head.delta_codec)
    tensors = self._plan.fragments[head.fragment]
    try:
      rows = self._read_deltas(codec, tensors, payloads)
    except errors.CorruptSnapshotError:
      return None  # retired, it may be: the whole version has a say
    self.bytes_read = sum(row.nbytes for row in rows)
    found, following = {}, iter(rows)
    for spec in tensors:
      held = shards.to_host(values[spec.name])
      pieces = [piece.copy() for _, piece in held.pieces]
      boxes = [box for box, _ in held.pieces]
      change = np.empty(spec.shape, np.float32)
      for row in itertools.islice(following, len(payloads)):
        codec.decode(row[0], change.reshape(-1))
        for box, piece in zip(boxes, pieces, strict=True):
          np.add(piece, change[box], out=piece)
      found[spec.name] = dataclasses.replace(
        held, pieces=tuple(zip(boxes, pieces, strict=True))
      )
    return found

  def _read_deltas(
    self,
    codec: codec_lib.Codec,
    tensors: Sequence[partition.Tensor],
    payloads: Sequence[str],
  ) -> list[np.ndarray]:
    """Each tensor's of all payloads in turn, read side by side."""
    rows, reads = [], []
    for spec, payload in itertools.product(tensors, payloads):
      layout = layouts.packed(codec, spec.shape, spec.shape)
      prefix = f"{payload}/{keys.DELTA}"
      opened = self._store.arrays.open(prefix, spec.name, layout)
      rows.append(np.empty(layout.shape, np.uint8))
      reads.append(opened.begin_read(rows[-1]))
    for read in reads:
      read.finish()
    return rows


def _is_other(found: shards.HostFragment, head: records.Head) -> bool:
  """Whether these values are not what was committed."""
  values = ((name, held.whole()) for name, held in found.items())
  told = head.digest
  return bool(told) and told != digest.tensors(values, told)
