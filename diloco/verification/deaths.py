"""Who may have been given up, by the checker's own account of deaths.

What a controller knows of progress lags behind what happens. So there are two
counts of a role's deaths in a row: of those it must have counted, and of those
it may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco.controller import orders
from diloco.verification import faults, schedules
from diloco.verification import kernel as kernel_lib

EXIT = "exit 2"


def words(fault: faults.Fault) -> str:
  """In which a role says why it ends."""
  number = f" ({fault.at:.0f})" if fault.kind == faults.EXIT else ""
  return f"{EXIT}: it cannot be{number}"


class Deaths:
  """Deaths in a row of the roles of a world, under one controller."""

  def __init__(self, world: Any):
    self._world = world
    self._restarts: int = world.schedule.restarts
    self._least: dict[str, int] = {}  # without any progress since
    self._most: dict[str, int] = {}  # since the controller began
    self._told: dict[kernel_lib.Life, int] = {}  # the most, by each
    # An island's steps, as far as its controller knows: the last, and the
    # furthest at a death or at the start of a life.
    self._steps: dict[str, int] = {}
    self._hurdles: dict[str, int] = {}
    self._trains = False  # whether the controller knows of a step
    self._words: dict[str, str] = {}  # of early errors, each role's last
    self.failed_alike = False  # whether a role has failed twice in the same

  def died(self, life: kernel_lib.Life) -> None:
    """A process has ended, whatever of."""
    world, role = self._world, life.role
    name = role.name
    if world.controller.life is None:  # the next one knows of no death
      world.checker.deaths = Deaths(world)
      return
    step = self._steps.get(name, 0)
    self._hurdles[name] = max(step, self._hurdles.get(name, 0))
    self._least[name] = self._least.get(name, 0) + 1
    self._most[name] = self._most.get(name, 0) + 1

  def heard(self, death: orders.Died) -> None:
    """The controller hears of a death; a second one alike may be the last."""
    if self._trains or not death.failed:
      return
    if self._words.get(death.role) == death.error:
      self.failed_alike = True
    else:
      self._world.checker.seen["forgiven_once"] += 1
    self._words[death.role] = death.error

  def joined(self, role: kernel_lib.Role, step: int) -> None:
    """The controller hears that an island has begun a life at a step."""
    name = role.name
    self._steps[name] = step
    self._hurdles[name] = max(step, self._hurdles.get(name, 0))

  def told(self, life: kernel_lib.Life, progress: int) -> None:
    """A life tells the controller how far it has come, merges or steps.

    Seats are there for anybody's merges, and each of them settles all. An
    island's deaths count until it is H steps past each of them, and past where
    it began after it.
    """
    if progress <= self._told.get(life, 0):
      return
    self._told[life] = progress
    seats, role = self._world.seats, life.role
    settled = seats
    if role not in seats:
      name, every = role.name, self._world.schedule.sync_every
      self._trains = self._trains or progress > self._steps.get(name, progress)
      self._steps[name] = progress
      far = progress >= self._hurdles.get(name, 0) + every
      settled = [role] if far else []
    for role in settled:
      self._world.checker.seen["settled"] += self._least.get(role.name, 0) > 0
      self._least[role.name] = 0
      if not self.may_be_given_up(role):  # which nothing takes back
        self._most[role.name] = 0

  def starts(self, role: kernel_lib.Role) -> None:
    """A role is started; nobody who must be given up is."""
    count = self._least.get(role.name, 0)
    if self._restarts and count > self._restarts:
      raise kernel_lib.Violation(
        f"{role.name} is started after {count} deaths in a row"
      )

  def may_be_given_up(self, role: kernel_lib.Role) -> bool:
    """Whether it may have died too often."""
    return 0 < self._restarts < self._most.get(role.name, 0)

  def may_be_over(self) -> bool:
    """Whether too few may be left."""
    return self._few(self._most)

  def is_over(self) -> bool:
    """Whether too few are left for sure."""
    return self._few(self._least)

  def _few(self, counts: dict[str, int]) -> bool:
    if not self._restarts:
      return False

    def left(roles: list[kernel_lib.Role]) -> int:
      return sum(counts.get(r.name, 0) <= self._restarts for r in roles)

    world = self._world
    quorum: int = world.schedule.quorum
    return not left(world.seats) or left(world.islands) < quorum


class Slices:
  """What islands run on, by the checker's own account."""

  def __init__(self, schedule: schedules.Schedule):
    self.moved = 0  # times that an island was started on another one
    self._number = schedule.islands + schedule.spares
    self._bad = {
      int(f.at) for f in schedule.faults if f.kind == faults.BAD_SLICE
    }
    self._at: dict[str, int] = {}  # each island's, of its last life

  def of(self, role: kernel_lib.Role) -> int:
    """The slice of a role that lives."""
    return self._at[role.name]

  def start(
    self, role: kernel_lib.Role, number: int, roles: Sequence[kernel_lib.Role]
  ) -> bool:
    """An island of these is started on a slice; says whether that is bad."""
    name = role.name
    if not 0 <= number < self._number:
      raise kernel_lib.Violation(f"{name} is started on slice {number}")
    for other in roles:
      if other.life is not None and self._at.get(other.name) == number:
        raise kernel_lib.Violation(
          f"{name} is started on slice {number}, where {other.name} runs"
        )
    self.moved += self._at.get(name, number) != number
    self._at[name] = number
    return number in self._bad
