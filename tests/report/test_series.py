"""Series in bounded room."""

import math

import numpy as np
import pytest

from diloco.report import series

JOINS = {"at": "last", "size": "sum", "most": "max", "least": "min"}


@pytest.fixture
def small(monkeypatch):
  monkeypatch.setattr(series, "LIMIT", 8)


def _filled(count):
  made = series.Series(JOINS)
  for n in range(count):
    made.append({"at": n, "size": 1, "most": n, "least": n})
  return made


def test_few_rows_are_kept_as_they_are(small):
  made = _filled(7)
  assert made.column("at").tolist() == list(range(7))
  assert made.column("count").tolist() == [1] * 7


@pytest.mark.parametrize("count", [8, 9, 100, 1001])
def test_many_rows_become_groups_of_neighbours(small, count):
  made = _filled(count)
  assert len(made) <= 8
  counts = made.column("count").astype(int)
  ends = np.cumsum(counts) - 1
  assert counts.sum() == made.column("size").sum() == count
  assert made.column("at").tolist() == ends.tolist()
  assert made.column("most").tolist() == ends.tolist()
  assert made.column("least").tolist() == (ends - counts + 1).tolist()


def test_what_is_not_known_is_not_taken_for_a_number(small):
  made = series.Series(JOINS)
  for n in range(16):
    value = n if n % 4 == 0 else math.nan
    made.append({"at": n, "size": value, "most": value, "least": value})
  assert np.nansum(made.column("size")) == 24
  assert np.nanmax(made.column("most")) == 12
