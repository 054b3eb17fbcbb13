"""Background threads that never end unseen, and when they try again.

A role's background threads wait out what the store does to them. Anything else
that ends one ends its process: a role that lives on without one of its threads
looks alive and does half its work. The process that is started in its place
begins anew from the store.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from diloco import errors
from diloco.snapshots import operations

logger = logging.getLogger(__name__)

_UNEXPECTED = 4  # times in a row that an error nobody expected is tried again
_LESS_URGENT = 10  # steps of niceness: a tenth of a core that others want


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
  """Processes that are started within hear no interrupt, from their birth on.

  They import for a while before they could say so themselves, and Ctrl-C is
  for their parent, who hears it at the end of this block at the latest.
  """
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerError(errors.PlainError):
  """A background thread has ended that must not."""


class Worker:
  """A thread whose owner hears of it when an exception ends it.

  Of work that has returned nothing is kept: it may have held many tensors.
  """

  def __init__(self, name: str, work: Callable[[], None]):
    """Starts the thread, whose right end is that `work` returns."""
    self._name = name
    self._failure: BaseException | None = None
    self._thread = threading.Thread(
      target=self._run, args=(work,), name=name, daemon=True
    )
    self._thread.start()

  def _run(self, work: Callable[[], None]) -> None:
    try:
      work()
    except BaseException as error:
      logger.exception("worker_failed worker=%s", self._name)
      self._failure = error

  def check(self) -> None:
    """Does nothing while all is well.

    Raises:
      WorkerError: an exception has ended the thread.
    """
    if self._failure is not None:
      error = self._failure
      raise WorkerError(
        f"the {self._name} thread has ended: {type(error).__name__}: {error}"
      ) from error

  @property
  def is_alive(self) -> bool:
    """Whether the thread has not ended."""
    return self._thread.is_alive()

  def join(self) -> None:
    """Waits for the thread to end, however it does."""
    self._thread.join()


class Loop:
  """A background thread that performs a script.

  The script's own lines run under a lock that its owner takes as well, so
  neither sees what the other has half done. Operations and pauses do not.

  Attributes:
    changed: the lock. It is notified whenever the script has gone on.
  """

  def __init__(
    self,
    name: str,
    script: operations.Script[None],
    execute: Callable[[operations.Operation], Any],
    *,
    at_once: bool = False,
  ):
    """Prepares the thread; `start` starts it; see `operations.perform`.

    `close` ends the script at its next pause, or with `at_once` at its next
    operation.
    """
    self.changed = threading.Condition()
    self._name = name
    self._script = script
    self._do = execute
    self._at_once = at_once
    self._closing = self._woken = self._ended = False
    self._worker: Worker | None = None

  def start(self) -> None:
    """Starts the thread."""
    self._worker = Worker(self._name, self._run)

  def wake(self) -> None:
    """Ends the pause the script is in, or the next one, if it may be ended."""
    with self.changed:
      self._woken = True
      self.changed.notify_all()

  def wait_for(self, done: Callable[[], bool], timeout_secs: float) -> bool:
    """Waits for what the thread does, as long as it lives.

    Says whether it is `done`, which is asked under the lock.
    """
    with self.changed:
      self.changed.wait_for(lambda: self._ended or done(), timeout_secs)
      return done()

  def check(self) -> None:
    """Raises `WorkerError` if the thread has ended by an exception."""
    if self._worker is not None:
      self._worker.check()

  def join(self) -> None:
    """Waits for the thread to end, however it does."""
    if self._worker is not None:
      self._worker.join()

  def close(self) -> None:
    """Ends the thread, and waits until it has ended."""
    with self.changed:
      self._closing = True
      self.changed.notify_all()
    self.join()

  def _run(self) -> None:
    with self.changed:
      try:
        operations.perform(self._script, self._execute)
      except Ended:
        pass
      finally:
        self._ended = True
        self.changed.notify_all()

  def _execute(self, operation: Any) -> Any:
    self.changed.notify_all()
    match operation:
      case None:
        return self._pause(None, may_end=True)
      case operations.Nap(secs):
        return self._pause(secs, may_end=True)
      case float(secs):
        return self._pause(secs, may_end=False)
    if self._closing and self._at_once:
      raise Ended
    self.changed.release()
    try:
      if isinstance(operation, operations.Compute):
        return operation.work()
      return self._do(operation)
    finally:
      self.changed.acquire()

  def _pause(self, secs: float | None, *, may_end: bool) -> None:
    self.changed.wait_for(
      lambda: self._closing or (may_end and self._woken), secs
    )
    if self._closing:
      raise Ended
    if may_end:
      self._woken = False


class Pulse:
  """Calls `beat` every `every_secs`, and at once on `nudge`.

  Whoever tells two parties that it lives has one for each: a store that answers
  nobody must not silence the other.
  """

  def __init__(self, beat: Callable[[], None], every_secs: float, name: str):
    """Starts beating, on a thread of its own.

    A beat that raises is logged, and the next is due as ever.
    """
    self._beat = beat
    self._every_secs = every_secs
    self._wake = threading.Event()
    self._stopping = False
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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
    stopping = False
    while not stopping:
      stopping = self._stopping
      try:
        self._beat()
      except Exception as error:  # whatever it is, silence would read as death
        logger.warning("beat_failed name=%s error=%r", self._thread.name, error)
      if not stopping:
        self._wake.wait(self._every_secs)
        self._wake.clear()


class Ended(BaseException):
  """Ends a thread from outside, where it asks for it; nobody handles it."""


class Threads:
  """How a role does what goes on in its background, and what time it is.

  These are threads of this process and its clocks, and end with it. A role in
  virtual time is given others (`diloco.virtual`), one that shares its process
  with others as well (`diloco.inline`); it is the same in all else.
  """

  @property
  def dead(self) -> bool:
    """Whether the role was killed, and its process lives on."""
    return False

  def check(self) -> None:
    """Called by a role's main thread before whatever it does next.

    Raises:
      Ended: the role was killed. A process that is has no need to say so.
    """

  def at_death(self, release: Callable[[], None]) -> None:
    """What there is to release, should the role not leave in order."""

  def clock(self) -> float:
    """Monotonic seconds."""
    return time.monotonic()

  def wall(self) -> float:
    """Seconds since the epoch, for tapes."""
    return time.time()

  def give_way(self) -> None:
    """Has the calling thread, and threads it starts, leave cores to others.

    What they do may then take ten times as long on cores that are never idle.
    For good: only a privileged process may take it back.
    """
    thread = threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, thread) + _LESS_URGENT
    os.setpriority(os.PRIO_PROCESS, thread, nice)  # at most the greatest

  def loop(
    self,
    name: str,
    script: operations.Script[None],
    execute: Callable[[operations.Operation], Any],
    *,
    at_once: bool = False,
  ) -> Loop:
    """Prepares a loop; see `Loop`."""
    return Loop(name, script, execute, at_once=at_once)

  def pulse(
    self, beat: Callable[[], None], every_secs: float, name: str
  ) -> Pulse:
    """Starts a pulse; see `Pulse`."""
    return Pulse(beat, every_secs, name)

  def once(self, name: str, work: Callable[[], None]) -> Worker:
    """Starts work in the background that is done once."""
    return Worker(name, work)


class Retry:
  """When to try something again, and when to give it up.

  What is expected to fail now and then is tried again for ever, after pauses
  that double. An error that nobody expected may pass as well (memory that was
  short for a moment); one that keeps coming back does not. What works again
  needs a new one of these.
  """

  __slots__ = ("_expected", "_failures", "_pauses_secs", "_unexpected", "due")

  def __init__(
    self,
    pauses_secs: tuple[float, float],
    expected: tuple[type[Exception], ...] = (OSError,),
  ):
    """Has not failed yet; pauses are given by the first and the longest."""
    self._pauses_secs = pauses_secs
    self._expected = expected
    self._failures = self._unexpected = 0
    self.due = 0.0  # not to be tried before, on the caller's clock

  def failed(self, error: Exception, now: float = 0.0) -> float:
    """Counts a failure at `now`, by the clock of `due`; gives seconds to wait.

    Raises:
      Exception: `error`, for it was not expected and keeps coming back.
    """
    if not isinstance(error, self._expected):
      self._unexpected += 1
      if self._unexpected >= _UNEXPECTED:
        raise error
    first, longest = self._pauses_secs
    pause_secs = min(first * 2.0**self._failures, longest)
    self._failures = min(self._failures + 1, 64)
    self.due = now + pause_secs
    return pause_secs
