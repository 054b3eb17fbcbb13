"""What others want an island to know: cuts, verdicts, calls of its peers.

All of it lies in the store, changes rarely, and is looked at once a heartbeat.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from diloco.islands import peer_protocol, protocol
from diloco.snapshots import cuts, records, store


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
    self._clock = clock
    self._listener = peer_protocol.Listener(island, wait_secs)
    self._verdicts = protocol.VerdictWatch(island, incarnation)

  def look(self) -> Notices:
    """Reads what there is.

    Raises:
      OSError: the store could not be read.
    """
    perform = self._store.perform
    request = perform(self._listener.listen(self._clock))
    cut = newest_cut(self._store)
    # Last: a verdict counts as seen once it was read.
    return Notices(cut, perform(self._verdicts.look()), request)


def newest_cut(snapshots: store.SnapshotStore) -> int:
  """Number of the newest cut that was asked for, 0 without any."""
  return max(snapshots.perform(cuts.numbers()), default=0)
