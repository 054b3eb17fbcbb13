"""Sessions of a run: each start of it, until it ended or fell silent."""

import dataclasses
import math

CRASHED = "crashed"


@dataclasses.dataclass
class Session:
  """One start of the run; its `status` is None while it is not known to end."""

  start: float  # wall time of RUN_STARTED
  end: float  # of RUN_FINISHED, or of the last line any role wrote
  status: str | None = None
  reason: str = ""


class Sessions:
  """All sessions of a run, in order."""

  def __init__(self) -> None:
    self.all: list[Session] = []

  def started(self, wall_secs: float) -> None:
    """Opens a session; one without an end before it has crashed."""
    self.abandoned()
    self.all.append(Session(wall_secs, wall_secs))

  def finished(self, wall_secs: float, status: str, reason: str) -> None:
    """Closes the last session."""
    if self.all:
      session = self.all[-1]
      session.end = max(session.end, wall_secs)
      session.status, session.reason = status, reason

  def heard(self, wall_secs: float) -> None:
    """A line was written then: its session was on."""
    for session in reversed(self.all):
      if session.start <= wall_secs:
        if session.status in (None, CRASHED):
          session.end = max(session.end, wall_secs)
        return

  def abandoned(self) -> None:
    """Nobody is left to end the last session: it has crashed."""
    if self.all and self.all[-1].status is None:
      self.all[-1].status = CRASHED

  @property
  def last(self) -> Session | None:
    """The newest session."""
    return self.all[-1] if self.all else None

  def secs_on(self, first: float = -math.inf, last: float = math.inf) -> float:
    """Time the run was on, between two moments."""
    return sum(
      max(min(session.end, last) - max(session.start, first), 0.0)
      for session in self.all
    )
