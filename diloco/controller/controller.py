"""The controller: one process that owns the fleet of a run.

It binds slices, starts roles, dispatches programs, restarts what dies, and
winds the run down. It touches no tensor bytes and decides nothing about
merging: while it is dead, islands repeat their last program and the syncers
go on. The next controller takes up those that it finds alive.

Reference: Pathways, arXiv 2203.12533.
"""

import contextlib
import json
import logging
import pathlib
import queue
from collections.abc import Mapping
from typing import Any

from diloco import channel, config_changes, errors, process, timing
from diloco import config as config_lib
from diloco.controller import (
  change,
  cutter,
  damage,
  dispatcher,
  faults,
  mender,
  outcome,
  pilot,
  program,
  supervisor,
)
from diloco.controller import outside as outside_lib
from diloco.controller import roles as roles_lib
from diloco.report import liveness
from diloco.snapshots import requests
from diloco.tape import events

logger = logging.getLogger(__name__)

_TICK_SECS = 0.1
_TAKEOVERS_DAMAGED = 4  # a successor has looked by then, and mended what it can
_HINTS_SECS = 1.0  # between two looks at what others find us by
_SEQS_A_LIFE = 10**9  # programs a controller dispatches at most


class Controller:
  """One session's controller: its loop, and what it hears.

  `wind_down.run` is the session from its first turn to its last.
  """

  def __init__(
    self,
    config: config_lib.RunConfig,
    run_dir: pathlib.Path,
    outside: outside_lib.Outside,
    tokens_per_step: int,
    times: timing.Timing,
    *,
    incarnation: int,
    changed: Mapping[str, tuple[Any, Any]] | None = None,
  ):
    """Goes on the record; starts nothing yet.

    Args:
      config: the run's configuration.
      run_dir: directory of the run.
      outside: processes, channels and clock.
      tokens_per_step: tokens of one inner step of an island.
      times: the run's timeouts.
      incarnation: which life of the controller this is, from 1.
      changed: fields of the configuration with other values than the run had,
        with both.

    Raises:
      UserError: the fleet does not fit.
    """
    self.config = config
    self.times = times
    self.run_dir = run_dir
    self.clock = outside.clock
    self._on_tick = outside.on_tick
    self._server = outside.server
    self.tenure = outside.tenure
    self.tape = outside_lib.Tape(run_dir, "controller", incarnation)
    self.requests = requests.Counter(process.store_url(run_dir, config))
    self.roles = roles_lib.Roles(
      config, run_dir, outside.engine, self.tape, self.tenure.check
    )
    self.islands = self.roles.islands
    self.supervisor = supervisor.Supervisor(
      supervisor.Policy(
        restart_base_secs=config.controller.restart_base_secs,
        restart_max_secs=config.controller.restart_max_secs,
        max_restarts=config.controller.max_restarts,
        start_secs=times.start_secs,
        hang_secs=times.hang_secs,
        deposed_secs=times.deposed_secs,
        settle_steps=config.sync.every,
      ),
      self.roles.names,
    )
    self.dispatcher = dispatcher.Dispatcher(
      self._server.send,
      self._record_dispatched,
      self._record_done,
      first_seq=(incarnation - 1) * _SEQS_A_LIFE + 1,
    )
    self.pilot = pilot.Pilot(config, tokens_per_step)
    self._cutter = cutter.of_run(config, run_dir, self.tape, self.tenure.token)
    self._changes = change.Desk(run_dir, self._configure)
    self._was_changed = False
    self._attached: set[str] = set()  # until they die
    # Each role's, until an island has made a step.
    self._first_errors: dict[str, str] | None = {}
    self._mender = mender.Mender(
      damage.DamageWatch(_TAKEOVERS_DAMAGED * times.takeover_secs),
      outside.set_back,
      self.roles,
      self.supervisor,
      self.tape,
    )
    self._merges: dict[str, int] = {}  # seat -> merges of its life
    self._faults = faults.Injector(
      config, self.tape, self.roles, self.is_ready, self.dispatcher
    )
    self._changed = dict(changed or {})
    self.interrupts = 0
    self._hints_due = 0.0
    self._supplying = True
    self._gathered_secs: float | None = None  # when to begin, once known

  def interrupt(self) -> None:
    """First call: wind down in order. Second: kill everything at once."""
    self.interrupts += 1

  def open(self) -> None:
    """Takes up who is alive, and says where it listens."""
    self._attached = set(self.roles.attach())
    self.tenure.check()
    now = self.clock()
    for role in self._attached:
      self.supervisor.started(role, now)
    if self._attached:
      logger.warning("attaching roles=%s", ",".join(sorted(self._attached)))
    self._announce()
    self.tape.record(
      events.RUN_STARTED,
      method=self.config.method,
      islands=self.config.fleet.islands,
      total_tokens=self.config.total_tokens,
      token=self.tenure.token,
    )
    if self._changed:
      self.tape.record(events.CONFIG_CHANGED, changes=self._changed)

  def _announce(self) -> None:
    told = liveness.announcement(self.run_dir)
    self._server.announce(self.run_dir, told)

  def _keep_hints(self) -> None:
    """Puts back what others need to read, should it have been deleted."""
    now = self.clock()
    if now < self._hints_due:
      return
    self._hints_due = now + _HINTS_SECS
    process.keep_config(self.run_dir)
    self.roles.keep_record()
    if not liveness.controller_alive(self.run_dir):
      logger.warning("address_lost written_again=1")
      self._announce()

  def close(self) -> None:
    """Leaves no process and no open port behind."""
    self.roles.end_all()
    self.leave()

  def leave(self) -> None:
    """Ends this controller alone; roles go on, for the next to take up."""
    self._server.close()
    path = channel.address_path(self.run_dir)
    with contextlib.suppress(OSError, ValueError, AttributeError):
      mine = liveness.announcement(self.run_dir)
      if mine.items() <= json.loads(path.read_text()).items():
        path.unlink()  # and no other controller's

  def stop_supplying(self) -> None:
    """From now on no island gets train windows or is started again."""
    self._supplying = False
    self._cutter.close()

  @property
  def trained(self) -> bool:
    """Whether the budget is spent, and there is an island to evaluate."""
    ready = sum(map(self.is_ready, self.islands))
    return self.pilot.budget_spent and ready > 0 and self._gathered(ready)

  def is_ready(self, role: str | None) -> bool:
    """Whether a role can be asked something."""
    return role is not None and self.supervisor.state(role) == "running"

  def turn(self) -> None:
    """One round of the controller's loop; about a tenth of a second.

    What the machine refuses is tried again in a later round.

    Raises:
      FencedError: another controller has the run.
    """
    if self.interrupts > 1:
      raise outcome.StopNowError(outcome.Outcome("killed", "interrupted twice"))
    for part in (
      self._take_messages,
      self._reap,
      self._obey,
      self._supply,
      self._mend,
      self._take_changes,
      self._keep_hints,
    ):
      self.tenure.check()
      try:
        part()
      except OSError as error:
        logger.warning("will_retry after=%s error=%s", part.__name__, error)
    self._on_tick()

  def _obey(self) -> None:
    """Does what supervision orders."""
    now = self.clock()
    for order in self.supervisor.orders(now):
      if isinstance(order, supervisor.Kill):
        logger.warning("hang role=%s cause=%s", order.role, order.cause)
        self.roles.kill(order.role, order.cause)
      elif self._supplying or order.role in self.roles.seats:
        self._start(order.role, now)

  def _start(self, role: str, now: float) -> None:
    try:
      self.roles.start(role)
    except OSError as error:  # no process, memory or room to be had
      secs = self.supervisor.refused(role, now)
      logger.warning("no_start role=%s again=%.1f error=%s", role, secs, error)
      return
    self._merges.pop(role, None)
    self.supervisor.started(role, now)

  def _take_messages(self) -> None:
    try:
      peer, message = self._server.inbox.get(timeout=_TICK_SECS)
      self.tenure.check()  # most of a controller's time went by just now
      while True:
        self._take(peer, message, self.clock())
        peer, message = self._server.inbox.get_nowait()
    except queue.Empty:
      return

  def _take(self, peer: str, message: channel.Message, now: float) -> None:
    kind, pid = message.get("type"), message.get("pid")
    if self.roles.is_stranger(peer, pid):
      if kind == "hello" and peer in self.roles.names and pid is not None:
        logger.warning("stray_ended role=%s pid=%s", peer, pid)
        self.roles.kill_stray(int(pid))
      return
    if kind != "lost":
      self.supervisor.heard(peer, now)
    if kind == "ready" or (kind == "hello" and message.get("ready")):
      self._ready(peer, message, now)
    elif kind == "status":
      self._status(peer, message, now)
    elif kind == "done":
      if peer in self.islands and "step" in message["result"]:
        self._observe(peer, message["result"]["step"])
      elif peer in self.roles.evaluators:
        self._evaluated(peer, message["result"])
      self.dispatcher.done(peer, message["seq"], message["result"])
    elif kind == "lost":
      self.dispatcher.lost(peer)

  def _status(self, peer: str, message: channel.Message, now: float) -> None:
    if peer in self.roles.seats:
      if message["merges"] > self._merges.get(peer, 0):
        # Whoever merges, the seats together do what they are there for.
        for seat in self.roles.seats:
          self.supervisor.settled(seat)
      self._merges[peer] = message["merges"]
      self._mender.watch.told(peer, message.get("damaged", ()), now)
      return
    if peer in self.islands:
      self._observe(peer, message["step"])
    self.supervisor.told(peer, now, message["progress"], message["extra_secs"])

  def _observe(self, role: str, step: int) -> None:
    """Takes in how far an island has trained, which is what it is for."""
    if self.pilot.observe(self.islands[role], step):
      self._first_errors = None
      self.supervisor.trained(role, step)

  def _evaluated(self, role: str, result: Mapping[str, Any]) -> None:
    """Takes in what an evaluator answers; to "configure" that is nothing."""
    if result:
      self.pilot.evaluated()
    if "loss" in result:
      self.supervisor.settled(role)

  def _ready(self, role: str, message: channel.Message, now: float) -> None:
    if role in self.roles.seats:
      self.roles.says_it_leads(role, message["token"])
      for seat in self.roles.deposed:
        self.supervisor.deposed(seat, now)
      if message.get("draining") and self._supplying:
        # It was told to by a controller that wound the run down.
        logger.warning("draining_seat_ended role=%s", role)
        self.roles.kill(role, "it was winding an earlier session down")
        return
    if self.supervisor.state(role) != "starting":
      return  # it only found its channel again
    self.supervisor.ready(role, now)
    if self._was_changed or role in self._attached:
      self._tell_config(role)  # it may have begun with another
    step = message.get("step")
    if role in self.islands:
      self.pilot.joined(self.islands[role], message["step"])
      self.supervisor.joined(role, message["step"])
    if role in self._attached:
      self.tape.record(
        events.REATTACHED,
        peer=role,
        peer_incarnation=self.roles.incarnation(role),
        pid=self.roles.pid(role),
        step=step,
      )
    elif role in self.islands:
      self.tape.record(
        events.ISLAND_READY,
        island=self.islands[role],
        island_incarnation=self.roles.incarnation(role),
        step=step,
      )

  def _mend(self) -> None:
    """Goes back to a cut when damage stands that no syncer can mend."""
    if self._supplying and self._mender.look(self.clock(), self._reap):
      self._gathered_secs = None

  def _take_changes(self) -> None:
    if self._supplying:
      self._changes.look()

  def _configure(
    self, config: config_lib.RunConfig, changes: Mapping[str, tuple[Any, Any]]
  ) -> None:
    """Goes on by another configuration."""
    self.config = config_changes.with_live(
      self.config, config_changes.live(config)
    )
    self._was_changed = True
    self.tape.record(events.CONFIG_CHANGED, changes=changes)
    for role in filter(self.is_ready, self.roles.names):
      self._tell_config(role)

  def _tell_config(self, role: str) -> None:
    live = config_changes.live(self.config)
    self.dispatcher.dispatch(role, "configure", settings=live)

  def _reap(self) -> None:
    """Notices deaths, each once."""
    now = self.clock()
    for death in self.roles.deaths():
      role = death.role
      self.dispatcher.lost(role)
      self._attached.discard(role)
      expected = self.supervisor.state(role) == "stopped"
      self.roles.buried(death, expected=expected)
      if not expected and role not in self.roles.evaluators:
        self._check_first_error(death)
      again = self.supervisor.died(role, now)
      if again is not None and role in self.islands:
        deaths, delay_secs = again
        if deaths > 1:
          self.roles.slice_lost(role)
        self.tape.record(
          events.ISLAND_RESTART,
          island=self.islands[role],
          attempt=deaths,
          delay_secs=delay_secs,
        )
      elif again is None and not expected:
        self._check_anybody_left(role)

  def _check_first_error(self, death: roles_lib.Death) -> None:
    """Raises once a role fails in the same way again, and nothing ever worked.

    That is a mistake of the configuration or the task, and no dying machine.
    Once an island has made a step it is that role's death alone.
    """
    role = death.role
    if self._first_errors is None or not death.failed:
      return
    error = self.roles.error(role)
    if error and error == self._first_errors.get(role):
      raise outcome.StopNowError(
        outcome.Outcome(
          "failed",
          f"{role} failed twice before any step: {error}",
          user_error=errors.UserError(
            f"the run in {self.run_dir}",
            f"{role} failed twice before any step: {error}",
            f"see {self.roles.log(role)}",
          ),
        )
      )
    self._first_errors[role] = error

  def _check_anybody_left(self, role: str) -> None:
    """Raises once a role is given up without which nothing can go on."""
    logger.error("given_up role=%s", role)

    def left(roles: list[str]) -> int:
      return sum(self.supervisor.state(r) != "given_up" for r in roles)

    quorum = self.config.sync.quorum
    if not left(self.roles.seats) or left(list(self.islands)) < quorum:
      reason = f"{role} died too often; see {self.roles.log(role)}"
      raise outcome.StopNowError(outcome.Outcome("failed", reason))

  def _supply(self) -> None:
    """Keeps programs queued, faults injected and cuts taken."""
    if not self._supplying:
      return
    self._faults.inject(self.pilot.tokens)
    ready = {m: r for r, m in self.islands.items() if self.is_ready(r)}
    if not self._gathered(len(ready)) or self.pilot.budget_spent:
      return
    lives = {m: self.roles.incarnation(role) for m, role in ready.items()}
    self._cutter.look(self.clock(), lives)
    queued = {
      m: self.dispatcher.queued(role, "train") for m, role in ready.items()
    }
    for wanted in self.pilot.wanted(queued):
      self.dispatcher.dispatch(ready[wanted.island], wanted.name, **wanted.args)
    for role in self.roles.evaluators:
      busy = not self.is_ready(role) or self.dispatcher.queued(role, "evaluate")
      if due := self.pilot.evaluation(free=not busy):
        self.dispatcher.dispatch(role, "evaluate", **due)

  def _gathered(self, num_ready: int) -> bool:
    """Whether to begin: all are ready, or the first has waited enough."""
    now = self.clock()
    if self._gathered_secs is None:
      if not num_ready:
        return False
      self._gathered_secs = now + self.config.controller.gather_secs
    if num_ready == len(self.islands):
      self._gathered_secs = now
    return now >= self._gathered_secs

  def _record_dispatched(self, sent: program.Program) -> None:
    if sent.peer in self.islands:
      self.tape.record(
        events.PROGRAM_DISPATCHED,
        island=self.islands[sent.peer],
        seq=sent.seq,
        program=sent.name,
        args=dict(sent.args),
      )

  def _record_done(self, sent: program.Program, result: dict[str, Any]) -> None:
    if sent.peer in self.islands:
      self.tape.record(
        events.PROGRAM_DONE,
        island=self.islands[sent.peer],
        seq=sent.seq,
        program=sent.name,
        result=result,
      )
