"""Supervision: when a role is started again, killed for hanging, given up.

Pure decisions: time and facts come in, orders go out.

Contract: every death is reported here once, whatever its cause. A role that
dies is started again after a back-off that doubles with each death in a row
and is forgotten once it has made progress again; after `max_restarts` restarts
in a row its next death gives it up. A death concerns that role alone.
"""

import dataclasses
from typing import Literal

State = Literal["waiting", "starting", "running", "given_up", "stopped"]


@dataclasses.dataclass(frozen=True)
class Policy:
  """Times in seconds."""

  restart_base_secs: float
  restart_max_secs: float
  max_restarts: int
  start_secs: float  # from start to ready
  hang_secs: float  # without a sign of life, or of progress owed

  def delay_secs(self, deaths: int) -> float:
    """Pause before the next start after `deaths` in a row."""
    if deaths <= 0:
      return 0.0
    doubled = self.restart_base_secs * 2 ** min(deaths - 1, 30)
    return min(doubled, self.restart_max_secs)


@dataclasses.dataclass(frozen=True)
class Start:
  """Start the role now."""

  role: str


@dataclasses.dataclass(frozen=True)
class Kill:
  """Kill the role: it hangs."""

  role: str
  cause: str


@dataclasses.dataclass
class _Role:
  state: State = "waiting"
  due: float = 0.0  # when to start, while waiting
  since: float = 0.0  # start or last progress
  deaths: int = 0  # in a row
  heard: float = 0.0  # last sign of life
  busy: bool = False  # whether progress is expected


class Supervisor:
  """State of all roles of a run."""

  def __init__(self, policy: Policy, roles: list[str]):
    """All roles are due to start at once."""
    self._policy = policy
    self._roles = {role: _Role() for role in roles}

  def state(self, role: str) -> State:
    """Current state of a role."""
    return self._roles[role].state

  def started(self, role: str, now: float) -> None:
    """The role's process exists."""
    entry = self._roles[role]
    entry.state, entry.since, entry.busy = "starting", now, False
    entry.heard = now

  def ready(self, role: str, now: float) -> None:
    """The role reported that it can work."""
    entry = self._roles[role]
    if entry.state == "starting":
      entry.state, entry.since = "running", now
    entry.heard = now

  def heard(self, role: str, now: float) -> None:
    """The role said something: it lives, whether or not it gets on."""
    self._roles[role].heard = now

  def progressed(self, role: str, now: float, *, busy: bool) -> None:
    """The role did something, or has nothing to do (`busy` is False)."""
    entry = self._roles[role]
    entry.since, entry.busy = now, busy
    if busy:
      entry.deaths = 0

  def settled(self, role: str) -> None:
    """The role did what it is there for: its deaths so far are forgotten."""
    self._roles[role].deaths = 0

  def working(self, role: str, now: float) -> None:
    """The role has work under way and owes progress from now on."""
    entry = self._roles[role]
    if not entry.busy:
      entry.since, entry.busy = now, True

  def died(self, role: str, now: float) -> tuple[int, float] | None:
    """The role's process is gone.

    Returns:
      (deaths in a row, seconds until it is started again), or None if it is
      not started again.
    """
    entry = self._roles[role]
    if entry.state == "stopped":
      return None
    entry.deaths += 1
    if entry.deaths > self._policy.max_restarts:
      entry.state = "given_up"
      return None
    delay_secs = self._policy.delay_secs(entry.deaths)
    entry.state, entry.due = "waiting", now + delay_secs
    return entry.deaths, delay_secs

  def stopping(self, role: str) -> None:
    """The role was told to stop; its end is no death."""
    self._roles[role].state = "stopped"

  def orders(self, now: float) -> list[Start | Kill]:
    """What to do at `now`."""
    orders: list[Start | Kill] = []
    for role, entry in self._roles.items():
      waited = now - entry.since
      if entry.state == "waiting" and now >= entry.due:
        orders.append(Start(role))
      elif entry.state == "starting" and waited > self._policy.start_secs:
        orders.append(Kill(role, f"not ready after {waited:.0f} s"))
      elif entry.state == "running":
        silent = now - entry.heard
        if entry.busy and waited > self._policy.hang_secs:
          orders.append(Kill(role, f"no step for {waited:.0f} s"))
        elif silent > self._policy.hang_secs:
          orders.append(Kill(role, f"no sign of life for {silent:.0f} s"))
    return orders
