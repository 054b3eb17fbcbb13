"""The end of a session, in order, as a script.

Islands publish what they have, the leading syncer merges it, one island
evaluates, all save, all stop. A script does nothing itself: it orders, and
yields until the next tick wherever it has to wait.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from diloco import timing
from diloco.controller import fleet as fleet_lib
from diloco.controller import orders, program

Script = Generator[None, None, Any]

_GRACE_SECS = 5.0  # more than a role itself takes for what it was asked


class WindDown:
  """Ends a session; nobody starts an island any more."""

  def __init__(
    self, fleet: fleet_lib.Fleet, times: timing.Timing, final_batches: int
  ):
    """The last loss is of `final_batches` batches."""
    self._fleet = fleet
    self._times = times
    self._final_batches = final_batches

  def run(self, *, evaluate: bool) -> Script:
    """Drain, merge what is left, evaluate, save, stop.

    Returns:
      The final evaluation, or why there is none as its `error`.
    """
    fleet, times = self._fleet, self._times
    fleet.orders.append(orders.CloseCuts())
    for role in fleet.islands:
      # Who is not running now will not run again in this session.
      if not fleet.is_ready(role):
        fleet.supervisor.stopping(role)
        fleet.kill(role)
    yield from self._ask_islands("drain", timeout_secs=times.drain_secs)
    if fleet.ready_islands or fleet.leader:  # else nobody may ever have led
      yield from self._ask_leader("drain")
    final_eval = (yield from self._final_eval()) if evaluate else {}
    yield from self._ask_islands("checkpoint", wait=True)
    yield from self._stop(fleet.ready_islands, times.drain_secs)
    # Those that wait first, or one would take over from the leader.
    leader = fleet.leader
    waiting = [s for s in fleet.seats if s != leader]
    waiting += fleet.names.evaluators
    yield from self._stop(waiting, 2 * times.member_ttl_secs)
    yield from self._stop([leader] if leader else [], times.drain_secs)
    return final_eval

  def _final_eval(self) -> Script:
    """Asks one island after another, and again, until one can."""
    fleet = self._fleet
    args = {"target": "global", "num_batches": self._final_batches}
    found: Mapping[str, Any] = {"error": "no island is left that could"}
    deadline = fleet.now + self._times.drain_secs
    while fleet.now < deadline and fleet.ready_islands:
      for role in filter(fleet.is_ready, fleet.islands):
        answers = yield from self._ask([role], "evaluate", **args)
        if role not in answers:  # it is gone, and so is the others' time
          deadline = fleet.now + self._times.drain_secs
        found = answers.get(role) or {"error": f"{role} gave no answer"}
        if "error" not in found:
          return found
    return found

  def _ask_islands(self, name: program.Name, **args: Any) -> Script:
    yield from self._ask(self._fleet.ready_islands, name, **args)

  def _ask(
    self, roles: Sequence[str], name: program.Name, /, **args: Any
  ) -> Script:
    """Asks several roles, and waits for those that live to answer.

    One whose channel is away is waited for, and asked again. Gives the answers,
    by role.
    """
    fleet = self._fleet
    deadline = fleet.now + self._times.drain_secs + _GRACE_SECS
    asked = [fleet.dispatch(r, name, preempt=True, **args) for r in roles]

    def waits(sent: program.Program) -> bool:
      return not sent.over or (sent.lost and sent.peer in fleet.lives)

    while fleet.now < deadline and any(map(waits, asked)):
      asked = list(map(self._again, asked))
      yield
    for sent in filter(waits, asked):
      fleet.say(f"no_answer role={sent.peer} program={name}")
      fleet.kill(sent.peer)
    return {s.peer: s.result for s in asked if s.result is not None}

  def _again(self, sent: program.Program) -> program.Program:
    """Asks again for what went with a channel, once there is another."""
    life = self._fleet.lives.get(sent.peer)
    if not sent.lost or life is None or not life.connected:
      return sent
    return self._fleet.dispatch(sent.peer, sent.name, preempt=True, **sent.args)

  def _ask_leader(self, name: program.Name) -> Script:
    """Asks who leads, and whoever leads next if that one dies meanwhile.

    One that merges what is left, be it slowly, has time for the next merge.
    """
    fleet = self._fleet
    patience_secs = self._times.drain_secs + _GRACE_SECS
    deadline = fleet.now + patience_secs
    while fleet.now < deadline and self._may_lead(deadline):
      leader = fleet.leader
      if leader is not None and fleet.is_ready(leader):
        sent = fleet.dispatch(leader, name, preempt=True)
        merges = fleet.lives[leader].merges
        while not sent.over and fleet.leader == leader and fleet.now < deadline:
          yield
          life = fleet.lives.get(leader)
          if life is not None and life.merges > merges:
            merges, deadline = life.merges, fleet.now + patience_secs
        if sent.result is not None and sent.result.get("leads", True):
          return
        if not sent.lost:
          continue
      yield  # a channel, a death or a leader is due
    fleet.say(f"no_answer role=syncer program={name}")

  def _may_lead(self, deadline: float) -> bool:
    """Whether a seat lives, or will by then."""
    fleet = self._fleet
    return any(
      seat in fleet.lives or fleet.supervisor.may_start(seat, deadline)
      for seat in fleet.seats
    )

  def _stop(self, roles: Sequence[str], patience_secs: float) -> Script:
    """Ends roles: in order those that can be asked, the others at once."""
    fleet, asked = self._fleet, []
    for role in roles:
      ready = fleet.is_ready(role)
      fleet.supervisor.stopping(role)
      if ready:
        asked.append(
          fleet.dispatch(role, "stop", preempt=True, reason="run ended")
        )
      else:
        fleet.kill(role)
    deadline = fleet.now + patience_secs
    while fleet.now < deadline and any(r in fleet.lives for r in roles):
      asked = list(map(self._again, asked))
      yield
    for role in roles:
      fleet.kill(role)
