"""Who may have been given up, by the checker's own account of deaths.

What a controller knows of progress lags behind what happens. So there are two
counts of a role's deaths in a row: of those it must have counted, and of those
it may have.
"""

from __future__ import annotations

from typing import Any

from diloco.verification import kernel as kernel_lib


class Deaths:
  """Deaths in a row of the roles of a world, under one controller."""

  def __init__(self, world: Any):
    self._world = world
    self._restarts: int = world.schedule.restarts
    self._least: dict[str, int] = {}  # without any progress since
    self._most: dict[str, int] = {}  # since the controller began
    self._told: dict[kernel_lib.Life, int] = {}  # the most, by each

  def died(self, life: kernel_lib.Life) -> None:
    """A process has ended, whatever of."""
    world, role = self._world, life.role
    name = role.name
    if world.controller.life is None:  # the next one knows of no death
      self._least, self._most, self._told = {}, {}, {}
      return
    self._least[name] = self._least.get(name, 0) + 1
    self._most[name] = self._most.get(name, 0) + 1

  def told(self, life: kernel_lib.Life, progress: int) -> None:
    """A life tells the controller how far it has come, merges or steps.

    Seats are there for anybody's merges, and each of them settles all. Of an
    island any step may.
    """
    if progress <= self._told.get(life, 0):
      return
    self._told[life] = progress
    seats, role = self._world.seats, life.role
    if role not in seats:
      self._least[role.name] = 0
      return
    for seat in seats:
      self._least[seat.name] = 0
      if not self.may_be_given_up(seat):  # which nothing takes back
        self._most[seat.name] = 0

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
