"""The run's own clock: wall time with the pauses between sessions cut out."""

import numpy as np

from diloco.report import view as view_lib

_UNITS = ((3 * 3600.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))


class RunClock:
  """Turns wall times into the time a run was on, in a fitting unit.

  Attributes:
    unit_secs: seconds of the unit.
    label: name of an axis of times.
    length: how long the run was on, in the unit.
    seams: where a later session begins, in the unit.
  """

  def __init__(self, view: view_lib.RunView):
    """Takes the sessions of a run, or its whole time if there are none."""
    spans = [(s.start, s.end) for s in view.sessions.all]
    spans = spans or [(view.start, view.start + view.wall_secs)]
    self._starts = np.array([start for start, _ in spans])
    lengths = np.array([end - start for start, end in spans])
    self._lengths = lengths
    self._before = np.concatenate(([0.0], np.cumsum(lengths)[:-1]))
    total = float(lengths.sum())
    self.unit_secs, unit = 1.0, "seconds"
    for least, unit_secs, name in _UNITS:
      if total >= least:
        self.unit_secs, unit = unit_secs, name
        break
    self.label = f"time the run was on, {unit}"
    self.length = max(total / self.unit_secs, 1e-6)
    self.seams = [float(b) / self.unit_secs for b in self._before[1:]]

  def at(self, wall_secs: np.ndarray) -> np.ndarray:
    """Returns run times, in the unit, for wall times."""
    walls = np.asarray(wall_secs, dtype=float)
    which = np.searchsorted(self._starts, walls, side="right") - 1
    which = np.maximum(which, 0)
    into = np.clip(walls - self._starts[which], 0.0, self._lengths[which])
    return (self._before[which] + into) / self.unit_secs

  def secs_at(self, wall_secs: float) -> float:
    """Returns the run time of a wall time, in seconds."""
    return float(self.at(np.array([wall_secs]))[0]) * self.unit_secs
