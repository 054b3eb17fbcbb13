"""Going back to a cut.

A run that is set back begins a new *epoch*. Versions go on growing: every head
is set to one more than the newest version its fragment ever had, with the
values and the clock of the cut. What was published in the old epoch is
discarded, and what was on its way at the cut waits again.

The epoch record is written before anything else and says what will be done.
Until then nothing has changed; from then on a restore that dies is finished by
the next one, to the same cut and the same versions, before any role is started.

No role may live meanwhile. One that does is fenced out by the token.

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


class Choice(NamedTuple):
  """A cut to go back to.

  Attributes:
    parts: of the cut, with the contributions that can be read; None if there is
      no cut that can be used.
    passed_over: newer cuts, with the reason.
    left_out: contributions of the cut that cannot be read, with the reason.
  """

  parts: cut_parts.Parts | None
  passed_over: tuple[tuple[int, str], ...]
  left_out: tuple[tuple[records.Contribution, str], ...] = ()


class Restored(NamedTuple):
  """What a restore does.

  Attributes:
    cut: it goes back to.
    epoch: it begins.
    version_from: [P], versions of the cut.
    version_to: [P], versions the heads are set to.
    reinjected: keys of contributions that wait again.
    steps: by island, where it goes on.
  """

  cut: int
  epoch: int
  version_from: list[int]
  version_to: list[int]
  reinjected: list[str]
  steps: dict[int, int]


def choose(
  check: Check, check_sent: CheckSent, wanted: int | None = None
) -> operations.Procedure[Choice]:
  """Chooses the newest cut that verifies.

  Args:
    check: looks at the versions and saved states the records point to.
    check_sent: looks at a contribution's tensors.
    wanted: the only one to consider; None for all.
  """
  passed_over: list[tuple[int, str]] = []
  found = yield from cuts.numbers()
  for cut in sorted(found, reverse=True):
    if wanted is not None and cut != wanted:
      continue
    try:
      parts: cut_parts.Parts = yield from verified(cut)
      why = check(parts)
    except errors.CorruptSnapshotError as error:
      why = str(error)
    if not why:
      return _without_unreadable(parts, check_sent, tuple(passed_over))
    passed_over.append((cut, why))
  return Choice(None, tuple(passed_over))


def _without_unreadable(
  parts: cut_parts.Parts,
  check_sent: CheckSent,
  passed_over: tuple[tuple[int, str], ...],
) -> Choice:
  left_out = {
    sent.key: (sent, why)
    for sent in parts.contributions
    if (why := check_sent(sent))
  }
  readable = [s for s in parts.contributions if s.key not in left_out]
  return Choice(
    parts._replace(contributions=tuple(readable)),
    passed_over,
    tuple(left_out.values()),
  )


def verified(cut: int) -> operations.Procedure[cut_parts.Parts]:
  """Reads a complete cut and checks its records.

  Raises:
    CorruptSnapshotError: it is not complete, or a record is not what it was.
  """
  seen: cuts.Look = yield from cuts.look(cut)
  if cuts.ABANDONED in seen.names:
    why = yield from cuts.reason(cut)
    raise errors.CorruptSnapshotError(f"it was given up: {why}")
  key = keys.cut_complete_key(cut)
  whole, _ = yield operations.Read(key, records.CutComplete)
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
  parts: cut_parts.Parts,
  tell_discarded: Callable[[str, records.Contribution | None], None],
  tell: Callable[[Restored], None],
) -> operations.Procedure[Restored]:
  """Sets the run back to a cut, or finishes doing so.

  Args:
    parts: of the cut, as chosen.
    tell_discarded: puts on the tape that a contribution, given by its name and
      its record if that can be read, will never be merged. May be called again
      for the same one.
    tell: puts on the tape what is restored. May be called again.
  """
  begun: records.Epoch = yield from _begin(parts)
  cut, epoch, versions = begun.cut, begun.epoch, begun.versions
  yield operations.Point("mid_restore")
  now = []
  for head in parts.heads:
    now.append((yield from _head(head.fragment)))
  stamp = yield from _give_up_cuts(cut, now)
  token = yield from _take_lease(now)
  kept = yield from _kept_payloads()
  names = yield operations.Names("contributions")
  for name in filter(keys.is_contribution_name, names):
    yield from _discard_old(name, epoch, kept, tell_discarded)
  yield operations.Point("mid_restore")
  for sent in parts.contributions:
    behind = parts.heads[sent.fragment].version - sent.base_version
    again = dataclasses.replace(
      sent,
      epoch=epoch,
      base_version=versions[sent.fragment] - behind,
      cut=stamp,
    )
    yield operations.Write(keys.contribution_key(again.key), again)
  facts = Restored(
    cut,
    epoch,
    [head.version for head in parts.heads],
    versions,
    [sent.key for sent in parts.contributions],
    {m: part.step for m, part in parts.islands.items()},
  )
  tell(facts)
  for head, version in zip(parts.heads, versions, strict=True):
    yield operations.Point("mid_restore")
    yield from _set_head(
      dataclasses.replace(
        head, version=version, token=token, merged={}, epoch=epoch, cut=stamp
      )
    )
  yield operations.Write(keys.EPOCH, dataclasses.replace(begun, done=True))
  return facts


def _begin(parts: cut_parts.Parts) -> operations.Procedure[records.Epoch]:
  """Writes down what will be done, unless an earlier attempt has."""
  cut = parts.request.cut
  try:
    found, _ = yield operations.Read(keys.EPOCH, records.Epoch)
  except errors.CorruptSnapshotError:
    found = None
  if found is not None and found.cut == cut and not found.done:
    return found
  # Where a head is lost, its last tensors may be too, or not be listed yet.
  board, _ = yield from _sound(keys.BOARD, records.Board)
  newest, versions = found.epoch if found else 0, []
  for head in parts.heads:
    now = yield from _head(head.fragment)
    newest = max(newest, head.epoch, now.epoch if now else 0)
    names = yield operations.Names(keys.globals_prefix(head.fragment))
    # A head that was set back is newer than its payload's name.
    ever = [head.version, now.version if now else 0, keys.newest_version(names)]
    if found is not None and found.versions:
      ever.append(found.versions[head.fragment])
    if board is not None:
      ever += board.versions[head.fragment : head.fragment + 1]
    versions.append(max(ever) + 1)
  begun = records.Epoch(newest + 1, cut, versions, done=False)
  yield operations.Write(keys.EPOCH, begun)
  return begun


def _give_up_cuts(
  chosen: int, heads: Sequence[records.Head | None]
) -> operations.Procedure[int]:
  """Ends all cuts that are open, or after the one gone back to.

  Those are of a timeline that is given up: to go back to one later would undo
  this return.

  Returns:
    The newest number.
  """
  taken = max(head.cut if head else 0 for head in heads)
  found: list[int] = yield from cuts.all_numbers(taken)
  for cut in found:
    try:
      seen = yield from cuts.look(cut)
      given_up, is_open = cuts.ABANDONED in seen.names, seen.is_open
    except errors.CorruptSnapshotError:
      given_up = is_open = False
    why = f"the run was set back to cut {chosen}"
    if cut > chosen and not given_up:
      yield operations.Write(
        keys.cut_abandoned_key(cut), records.CutAbandoned(cut, why)
      )
    elif cut < chosen and is_open:
      yield from cuts.abandon(cut, why)  # unless it only looks open
  return max(found, default=0)


def _take_lease(
  heads: Sequence[records.Head | None],
) -> operations.Procedure[int]:
  """Deposes whoever leads; gives a token above all there were."""
  newest = max(head.token if head else 0 for head in heads)
  while True:
    lease, generation = yield from _sound(keys.SYNCER_LEASE, records.Lease)
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
    if record is None or record.epoch == epoch:
      return  # gone, or waits again since an earlier attempt
  except errors.CorruptSnapshotError:
    record = None
  tell(name, record)
  yield operations.Delete(key)
  if keys.payload_prefix(name) not in kept:
    yield operations.DeleteTree(keys.payload_prefix(name))


def _head(fragment: int) -> operations.Procedure[records.Head | None]:
  """A head; None if it is missing or damaged."""
  head, _ = yield from _sound(keys.head_key(fragment), records.Head)
  return head


def _sound(
  key: str, kind: type[records.Record]
) -> operations.Procedure[tuple[Any, Any]]:
  """A record, None if it is missing or damaged, and its generation.

  What is damaged is replaced by compare-and-set like anything else. Were it
  deleted first, a delete that lands late could take what replaced it.
  """
  try:
    found, generation = yield operations.Read(key, kind)
  except errors.CorruptSnapshotError as error:
    return None, error.generation
  return found, generation


def _set_head(head: records.Head) -> operations.Procedure[Any]:
  key = keys.head_key(head.fragment)
  while True:
    found, generation = yield from _sound(key, records.Head)
    if found is not None and found.epoch == head.epoch:
      return
    if (yield operations.CompareAndSet(key, head, generation)):
      return
