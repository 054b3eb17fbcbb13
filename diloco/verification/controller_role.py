"""The controller of the simulated world: the hand of the production core.

It starts, kills and misses roles as `diloco.controller.core` orders, takes cuts
by the production cutter, and may die between any two orders. While it is dead
nobody is restarted; it is itself restarted from outside, by whoever started
the run, and takes up who lives. It knows other processes only as a parent
does: that they ended, or that they have said nothing for long.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from diloco import config as config_lib
from diloco.controller import core as core_lib
from diloco.controller import cutter as cutter_lib
from diloco.controller import orders, resources
from diloco.controller import program as program_lib
from diloco.snapshots import cut_parts, operations
from diloco.tape import events
from diloco.verification import faults, rollback, session_end
from diloco.verification import kernel as kernel_lib

_TICK_SECS = 0.4
_NOTICE_SECS = 0.1  # until it hears of a death
_CUT_SECS, _PATIENCE_SECS = 6.0, 2.0  # until a cut is given up, or begun
_OPEN_SECS = 1.5  # for which a cut is open, about
_OUTSIDE_SECS = 3.0  # until somebody restarts the controller
_REFUSED = 0.1  # share of starts that the machine refuses
_SLACK_SECS = 2.0  # until one that hangs must be dead
_POINT = operations.Point("order")
_NEVER = 1e9
_LOST = 0.02  # share of programs that go, or whose answer goes, with a channel
_BAD_SECS = 0.14  # in which an island dies on a bad slice, before it is ready
_EVALUATIONS = 8  # in a budget
_SEQUENCES = 1_000_000  # of programs, for each controller
_UNSEEN = (
  *(orders.Record, orders.Say, orders.Point),
  orders.TakeChanges,
)


class Controller:
  """One incarnation of the controller."""

  def __init__(self, world: Any, life: kernel_lib.Life):
    self.world = world
    self.kernel: kernel_lib.Kernel = world.kernel
    self.life = life
    self.random = life.role.random
    schedule = world.schedule
    self._supervises = schedule.supervised
    self._returns = schedule.within
    self._gives_up = schedule.restarts > 0
    self._ends = schedule.ends
    self._exits = any(f.kind in faults.EXITS for f in schedule.faults)
    self._hears = any(
      (schedule.supervised, schedule.within, self._ends, schedule.restarts)
    )
    self._hears = self._hears or self._exits
    self._counts = self._gives_up or world.budget > 0 or self._exits
    times = world.times
    if not schedule.supervised:
      times = dataclasses.replace(
        times, hang_secs=_NEVER, start_secs=_NEVER, lease_ttl_secs=_NEVER
      )
    config = _config(
      _Shape(
        schedule.islands,
        schedule.spares,
        schedule.standby,
        schedule.restarts,
        schedule.quorum if self._gives_up else 1,
        schedule.sync_every if self._gives_up else 1,
        world.budget,
      )
    )
    self.resources = resources.ResourceManager(config, ())
    self.core = core_lib.ControllerCore(
      config, times, 1, first_seq=life.incarnation * _SEQUENCES
    )
    self.fleet = self.core.fleet
    self.cutter: _Cutter | None = None
    if schedule.cuts:
      self.cutter = _Cutter(world, self.kernel.clock(life), self.random())
    self.thread: kernel_lib.Thread | None = None
    self._deaths: list[orders.Died] = []  # not told to the core yet
    self._said: dict[kernel_lib.Life, Any] = {}  # of being ready, last
    self._answers: list[orders.Done] = []
    self._lost: list[kernel_lib.Life] = []  # channels of these
    self._interrupts = 0
    self._listened = 0.0
    self._heard: dict[kernel_lib.Life, float] = {}  # by kernel's time
    self._blamed: dict[kernel_lib.Life, float] = {}  # silent since, at least

  def forget(self) -> None:
    """Lets go of everything."""
    self.__dict__.clear()

  def run(self) -> kernel_lib.Script:
    """The main thread."""
    self.thread = self.life.threads[0]
    yield 0.0
    if self._returns:
      yield from self._prepare()
    for name in self.fleet.names.all:
      found = self.world.by_name[name].life
      if found is not None:
        number = found.incarnation
        if name[0] == "i":
          at = self.world.slices.of(found.role)
          self.resources.rebind(found.role.index, at, ())
        self.world.checker.seen["taken_up"] += 1
        taken_up = orders.Begun(name, number, number, taken_up=True)
        yield from self._tell(taken_up)
    yield from self._tell(orders.Opened(0, {}))
    while True:
      while self._deaths:
        death = self._deaths.pop(0)
        self.world.checker.deaths.heard(death)
        yield from self._tell(death)
        self._check_end()
      if self._hears or self.cutter:
        yield from self._listen()
      if self._interrupts:
        self._interrupts -= 1
        yield from self._tell(orders.Interrupted())
      yield from self._tell(orders.Tick())
      if self._ends and not self.core.supplying:
        session_end.begin(self.world)
        self.world.evaluations.begin(self.life)
      if self._ends and self.core.outcome is not None:
        self.world.ending.end(self.core.outcome)
        return self.kernel.kill(self.life, session_end.LEFT)
      if self._deaths:
        continue
      missed = len(self.fleet.lives) < len(self.fleet.names.all)
      if self._hears or self.cutter or missed:
        yield operations.Nap(_TICK_SECS * (0.5 + self.random()))
      else:
        yield None

  def interrupt(self) -> None:
    """The user wants the session to end."""
    self._interrupts += 1

  def answered(
    self, life: kernel_lib.Life, seq: int, result: dict[str, Any]
  ) -> None:
    """A role has done a program."""
    name, number = life.role.name, life.incarnation
    self._answers.append(orders.Done(name, seq, result, number))
    self._heard[life] = self._blamed[life] = self.kernel.now

  def died(self, life: kernel_lib.Life, cause: str, error: str) -> None:
    """A role's process has ended."""
    number = life.incarnation
    self._deaths.append(orders.Died(life.role.name, number, cause, error))
    self.kernel.nudge(self.thread, _NOTICE_SECS * self.random())

  def _listen(self) -> kernel_lib.Script:
    """What roles have said since; one that is stopped says nothing."""
    now = self.kernel.now
    if now - self._listened > 2 * _TICK_SECS:  # nobody is blamed for that time
      away = now - self._listened
      self._blamed = {life: at + away for life, at in self._blamed.items()}
    self._listened = now
    while self._answers:
      yield from self._tell(self._answers.pop(0))
    while self._lost:
      life = self._lost.pop()
      self._said.pop(life, None)
      yield from self._tell(orders.Lost(life.role.name, life.incarnation))
    for name in list(self.fleet.lives):
      life = self.world.by_name[name].life
      if life is None:
        continue
      if life.stopped_until > now:
        self._check_hanging(life)
        continue
      self._heard[life] = self._blamed[life] = now
      shell = life.shell
      ready = shell.present if name[0] == "i" else True
      said = ready, 0 if name[0] == "i" else shell.token
      if said != self._said.get(life):
        self._said[life] = said
        step = self._status(life).step
        draining = name[0] != "i" and shell.to_drain is not None
        if name[0] == "i" and ready:
          self.world.checker.deaths.joined(life.role, step)
        yield from self._tell(
          orders.Hello(name, life.incarnation, *said, draining, step)
        )
      if self._hears:
        status = self._status(life)
        told = status.merges or status.step
        self.world.checker.deaths.told(life, told)
        yield from self._tell(status)

  def _status(self, life: kernel_lib.Life) -> orders.Status:
    name, shell = life.role.name, life.shell
    step = merges = 0
    if self._counts and name[0] != "i":
      merges = shell.num_merges
    elif name[0] == "i" and self._counts and shell.present:
      step = shell.core.step
    seen = self._returns and name[0] != "i"
    damaged = tuple(shell.damaged) if seen else ()
    return orders.Status(name, step=step, merges=merges, damaged=damaged)

  def _prepare(self) -> kernel_lib.Script:
    """What `diloco resume` does first."""

    def end_roles() -> kernel_lib.Script:
      yield from ()
      return rollback.kill_roles(self.world, (self.life.role,))

    while True:
      try:
        return (yield from rollback.set_back(self.world, self.life, end_roles))
      except OSError:
        yield _TICK_SECS

  def _go_back(self, order: orders.Order) -> kernel_lib.Script:
    def end_roles() -> kernel_lib.Script:
      yield from self._tell(orders.Ending())
      living = rollback.kill_roles(self.world, (self.life.role,))
      while self._deaths:
        yield from self._tell(self._deaths.pop(0))
      return living

    try:
      done = yield from rollback.set_back(self.world, self.life, end_roles)
    except OSError as error:
      return orders.Failed(order, str(error))
    return orders.SetBack(done, self.world.refused)

  def _tell(self, event: orders.Event) -> kernel_lib.Script:
    """Does what the core orders then; it may die before each order."""
    ordered = self.core.handle(event, self.kernel.clock(self.life))
    kills = [o for o in ordered if isinstance(o, orders.Kill)]
    silent = {kill.role: self._silence(kill.role) for kill in kills}
    for order in ordered:
      if isinstance(order, _UNSEEN):
        continue
      yield _POINT  # it may be stopped here, while whom it kills comes back
      match order:
        case orders.Start():
          yield from self._tell(self._start(order))
        case orders.Kill():
          self._kill(order, silent[order.role])
        case orders.Send(program):
          self._send(program)
        case orders.LookAtCuts(lives):
          if self.cutter is not None:
            clock = self.kernel.clock(self.life)
            yield from self.cutter.look(clock, lives)
        case orders.CloseCuts():
          if self.cutter is not None:
            yield from self.cutter.close()
        case orders.MoveSlice(name):
          self.resources.slice_lost(self.fleet.islands[name])
        case orders.End() if self._gives_up or self._exits:
          self.world.ended()
          return
        case orders.End() if self._ends:
          return
        case orders.GoBack() if self._returns:
          yield from self._tell((yield from self._go_back(order)))
        case _:
          raise kernel_lib.Violation(f"the controller orders {order}")

  def _send(self, program: program_lib.Program) -> None:
    life = self._whom(program.peer)
    if life is None or not self._ends:
      return
    self.world.evaluations.sent(program)
    lost = self.random() < _LOST
    if lost:
      self.world.checker.seen["lost_channels"] += 1
      self._lost.append(life)
    if not lost or self.random() < 0.5:
      life.shell.inbox.hear(program)

  def _start(self, order: orders.Start) -> orders.Event:
    role = self.world.by_name[order.role]
    if role.life is not None:
      raise kernel_lib.Violation(f"{order.role} is started while it lives")
    if self._supervises and self.random() < _REFUSED:
      self.world.checker.seen["refused_starts"] += 1
      return orders.Failed(order, "EAGAIN")
    dies = False
    if order.role in self.fleet.islands:
      at, _ = self.resources.bind(role.index)
      dies = self.world.slices.start(role, at, self.world.islands)
    self.world.start(role)
    life = role.life
    if dies and life is not None:
      after = self.kernel.now + _BAD_SECS * self.random()
      self.kernel.at(after, lambda: self.kernel.kill(life, "its slice is bad"))
    return orders.Begun(order.role, role.lives, role.lives)

  def _check_end(self) -> None:
    deaths = self.world.checker.deaths
    if deaths.failed_alike and self._exits and not self.world.refused:
      raise kernel_lib.Violation(
        "a role fails twice alike, and the run goes on"
      )

  def _whom(self, name: str) -> kernel_lib.Life | None:
    """The process that an order is meant for; it may have just died."""
    role, known = self.world.by_name[name], self.fleet.lives.get(name)
    life: kernel_lib.Life | None = role.life
    if known and life and known.number == life.incarnation:
      return life
    if known is None or not any(
      (d.role, d.life) == (name, known.number) for d in self._deaths
    ):
      raise kernel_lib.Violation(f"an order goes to {name}, which is not there")
    return None

  def _silence(self, name: str) -> float:
    """For how long a role has said nothing, in seconds."""
    now, life = self.kernel.now, self.world.by_name[name].life
    return now - self._heard.get(life, now) if life else 0.0

  def _kill(self, order: orders.Kill, silent: float) -> None:
    life = self._whom(order.role)
    if life is None:
      return
    if "sign of life" in order.cause:
      self.world.checker.seen["killed_for_silence"] += 1
      least = min(self.world.times.hang_secs, self.world.times.deposed_secs)
      if silent < 0.9 * least:
        raise kernel_lib.Violation(
          f"{order.role} is killed for its silence of {silent:.1f} s"
        )
    self.kernel.kill(life, order.cause)

  def _check_hanging(self, life: kernel_lib.Life) -> None:
    if not self._said.get(life, (False,))[0]:
      return  # it is still starting, which may take longer
    if self.fleet.supervisor.state(life.role.name) == "stopped":
      return  # it was told to end, and is given time for that
    since = self._blamed[life]
    limit = self.world.times.hang_secs + _SLACK_SECS
    if self._supervises and self.kernel.now - since > limit:
      raise kernel_lib.Violation(
        f"{life.role.name} hangs, and nobody kills it for {limit:.0f} s"
      )


class _Cutter(cutter_lib.Cutter):
  """The checker hears of what comes of cuts."""

  def __init__(self, world: Any, begun: float, draw: float):
    schedule, self._checker = world.schedule, world.checker
    settings = cutter_lib.Settings(
      every_secs=schedule.cuts + _OPEN_SECS,
      limit_secs=_CUT_SECS,
      patience_secs=_PATIENCE_SECS,
      islands=schedule.islands,
      num_fragments=schedule.fragments,
    )
    nobody: Any = _NobodyWishes()
    self._told: set[int] = world.told_cuts
    self._copies = world.copies
    super().__init__(settings, self._note, nobody, self._told.__contains__)
    self._due = begun + schedule.cuts * draw

  def _note(self, event: str, **fields: Any) -> None:
    if event in (events.CUT_COMPLETED, events.CUT_ABANDONED):
      self._told.add(fields["cut"])
    if event == events.CUT_COMPLETED:
      self._copies.told(fields["cut"])
    if event == events.CUT_ABANDONED:
      self._checker.seen["cuts_abandoned"] += 1

  def completed(self, parts: cut_parts.Parts) -> None:
    self._checker.cut_completed(parts)

  def unfit(self, cut: int, why: str) -> None:
    self._checker.inconsistent(cut, why)


class _NobodyWishes:
  def exists(self) -> bool:
    return False

  def unlink(self) -> None:
    raise FileNotFoundError


class _Shape(NamedTuple):
  """What of a schedule a controller is to know."""

  islands: int
  spares: int
  standby: bool
  restarts: int  # 0 gives nobody up
  quorum: int
  sync_every: int
  budget: int  # 0 for none


@functools.cache
def _config(shape: _Shape) -> config_lib.RunConfig:
  config = config_lib.from_mapping(
    {
      "total_tokens": shape.budget or 10**15,
      "programs": {"eval_every_tokens": shape.budget // _EVALUATIONS},
      "fleet": {
        "slices": [{}] * (shape.islands + shape.spares),
        "num_islands": shape.islands,
      },
      "sync": {"quorum": shape.quorum},
      "controller": {
        "standbys": int(shape.standby),
        "restart_base_secs": 0.3,
        "restart_max_secs": 1.0,
        "max_restarts": shape.restarts or 10**9,
        "gather_secs": 0.0,
      },
    }
  )
  # Shorter than live runs may have it, where a round trip takes its time.
  sync = dataclasses.replace(config.sync, every=shape.sync_every)
  return dataclasses.replace(config, sync=sync)


def outside_secs(random: Any) -> float:
  """How long a run is without its controller."""
  return _OUTSIDE_SECS * (0.3 + random())
