"""An island's signs of life, from threads of their own.

A long step, a compilation or a checkpoint must not read as death, so beats
do not depend on the main thread. Whether that gets on is told by its
*progress*, which the controller hears with every beat.
"""

import contextlib
from collections.abc import Callable, Iterator

from diloco import errors, workers
from diloco.islands import protocol
from diloco.snapshots import records, store


class Progress:
  """How far an island's main thread is, whatever it does.

  The main thread alone changes it, any thread may read it.
  """

  def __init__(self, check: Callable[[], None] = lambda: None) -> None:
    """Nothing is done yet; `check` is called with every move."""
    self._check = check
    # One object: a count told with the extra time of another is a hang.
    self._standing = 0, 0.0

  @property
  def standing(self) -> tuple[int, float]:
    """A count that moves with every step, batch, poll and program.

    And the seconds for which it may now stand still, beyond those for which it
    always may.
    """
    return self._standing

  def moved(self) -> None:
    """The main thread did something."""
    self._check()
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
  """Writes a `Member` record every so often, and tells the controller.

  Each has a thread of its own: a store that blocks silences an island in the
  store, where nobody could hear it, and nowhere else.
  """

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    describe: Callable[[int], records.Member],
    every_secs: float,
    report: Callable[[records.Member], None] = lambda member: None,
    threads: workers.Threads = workers.Threads(),
  ):
    """Starts beating with what `describe` makes for a beat's number."""
    self._store = snapshots
    self._describe = describe
    self._beat = 0
    self._fenced: errors.FencedError | None = None
    self._written = threads.pulse(self._write, every_secs, "heartbeat")
    self._told = threads.pulse(
      lambda: report(describe(self._beat)), every_secs, "report"
    )

  def nudge(self) -> None:
    """Beats now: something that others wait for has changed."""
    self._written.nudge()
    self._told.nudge()

  def check(self) -> None:
    """Raises `FencedError` once another process has the island's place."""
    if self._fenced is not None:
      raise self._fenced

  def close(self) -> None:
    """Beats a last time and ends both threads."""
    self._written.close()
    self._told.close()

  def _write(self) -> None:
    if self._fenced is not None:
      return
    self._beat += 1
    try:
      self._store.perform(protocol.beat(self._describe(self._beat)))
    except errors.FencedError as error:
      self._fenced = error
