"""The controller: one process that owns the fleet of a run.

A thin shell of its core: what is heard becomes an event, what the core orders
is done. Nothing about the fleet is decided here.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
import queue
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from diloco import channel, config_changes, crash, errors, process, timing
from diloco import config as config_lib
from diloco.controller import change, core, cutter, orders
from diloco.controller import outcome as outcome_lib
from diloco.controller import roles as roles_lib
from diloco.controller import tenure as tenure_lib
from diloco.controller.engines import base
from diloco.report import liveness
from diloco.snapshots import requests, store
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)

_TICK_SECS = 0.1
_HINTS_SECS = 1.0  # between two looks at what others find us by
_SEQS_A_LIFE = 10**9  # programs a controller dispatches at most


@dataclasses.dataclass(frozen=True)
class Outside:
  """What a controller acts on.

  Attributes:
    engine: where roles run.
    server: its end of all channels.
    clock: gives monotonic seconds.
    on_tick: called several times a second, for the live view.
    set_back: sets the run back to its newest sound cut if it is damaged, once
      what it is given has ended all roles; says whether it did. `UserError`: no
      cut will do, and nothing was changed. `OSError`: to be tried again.
    tenure: its hold on the run.
  """

  engine: base.Engine
  server: channel.Server
  clock: Callable[[], float] = time.monotonic
  on_tick: Callable[[], None] = lambda: None
  set_back: Callable[[Callable[[], list[str]]], bool] = lambda _: False
  tenure: tenure_lib.Unopposed = dataclasses.field(
    default_factory=tenure_lib.Unopposed
  )


class _Tape(recorder.Recorder):
  """A tape whose failure stops nobody."""

  def record(self, event: str, /, **fields: Any) -> None:
    try:
      super().record(event, **fields)
    except OSError as error:
      logger.warning("line_lost event=%s error=%s", event, error)

  def close(self) -> None:
    try:
      super().close()
    except OSError as error:
      logger.warning("lines_lost error=%s", error)


class Controller:
  """One session's controller."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    run_dir: pathlib.Path,
    outside: Outside,
    tokens_per_step: int,
    times: timing.Timing,
    *,
    incarnation: int,
    changed: Mapping[str, tuple[Any, Any]] | None = None,
  ):
    """Goes on the record; starts nothing yet.

    `incarnation` says which life of the controller this is, from 1; `changed`
    has fields of the configuration with other values than the run had, and
    both.

    Raises:
      UserError: the fleet does not fit.
    """
    self.run_dir = run_dir
    self.tape = _Tape(run_dir, "controller", incarnation)
    self.roles = roles_lib.Roles(
      config, run_dir, outside.engine, self.tape, outside.tenure.check
    )
    self.core = core.ControllerCore(
      config,
      times,
      tokens_per_step,
      run=f"the run in {run_dir}",
      first_seq=(incarnation - 1) * _SEQS_A_LIFE + 1,
    )
    self.interrupts = 0
    self._interrupts_told = 0
    self._outcome: outcome_lib.Outcome | None = None
    self._outside = outside
    self._clock = outside.clock
    self._server = outside.server
    self._tenure = outside.tenure
    self._times = times
    url = process.store_url(run_dir, config)
    self._requests = requests.Counter(url)
    self._store = store.SnapshotStore(url)
    self._cutter = cutter.of_run(
      config, self._store, run_dir, self.tape, self._tenure.token
    )
    self._changed = dict(changed or {})
    self._hints_due = 0.0

  def interrupt(self) -> None:
    """First call: wind down in order. Second: kill everything at once."""
    self.interrupts += 1

  def strike(self, target: str) -> bool:
    """Kills a role, a syncer by what it does; says whether there was one."""
    role = self.core.fleet.hit(target) or target
    self.roles.signal(role, signal.SIGKILL)
    return role in self.core.fleet.lives

  # A session

  def run(self) -> outcome_lib.Outcome:
    """Trains until the budget is spent or the run is stopped.

    Raises:
      DetachedError: the controller failed, or another one has the run. Its
        roles live and go on.
    """
    try:
      self.open()
      while self._outcome is None:
        self.turn()
      self.close()
    except errors.FencedError as error:
      self.leave()  # and put down nothing more, anywhere
      self.tape.close()
      raise errors.DetachedError(
        f"the run in {self.run_dir}: {error}; this one has left it as it is"
      ) from error
    except Exception as error:
      # A mistake in here is no reason to kill a fleet that trains.
      if not self.roles.engine.apart:
        with contextlib.suppress(errors.PlainError):  # its lease is lost, too
          self.roles.end_all()
      self.leave()
      self._tell_requests()
      self.tape.close()
      raise self._detached(error) from error
    self._tell_requests()
    self.tape.record(
      events.RUN_FINISHED,
      status=self._outcome.status,
      reason=self._outcome.reason,
    )
    self.tape.close()
    return self._outcome

  def open(self) -> None:
    """Takes up who is alive, and says where it listens."""
    taken_up = self.roles.attach()
    for event in taken_up:
      self._tell(event)
    self._tenure.check()
    self._announce()
    self.roles.engine.tell_address()
    self._tell(orders.Opened(self._tenure.token, self._changed))

  def turn(self) -> None:
    """One round of the controller's loop; about a tenth of a second.

    Raises:
      FencedError: another controller has the run.
    """
    for part in (self._listen, self._reap, self._tick, self._keep_hints):
      self._tenure.check()
      try:
        part()
      except OSError as error:
        logger.warning("will_retry after=%s error=%s", part.__name__, error)
    self._outside.on_tick()

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

  def _tell_requests(self) -> None:
    self.tape.record(events.STORE_REQUESTS, **self._requests.made())

  def _detached(self, error: Exception) -> errors.DetachedError:
    """Writes down where it happened; returns what to tell the user."""
    log = self.roles.log("controller")
    with contextlib.suppress(OSError):
      log.parent.mkdir(parents=True, exist_ok=True)
      with log.open("a") as file:
        traceback.print_exception(error, file=file)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    fate = "its roles ended with it; go on"
    if self.roles.engine.apart:
      secs = f"{self._times.orphan_secs:g}"
      fate = f"roles that live go on for {secs} s, then save and leave; take"
      fate += " them up"
    return errors.DetachedError(
      f"the controller failed ({what}, see {log}); {fate} with 'diloco resume"
      f" {self.run_dir}'"
    )

  # What it hears

  def _listen(self) -> None:
    with contextlib.suppress(queue.Empty):
      peer, message = self._server.inbox.get(timeout=_TICK_SECS)
      while True:
        event = _event(peer, message)
        if event is not None:
          self._tell(event)
        peer, message = self._server.inbox.get_nowait()

  def _reap(self) -> None:
    """Notices deaths, each once."""
    for death in self.roles.deaths():
      self._tell(death)

  def _tick(self) -> None:
    while self._interrupts_told < self.interrupts:
      self._interrupts_told += 1
      self._tell(orders.Interrupted())
    self._tell(orders.Tick())

  def _keep_hints(self) -> None:
    """Puts back what others need to read, should it have been deleted."""
    now = self._clock()
    if now < self._hints_due:
      return
    self._hints_due = now + _HINTS_SECS
    process.keep_config(self.run_dir)
    self.roles.engine.tell_address()
    if not liveness.controller_alive(self.run_dir):
      logger.warning("address_lost written_again=1")
      self._announce()

  def _announce(self) -> None:
    told = liveness.announcement(self.run_dir)
    self._server.announce(self.run_dir, told)

  # What it does

  def _tell(self, event: orders.Event) -> None:
    """Does what the core orders then, and tells it what came of that."""
    for order in self.core.handle(event, self._clock()):
      self._tenure.check()
      try:
        came = self._perform(order)
      except OSError as error:
        came = orders.Failed(order, str(error))
      if came is not None:
        self._tell(came)
      if self._outcome is not None:
        return

  def _perform(self, order: orders.Order) -> orders.Event | None:
    match order:
      case orders.Start(role):
        return self.roles.start(role)
      case orders.Kill(role):
        self.roles.kill(role)
      case orders.KillStray(_, pid):
        self.roles.kill_stray(pid)
      case orders.Signal(role, name):
        self.roles.signal(role, getattr(signal, name.upper()))
      case orders.MoveSlice(role):
        self.roles.slice_lost(role)
      case orders.Send(program):
        if not self._server.send(program.peer, program.message()):
          return orders.Lost(program.peer)
      case orders.Record(event, fields):
        self.tape.record(event, **fields)
      case orders.Say(text, level):
        getattr(logger, level)("%s", text)
      case orders.Point(name):
        crash.point(name)
      case orders.LookAtCuts(lives):
        self._store.perform(self._cutter.look(self._clock(), lives))
      case orders.CloseCuts():
        self._store.perform(self._cutter.close())
      case orders.TakeChanges():
        change.take_up(
          self.run_dir,
          config_changes.live(self.core.config),
          lambda *made: self._tell(orders.Configured(*made)),
        )
      case orders.GoBack():
        return self._go_back()
      case orders.End(outcome):
        self._outcome = outcome
    return None

  def _go_back(self) -> orders.Event:
    def end_roles() -> list[str]:
      self._tell(orders.Ending())
      living = self.roles.end_all()
      self._reap()
      return living

    try:
      return orders.SetBack(self._outside.set_back(end_roles))
    except errors.UserError as error:
      return orders.SetBack(done=False, error=str(error))


_KINDS: dict[str, type[orders.Event]] = {
  "hello": orders.Hello,
  "ready": orders.Hello,
  "status": orders.Status,
  "done": orders.Done,
  "lost": orders.Lost,
}


def _event(peer: str, message: channel.Message) -> orders.Event | None:
  """What a role says, for the core; None for what nobody understands."""
  kind: Any = _KINDS.get(str(message.get("type")))
  if kind is None:
    return None
  said = message | {"ready": True} if message["type"] == "ready" else message
  known = {field.name for field in dataclasses.fields(kind)}
  event: orders.Event = kind(
    peer, **{name: value for name, value in said.items() if name in known}
  )
  return event
