"""Random times: how long a chip lives, how long its repair takes.

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

  def equilibrium_quantile(
    self, share: np.ndarray, horizon_secs: float
  ) -> np.ndarray:
    """Inverts the time to the next failure of something in service for long.

    Fe(t) = integral of 1 - F over [0, t], divided by the mean; `share` is at
    most `equilibrium_cdf(horizon_secs)`.
    """
    grid = np.linspace(0.0, horizon_secs, _POINTS)
    return np.interp(share, self._equilibrium(grid), grid)

  def equilibrium_cdf(self, secs: float) -> float:
    """Returns Fe(t), the share that fails within `secs` from any moment."""
    return float(self._equilibrium(np.linspace(0.0, secs, _POINTS))[-1])

  def _equilibrium(self, grid: np.ndarray) -> np.ndarray:
    if self.shape == 1 and self.power == 1:
      return -np.expm1(-grid / self.scale_secs)
    survival = 1 - self.cdf(grid)
    steps = np.diff(grid) * (survival[1:] + survival[:-1]) / 2
    return np.concatenate(([0.0], np.cumsum(steps))) / self.mean_secs

  def with_mean(self, mean_secs: float) -> "ExponentiatedWeibull":
    """Returns the same shape stretched to another mean."""
    scale = self.scale_secs * mean_secs / self.mean_secs
    return dataclasses.replace(self, scale_secs=scale)
