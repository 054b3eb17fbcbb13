"""Paint over lines of steps: which ranges are covered, by what, how often.

A line holds cells between points; the ranges put on it decide the points. Time
and space grow with the number of ranges, not of steps.
"""

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from diloco.tape import evidence

UNPAINTED = "unaccounted"
Span = tuple[int, int]  # steps (first, last], open on the left


class LifeSpan(NamedTuple):
  """Steps (first, last] as one incarnation did them."""

  incarnation: int
  first: int
  last: int


class Axis:
  """All that was done on one line: the lives of an island end to end."""

  def __init__(self, lives: Sequence[evidence.Life]):
    self._lives = lives
    lengths = [life.end - life.start for life in lives]
    self._begins = [0, *itertools.accumulate(lengths)]
    self._index = {life.incarnation: i for i, life in enumerate(lives)}

  def span(self, life: evidence.Life) -> Span:
    """Returns where a life lies."""
    begin = self._begins[self._index[life.incarnation]]
    return begin, begin + life.end - life.start

  def place(self, spans: Iterable[LifeSpan]) -> list[Span]:
    """Returns where step ranges lie, each with the life that did them."""
    placed: list[Span] = []
    for incarnation, first, last in spans:
      left = [(first, last)]
      for i in range(self._last_life(incarnation), -1, -1):
        if not left:
          break
        life, begin = self._lives[i], self._begins[i]
        for first, last in left:
          low, high = max(first, life.start), min(last, life.end)
          if low < high:
            shift = begin - life.start
            placed.append((low + shift, high + shift))
        left = difference(left, [(life.start, life.end)])
    return placed

  def _last_life(self, incarnation: int) -> int:
    """Index of an incarnation, of the one before it if it left no tape."""
    if incarnation in self._index:
      return self._index[incarnation]
    return sum(life.incarnation < incarnation for life in self._lives) - 1

  def find(self, spans: Iterable[Span]) -> list[LifeSpan]:
    """Returns the steps that lie in `spans`."""
    found = []
    for first, last in spans:
      for life, begin in zip(self._lives, self._begins, strict=False):
        low = max(first, begin)
        high = min(last, begin + life.end - life.start)
        if low < high:
          shift = life.start - begin
          found.append(LifeSpan(life.incarnation, low + shift, high + shift))
    return found


class Painting:
  """Coats of paint over a line of steps."""

  def __init__(
    self,
    coats: Sequence[tuple[str, Sequence[Span]]],
    trained: Sequence[tuple[Span, int]],
  ):
    """Takes fates, weakest first, and what was trained with tokens a step."""
    arrays = [(fate, _array(spans)) for fate, spans in coats]
    ranges = _array([span for span, _ in trained])
    self._points = np.unique(
      np.concatenate([ranges.ravel(), *(spans.ravel() for _, spans in arrays)])
    )
    self.names = [UNPAINTED, *dict.fromkeys(fate for fate, _ in coats)]
    cells = max(len(self._points) - 1, 0)
    self._fates = np.zeros(cells, np.int64)  # indices into names
    for fate, spans in arrays:
      self._fates[self._times(spans) > 0] = self.names.index(fate)
    self._tokens = np.zeros(cells, np.int64)  # per step; 0 is not trained
    for (_, tokens), span in zip(trained, ranges, strict=True):
      self._tokens[self._times(span[None]) > 0] = tokens

  def _times(self, spans: np.ndarray) -> np.ndarray:
    """Returns how often `spans` cover each cell between two points."""
    bounds = np.searchsorted(self._points, spans)
    size = len(self._points)
    opened = np.bincount(bounds[:, 0], minlength=size)
    closed = np.bincount(bounds[:, 1], minlength=size)
    return np.cumsum(opened - closed)[:-1]

  def counts(self) -> collections.Counter[str]:
    """Returns the tokens of every fate that has any."""
    weights = np.diff(self._points) * self._tokens
    fates = enumerate(self.names)
    sums = {name: int(weights[self._fates == i].sum()) for i, name in fates}
    return collections.Counter({n: count for n, count in sums.items() if count})

  def spans(self, fate: str) -> list[Span]:
    """Returns the trained step ranges with this fate."""
    if fate not in self.names:
      return []
    mask = (self._fates == self.names.index(fate)) & (self._tokens > 0)
    return self._joined(mask)

  def covered(
    self, spans: Sequence[Span], times: int, *, trained: bool | None = None
  ) -> list[Span]:
    """Returns what a coat covers so often; `trained` or not, if it matters."""
    mask = self._times(_array(spans)) >= times
    if trained is not None:
      mask &= (self._tokens > 0) == trained
    return self._joined(mask)

  def _joined(self, mask: np.ndarray) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    bounds = self._points[edges].reshape(-1, 2).tolist()
    return [(first, last) for first, last in bounds]


def difference(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
  """Returns the parts of `spans` that lie in none of `others`."""
  left = list(spans)
  for low, high in others:
    cut = [(first, min(last, low)) for first, last in left]
    cut += [(max(first, high), last) for first, last in left]
    left = [(first, last) for first, last in cut if first < last]
  return left


def _array(spans: Sequence[Span]) -> np.ndarray:
  return np.array(spans, np.int64).reshape(-1, 2)
