"""Global versions in the store: merge and commit.

The order of things and their names are in `diloco.syncer.heads`, the arithmetic
is in `diloco.syncer.round_merge`; here they meet.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco import errors
from diloco.fragments import partition
from diloco.snapshots import keys, operations, records, store
from diloco.syncer import core, merge, outer_optimizer, round_merge
from diloco.syncer import heads as heads_lib

Merged = round_merge.Merged
RefusedError = round_merge.RefusedError


class Committer:
  """Moves the heads of one leadership."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    heads: heads_lib.Heads,
    method: merge.Method,
    outer: outer_optimizer.OuterOptimizer,
  ):
    """Does nothing yet.

    Args:
      snapshots: the store.
      plan: the fragment plan.
      heads: of all fragments, fenced.
      method: how tensors that are not embeddings are averaged.
      outer: the outer optimizer.
    """
    self._store = snapshots
    self._heads = heads
    self._merger = round_merge.RoundMerger(snapshots, plan, method, outer)

  @property
  def token(self) -> int:
    """Fencing token it commits under."""
    return self._heads.token

  @property
  def heads(self) -> list[records.Head]:
    """[P], the heads as this syncer last wrote them."""
    return self._heads.records

  @property
  def standing(self) -> dict[int, str]:
    """Fragments that stand still, and why."""
    return self._heads.standing

  def look_after_heads(self) -> list[records.Head]:
    """Puts heads back that the store has spoiled; gives those.

    Raises:
      OSError: the store failed.
      FencedError: another syncer leads.
    """
    return self._store.perform(self._heads.look_after())

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
      as `heads.Heads.close_round`.
    """
    fragment = close.fragment

    def content_of(merged: Merged) -> heads_lib.Content:
      return heads_lib.Content(
        self._merger.chunks(fragment), facts_of(merged), merged.digest
      )

    of_chosen = [weights[c.contribution.key] for c in close.chosen]
    operations.perform(
      self._heads.close_round(close, of_chosen, content_of), self._execute
    )
    return self.heads[fragment].merged

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
