"""An island in simulated rounds: its production core, and where it stands."""

from diloco.islands import comeback
from diloco.islands import core as island_core
from diloco.planning.fleet import traffic


class Player:
  """One island: production core, and what is on its way to it."""

  def __init__(self, number: int, track: traffic.Track):
    self.number = number
    self.track = track
    self.core: island_core.IslandCore | None = None
    self.incarnation = 0
    self.ready: dict[int, island_core.Ready] = {}
    self.published: dict[int, int] = {}  # fragment -> first unanswered step
    self.reached: list[int] = []  # [P], last step published, all lives
    self.saved: comeback.Saved | None = None
    self.step = 0
    self.next_stop = 0
    self.seen = -1  # the news it has looked at
    self.waits_since: float | None = None

  def finish(self, start: float, secs: float) -> tuple[float, bool]:
    """Returns when a step begun at `start` ends, and whether it was killed.

    A step that a stop interrupts is done again afterwards.
    """
    stops = self.track.stops
    while self.next_stop < len(stops):
      stop = stops[self.next_stop]
      if stop.end <= start:
        self.next_stop += 1
        continue
      if stop.start >= start + secs:
        break
      self.next_stop += 1
      start = max(start, stop.end)
      if stop.killed:
        return start, True
    return start + secs, False
