"""Random times: how long the repair of a slice takes.

The exponentiated Weibull distribution, for a time t >= 0:

    F(t) = (1 - exp(-(t / scale)^shape))^power

`shape` 1 and `power` 1 is the exponential distribution, `power` 1 the Weibull.

Reference: Mudholkar and Srivastava, Exponentiated Weibull family for analyzing
bathtub failure-rate data, IEEE Transactions on Reliability 42, 1993; Decoupled
DiLoCo (arXiv 2604.21428) draws repair delays from it.
"""

import dataclasses
import functools

import numpy as np

_POINTS = 8192


@dataclasses.dataclass(frozen=True)
class ExponentiatedWeibull:
  """A distribution of times, in seconds."""

  scale_secs: float  # stretches the time axis
  shape: float = 1.0  # below 1 the hazard falls with age, above 1 it grows
  power: float = 1.0  # below 1 it adds short times, above 1 it takes them away

  def cdf(self, secs: np.ndarray) -> np.ndarray:
    """Returns F(t), elementwise."""
    inner = -np.expm1(-((np.asarray(secs) / self.scale_secs) ** self.shape))
    return inner**self.power

  def quantile(self, share: np.ndarray) -> np.ndarray:
    """Returns the t with F(t) = share, elementwise; share in [0, 1)."""
    inner = np.asarray(share) ** (1 / self.power)
    return self.scale_secs * (-np.log1p(-inner)) ** (1 / self.shape)

  def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws `size` independent times."""
    return self.quantile(rng.random(size))

  @functools.cached_property
  def mean_secs(self) -> float:
    """The mean: 1 - F, summed up to where next to nothing of it is left."""
    end = float(self.quantile(np.array(1 - 1e-12)))
    grid = np.concatenate(([0.0], np.geomspace(end * 1e-9, end, 4 * _POINTS)))
    return float(np.trapezoid(1 - self.cdf(grid), grid))
