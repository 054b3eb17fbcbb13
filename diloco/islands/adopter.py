"""Adoption in the background: watch for new versions and fetch them.

What the thread looks at is in `diloco.islands.watching`. A newer version is
read shard by shard and waits in host memory for the main thread to swap it in
between two steps.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from diloco.islands import peer_protocol, peers, protocol, publisher, watching
from diloco.snapshots import operations, records

logger = logging.getLogger(__name__)

_HEADS_EVERY_SECS = 2.0  # look past the board this often
_TRIPS_BETWEEN = 4  # or after so many round trips for each head


class Placed(NamedTuple):
  """One fragment's newer version, in host memory; what reading it took."""

  head: records.Head
  anchor: Mapping[str, jax.Array]
  num_bytes: int
  secs: float


class News(NamedTuple):
  """What came since the last look."""

  board: records.Board | None
  fetched: list[Placed]
  notices: watching.Notices


class Adopter:
  """A thread that keeps the newest versions at hand."""

  def __init__(
    self,
    setting: publisher.Setting,
    held: Sequence[protocol.Fetched],
    poll_secs: Callable[[], float],
  ):
    """Starts the thread.

    The island has the versions `held`, [P]. Of later ones it reads what is new,
    if it can. `poll_secs` gives the pause between two looks at the syncer's
    board.
    """
    who, times, threads = setting.identity, setting.times, setting.threads
    self._clock = threads.clock
    self._fetcher = setting.learner.fetcher(setting.snapshots)
    for head, anchor in held:
      self._fetcher.hold(head.fragment, head.digest, anchor)
    turn_secs = peer_protocol.turn_secs(
      times.heartbeat_secs, peers.size_of(setting.learner.opt_state)
    )
    heads_every_secs = _TRIPS_BETWEEN * len(held) * times.round_trip_secs
    self._watch = watching.Watch(
      [head.version for head, _ in held],
      watching.NoticeBoard(
        who.island, who.incarnation, turn_secs, threads.clock
      ),
      self._take_in,
      threads.clock,
      notices_every_secs=times.heartbeat_secs,
      heads_every_secs=max(_HEADS_EVERY_SECS, heads_every_secs),
      failed=functools.partial(logger.warning, "watch_failed what=%s error=%s"),
    )
    self._ready: dict[int, Placed] = {}
    self._board: records.Board | None = None
    self._notices = watching.Notices()
    self._reading_since = 0.0
    self._loop = threads.loop(
      "adopter",
      self._watch.watch(self._show, poll_secs),
      self._execute,
      at_once=True,
    )
    self._loop.start()

  def take(self) -> News:
    """What is new since the last call; never blocks on the store."""
    with self._loop.changed:
      board, self._board = self._board, None
      found = self._notices
      self._notices = watching.Notices(cut=found.cut)
      ready = list(self._ready.values())
      self._ready.clear()
    return News(board, ready, found)

  def fetch_all_anew(self) -> None:
    """Fetches every fragment; what it has, or is reading, is given up."""
    with self._loop.changed:
      self._ready.clear()
      self._watch.want_all()

  def check(self) -> None:
    """Raises `WorkerError` if the thread has ended by an exception."""
    self._loop.check()

  def close(self) -> None:
    """Ends the thread."""
    self._loop.close()

  def _execute(self, operation: operations.Operation) -> Any:
    if isinstance(operation, operations.ReadPayload):
      self._reading_since = self._clock()
    return self._fetcher.execute(operation)

  def _show(self, seen: watching.Seen) -> None:
    self._board = seen.board or self._board
    if seen.notices is not None:
      self._notices = seen.notices.after(self._notices)

  def _take_in(
    self, found: protocol.Fetched, newer_than: int
  ) -> operations.Procedure[None]:
    head, anchor = found
    took = self._fetcher.bytes_read, self._clock() - self._reading_since
    if self._watch.got(head.fragment, head.version, newer_than):
      self._ready[head.fragment] = Placed(head, anchor, *took)
    yield from ()
