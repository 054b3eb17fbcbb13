"""Whether the tensors and saved states of a run are what they were.

Reading is the check: every stored chunk has a checksum, every version a digest
of its parameters, every saved state a marker with the digests of its arrays.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from diloco import errors
from diloco.fragments import partition
from diloco.snapshots import (
  checkpoint,
  cut_parts,
  digest,
  keys,
  records,
  states,
  store,
)
from diloco.snapshots import layout as layouts


def check_version(
  snapshots: store.SnapshotStore,
  plan: partition.FragmentPlan,
  buffers: Sequence[str],
  head: records.Head,
) -> None:
  """Reads a global version, and the outer optimizer's buffers beside it.

  Raises:
    CorruptSnapshotError: it is not readable, or not what was written.
  """
  tensors = plan.fragments[head.fragment]
  if len(head.chunks) != len(tensors):
    raise errors.CorruptSnapshotError(
      f"{head.payload} does not describe {len(tensors)} tensors"
    )
  parts = [keys.PARAMS]
  if head.codec != "f32" or head.deltas:
    parts.append(keys.MASTER)
  if keys.payload_version(head.payload):
    parts += buffers
    if keys.DELAYED in buffers:
      prefix = f"{head.payload}/{keys.ARRIVALS}"
      snapshots.arrays.read(prefix, keys.ARRIVALS)
  for part in parts:
    values = (
      (spec.name, _read(snapshots, head, part, spec, chunks))
      for spec, chunks in zip(tensors, head.chunks, strict=True)
    )
    found = digest.tensors(values, head.digest)
    if part == keys.PARAMS and head.digest and found != head.digest:
      raise errors.CorruptSnapshotError(
        f"{head.payload} has digest {found}, its head says {head.digest}"
      )


def _read(
  snapshots: store.SnapshotStore,
  head: records.Head,
  part: str,
  spec: partition.Tensor,
  chunks: list[int],
) -> np.ndarray:
  prefix = f"{head.payload}/{part}"
  coded = head.codec if part == keys.PARAMS else "f32"
  try:
    layout = layouts.of_record(coded, spec.shape, chunks)
    found = snapshots.arrays.open(prefix, spec.name, layout).read()
    return found.astype(np.float32, copy=False)
  except (ValueError, IndexError) as error:
    raise errors.CorruptSnapshotError(f"{prefix}: {error}") from error


class Verifier:
  """Reads what records point to."""

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    *,
    buffers: Sequence[str],
  ):
    self._run_dir = pathlib.Path(run_dir).absolute()
    self._store = snapshots
    self._plan = plan
    self._buffers = buffers
    self._copies = states.of_run(run_dir, snapshots)

  def damage(self, *, begun: bool = False) -> str:
    """What is wrong with the run's global state; empty if nothing is.

    `begun` says that all heads are known to have been there once.

    Raises:
      OSError: the store cannot be read.
    """
    missing = []
    for fragment in range(self._plan.num_fragments):
      try:
        if not self._check_newest(fragment):
          missing.append(fragment)
      except errors.CorruptSnapshotError as error:
        return f"fragment {fragment} is damaged: {error}"
    if missing and (begun or self._has_trained()):
      return f"fragment {missing[0]} has no head"
    return ""

  def _check_newest(self, fragment: int) -> bool:
    """Reads the newest version; False if there is none.

    A syncer that lives may replace and retire it meanwhile.
    """
    tried = None
    while True:
      head = self._store.read(keys.head_key(fragment), records.Head)
      if head is None:
        return False
      try:
        self.check_version(head)
      except errors.CorruptSnapshotError:
        if head.payload == tried:
          raise
        tried = head.payload
        continue
      return True

  def _has_trained(self) -> bool:
    """Whether all heads must have been there once."""
    if self._store.names("contributions") or self._store.names("cuts"):
      return True
    for fragment in range(self._plan.num_fragments):
      names = self._store.names(keys.globals_prefix(fragment))
      if keys.newest_version(names):
        return True
    return False

  def check_version(self, head: records.Head) -> None:
    """Reads a global version; raises as `check_version`."""
    check_version(self._store, self._plan, self._buffers, head)

  def check_contribution(self, sent: records.Contribution) -> str:
    """Why an outer gradient cannot be read; empty if it can."""
    tensors = self._plan.fragments[sent.fragment]
    if sent.plan_hash != self._plan.hash:
      return f"{sent.key} is of another run"
    try:
      for spec, chunks in zip(tensors, sent.chunks, strict=True):
        layout = layouts.of_record(sent.codec, spec.shape, chunks)
        self._store.arrays.open(sent.payload, spec.name, layout).read()
    except (ValueError, errors.CorruptSnapshotError) as error:
      return str(error)
    return ""

  def check_saved(self, part: records.CutPart) -> None:
    """Checks the state an island saved for a cut, brought here if need be.

    Raises:
      OSError: the store cannot be read.
      CorruptSnapshotError: it is missing, or not what was saved.
    """
    path = self._run_dir / part.checkpoint
    if path.parent != checkpoint.directory(self._run_dir, part.island):
      raise errors.CorruptSnapshotError(
        f"the state of island {part.island} is said to be in {part.checkpoint}"
      )
    if self._copies and not (path / checkpoint.MARKER).exists():
      self._copies.fetch(path)
    marker = checkpoint.verify(path)
    checkpoint.read_all(path, marker)
    if marker.crc32() != part.checksum:
      raise errors.CorruptSnapshotError(
        f"checkpoint {path.name} is not the one of the cut"
      )
    if (marker.step, marker.positions) != (part.step, part.positions):
      raise errors.CorruptSnapshotError(
        f"checkpoint {path.name} is of another moment"
      )

  def check_cut(self, parts: cut_parts.Parts) -> str:
    """Why a cut cannot be restored; empty if it can."""
    if len(parts.heads) != self._plan.num_fragments:
      return f"it has {len(parts.heads)} fragments"
    try:
      for head in parts.heads:
        self.check_version(head)
      for part in parts.islands.values():
        self.check_saved(part)
    except errors.CorruptSnapshotError as error:
      return str(error)
    return ""
