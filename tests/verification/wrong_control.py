"""Wrong pieces of the controller's core; see `plants`."""

from diloco.controller import core, fleet, outcome, supervisor
from diloco.controller import orders as orders_lib


def takes_up_nobody(begun):
  """A successor starts all roles, whoever lives."""

  def wrong(self, event: orders_lib.Begun):
    if not event.taken_up:
      begun(self, event)

  return wrong


def refused_start_forgotten(refused):
  """What the machine refused counts as ordered for ever."""

  def wrong(self: fleet.Fleet, role, error):
    refused(self, role, error)
    self._ordered.add(role)

  return wrong


def death_in_its_start_forgotten(died):
  """A role that dies before it is ready is thought to be starting."""

  def wrong(self: supervisor.Supervisor, role, now):
    starting = self.state(role) == "starting"
    return (1, 0.0) if starting else died(self, role, now)

  return wrong


def failed_return_forgotten(failed):
  """A return to a cut that the store refused counts as under way for ever."""

  def wrong(self: core.ControllerCore, order, error):
    going_back = self._going_back
    failed(self, order, error)
    self._going_back = going_back

  return wrong


def gives_nobody_up(died):
  """Restarts in a row are not counted."""

  def wrong(self: supervisor.Supervisor, role, now):
    self.settled(role)
    return died(self, role, now)

  return wrong


def ends_with_the_first(check):
  """Whoever is given up, nobody is left."""

  def wrong(self: core.ControllerCore, death):
    self._end(outcome.Outcome("failed", "died too often"))

  return wrong
