"""Where each row of data went, for every island and fragment.

At any time each trained row is merged, waits in the store, is on its way there,
is held by its island, or was given up by somebody who said so and why. What is
merged and what was given up stays so: up to there a row is *settled*.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Collection, Sequence
from typing import Any

from diloco.verification import values

_Key = tuple[int, int]  # island, fragment
_FAR = 1 << 40


class RowLedger:
  """What waits, what is on its way, and what was given up, by name."""

  def __init__(self, *, for_good: bool) -> None:
    """Knows of no row; `for_good` says that nobody goes back to a cut."""
    self._for_good = for_good
    self.reasons: dict[str, int] = collections.defaultdict(int)
    self._named: dict[_Key, list[values.Span]] = {}
    self._waiting: dict[_Key, dict[str, Any]] = {}  # records by name
    self._leaving: dict[_Key, list[values.Delta]] = {}  # their island
    self._settled: dict[_Key, int] = {}

  # What moves

  def handed_over(self, content: values.Delta) -> None:
    """A publication is on its way to the store."""
    key = content.island, content.fragment
    self._leaving.setdefault(key, []).append(content)

  def left(self, content: values.Delta) -> None:
    """A publication is in the store, or was dropped."""
    leaving = self._leaving.get((content.island, content.fragment))
    if leaving and content in leaving:
      leaving.remove(content)

  def died(self, island: int) -> None:
    """A process ended: what was to leave it never will, or late."""
    for (owner, _), leaving in self._leaving.items():
      if owner == island:
        leaving.clear()

  def arrived(self, name: str, record: Any) -> None:
    """A commit record is in the store."""
    key = record.island, record.fragment
    self._waiting.setdefault(key, {})[name] = record

  def gone(self, name: str, record: Any) -> None:
    """A commit record is not in the store any more."""
    self._waiting.get((record.island, record.fragment), {}).pop(name, None)

  def waiting(self, island: int, fragment: int) -> Collection[Any]:
    """Commit records in the store."""
    return self._waiting.get((island, fragment), {}).values()

  def newer(self, content: values.Delta) -> values.Delta | None:
    """The last publication on its way that is newer than this one."""
    for other in reversed(
      self._leaving.get((content.island, content.fragment), ())
    ):
      if other.sent > content.sent:
        return other
    return None

  # What is given up

  def name(
    self, island: int, fragment: int, first: int, last: int, reason: str
  ) -> None:
    """Rows (first, last] will not be merged from here, for this reason."""
    self.reasons[reason] += last - first
    self._named.setdefault((island, fragment), []).append((first, last))

  def take_back(self, island: int, fragment: int, span: values.Span) -> None:
    """Rows that were given up have been merged by somebody else."""
    named = self._named.get((island, fragment), [])
    if span in named:
      named.remove(span)

  def set_back(self, epoch: int, islands: int) -> None:
    """A new epoch begins: what is merged may not be, what waits is void."""
    self._settled.clear()
    for island in range(islands):
      self.died(island)
    for waiting in self._waiting.values():
      for name in [n for n, r in waiting.items() if r.epoch != epoch]:
        del waiting[name]

  def forget_after(self, island: int, steps: Sequence[int]) -> None:
    """An island is set back: what it gave up after that did not happen."""
    for (owner, fragment), spans in self._named.items():
      if owner == island:
        kept = [span for span in spans if span[1] <= steps[fragment]]
        self._named[owner, fragment] = kept

  # The balance

  def unaccounted(
    self,
    island: int,
    fragment: int,
    merged: tuple[values.Span, ...],
    held: values.Span,
    last: int,
  ) -> values.Span | None:
    """First rows of (0, last] that nobody can account for."""
    key = island, fragment
    reached = self._settle(key, merged)
    if reached >= last or held[0] <= reached <= last <= held[1]:
      return None
    accounted = [(0, reached), held, *merged, *self._named.get(key, ())]
    accounted += [
      (r.first_step, r.step) for r in self._waiting.get(key, {}).values()
    ]
    for content in self._leaving.get(key, ()):
      accounted += content.spans
    return values.missing(values.union(accounted), last)

  def _settle(self, key: _Key, merged: tuple[values.Span, ...]) -> int:
    """The row up to which all are merged or given up."""
    reached = self._settled.get(key, 0)
    named = self._named.get(key, ())
    if merged and merged[-1][0] <= reached:
      reached = max(reached, merged[-1][1])
    while True:
      before = reached
      at = bisect.bisect_right(merged, (reached, _FAR)) - 1
      if at >= 0 and merged[at][1] > reached:
        reached = merged[at][1]
      for first, last in named:
        if first <= reached < last:
          reached = last
      if reached == before:
        break
    if len(named) > 8 and self._for_good:
      self._named[key] = [span for span in named if span[1] > reached]
    self._settled[key] = reached
    return reached

  def settled(
    self, island: int, fragment: int, merged: tuple[values.Span, ...]
  ) -> list[values.Span]:
    """Rows that are merged or given up, not in order."""
    key = island, fragment
    reached = self._settle(key, merged)
    return [(0, reached), *merged, *self._named.get(key, ())]

  def named(self, island: int, fragment: int) -> Sequence[values.Span]:
    """Rows that were given up; not all of them if that is for good."""
    return self._named.get((island, fragment), ())
