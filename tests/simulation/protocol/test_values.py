"""Spans of rows, as the checker of the simulated world counts them."""

import pytest

from diloco.simulation.protocol import values

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
