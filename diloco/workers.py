"""Background threads that never end unseen, and when they try again.

A role's background threads wait out what the store does to them. Anything else
that ends one ends its process: a role that lives on without one of its threads
looks alive and does half its work. The process that is started in its place
begins anew from the store.
"""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_UNEXPECTED = 4  # times in a row that an error nobody expected is tried again


class WorkerError(RuntimeError):
  """A background thread has ended that must not."""


class Worker:
  """A thread whose owner hears of it when an exception ends it."""

  def __init__(self, name: str, work: Callable[[], None]):
    """Starts the thread.

    Args:
      name: of the thread, for people.
      work: what it does; to return is its right end.
    """
    self._name = name
    self._work = work
    self._failure: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def _run(self) -> None:
    try:
      self._work()
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

  def join(self) -> None:
    """Waits for the thread to end, however it does."""
    self._thread.join()


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
    """Has not failed yet.

    Args:
      pauses_secs: the first and the longest.
      expected: errors that are waited out for ever.
    """
    self._pauses_secs = pauses_secs
    self._expected = expected
    self._failures = self._unexpected = 0
    self.due = 0.0  # not to be tried before, on the caller's clock

  def failed(self, error: Exception, now: float = 0.0) -> float:
    """Counts a failure.

    Args:
      error: what went wrong.
      now: seconds on the clock of `due`.

    Returns:
      Seconds to wait.

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
