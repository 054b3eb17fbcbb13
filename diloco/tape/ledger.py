"""The token ledger: one fate for every trained token, and proof of it.

A step belongs to all P fragments, and each fragment of it has a fate of its
own (`diloco.tape.fates`), so the ledger counts *fragment-tokens*: tokens of a
step, once for each fragment. A step done twice, because its island died, counts
twice.

Beside it stands the ledger of *rows*: of each row of an island's data, whether
it is merged, and under which name it is not. A row is a step's number, however
often the step was done.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from diloco.tape import evidence, fates, folding, painting, reader
from diloco.tape import history as history_lib

_MAX_VIOLATIONS = 100
# Times H. An island publishes at its first grid point, at most H steps after it
# began; one whose publications nobody answers waits another four times H.
_PATIENCE = 8


@dataclasses.dataclass(frozen=True)
class Counts:
  """Tokens by fate: trained = merged + pending + discarded + unaccounted.

  Attributes:
    trained: all of them.
    merged: in a global version.
    pending: published and not resolved, or not published yet.
    discarded: by reason.
    unaccounted: without evidence of a fate; 0 in a correct run.
  """

  trained: int
  merged: int
  pending: int
  discarded: dict[str, int]
  unaccounted: int


@dataclasses.dataclass(frozen=True)
class Ledger(Counts):
  """Fates in fragment-tokens, and what else there is to tell of them.

  Attributes:
    num_fragments: P, the fragments of every step.
    islands: trained plain tokens by island.
    lost_spans: by island, step ranges whose training was in vain, because it
      was lost, done again or rolled back; one entry for each fragment.
    rows: by island, for each fragment ranges of rows by fate, of those that
      are not summed up yet; what is not "merged" there never was.
    folded_rows: number of the other rows by fate, once per fragment.
    violations: what must not happen and did, in words.
    silent: fragments that an island has not handed out for longer than it
      would if the store answered, in words.
  """

  num_fragments: int
  islands: dict[int, int]
  lost_spans: dict[int, list[painting.LifeSpan]]
  rows: dict[int, list[dict[str, list[painting.Span]]]]
  folded_rows: dict[str, int]
  violations: list[str]
  silent: list[str]

  def unmerged_rows(self) -> dict[str, int]:
    """Returns rows that no version holds, by reason, once per fragment."""
    counts = collections.Counter(self.folded_rows)
    for spans_by_fate in itertools.chain(*self.rows.values()):
      for fate, spans in spans_by_fate.items():
        counts[fate] += sum(last - first for first, last in spans)
    counts.pop(fates.MERGED, None)
    return dict(counts)

  @property
  def balanced(self) -> bool:
    """Whether every trained token has a fate and no rule was broken."""
    return not self.unaccounted and not self.violations

  def tokens(self) -> Counts:
    """Returns plain tokens, which add up to the last token."""
    shares = {
      fates.MERGED: self.merged,
      fates.PENDING: self.pending,
      fates.UNACCOUNTED: self.unaccounted,
      **{"-" + reason: count for reason, count in self.discarded.items()},
    }
    parts = _divide(shares, self.num_fragments)
    return Counts(
      trained=self.trained // self.num_fragments,
      merged=parts.pop(fates.MERGED),
      pending=parts.pop(fates.PENDING),
      unaccounted=parts.pop(fates.UNACCOUNTED),
      discarded={name[1:]: count for name, count in parts.items()},
    )


def compute(
  record: reader.Record, num_fragments: int = 1, every: int = 0
) -> Ledger:
  """Assigns every trained step of every fragment and island one fate.

  Args:
    record: all tapes and metric logs of a run, live, crashed or finished.
    num_fragments: P, for a record too short to show every fragment.
    every: H, to find islands that do not publish; 0 if it is not known.
  """
  return balance(history_lib.read(record), num_fragments, every)


def balance(
  history: history_lib.History, num_fragments: int = 1, every: int = 0
) -> Ledger:
  """As `compute`, of a history that was taken line by line."""
  num_fragments = max(num_fragments, history.num_fragments)
  violations = history.violations
  totals, folded_rows = collections.Counter[str](), collections.Counter[str]()
  islands: dict[int, int] = {}
  lost: dict[int, list[painting.LifeSpan]] = {}
  rows: dict[int, list[dict[str, list[painting.Span]]]] = {}
  silent: list[str] = []
  for island in history.islands:
    lives = history.lives_of(island)
    violations += _skipped(island, lives)
    counts = collections.Counter[str]()
    for fragment in range(num_fragments):
      facts = history.fragments.get(
        (island, fragment), evidence.FragmentHistory()
      )
      folded = facts.folded
      canvas = fates.Canvas(folding.above(lives, folded.row), facts)
      counts += canvas.counts() + folded.counts
      for fate in folding.IN_VAIN:
        lost.setdefault(island, []).extend(canvas.spans(fate))
      lost[island] += itertools.starmap(painting.LifeSpan, folded.in_vain)
      rows.setdefault(island, []).append(canvas.rows())
      folded_rows += folded.rows
      where = f"island {island}, fragment {fragment}"
      found = [*folded.violations, *canvas.violations()]
      found += fates.never_told(lives, facts)
      violations += [f"{where}: {text}" for text in found]
      never, late = _overdue(lives, facts, _PATIENCE * every)
      violations += [f"{where}: {text}" for text in never]
      silent += [f"{where}: {text}" for text in late]
    islands[island] = sum(counts.values()) // num_fragments
    totals += counts
  if len(violations) > _MAX_VIOLATIONS:
    more = len(violations) - _MAX_VIOLATIONS
    violations = [*violations[:_MAX_VIOLATIONS], f"and {more} more"]
  return Ledger(
    num_fragments=num_fragments,
    trained=totals.total(),
    merged=totals.pop(fates.MERGED, 0),
    pending=totals.pop(fates.PENDING, 0),
    unaccounted=totals.pop(fates.UNACCOUNTED, 0),
    discarded=dict(sorted(totals.items())),
    islands=islands,
    lost_spans=lost,
    rows=rows,
    folded_rows=folded_rows,
    violations=violations,
    silent=silent,
  )


def _overdue(
  lives: list[evidence.Life],
  facts: evidence.FragmentHistory,
  allowed: int,
) -> tuple[list[str], list[str]]:
  """Tells of lives that kept more than `allowed` steps to themselves.

  First those that never handed the fragment out, which breaks the protocol;
  then those that a store which does not answer explains as well.
  """
  never: list[str] = []
  late: list[str] = []
  for life in lives:
    last = facts.handed.get(life.incarnation, life.start)
    end = life.end if life.untold_from is None else life.untold_from
    if allowed and end - last > allowed:
      text = (
        f"steps ({last}, {end}] of incarnation {life.incarnation} were"
        f" never handed out, and {allowed} are many"
      )
      (late if life.incarnation in facts.handed else never).append(text)
  return never, late


def _skipped(island: int, lives: list[evidence.Life]) -> Iterable[str]:
  """Yields rows that were passed over: no life did their steps."""
  reached = 0
  for life in sorted(lives, key=lambda life: (life.start, life.end)):
    if life.start > reached:
      yield (
        f"island {island}: rows ({reached}, {life.start}] were skipped, before"
        f" incarnation {life.incarnation} began"
      )
    reached = max(reached, life.end)


def _divide(shares: Mapping[str, int], divisor: int) -> dict[str, int]:
  """Divides shares by `divisor`, rounded so that the sum is exact."""
  parts = {name: share // divisor for name, share in shares.items()}
  missing = sum(shares.values()) // divisor - sum(parts.values())
  by_remainder = sorted(shares, key=lambda name: -(shares[name] % divisor))
  for name in by_remainder[:missing]:
    parts[name] += 1
  return parts
