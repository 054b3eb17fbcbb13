"""The roles of a session as their controller knows them, and orders to them.

A *seat* is a place for a syncer process. Any of them may lead; the first is
called `syncer`, the others `standby`. A run may have an evaluator besides, for
which nothing waits.
"""

import dataclasses
import functools
from typing import Any

from diloco import config as config_lib
from diloco import timing
from diloco.controller import orders, program, supervisor
from diloco.tape import events

EVALUATOR = "evaluator"
_SAID = 300  # characters of a last line that go on the tape


@dataclasses.dataclass(frozen=True)
class Names:
  """Who there is in a run."""

  seats: tuple[str, ...]
  islands: dict[str, int]
  evaluators: tuple[str, ...]

  @classmethod
  def of(cls, config: config_lib.RunConfig) -> "Names":
    """The roles of a run's configuration."""
    standbys = config.controller.standbys
    more = [f"standby{n}" for n in range(2, standbys + 1)]
    return cls(
      ("syncer", *(("standby",) if standbys else ()), *more),
      {f"island-{m}": m for m in range(config.fleet.islands)},
      (EVALUATOR,) if config.programs.evaluator else (),
    )

  @functools.cached_property
  def all(self) -> tuple[str, ...]:
    """All of them, syncers first."""
    return (*self.seats, *self.islands, *self.evaluators)


@dataclasses.dataclass
class Life:
  """A role's process, as long as it is not known to be gone."""

  number: int
  pid: int
  taken_up: bool = False  # from an earlier controller
  connected: bool = True  # as far as is known; it can be sent something
  token: int = 0  # a syncer leads or led under it
  merges: int = 0  # of a syncer
  killed_for: str = ""


class Fleet:
  """Who lives, is ready and leads; what is ordered is added to `orders`."""

  def __init__(
    self, config: config_lib.RunConfig, times: timing.Timing, first_seq: int
  ):
    """Nobody lives yet; all are due to start; see `program.Queues`."""
    self.names = Names.of(config)
    self.islands = self.names.islands
    self.seats = self.names.seats
    self.supervisor = supervisor.Supervisor(
      config.controller, times, config.sync.every, self.names.all
    )
    self.programs = program.Queues(first_seq)
    self.orders: list[orders.Order] = []
    self.now = 0.0
    self.lives: dict[str, Life] = {}
    self._ordered: set[str] = set()  # starts of which nothing is known yet
    self._newest_token = 0

  def is_ready(self, role: str | None) -> bool:
    """Whether a role can be asked something."""
    return (
      role in self.lives
      and role is not None
      and self.supervisor.state(role) == "running"
    )

  @property
  def ready_islands(self) -> list[str]:
    """Islands that can be asked something."""
    return list(filter(self.is_ready, self.islands))

  @property
  def leader(self) -> str | None:
    """The seat that leads; one deposed has an older token."""
    leading = {
      seat: self.lives[seat].token for seat in self.seats if seat in self.lives
    }
    leader = max(leading, key=lambda s: leading[s], default=None)
    return leader if leader and leading[leader] else None

  def hit(self, target: str) -> str | None:
    """The role a fault is meant for; a syncer is named by what it does."""
    leader = self.leader
    if target == "syncer":
      return leader
    if target == "standby":
      waiting = [s for s in self.seats if s != leader] if leader else []
      return max(waiting, key=self.is_ready, default=None)
    return target

  # What was told

  def told_by(self, event: orders.Hello | orders.Status | orders.Done) -> bool:
    """Whether a message is of the process known for its role."""
    life = self.lives.get(event.role)
    if life is not None and event.pid in (None, life.pid):
      self.supervisor.heard(event.role, self.now)
      life.connected = True
      return True
    known = event.role in self.names.all
    if known and isinstance(event, orders.Hello) and event.pid is not None:
      self.say(f"stray_ended role={event.role} pid={event.pid}")
      self.orders.append(orders.KillStray(event.role, event.pid))
    return False

  def lost(self, event: orders.Lost) -> None:
    """A channel is gone, which is no sign of life.

    An island may still have windows that came over it; those that it is sent
    anew take their place. A window asks for some more steps and not for certain
    ones, so none is done twice.
    """
    life = self.lives.get(event.role)
    if life is not None and event.pid in (None, life.pid):
      life.connected = False
      self.programs.lost(event.role)

  def begun(self, event: orders.Begun) -> None:
    """A role has a process."""
    role = event.role
    self._ordered.discard(role)
    if role not in self.names.all or role in self.lives:
      return
    self.lives[role] = Life(event.life, event.pid, event.taken_up)
    if self.supervisor.state(role) == "waiting":
      self.supervisor.started(role, self.now)
    else:
      self.kill(role)  # it was not wanted any more

  def refused(self, role: str, error: str) -> None:
    """A role could not be started: no process, memory or room to be had."""
    self._ordered.discard(role)
    secs = self.supervisor.refused(role, self.now)
    self.say(f"no_start role={role} again={secs:.1f} error={error}")

  def leads(self, seat: str, token: int) -> None:
    """A syncer holds the lease under `token`, or with 0 waits for it.

    Living seats that led under an older one are deposed: the heads refuse
    their tokens for good.
    """
    self.lives[seat].token = token
    self._newest_token = max(self._newest_token, token)
    for other in self.seats:
      life = self.lives.get(other)
      if life is not None and 0 < life.token < self._newest_token:
        self.supervisor.deposed(other, self.now)

  def buried(self, death: orders.Died) -> bool:
    """Takes a death in, which is on the record if nobody asked for it.

    Says whether it is.
    """
    role = death.role
    led = role == self.leader
    life = self.lives.pop(role)
    self.programs.lost(role)
    if self.supervisor.state(role) in ("stopped", "waiting"):
      return False  # ended for a return to a cut; or at the end
    why = life.killed_for
    if death.failed:  # a user's own bug, most likely
      why = why or death.error[:_SAID]
    cause = f"{death.cause}: {why}" if why else death.cause
    self.say(f"died role={role} cause={cause}")
    if role in self.islands:
      self.record(
        events.ISLAND_DIED,
        island=self.islands[role],
        island_incarnation=life.number,
        cause=cause,
      )
    elif role in self.seats:
      self.record(events.SYNCER_DIED, cause=cause, seat=role, led=led)
    else:
      self.record(events.EVALUATOR_DIED, cause=cause)
    return True

  # What is ordered

  def say(self, text: str, level: str = "warning") -> None:
    """Logs a line for people."""
    self.orders.append(orders.Say(text, level))

  def record(self, event: str, **fields: Any) -> None:
    """Writes a line on the tape."""
    self.orders.append(orders.Record(event, fields))

  def supervise(self, *, islands: bool) -> None:
    """Kills who hangs, and starts who is due; islands only if they may be."""
    for order in self.supervisor.due(self.now):
      role = order.role
      if isinstance(order, orders.Kill):
        self.say(f"hang role={role} cause={order.cause}")
        self.kill(role, order.cause)
      elif role in self._ordered or role in self.lives:
        continue  # it cannot be killed, and has no second life meanwhile
      elif islands or role in self.seats:
        self._ordered.add(role)
        self.orders.append(order)

  def kill(self, role: str, why: str = "") -> None:
    """Kills a role's process, if it has one; `why` goes with its death."""
    if role in self.lives:
      self.lives[role].killed_for = why
      self.orders.append(orders.Kill(role, why))

  def dispatch(
    self, role: str, name: program.Name, *, preempt: bool = False, **args: Any
  ) -> program.Program:
    """Queues a program on a role; its result is to come."""
    sent = self.programs.add(role, name, args, preempt=preempt)
    if role in self.islands:
      self.record(
        events.PROGRAM_DISPATCHED,
        island=self.islands[role],
        seq=sent.seq,
        program=name,
        args=args,
      )
    self.orders.append(orders.Point("controller_dispatch"))
    self.orders.append(orders.Send(sent))
    return sent
