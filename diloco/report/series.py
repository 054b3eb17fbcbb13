"""Columns of numbers in bounded room, however long the run.

A *series* has a row for each thing that happened, until there are too many;
then every two neighbours are joined into one row, and later ones join as many
as that row stands for. So a run of a day is kept step by step, and one of a
month in groups of steps. How two values become one is said for each column.
"""

import array
import collections
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

Join = Literal["last", "sum", "max", "min"]

LIMIT = 1 << 13  # rows at which neighbours are joined
_RECENT = 256


class Series:
  """Rows of numbers; what is not known is not a number."""

  def __init__(self, joins: Mapping[str, Join]):
    """Starts without rows; `joins`: how two values of a column become one."""
    self.joins = {**joins, "count": "sum"}
    self.limit = LIMIT
    self.stride = 1  # of what was appended, in a full row
    self.columns = {name: array.array("d") for name in self.joins}

  def append(self, row: Mapping[str, float]) -> None:
    """Adds what happened once; `row` has all columns."""
    values = {"count": 1.0, **row}
    if not len(self) or self.columns["count"][-1] >= self.stride:
      for name, column in self.columns.items():
        column.append(values[name])
    else:
      for name, column in self.columns.items():
        column[-1] = _join(self.joins[name], column[-1], values[name])
    if len(self) >= self.limit and self.columns["count"][-1] >= self.stride:
      self._halve()

  def _halve(self) -> None:
    for name, column in self.columns.items():
      whole, join = len(column) // 2 * 2, self.joins[name]
      pairs = zip(column[0:whole:2], column[1:whole:2], strict=True)
      joined = (_join(join, *pair) for pair in pairs)
      self.columns[name] = array.array("d", [*joined, *column[whole:]])
    self.stride *= 2

  def __len__(self) -> int:
    return len(self.columns["count"])

  def column(self, name: str) -> np.ndarray:
    """Returns a column as a copy."""
    return np.array(self.columns[name])


def _join(join: Join, before: float, after: float) -> float:
  if math.isnan(after):
    return before
  if math.isnan(before) or join == "last":
    return after
  if join == "sum":
    return before + after
  return max(before, after) if join == "max" else min(before, after)


class Amounts:
  """Amounts over time: their sum, the last ones, and a series."""

  def __init__(self) -> None:
    self.total: float = 0
    self.recent: collections.deque[tuple[float, float]] = collections.deque(
      maxlen=_RECENT
    )
    self.series = Series({"wall_secs": "last", "amount": "sum"})

  def add(self, wall_secs: float, amount: float) -> None:
    """Takes one."""
    self.total += amount
    self.recent.append((wall_secs, amount))
    self.series.append({"wall_secs": wall_secs, "amount": amount})
