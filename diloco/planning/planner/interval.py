"""A figure and how sure it is."""

from typing import NamedTuple


class Interval(NamedTuple):
  """An expectation between two ends, of the meaning its maker states."""

  mean: float
  low: float
  high: float
