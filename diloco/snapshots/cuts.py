"""Cuts: consistent checkpoints of a whole run while it goes on.

A cut is a directory `cuts/<n>` of records:

    request           by the controller: take part
    island-<m>        where an island's state is saved, and its positions
    heads             by the syncer: all heads at one moment
    channel           by the syncer: sent before the cut, not in those heads
    complete          by the controller, last: checksums of all of these, or of
                      none if there will never be a complete one
    abandoned         why; also over a complete one, when the run is set back

Whether a cut is complete or given up is decided once, by who writes `complete`
first: a request of a dead controller may arrive after its successor's.

Chandy and Lamport's snapshot in the form of Lai and Yang: channels keep no
order here, so no marker travels in them. Instead every contribution and every
head is stamped with the last cut its sender took part in, and whoever meets a
larger number than its own takes its part first. So no part holds the effect of
something whose cause is not in the cut. A number is used once.

References: Chandy and Lamport, Distributed snapshots, ACM TOCS 3, 1985; Lai
and Yang, On distributed snapshots, Information Processing Letters 25, 1987.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.snapshots import cut_parts, keys, operations, records
from diloco.snapshots import lease as lease_lib

KEPT = 2  # complete cuts
_UNLISTED = 16  # cuts that a stale listing may lack, at most


def numbers() -> operations.Procedure[list[int]]:
  """All cuts there are records of, in order."""
  names = yield operations.Names("cuts")
  return sorted(int(name) for name in names if name.isdecimal())


def all_numbers(taken: int) -> operations.Procedure[list[int]]:
  """All cuts there are records of, in order, whatever a stale listing says.

  Up to `taken` a head is known to be stamped with them.
  """
  found: list[int] = yield from numbers()
  listed = max(found, default=0)
  for number in itertools.count(max(listed, taken - _UNLISTED) + 1):
    try:
      asked, _ = yield operations.Read(
        keys.cut_request_key(number), records.CutRequest
      )
      is_there = asked is not None
    except errors.CorruptSnapshotError:
      is_there = True
    if is_there:
      found.append(number)
    elif number > taken:
      break
  return found


def request(
  islands: Sequence[int], num_fragments: int, token: int = 0
) -> operations.Procedure[records.CutRequest]:
  """Asks all roles, these islands among them, for their parts of a new cut.

  `token` is of the controller's lease; 0 for one that nobody deposes.

  Raises:
    FencedError: the run has another controller.
  """
  epoch, _ = yield operations.Read(keys.EPOCH, records.Epoch)
  newest = max((yield from numbers()), default=0)
  for fragment in range(num_fragments):
    # No number is used twice, even if somebody has cleared `cuts/`.
    head, _ = yield operations.Read(keys.head_key(fragment), records.Head)
    newest = max(newest, head.cut if head else 0)
  while True:
    newest += 1
    key = keys.cut_request_key(newest)
    found, generation = yield operations.Read(key, records.CutRequest)
    if found is None:
      mine = records.CutRequest(
        newest, epoch.epoch if epoch else 0, sorted(islands)
      )
      yield from lease_lib.fence(keys.CONTROLLER_LEASE, token)
      if (yield operations.CompareAndSet(key, mine, generation)):
        return mine


class Look(NamedTuple):
  """How far a cut is."""

  cut: int  # its number
  # None if it was never asked for, or is being deleted.
  request: records.CutRequest | None
  names: frozenset[str]  # of the records that are there

  @property
  def is_complete(self) -> bool:
    """Whether it can be restored, as far as names tell."""
    return keys.COMPLETE in self.names and keys.ABANDONED not in self.names

  @property
  def is_open(self) -> bool:
    """Whether parts are still to be taken."""
    return self.request is not None and not (
      self.names & {keys.COMPLETE, keys.ABANDONED}
    )

  def is_open_in(self, epoch: int) -> bool:
    """Whether parts of this epoch are still to be taken."""
    asked = self.request
    return self.is_open and asked is not None and asked.epoch == epoch

  @property
  def missing_islands(self) -> list[int]:
    """Islands that have not taken their part yet."""
    asked = self.request.islands if self.request else []
    return [m for m in asked if keys.cut_part_name(m) not in self.names]


def look(cut: int) -> operations.Procedure[Look]:
  """Looks at what there is of a cut."""
  names = frozenset((yield operations.Names(keys.cut_prefix(cut))))
  asked: records.CutRequest | None = None
  if keys.REQUEST in names:
    asked, _ = yield operations.Read(
      keys.cut_request_key(cut), records.CutRequest
    )
  whole: records.CutComplete | None = None
  if keys.COMPLETE in names and keys.ABANDONED not in names:
    key = keys.cut_complete_key(cut)
    whole, _ = yield from operations.sound(key, records.CutComplete)
  return _seen(cut, asked, names, whole)


def _seen(
  cut: int,
  asked: records.CutRequest | None,
  names: frozenset[str],
  whole: records.CutComplete | None,
) -> Look:
  """A look at a cut; who gave it up may have died before it said why."""
  void = whole is not None and whole.is_void
  return Look(cut, asked, names | {keys.ABANDONED} if void else names)


def look_surely(cut: int) -> operations.Procedure[Look]:
  """Looks at a cut without trusting a listing, which may be out of date.

  The parts of islands are not looked for.
  """
  found: dict[str, records.Record] = {}
  for name, kind in (
    (keys.REQUEST, records.CutRequest),
    (keys.CHANNEL, records.CutChannel),
    (keys.COMPLETE, records.CutComplete),
    (keys.ABANDONED, records.CutAbandoned),
  ):
    record, _ = yield operations.Read(f"{keys.cut_prefix(cut)}/{name}", kind)
    if record is not None:
      found[name] = record
  asked: Any = found.get(keys.REQUEST)
  whole: Any = found.get(keys.COMPLETE)
  return _seen(cut, asked, frozenset(found), whole)


def add_part(part: records.CutPart) -> operations.Procedure[bool]:
  """Adds an island's part, unless the cut has ended or has one already.

  Says whether this is the island's part now. It is not either if the cut was
  asked for before a return to an earlier one, and was not given up then.
  """
  if not (yield from look(part.cut)).is_open_in(part.epoch):
    return False
  key = keys.cut_part_key(part.cut, part.island)
  found, generation = yield operations.Read(key, records.CutPart)
  if found is not None:
    return bool(found == part)
  yield operations.Point("mid_cut")
  added: bool = yield operations.CompareAndSet(key, part, generation)
  return added


def add_heads(part: records.CutHeads) -> operations.Procedure[bool]:
  """Adds the syncer's part, over that of a syncer it has deposed.

  Says whether this is the syncer's part now. It is not if the cut has ended or
  is of another epoch, or if a newer syncer has taken part or may have committed
  since these heads.
  """
  if not (yield from look(part.cut)).is_open_in(part.epoch):
    return False
  if (yield from _is_deposed(part)):
    return False
  key = keys.cut_heads_key(part.cut)
  while True:
    found, generation = yield operations.Read(key, records.CutHeads)
    if found is not None and found.token >= part.token:
      return bool(found == part)
    yield operations.Point("mid_cut")
    if (yield operations.CompareAndSet(key, part, generation)):
      return True


def _is_deposed(part: records.CutHeads) -> operations.Procedure[bool]:
  """Whether a newer leader is known; it may move heads from now on only.

  A leader that was stopped or cut off learns that from its lease later. A lease
  that is lost or damaged tells nothing: then the heads do, which every leader
  fences before it moves one.
  """
  lease, _ = yield from operations.sound(keys.SYNCER_LEASE, records.Lease)
  if lease is not None:
    return bool(lease.token > part.token)
  for fields in part.heads:
    key = keys.head_key(fields["fragment"])
    head, _ = yield from operations.sound(key, records.Head)
    if head is not None and head.token > part.token:
      return True
  return False


def abandon(
  cut: int, reason: str, token: int = 0
) -> operations.Procedure[bool]:
  """Gives a cut up, unless it is complete; says whether it did.

  One whose completion nobody can read is not.

  Raises:
    FencedError: the run has another controller.
  """
  void = records.CutComplete(cut, 0, {})
  if not (yield from _decide(void, token)).is_void:
    return False
  yield operations.Write(
    keys.cut_abandoned_key(cut), records.CutAbandoned(cut, reason)
  )
  return True


def _decide(
  wanted: records.CutComplete, token: int
) -> operations.Procedure[records.CutComplete]:
  """Says how a cut ends, unless that is said already; gives what holds.

  Checksums are replaced by others: a part may have come since.
  """
  key = keys.cut_complete_key(wanted.cut)
  while True:
    found, generation = yield from operations.sound(key, records.CutComplete)
    if found is not None and (wanted.is_void or found.is_void):
      return found
    if found == wanted:
      return wanted
    yield from lease_lib.fence(keys.CONTROLLER_LEASE, token)
    if (yield operations.CompareAndSet(key, wanted, generation)):
      return wanted


def reason(cut: int) -> operations.Procedure[str]:
  """Why a cut was given up."""
  key = keys.cut_abandoned_key(cut)
  found, _ = yield from operations.sound(key, records.CutAbandoned)
  return found.reason if found else "no reason was left"


def complete(
  asked: records.CutRequest, token: int = 0
) -> operations.Procedure[cut_parts.Parts | None]:
  """Makes a cut usable, once all its parts are there; None if it was given up.

  Raises:
    CorruptSnapshotError: they are not, or do not fit each other.
    FencedError: the run has another controller.
  """
  parts: cut_parts.Parts = yield from cut_parts.read_parts(asked)
  if why := cut_parts.inconsistency(parts):
    raise errors.CorruptSnapshotError(why)
  record = records.CutComplete(asked.cut, asked.epoch, parts.checksums())
  yield operations.Point("before_cut_complete")
  return None if (yield from _decide(record, token)).is_void else parts


def expired(
  looks: Sequence[Look], payloads: Mapping[int, Collection[str]]
) -> list[int]:
  """Cuts that need not be kept; `payloads` of some are known.

  Kept are the newest complete ones, and the newest of all: it may be open, and
  its number must not be used again. A version that is damaged stays its
  fragment's newest, and every cut taken from then on has it: so for each
  version in the newest complete cut, the newest one without it is kept too.
  """
  newest = max((one.cut for one in looks), default=0)
  whole = sorted((one.cut for one in looks if one.is_complete), reverse=True)
  kept = {newest, *whole[:KEPT]}
  known = [cut for cut in whole if payloads.get(cut)]
  for payload in payloads.get(whole[0], ()) if whole else ():
    if keys.is_global(payload):
      others = (cut for cut in known if payload not in payloads[cut])
      kept.update(itertools.islice(others, 1))
  return [one.cut for one in looks if one.cut not in kept]


def delete(cut: int) -> operations.Procedure[None]:
  """Deletes a cut's records."""
  # What makes it usable goes first: half a cut is none.
  yield operations.Delete(keys.cut_complete_key(cut))
  yield operations.DeleteTree(keys.cut_prefix(cut))
