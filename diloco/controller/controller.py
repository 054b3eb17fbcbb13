"""The controller: one process that owns the fleet of a run.

It binds slices, starts roles, dispatches programs, restarts what dies, and
winds the run down. It touches no tensor bytes and decides nothing about
merging: while it is dead, islands repeat their last program and the syncer
goes on.

Reference: Pathways, arXiv 2203.12533.
"""

import dataclasses
import logging
import os
import pathlib
import queue
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from diloco import channel, process
from diloco import config as config_lib
from diloco.controller import (
  dispatcher,
  pilot,
  program,
  resources,
  supervisor,
)
from diloco.controller.engines import base
from diloco.report import liveness
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)

Status = Literal["finished", "stopped", "failed", "killed"]

SYNCER = "syncer"
_TICK_SECS = 0.1
_KILL_SECS = 10.0
_USER_ERROR = "exit 2"


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run ended.

  Attributes:
    status: "finished" (budget trained), "stopped" (asked to, resumable),
      "failed" (nothing left to run on) or "killed" (asked twice).
    reason: in words.
    final_eval: the last evaluation of the global parameters, if there was one.
    user_error: the line of a role that refused its input.
  """

  status: Status
  reason: str
  final_eval: dict[str, Any] | None = None
  user_error: str | None = None


def next_incarnation(run_dir: pathlib.Path, role: str) -> int:
  """One more than the last life of a role that left a tape."""
  tapes = (run_dir / recorder.TAPE_DIR).glob(f"{role}-[0-9]*.jsonl")
  lives = [int(path.stem.rpartition("-")[2]) for path in tapes]
  return max(lives, default=0) + 1


class _StopNowError(Exception):
  """Ends the run at once."""

  def __init__(self, outcome: Outcome):
    super().__init__(outcome.reason)
    self.outcome = outcome


class Controller:
  """One run's controller. `run()` returns when the run has ended."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    run_dir: pathlib.Path,
    engine: base.Engine,
    tokens_per_step: int,
    *,
    incarnation: int,
    on_tick: Callable[[], None] = lambda: None,
  ):
    """Listens and goes on the record; starts nothing yet.

    Args:
      config: the run's configuration.
      run_dir: directory of the run.
      engine: where roles run.
      tokens_per_step: tokens of one inner step of an island.
      incarnation: which life of the controller this is, from 1.
      on_tick: called several times a second, for the live view.

    Raises:
      UserError: the configured port is taken, or the fleet does not fit.
    """
    self._config = config
    self._run_dir = run_dir
    self._engine = engine
    self._on_tick = on_tick
    cores = resources.available_cores()
    resources.check_fits(config, cores)
    self._resources = resources.ResourceManager(config, cores)
    self._server = channel.Server(config.controller.port)
    self._tape = recorder.Recorder(run_dir, "controller", incarnation)
    self._islands = {f"island-{m}": m for m in range(config.fleet.islands)}
    self._supervisor = supervisor.Supervisor(
      supervisor.Policy(
        restart_base_secs=config.controller.restart_base_secs,
        restart_max_secs=config.controller.restart_max_secs,
        max_restarts=config.controller.max_restarts,
        start_secs=config.controller.start_secs,
        hang_secs=config.controller.hang_secs,
      ),
      [SYNCER, *self._islands],
    )
    self._dispatcher = dispatcher.Dispatcher(
      self._server.send, self._record_dispatched, self._record_done
    )
    self._pilot = pilot.Pilot(config, tokens_per_step)
    self._handles: dict[str, base.Handle] = {}
    self._incarnations: dict[str, int] = {}
    self._faults = list(config.faults)
    self._interrupts = 0
    self._supplying = True
    self._gathered_secs: float | None = None  # when to begin, once known

  def interrupt(self) -> None:
    """First call: wind down in order. Second: kill everything at once."""
    self._interrupts += 1

  def run(self) -> Outcome:
    """Trains until the budget is spent or the run is stopped."""
    config = self._config
    leftovers = self._engine.kill_leftovers()
    if leftovers:
      logger.warning("leftovers_killed roles=%s", ",".join(leftovers))
    pid = os.getpid()
    self._server.announce(
      self._run_dir, {"pid": pid, "started_ticks": liveness.start_ticks(pid)}
    )
    self._tape.record(
      events.RUN_STARTED,
      method="decoupled_diloco",
      islands=config.fleet.islands,
      total_tokens=config.total_tokens,
    )
    try:
      outcome = self._train_and_wind_down()
    except _StopNowError as stop:
      outcome = stop.outcome
    finally:
      self._kill_all()
      self._server.close()
      channel.address_path(self._run_dir).unlink(missing_ok=True)
    self._tape.record(
      events.RUN_FINISHED, status=outcome.status, reason=outcome.reason
    )
    self._tape.close()
    return outcome

  def _train_and_wind_down(self) -> Outcome:
    while not self._pilot.budget_spent and not self._interrupts:
      self._turn()
    finished = not self._interrupts
    reason = "token budget trained" if finished else "interrupted"
    self._tape.record(events.RUN_STOPPING, reason=reason)
    logger.info("stopping reason=%s", reason)
    final_eval = self._wind_down(evaluate=finished)
    if finished and final_eval is None:
      return Outcome("failed", "the final evaluation could not be done")
    return Outcome("finished" if finished else "stopped", reason, final_eval)

  def _wind_down(self, *, evaluate: bool) -> dict[str, Any] | None:
    """Drain, merge what is left, evaluate, save, stop."""
    self._supplying = False
    patience_secs = self._config.controller.drain_secs
    for role in self._islands:
      # Who is not running now will not run again in this session.
      if not self._is_ready(role):
        self._supervisor.stopping(role)
        self._kill(role)
    self._ask_islands("drain", timeout_secs=patience_secs)
    self._ask([SYNCER], "drain")
    final_eval = None
    for role in list(self._islands) if evaluate else []:
      if self._is_ready(role) and final_eval is None:
        batches = self._config.programs.final_eval_batches
        args = {"target": "global", "num_batches": batches}
        final_eval = self._ask([role], "evaluate", **args).get(role)
    self._ask_islands("checkpoint", wait=True)
    self._stop_roles([r for r in self._islands if self._is_ready(r)])
    self._stop_roles([SYNCER])
    return final_eval

  def _ask_islands(self, name: program.Name, **args: Any) -> None:
    self._ask([r for r in self._islands if self._is_ready(r)], name, **args)

  def _ask(
    self, roles: Sequence[str], name: program.Name, **args: Any
  ) -> dict[str, dict[str, Any]]:
    """Dispatches to several roles and waits for those that live to answer."""
    deadline = time.monotonic() + self._config.controller.drain_secs + 5.0
    results = {
      role: self._dispatcher.dispatch(role, name, preempt=True, **args)
      for role in roles
    }
    while time.monotonic() < deadline and not all(
      f.done() for f in results.values()
    ):
      self._turn()
    answers = {}
    for role, future in results.items():
      if not future.done():
        logger.warning("no_answer role=%s program=%s", role, name)
        self._kill(role)
      elif future.exception() is None:
        answers[role] = future.result()
    return answers

  def _stop_roles(self, roles: Sequence[str]) -> None:
    for role in roles:
      self._supervisor.stopping(role)
      self._dispatcher.dispatch(role, "stop", preempt=True, reason="run ended")
    deadline = time.monotonic() + self._config.controller.drain_secs
    while time.monotonic() < deadline and any(
      r in self._handles for r in roles
    ):
      self._turn()

  def _is_ready(self, role: str) -> bool:
    return self._supervisor.state(role) == "running" and role in self._handles

  def _turn(self) -> None:
    """One round of the controller's loop; about a tenth of a second."""
    if self._interrupts > 1:
      raise _StopNowError(Outcome("killed", "interrupted twice"))
    self._take_messages()
    now = time.monotonic()
    self._reap(now)
    for order in self._supervisor.orders(now):
      if isinstance(order, supervisor.Kill):
        logger.warning("hang role=%s cause=%s", order.role, order.cause)
        self._kill(order.role)
      elif self._supplying or order.role == SYNCER:
        self._start(order.role, now)
    if self._supplying:
      self._inject_faults()
      self._supply()
    self._on_tick()

  def _take_messages(self) -> None:
    try:
      peer, message = self._server.inbox.get(timeout=_TICK_SECS)
      while True:
        self._take(peer, message, time.monotonic())
        peer, message = self._server.inbox.get_nowait()
    except queue.Empty:
      return

  def _take(self, peer: str, message: channel.Message, now: float) -> None:
    handle = self._handles.get(peer)
    kind = message.get("type")
    if handle is None or message.get("pid", handle.pid) != handle.pid:
      return
    if kind != "lost":
      self._supervisor.heard(peer, now)
    if kind == "ready" or (kind == "hello" and message.get("ready")):
      self._ready(peer, message, now)
    elif kind == "status" and peer in self._islands:
      moved = self._pilot.observe(self._islands[peer], message["step"])
      if moved or not message["training"]:
        self._supervisor.progressed(peer, now, busy=message["training"])
      else:
        self._supervisor.working(peer, now)
    elif kind == "done":
      if peer in self._islands and "step" in message["result"]:
        self._pilot.observe(self._islands[peer], message["result"]["step"])
      self._dispatcher.done(peer, message["seq"], message["result"])
    elif kind == "lost":
      self._dispatcher.lost(peer)

  def _ready(self, role: str, message: channel.Message, now: float) -> None:
    if self._supervisor.state(role) != "starting":
      return  # it only found its channel again
    self._supervisor.ready(role, now)
    if role in self._islands:
      island, step = self._islands[role], message["step"]
      self._pilot.joined(island, step)
      self._tape.record(
        events.ISLAND_READY,
        island=island,
        island_incarnation=self._incarnations[role],
        step=step,
      )

  def _reap(self, now: float) -> None:
    """Notices deaths, each once."""
    for role, handle in list(self._handles.items()):
      cause = handle.cause_of_death()
      if cause is None:
        continue
      del self._handles[role]
      self._dispatcher.lost(role)
      expected = self._supervisor.state(role) == "stopped"
      if not expected:
        self._record_death(role, cause)
        if cause == _USER_ERROR:
          raise _StopNowError(
            Outcome("failed", f"{role} refused", user_error=self._error(role))
          )
      again = self._supervisor.died(role, now)
      if again is not None and role in self._islands:
        deaths, delay_secs = again
        if deaths > 1:
          self._resources.slice_lost(self._islands[role])
        self._tape.record(
          events.ISLAND_RESTART,
          island=self._islands[role],
          attempt=deaths,
          delay_secs=delay_secs,
        )
      elif again is None and not expected:
        self._check_anybody_left(role)

  def _check_anybody_left(self, role: str) -> None:
    """Raises once a role is given up without which nothing can go on."""
    left = [r for r in self._islands if self._supervisor.state(r) != "given_up"]
    logger.error("given_up role=%s", role)
    if role == SYNCER or len(left) < self._config.sync.quorum:
      reason = f"{role} died too often; see {self._log(role)}"
      raise _StopNowError(Outcome("failed", reason))

  def _record_death(self, role: str, cause: str) -> None:
    logger.warning("died role=%s cause=%s", role, cause)
    if role == SYNCER:
      self._tape.record(events.SYNCER_DIED, cause=cause)
    else:
      self._tape.record(
        events.ISLAND_DIED,
        island=self._islands[role],
        island_incarnation=self._incarnations[role],
        cause=cause,
      )

  def _log(self, role: str) -> pathlib.Path:
    return self._run_dir / "logs" / f"{role}.log"

  def _error(self, role: str) -> str:
    lines = self._log(role).read_text(errors="replace").splitlines()
    found = [line for line in lines if line.startswith("error: ")]
    return found[-1].removeprefix("error: ") if found else f"{role} failed"

  def _start(self, role: str, now: float) -> None:
    incarnation = self._next_incarnation(role)
    self._incarnations[role] = incarnation
    args = ["--run_dir", str(self._run_dir), "--incarnation", str(incarnation)]
    if role == SYNCER:
      self._handles[role] = self._engine.start(
        base.Launch(role, "diloco.syncer.main", args, self._log(role))
      )
      self._tape.record(events.SYNCER_STARTED, pid=self._handles[role].pid)
    else:
      island = self._islands[role]
      slice_index, cores = self._resources.bind(island)
      args += ["--island", str(island), "--slice", str(slice_index)]
      args += ["--cores", *map(str, cores)]
      self._handles[role] = self._engine.start(
        base.Launch(
          role,
          "diloco.islands.main",
          args,
          self._log(role),
          env=process.ISLAND_ENV,
          cores=cores,
        )
      )
      self._tape.record(
        events.ISLAND_STARTED,
        island=island,
        island_incarnation=incarnation,
        pid=self._handles[role].pid,
        cores=cores,
      )
    self._supervisor.started(role, now)

  def _next_incarnation(self, role: str) -> int:
    if role in self._incarnations:
      return self._incarnations[role] + 1
    return next_incarnation(self._run_dir, role)

  def _supply(self) -> None:
    ready = {m: r for r, m in self._islands.items() if self._is_ready(r)}
    if not self._gathered(len(ready)) or self._pilot.budget_spent:
      return
    queued = {
      m: self._dispatcher.queued(role, "train") for m, role in ready.items()
    }
    for wanted in self._pilot.wanted(queued):
      self._dispatcher.dispatch(
        ready[wanted.island], wanted.name, **wanted.args
      )

  def _gathered(self, num_ready: int) -> bool:
    """Whether to begin: all are ready, or the first has waited enough."""
    now = time.monotonic()
    if self._gathered_secs is None:
      if not num_ready:
        return False
      self._gathered_secs = now + self._config.controller.gather_secs
    if num_ready == len(self._islands):
      self._gathered_secs = now
    return now >= self._gathered_secs

  def _inject_faults(self) -> None:
    done = self._pilot.tokens / self._config.total_tokens
    for fault in list(self._faults):
      if done >= fault.at_fraction and self._is_ready(fault.target):
        self._faults.remove(fault)
        self._tape.record(
          events.FAULT_INJECTED,
          kind=fault.kind,
          target=fault.target,
          at_tokens=self._pilot.tokens,
        )
        number = getattr(signal, fault.kind.upper())
        self._handles[fault.target].signal(number)

  def _kill(self, role: str) -> None:
    handle = self._handles.get(role)
    if handle is not None:
      handle.signal(signal.SIGKILL)

  def _kill_all(self) -> None:
    for role in self._handles:
      self._kill(role)
    for role, handle in self._handles.items():
      if not handle.wait(_KILL_SECS):
        logger.error("unkillable role=%s pid=%d", role, handle.pid)

  def _record_dispatched(self, sent: program.Program) -> None:
    if sent.peer in self._islands:
      self._tape.record(
        events.PROGRAM_DISPATCHED,
        island=self._islands[sent.peer],
        seq=sent.seq,
        program=sent.name,
        args=dict(sent.args),
      )

  def _record_done(self, sent: program.Program, result: dict[str, Any]) -> None:
    if sent.peer in self._islands:
      self._tape.record(
        events.PROGRAM_DONE,
        island=self._islands[sent.peer],
        seq=sent.seq,
        program=sent.name,
        result=result,
      )
