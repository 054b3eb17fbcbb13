"""What a syncer does to the store, in the order that makes it safe.

Procedures (see `diloco.snapshots.operations`). A commit is: payload first,
then compare-and-set of the fragment's head from the generation this syncer
itself last wrote. A syncer that takes over raises the token of every head
first, so a deposed one fails its compare-and-set however late it comes: no
version is committed twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.snapshots import keys, operations, records
from diloco.snapshots import members as members_lib
from diloco.syncer import orders

# Made once: procedures are run a million times in simulations.
_AFTER_HEAD_CAS = operations.Point("after_head_cas")
_AFTER_MERGE = operations.Point("after_merge")
_BEFORE_DELETE = operations.Point("before_delete")
_BEFORE_HEAD_CAS = operations.Point("before_head_cas")
_CONTRIBUTIONS = operations.Names("contributions")
_MID_FENCE = operations.Point("mid_fence")


def starts(heads: Sequence[records.Head]) -> list[orders.Start]:
  """What a core must know of the heads it starts from."""
  return [
    orders.Start(
      head.version,
      {int(m): step for m, step in head.clock.items()},
      {
        int(m): tuple((first, last) for first, last in spans)
        for m, spans in head.holes.items()
      },
    )
    for head in heads
  ]


class RefusedError(Exception):
  """Contributions that must not be merged, with the reason for each."""

  def __init__(self, reasons: Mapping[str, str]):
    super().__init__(str(reasons))
    self.reasons = reasons


class SpoiledError(errors.CorruptSnapshotError):
  """A head is damaged or lost, and what was to replace it was not written."""


class Held(NamedTuple):
  """A head as this syncer last wrote it."""

  head: records.Head
  generation: Any


def fence(fragment: int, token: int) -> operations.Procedure[Held]:
  """Raises the token of a fragment's head to `token`.

  Raises:
    LookupError: there is no head yet.
    FencedError: somebody with a newer token was here.
  """
  key = keys.head_key(fragment)
  while True:
    head, generation = yield operations.Read(key, records.Head)
    if head is None:
      raise LookupError(f"fragment {fragment} has no head")
    if head.token > token:
      raise errors.FencedError(
        f"fragment {fragment} is held under token {head.token}, this syncer"
        f" has {token}"
      )
    if head.token == token:
      return Held(head, generation)
    yield _MID_FENCE
    # Written or not, the next look tells, and gives the generation.
    yield operations.CompareAndSet(
      key, dataclasses.replace(head, token=token), generation
    )


def close_round(
  held: Held,
  merge: operations.Merge,
  head_of: Callable[[Any], records.Head],
) -> operations.Procedure[Held]:
  """Merges a round and commits the version.

  The payload's prefix was never used before: the commit of an earlier try may
  have succeeded although nobody was told.
  """
  facts = yield merge
  yield _AFTER_MERGE
  return (yield from commit(held, head_of(facts)))


def commit(held: Held, head: records.Head) -> operations.Procedure[Held]:
  """Makes a payload that is complete in the store the fragment's head.

  Raises:
    FencedError: another syncer holds the fragment, or it is unknown whether an
      earlier attempt succeeded; whoever leads next reads it from the head.
    SpoiledError: the head before it is damaged or lost; see `heal`.
  """
  key = keys.head_key(head.fragment)
  yield _BEFORE_HEAD_CAS
  moved = yield operations.CompareAndSet(key, head, held.generation)
  if not moved:
    _, spoiled = yield from _look_at(key)
    if spoiled:
      raise SpoiledError(spoiled)
    raise errors.FencedError(
      f"version {head.version} of fragment {head.fragment} was not committed:"
      f" its head moved under token {head.token}"
    )
  found, generation = yield operations.read_head(head.fragment)
  if found is not head and found != head:
    raise errors.FencedError(f"fragment {head.fragment} was taken over")
  yield _AFTER_HEAD_CAS
  return Held(head, generation)


def _look_at(key: str) -> operations.Procedure[tuple[Any, str]]:
  """A head's generation, and what is wrong with it; empty if nothing is."""
  try:
    found, generation = yield operations.Read(key, records.Head)
  except errors.CorruptSnapshotError as error:
    return error.generation, f"{key}: {error}"
  return generation, "" if found is not None else f"{key} is lost"


def heal(held: Held, *, doubted: bool) -> operations.Procedure[Held]:
  """Puts a head back that the store has damaged or lost; gives what is there.

  Only a leader can: it alone knows what was there. That it still leads is the
  condition, and the order is the proof that nobody else's head is undone:

  1. The head is damaged, at generation g.
  2. After that, the lease has our token. Tokens only grow, so until then nobody
     with a newer one had the lease, and nobody but us could move this head: it
     was the one in `held`, unless a commit of ours took effect unheard, which
     is `doubted`.
  3. Compare-and-set from g. Whoever takes the lease after step 2 has to raise
     the token of this head first, and cannot read it. If somebody has replaced
     it all the same, such as a return to a cut, its generation is not g.

  Raises:
    FencedError: somebody else has the lease.
    CorruptSnapshotError: there is, and it cannot be mended.
  """
  head = held.head
  key = keys.head_key(head.fragment)
  generation, spoiled = yield from _look_at(key)
  if not spoiled:
    return held
  if doubted:
    raise SpoiledError(f"{spoiled}; a later one may have been there")
  if not (yield from leads(head.token)):
    raise errors.FencedError(f"the lease of token {head.token} was taken over")
  yield _BEFORE_HEAD_CAS
  yield operations.CompareAndSet(key, head, generation)
  # What counts is what is there: an answer may have been lost.
  found, generation = yield operations.read_head(head.fragment)
  if found != head:
    raise errors.FencedError(f"fragment {head.fragment} was taken over")
  return Held(head, generation)


def leads(token: int) -> operations.Procedure[bool]:
  """Whether the lease is held under this token."""
  lease, _ = yield operations.Read(keys.SYNCER_LEASE, records.Lease)
  return lease is not None and bool(lease.owner) and lease.token == token


def rewrite(held: Held) -> operations.Procedure[Held]:
  """Writes a head anew: no earlier commit can succeed after that.

  Raises:
    FencedError: one did, or another syncer holds the fragment; whoever leads
      next reads it from the head.
    CorruptSnapshotError: the head is damaged or lost.
  """
  head = held.head
  key = keys.head_key(head.fragment)
  found, generation = yield operations.read_head(head.fragment)
  if found is None:
    raise errors.CorruptSnapshotError(f"{key} is lost")
  if found == head:
    yield operations.CompareAndSet(key, head, generation)
    # Written or not, the next look tells, and gives the generation.
    before = generation
    found, generation = yield operations.read_head(head.fragment)
    if found == head and generation != before:
      return Held(head, generation)
  raise errors.FencedError(
    f"fragment {head.fragment} is not at version {head.version} of token"
    f" {head.token} any more"
  )


# Records by name that could be read, and why others could not.
Sorted = tuple[list[tuple[str, Any]], list[tuple[str, str]]]


def scan(
  known: Collection[str], each: operations.Each = operations.in_turn
) -> operations.Procedure[tuple[list[str], *Sorted]]:
  """Reads commit records that are not known yet; gives the names of all."""
  names = yield _CONTRIBUTIONS
  new = [n for n in names if n not in known and keys.is_contribution_name(n)]
  if not new:
    return names, [], []
  reads = (
    operations.Read(keys.contribution_key(name), records.Contribution)
    for name in new
  )
  return names, *_sorted_out(new, (yield from each(map(_sound, reads))))


def _sound(read: operations.Read) -> operations.Procedure[tuple[Any, str]]:
  """The record, None where none is, and why it cannot be read if so."""
  try:
    record, _ = yield read
  except errors.CorruptSnapshotError as error:
    return None, str(error)
  return record, ""


def _sorted_out(
  names: Sequence[str], read: Sequence[tuple[Any, str]]
) -> Sorted:
  pairs = list(zip(names, read, strict=True))
  found = [(name, record) for name, (record, _) in pairs if record is not None]
  return found, [(name, why) for name, (_, why) in pairs if why]


@functools.cache
def _read_member(name: str) -> operations.Read:
  return operations.Read(keys.member_key(name), records.Member)


def members(
  each: operations.Each = operations.in_turn,
) -> operations.Procedure[tuple[list[records.Member], list[tuple[str, str]]]]:
  """Reads the islands' signs of life; by name, why some cannot be read."""
  names = list(filter(keys.is_island, (yield members_lib.NAMES)))
  read = yield from each(map(_sound, map(_read_member, names)))
  found, unreadable = _sorted_out(names, read)
  return [member for _, member in found], unreadable


def discard(
  name: str, pinned: Callable[[str], bool]
) -> operations.Procedure[None]:
  """Deletes a contribution that is merged, or never will be.

  Whether a cut has its payload `pinned` is asked once the record is gone: from
  then on the payload may go as soon as the cut does.
  """
  yield _BEFORE_DELETE
  # The record goes first: a record without payload would look corrupt.
  yield operations.Delete(keys.contribution_key(name))
  if not pinned(name):
    yield operations.DeleteTree(keys.payload_prefix(name))


def abandoned(
  heads: Mapping[int, records.Head],
  pinned: Callable[[str], bool] = lambda name: False,
) -> operations.Procedure[None]:
  """Deletes payloads whose publisher died before it wrote their record.

  Only those an island has since gone past: another may still be on its way.
  """
  payloads = yield operations.Names("payloads")
  # Payloads before records: whoever publishes meanwhile has both.
  names = yield operations.Names("contributions")
  for name in sorted(set(payloads) - set(names)):
    if not keys.is_contribution_name(name):
      continue
    fragment, island, _, step = map(int, name.split("."))
    if fragment not in heads or pinned(name):
      continue
    if step <= heads[fragment].merged_step(island):
      yield operations.DeleteTree(keys.payload_prefix(name))
