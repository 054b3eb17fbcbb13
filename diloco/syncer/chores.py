"""Chores of a leading syncer: what it tells others, and what it deletes.

Around its merges it writes the board and verdicts, deletes contributions that
are merged or never will be, and global versions that nobody reads any more. The
store may refuse any of it. What must not be forgotten then is remembered here,
and done later.

These are procedures (see `diloco.snapshots.operations`): the live syncer and
the simulated one do the same, in the same order.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Sequence

from diloco import workers
from diloco.snapshots import keys, operations, records
from diloco.syncer import cutting, orders, protocol

logger = logging.getLogger(__name__)

_MOST_STALE = 8  # versions that pass while one is read
_RETRY_SECS = (0.2, 10.0)  # pauses after failures, first and longest


def versions_kept(max_staleness: int) -> int:
  """Global versions kept before the newest, for those still reading them."""
  return min(max(max_staleness, 1), _MOST_STALE) + 2


class Chores:
  """Of one leadership.

  Attributes:
    known: commit records that were seen and may still be in the store.
    litter: contributions that the store would not delete, and those that were
      to be deleted since.
    untold: verdicts that could not be written, by island.
  """

  def __init__(
    self,
    pins: cutting.CutKeeper,
    keep_versions: int,
    each: operations.Each = operations.in_turn,
  ):
    self._pins = pins
    self._each = each
    self._keep_versions = keep_versions
    # By fragment, oldest first: number and prefix.
    self._retained: list[list[tuple[int, str]]] = []
    self._told: dict[int, records.Verdict] = {}  # by island, the last one
    self.known: set[str] = set()
    self.litter: collections.deque[str] = collections.deque()
    self.untold: dict[int, records.Verdict] = {}
    self._retry = workers.Retry(_RETRY_SECS)  # of litter
    self._retell = workers.Retry(_RETRY_SECS)

  def take_over(
    self, heads: Sequence[records.Head]
  ) -> operations.Procedure[None]:
    """Learns what predecessors left behind, and deletes what nobody needs.

    A version beyond the head that a predecessor made was never committed, and
    never will be. One that a successor made may be: this leader is deposed, and
    does not know it yet.
    """
    self._retained = yield from self._each(map(_retained, heads))
    yield from protocol.abandoned(
      {head.fragment: head for head in heads}, self._pins.is_pinned
    )

  def look(self) -> operations.Procedure[protocol.Sorted]:
    """Reads commit records that were not seen yet."""
    known = self.known
    names, found, broken = yield from protocol.scan(known, self._each)
    if known:
      known.intersection_update(names)
      known.update(self.litter)  # a stale listing may lack what stays for now
    if found or broken:
      known.update([name for name, _ in found])
      known.update([name for name, _ in broken])
    return found, broken

  def accuse(self, action: orders.Quarantine) -> operations.Procedure[None]:
    """Tells an island what the core has against it."""
    self._told[action.island] = verdict = records.Verdict(**vars(action))
    yield from self._tell(verdict)

  def remind(self, island: int) -> operations.Procedure[None]:
    """Tells an island again if the store has lost what it was told.

    The core counts what an island does before it knows as one offence, and
    would wait for ever for one that never learns of it.
    """
    told = self._told.get(island)
    if told is None:
      return
    key = keys.verdict_key(island)
    found, _ = yield from operations.sound(key, records.Verdict)
    if found != told:
      yield from self._tell(told)

  def _tell(self, verdict: records.Verdict) -> operations.Procedure[None]:
    """Writes a verdict; if the store refuses it, after all others."""
    self.untold.pop(verdict.island, None)
    self.untold[verdict.island] = verdict
    yield operations.Write(keys.verdict_key(verdict.island), verdict)
    del self.untold[verdict.island]

  def delete(self, name: str) -> operations.Procedure[None]:
    """Deletes a contribution that is merged, or never will be."""
    if self.litter:
      self.litter.append(name)
      return
    try:
      yield from self._delete(name)
    except OSError as error:
      logger.warning("delete_failed name=%s error=%s", name, error)
      self.litter.append(name)

  def _delete(self, name: str) -> operations.Procedure[None]:
    # What a cut needs of its record is in the cut's own.
    yield from protocol.discard(name, self._pins.is_pinned)
    # Should the store deliver it once more, it is looked at once more.
    self.known.discard(name)

  @property
  def pending(self) -> bool:
    """Whether `tidy` has something to do."""
    return bool(self.litter or self.untold)

  def tidy(self, now: float) -> operations.Procedure[None]:
    """Does what the store would not take before: verdicts and deletions.

    What it goes on refusing is tried again after pauses that grow; `now` is in
    monotonic seconds.
    """
    while self.untold and now >= self._retell.due:
      try:
        yield from self._tell(next(iter(self.untold.values())))
      except OSError as error:
        self._retell.failed(error, now)
      else:
        self._retell = workers.Retry(_RETRY_SECS)
    while self.litter and now >= self._retry.due:
      try:
        yield from self._delete(self.litter[0])
      except OSError as error:
        self._retry.failed(error, now)
        self.litter.rotate(-1)  # or it would keep the others waiting
        return
      self.litter.popleft()
      self._retry = workers.Retry(_RETRY_SECS)

  def clear_up(
    self, head: records.Head, board: records.Board, merged: Iterable[str]
  ) -> operations.Procedure[None]:
    """Tells the islands of a version, and deletes what it made superfluous.

    The core has forgotten those `merged`: nobody else would delete them.

    Raises:
      OSError: the store failed in some of it; all the rest is done.
    """
    failure: OSError | None = None
    try:
      yield operations.Write(keys.BOARD, board)
    except OSError as error:
      failure = error
    for name in merged:
      yield from self.delete(name)
    yield from self.retire(head)
    if failure is not None:
      raise failure

  def retire(self, head: records.Head) -> operations.Procedure[None]:
    """Deletes versions of a fragment that nobody can be reading any more.

    What the store would not delete is tried again with the next version.
    """
    oldest = head.version - self._keep_versions
    versions = self._retained[head.fragment]
    versions.append((head.version, head.payload))
    if versions[0][0] >= oldest:
      return
    kept = []
    for version, payload in versions:
      if version >= oldest or self._pins.is_pinned_payload(payload):
        kept.append((version, payload))
      else:
        yield operations.DeleteTree(payload)
    self._retained[head.fragment] = kept


def _retained(
  head: records.Head,
) -> operations.Procedure[list[tuple[int, str]]]:
  """Versions of a fragment, without those never committed, which go."""
  root = f"globals/{head.fragment:04d}"
  found = []
  for name in (yield operations.Names(root)):
    number = name.partition(".")[0]
    if not number.isdecimal():
      continue
    if int(number) > head.version and _is_older(name, head.token):
      yield operations.DeleteTree(f"{root}/{name}")
    else:
      found.append((int(number), f"{root}/{name}"))
  return sorted(found)


def _is_older(name: str, token: int) -> bool:
  """Whether a global version was made by a leader before that of `token`."""
  writer = name.partition(".")[2].partition(".")[0]
  return (
    writer[:1] == "s" and writer[1:].isdecimal() and int(writer[1:]) < token
  )
