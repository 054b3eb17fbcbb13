"""Sample efficiency of M islands: what a token is worth against one big job.

From the table of Scaling laws for DiLoCo, arXiv 2503.09799 (C4, 20 tokens a
parameter, H = 30), two fits and an assumption:

    data parallel:  L(N) = a N^-alpha
    M islands:      ln L_M(N) / L_1(N) = beta (log2 M)^delta (N / 1e8)^-gamma
    at fixed N the tokens D count half as much as N and D together,
                    d ln L / d ln D = -alpha / 2

(the last as in Hoffmann et al., arXiv 2203.15556, where the two terms of the
loss balance). A longer period costs too: from H = 30 to 100 the loss grew by
0.68 % (0.31 to 0.85 over six sizes, Eager updates, arXiv 2502.12996, table 6);
taken as linear in ln H, and as nothing below 30. Then

    efficiency = exp(-2 / alpha * ln(L / L_data_parallel))

The table ends at 335M parameters and 8 islands. `mean` follows the fit beyond;
`low` believes no further closing of the gap than at 335M, and the worst period
term; `high` takes the gap for closed, which is what Decoupled DiLoCo reports of
large models (arXiv 2604.21428: benchmarks 64.1 against 64.4), and the best
period term. None of the three is worth more than its first digit.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

SIZES = (35e6, 90e6, 180e6, 335e6)
DATA_PARALLEL = (3.485, 3.167, 2.950, 2.784)
LOSSES = {  # by M
  1: (3.482, 3.162, 2.943, 2.777),
  2: (3.508, 3.182, 2.957, 2.788),
  4: (3.554, 3.213, 2.981, 2.808),
  8: (3.621, 3.265, 3.019, 2.841),
}
MEASURED_ISLANDS = max(LOSSES)
MEASURED_PARAMS = max(SIZES)
MEASURED_EVERY = 100

_TABLE_EVERY = 30
# Of ln L for each unit of ln H beyond that.
_PERIOD = tuple(
  share / math.log(MEASURED_EVERY / _TABLE_EVERY)
  for share in (0.0068, 0.0085, 0.0031)
)


class Interval(NamedTuple):
  """An expectation between two ends, of the meaning its maker states."""

  mean: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Fit:
  """The two fits."""

  alpha: float  # exponent of the data-parallel loss
  beta: float  # gap to one island, for M = 2 and 1e8 parameters
  delta: float  # its growth with log2 M
  gamma: float  # its decay with N

  def gap(self, params: float, islands: int) -> float:
    """Returns ln(L_M / L_1) at N."""
    if islands == 1:
      return 0.0
    size = (params / 1e8) ** -self.gamma
    return self.beta * math.log2(islands) ** self.delta * size


@functools.cache
def fit() -> Fit:
  """Fits the table by least squares on logarithms."""
  sizes = np.log(SIZES)
  alpha = -np.polyfit(sizes, np.log(DATA_PARALLEL), 1)[0]
  rows, gaps = [], []
  for islands, losses in LOSSES.items():
    if islands == 1:
      continue
    for size, loss, one in zip(SIZES, losses, LOSSES[1], strict=True):
      rows.append([1.0, math.log(math.log2(islands)), -math.log(size / 1e8)])
      gaps.append(math.log(math.log(loss / one)))
  beta, delta, gamma = np.linalg.lstsq(rows, gaps, rcond=None)[0].tolist()
  return Fit(float(alpha), math.exp(beta), delta, gamma)


def period_loss(every: int) -> Interval:
  """What a period of H steps adds to ln L."""
  beyond = max(0.0, math.log(every / _TABLE_EVERY))
  return Interval(*(slope * beyond for slope in _PERIOD))


def expected(
  params: float, islands: int, every: int, codec_loss: float = 0.0
) -> Interval:
  """Useful share of a token; above 1 is not believed.

  `codec_loss` is what a codec may add to ln L; the high end has it add nothing.
  """
  found = fit()
  gaps = (
    found.gap(params, islands),
    found.gap(min(params, MEASURED_PARAMS), islands),
    0.0,
  )
  shares = [
    math.exp(-2 / found.alpha * (gap + period + codec))
    for gap, period, codec in zip(
      gaps, period_loss(every), (codec_loss, codec_loss, 0.0), strict=True
    )
  ]
  if islands == 1:
    shares = [1.0] * 3  # nothing is exchanged
  return Interval(*shares)
