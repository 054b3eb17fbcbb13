"""Adoption in the background: watch for new versions, fetch, put on device.

The thread reads the syncer's board, and now and then the heads themselves, for
the board is only a hint. A newer version is read shard by shard, put on the
device, and waits there for the main thread to swap it in between two steps.
Once a heartbeat it also looks for notices (`diloco.islands.notices`).
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from diloco import errors
from diloco.fragments import partition
from diloco.islands import fetching, notices
from diloco.islands import placement as placement_lib
from diloco.snapshots import keys, records, store

logger = logging.getLogger(__name__)

_HEADS_EVERY_SECS = 2.0  # look past the board this often
_RETRY_SECS = 0.2


@dataclasses.dataclass(frozen=True)
class Fetched:
  """One fragment's newer version, on the host and on the device."""

  fragment: int
  version: int
  merged_step: int  # last step of this island that is in it
  cut: int
  anchor: placement_lib.HostFragment
  params: Mapping[str, jax.Array]
  num_bytes: int
  digest: str  # of the values, equal on every island
  secs: float


class News(NamedTuple):
  """What came since the last look."""

  board: records.Board | None
  fetched: list[Fetched]
  notices: notices.Notices


class Adopter:
  """A thread that keeps the newest versions at hand."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    placement: placement_lib.Placement,
    island: int,
    versions: Sequence[int],
    poll_secs: Callable[[], float],
    board: notices.NoticeBoard,
    notices_every_secs: float,
  ):
    """Starts the thread.

    Args:
      snapshots: the store.
      plan: the fragment plan.
      placement: where this island's shards go.
      island: its number.
      versions: [P], versions this island already has.
      poll_secs: gives the pause between two looks at the board.
      board: where notices are.
      notices_every_secs: time between two looks at them.
    """
    self._store = snapshots
    self._plan = plan
    self._placement = placement
    self._island = island
    self._versions = list(versions)
    self._poll_secs = poll_secs
    self._notice_board = board
    self._notices_every_secs = notices_every_secs
    self._fetcher = fetching.Fetcher(snapshots, plan, placement)
    self._lock = threading.Lock()
    self._ready: dict[int, Fetched] = {}
    self._board: records.Board | None = None
    self._notices = notices.Notices()
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="adopter", daemon=True
    )
    self._thread.start()

  def take(self) -> News:
    """What is new since the last call; never blocks on the store."""
    with self._lock:
      board, self._board = self._board, None
      found = self._notices
      self._notices = notices.Notices(cut=found.cut)
      ready = list(self._ready.values())
      self._ready.clear()
    return News(board, ready, found)

  def fetch_all_anew(self) -> None:
    """Fetches every fragment; what it has, or is reading, is given up."""
    with self._lock:
      self._ready.clear()
      self._versions = [-1] * self._plan.num_fragments

  def close(self) -> None:
    """Ends the thread."""
    self._stop.set()
    self._thread.join()

  def _run(self) -> None:
    heads_due = notices_due = 0.0
    while not self._stop.is_set():
      pause_secs = self._poll_secs()
      try:
        board = self._read_board()
        versions = board.versions if board else []
        if min(self._versions) < 0 or time.monotonic() >= heads_due:
          versions = self._head_versions()
          heads_due = time.monotonic() + _HEADS_EVERY_SECS
        for fragment, version in enumerate(versions):
          if version > self._versions[fragment] and not self._stop.is_set():
            self._fetch(fragment)
        with self._lock:
          self._board = board or self._board
        if time.monotonic() >= notices_due:
          self._look_at_notices()
          notices_due = time.monotonic() + self._notices_every_secs
      except (OSError, ValueError, errors.CorruptSnapshotError) as error:
        logger.warning("adopt_failed error=%s", error)
        pause_secs = _RETRY_SECS
      self._stop.wait(pause_secs)

  def _read_board(self) -> records.Board | None:
    try:
      return self._store.read(keys.BOARD, records.Board)
    except errors.CorruptSnapshotError as error:
      # A hint, and written again only with the next round, which may wait for
      # what this island is to learn from the heads.
      logger.warning("board_unreadable error=%s", error)
      return None

  def _look_at_notices(self) -> None:
    found = self._notice_board.look()
    with self._lock:
      offences = found.offences or self._notices.offences
      self._notices = found._replace(offences=offences)

  def _head_versions(self) -> list[int]:
    heads = [
      self._store.read(keys.head_key(p), records.Head)
      for p in range(self._plan.num_fragments)
    ]
    return [h.version if h else -1 for h in heads]

  def _fetch(self, fragment: int) -> None:
    started = time.monotonic()
    newest = self._versions[fragment]
    found = self._fetcher.fetch(fragment, newest)
    if found is None:
      return
    head, anchor = found
    params = {n: self._placement.put(t) for n, t in anchor.items()}
    num_bytes = sum(v.nbytes for t in anchor.values() for _, v in t.pieces)
    fetched = Fetched(
      fragment,
      head.version,
      head.merged_step(self._island),
      head.cut,
      anchor,
      params,
      num_bytes,
      head.digest or fetching.digest_of(anchor),
      time.monotonic() - started,
    )
    with self._lock:
      if newest == self._versions[fragment]:  # else it is wanted anew
        self._ready[fragment] = fetched
        self._versions[fragment] = head.version
