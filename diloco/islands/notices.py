"""What others want an island to know: cuts, verdicts, calls of its peers.

All of it lies in the store, changes rarely, and is looked at once a heartbeat.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from diloco.snapshots import keys, records, store


class Notices(NamedTuple):
  """What a look found."""

  cut: int = 0  # the newest cut asked for
  offences: int = 0  # of this incarnation, as newly told by the syncer
  request: records.PeerRequest | None = None  # to be answered if able


class NoticeBoard:
  """Looks for notices to one incarnation of an island."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    island: int,
    incarnation: int,
    wait_secs: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Prepares.

    Args:
      snapshots: the store.
      island: whose notices.
      incarnation: its life.
      wait_secs: how long each able peer of a lower number has to answer a call
        before this island does.
      clock: monotonic seconds.
    """
    self._store = snapshots
    self._island = island
    self._incarnation = incarnation
    self._wait_secs = wait_secs
    self._clock = clock
    self._verdict = b""  # generation of the last one seen
    self._asked: dict[tuple[int, int], float] = {}  # request -> first seen

  def look(self) -> Notices:
    """Reads what there is.

    Raises:
      OSError, CorruptSnapshotError: the store could not be read.
    """
    return Notices(newest_cut(self._store), self._offences(), self._request())

  def _offences(self) -> int:
    verdict, generation = self._store.read_for_update(
      keys.verdict_key(self._island), records.Verdict
    )
    known, self._verdict = self._verdict, generation
    if (
      verdict is None
      or generation == known
      or verdict.incarnation != self._incarnation
    ):
      return 0
    return verdict.offences

  def _request(self) -> records.PeerRequest | None:
    for name in self._store.names(keys.PEER_REQUESTS):
      if not name.isdecimal() or int(name) == self._island:
        continue
      request = self._store.read(
        keys.peer_request_key(int(name)), records.PeerRequest
      )
      if request is not None and self._is_my_turn(request):
        return request
    return None

  def _is_my_turn(self, request: records.PeerRequest) -> bool:
    """The peer of the lowest number answers; the next ones if it does not."""
    who = (request.island, request.incarnation)
    now = self._clock()
    first_seen = self._asked.setdefault(who, now)
    lower = [
      name
      for name in self._store.names("members")
      if keys.is_member_name(name)
      and int(name) < self._island
      and int(name) != request.island
    ]
    if now < first_seen + self._wait_secs * len(lower):
      return False
    answer = keys.peer_state_key(*who)
    return self._store.read(answer, records.PeerState) is None


def newest_cut(snapshots: store.SnapshotStore) -> int:
  """Number of the newest cut that was asked for, 0 without any."""
  names = snapshots.names("cuts")
  return max((int(name) for name in names if name.isdecimal()), default=0)
