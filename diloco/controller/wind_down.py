"""A session from its first turn to its last: train, then wind down in order.

Winding down: islands publish what they have, the leading syncer merges it, one
island evaluates, all save, all stop.
"""

import contextlib
import logging
import traceback
from collections.abc import Sequence
from typing import Any

from diloco import crash, errors
from diloco.controller import controller as controller_lib
from diloco.controller import outcome as outcome_lib
from diloco.controller import program
from diloco.tape import events

logger = logging.getLogger(__name__)

_GRACE_SECS = 5.0  # more than a role itself takes for what it was asked


def run(controller: controller_lib.Controller) -> outcome_lib.Outcome:
  """Trains until the budget is spent or the run is stopped.

  Raises:
    DetachedError: the controller failed, or another one has the run. Its roles
      live and go on.
  """
  try:
    outcome = _outcome(controller)
    controller.close()
  except errors.FencedError as error:
    controller.leave()  # and put down nothing more, anywhere
    controller.tape.close()
    raise errors.DetachedError(
      f"the run in {controller.run_dir}: {error}; this one has left it as it is"
    ) from error
  except Exception as error:
    # A mistake in here is no reason to kill a fleet that trains.
    if not controller.roles.outlive:
      with contextlib.suppress(errors.PlainError):  # its lease is lost, too
        controller.roles.end_all()
    controller.leave()
    _tell_requests(controller)
    controller.tape.close()
    raise _detached(controller, error) from error
  _tell_requests(controller)
  controller.tape.record(
    events.RUN_FINISHED, status=outcome.status, reason=outcome.reason
  )
  controller.tape.close()
  return outcome


def _tell_requests(controller: controller_lib.Controller) -> None:
  controller.tape.record(events.STORE_REQUESTS, **controller.requests.made())


def _detached(
  controller: controller_lib.Controller, error: Exception
) -> errors.DetachedError:
  """Writes down where it happened; returns what to tell the user."""
  log = controller.roles.log("controller")
  with contextlib.suppress(OSError):
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
      traceback.print_exception(error, file=file)
  what = " ".join(f"{type(error).__name__}: {error}".split())
  fate = "its roles ended with it; go on"
  if controller.roles.outlive:
    secs = f"{controller.times.orphan_secs:g}"
    fate = f"roles that live go on for {secs} s, then save and leave; take them"
    fate += " up"
  return errors.DetachedError(
    f"the controller failed ({what}, see {log}); {fate} with 'diloco resume"
    f" {controller.run_dir}'"
  )


def _outcome(controller: controller_lib.Controller) -> outcome_lib.Outcome:
  try:
    controller.open()
    return _train_and_wind_down(controller)
  except outcome_lib.StopNowError as stop:
    return stop.outcome


def _train_and_wind_down(
  controller: controller_lib.Controller,
) -> outcome_lib.Outcome:
  while not controller.trained and not controller.interrupts:
    controller.turn()
  controller.tenure.check()
  finished = not controller.interrupts
  reason = "token budget trained" if finished else "interrupted"
  controller.tape.record(events.RUN_STOPPING, reason=reason)
  crash.point("controller_stopping")
  logger.info("stopping reason=%s", reason)
  final_eval = WindDown(controller).run(evaluate=finished)
  if not finished:
    return outcome_lib.Outcome("stopped", reason)
  return outcome_lib.conclude(final_eval)


class WindDown:
  """Ends a session in order."""

  def __init__(self, controller: controller_lib.Controller):
    """Args: whose session; no role is started for training any more."""
    self._controller = controller
    self._times = controller.times
    controller.stop_supplying()

  def run(self, *, evaluate: bool) -> dict[str, Any]:
    """Drain, merge what is left, evaluate, save, stop.

    Returns:
      The final evaluation, or why there is none as its `error`.
    """
    controller = self._controller
    for role in controller.islands:
      # Who is not running now will not run again in this session.
      if not controller.is_ready(role):
        self._give_up(role)
    self._ask_islands("drain", timeout_secs=self._times.drain_secs)
    self._ask_leader("drain")
    final_eval = self._final_eval() if evaluate else {}
    self._ask_islands("checkpoint", wait=True)
    self._stop(self._ready_islands(), self._times.drain_secs)
    # Those that wait first, or one would take over from the leader.
    leader = controller.roles.leader
    waiting = [s for s in controller.roles.seats if s != leader]
    waiting += controller.roles.evaluators
    self._stop(waiting, 2 * self._times.member_ttl_secs)
    self._stop([leader] if leader else [], self._times.drain_secs)
    return final_eval

  def _final_eval(self) -> dict[str, Any]:
    """Asks one island after another, and again, until one can."""
    clock = self._controller.clock
    batches = self._controller.config.programs.final_eval_batches
    args = {"target": "global", "num_batches": batches}
    found: dict[str, Any] = {"error": "no island is left that could"}
    deadline = clock() + self._times.drain_secs
    while clock() < deadline and self._ready_islands():
      for role in filter(self._controller.is_ready, self._controller.islands):
        found = self._ask([role], "evaluate", **args).get(role) or {
          "error": f"{role} gave no answer"
        }
        if "error" not in found:
          return found
    return found

  def _ready_islands(self) -> list[str]:
    return list(filter(self._controller.is_ready, self._controller.islands))

  def _give_up(self, role: str) -> None:
    self._controller.supervisor.stopping(role)
    self._controller.roles.kill(role)

  def _ask_islands(self, name: program.Name, **args: Any) -> None:
    self._ask(self._ready_islands(), name, **args)

  def _ask(
    self, roles: Sequence[str], name: program.Name, **args: Any
  ) -> dict[str, dict[str, Any]]:
    """Dispatches to several roles and waits for those that live to answer."""
    controller = self._controller
    deadline = controller.clock() + self._times.drain_secs + _GRACE_SECS
    results = {
      role: controller.dispatcher.dispatch(role, name, preempt=True, **args)
      for role in roles
    }
    while controller.clock() < deadline and not all(
      f.done() for f in results.values()
    ):
      controller.turn()
    answers = {}
    for role, future in results.items():
      if not future.done():
        logger.warning("no_answer role=%s program=%s", role, name)
        controller.roles.kill(role)
      elif future.exception() is None:
        answers[role] = future.result()
    return answers

  def _ask_leader(self, name: program.Name) -> None:
    """Asks who leads, and whoever leads next if that one dies meanwhile."""
    controller = self._controller
    deadline = controller.clock() + self._times.drain_secs + _GRACE_SECS
    while controller.clock() < deadline:
      leader = controller.roles.leader
      if not controller.is_ready(leader):
        controller.turn()
        continue
      assert leader is not None
      answer = controller.dispatcher.dispatch(leader, name, preempt=True)
      while (
        not answer.done()
        and controller.roles.leader == leader
        and controller.clock() < deadline
      ):
        controller.turn()
      if answer.done() and answer.exception() is None:
        if answer.result().get("leads", True):
          return
      elif answer.done():
        controller.turn()  # its channel is gone; a new one or a death is due
    logger.warning("no_answer role=syncer program=%s", name)

  def _stop(self, roles: Sequence[str], patience_secs: float) -> None:
    """Ends roles: in order those that can be asked, the others at once."""
    controller = self._controller
    for role in roles:
      ready = controller.is_ready(role)
      controller.supervisor.stopping(role)
      if ready:
        controller.dispatcher.dispatch(
          role, "stop", preempt=True, reason="run ended"
        )
      else:
        controller.roles.kill(role)
    deadline = controller.clock() + patience_secs
    while controller.clock() < deadline and any(
      controller.roles.alive(r) for r in roles
    ):
      controller.turn()
    for role in roles:
      controller.roles.kill(role)
