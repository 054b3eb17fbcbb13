"""Global versions in the store: merge and commit.

The order of things is in `diloco.syncer.protocol`, the arithmetic in
`diloco.syncer.round_merge`; here is what is named how.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco import errors
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
  ):
    """Fences every head.

    Args:
      snapshots: the store.
      plan: the fragment plan.
      token: of the lease held.
      method: how tensors that are not embeddings are averaged.
      outer: the outer optimizer.

    Raises:
      LookupError: a fragment has no head.
      CorruptSnapshotError: one is damaged.
      FencedError: somebody with a newer token was here.
    """
    self._store = snapshots
    self._token = token
    self._held = [
      snapshots.perform(protocol.fence(p, token))
      for p in range(plan.num_fragments)
    ]
    self._merger = round_merge.RoundMerger(snapshots, plan, method, outer)
    self._tries = itertools.count()

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
        holes=protocol.holes_of(close),
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


class Standstill(NamedTuple):
  """A fragment nobody can commit to: its head is damaged or lost."""

  fragment: int
  version: int  # the newest there are tensors of
  reason: str


def standstills(
  snapshots: store.SnapshotStore, num_fragments: int
) -> list[Standstill]:
  """Fragments without a head that had one.

  Raises:
    OSError: the store failed.
  """
  found = []
  for fragment in range(num_fragments):
    key = keys.head_key(fragment)
    newest = keys.newest_version(snapshots.names(keys.globals_prefix(fragment)))
    try:
      if snapshots.read(key, records.Head) is None and newest:
        found.append(Standstill(fragment, newest, f"{key} is lost"))
    except errors.CorruptSnapshotError as error:
      found.append(Standstill(fragment, newest, f"{key}: {error}"))
  return found


def _record(chosen: core.Chosen) -> records.Contribution:
  assert isinstance(chosen.contribution, records.Contribution)
  return chosen.contribution
