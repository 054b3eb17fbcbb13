"""How far the facts of a fragment may be summed up."""

import pytest

from diloco.tape import evidence, folding, ledger

_FAR = 1 << 62


def merged(steps, untold=(), incarnation=2):
  """Steps merged one by one; the tape tells of all publications but some."""
  facts = evidence.FragmentHistory()
  for n in range(steps):
    item = evidence.Contribution(f"key-{n}", incarnation, n, n + 1, 10)
    facts.merged.append(evidence.Merge(n + 1, item))
    if n not in untold:
      facts.published[item.key] = item
  return facts


@pytest.mark.parametrize(
  ("untold", "newest", "limit", "row"),
  [
    ((), 2, _FAR, 21),  # the newer half may be told of yet
    ((5,), 2, _FAR, 5),  # the life that tells has not told all
    ((), 3, _FAR, 8),  # it goes on from there, and has told nothing yet
    ((5,), 4, _FAR, 21),  # it has: the line was lost with it
    ((), 2, 7, 7),  # a life that is yet to begin goes back so far
  ],
)
def test_only_what_nobody_will_tell_of_is_summed_up(untold, newest, limit, row):
  facts = merged(40, untold)
  lives = [
    evidence.Life(1, 0, 10, 0),
    evidence.Life(2, 0, 10, 40),
    evidence.Life(3, 8, 10, 8),
    evidence.Life(4, 40, 10, 40),
  ]
  folding.fold(lives, facts, limit, newest)
  assert facts.folded.row == row
  assert facts.folded.counts == {"merged": 10 * row}
  assert facts.folded.rows == {"merged": row}
  assert not facts.folded.violations
  assert min(m.contribution.first_step for m in facts.merged) == row


def test_what_waits_for_a_merge_is_not_summed_up():
  facts = merged(40)
  waiting = facts.merged.pop(8).contribution
  folding.fold([evidence.Life(2, 0, 10, 40)], facts, _FAR, 2)
  assert facts.folded.row == 8 and waiting.key in facts.published


def test_merge_that_its_life_never_told_of_is_told_of_when_summed_up():
  facts = merged(40, untold=(5,))
  facts.told[2] = 40  # so it wrote its lines, and none of this one
  folding.fold([evidence.Life(2, 0, 10, 40)], facts, _FAR, 3)
  assert facts.folded.row == 21
  assert facts.folded.violations == [
    "steps (5, 6] merged in version 6 were never published"
  ]


def test_rows_that_no_version_holds_are_counted_whether_summed_up_or_not():
  spans = {"merged": [(9, 12)], "overwritten": [(12, 14), (20, 21)]}
  book = ledger.Ledger(
    *(1, 0, 0, 0, {}, 0, {}, {}),
    rows={0: [spans], 1: [{"merged": [(0, 5)]}]},
    folded_rows={"merged": 9, "overwritten": 4, "too_stale": 2},
    **{"violations": [], "silent": []},
  )
  assert book.unmerged_rows() == {"overwritten": 7, "too_stale": 2}
