"""Global versions in host memory, whole: for who takes them out of a run.

A number names the same version of all fragments. Fragments are merged each at
its own pace, so the newest values are of several versions, and of a live run
they are of no one moment either; a cut is.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from diloco import errors
from diloco.fragments import partition
from diloco.snapshots import (
  cuts,
  digest,
  keys,
  operations,
  records,
  restore,
  store,
)

_ATTEMPTS = 5  # to read a version that may be replaced meanwhile

# Which digest the tape gives a version of a fragment; empty if it does not.
Digest = Callable[[int, int], str]


class Values(NamedTuple):
  """Global parameters."""

  params: dict[str, np.ndarray]  # by '/'-joined path of the leaf, float32
  versions: list[int]  # [P], which version of each fragment they are


class Versions:
  """The global versions that a run's store still has."""

  def __init__(
    self, snapshots: store.SnapshotStore, told: Digest = lambda *_: ""
  ):
    """Looks for the fragment plan.

    The run's store is only read; see `Digest` for what is `told`.

    Raises:
      UserError: the run has no parameters yet.
    """
    self._store = snapshots
    plan = snapshots.read_plan()
    if plan is None or self._head(0) is None:
      raise errors.UserError(
        f"the parameters in {snapshots.url}",
        "the run has none yet",
        "wait until an island has started, or name another run",
      )
    self._plan = plan
    self._told = told

  def listed(self) -> list[int]:
    """Numbers of the versions that all fragments still have, in order."""
    found = [self._numbers(p) for p in range(self._plan.num_fragments)]
    return sorted(set.intersection(*found))

  def cuts(self) -> list[int]:
    """Numbers of the complete cuts, in order; of those that can be read."""
    found = []
    for cut in self._store.perform(cuts.numbers()):
      with contextlib.suppress(errors.CorruptSnapshotError):
        if self._store.perform(cuts.look(cut)).is_complete:
          found.append(cut)
    return found

  def read(self, version: int | None = None, cut: int | None = None) -> Values:
    """Reads parameters: of a version, of a cut, or the newest of each fragment.

    Raises:
      UserError: there is no such version or cut, or no longer.
      CorruptSnapshotError: it is damaged.
      OSError: the store cannot be read.
    """
    plan = self._plan
    if cut is not None:
      heads = self._heads_of(cut)
      pieces = [self._read_head(head) for head in heads]
      return Values(self._leaves(pieces), [head.version for head in heads])
    if version is None:
      newest = [self._newest(p) for p in range(plan.num_fragments)]
      versions = [number for number, _ in newest]
      return Values(self._leaves([held for _, held in newest]), versions)
    if version not in self.listed():
      raise self._gone(f"version {version}")
    pieces = [self._numbered(p, version) for p in range(plan.num_fragments)]
    return Values(self._leaves(pieces), [version] * plan.num_fragments)

  def _gone(self, what: str) -> errors.UserError:
    there = {"versions": self.listed(), "cuts": self.cuts()}
    named = [
      f"{kind} {', '.join(map(str, numbers))}" if numbers else f"no {kind}"
      for kind, numbers in there.items()
    ]
    return errors.UserError(
      f"{what} of the run's parameters",
      "it is not there, or no longer",
      f"there are {' and '.join(named)}; name none for the newest values",
    )

  def _head(self, fragment: int) -> records.Head | None:
    return self._store.read(keys.head_key(fragment), records.Head)

  def _numbers(self, fragment: int) -> set[int]:
    head = self._head(fragment)
    newest = head.version if head else -1
    names = self._store.names(keys.globals_prefix(fragment))
    numbers = [name.partition(".")[0] for name in names]
    older = {int(n) for n in numbers if n.isdecimal() and int(n) < newest}
    return older | ({newest} if head else set())

  def _heads_of(self, cut: int) -> Sequence[records.Head]:
    if cut not in self.cuts():
      raise self._gone(f"cut {cut}")
    return self._store.perform(restore.verified(cut)).heads

  def _newest(self, fragment: int) -> tuple[int, dict[str, np.ndarray]]:
    tried: Exception | None = None
    for _ in range(_ATTEMPTS):
      head = self._head(fragment)
      if head is None:
        break
      try:
        return head.version, self._read_head(head)
      except operations.FAILURES as error:
        tried = error  # a live run may have replaced and retired it
    why = tried or "its head is lost"
    raise errors.CorruptSnapshotError(f"fragment {fragment}: {why}")

  def _numbered(self, fragment: int, version: int) -> dict[str, np.ndarray]:
    head = self._head(fragment)
    if head is not None and head.version == version:
      return self._read_head(head)
    root, told = keys.globals_prefix(fragment), self._told(fragment, version)
    for name in self._store.names(root):
      # A leader that was deposed may have left one that was never committed.
      if name.startswith(f"{version:09d}."):
        held = self._read_tensors(f"{root}/{name}", fragment)
        if not told or digest.tensors(held.items(), told) == told:
          return held
    raise errors.CorruptSnapshotError(
      f"version {version} of fragment {fragment} is not what was committed, or"
      " was retired meanwhile"
    )

  def _read_head(self, head: records.Head) -> dict[str, np.ndarray]:
    held = self._read_tensors(head.payload, head.fragment)
    told = head.digest
    if told and digest.tensors(held.items(), told) != told:
      raise errors.CorruptSnapshotError(
        f"version {head.version} of fragment {head.fragment} is not what was"
        " committed: its digest differs"
      )
    return held

  def _read_tensors(self, payload: str, fragment: int) -> dict[str, np.ndarray]:
    prefix, read = f"{payload}/{keys.PARAMS}", self._store.arrays.read
    return {
      tensor.name: read(prefix, tensor.name).astype(np.float32, copy=False)
      for tensor in self._plan.fragments[fragment]
    }

  def _leaves(
    self, pieces: Sequence[dict[str, np.ndarray]]
  ) -> dict[str, np.ndarray]:
    """Puts leaves together from tensors, which may be parts of them."""
    held = {name: value for one in pieces for name, value in one.items()}
    parts: dict[str, list[partition.Tensor]] = collections.defaultdict(list)
    for tensors in self._plan.fragments:
      for tensor in tensors:
        parts[tensor.leaf].append(tensor)
    leaves = {}
    for leaf, found in sorted(parts.items()):
      values = [held[t.name] for t in sorted(found, key=_start)]
      axis = found[0].part.axis if found[0].part else 0
      leaves[leaf] = np.concatenate(values, axis) if values[1:] else values[0]
    return leaves


def _start(tensor: partition.Tensor) -> int:
  return tensor.part.start if tensor.part else 0
