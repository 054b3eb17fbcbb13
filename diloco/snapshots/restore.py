"""Going back to a cut.

A run that is set back begins a new *epoch*. Versions go on growing: every head
is set to one more than the newest version its fragment ever had, with the
values and the clock of the cut. What was published in the old epoch is
discarded, and what was on its way at the cut waits again.

The epoch record is the decision: one compare-and-set, from the generation that
was read before the cut was chosen, says which cut, under which versions, and
what waits again. Until then nothing has changed; all that follows is read from
it. So a restore that dies, or runs beside another, is finished by whoever comes
next, to the same cut and the same versions, before anything else is chosen.
Whoever is late finds heads and records of this epoch, or of a later one, and
leaves them alone.

No role may live meanwhile. One that does is fenced out by the token.

One controller may decide: whoever controls a run writes the token of its lease
into the epoch record before it does anything else (`hold`). One that was
deposed finds a newer token there, or its compare-and-set fails.

Of what was on its way at the cut a syncer that was deposed, and had not noticed
yet, may have discarded some; nothing fences a deletion. A contribution that
cannot be read is therefore left out by name, as a syncer that could not read
it would, and the cut is as good as before. Only heads and saved states must be
whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.snapshots import cut_parts, cuts, keys, operations, records
from diloco.snapshots import lease as lease_lib

# Check what records point to; give the reason if it will not do, else "".
Check = Callable[[cut_parts.Parts], str]
CheckSent = Callable[[records.Contribution], str]

UNSEEN = 16  # versions that a stale listing may lack, at most


class ChangedError(Exception):
  """Another restore has decided since this one chose; choose again."""


class Choice(NamedTuple):
  """A cut to go back to.

  Attributes:
    parts: of the cut, with the contributions that can be read; None if there is
      no cut that can be used.
    passed_over: newer cuts, with the reason.
    left_out: contributions of the cut that cannot be read, with the reason.
    begun: the decision of a restore that was not finished.
    generation: of the epoch record, read before anything was looked at.
    token: of the controller that chose; 0 for one that nobody deposes.
  """

  parts: cut_parts.Parts | None
  passed_over: tuple[tuple[int, str], ...]
  left_out: tuple[tuple[records.Contribution, str], ...] = ()
  begun: records.Epoch | None = None
  generation: Any = None
  token: int = 0


class Restored(NamedTuple):
  """What a restore does."""

  cut: int  # it goes back to
  epoch: int  # it begins
  version_from: list[int]  # [P], versions of the cut
  version_to: list[int]  # [P], versions the heads are set to
  reinjected: list[str]  # keys of contributions that wait again
  steps: dict[int, int]  # by island, where it goes on


NOT_THERE = "it is not there"  # why a cut will not do


def hold(token: int) -> operations.Procedure[None]:
  """Keeps controllers with older tokens from deciding on a restore.

  A damaged record stays as it is, for it is what shows that the run must be
  set back; that decision takes its place.

  Raises:
    FencedError: a newer token was here.
  """
  while True:
    try:
      epoch, generation = yield operations.Read(keys.EPOCH, records.Epoch)
    except errors.CorruptSnapshotError:
      return
    _refuse_deposed(epoch, token)
    mine = dataclasses.replace(epoch or records.Epoch(0, 0), token=token)
    if (yield operations.CompareAndSet(keys.EPOCH, mine, generation)):
      return


def newest_token() -> operations.Procedure[int]:
  """The newest token that `hold` was given, as far as is known."""
  epoch, _ = yield from operations.sound(keys.EPOCH, records.Epoch)
  return epoch.token if epoch else 0


def _refuse_deposed(epoch: records.Epoch | None, token: int) -> None:
  if epoch is not None and 0 < token < epoch.token:
    raise errors.FencedError(
      f"a controller with token {epoch.token} has the run, this has {token}"
    )


def choose(
  check: Check,
  check_sent: CheckSent,
  wanted: int | None = None,
  token: int = 0,
) -> operations.Procedure[Choice]:
  """Chooses the newest cut that verifies; what was begun is finished first.

  `wanted` is the only one to consider; None for all. A restore that was begun
  goes before, unless its cut cannot be used any more.

  Raises:
    FencedError: the run has another controller.
  """
  epoch, generation = yield from operations.sound(keys.EPOCH, records.Epoch)
  _refuse_deposed(epoch, token)
  begun = None if epoch is None or epoch.done else epoch
  candidates = [] if wanted is None else [wanted]  # which may not be listed yet
  if wanted is None:
    found: list[int] = yield from cuts.numbers()
    candidates = sorted(found, reverse=True)
  if begun is not None:
    others = [cut for cut in candidates if cut != begun.cut]
    candidates = [begun.cut, *others]
  passed_over: list[tuple[int, str]] = []
  for cut in candidates:
    try:
      parts: cut_parts.Parts = yield from verified(cut)
      why = check(parts)
    except errors.CorruptSnapshotError as error:
      why = str(error)
    if why:
      passed_over.append((cut, why))
      continue
    left_out: tuple[tuple[records.Contribution, str], ...] = ()
    if begun is None or cut != begun.cut:
      left_out = tuple(
        (sent, text)
        for sent in parts.contributions
        if (text := check_sent(sent))
      )
      lost = {sent.key for sent, _ in left_out}
      kept = [sent for sent in parts.contributions if sent.key not in lost]
      parts = parts._replace(contributions=tuple(kept))
    return Choice(parts, tuple(passed_over), left_out, begun, generation, token)
  return Choice(None, tuple(passed_over), (), begun, generation, token)


def verified(cut: int) -> operations.Procedure[cut_parts.Parts]:
  """Reads a complete cut and checks its records.

  Raises:
    CorruptSnapshotError: it is not complete, or a record is not what it was.
  """
  seen: cuts.Look = yield from cuts.look_surely(cut)
  if keys.ABANDONED in seen.names:
    why = yield from cuts.reason(cut)
    raise errors.CorruptSnapshotError(f"it was given up: {why}")
  key = keys.cut_complete_key(cut)
  whole, _ = yield operations.Read(key, records.CutComplete)
  if whole is None and seen.request is None:
    raise errors.CorruptSnapshotError(NOT_THERE)
  if whole is None or seen.request is None:
    raise errors.CorruptSnapshotError("it was never completed")
  parts: cut_parts.Parts = yield from cut_parts.read_parts(seen.request)
  found = parts.checksums()
  for name in sorted({*whole.parts, *found}):
    if whole.parts.get(name) != found.get(name):
      raise errors.CorruptSnapshotError(f"{name} is not what was written")
  if why := cut_parts.inconsistency(parts):
    raise errors.CorruptSnapshotError(why)
  return parts


def unfinished() -> operations.Procedure[int]:
  """The cut of a restore that died halfway; 0 without one.

  Raises:
    CorruptSnapshotError: the record that would tell is damaged.
  """
  epoch, _ = yield operations.Read(keys.EPOCH, records.Epoch)
  return 0 if epoch is None or epoch.done else int(epoch.cut)


def restore(
  choice: Choice,
  tell_discarded: Callable[[str, records.Contribution | None], None],
  tell: Callable[[Restored], None],
) -> operations.Procedure[Restored]:
  """Sets the run back to a cut, or finishes doing so.

  What is told may be told again: contributions that will never be merged, by
  name and by record if that can be read, and what is restored.

  Raises:
    ChangedError: another restore has decided since. Nothing has been changed.
  """
  parts = choice.parts
  assert parts is not None
  begun, generation = yield from _decide(choice, parts)
  epoch, versions = begun.epoch, begun.versions
  yield operations.Point("mid_restore")
  now = []
  for head in parts.heads:
    now.append((yield from _head(head.fragment)))
  yield from _give_up_cuts(begun, now)
  token = yield from _take_lease(now)
  kept = yield from _kept_payloads()
  names = yield operations.Names("contributions")
  # What waits again is replaced where it is: one who runs beside this one, and
  # dies, could not put back what it took away.
  waiting = set(begun.reinjected)
  for name in filter(keys.is_contribution_name, sorted(set(names) - waiting)):
    yield from _discard_old(name, epoch, kept, tell_discarded)
  yield operations.Point("mid_restore")
  for sent in parts.contributions:
    if sent.key in waiting:
      behind = parts.heads[sent.fragment].version - sent.base_version
      again = dataclasses.replace(
        sent,
        epoch=epoch,
        base_version=versions[sent.fragment] - behind,
        cut=begun.stamp,
      )
      yield from _bring_to(epoch, keys.contribution_key(again.key), again)
  facts = Restored(
    begun.cut,
    epoch,
    [head.version for head in parts.heads],
    versions,
    begun.reinjected,
    {m: part.step for m, part in parts.islands.items()},
  )
  tell(facts)
  for head, version in zip(parts.heads, versions, strict=True):
    yield operations.Point("mid_restore")
    back = dataclasses.replace(
      head,
      version=version,
      token=token,
      merged={},
      epoch=epoch,
      cut=begun.stamp,
    )
    yield from _bring_to(epoch, keys.head_key(back.fragment), back)
  # Unless another has finished it, or one without this cut has overtaken it.
  done = dataclasses.replace(begun, done=True)
  yield operations.CompareAndSet(keys.EPOCH, done, generation)
  return facts


def _decide(
  choice: Choice, parts: cut_parts.Parts
) -> operations.Procedure[tuple[records.Epoch, Any]]:
  """Writes down what will be done, unless begun already; and its generation."""
  cut, found = parts.request.cut, choice.begun
  if found is not None and found.cut == cut:
    mine = dataclasses.replace(found, token=max(found.token, choice.token))
    if mine == found:
      return found, choice.generation
    return (yield from _write_down(mine, choice))
  before, _ = yield from operations.sound(keys.EPOCH, records.Epoch)
  # Where a head is lost, its last tensors may be too, or not be listed yet.
  board, _ = yield from operations.sound(keys.BOARD, records.Board)
  newest, versions = before.epoch if before else 0, []
  taken = 0
  for head in parts.heads:
    now = yield from _head(head.fragment)
    newest = max(newest, head.epoch, now.epoch if now else 0)
    taken = max(taken, now.cut if now else 0)
    names = yield operations.Names(keys.globals_prefix(head.fragment))
    # A head that was set back is newer than its payload's name.
    ever = [head.version, now.version if now else 0, keys.newest_version(names)]
    if before is not None and before.versions:
      ever.append(before.versions[head.fragment])
    if board is not None:
      ever += board.versions[head.fragment : head.fragment + 1]
    # Listing and board may both be stale; then only the head knows the newest.
    versions.append(max(ever) + 1 + (0 if now else UNSEEN))
  stamp = max((yield from cuts.all_numbers(taken)), default=cut)
  sent = [one.key for one in parts.contributions]
  token = max(choice.token, before.token if before else 0)
  begun = records.Epoch(newest + 1, cut, versions, False, stamp, sent, token)
  return (yield from _write_down(begun, choice))


def _write_down(
  begun: records.Epoch, choice: Choice
) -> operations.Procedure[tuple[records.Epoch, Any]]:
  yield operations.CompareAndSet(keys.EPOCH, begun, choice.generation)
  # What counts is what is there: an answer may have been lost.
  now_there, generation = yield from operations.sound(keys.EPOCH, records.Epoch)
  if now_there != begun:
    raise ChangedError(f"cut {begun.cut} was chosen, and another restore began")
  return begun, generation


def _give_up_cuts(
  begun: records.Epoch, heads: Sequence[records.Head | None]
) -> operations.Procedure[None]:
  """Ends all cuts that are open, or after the one gone back to.

  Those are of a timeline that is given up: to go back to one later would undo
  this return.
  """
  chosen = begun.cut
  taken = max(head.cut if head else 0 for head in heads)
  found: list[int] = yield from cuts.all_numbers(taken)
  for cut in found:
    try:
      seen = yield from cuts.look_surely(cut)
      given_up, is_open = keys.ABANDONED in seen.names, seen.is_open
      asked = seen.request
    except errors.CorruptSnapshotError:
      given_up = is_open = False
      asked = None
    if asked is not None and asked.epoch >= begun.epoch:
      continue  # of the timeline that this return begins
    why = f"the run was set back to cut {chosen}"
    if cut > chosen and not given_up:
      yield operations.Write(
        keys.cut_abandoned_key(cut), records.CutAbandoned(cut, why)
      )
    elif cut < chosen and is_open:
      yield from cuts.abandon(cut, why)  # unless it only looks open


def _take_lease(
  heads: Sequence[records.Head | None],
) -> operations.Procedure[int]:
  """Deposes whoever leads; gives a token above all there were."""
  newest = max(head.token if head else 0 for head in heads)
  while True:
    lease, generation = yield from operations.sound(
      keys.SYNCER_LEASE, records.Lease
    )
    newest = max(newest, lease.token if lease else 0)
    token: int = yield from lease_lib.draw(keys.SYNCER_LEASE, newest)
    if not token:
      continue
    free = records.Lease("", token, 0)
    if (yield operations.CompareAndSet(keys.SYNCER_LEASE, free, generation)):
      return token


def _kept_payloads() -> operations.Procedure[Collection[str]]:
  """Payloads of contributions that cuts need."""
  kept: set[str] = set()
  for cut in (yield from cuts.numbers()):
    try:
      channel, _ = yield operations.Read(
        keys.cut_channel_key(cut), records.CutChannel
      )
      sent = channel.contributions if channel else []
      kept |= {records.Contribution.from_fields(c).payload for c in sent}
    except errors.CorruptSnapshotError:
      continue  # nobody can go back to that one
  return kept


def _discard_old(
  name: str,
  epoch: int,
  kept: Collection[str],
  tell: Callable[[str, records.Contribution | None], None],
) -> operations.Procedure[None]:
  key = keys.contribution_key(name)
  try:
    record, _ = yield operations.Read(key, records.Contribution)
    if record is None or record.epoch >= epoch:
      return  # gone, or waits again since an earlier attempt
  except errors.CorruptSnapshotError:
    record = None
  tell(name, record)
  yield operations.Delete(key)
  if keys.payload_prefix(name) not in kept:
    yield operations.DeleteTree(keys.payload_prefix(name))


def _head(fragment: int) -> operations.Procedure[records.Head | None]:
  """A head; None if it is missing or damaged."""
  head, _ = yield from operations.sound(keys.head_key(fragment), records.Head)
  return head


def _bring_to(
  epoch: int, key: str, record: records.Head | records.Contribution
) -> operations.Procedure[None]:
  """Puts a record there, unless one of this epoch or a later one is."""
  while True:
    found, generation = yield from operations.sound(key, type(record))
    if found is not None and found.epoch >= epoch:
      return
    if (yield operations.CompareAndSet(key, record, generation)):
      return
