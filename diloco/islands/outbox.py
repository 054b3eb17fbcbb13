"""What an island has handed over for publication, and what became of it.

Bookkeeping and the script of the thread that publishes, both the same live and
simulated. Publications leave one after the
other. One that contains another takes its place in the queue and stands for it
from then on, so what waits is bounded by a few publications per fragment, and
no fragment waits longer because it is published often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from diloco import workers
from diloco.islands import core
from diloco.snapshots import operations

_WAITING_EACH = 2  # publications of one fragment that wait at most

Reason = Literal["superseded", "store_unreachable", "island_stopped"]


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
  """One publication."""

  action: core.Publish
  content: Any  # what it is made of; not kept longer than it is needed
  fate: Literal["waiting", "committed", "lost"] = "waiting"
  successor: Entry | None = None  # contains it; has its fate

  def contains(self, other: Entry) -> bool:
    """Whether all of the other's steps are in this one."""
    mine, its = self.action, other.action
    return (
      mine.fragment == its.fragment
      and mine.first_step <= its.first_step
      and mine.step >= its.step
    )

  def stand_down(self, successor: Entry) -> None:
    """Another one goes in its place."""
    self.successor, self.content = successor, None

  def end(self, fate: Literal["committed", "lost"]) -> None:
    """It has arrived, or never will."""
    self.fate, self.content = fate, None


class Dropped(NamedTuple):
  """A publication that will not leave the island as itself."""

  action: core.Publish
  reason: Reason


# Publishes what an action says of such content.
Publish = Callable[[core.Publish, Any], operations.Procedure[None]]


class Ticket(NamedTuple):
  """The publications that a saved state takes for published."""

  awaited: tuple[Entry, ...]  # all that were under way when it was copied
  # Those of them that its positions count on. What another one holds was given
  # up when a newer version was adopted.
  needed: tuple[Entry, ...]


class Outbox:
  """The queue of one life of an island. Not thread-safe.

  Attributes:
    waiting: for its turn, the next one first.
    busy: what is on its way.
  """

  def __init__(self, retry_secs: tuple[float, float] = (0.05, 2.0)) -> None:
    """Empty; `retry_secs` are the pauses after failures, first and longest."""
    self.waiting: list[Entry] = []
    self.busy: Entry | None = None
    self._closed = False
    self._retry_secs = retry_secs
    self._retries: dict[int, workers.Retry] = {}  # of fragments that fail

  def submit(self, action: core.Publish, content: Any) -> list[Dropped]:
    """Queues a publication; gives those that it drops from the queue."""
    entry = Entry(action, content)
    waiting, place = self.waiting, len(self.waiting)
    dropped = []
    for old in [e for e in waiting if entry.contains(e)]:
      place = min(place, waiting.index(old))
      waiting.remove(old)
      old.stand_down(entry)
      dropped.append(Dropped(old.action, "superseded"))
    waiting.insert(place, entry)
    same = [e for e in waiting if e.action.fragment == action.fragment]
    if len(same) > _WAITING_EACH:
      # Each takes the place of the one before: they stay in order.
      slots = [waiting.index(e) for e in same]
      for slot, later in zip(slots, same[1:], strict=False):
        waiting[slot] = later
      del waiting[slots[-1]]
      same[0].end("lost")
      dropped.append(Dropped(same[0].action, "store_unreachable"))
    return dropped

  def take(self) -> Entry | None:
    """The next one, which is on its way from now on; None without any."""
    assert self.busy is None
    if self.waiting and not self._closed:
      self.busy = self.waiting.pop(0)
    return self.busy

  def committed(self) -> None:
    """What is on its way has arrived."""
    assert self.busy is not None
    self._retries.pop(self.busy.action.fragment, None)
    self.busy.end("committed")
    self.busy = None

  def failed(self, error: Exception) -> float:
    """What is on its way could not be published; see `workers.Retry.failed`."""
    assert self.busy is not None
    fragment = self.busy.action.fragment
    if fragment not in self._retries:
      self._retries[fragment] = workers.Retry(self._retry_secs)
    return self._retries[fragment].failed(error)

  def give_way(self) -> Dropped | None:
    """Drops what is on its way, if what waits contains it."""
    busy = self.busy
    assert busy is not None
    for entry in self.waiting:
      if entry.contains(busy):
        busy.stand_down(entry)
        self.busy = None
        return Dropped(busy.action, "store_unreachable")
    return None

  def send_all(
    self,
    publish: Publish,
    dropped: Callable[[Dropped], None],
    failed: Callable[[core.Publish, Exception], None] = lambda *_: None,
  ) -> operations.Script[None]:
    """Publishes whatever comes, one after the other, for ever.

    What the store would not take is tried again, until a newer publication
    that contains it takes its place. It is to be woken when something comes.

    Raises:
      Exception: what nobody expected, and keeps coming back.
    """
    while True:
      entry = self.take()
      if entry is None:
        yield None
        continue
      while self.busy is entry:
        try:
          yield from publish(entry.action, entry.content)
          self.committed()
          break
        except Exception as error:
          failed(entry.action, error)
          pause_secs = self.failed(error)
        yield pause_secs
        given_up = self.give_way()
        if given_up is not None:
          dropped(given_up)

  def stop(self) -> None:
    """Nothing that waits leaves any more."""
    self._closed = True

  def close(self) -> list[Dropped]:
    """Drops what has not arrived: the island stops."""
    self.stop()
    left = [*([self.busy] if self.busy else []), *self.waiting]
    for entry in left:
      entry.end("lost")
    self.busy, self.waiting = None, []
    return [Dropped(entry.action, "island_stopped") for entry in left]

  def ticket(self, positions: Sequence[core.Position]) -> Ticket:
    """What a state of these positions ([P]) takes for published."""
    awaited = (*([self.busy] if self.busy else []), *self.waiting)
    needed = []
    for entry in awaited:
      action, at = entry.action, positions[entry.action.fragment]
      if (action.base_version, action.first_step, action.step) == tuple(at):
        needed.append(entry)
    return Ticket(awaited, tuple(needed))


def settled(ticket: Ticket) -> bool | None:
  """Whether all that a state takes for published is committed.

  One that is contained in another counts as committed when that one is. Any
  thread may ask: a fate is decided once.

  Returns:
    False once one that is needed never will be; None while it is open.
  """
  open_ = any(_last(entry).fate == "waiting" for entry in ticket.awaited)
  if any(_last(entry).fate == "lost" for entry in ticket.needed):
    return False
  return None if open_ else True


def _last(entry: Entry) -> Entry:
  while entry.successor is not None:
    entry = entry.successor
  return entry
