"""How far the facts of a fragment may be summed up."""

import pytest

from diloco.tape import evidence, fates, folding, ledger

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


def _all_kinds():
  """A fact of each kind of steps (0, 4] and of (4, 8], of version 1 and 2."""
  facts = evidence.FragmentHistory(unsent={1: 2, 2: 6})
  for version, (first, step) in enumerate([(0, 4), (4, 8)], 1):
    loss = evidence.Loss(1, first, step)
    made = {
      kind: evidence.Contribution(f"{kind}{version}", 1, first, step, 40)
      for kind in ("sent", "merged", "refused", "back")
    }
    facts.merged.append(evidence.Merge(version, made["merged"]))
    facts.rolled_back.append(made["back"])
    facts.reinjected.add(made["back"].key)
    for kind in ("sent", "refused"):
      facts.published[made[kind].key] = made[kind]
    # Of its record only the name could be read.
    torn = made["refused"]._replace(first_step=step, step=step)
    facts.discarded.append(("corrupt_record", torn))
    for losses in facts.losses:
      losses.append(loss)
  return facts


def _keys(facts):
  """Which version's facts of each kind there are."""
  return {
    "published": sorted(facts.published),
    "merged": [m.version for m in facts.merged],
    "discarded": [item.key for _, item in facts.discarded],
    "rolled_back": [item.key for item in facts.rolled_back],
    "reinjected": sorted(facts.reinjected),
    "losses": [[loss.step for loss in losses] for losses in facts.losses],
  }


def _of_version(n):
  return {
    "published": [f"refused{n}", f"sent{n}"],
    "merged": [n],
    "discarded": [f"refused{n}"],
    "rolled_back": [f"back{n}"],
    "reinjected": [f"back{n}"],
    "losses": [[4 * n]] * 5,
  }


def test_each_fact_is_below_a_row_or_above_it():
  facts = _all_kinds()
  assert facts.size == 20
  below = facts.part(0, 4)
  assert _keys(below) == _of_version(1) and below.unsent == {1: 2, 2: 4}
  assert _keys(facts.part(4, _FAR)) == _of_version(2)
  facts.keep_above(4, [evidence.Life(n, n, 10, 8) for n in (1, 2, 7)])
  assert _keys(facts) == _of_version(2)
  assert facts.unsent == {1: 4, 2: 6, 7: 7}


def test_rows_of_a_version_are_those_merged_by_then_or_summed_up():
  facts = _all_kinds()
  facts.folded.row = 3
  assert [facts.merged_until(v) for v in (0, 1, 2)] == [3, 4, 8]
  facts.roll_back(1, 3)
  assert [m.version for m in facts.merged] == [1]
  assert facts.rolled_back[-1].key == "merged2"


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
    *(0, 0, 0, {}, 0, 1, {}, {}),
    rows={0: [spans], 1: [{"merged": [(0, 5)]}]},
    folded_rows={"merged": 9, "overwritten": 4, "too_stale": 2},
    **{"violations": [], "silent": []},
  )
  assert book.unmerged_rows() == {"overwritten": 7, "too_stale": 2}


_SENT = evidence.Contribution("key", 1, 0, 6, 60)
_LOST = evidence.Loss(1, 0, 6)


@pytest.mark.parametrize(
  ("facts", "end"),
  [
    ({}, 2),
    ({"submitted": [_LOST]}, 2),  # is on its way
    ({"published": {"key": _SENT}}, 6),
    ({"merged": [evidence.Merge(1, _SENT)]}, 6),
    ({"rolled_back": [_SENT]}, 6),
    ({"discarded": [("not_finite", _SENT)]}, 6),
    ({"dropped": [_LOST]}, 6),
    ({"overwritten": [_LOST]}, 6),
    ({"quarantined": [_LOST]}, 6),
    ({"dropped": [evidence.Loss(2, 0, 6)]}, 2),  # of another life
  ],
)
def test_life_has_told_of_steps_by_whatever_became_of_them(facts, end):
  history = evidence.FragmentHistory(**facts)
  assert fates.told([evidence.Life(1, 2, 10, 9)], history) == {1: end}
