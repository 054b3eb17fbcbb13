"""Symbolic tensors: which rows of data a payload was computed from.

In place of numbers a payload says what went into it. So whether a row was
merged twice or lost shows in the values themselves, whatever the protocol's
own counters say.
"""

from __future__ import annotations

Span = tuple[int, int]  # steps (first, last]


class Delta:
  """An outer gradient: the rows an island trained since a global version."""

  __slots__ = (
    "base",
    "epoch",
    "finite",
    "fragment",
    "incarnation",
    "island",
    "spans",
  )

  def __init__(
    self,
    island: int,
    incarnation: int,
    fragment: int,
    base: Version,
    spans: tuple[Span, ...],
    finite: bool,
    epoch: int = 0,
  ):
    self.island = island
    self.incarnation = incarnation
    self.fragment = fragment
    self.base = base
    self.spans = spans
    self.finite = finite
    self.epoch = epoch

  def __str__(self) -> str:
    return f"rows {list(self.spans)} of island {self.island}"


class Version:
  """A global version: its parent, and the rows its merge added.

  Attributes:
    number: 0 for the initial parameters.
    parent: the version before, or the same one under an older number.
    added: (island, rows) merged on top of the parent.
    rows: by island, spans in order; shared with the parent where equal.
    committed: whether it ever was a head.
  """

  __slots__ = ("added", "committed", "fragment", "number", "parent", "rows")

  def __init__(
    self,
    fragment: int,
    number: int,
    rows: dict[int, tuple[Span, ...]],
    parent: Version | None = None,
    added: tuple[tuple[int, tuple[Span, ...]], ...] = (),
  ):
    self.fragment = fragment
    self.number = number
    self.rows = rows
    self.parent = parent
    self.added = added
    self.committed = False

  def __str__(self) -> str:
    rows = {m: list(spans) for m, spans in self.rows.items()}
    return f"version {self.number} of fragment {self.fragment}: {rows}"


class Fragment:
  """A fragment's values on the device: rows (held_from, step] on an anchor.

  Attributes:
    anchor: the global version.
    held_from: truth about the values, not the core's opinion.
    references: steps of which the own values are kept, as `swap.Swap` does.
    finite: whether the values are.
  """

  __slots__ = ("anchor", "finite", "held_from", "references")

  def __init__(self, anchor: Version, held_from: int):
    self.anchor = anchor
    self.held_from = held_from
    self.references: tuple[int, ...] = (held_from,)
    self.finite = True


class Moments:
  """An inner optimizer's state, as a peer sends it.

  Attributes:
    island: whose it is.
    versions: [P], numbers of the global versions it stepped from.
  """

  __slots__ = ("island", "versions")

  def __init__(self, island: int, versions: tuple[int, ...]):
    self.island = island
    self.versions = versions

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


def overlap(left: list[Span], right: list[Span]) -> Span | None:
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
