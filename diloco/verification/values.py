"""Symbolic tensors: which rows of data a payload was computed from.

In place of numbers a payload says what went into it. So whether a row was
merged twice or lost shows in the values themselves, whatever the protocol's
own counters say. A pair of numbers goes along, so that a wrong weight shows
too: `diloco.verification.arithmetic`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

Span = tuple[int, int]  # steps (first, last]
Vector = tuple[float, float]
T = TypeVar("T")


def quick(kind: type[T], **fields: Any) -> T:
  """A frozen dataclass, without the checks that cost too much here."""
  made = object.__new__(kind)
  object.__setattr__(made, "__dict__", fields)
  return made


@dataclasses.dataclass(eq=False, slots=True)
class Delta:
  """An outer gradient: the rows an island trained since a global version."""

  island: int  # who trained them
  incarnation: int  # in which of its lives
  fragment: int  # of which fragment
  base: Version  # the version they started from
  spans: tuple[Span, ...]  # the rows
  finite: bool  # whether the values are
  epoch: int = 0  # of the run when it was published
  norm: float = 1.0  # its L2 norm
  # Moment it was handed over to be published, as a number that grows.
  sent: int = 0
  fate: str = ""  # what became of it so far: "" or a reason, or "merged"
  # Fate and its `fate_of` before its record was sent once more.
  judged: tuple[str, tuple[int, int]] | None = None
  fate_of: tuple[int, int] = (-1, -1)  # epoch and token of whoever decided that
  discarded: bool = False  # whether any leader has discarded it

  def __str__(self) -> str:
    return f"rows {list(self.spans)} of island {self.island}"


@dataclasses.dataclass(eq=False, slots=True)
class Version:
  """A global version: its parent, and the rows its merge added."""

  fragment: int
  number: int  # 0 for the initial parameters
  # By island, spans in order; shared with the parent where equal.
  rows: dict[int, tuple[Span, ...]]
  # The version before, or the same one under an older number.
  parent: Version | None = None
  added: tuple[Delta, ...] = ()  # contributions merged on top of the parent
  theta: Vector = (0.0, 0.0)  # the parameters
  staleness: tuple[int, ...] = ()  # of what was added, in merges
  committed: bool = False  # whether it ever was a head
  moment: int = 0  # when it became one, on the scale of `Delta.sent`

  @property
  def merge(self) -> Version:
    """The version as it was merged, whatever number it goes under now."""
    version = self
    while version.parent is not None and not version.added:
      version = version.parent
    return version

  def behind(self, base: Version, most: int) -> int:
    """How many merges lie between a base and this version.

    More than `most` if the base is farther back, or of another timeline.
    """
    if self is base:
      return 0
    version, start = self.merge, base.merge
    for merges in range(most + 1):
      if version is start:
        return merges
      if version.parent is None:
        break
      version = version.parent.merge
    return most + 1

  def __str__(self) -> str:
    rows = {m: list(spans) for m, spans in self.rows.items()}
    return f"version {self.number} of fragment {self.fragment}: {rows}"


class Fragment:
  """A fragment's values on the device: rows (held_from, step] on an anchor."""

  def __init__(self, anchor: Version, held_from: int):
    self.anchor = anchor
    self.held_from = held_from  # the truth, not the core's opinion
    # Steps of which the own values are kept, as `swap.Swap` does.
    self.references: tuple[int, ...] = (held_from,)
    self.finite = True
    self.scale = 1.0  # how many times too long the progress is


@dataclasses.dataclass(eq=False, slots=True)
class Moments:
  """An inner optimizer's state, as a peer sends it."""

  island: int  # whose it is
  # [P], numbers of the global versions it stepped from.
  versions: tuple[int, ...]

  def __str__(self) -> str:
    return f"optimizer of island {self.island} at versions {self.versions}"


def append(spans: tuple[Span, ...], new: tuple[Span, ...]) -> tuple[Span, ...]:
  """Rows of both, in order.

  Raises:
    ValueError: they share a row.
  """
  if not spans:
    return new
  if len(new) == 1 and new[0][0] >= spans[-1][1]:
    first, last = new[0]
    if first == spans[-1][1]:
      return (*spans[:-1], (spans[-1][0], last))
    return (*spans, new[0])
  merged: list[Span] = []
  for first, last in sorted(spans + new):
    if merged and first < merged[-1][1]:
      raise ValueError(f"rows {first + 1} to {min(last, merged[-1][1])}")
    if merged and first == merged[-1][1]:
      merged[-1] = (merged[-1][0], last)
    else:
      merged.append((first, last))
  return tuple(merged)


def union(spans: list[Span]) -> list[Span]:
  """Spans in order, joined where they touch or overlap."""
  joined: list[Span] = []
  for first, last in sorted(spans):
    if first >= last:
      continue
    if joined and first <= joined[-1][1]:
      if last > joined[-1][1]:
        joined[-1] = (joined[-1][0], last)
    else:
      joined.append((first, last))
  return joined


def overlap(left: Sequence[Span], right: Sequence[Span]) -> Span | None:
  """Rows in both; each list is in order and without overlaps."""
  i = j = 0
  while i < len(left) and j < len(right):
    first = max(left[i][0], right[j][0])
    last = min(left[i][1], right[j][1])
    if first < last:
      return first, last
    if left[i][1] < right[j][1]:
      i += 1
    else:
      j += 1
  return None


def missing(spans: list[Span], last: int) -> Span | None:
  """First rows of (0, last] that are in none of the spans in order."""
  reached = 0
  for first, end in spans:
    if reached >= last:
      break
    if first > reached:
      return reached, min(first, last)
    reached = max(reached, end)
  return (reached, last) if reached < last else None
