"""Where each row of data went, for every island and fragment.

At the end of a schedule each trained row is merged, waiting in the store, held
by its island, or was given up by somebody who said so and why.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from diloco.simulation.protocol import values


class RowLedger:
  """What was given up, by name."""

  def __init__(self) -> None:
    self.reasons: dict[str, int] = collections.defaultdict(int)
    self._named: dict[tuple[int, int], list[values.Span]] = {}

  def name(
    self, island: int, fragment: int, first: int, last: int, reason: str
  ) -> None:
    """Rows (first, last] will not be merged from here, for this reason."""
    self.reasons[reason] += last - first
    self._named.setdefault((island, fragment), []).append((first, last))

  def unaccounted(
    self,
    island: int,
    fragment: int,
    trained: int,
    accounted: list[values.Span],
  ) -> values.Span | None:
    """First rows of (0, trained] nobody can account for.

    Args:
      island: whose rows.
      fragment: of which fragment.
      trained: last row trained.
      accounted: rows that are merged, waiting or held.
    """
    if (
      len(accounted) == 1
      and accounted[0][0] == 0 < trained <= (accounted[0][1])
    ):
      return None
    named = self._named.get((island, fragment), [])
    return values.missing(values.union([*accounted, *named]), trained)

  def forget_after(self, island: int, steps: Sequence[int]) -> None:
    """An island is set back: what it gave up after that did not happen.

    Args:
      island: which.
      steps: [P], for each fragment the step after which rows are done again.
    """
    for (owner, fragment), spans in self._named.items():
      if owner == island:
        kept = [span for span in spans if span[1] <= steps[fragment]]
        self._named[owner, fragment] = kept
