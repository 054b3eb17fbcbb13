"""What is settled for good is summed up, so that a ledger stays small.

A run of a month tells of millions of publications. Up to some row of an
island's fragment everything has its fate and nobody will come back to it: no
life that is yet to begin starts below, nothing waits for a merge, nothing
reaches across. There the facts are cut in two. The part below is painted once,
counted and let go; what is told later is about the part above.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from diloco.tape import evidence, fates

IN_VAIN = (fates.LOST_WITH_ISLAND, fates.REPEATED, fates.ROLLED_BACK)
LIMIT = 128  # facts of an island's fragment, from which on it is tried
_AGAIN = 1.5  # times as many, if it could not be done


def fold(
  lives: list[evidence.Life],
  facts: evidence.FragmentHistory,
  limit: int,
  newest: int,
) -> None:
  """Folds the older half of what is known of an island's fragment.

  Args:
    lives: all lives of the island, also those that are yet to be told of.
    facts: of the fragment; what is settled moves to its `folded`.
    limit: row below which no life that is yet to begin has anything to tell.
    newest: the incarnation that tells now; earlier ones have told all.
  """
  size = facts.size
  told = fates.told(lives, facts)
  seam = _seam(facts, min(limit, told.get(newest, limit)), newest)
  if seam is None or not _settle(lives, facts, seam):
    facts.fold_at = int(size * _AGAIN)
    return
  facts.fold_at = max(LIMIT, int(facts.size * _AGAIN))


def above(lives: Iterable[evidence.Life], row: int) -> list[evidence.Life]:
  """Returns the lives with what they did up to a row cut off."""
  return [
    dataclasses.replace(
      life, start=max(life.start, row), end=max(life.end, row)
    )
    for life in lives
  ]


def _seam(
  facts: evidence.FragmentHistory, limit: int, newest: int
) -> int | None:
  """Returns the last row that nothing told of reaches across, if any.

  It leaves the newer half of the facts, whose tapes may not all be read.
  """
  spans = [(item.first_step, item.step) for item in _items(facts)]
  ends = sorted(last for _, last in spans)
  limit = min(limit, ends[len(ends) // 2])
  resolved = fates.resolved(facts)
  for item in facts.published.values():
    if item.key not in resolved:
      limit = min(limit, item.first_step)
  for merge in facts.merged:
    item = merge.contribution
    if item.key not in facts.published and item.incarnation >= newest:
      limit = min(limit, item.first_step)
  found, reach = None, 0
  spans.sort()
  begun = iter([*spans, (limit + 1, 0)])
  first, last = next(begun)
  for seam in sorted({m.contribution.step for m in facts.merged}):
    if seam > limit:
      break
    while first < seam:  # the one after the last begins beyond all seams
      reach = max(reach, last)
      first, last = next(begun)
    if reach <= seam:
      found = seam
  return found


def _items(
  facts: evidence.FragmentHistory,
) -> Iterator[evidence.Contribution | evidence.Loss]:
  yield from facts.published.values()
  yield from (merge.contribution for merge in facts.merged)
  for _, item in facts.discarded:
    yield facts.published.get(item.key, item)
  yield from facts.rolled_back
  for losses in facts.losses:
    yield from losses


def _settle(
  lives: list[evidence.Life],
  facts: evidence.FragmentHistory,
  seam: int,
) -> bool:
  """Counts all up to the seam and lets it go; False if it has no fate yet."""
  below = [
    dataclasses.replace(
      life, start=min(life.start, seam), end=min(life.end, seam)
    )
    for life in above(lives, facts.folded.row)
  ]
  told = fates.told(lives, facts)  # by what is above, too
  unsent = {life: min(step, seam) for life, step in told.items()}
  part = dataclasses.replace(facts.part(0, seam), unsent=unsent)
  canvas = fates.Canvas(below, part)
  counts, rows = canvas.counts(), canvas.rows()
  if {fates.UNACCOUNTED, fates.PENDING} & {*counts, *rows}:
    return False
  folded = facts.folded
  folded.counts += counts
  for fate, spans in rows.items():
    folded.rows[fate] += sum(last - first for first, last in spans)
  for fate in IN_VAIN:
    folded.in_vain += canvas.spans(fate)
  folded.violations += canvas.violations()
  folded.violations += fates.never_told(lives, facts, seam)
  folded.version = max([folded.version, *(m.version for m in part.merged)])
  folded.row = seam
  facts.keep_above(seam, lives)
  return True
