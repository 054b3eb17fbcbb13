"""Wrong pieces of the controller's core; see `plants`."""

from diloco.controller import core, fleet, outcome, supervisor, wind_down
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


def first_error_ends(check):
  """Whoever fails early is not given another life."""

  def wrong(self: core.ControllerCore, death):
    if death.failed and self._first_errors is not None:
      self._end(outcome.Outcome("failed", death.error))

  return wrong


def settled_at_any_step(trained):
  """Whoever makes a step is forgiven."""

  def wrong(self: supervisor.Supervisor, role, step):
    trained(self, role, step)
    self.settled(role)

  return wrong


def hurdle_forgotten(died):
  """How far an island was when it died does not matter later."""

  def wrong(self: supervisor.Supervisor, role, now):
    again = died(self, role, now)
    self._roles[role].hurdle = 0
    return again

  return wrong


def ends_with_the_first(check):
  """Whoever is given up, nobody is left."""

  def wrong(self: core.ControllerCore, death):
    self._end(outcome.Outcome("failed", "died too often"))

  return wrong


def leader_not_asked(ask):
  """What islands published last is not waited for."""

  def wrong(self, name):
    yield from ()

  return wrong


def nobody_awaited(ask):
  """Programs of the end are sent, and their answers not waited for."""

  def wrong(self, roles, name, /, **args):
    for role in roles:
      self._fleet.dispatch(role, name, preempt=True, **args)
    yield
    return {}

  return wrong


def not_saved_at_the_end(ask):
  """Islands leave without a save."""

  def wrong(self, name, **args):
    if name != "checkpoint":
      yield from ask(self, name, **args)

  return wrong


def last_evaluation_not_asked(final_eval):
  """It is said to be impossible at once."""

  def wrong(self):
    yield from ()
    return {"error": "nobody was asked"}

  return wrong


def first_one_evaluates(final_eval):
  """If the first island that is asked fails, nobody else is."""

  def wrong(self: wind_down.WindDown):
    role = next(iter(self._fleet.ready_islands), None)
    if role is None:
      return {"error": "nobody is there"}
    args = {"target": "global", "num_batches": 1}
    answers = yield from self._ask([role], "evaluate", **args)
    return answers.get(role) or {"error": "it gave no answer"}

  return wrong


def first_figure_kept(evaluate):
  """An island answers with what it evaluated first."""

  def wrong(self, args):
    if not hasattr(self, "figure"):
      self.figure = evaluate(self, args)
    return self.figure

  return wrong


def moved_from_the_oldest(moving):
  """Of the cuts that the tapes tell of the oldest is taken first."""

  def wrong(self):
    told_cuts = self.told_cuts

    def reversed_cuts():
      told = told_cuts()
      return told and told[::-1]

    self.told_cuts = reversed_cuts
    return (yield from moving(self))

  return wrong


def moved_as_it_was(moving):
  """It goes on from its store, whatever the tapes tell."""

  def wrong(self):
    told_cuts = self.told_cuts
    self.told_cuts = lambda: told_cuts() and None
    return (yield from moving(self))

  return wrong


def leader_leaves_first(stop):
  """Seats are told to stop in the order of the fleet, the leader among them."""

  def wrong(self: wind_down.WindDown, roles, patience_secs):
    leader = self._fleet.leader
    if leader and roles and roles[0] in self._fleet.islands:
      yield from stop(self, [leader], patience_secs)
    yield from stop(self, roles, patience_secs)

  return wrong


def not_asked_again(again):
  """Whatever went with a channel is given up."""

  def wrong(self, sent):
    return sent

  return wrong


def drained_at_once(setattr_):
  """It is asked to drain, and has."""

  def wrong(self, name, value):
    setattr_(self, name, True if name == "drained" else value)

  return wrong
