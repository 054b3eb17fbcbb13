"""Global versions in the store: read, merge, commit, retire.

A commit is: payload first, then compare-and-set of the fragment's head from
the generation this syncer itself last wrote. A syncer that takes over raises
the token of every head first, so a deposed one fails its compare-and-set
however late it comes: no version is committed twice.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco import errors
from diloco.fragments import codec, partition
from diloco.snapshots import arrays, records, store
from diloco.syncer import core, merge, outer_optimizer, passes, sources


@dataclasses.dataclass(frozen=True)
class Merged:
  """What a merge did."""

  outer_grad_norm: float
  num_bytes: int  # of the contributions read


class RefusedError(Exception):
  """Contributions that must not be merged, with the reason for each."""

  def __init__(self, reasons: Mapping[str, str]):
    super().__init__(str(reasons))
    self.reasons = reasons


class Committer:
  """Heads of all fragments, under one fencing token."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    token: int,
    method: merge.Method,
    outer: outer_optimizer.OuterOptimizer,
    keep_versions: int,
  ):
    """Fences every head.

    Args:
      snapshots: the store.
      plan: the fragment plan.
      token: of the lease held.
      method: how tensors that are not embeddings are averaged.
      outer: the outer optimizer.
      keep_versions: older global versions are deleted.

    Raises:
      LookupError: a fragment has no head yet.
      FencedError: somebody with a newer token was here.
    """
    self._store = snapshots
    self._plan = plan
    self._token = token
    self._method = method
    self._outer = outer
    self._keep_versions = keep_versions
    self._heads: list[tuple[records.Head, bytes]] = [
      self._fence(p) for p in range(plan.num_fragments)
    ]
    self._merger = merge.Merger(outer)
    self._tries = itertools.count()
    self._retained = [self._find_retained(p) for p in range(plan.num_fragments)]

  @property
  def heads(self) -> list[records.Head]:
    """[P], the heads as this syncer last wrote them."""
    return [head for head, _ in self._heads]

  def _fence(self, fragment: int) -> tuple[records.Head, bytes]:
    key = store.head_key(fragment)
    while True:
      head, generation = self._store.read_for_update(key, records.Head)
      if head is None:
        raise LookupError(f"fragment {fragment} has no head")
      if head.token > self._token:
        raise errors.FencedError(
          f"fragment {fragment} is held under token {head.token}, this syncer"
          f" has {self._token}"
        )
      mine = dataclasses.replace(head, token=self._token)
      if self._store.compare_and_set(key, mine, generation):
        return mine, self._store.read_for_update(key, records.Head)[1]

  def prepare(
    self,
    fragment: int,
    version: int,
    contributions: Sequence[records.Contribution],
    weights: Mapping[str, float],
  ) -> tuple[Merged, str]:
    """Merges a round tensor by tensor and writes the payload of its version.

    Args:
      fragment: which.
      version: the one to make; the head has the one before it.
      contributions: of the round.
      weights: contribution key to weight.

    Returns:
      What was done, and the prefix of the payload.

    Raises:
      RefusedError: some contributions cannot be used.
      OSError: the store failed. Nothing is committed either way.
    """
    head = self._heads[fragment][0]
    assert version == head.version + 1
    # Never the same prefix twice: the commit of an earlier try may have
    # succeeded although nobody was told.
    writer = f"s{self._token}.{next(self._tries)}"
    payload = store.global_prefix(fragment, version, writer)
    params, momenta = [], []
    square = 0.0
    for index, spec in enumerate(self._plan.fragments[fragment]):
      inputs = self._open(spec, index, contributions, weights)
      theta, momentum = self._read(head, spec, index)
      method = self._method if spec.merge == "rda" else "mean"
      try:
        outcome = self._merger.apply(inputs, method, theta, momentum)
      except passes.ContributionError as error:
        raise RefusedError(
          {contributions[i].key: why for i, why in error.reasons.items()}
        ) from error
      square += outcome.norm**2
      params.append(arrays.Tensor.whole(spec.name, theta))
      momenta.append(arrays.Tensor.whole(spec.name, momentum))
    self._store.arrays.write(f"{payload}/params", params)
    if self._outer.momentum:
      self._store.arrays.write(f"{payload}/momentum", momenta)
    num_bytes = sum(c.num_bytes for c in contributions)
    return Merged(square**0.5, num_bytes), payload

  def _open(
    self,
    spec: partition.Tensor,
    index: int,
    contributions: Sequence[records.Contribution],
    weights: Mapping[str, float],
  ) -> list[merge.Contribution]:
    inputs, reasons = [], {}
    for record in contributions:
      try:
        stored = self._store.arrays.open(
          record.payload, spec.name, _layout(spec, record, index)
        )
      except (ValueError, IndexError, errors.CorruptSnapshotError) as error:
        reasons[record.key] = f"corrupt: {error}"
        continue
      inputs.append(
        merge.Contribution(
          sources.StoreSource(stored), weights[record.key], record.norms[index]
        )
      )
    if reasons:
      raise RefusedError(reasons)
    return inputs

  def _read(
    self, head: records.Head, spec: partition.Tensor, index: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Parameters and outer momentum of the newest version.

    Version 0 has no momentum, and without a momentum term none is stored.
    """
    chunk_shape = tuple(head.chunks[index])
    layout = arrays.Layout(spec.shape, "float32", chunk_shape)

    def read(part: str) -> np.ndarray:
      opened = self._store.arrays.open(
        f"{head.payload}/{part}", spec.name, layout
      )
      return opened.read()

    theta = read("params")
    if head.version and self._outer.momentum:
      return theta, read("momentum")
    return theta, np.zeros_like(theta)

  def commit(
    self, close: core.Close, payload: str, facts: Mapping[str, Any]
  ) -> None:
    """Makes a merged payload the fragment's head.

    Args:
      close: the round.
      payload: prefix of what `prepare` wrote.
      facts: what the tape will say; kept in the head, for a successor.

    Raises:
      FencedError: another syncer committed to this fragment.
    """
    _, generation = self._heads[close.fragment]
    head = records.Head(
      fragment=close.fragment,
      version=close.version,
      token=self._token,
      payload=payload,
      chunks=[
        list(arrays.Layout.of(spec.shape, np.float32).chunk_shape)
        for spec in self._plan.fragments[close.fragment]
      ],
      clock={str(m): step for m, step in close.clock.items()},
      merged=dict(facts),
    )
    key = store.head_key(close.fragment)
    if not self._store.compare_and_set(key, head, generation):
      raise errors.FencedError(
        f"version {close.version} of fragment {close.fragment} was not"
        f" committed: its head moved under token {self._token}"
      )
    found, generation = self._store.read_for_update(key, records.Head)
    if found != head:
      raise errors.FencedError(f"fragment {close.fragment} was taken over")
    self._heads[close.fragment] = (head, generation)

  def retire(self, fragment: int) -> None:
    """Deletes global versions that nobody can be reading any more."""
    oldest = self._heads[fragment][0].version - self._keep_versions
    queue = self._retained[fragment]
    while queue and queue[0][0] < oldest:
      self._store.delete_tree(queue.popleft()[1])
    queue.append(
      (self._heads[fragment][0].version, self._heads[fragment][0].payload)
    )

  def delete_abandoned_payloads(self) -> None:
    """Deletes payloads whose publisher died before it wrote their record.

    Only those an island has since gone past: another may still be on its way.
    """
    records_left = set(self._store.names("contributions"))
    for name in set(self._store.names("payloads")) - records_left:
      if store.is_contribution_name(name):
        fragment, island, _, step = map(int, name.split("."))
        if fragment < len(self._heads) and (
          step <= self._heads[fragment][0].merged_step(island)
        ):
          self._store.delete_tree(store.payload_prefix(name))

  def _find_retained(self, fragment: int) -> collections.deque[tuple[int, str]]:
    """Payloads in the store, oldest first, those never committed included."""
    root = f"globals/{fragment:04d}"
    names = self._store.names(root)
    found = [(int(n.split(".")[0]), f"{root}/{n}") for n in names]
    return collections.deque(sorted(found))


def _layout(
  spec: partition.Tensor, record: records.Contribution, index: int
) -> arrays.Layout:
  dtype = codec.DTYPES[record.codec].name
  return arrays.Layout(spec.shape, dtype, tuple(record.chunks[index]))
