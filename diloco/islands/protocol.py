"""What an island does to the store, in the order that makes it safe.

Procedures (see `diloco.snapshots.operations`): publish, fetch, and what an
island reads that comes back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from diloco import errors
from diloco.islands import comeback
from diloco.snapshots import cuts, keys, operations, records

# Made once: procedures are run a million times in simulations.
_AFTER_COMMIT_RECORD = operations.Point("after_commit_record")
_AFTER_PAYLOAD = operations.Point("after_payload")
_BEFORE_COMMIT_RECORD = operations.Point("before_commit_record")
_MID_RECOVERY = operations.Point("mid_recovery")


def publish(
  record: records.Contribution, content: Any
) -> operations.Procedure[None]:
  """Writes a contribution: the payload first, the record that proves it last.

  Args:
    record: the commit record.
    content: the payload's tensors.
  """
  yield operations.WritePayload(record.payload, content)
  yield _AFTER_PAYLOAD
  yield _BEFORE_COMMIT_RECORD
  yield operations.Write(keys.contribution_key(record.key), record)
  yield _AFTER_COMMIT_RECORD


class Fetched(NamedTuple):
  """A version, and what was read of its parameters."""

  head: records.Head
  content: Any


def fetch(
  fragment: int, newer_than: int
) -> operations.Procedure[Fetched | None]:
  """Reads the newest version of a fragment.

  A version may be retired while it is read; then there is a newer one.

  Args:
    fragment: which.
    newer_than: versions up to this one are of no interest.

  Returns:
    The version, or None when there is no newer one.

  Raises:
    CorruptSnapshotError: the newest version cannot be read, or its head is
      another fragment's.
  """
  tried = None
  while True:
    head, _ = yield operations.read_head(fragment)
    if head is None:
      return None
    if head.fragment != fragment:
      raise errors.CorruptSnapshotError(
        f"the head of fragment {fragment} is that of fragment {head.fragment}"
      )
    if head.version <= newer_than:
      return None
    try:
      content = yield operations.ReadPayload(head)
    except errors.CorruptSnapshotError:
      if head.payload == tried:
        raise
      tried = head.payload
      continue
    return Fetched(head, content)


def survey(
  island: int, num_fragments: int
) -> operations.Procedure[comeback.Known]:
  """What the store knows of an island: how far it is published and merged.

  Raises:
    LookupError: a fragment has no head.
  """
  # Records before heads: a merge moves a step from the first to the second,
  # so this order cannot miss it in both.
  names = yield operations.Names("contributions")
  waiting: list[records.Contribution] = []
  for name in filter(keys.is_contribution_name, names):
    fragment, owner, _, _ = map(int, name.split("."))
    if owner != island or fragment >= num_fragments:
      continue
    try:
      record, _ = yield operations.Read(
        keys.contribution_key(name), records.Contribution
      )
    except errors.CorruptSnapshotError:
      continue  # it will never be merged
    if record is not None:
      waiting.append(record)
  heads: list[records.Head] = []
  for fragment in range(num_fragments):
    head, _ = yield operations.read_head(fragment)
    if head is None:
      raise LookupError(f"fragment {fragment} has no head")
    heads.append(head)
  merged = [head.merged_step(island) for head in heads]
  published = list(merged)
  for record in waiting:
    # One from before a roll-back may land late, and is never merged.
    if record.epoch == heads[record.fragment].epoch:
      p = record.fragment
      published[p] = max(published[p], record.step)
  versions = tuple(head.version for head in heads)
  return comeback.Known(tuple(published), versions, tuple(merged))


class Standing(NamedTuple):
  """What the store tells an island that comes back.

  Attributes:
    epoch: the store's timeline; None before the first return to a cut.
    cut: number of the newest cut asked for, 0 without any.
    known: how far the island is published and merged.
    fetched: [P], the versions to start from, those that `known` names.
  """

  epoch: records.Epoch | None
  cut: int
  known: comeback.Known
  fetched: list[Fetched]


def come_back(
  island: int, num_fragments: int
) -> operations.Procedure[Standing]:
  """Reads all that the next life of an island goes on from.

  What can fail here fails as a whole: the caller waits and begins anew.

  Raises:
    CorruptSnapshotError: a newest version, or the epoch, cannot be read.
    LookupError: a fragment has no head.
  """
  epoch, _ = yield operations.Read(keys.EPOCH, records.Epoch)
  cut = max((yield from cuts.numbers()), default=0)
  known = yield from survey(island, num_fragments)
  yield _MID_RECOVERY
  fetched: list[Fetched] = []
  for fragment in range(num_fragments):
    found = yield from fetch(fragment, -1)
    if found is None:
      raise LookupError(f"fragment {fragment} has no head")
    fetched.append(found)
  # A version newer than the survey may hold steps it does not know of.
  merged = tuple(found.head.merged_step(island) for found in fetched)
  published = tuple(map(max, known.published, merged))
  versions = tuple(found.head.version for found in fetched)
  return Standing(
    epoch,
    max([cut, *(found.head.cut for found in fetched)]),
    comeback.Known(published, versions, merged),
    fetched,
  )


class VerdictWatch:
  """Tells one incarnation of an island what the syncer has against it, once."""

  def __init__(self, island: int, incarnation: int):
    """Has seen no verdict yet."""
    self._read = operations.Read(keys.verdict_key(island), records.Verdict)
    self._incarnation = incarnation
    self._seen: Any = None  # generation of the last one

  def look(self) -> operations.Procedure[int]:
    """Gives the number of offences if a new verdict tells of any, else 0."""
    try:
      verdict, generation = yield self._read
    except errors.CorruptSnapshotError:
      return 0  # the next offence brings a new one
    if verdict is None or generation == self._seen:
      return 0
    self._seen = generation
    if verdict.incarnation != self._incarnation:
      return 0
    offences: int = verdict.offences
    return offences
