"""The end of a session in the simulated world: Ctrl-C, and what follows it.

The production core winds the run down (`diloco.controller.wind_down`) and roles
drain by production scripts. Here is what lies between: programs on their way to
a role, what its main thread makes of them, the way of the answers back; and the
user, who interrupts whatever controller there is until the session is over, and
then goes on with the run.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from typing import Any

from diloco.controller import program as program_lib
from diloco.islands import core as island_core
from diloco.islands import hands
from diloco.snapshots import operations
from diloco.verification import faults
from diloco.verification import kernel as kernel_lib

LEFT = "it was told to stop"
_LIMIT_SECS = 400.0  # until a session is over, whatever happens meanwhile
_QUIET_SECS = 40.0  # the same if nothing does
_BACK_SECS = 20.0  # until a version is due in the session after
_PATIENCE = hands.Patience(1.0, 5.0, 60.0)
_POLL_SECS = 0.3
_USER_SECS = 2.0  # until the user interrupts another controller, at most


class Inbox:
  """Programs that have reached a process; answers go to who controls then."""

  def __init__(self, world: Any, life: kernel_lib.Life):
    self._world, self._life = world, life
    self._programs: collections.deque[program_lib.Program] = collections.deque()

  def hear(self, sent: program_lib.Program) -> None:
    """A program arrives; one that preempts takes the place of windows."""
    if sent.preempt:
      left = [p for p in self._programs if p.name != "train"]
      self._programs = collections.deque(left)
    self._programs.append(sent)

  def __bool__(self) -> bool:
    return bool(self._programs)

  @property
  def preempted(self) -> bool:
    """Whether what it does is to end for the sake of a program."""
    return any(sent.preempt for sent in self._programs)

  def next(self) -> program_lib.Program:
    """Takes the program that is next."""
    return self._programs.popleft()

  def answer(self, sent: program_lib.Program, **result: Any) -> None:
    """Tells the controller what became of a program."""
    controller = self._world.controller.life
    if controller is not None:
      controller.shell.answered(self._life, sent.seq, result)


# Roles


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
  """Does what an island has been sent; says whether it is to leave.

  Its steps themselves are not counted in windows: it trains unless it has
  drained, and a window sets it going again.
  """
  world, core = island.world, island.core
  while (island.inbox or island.draining) and not world.draining:
    if not island.inbox:
      yield _POLL_SECS
      island.between_steps(core.step)
      continue
    sent = island.inbox.next()
    found: dict[str, Any] = {}
    match sent.name:
      case "train":
        island.draining = False
        continue
      case "drain":
        found["flushed"] = yield from drain(island)
      case "checkpoint":
        found["durable"] = yield from _save(island)
      case "stop":
        world.ending.gone[island.index] = island
    island.inbox.answer(sent, step=core.step, **found)
    if sent.name == "stop":
      return True
  return False


def _save(island: Any) -> kernel_lib.Script:
  island.saver.save(island.core.step)
  deadline = island.clock() + island.world.times.drain_secs
  while not (done := _is_saved(island)) and island.clock() < deadline:
    yield _POLL_SECS
  return done


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
      leader.drained, syncer.to_drain = False, sent
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

  def end(self) -> None:
    """The controller has wound the session down, and ends who is left."""
    self.over = True
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


def play(world: Any) -> None:
  """Ends the session of a world by Ctrl-C, and begins another."""
  kernel, checker = world.kernel, world.checker
  kernel.log("", "the user ends the session")
  checker.wanted = 0
  began = kernel.now
  ending = world.ending = Ending(world)
  world.disturbed(_LIMIT_SECS)
  for fault in world.schedule.faults:
    if fault.kind == faults.KILL_ENDING:
      kernel.at(began + fault.at, functools.partial(ending.kill, fault))
  told: Any = None
  while not ending.over and kernel.now < began + _LIMIT_SECS:
    life = world.controller.life
    if life is not None and life is not told:
      told = life
      secs = _USER_SECS * world.controller.random()
      kernel.at(kernel.now + secs, functools.partial(_interrupt, life))
    kernel.run(kernel.now + 0.5)
    kernel.done = False
  if not ending.over:
    raise kernel_lib.Violation(
      f"the session does not end in {_LIMIT_SECS:.0f} s"
    )
  checker.seen["ended"] += 1
  if ending.is_quiet:
    checker.seen["ended_in_order"] += 1
    ending.check(kernel.now - began)
  world.ending = None
  world.calm_since = kernel.now + _BACK_SECS
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
    and all(r.life and r.life.stopped_until <= now for r in world.roles)
    and all(role.life.shell.present for role in world.islands)
    and any(role.life.shell.token for role in world.seats)
  )
