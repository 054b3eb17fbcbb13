"""Spans of rows, as the checker of the simulated world counts them."""

import pytest

from diloco.verification import row_ledger, values

# (spans in order, last row asked for) -> first rows that are in none
MISSING = [
  ([], 0, None),
  ([], 3, (0, 3)),
  ([(0, 3)], 3, None),
  ([(0, 2)], 3, (2, 3)),
  ([(0, 2), (4, 6)], 6, (2, 4)),
  ([(0, 2), (4, 6)], 3, (2, 3)),
  ([(0, 2), (4, 6)], 2, None),
  ([(1, 4)], 0, None),
  ([(0, 1), (1, 2), (2, 9)], 5, None),
]


@pytest.mark.parametrize(("spans", "last", "expected"), MISSING)
def test_first_rows_in_no_span(spans, last, expected):
  assert values.missing(spans, last) == expected


def test_staleness_is_the_merges_between_whatever_the_numbers_say():
  def merged(number, parent):
    delta = values.Delta(0, 1, 0, parent, ((number, number + 1),), True)
    return values.Version(0, number, {}, parent, (delta,))

  first = values.Version(0, 0, {})
  second = merged(1, first)
  third = merged(2, second)
  # Set back to the second version, under a new number, and on from there.
  again = values.Version(0, 7, {}, parent=second)
  fourth = merged(8, again)
  for newest, base, behind in (
    (third, third, 0),
    (third, first, 2),
    (fourth, again, 1),
    (fourth, second, 1),
    (fourth, first, 2),
    (fourth, third, 4),  # of a timeline that was given up
  ):
    assert newest.behind(base, most=3) == behind


def test_rows_are_accounted_for_until_the_first_that_is_nowhere():
  ledger = row_ledger.RowLedger(for_good=True)
  delta = values.Delta(0, 1, 0, values.Version(0, 0, {}), ((5, 7),), True)
  ledger.handed_over(delta)
  assert ledger.unaccounted(0, 0, ((0, 3),), (7, 9), 9) == (3, 5)
  ledger.name(0, 0, 3, 5, "too_stale")
  assert ledger.unaccounted(0, 0, ((0, 3),), (7, 9), 9) is None
  ledger.died(0)  # and took what was leaving along
  assert ledger.unaccounted(0, 0, ((0, 3),), (7, 9), 9) == (5, 7)
  assert ledger.unaccounted(0, 0, ((0, 3), (5, 8)), (7, 9), 9) is None
