"""The end of a session in the simulated world, and what follows it.

The production core winds the run down (`diloco.controller.wind_down`), islands
do programs by `islands.runner`, roles drain by production scripts. Here is what
lies between: programs on their way to a role, the way of the answers back; and
the user, who interrupts whatever controller there is until the session is over,
unless its budget is spent before, and then goes on with the run.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
from collections.abc import Callable, Mapping
from typing import Any

from diloco.controller import outcome as outcome_lib
from diloco.controller import program as program_lib
from diloco.islands import core as island_core
from diloco.islands import hands, protocol, runner
from diloco.snapshots import operations
from diloco.verification import faults, mover
from diloco.verification import kernel as kernel_lib

LEFT = "it was told to stop"
_LIMIT_SECS = 400.0  # until a session is over, whatever happens meanwhile
_QUIET_SECS = 40.0  # the same if nothing does
_BUDGET_SECS = 200.0  # until a budget is spent, if the rounds are done before
_PATIENCE = hands.Patience(1.0, 5.0, 60.0)
_POLL_SECS = 0.3
_USER_SECS = 2.0  # until the user interrupts another controller, at most


def _answer(
  world: Any, life: kernel_lib.Life, seq: int, result: dict[str, Any]
) -> None:
  """An answer goes to who controls then."""
  if world.controller.life is not None:
    world.controller.life.shell.answered(life, seq, result)


class Inbox:
  """Programs that have reached a syncer's process."""

  def __init__(self, world: Any, life: kernel_lib.Life):
    self._world, self._life = world, life
    self._programs: collections.deque[program_lib.Program] = collections.deque()

  def hear(self, sent: program_lib.Program) -> None:
    """A program arrives."""
    self._programs.append(sent)

  def __bool__(self) -> bool:
    return bool(self._programs)

  def next(self) -> program_lib.Program:
    """Takes the program that is next."""
    return self._programs.popleft()

  def answer(self, sent: program_lib.Program, **result: Any) -> None:
    """Tells the controller what became of a program."""
    _answer(self._world, self._life, sent.seq, result)


# Roles


class _CalmError(Exception):
  """Nobody controls islands any more: they drain."""


class Channel:
  """An island's end of its channel; for production code."""

  def __init__(self, world: Any, life: kernel_lib.Life):
    self._world, self._life = world, life
    self._said: collections.deque[dict[str, Any]] = collections.deque()
    self.inbox = self

  def hear(self, sent: program_lib.Program) -> None:
    """A program arrives."""
    self._said.append(sent.message())

  def get(self, *, block: bool, timeout: float | None) -> dict[str, Any]:
    """As of a queue; who waits in vain does so elsewhere."""
    if self._world.draining:
      raise _CalmError
    if not self._said:
      raise queue.Empty
    return self._said.popleft()

  def send(self, message: dict[str, Any]) -> None:
    """Tells the controller what became of a program."""
    _answer(self._world, self._life, message["seq"], message["result"])

  def alone_secs(self) -> float:
    """For how long nobody has controlled it; see `controller.orphan_secs`."""
    return 0.0


class _Doer:
  """What `runner.ProgramRunner` asks of an island."""

  def __init__(self, island: Any):
    self._island = island
    self.times = island.world.times
    self.progress = self

  def moved(self) -> None:
    """Nobody looks at its progress."""

  @property
  def step(self) -> int:
    """Inner steps done."""
    step: int = self._island.core.step
    return step

  def training(
    self, num_steps: int, interrupted: Callable[[], bool]
  ) -> kernel_lib.Script:
    """Trains, unless it still waits for the answers to the step before."""
    island = self._island
    island.draining = False
    yield from island.wait_for_answers(interrupted)
    if not island.core.holds(island.clock()):
      yield from island.training(num_steps, interrupted)
    return {"step": self.step}

  def idling(self) -> kernel_lib.Script:
    """Looks around."""
    yield _POLL_SECS
    self._island.between_steps(self.step)

  def draining(self, timeout_secs: float) -> kernel_lib.Script:
    """Publishes all progress."""
    return {"flushed": (yield from drain(self._island)), "step": self.step}

  def saving(self, *, wait: bool) -> kernel_lib.Script:
    """Saves its state."""
    self._island.saver.save(self.step)
    deadline = self._island.clock() + self.times.drain_secs
    while not (done := _is_saved(self._island)) and (
      wait and self._island.clock() < deadline
    ):
      yield _POLL_SECS
    return {"durable": done, "step": self.step}

  def begin_reading(self) -> runner.Reading:
    """Begins to read the newest global versions."""
    island = self._island
    shape, retry_secs = island.world.schedule, self.times.retry_secs
    found = runner.Reading(
      lambda wanted: protocol.fetch_all(shape.fragments, retry_secs, wanted)
    )
    island.kernel.start(island.life, found.reading())
    return found

  def evaluate(
    self, target: str, num_batches: int, reading: Any = None
  ) -> dict[str, Any]:
    """The loss of what was read."""
    return self._island.world.evaluations.evaluate(reading.take())

  def configure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing ever changes."""
    return {"step": self.step}

  def poison(self, fragment: int) -> dict[str, Any]:
    """No configuration asks for that here."""
    raise AssertionError("poisoned by its controller")


def drain(island: Any) -> kernel_lib.Script:
  """Publishes all progress; says whether it arrived."""
  core, outbox = island.core, island.outbox
  flushed = yield from island.publishing_all(
    island.clock,
    lambda: island.between_steps(core.step),
    lambda: not outbox.waiting and not outbox.busy,
    _PATIENCE,
    _POLL_SECS,
  )
  island.draining = True
  return flushed


def obey(island: Any) -> kernel_lib.Script:
  """Does what an island is sent; says whether it is to leave."""
  programs = runner.ProgramRunner(_Doer(island), island.inbox)
  try:
    yield from programs.running()
  except _CalmError:
    return False
  island.world.ending.gone[island.index] = island
  return True


def _is_saved(island: Any) -> bool:
  """Whether the newest state that counts is of this step."""
  kept = island.world.saved[island.index]
  return bool(kept) and kept[-1].marker.step == island.core.step


def waits_on(syncer: Any) -> bool:
  """Whether one that does not lead is to wait on, as `syncer.main.Waiting`."""
  while syncer.inbox:
    sent = syncer.inbox.next()
    syncer.inbox.answer(sent, leads=False)
    if sent.name == "stop":
      syncer.to_leave = True
      return False
  return True


def leads_on(syncer: Any, leader: Any) -> str:
  """Why one that leads is to stop, if so, as `syncer.Syncer` is told."""
  while syncer.inbox:
    sent = syncer.inbox.next()
    if sent.name == "drain":
      leader.drained, syncer.to_drain, syncer.has_drained = False, sent, False
      return ""  # answered after a whole turn
    syncer.inbox.answer(sent)
    if sent.name == "stop":
      syncer.to_leave = True
      return LEFT
  if syncer.to_drain is not None and leader.drained and not syncer.has_drained:
    syncer.has_drained = True
    syncer.world.ending.merged_all()
    syncer.inbox.answer(syncer.to_drain, idle=leader.core.idle)
  return ""


def leave(syncer: Any) -> kernel_lib.Script:
  """Gives the lease up, and ends."""
  if not syncer.to_leave:
    raise kernel_lib.Violation(f"{syncer.life.role.name} leaves unasked")
  syncer.stop_renewing()
  with contextlib.suppress(*operations.FAILURES):
    yield from syncer.releasing()
  syncer.kernel.kill(syncer.life, LEFT)


# The user


class Ending:
  """The end of a session under way."""

  def __init__(self, world: Any):
    self._world = world
    self.over = False  # whether the controller has left
    self.secs = 0.0  # how long it took
    self._began = world.kernel.now
    self.gone: dict[int, Any] = {}  # islands that were told to stop
    self._struck = self._faults() if _is_quiet(world) else -1

  def _faults(self) -> int:
    return sum(self._world.kernel.struck.values())

  @property
  def is_quiet(self) -> bool:
    """Whether all was well when it began, and nothing has gone wrong since."""
    return self._faults() == self._struck

  def kill(self, fault: faults.Fault) -> None:
    """A role dies meanwhile."""
    life = self._world.by_name[fault.role].life
    if not self.over and life is not None:
      struck = self._world.kernel.struck
      struck[fault.kind] = struck.get(fault.kind, 0) + 1
      self._world.kernel.kill(life, str(fault))

  def merged_all(self) -> None:
    """A leader says that the drain has left it nothing to merge."""
    if self.is_quiet and (why := self._world.contributions_left()):
      raise kernel_lib.Violation(f"a leader says that it has drained: {why}")

  def end(self, outcome: outcome_lib.Outcome) -> None:
    """The controller has wound the session down, and ends who is left."""
    self.over = self._world.kernel.done = True
    self.secs = self._world.kernel.now - self._began
    self._world.evaluations.judge(outcome, self.is_quiet)
    for role in self._world.roles:
      if role.life is not None and role is not self._world.controller:
        self._world.kernel.kill(role.life, "the session is over")

  def check(self, secs: float) -> None:
    """What must be so once it is over, with nothing in its way."""
    if secs > _QUIET_SECS:
      raise kernel_lib.Violation(
        f"a session with nothing in its way takes {secs:.0f} s to end"
      )
    for role in self._world.islands:
      island = self.gone.get(role.index)
      if island is None:
        raise kernel_lib.Violation(f"{role.name} is not told to stop")
      if not _is_saved(island):
        raise kernel_lib.Violation(
          f"{role.name} leaves at step {island.core.step}, which is not saved"
        )
      if island.outbox.waiting or island.outbox.busy:
        raise kernel_lib.Violation(f"{role.name} leaves with progress unsent")
      for action in island.core.handle(island_core.Drain()):
        raise kernel_lib.Violation(f"{role.name} leaves without {action}")
    if why := self._world.contributions_left():
      raise kernel_lib.Violation(f"the session has ended: {why}")


def begin(world: Any) -> None:
  """A session begins to end, unless it has already."""
  if world.ending is not None:
    return
  kernel = world.kernel
  kernel.log("", "the session ends")
  world.checker.wanted = 0
  ending = world.ending = Ending(world)
  world.disturbed(_LIMIT_SECS)
  for fault in world.schedule.faults:
    if fault.kind == faults.KILL_ENDING:
      kernel.at(kernel.now + fault.at, functools.partial(ending.kill, fault))


def play(world: Any) -> None:
  """Ends the session of a world, by Ctrl-C or its budget; begins another."""
  kernel, checker = world.kernel, world.checker
  if not world.budget:
    begin(world)
  last = kernel.now + _LIMIT_SECS + _BUDGET_SECS * bool(world.budget)
  told: Any = None
  while not (world.ending and world.ending.over) and kernel.now < last:
    life = world.controller.life
    if not world.budget and life is not None and life is not told:
      told = life
      secs = _USER_SECS * world.controller.random()
      kernel.at(kernel.now + secs, functools.partial(_interrupt, life))
    kernel.run(kernel.now + 0.5)
    kernel.done = False
  ending = world.ending
  if not (ending and ending.over):
    raise kernel_lib.Violation(
      f"the session does not end in {_LIMIT_SECS:.0f} s"
    )
  checker.seen["ended"] += 1
  if ending.is_quiet:
    checker.seen["ended_in_order"] += 1
    ending.check(ending.secs)
  world.ending = None
  world.budget = 0  # the user wants more
  world.begins_again()
  if world.schedule.moves:
    mover.play(world, whole=True)
  else:
    world.start(world.controller)


def _interrupt(life: kernel_lib.Life) -> None:
  if life.alive:
    life.shell.interrupt()


def _is_quiet(world: Any) -> bool:
  """Whether nothing is wrong, and nothing that was leaves anything behind."""
  kinds = {fault.kind for fault in world.schedule.faults}
  lasting = {faults.POISON, faults.UNREADABLE, faults.UNLISTED}
  lasting.update(faults.OUTLYING)
  now = world.kernel.now
  return (
    not (world.damaging or kinds & lasting)
    and world.calm_since + world.times.takeover_secs <= now
    and not (world.kernel.troubled or world.store.stale)
    and world.kernel.late_until <= now
    and all(r.life and r.life.stopped_until <= now for r in world.roles)
    and all(role.life.shell.present for role in world.islands)
    and any(role.life.shell.token for role in world.seats)
  )
