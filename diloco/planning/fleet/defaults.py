"""The times nobody has published, as `calibrate` found them.

Fitted to the ten single-job cells of Decoupled DiLoCo (arXiv 2604.21428) only;
`python -m diloco.planning.fleet.calibrate` finds them again and tells how
sure they are.
"""

import dataclasses

from diloco.planning.fleet import delays
from diloco.planning.fleet import fleet as fleet_lib


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
    checkpoint_every_secs: between saved states of a rigid job; 0: each step.
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
    fleet_lib.require_amounts(self, (*of_repair, "step_secs"))

  @property
  def repair(self) -> delays.ExponentiatedWeibull:
    """The repair delay of a failed slice."""
    return delays.ExponentiatedWeibull(
      self.repair_scale_secs, self.repair_shape, self.repair_power
    )
