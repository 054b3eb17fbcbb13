"""Sets a run that is on back to a cut, in the middle of a session.

What a resume does before its roles start: all of them are ended, the store is
set back, and they start again. In between none may live.
"""

import logging
from collections.abc import Callable

from diloco import errors
from diloco.controller import damage, outcome, supervisor
from diloco.controller import roles as roles_lib
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)


class Mender:
  """Of one session; what it hears of goes to `watch`."""

  def __init__(
    self,
    watch: damage.DamageWatch,
    set_back: Callable[[Callable[[], list[str]]], bool],
    roles: roles_lib.Roles,
    supervisor: supervisor.Supervisor,
    tape: recorder.Recorder,
  ):
    """Args: when to act, `Outside.set_back`, and whose roles they are."""
    self.watch = watch
    self._set_back = set_back
    self._roles = roles
    self._supervisor = supervisor
    self._tape = tape
    self._ended = False  # all roles, for a return that is not finished

  def look(self, now: float, bury: Callable[[], None]) -> bool:
    """Goes back to a cut if damage has stood for long enough.

    Returns:
      Whether all roles have been ended, and are about to start.

    Raises:
      StopNowError: a return that was begun cannot be finished.
      OSError: the store is out of reach; call again.
    """
    fragments = self.watch.due(now)
    if not fragments:
      return False
    logger.error("damaged fragments=%s", ",".join(map(str, fragments)))
    try:
      was_set_back = self._set_back(lambda: self._end_roles(bury))
    except errors.UserError as error:
      if self._ended:  # an earlier attempt began, and must be finished
        reason = f"the return to a cut failed: {error}"
        raise outcome.StopNowError(outcome.Outcome("failed", reason)) from error
      logger.error("not_set_back error=%s", error)
      self._tape.record(
        events.NOT_RESTORED, fragments=fragments, reason=str(error)
      )
      was_set_back = False
    if not was_set_back and not self._ended:
      self.watch.leave_alone(fragments)
      return False
    self._start_anew(now)
    return True

  def _end_roles(self, bury: Callable[[], None]) -> list[str]:
    """Ends all roles; names those that lived. Their ends are no deaths."""
    self._ended = True
    for role in self._roles.names:
      self._supervisor.stopping(role)
    living = self._roles.end_all()
    bury()
    return living

  def _start_anew(self, now: float) -> None:
    self._ended = False
    self.watch.begin_anew()
    for role in self._roles.names:
      self._supervisor.anew(role, now)
