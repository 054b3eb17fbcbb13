"""Faults of the configuration, when due.

Real signals to real processes, or values that are not finite among the
parameters an island trains.
"""

import signal
from collections.abc import Callable

from diloco import config as config_lib
from diloco.controller import dispatcher as dispatcher_lib
from diloco.controller import roles as roles_lib
from diloco.tape import events, recorder


class Injector:
  """Carries out each configured fault once."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    tape: recorder.Recorder,
    roles: roles_lib.Roles,
    is_ready: Callable[[str | None], bool],
    dispatcher: dispatcher_lib.Dispatcher,
  ):
    """Prepares."""
    self._total_tokens = config.total_tokens
    self._tape = tape
    self._roles = roles
    self._is_ready = is_ready
    self._dispatcher = dispatcher
    self._faults = list(config.faults)

  def inject(self, tokens: int) -> None:
    """Injects what is due with so many `tokens` trained."""
    for fault in list(self._faults):
      if tokens < fault.at_fraction * self._total_tokens:
        continue
      role = self._hit(fault.target)
      if role is None or not self._is_ready(role):
        continue
      self._faults.remove(fault)
      self._tape.record(
        events.FAULT_INJECTED,
        kind=fault.kind,
        target=fault.target,
        at_tokens=tokens,
      )
      if fault.kind == "poison":
        self._dispatcher.dispatch(role, "poison", fragment=0)
      else:
        self._roles.signal(role, getattr(signal, fault.kind.upper()))

  def _hit(self, target: str) -> str | None:
    """The role a fault is meant for; a syncer is named by what it does."""
    leader = self._roles.leader
    if target == "syncer":
      return leader
    if target == "standby":
      waiting = [s for s in self._roles.seats if s != leader]
      return next(filter(self._is_ready, waiting), None) if leader else None
    return target
