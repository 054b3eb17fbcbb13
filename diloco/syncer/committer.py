"""Global versions in the store: merge, commit, retire.

The order of things is in `diloco.syncer.protocol`, the arithmetic in
`diloco.syncer.round_merge`; here is what is named how, and which versions are
kept.
"""

import collections
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from diloco.fragments import partition
from diloco.snapshots import keys, operations, records, store
from diloco.syncer import (
  core,
  merge,
  outer_optimizer,
  protocol,
  round_merge,
)

Merged = round_merge.Merged
RefusedError = round_merge.RefusedError


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
    self._token = token
    self._keep_versions = keep_versions
    self._held = [
      snapshots.perform(protocol.fence(p, token))
      for p in range(plan.num_fragments)
    ]
    self._merger = round_merge.RoundMerger(snapshots, plan, method, outer)
    self._tries = itertools.count()
    self._retained = [self._find_retained(p) for p in range(plan.num_fragments)]

  @property
  def token(self) -> int:
    """Fencing token it commits under."""
    return self._token

  @property
  def heads(self) -> list[records.Head]:
    """[P], the heads as this syncer last wrote them."""
    return [held.head for held in self._held]

  def close_round(
    self,
    close: core.Close,
    weights: Mapping[str, float],
    facts_of: Callable[[Merged], dict[str, Any]],
  ) -> dict[str, Any]:
    """Merges a round and makes the result the fragment's head.

    Args:
      close: the round.
      weights: contribution key to weight.
      facts_of: what the tape will say; kept in the head, for a successor.

    Returns:
      What `facts_of` made of it.

    Raises:
      RefusedError: some contributions cannot be used. Nothing is committed.
      OSError: the store failed. Nothing is committed.
      FencedError: another syncer committed to this fragment.
    """
    fragment = close.fragment
    held = self._held[fragment]
    assert close.version == held.head.version + 1
    contributions = tuple(_record(c) for c in close.chosen)
    # Never the same prefix twice: the commit of an earlier try may have
    # succeeded although nobody was told.
    writer = f"s{self._token}.{next(self._tries)}"
    payload = keys.global_prefix(fragment, close.version, writer)

    def head_of(merged: Merged) -> records.Head:
      return records.Head(
        fragment=fragment,
        version=close.version,
        token=self._token,
        payload=payload,
        chunks=self._merger.chunks(fragment),
        clock={str(m): step for m, step in close.clock.items()},
        merged=facts_of(merged),
        epoch=held.head.epoch,
        cut=close.cut,
        digest=merged.digest,
      )

    merge_op = operations.Merge(
      held.head,
      payload,
      contributions,
      tuple(weights[c.key] for c in contributions),
    )
    self._held[fragment] = operations.perform(
      protocol.close_round(held, merge_op, head_of), self._execute
    )
    return self._held[fragment].head.merged

  def _execute(self, operation: operations.Operation) -> Any:
    if isinstance(operation, operations.Merge):
      return self._merger.merge(operation)
    return self._store.execute(operation)

  def retire(
    self, fragment: int, pinned: Callable[[str], bool] = lambda prefix: False
  ) -> None:
    """Deletes global versions that nobody can be reading any more.

    Args:
      fragment: whose.
      pinned: whether a payload belongs to a cut and stays.
    """
    head = self._held[fragment].head
    kept: list[tuple[int, str]] = []
    for version, payload in self._retained[fragment]:
      if version >= head.version - self._keep_versions or pinned(payload):
        kept.append((version, payload))
      else:
        self._store.delete_tree(payload)
    kept.append((head.version, head.payload))
    self._retained[fragment] = collections.deque(kept)

  def delete_abandoned_payloads(self, pinned: Callable[[str], bool]) -> None:
    """Deletes payloads whose publisher died before it wrote their record."""
    self._store.perform(protocol.abandoned(dict(enumerate(self.heads)), pinned))

  def _find_retained(self, fragment: int) -> collections.deque[tuple[int, str]]:
    """Payloads in the store, oldest first, those never committed included."""
    root = f"globals/{fragment:04d}"
    names = self._store.names(root)
    found = [(int(n.split(".")[0]), f"{root}/{n}") for n in names]
    return collections.deque(sorted(found))


def _record(chosen: core.Chosen) -> records.Contribution:
  assert isinstance(chosen.contribution, records.Contribution)
  return chosen.contribution
