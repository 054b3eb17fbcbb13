"""Signs of life, each from a thread that does nothing else.

A long step, a compilation or a merge must not read as death, nor must a store
that answers nobody: whoever tells two parties that it lives has a pulse for
each, and one that blocks does not silence the other.
"""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Pulse:
  """Calls `beat` every `every_secs`, and at once on `nudge`."""

  def __init__(self, beat: Callable[[], None], every_secs: float, name: str):
    """Starts beating.

    Args:
      beat: called on the pulse's own thread; one that raises is logged, and
        the next is due as ever.
      every_secs: time between beats.
      name: of the thread.
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
