"""The controller of the simulated world: restarts what died.

While it is dead nobody is restarted; it is itself restarted from outside, by
whoever started the run. It knows other processes only as a parent does: that
they ended, or that they have shown no sign of life for long.
"""

from __future__ import annotations

from typing import Any

from diloco import errors
from diloco.snapshots import cut_parts, cuts, operations, records
from diloco.verification import kernel as kernel_lib

_BACKOFF_SECS = (0.3, 1.0)
_LOOK_SECS = 0.4
_RETRY_SECS = 0.3
_CUT_SECS = 6.0  # until a cut is given up
_OUTSIDE_SECS = 3.0  # until somebody restarts the controller


class Controller:
  """One incarnation of the controller."""

  __slots__ = ("kernel", "life", "random", "world")

  def __init__(self, world: Any, life: kernel_lib.Life):
    self.world = world
    self.kernel: kernel_lib.Kernel = world.kernel
    self.life = life
    self.random = life.role.random

  def forget(self) -> None:
    """Holds nothing that holds it."""

  def run(self) -> kernel_lib.Script:
    """The main thread: what died while there was no controller is started."""
    yield 0.0
    for role in self.world.roles:
      if role.life is None and role not in self.world.restorers:
        self.restart_later(role)
    if self.world.schedule.cuts:
      yield from self._take_cuts()

  def _take_cuts(self) -> kernel_lib.Script:
    """Asks for a cut now and then, and completes it or gives it up."""
    every = self.world.schedule.cuts
    yield every * self.random()
    mine: records.CutRequest | None = None
    while True:
      try:
        if mine is None:
          newest = max((yield from cuts.numbers()), default=0)
          seen = (yield from cuts.look(newest)) if newest else None
          if seen is not None and seen.is_open:
            mine = seen.request  # of a controller before this one
          else:
            mine = yield from cuts.request(
              self._alive(), self.world.schedule.fragments
            )
          lives, since = self._lives(), self.kernel.now
        assert mine is not None
        if (yield from self._end_cut(mine, lives, since)):
          mine = None
          yield every
        else:
          yield _LOOK_SECS
      except operations.FAILURES:
        yield _RETRY_SECS

  def _end_cut(
    self, mine: records.CutRequest, lives: dict[int, int], since: float
  ) -> kernel_lib.Script:
    """Whether a cut is complete, or given up, after this look."""
    seen = yield from cuts.look(mine.cut)
    if not seen.is_open:
      return True
    missing = seen.missing_islands
    if not missing and cut_parts.CHANNEL in seen.names:
      try:
        parts = yield from cuts.complete(mine)
        self.world.checker.cut_completed(parts)
      except errors.CorruptSnapshotError as error:
        self.world.checker.inconsistent(mine.cut, str(error))
        yield from cuts.abandon(mine.cut, str(error))
      return True
    now = self._lives()
    gone = [m for m in missing if now.get(m) != lives.get(m)]
    if gone or self.kernel.now - since > _CUT_SECS:
      yield from cuts.abandon(mine.cut, "no part of somebody")
      self.world.checker.seen["cuts_abandoned"] += 1
      return True
    return False

  def _lives(self) -> dict[int, int]:
    return {
      role.index: role.life.incarnation
      for role in self.world.islands
      if role.life is not None and role.life.shell.present
    }

  def _alive(self) -> list[int]:
    return sorted(self._lives())

  def restart_later(self, role: kernel_lib.Role) -> None:
    """Starts a role again after a pause, if this controller lives then."""
    shortest, longest = _BACKOFF_SECS
    delay = shortest + (longest - shortest) * self.random()

    def restart() -> None:
      if self.life.alive and role.life is None:
        self.world.start(role)

    self.kernel.at(self.kernel.now + delay, restart)


def outside_secs(random: Any) -> float:
  """How long a run is without its controller."""
  return _OUTSIDE_SECS * (0.3 + random())
