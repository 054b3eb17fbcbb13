"""Whether a cut is one moment of one run, by what is in it.

After Lai and Yang (1987): nothing that was received before a cut was sent after
it. Here that is read off the values. A part of an island is seen when it is
taken, and whatever is handed over or committed has a moment of its own. No
stamp is looked at.

Reference: Lai and Yang, On distributed snapshots, Information Processing
Letters 25, 1987.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from diloco.verification import row_ledger, values


class Taken(NamedTuple):
  """An island's part of a cut, as its values were."""

  moment: int  # when it was taken
  step: int  # inner steps done
  held_from: tuple[int, ...]  # [P], rows after this were in its values
  anchors: tuple[values.Version, ...]  # [P], versions it had adopted


class CutJudge:
  """Remembers parts of cuts, and judges cuts."""

  def __init__(
    self,
    versions: Sequence[Sequence[values.Version]],
    ledger: row_ledger.RowLedger,
  ):
    self._versions = versions
    self._ledger = ledger
    self._taken: dict[tuple[int, int, int], Taken] = {}

  def take(self, cut: int, island: Any, moment: int) -> None:
    """An island takes its part."""
    held = island.fragments
    self._taken[cut, island.index, island.life.incarnation] = Taken(
      moment,
      island.core.step,
      tuple([h.held_from for h in held]),
      tuple([h.anchor for h in held]),
    )

  def judge(
    self,
    parts: Any,
    sent: dict[str, values.Delta],
    unlisted: Collection[str] = (),
  ) -> str:
    """Why a cut is no moment of the run; empty if it is.

    It may lack what no listing had for a while, `unlisted`: then its island
    does those rows again.
    """
    heads = [self._versions[h.fragment][h.version] for h in parts.heads]
    channel = [sent[record.key] for record in parts.contributions]
    unseen = [sent[key] for key in unlisted if key in sent]
    for island, part in parts.islands.items():
      taken = self._taken.get((parts.request.cut, island, part.incarnation))
      if taken is None or taken.step != part.step:
        return f"island {island} never took the part that is in it"
      for fragment, head in enumerate(heads):
        why = _too_late(island, taken, fragment, head)
        why = why or self._missing(
          island, taken, fragment, head, [*channel, *unseen]
        )
        if why:
          return why
      for content in channel:
        if content.island == island and content.sent > taken.moment:
          return f"{content} were sent after the part of their island"
    for content in channel:
      newest = heads[content.fragment]
      if content in _merged_since(newest, 0):
        return f"{content} are on their way, and merged in {newest.number}"
    return ""

  def _missing(
    self,
    island: int,
    taken: Taken,
    fragment: int,
    head: values.Version,
    channel: Sequence[values.Delta],
  ) -> str:
    """Rows trained before the part that are nowhere in the cut."""
    merged = head.rows.get(island, ())
    accounted = [(taken.held_from[fragment], taken.step), *merged]
    for content in channel:
      if (content.island, content.fragment) == (island, fragment):
        accounted += content.spans
    accounted += self._ledger.named(island, fragment)
    lost = values.missing(values.union(accounted), taken.step)
    if lost is None:
      return ""
    return (
      f"rows {lost[0] + 1} to {lost[1]} of island {island} are in no part for"
      f" fragment {fragment}"
    )


def _too_late(
  island: int, taken: Taken, fragment: int, head: values.Version
) -> str:
  """What is in the heads and was sent after the island's part, or adopted."""
  for content in _merged_since(head, taken.moment):
    if content.island == island and content.sent > taken.moment:
      return f"{content} are merged in {head.number}, sent after its part"
  anchor = taken.anchors[fragment]
  behind = head.number - anchor.number
  if behind < 0 or head.behind(anchor, behind) > behind:
    return (
      f"island {island} had adopted version {anchor.number} of fragment"
      f" {fragment}, its head is {head.number}"
    )
  return ""


def _merged_since(head: values.Version, moment: int) -> list[values.Delta]:
  """Contributions merged into a version after a moment."""
  found: list[values.Delta] = []
  version: values.Version | None = head.merge
  while version is not None and version.moment > moment:
    found += version.added
    version = version.parent and version.parent.merge
  return found
