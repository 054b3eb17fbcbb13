"""Turns an outer gradient towards the outer momentum where they disagree.

With n and m the outer gradient and the moving average of those before, both of
one tensor, and cos the cosine between them:

    cos >= 0.2      n stays
    cos < 0         n - beta cos |n| m / |m|,  beta = min(-cos conf / 2, 1/2):
                    part of what points back is taken out
    otherwise       |n| u / |u|,  u = (1 - lambda) n / |n| + lambda m / |m|,
                    lambda = min((1 - cos) conf, 1): it is turned

    conf = |n| / (|n| + 3 |m|)

The constants are those of the paper's table 3: HeLoCo, arXiv 2606.00271.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_ALIGNED = 0.2
_SHRINK, _MOST_SHRINK = 0.5, 0.5
_TURN = 1.0
_MOMENTUM_COUNTS = 3.0
_SHORTEST = 1e-30  # shorter vectors have no direction


class Bend(NamedTuple):
  """scale n + lean m, for an outer gradient n and a momentum m."""

  scale: float = 1.0  # of the outer gradient
  lean: float = 0.0  # of the momentum
  dot: float = 0.0  # product of the two, before either is scaled
  square: float = 0.0  # of the momentum's norm

  def length(self, norm: float) -> float:
    """Norm of the whole, from that of the outer gradient."""
    if not self.lean:
      return self.scale * norm
    cross = 2 * self.scale * self.lean * self.dot
    square = (self.scale * norm) ** 2 + cross + self.lean**2 * self.square
    return math.sqrt(max(0.0, square))

  def of_sum(self, part: float) -> Bend:
    """The same, by a vector of which the momentum is this part."""
    return Bend(
      self.scale, self.lean * part, self.dot / part, self.square / part**2
    )


def correct(norm: float, dot: float, square: float, scale: float) -> Bend:
  """How to correct an outer gradient.

  Args:
    norm: of the outer gradient.
    dot: its product with the momentum.
    square: of the momentum's norm.
    scale: what the outer gradient is scaled by before.
  """
  reference = math.sqrt(square)
  if norm * scale < _SHORTEST or reference < _SHORTEST:
    return Bend(scale)
  cosine = min(1.0, max(-1.0, dot / (norm * reference)))
  if cosine >= _ALIGNED:
    return Bend(scale)
  norm *= scale
  confidence = norm / (norm + _MOMENTUM_COUNTS * reference)
  if cosine < 0:
    beta = min(-_SHRINK * cosine * confidence, _MOST_SHRINK)
    return Bend(scale, -beta * cosine * norm / reference, dot, square)
  turn = min(_TURN * (1 - cosine) * confidence, 1.0)
  length = math.sqrt((1 - turn) ** 2 + 2 * turn * (1 - turn) * cosine + turn**2)
  lean = norm * turn / (reference * length)
  return Bend(scale * (1 - turn) / length, lean, dot, square)
