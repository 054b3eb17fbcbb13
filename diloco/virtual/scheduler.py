"""Virtual time: what happens next, and roles that live in it.

Everything is done in one thread, one event after another, in the order of time
and then of when it was asked for; so a run is the same every time. Computation
takes no time here. Time passes where somebody waits for it: a step by its
island's pace, an operation of the store by the link that it goes through.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco import workers
from diloco.snapshots import operations


class Scheduler:
  """Does at its time what is to be done."""

  def __init__(self) -> None:
    self.now = 0.0  # virtual seconds since the beginning
    self._heap: list[tuple[float, int, Callable[[], None]]] = []
    self._order = 0

  def after(self, secs: float, do: Callable[[], None]) -> None:
    """Has something done so many seconds from now."""
    self._order += 1
    heapq.heappush(self._heap, (self.now + secs, self._order, do))

  def run(self, enough: Callable[[], bool], limit_secs: float) -> bool:
    """Goes on until it is enough; says whether it became so in time."""
    deadline = self.now + limit_secs
    while not enough():
      if not self._heap or self._heap[0][0] > deadline:
        return False
      self.now, _, do = heapq.heappop(self._heap)
      do()
    return True


class Link(NamedTuple):
  """Between a role and the store."""

  latency_secs: float = 0.0  # of an operation
  bytes_per_sec: float = 0.0  # each way; 0 for any number
  # Bytes of tensors that have gone to the store or come from it.
  moved: Callable[[], int] = int


class Process(workers.Threads):
  """A role's process: its threads end when it is killed."""

  def __init__(self, scheduler: Scheduler, link: Link):
    """Lives; `link` leads to the store."""
    self.scheduler = scheduler
    self.link = link
    self.alive = True
    self._releases: list[Callable[[], None]] = []

  def clock(self) -> float:
    """See `workers.Threads`."""
    return self.scheduler.now

  def wall(self) -> float:
    """See `workers.Threads`; the run began at the epoch."""
    return self.scheduler.now

  def give_way(self) -> None:
    """See `workers.Threads`; whoever computes here holds all up."""

  def loop(
    self,
    name: str,
    script: operations.Script[None],
    execute: Callable[[operations.Operation], Any],
    *,
    at_once: bool = False,
  ) -> workers.Loop:
    """See `workers.Threads`."""
    return _Loop(self, name, script, execute)

  def pulse(
    self, beat: Callable[[], None], every_secs: float, name: str
  ) -> workers.Pulse:
    """See `workers.Threads`."""
    return _Pulse(self, beat, every_secs)

  def once(self, name: str, work: Callable[[], None]) -> workers.Worker:
    """See `workers.Threads`."""
    return _Once(self, work)

  def after(self, secs: float, do: Callable[[], None]) -> None:
    """Has something done so many seconds from now, should it live then."""
    self.scheduler.after(secs, lambda: do() if self.alive else None)

  def at_death(self, release: Callable[[], None]) -> None:
    """See `workers.Threads`."""
    self._releases.append(release)

  def kill(self) -> None:
    """Ends all its threads where they are, and releases what they had."""
    self.alive = False
    while self._releases:
      self._releases.pop()()


class _Loop(workers.Loop):
  """See `workers.Loop`; an exception in its script ends the whole run."""

  def __init__(
    self,
    process: Process,
    name: str,
    script: operations.Script[None],
    execute: Callable[[operations.Operation], Any],
  ):
    super().__init__(name, script, execute)
    self._process = process
    self._turn = 0  # what was asked for before the last one is void
    self._may_be_woken = False

  def start(self) -> None:
    self._later(0.0, None)

  def wake(self) -> None:
    if self._may_be_woken:
      self._later(0.0, None)
    else:
      self._woken = True

  def close(self) -> None:
    """Ends it where it waits."""
    self._turn += 1
    self._script.close()

  def _later(self, secs: float, operation: Any) -> None:
    """Goes on after so long, with what an operation gives then."""
    self._turn += 1
    turn, self._may_be_woken = self._turn, False
    self._process.after(
      secs, lambda: self._go_on(operation) if turn == self._turn else None
    )

  def _go_on(self, operation: Any) -> None:
    """Runs the script until it waits, or ends."""
    script, link = self._script, self._process.link
    try:
      while True:
        try:
          before = link.moved()
          value = None if operation is None else self._done(operation)
        except Exception as error:
          operation = script.throw(error)
        else:
          moved = link.moved() - before
          if moved and link.bytes_per_sec:
            given = operations.Compute(lambda: value)  # noqa: B023
            return self._later(moved / link.bytes_per_sec, given)
          operation = script.send(value)
        pause: float | None = None
        match operation:
          case None:
            pass
          case operations.Nap(secs):
            pause = secs
          case float(secs):
            return self._later(secs, None)
          case operations.Compute() | operations.Point():
            continue
          case _:
            if link.latency_secs:
              return self._later(link.latency_secs, operation)
            continue
        if not self._woken:
          if pause is not None:
            self._later(pause, None)
          self._may_be_woken = True
          return
        self._woken, operation = False, None
    except StopIteration:
      pass

  def _done(self, operation: Any) -> Any:
    if isinstance(operation, operations.Compute):
      return operation.work()
    return self._do(operation)


class _Pulse(workers.Pulse):
  """See `workers.Pulse`."""

  def __init__(
    self, process: Process, beat: Callable[[], None], every_secs: float
  ):
    self._process = process
    self._beat = beat
    self._every_secs = every_secs
    self._closed = False
    self._process.after(0.0, self._go_on)

  def _go_on(self) -> None:
    if not self._closed:
      self._beat()
      self._process.after(self._every_secs, self._go_on)

  def nudge(self) -> None:
    self._beat()

  def close(self) -> None:
    self._beat()
    self._closed = True


class _Once(workers.Worker):
  """See `workers.Worker`; it is done at once."""

  def __init__(self, process: Process, work: Callable[[], None]):
    process.after(0.0, work)

  @property
  def is_alive(self) -> bool:
    return False

  def check(self) -> None:
    """What fails in it ends the run."""

  def join(self) -> None:
    """Nothing goes on beside."""
