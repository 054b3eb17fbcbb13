"""What others want an island to know: cuts, verdicts, calls of its peers.

All of it lies in the store, changes rarely, and is looked at once a heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from diloco.islands import peer_protocol, protocol
from diloco.snapshots import operations, records

# Performs one of several looks by name; gives None where it fails.
Attempt = Callable[[str, operations.Procedure[Any]], operations.Procedure[Any]]


class Notices(NamedTuple):
  """What a look found."""

  cut: int = 0  # the newest cut asked for
  offences: int = 0  # of this incarnation, as newly told by the syncer
  request: records.PeerRequest | None = None  # to be answered if able


class NoticeBoard:
  """Looks for notices to one incarnation of an island."""

  def __init__(
    self,
    island: int,
    incarnation: int,
    wait_secs: float,
    clock: Callable[[], float],
  ):
    """Has looked at nothing; `wait_secs` is as for `Listener`."""
    self._clock = clock
    self._listener = peer_protocol.Listener(island, wait_secs)
    self._verdicts = protocol.VerdictWatch(island, incarnation)

  def look(self, attempt: Attempt) -> operations.Procedure[Notices]:
    """Reads what there is; what cannot be read reads as nothing."""
    request = yield from attempt("calls", self._listener.listen(self._clock))
    cut = yield from attempt("cuts", protocol.newest_cut())
    # Last: a verdict counts as seen once it was read.
    offences = yield from attempt("verdicts", self._verdicts.look())
    return Notices(cut or 0, offences or 0, request)
