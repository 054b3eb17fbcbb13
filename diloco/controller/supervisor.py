"""Supervision: when a role is started again, killed for hanging, given up.

Pure decisions: time and facts come in, orders go out.

Contract: every death is reported here once, whatever its cause. A role that
dies is started again after a back-off that doubles with each death in a row;
after `max_restarts` restarts in a row its next death gives it up. A death
concerns that role alone. An island's row ends once it has trained
`settle_steps` beyond every step at which it died or started in it, a syncer's
with the next merge: who always dies at the same step gets nowhere.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from diloco import config as config_lib
from diloco import timing
from diloco.controller import orders

State = Literal["waiting", "starting", "running", "given_up", "stopped"]


@dataclasses.dataclass
class _Role:
  state: State = "waiting"
  due: float = 0.0  # when to start, while waiting
  deaths: int = 0  # in a row
  step: int = 0  # last told; of an island
  hurdle: int = 0  # furthest step at a death, or a start after one
  refusals: int = 0  # starts in a row that came to nothing
  began: float = 0.0  # last start
  heard: float = 0.0  # last sign of life
  progress: int | None = None  # last told; syncers tell none
  moved: float = 0.0  # when it was first told
  extra_secs: float = 0.0  # that it may stand still for beyond `hang_secs`
  deposed: float | None = None  # since when another leads in its place


class Supervisor:
  """State of all roles of a run."""

  def __init__(
    self,
    chosen: config_lib.ControllerConfig,
    times: timing.Timing,
    settle_steps: int,
    roles: Sequence[str],
  ):
    """All roles are due to start at once.

    An island trains fewer than `settle_steps` again after a death.
    """
    self._chosen = chosen
    self._times = times
    self._settle_steps = settle_steps
    self._roles = {role: _Role() for role in roles}
    self._looked: float | None = None  # when orders were last asked for

  def state(self, role: str) -> State:
    """Current state of a role."""
    return self._roles[role].state

  def started(self, role: str, now: float) -> None:
    """The role's process exists."""
    entry = self._roles[role]
    entry.state, entry.began, entry.heard = "starting", now, now
    entry.deposed = None
    entry.refusals = 0

  def refused(self, role: str, now: float) -> float:
    """The role could not be started, which is no death; gives its back-off."""
    entry = self._roles[role]
    entry.refusals += 1
    delay_secs = self._delay_secs(entry.refusals)
    entry.due = now + delay_secs
    return delay_secs

  def ready(self, role: str, now: float) -> None:
    """The role reported that it can work."""
    entry = self._roles[role]
    if entry.state == "starting":
      entry.state = "running"
      entry.progress = None  # a life before may have told it
    entry.heard = now

  def heard(self, role: str, now: float) -> None:
    """The role said something: it lives, whether or not it gets on."""
    self._roles[role].heard = now

  def told(
    self, role: str, now: float, progress: int, extra_secs: float
  ) -> None:
    """The role said how far it is.

    `progress` is a count that moves while its main thread does, which may stand
    still now for `extra_secs` beyond `hang_secs`.
    """
    entry = self._roles[role]
    if progress != entry.progress:
      entry.progress, entry.moved = progress, now
    entry.extra_secs = extra_secs

  def deposed(self, role: str, now: float) -> None:
    """Another leads in the role's place; what it still does is refused."""
    entry = self._roles[role]
    if entry.deposed is None:
      entry.deposed = now

  def settled(self, role: str) -> None:
    """The role did what it is there for: its deaths so far are forgotten."""
    self._roles[role].deaths = 0

  def joined(self, role: str, step: int) -> None:
    """An island goes on from `step`, which may be before where it died."""
    entry = self._roles[role]
    entry.step, entry.hurdle = step, max(step, entry.hurdle)

  def trained(self, role: str, step: int) -> None:
    """An island has trained up to `step`."""
    entry = self._roles[role]
    entry.step = step
    if step >= entry.hurdle + self._settle_steps:
      self.settled(role)

  def died(self, role: str, now: float) -> tuple[int, float] | None:
    """The role's process is gone.

    Returns:
      (deaths in a row, seconds until it is started again), or None if it is
      not started again.
    """
    entry = self._roles[role]
    if entry.state == "stopped":
      return None
    entry.hurdle = max(entry.step, entry.hurdle)
    entry.deaths += 1
    if entry.deaths > self._chosen.max_restarts:
      entry.state = "given_up"
      return None
    delay_secs = self._delay_secs(entry.deaths)
    entry.state, entry.due = "waiting", now + delay_secs
    return entry.deaths, delay_secs

  def _delay_secs(self, deaths: int) -> float:
    """Pause before the next start after so many in a row."""
    doubled = self._chosen.restart_base_secs * 2 ** min(deaths - 1, 30)
    return min(doubled, self._chosen.restart_max_secs)

  def stopping(self, role: str) -> None:
    """The role was told to stop; its end is no death."""
    self._roles[role].state = "stopped"

  def anew(self, role: str, now: float) -> None:
    """A role that was stopped starts again, as if it had never died."""
    if self._roles[role].state == "stopped":
      self._roles[role] = _Role(due=now)

  def may_start(self, role: str, before: float) -> bool:
    """Whether the role, which has no process, is due to have one by then."""
    entry = self._roles[role]
    return entry.state == "waiting" and entry.due < before

  def due(self, now: float) -> list[orders.Start | orders.Kill]:
    """What to do at `now`."""
    self._excuse(now)
    due: list[orders.Start | orders.Kill] = []
    for role, entry in self._roles.items():
      waited = now - entry.began
      if entry.state == "waiting" and now >= entry.due:
        due.append(orders.Start(role))
      elif entry.state == "starting" and waited > self._times.start_secs:
        due.append(orders.Kill(role, f"not ready after {waited:.0f} s"))
      elif entry.state == "running" and (cause := self._hangs(entry, now)):
        due.append(orders.Kill(role, cause))
    return due

  def _excuse(self, now: float) -> None:
    """Blames nobody for time in which nobody listened.

    A controller that was stopped by a signal finds no role silent when it
    wakes.
    """
    away = 0.0 if self._looked is None else now - self._looked
    self._looked = now
    if away > self._times.hang_secs / 2:
      for entry in self._roles.values():
        entry.began = min(entry.began + away, now)
        entry.heard = min(entry.heard + away, now)
        entry.moved = min(entry.moved + away, now)
        if entry.deposed is not None:
          entry.deposed = min(entry.deposed + away, now)

  def _hangs(self, entry: _Role, now: float) -> str:
    """Why a running role must be killed; empty if it need not be."""
    still, silent = now - entry.moved, now - entry.heard
    limit_secs = self._times.hang_secs
    if entry.progress is not None and still > limit_secs + entry.extra_secs:
      return f"no progress for {still:.0f} s"
    if silent > limit_secs:
      return f"no sign of life for {silent:.0f} s"
    if entry.deposed is None:
      return ""
    if silent > self._times.deposed_secs:
      return f"deposed, and no sign of life for {silent:.1f} s"
    # It lives, but a store that answers others has not told it for long.
    if now - entry.deposed > limit_secs:
      return f"deposed {now - entry.deposed:.0f} s ago, and has not ended"
    return ""
