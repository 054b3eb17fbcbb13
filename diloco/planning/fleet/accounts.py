"""Where a job's allocated time goes: useful, or lost by cause.

downscale   going on without slices that failed
upscale     taking slices in again, or extra capacity in or out
recovery    a rigid job waits for the repair
outage      too few slices are left to train on
repair      slices out of service while the job trains without them
rejoin      repaired slices that wait to be taken in
lost_work   steps since the last saved state, trained in vain
checkpoint  stops for saving state
"""

import dataclasses

import numpy as np

from diloco.planning.fleet import defaults

LOSSES = (
  *("downscale", "upscale", "recovery", "outage"),
  *("repair", "rejoin", "lost_work", "checkpoint"),
)
DOWNSCALE, UPSCALE, RECOVERY, OUTAGE = range(4)
_REPAIR, _REJOIN, _LOST, _SAVING = range(4, 8)


@dataclasses.dataclass
class History:
  """What became of a job.

  Attributes:
    useful: slice-seconds of training that counts.
    allocated: slice-seconds.
    losses: [len(LOSSES)] slice-seconds; with `useful` they add up to
      `allocated`.
    pauses: (start, end, cause) of stretches without training, in order.
    sizes: (seconds, active slices), one for each pause that ended.
    start_secs: when the job began.
    end_secs: when it ended.
    interruptions: failures that stopped it.
    coalesced: failures that joined a pause or met a slice that was out.
  """

  useful: float
  allocated: float
  losses: np.ndarray
  pauses: list[tuple[float, float, int]]
  sizes: list[tuple[float, int]]
  start_secs: float
  end_secs: float
  interruptions: int
  coalesced: int

  @property
  def goodput(self) -> float:
    """Useful share of the allocated time."""
    return self.useful / self.allocated


class Account:
  """Divides the time of a job, whatever the rules of pausing."""

  def __init__(
    self,
    times: defaults.Times,
    slices: int,
    start_secs: float,
    end_secs: float,
  ):
    """Starts with all slices active, at `start_secs`."""
    self._times = times
    self._start = self._now = start_secs
    self._end = end_secs
    self._present = self._active = slices
    self._idle = 0  # repaired, not taken in
    self._losses = [0.0] * len(LOSSES)
    self._useful = self._allocated = 0.0
    self._pauses: list[tuple[float, float, int]] = []
    self._sizes: list[tuple[float, int]] = []
    self._paused_at: float | None = None
    self._cause = 0
    self._trained_from = self._now  # since the last pause
    self._interruptions = self._coalesced = 0

  def _advance(self, now: float) -> None:
    span, self._now = now - self._now, now
    self._allocated += span * self._present
    if self._paused_at is not None:
      self._losses[self._cause] += span * self._present
      return
    self._useful += span * self._active
    self._losses[_REJOIN] += span * self._idle
    self._losses[_REPAIR] += span * (self._present - self._active - self._idle)

  def _stop(self, cause: int, unit_secs: float) -> None:
    """Pauses training; what is not saved each `unit_secs` is lost, 0: none."""
    assert self._paused_at is None
    trained = self._now - self._trained_from
    saving = self._times.checkpoint_secs
    if saving:
      cycle = (self._times.checkpoint_every_secs or unit_secs) + saving
      spent = (trained // cycle) * saving * self._active
      self._useful -= spent
      self._losses[_SAVING] += spent
    if unit_secs:
      lost = (trained % (unit_secs + saving)) * self._active
      self._useful -= lost
      self._losses[_LOST] += lost
    self._paused_at, self._cause = self._now, cause

  def _change_cause(self, cause: int) -> None:
    assert self._paused_at is not None
    if cause != self._cause:
      self._pauses.append((self._paused_at, self._now, self._cause))
      self._paused_at, self._cause = self._now, cause

  def _resume(self) -> None:
    assert self._paused_at is not None
    self._pauses.append((self._paused_at, self._now, self._cause))
    self._sizes.append((self._now, self._active))
    self._paused_at, self._trained_from = None, self._now

  def _history(self) -> History:
    if self._paused_at is not None:
      self._pauses.append((self._paused_at, self._now, self._cause))
      self._paused_at = None
    return History(
      self._useful,
      self._allocated,
      np.array(self._losses),
      self._pauses,
      self._sizes,
      self._start,
      self._end,
      self._interruptions,
      self._coalesced,
    )
