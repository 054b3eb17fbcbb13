"""The times nobody has published, as `diloco simulate --calibrate` found them.

Fitted to the ten single-job cells of Decoupled DiLoCo (arXiv 2604.21428) only;
the command finds them again and tells how sure they are. Repair delays are
drawn, as there, from the exponentiated Weibull distribution, for a time t >= 0:

    F(t) = (1 - exp(-(t / scale)^shape))^power

`shape` 1 and `power` 1 is the exponential distribution, `power` 1 the Weibull.

Reference: Mudholkar and Srivastava, Exponentiated Weibull family for analyzing
bathtub failure-rate data, IEEE Transactions on Reliability 42, 1993.
"""

import dataclasses

import numpy as np

from diloco import errors


@dataclasses.dataclass(frozen=True)
class ExponentiatedWeibull:
  """A distribution of times, in seconds."""

  scale_secs: float  # stretches the time axis
  shape: float = 1.0  # below 1 the hazard falls with age, above 1 it grows
  power: float = 1.0  # below 1 it adds short times, above 1 it takes them away

  def quantile(self, share: np.ndarray) -> np.ndarray:
    """Returns the t with F(t) = share, elementwise; share in [0, 1)."""
    inner = np.asarray(share) ** (1 / self.power)
    return self.scale_secs * (-np.log1p(-inner)) ** (1 / self.shape)

  def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws `size` independent times."""
    return self.quantile(rng.random(size))


@dataclasses.dataclass(frozen=True)
class Times:
  """How long things take, in seconds.

  Attributes:
    repair_scale_secs: of a failed slice's repair delay, an exponentiated
      Weibull. A rigid job trains again after one such delay.
    repair_shape: not identified by the published cells; chosen.
    repair_power: below 1: many repairs are quick, few are long.
    downscale_secs: an elastic job goes on without a slice.
    upscale_secs: an elastic job takes slices in again.
    upscale_wait_secs: longest that a repaired slice waits to be taken in; a
      downscale in the meantime takes it in for nothing.
    restore_secs: on top of the repair, when a job lost all of its state.
    checkpoint_every_secs: between saved states, to which a job goes back that
      lost all of its own; 0: each step.
    checkpoint_secs: that saving one stops the job.
    step_secs: one inner step at speed 1.
  """

  repair_scale_secs: float = 175.4
  repair_shape: float = 2.0
  repair_power: float = 0.3098
  downscale_secs: float = 17.81
  upscale_secs: float = 20.80
  upscale_wait_secs: float = 60.84
  restore_secs: float = 0.0
  checkpoint_every_secs: float = 0.0
  checkpoint_secs: float = 0.0
  step_secs: float = 1.0

  def __post_init__(self) -> None:
    of_repair = ("repair_scale_secs", "repair_shape", "repair_power")
    errors.check_amounts(self)
    errors.check(self, {"above 0": (*of_repair, "step_secs")})
    with np.errstate(over="ignore", divide="ignore"):
      longest = self.repair.quantile(np.array(1 - 1e-9))
    errors.require(
      bool(np.isfinite(longest)),
      f"repair_shape = {self.repair_shape:g}, repair_power ="
      f" {self.repair_power:g}",
      "with these one repair in 1e9 has no end",
      "take a repair_shape that is larger, or a repair_power that is smaller",
    )

  @property
  def repair(self) -> ExponentiatedWeibull:
    """The repair delay of a failed slice."""
    return ExponentiatedWeibull(
      self.repair_scale_secs, self.repair_shape, self.repair_power
    )
