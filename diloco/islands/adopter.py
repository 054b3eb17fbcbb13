"""Adoption in the background: watch for new versions, fetch, put on device.

The thread reads the syncer's board, and now and then the heads themselves, for
the board is only a hint. A newer version is read shard by shard, put on the
device, and waits there for the main thread to swap it in between two steps.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from diloco import errors
from diloco.fragments import partition
from diloco.islands import placement as placement_lib
from diloco.snapshots import records, store

logger = logging.getLogger(__name__)

_HEADS_EVERY_SECS = 2.0  # look past the board this often
_RETRY_SECS = 0.2


@dataclasses.dataclass(frozen=True)
class Fetched:
  """One fragment's newer version, on the host and on the device."""

  fragment: int
  version: int
  merged_step: int  # last step of this island that is in it
  anchor: placement_lib.HostFragment
  params: Mapping[str, jax.Array]
  num_bytes: int
  digest: int  # of the values, equal on every island
  secs: float


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
  ):
    """Starts the thread.

    Args:
      snapshots: the store.
      plan: the fragment plan.
      placement: where this island's shards go.
      island: its number.
      versions: [P], versions this island already has.
      poll_secs: gives the pause between two looks at the board.
    """
    self._store = snapshots
    self._plan = plan
    self._placement = placement
    self._island = island
    self._versions = list(versions)
    self._poll_secs = poll_secs
    self._lock = threading.Lock()
    self._ready: dict[int, Fetched] = {}
    self._board: records.Board | None = None
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="adopter", daemon=True
    )
    self._thread.start()

  def take(self) -> tuple[records.Board | None, list[Fetched]]:
    """What is new since the last call; never blocks on the store."""
    with self._lock:
      board, ready = self._board, list(self._ready.values())
      self._board = None
      self._ready.clear()
    return board, ready

  def close(self) -> None:
    """Ends the thread."""
    self._stop.set()
    self._thread.join()

  def _run(self) -> None:
    heads_due = 0.0
    while not self._stop.is_set():
      pause_secs = self._poll_secs()
      try:
        board = self._store.read(store.BOARD, records.Board)
        versions = board.versions if board else []
        if time.monotonic() >= heads_due:
          versions = self._head_versions()
          heads_due = time.monotonic() + _HEADS_EVERY_SECS
        for fragment, version in enumerate(versions):
          if version > self._versions[fragment] and not self._stop.is_set():
            self._fetch(fragment)
        with self._lock:
          self._board = board or self._board
      except (OSError, ValueError, errors.CorruptSnapshotError) as error:
        logger.warning("adopt_failed error=%s", error)
        pause_secs = _RETRY_SECS
      self._stop.wait(pause_secs)

  def _head_versions(self) -> list[int]:
    heads = [
      self._store.read(store.head_key(p), records.Head)
      for p in range(self._plan.num_fragments)
    ]
    return [h.version if h else 0 for h in heads]

  def _fetch(self, fragment: int) -> None:
    started = time.monotonic()
    head = self._store.read(store.head_key(fragment), records.Head)
    if head is None or head.version <= self._versions[fragment]:
      return
    anchor = placement_lib.read_fragment(
      self._store,
      head,
      self._plan.fragments[fragment],
      self._placement,
    )
    params = {n: self._placement.put(t) for n, t in anchor.items()}
    num_bytes = sum(v.nbytes for t in anchor.values() for _, v in t.pieces)
    fetched = Fetched(
      fragment,
      head.version,
      head.merged_step(self._island),
      anchor,
      params,
      num_bytes,
      placement_lib.digest(anchor.values()),
      time.monotonic() - started,
    )
    with self._lock:
      self._ready[fragment] = fetched
    self._versions[fragment] = head.version
