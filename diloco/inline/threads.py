"""Threads of a role that can be killed without its process.

A thread of Python cannot be ended from outside, so each of these asks before
whatever it does next whether it still may: the main thread with every step and
operation, a loop before every operation of the store, a pulse before a beat.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from diloco import pulse, workers
from diloco.snapshots import operations


class MortalThreads(workers.Threads):
  """See `workers.Threads`; these are of one life of one role.

  `kill` may be called by any thread, all else by the role's main thread alone.
  """

  def __init__(self, prefix: str):
    self._prefix = prefix  # of the names of its threads
    self._dead = threading.Event()
    self._ends: list[Callable[[], None]] = []
    self._releases: list[Callable[[], None]] = []

  @property
  def dead(self) -> bool:
    """See `workers.Threads`."""
    return self._dead.is_set()

  def kill(self) -> None:
    """Has every thread end before whatever it does next; waits for none."""
    self._dead.set()

  def end(self) -> None:
    """Ends what is left of all threads, then releases what they had.

    Called where the role has ended otherwise than in order. What hangs in one
    of its threads hangs here.
    """
    self.kill()
    for end in [*self._ends, *reversed(self._releases)]:
      with contextlib.suppress(Exception):  # the others are to end too
        end()

  def check(self) -> None:
    """See `workers.Threads`."""
    if self.dead:
      raise workers.Ended

  def at_death(self, release: Callable[[], None]) -> None:
    """See `workers.Threads`."""
    self._releases.append(release)

  def loop(
    self,
    name: str,
    script: operations.Script[None],
    execute: Callable[[operations.Operation], Any],
    *,
    at_once: bool = False,
  ) -> workers.Loop:
    """See `workers.Threads`."""

    def while_alive(operation: operations.Operation) -> Any:
      self.check()
      return execute(operation)

    loop = super().loop(self._named(name), script, while_alive, at_once=at_once)
    self._ends.append(loop.close)
    return loop

  def pulse(
    self, beat: Callable[[], None], every_secs: float, name: str
  ) -> pulse.Pulse:
    """See `workers.Threads`; the dead do not beat."""
    made = super().pulse(
      lambda: None if self.dead else beat(), every_secs, self._named(name)
    )
    self._ends.append(made.close)
    return made

  def once(self, name: str, work: Callable[[], None]) -> workers.Worker:
    """See `workers.Threads`."""
    made = super().once(self._named(name), work)
    self._ends.append(made.join)
    return made

  def _named(self, name: str) -> str:
    return f"{self._prefix}/{name}"
