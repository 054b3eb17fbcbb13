"""What merges of the simulated world compute, and what they should.

Every contribution is a pair of numbers that follows from what it is: its length
from its steps and its island, its direction from its island and fragment. Every
version is a pair too. So the checker can say from the contributions alone what
a version must be: with its own weights, from tokens, steps and the number of
merges that really lie between.

    weight = tokens^2 / steps * 0.9^staleness, or in every other schedule
    weight = tokens^2 / steps / (1 + staleness / 9)

Nothing here is taken from the code that is checked. In one of sixteen schedules
the merge itself is the production one.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from diloco.syncer import merge as merge_lib
from diloco.syncer import outer_optimizer, sources
from diloco.verification import values

DECAY = 0.9  # of weights, for the first version of staleness
LEARNING_RATE = 0.5  # of the outer step
_REAL_EVERY = 16  # of so many schedules one merges with the production code
_TREND = 0.98  # norms shrink from step to step, as in a real run
_TOLERANCE = 1e-9
_REAL_TOLERANCE = 1e-4  # float32


def tokens_per_step(island: int) -> int:
  """Islands differ in their batches."""
  return 1 + island % 3


@functools.cache
def length(island: int, first_step: int, step: int) -> float:
  """L2 norm of a sound contribution."""
  steps = step - first_step
  return (1.0 + 0.3 * island) * math.sqrt(steps) * _TREND**step


@functools.cache
def _direction(island: int, fragment: int) -> values.Vector:
  angle = 0.7 * island + 0.4 * fragment
  return math.cos(angle), math.sin(angle)


def merged(
  parent: values.Vector,
  contents: Sequence[values.Delta],
  weights: Sequence[float],
  method: str,
) -> values.Vector:
  """Parameters after a merge and an outer step."""
  if method == "median":
    x, y = _median(contents, weights)
    return parent[0] - LEARNING_RATE * x, parent[1] - LEARNING_RATE * y
  total = sum(weights)
  x = y = radius = 0.0
  for content, weight in zip(contents, weights, strict=True):
    share, size = weight / total, content.norm
    along = _direction(content.island, content.fragment)
    radius += share * size
    share *= size if method == "mean" else 1.0
    x += share * along[0]
    y += share * along[1]
  scale = LEARNING_RATE
  if method != "mean":
    # Directions differ by less than half a turn: they never cancel.
    scale *= radius / math.hypot(x, y)
  return parent[0] - scale * x, parent[1] - scale * y


def _median(
  contents: Sequence[values.Delta], weights: Sequence[float]
) -> values.Vector:
  """By coordinate: halfway between those on either side of half the weight."""
  half = sum(weights) / 2
  found = []
  for axis in (0, 1):
    line = sorted(
      (c.norm * _direction(c.island, c.fragment)[axis], weight)
      for c, weight in zip(contents, weights, strict=True)
    )
    reached = list(itertools.accumulate(weight for _, weight in line))
    low = bisect.bisect_left(reached, half * (1 - _TOLERANCE))
    high = bisect.bisect_left(reached, half * (1 + _TOLERANCE))
    found.append((line[low][0] + line[high][0]) / 2)
  return found[0], found[1]


def is_real(seed: int) -> bool:
  """Whether a schedule merges with the production code."""
  return seed % _REAL_EVERY == 0


def really_merged(
  parent: values.Vector,
  contents: Sequence[values.Delta],
  weights: Sequence[float],
  method: Any,
) -> values.Vector:
  """As `merged`, by `diloco.syncer.merge`."""
  theta = np.array(parent, np.float32)
  inputs = []
  for content, weight in zip(contents, weights, strict=True):
    size = content.norm
    x, y = _direction(content.island, content.fragment)
    vector = np.array((size * x, size * y), np.float32)
    source = sources.MemorySource(vector)
    inputs.append(merge_lib.Input(source, weight, size))
  outer = outer_optimizer.OuterOptimizer(LEARNING_RATE, 0.0)
  merge_lib.Merger(outer).apply(inputs, method, theta, ())
  return float(theta[0]), float(theta[1])


def is_hyperbolic(seed: int) -> bool:
  """Whether weights of a schedule decay so, and not exponentially."""
  return seed % 2 == 1


def expected_weights(
  contents: Sequence[values.Delta], staleness: Sequence[int], seed: int
) -> list[float]:
  """Weights by what the contributions are."""
  found = []
  for content, behind in zip(contents, staleness, strict=True):
    first_step, step = content.spans[0]
    tokens = tokens_per_step(content.island) * (step - first_step)
    decay = 1 / (1 + behind / 9) if is_hyperbolic(seed) else DECAY**behind
    found.append(tokens * tokens / (step - first_step) * decay)
  return found


def is_close(
  found: values.Vector, right: values.Vector, parent: values.Vector, real: bool
) -> bool:
  """Whether a merge is as it must be, up to rounding."""
  tolerance = _REAL_TOLERANCE if real else _TOLERANCE
  size = math.hypot(right[0] - parent[0], right[1] - parent[1])
  size += math.hypot(*parent) if real else 0.0
  error = math.hypot(found[0] - right[0], found[1] - right[1])
  return error <= tolerance * size
