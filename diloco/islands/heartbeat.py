"""An island's sign of life in the store, from a thread of its own.

A long step, a compilation or a checkpoint must not read as death, so the beat
does not depend on the main thread. Whether that gets on is told by its
*progress*, which the controller hears with every beat.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from diloco.snapshots import keys, records, store

logger = logging.getLogger(__name__)


class Progress:
  """How far an island's main thread is, whatever it does.

  The main thread alone changes it, any thread may read it.
  """

  def __init__(self) -> None:
    """Nothing is done yet."""
    # One object: a count told with the extra time of another is a hang.
    self._standing = 0, 0.0

  @property
  def standing(self) -> tuple[int, float]:
    """How far it is, and how long it may now stand still.

    Returns:
      A count that moves with every step, batch, poll and program, and seconds
      beyond those for which the main thread may always stand still.
    """
    return self._standing

  def moved(self) -> None:
    """The main thread did something."""
    count, extra_secs = self._standing
    self._standing = count + 1, extra_secs

  @contextlib.contextmanager
  def may_take(self, secs: float) -> Iterator[None]:
    """Surrounds what may take so long: to compile, or to wait with an end."""
    self._standing = self._standing[0] + 1, secs
    try:
      yield
    finally:
      self._standing = self._standing[0] + 1, 0.0


class Heartbeat:
  """Writes a `Member` record every `every_secs`, and at once on `nudge`."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    describe: Callable[[int], records.Member],
    every_secs: float,
    after_beat: Callable[[records.Member], None] = lambda member: None,
  ):
    """Starts beating.

    Args:
      snapshots: the store.
      describe: makes the record for a beat number.
      every_secs: time between beats.
      after_beat: called with what was written, on this thread.
    """
    self._store = snapshots
    self._describe = describe
    self._every_secs = every_secs
    self._after_beat = after_beat
    self._wake = threading.Event()
    self._stopping = False
    self._thread = threading.Thread(
      target=self._run, name="heartbeat", daemon=True
    )
    self._thread.start()

  def nudge(self) -> None:
    """Beats now: something that others wait for has changed."""
    self._wake.set()

  def close(self) -> None:
    """Beats a last time and ends the thread."""
    self._stopping = True
    self._wake.set()
    self._thread.join()

  def _run(self) -> None:
    beat = 0
    stopping = False
    while not stopping:
      stopping = self._stopping
      beat += 1
      member = self._describe(beat)
      try:
        self._store.write(keys.member_key(member.island), member)
      except OSError as error:
        logger.warning("beat_failed error=%s", error)
      self._after_beat(member)
      if not stopping:
        self._wake.wait(self._every_secs)
        self._wake.clear()
