"""The controller's decisions: who is started, killed, asked what, and when.

A state machine without I/O, clock or threads: `handle(event, now)` takes what
its shell saw and returns what to do (see `orders`). It touches no tensor bytes
and decides nothing about merging: while there is no controller, islands repeat
their last program and the syncers go on. The next one is told who lives.

Parts of it: `fleet` (who lives and leads, with `supervisor` for restarts),
`pilot` (what to ask islands next), `damage` (when to go back to a cut) and
`wind_down`, the script of a session's end.

Reference: Pathways, arXiv 2203.12533.
"""

from collections.abc import Mapping
from typing import Any

from diloco import config as config_lib
from diloco import config_changes, errors, timing
from diloco.controller import damage, orders, pilot, wind_down
from diloco.controller import fleet as fleet_lib
from diloco.controller import outcome as outcome_lib
from diloco.tape import events

_MISTAKES = 3  # of code of the user's, in the same words: no chance
_TAKEOVERS_DAMAGED = 4  # a successor has looked by then, and mended what it can


class ControllerCore:
  """One session, from its first event to the order `End`."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    times: timing.Timing,
    tokens_per_step: int,
    *,
    run: str = "the run",
    first_seq: int = 1,
  ):
    """Nobody lives, as far as it knows.

    `run` is what to call it to the user; see `program.Queues` for `first_seq`.
    """
    self.config = config
    self.fleet = fleet_lib.Fleet(config, times, first_seq)
    self.pilot = pilot.Pilot(config, tokens_per_step)
    self.supplying = True  # islands with train windows and new lives
    self.outcome: outcome_lib.Outcome | None = None
    self._run = run
    self._times = times
    self._damage = damage.DamageWatch(_TAKEOVERS_DAMAGED * times.takeover_secs)
    self._faults = list(config.faults)
    self._was_changed = False
    # Each role's, until an island has made a step.
    self._first_errors: dict[str, str] | None = {}
    self._mistakes: dict[str, tuple[str, int]] = {}  # each island's, in a row
    self._gathered_secs: float | None = None  # when to begin, once known
    self._going_back: list[int] = []  # for the sake of these fragments
    self._emptied = False  # of all roles, for a return that is not finished
    self._interrupts = 0
    self._session = self._train_and_wind_down()

  def handle(self, event: orders.Event, now: float) -> list[orders.Order]:
    """Takes in what was seen at `now`, in monotonic seconds."""
    if self.outcome is not None:
      return []
    fleet = self.fleet
    fleet.now, fleet.orders = now, []
    match event:
      case orders.Tick():
        self._tick()
      case orders.Hello() | orders.Status() | orders.Done():
        if fleet.told_by(event):
          self._told(event)
      case orders.Lost():
        fleet.lost(event)
      case orders.Begun():
        fleet.begun(event)
      case orders.Died():
        self._died(event)
      case orders.Failed(order, error):
        self._failed(order, error)
      case orders.Opened():
        self._open(event)
      case orders.Interrupted():
        self._interrupted()
      case orders.Configured(config, changes):
        self._configure(config, changes)
      case orders.Ending():
        self._empty()
      case orders.SetBack(done, error):
        self._back(error, done=done)
    return fleet.orders

  def _end(self, outcome: outcome_lib.Outcome) -> None:
    if self.outcome is None:
      self.outcome = outcome
      self.fleet.orders.append(orders.End(outcome))

  # A session

  def _open(self, event: orders.Opened) -> None:
    fleet = self.fleet
    if fleet.lives:
      fleet.say(f"attaching roles={','.join(sorted(fleet.lives))}")
    fleet.record(
      events.RUN_STARTED,
      method=self.config.method,
      islands=self.config.fleet.islands,
      total_tokens=self.config.total_tokens,
      token=event.token,
    )
    if event.changes:
      fleet.record(events.CONFIG_CHANGED, changes=event.changes)

  def _tick(self) -> None:
    self.fleet.supervise(islands=self.supplying)
    if self.supplying:
      self._supply()
      self._mend()
      self.fleet.orders.append(orders.TakeChanges())
    next(self._session, None)

  def _interrupted(self) -> None:
    self._interrupts += 1
    if self._interrupts > 1:
      self._end(outcome_lib.Outcome("killed", "interrupted twice"))
    else:
      next(self._session, None)

  def _train_and_wind_down(self) -> wind_down.Script:
    while not self._trained and not self._interrupts:
      yield
    finished = not self._interrupts
    reason = "token budget trained" if finished else "interrupted"
    self.supplying = False
    self.fleet.record(events.RUN_STOPPING, reason=reason)
    self.fleet.orders.append(orders.Point("controller_stopping"))
    self.fleet.say(f"stopping reason={reason}", "info")
    batches = self.config.programs.final_eval_batches
    end = wind_down.WindDown(self.fleet, self._times, batches)
    final_eval = yield from end.run(evaluate=finished)
    self._end(
      outcome_lib.conclude(final_eval)
      if finished
      else outcome_lib.Outcome("stopped", reason)
    )

  @property
  def _trained(self) -> bool:
    """Whether the budget is spent, and there is an island to evaluate."""
    if self._going_back:
      return False  # and all islands are about to end
    ready = len(self.fleet.ready_islands)
    return self.pilot.budget_spent and ready > 0 and self._gathered(ready)

  # What roles say

  def _told(self, event: orders.Hello | orders.Status | orders.Done) -> None:
    fleet, role = self.fleet, event.role
    match event:
      case orders.Hello():
        if event.ready:
          self._ready(event)
      case orders.Status() if role in fleet.seats:
        life = fleet.lives[role]
        if event.merges > life.merges:
          # Whoever merges, the seats together do what they are there for.
          for seat in fleet.seats:
            fleet.supervisor.settled(seat)
        life.merges = event.merges
        self._damage.told(role, event.damaged, fleet.now)
      case orders.Status():
        if role in fleet.islands:
          self._observe(role, event.step)
        if event.progress is not None:
          fleet.supervisor.told(
            role, fleet.now, event.progress, event.extra_secs
          )
      case orders.Done(seq=seq, result=result):
        if role in fleet.islands and "step" in result:
          self._observe(role, result["step"])
        elif role in fleet.names.evaluators:
          self._evaluated(role, result)
        sent = fleet.programs.done(role, seq, result)
        if sent is not None and role in fleet.islands:
          fleet.record(
            events.PROGRAM_DONE,
            island=fleet.islands[role],
            seq=seq,
            program=sent.name,
            result=result,
          )

  def _observe(self, role: str, step: int) -> None:
    """Takes in how far an island has trained, which is what it is for."""
    if self.pilot.observe(self.fleet.islands[role], step):
      self._first_errors = None
      self.fleet.supervisor.trained(role, step)

  def _evaluated(self, role: str, result: Mapping[str, Any]) -> None:
    """Takes in what an evaluator answers; to "configure" that is nothing."""
    if result:
      self.pilot.evaluated()
    if "loss" in result:
      self.fleet.supervisor.settled(role)

  def _ready(self, event: orders.Hello) -> None:
    fleet, role = self.fleet, event.role
    life = fleet.lives[role]
    if role in fleet.seats:
      fleet.leads(role, event.token)
      if event.draining and self.supplying:
        # It was told to by a controller that wound the run down.
        fleet.say(f"draining_seat_ended role={role}")
        fleet.kill(role, "it was winding an earlier session down")
        return
    starting = fleet.supervisor.state(role) == "starting"
    if starting:
      fleet.supervisor.ready(role, fleet.now)
    if fleet.is_ready(role) and (self._was_changed or life.taken_up):
      self._tell_config(role)  # it may have begun with another, or missed one
    if not starting:
      return  # it only found its channel again
    island = fleet.islands.get(role)
    if island is not None:
      self.pilot.joined(island, event.step or 0)
      fleet.supervisor.joined(role, event.step or 0)
    if life.taken_up:
      fleet.record(
        events.REATTACHED,
        peer=role,
        peer_incarnation=life.number,
        pid=life.pid,
        step=event.step,
      )
    elif island is not None:
      fleet.record(
        events.ISLAND_READY,
        island=island,
        island_incarnation=life.number,
        step=event.step,
      )

  # Deaths

  def _died(self, death: orders.Died) -> None:
    fleet, role = self.fleet, death.role
    life = fleet.lives.get(role)
    if life is None or life.number != death.life:
      return
    if not fleet.buried(death):
      return
    if role not in fleet.names.evaluators:
      self._check_first_error(death)
      self._check_own_code(death)
      if self.outcome is not None:
        return
    again = fleet.supervisor.died(role, fleet.now)
    if again is not None and role in fleet.islands:
      deaths, delay_secs = again
      if deaths > 1:
        fleet.orders.append(orders.MoveSlice(role))
      fleet.record(
        events.ISLAND_RESTART,
        island=fleet.islands[role],
        attempt=deaths,
        delay_secs=delay_secs,
      )
    elif again is None:
      self._check_anybody_left(death)

  def _check_first_error(self, death: orders.Died) -> None:
    """Ends the run if a role fails in the same way again, and nothing worked.

    That is a mistake of the configuration or the task, and no dying machine.
    Once an island has made a step it is that role's death alone.
    """
    role, error = death.role, death.error
    if self._first_errors is None or not death.failed:
      return
    if error and error == self._first_errors.get(role):
      self._fail(death, f"{role} failed twice before any step: {error}")
    self._first_errors[role] = error

  def _check_own_code(self, death: orders.Died) -> None:
    """Ends the run if code of the user's would fail in the next life as well.

    That is once its data are over, or if it has failed several times in the
    same words, which name the step.
    """
    role, error = death.role, death.error
    if self.outcome is not None or not error:
      return
    before, times = self._mistakes.get(role, ("", 0))
    times = times + 1 if error == before else 1
    if death.mistake:
      self._mistakes[role] = error, times
    if death.no_data or (death.mistake and times >= _MISTAKES):
      how = f"failed {times} times alike" if death.mistake else "cannot go on"
      self._fail(death, f"{role} {how}: {error}")

  def _fail(self, death: orders.Died, why: str) -> None:
    told = errors.UserError(self._run, why, f"see {death.log}")
    self._end(outcome_lib.Outcome("failed", why, user_error=told))

  def _check_anybody_left(self, death: orders.Died) -> None:
    """Ends the run once a role is given up without which nothing can go on."""
    fleet = self.fleet
    fleet.say(f"given_up role={death.role}", "error")

    def left(roles: list[str]) -> int:
      return sum(fleet.supervisor.state(r) != "given_up" for r in roles)

    quorum = self.config.sync.quorum
    if not left(list(fleet.seats)) or left(list(fleet.islands)) < quorum:
      reason = f"{death.role} died too often; see {death.log}"
      self._end(outcome_lib.Outcome("failed", reason))

  def _failed(self, order: orders.Order, error: str) -> None:
    """What the machine refuses is ordered again in a later tick."""
    if isinstance(order, orders.Start):
      self.fleet.refused(order.role, error)
      return
    self.fleet.say(f"will_retry order={type(order).__name__} error={error}")
    if isinstance(order, orders.GoBack):
      self._going_back = []

  # Damage and changes

  def _mend(self) -> None:
    """Goes back to a cut when damage stands that no syncer can mend."""
    fragments = self._damage.due(self.fleet.now)
    if fragments and not self._going_back:
      damaged = ",".join(map(str, fragments))
      self.fleet.say(f"damaged fragments={damaged}", "error")
      self._going_back = fragments
      self.fleet.orders.append(orders.GoBack())

  def _empty(self) -> None:
    """The ends of all roles, for a return to a cut, are no deaths."""
    self._emptied = True
    for role in self.fleet.names.all:
      self.fleet.supervisor.stopping(role)

  def _back(self, error: str, *, done: bool) -> None:
    """A return to a cut has ended, or an attempt to."""
    fleet, fragments = self.fleet, self._going_back
    self._going_back = []
    if error and self._emptied:  # it began, and must be finished
      reason = f"the return to a cut failed: {error}"
      self._end(outcome_lib.Outcome("failed", reason))
    elif error:
      fleet.say(f"not_set_back error={error}", "error")
      fleet.record(events.NOT_RESTORED, fragments=fragments, reason=error)
    if not done and (error or not self._emptied):
      self._damage.leave_alone(fragments)
      return
    self._emptied = False
    self._damage.begin_anew()
    self.pilot.begin_anew()
    self._gathered_secs = None
    for role in fleet.names.all:
      fleet.supervisor.anew(role, fleet.now)

  def _configure(
    self, config: config_lib.RunConfig, changes: orders.Changes
  ) -> None:
    """Goes on by another configuration."""
    live = config_changes.live(config)
    self.config = config_changes.with_live(self.config, live)
    self._was_changed = True
    self.fleet.record(events.CONFIG_CHANGED, changes=changes)
    for role in filter(self.fleet.is_ready, self.fleet.names.all):
      self._tell_config(role)

  def _tell_config(self, role: str) -> None:
    live = config_changes.live(self.config)
    self.fleet.dispatch(role, "configure", settings=live)

  # Training

  def _supply(self) -> None:
    """Keeps programs queued, faults injected and cuts taken."""
    fleet = self.fleet
    self._inject()
    ready = {fleet.islands[role]: role for role in fleet.ready_islands}
    if not self._gathered(len(ready)) or self.pilot.budget_spent:
      return
    lives = {m: fleet.lives[role].number for m, role in ready.items()}
    fleet.orders.append(orders.LookAtCuts(lives))
    queued = {
      m: fleet.programs.queued(role, "train")
      for m, role in ready.items()
      if fleet.lives[role].connected  # others go on with their last window
    }
    for wanted in self.pilot.wanted(queued):
      fleet.dispatch(ready[wanted.island], wanted.name, **wanted.args)
    for role in fleet.names.evaluators:
      busy = fleet.programs.queued(role, "evaluate")
      free = fleet.is_ready(role) and not busy
      if due := self.pilot.evaluation(free=free):
        fleet.dispatch(role, "evaluate", **due)

  def _inject(self) -> None:
    """Injects what the configuration asks for, each fault once when due."""
    tokens = self.pilot.tokens
    for fault in list(self._faults):
      if tokens < fault.at_fraction * self.config.total_tokens:
        continue
      role = self.fleet.hit(fault.target)
      if role is None or not self.fleet.is_ready(role):
        continue
      self._faults.remove(fault)
      self.fleet.record(
        events.FAULT_INJECTED,
        kind=fault.kind,
        target=fault.target,
        at_tokens=tokens,
      )
      if fault.kind == "poison":
        self.fleet.dispatch(role, "poison", fragment=0)
      else:
        self.fleet.orders.append(orders.Signal(role, fault.kind))

  def _gathered(self, num_ready: int) -> bool:
    """Whether to begin: all are ready, or the first has waited enough."""
    now = self.fleet.now
    if self._gathered_secs is None:
      if not num_ready:
        return False
      self._gathered_secs = now + self.config.controller.gather_secs
    if num_ready == len(self.fleet.islands):
      self._gathered_secs = now
    return now >= self._gathered_secs
