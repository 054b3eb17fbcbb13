"""Virtual time, simulated processes, and faults at their operations.

A *thread* performs a script (see `diloco.snapshots.operations`): the faulty
store does its operations, and it waits by its own process's clock. A *life* is
one process: threads that die, stop and go on together, and one clock with its
own offset and rate. A *role* outlives its processes.

Speed matters here: a schedule is some thousands of events, and a campaign a
million schedules. What nothing can disturb runs inline, without an event.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import random
from collections.abc import Callable, Generator
from typing import Any

from diloco import errors
from diloco.snapshots import operations
from diloco.syncer import protocol
from diloco.verification import faults as faults_lib
from diloco.verification import faulty_store

Script = Generator[Any, Any, Any]

_FAILURES = (*operations.FAILURES, protocol.RefusedError)
_Read = operations.Read
_Nap = operations.Nap
_CHANGES = (operations.Write, operations.CompareAndSet, operations.Delete)
_NOTHING = faulty_store.NOTHING
_push = heapq.heappush
_FINE_SECS = 0.03  # longest half of a round trip in fine schedules
_TIMEOUT_SECS = 0.3  # until a partitioned process gives an operation up
_LOST_ANSWERS = 0.15  # share of a partition's operations that take effect


class Violation(Exception):  # noqa: N818
  """An invariant does not hold; the message is its one-line reason."""


class UnexpectedError(RuntimeError):
  """What the code of no role foresees."""


class Role:
  """A seat, with the process that fills it now."""

  def __init__(self, index: int, name: str, seed: int):
    self.index = index
    self.name = name
    self.life: Life | None = None
    self.lives = 0
    self.operations = 0
    self.cut_off = 0  # partitions it is in
    self.random = random.Random(seed).random
    self.strikes: list[faults_lib.Fault] = []  # last is next
    self.strike_at: float = math.inf

  def arm(self) -> None:
    """Sets `strike_at` to the next fault."""
    self.strike_at = self.strikes[-1].at if self.strikes else math.inf


class Life:
  """One process."""

  def __init__(self, role: Role, rate: float, offset: float):
    self.role = role
    self.incarnation = role.lives
    self.alive = True
    self.stopped_until = 0.0
    self.rate = rate
    self.offset = offset
    self.threads: list[Thread] = []
    self.shell: Any = None


class Thread:
  """A generator of a process; an event for it is void once `token` moved."""

  def __init__(self, life: Life, script: Script):
    self.life = life
    self.send = script.send
    self.throw = script.throw
    self.token = 0
    self.asleep = False  # and may be woken
    self.nudged = True  # it is awake, or somebody woke it already
    self.missed = False  # somebody would have woken it meanwhile


class Kernel:
  """Runs threads in virtual time."""

  def __init__(
    self,
    store: faulty_store.FaultyStore,
    *,
    fine: bool,
    trace: list[str] | None = None,
    exited: Callable[[Life, str], None],
  ):
    self.now = 0.0
    self.trace = trace
    self.struck: dict[str, int] = {}  # by kind, and by kind and operation
    self.troubled = 0  # intervals of trouble under way
    self.calm_at = -math.inf  # when one last began or ended
    self.late_until = 0.0  # faults at operations last so long
    self.events = 0
    self.done = False  # ends `run` before the next event
    self._store = store
    self._execute = store.handlers
    self._fine = fine
    self._exited = exited
    self._heap: list[tuple[Any, ...]] = []
    self._order = 0
    self._careful = self._watchful = fine or trace is not None

  def trouble(self, change: int) -> None:
    """Counts intervals of trouble under way."""
    self.troubled += change
    self.calm_at = self.now
    self._careful = self._watchful or self.troubled > 0

  # Scheduling

  def at(self, time: float, action: Callable[[], object]) -> None:
    """Calls `action` at a time, whoever is alive then."""
    self._order += 1
    heapq.heappush(self._heap, (time, self._order, None, 0, action, None))

  def start(self, life: Life, script: Script, delay: float = 0.0) -> Thread:
    """Starts a thread of a process."""
    thread = Thread(life, script)
    life.threads.append(thread)
    self.wake(thread, delay)
    return thread

  def wake(self, thread: Thread, delay: float, value: Any = None) -> None:
    """Resumes a thread after `delay` seconds unless it goes on before."""
    self._order += 1
    entry = (self.now + delay, self._order, thread, thread.token, value, None)
    _push(self._heap, entry)

  def nudge(
    self, thread: Thread | None, delay: float, spread: float = 0.0
  ) -> None:
    """Like `wake`, once until the thread has looked around."""
    if thread is None:
      return
    if thread.nudged:
      thread.missed = True
    else:
      thread.nudged = True
      self._order += 1
      if spread:
        delay += spread * thread.life.role.random()
      time = self.now + delay
      _push(self._heap, (time, self._order, thread, thread.token, None, None))

  def log(self, role: str, text: str) -> None:
    """Adds a line to the trace."""
    if self.trace is not None:
      self.trace.append(f"{self.now:9.3f} {role:<10} {text}")

  # Processes

  def kill(self, life: Life, why: str) -> None:
    """Ends a process at once."""
    if not life.alive:
      return
    life.alive = False
    for thread in life.threads:
      thread.token = -1
    life.role.life = None
    self.log(life.role.name, f"dies: {why}")
    self._exited(life, why)

  def stop(self, life: Life, secs: float) -> None:
    """SIGSTOP now, SIGCONT after `secs`."""
    life.stopped_until = max(life.stopped_until, self.now + secs)
    self.log(life.role.name, f"is stopped for {secs:.3f} s")

  def clock(self, life: Life) -> float:
    """A process's own monotonic clock."""
    return life.offset + life.rate * self.now

  def forget(self) -> None:
    """Lets go of all threads."""
    self._heap.clear()
    self.__dict__.clear()

  # The loop

  def run(self, deadline: float) -> None:
    """Runs until `done`, or until the deadline."""
    heap, pop, push = self._heap, heapq.heappop, heapq.heappush
    drive = self._drive
    while heap and not self.done:
      entry = pop(heap)
      time, order, thread, token, value, error = entry
      if time > deadline:
        push(heap, entry)
        self.now = deadline
        return
      if thread is None:
        self.now = time
        value()
        continue
      if thread.token != token:
        continue
      stopped_until = thread.life.stopped_until
      if stopped_until > time:
        push(heap, (stopped_until, order, thread, token, value, error))
        continue
      self.now = time
      self.events += 1
      drive(thread, value, error)

  def _drive(self, thread: Thread, value: Any, error: Any) -> None:
    """Runs a thread until it sleeps, waits or ends."""
    thread.token += 1
    if thread.asleep:
      thread.asleep, thread.nudged, thread.missed = False, True, False
    life, send, execute = thread.life, thread.send, self._execute
    role, plain, careful = life.role, self._store.plain, self._careful
    try:
      while True:
        if error is None:
          operation = send(value)
        else:
          operation = thread.throw(error)
          error = None
        kind = type(operation)
        if kind is float:
          self._order += 1
          time = self.now + operation / life.rate
          entry = (time, self._order, thread, thread.token, None, None)
          _push(self._heap, entry)
          return
        if operation is None:
          thread.asleep, thread.nudged = True, False
          return
        if kind is _Nap:
          thread.asleep, thread.nudged = True, False
          self.wake(thread, operation[0] / life.rate)
          return
        role.operations = number = role.operations + 1
        if number >= role.strike_at or careful:
          if self._disturbed(thread, operation) or not life.alive:
            return
        elif kind is _Read and plain:
          value = plain.get(operation[0], _NOTHING)
          continue
        try:
          value = execute[kind](operation, life)
        except _FAILURES as failure:
          value, error = None, failure
        if careful and self.trace is not None:
          self._log_operation(role, operation, value, error)
    except StopIteration:
      thread.token = -1
    except errors.FencedError as fenced:
      self.kill(life, f"fenced: {fenced}")
    except UnexpectedError as error:
      self.ended(thread, error)

  def ended(self, thread: Thread, error: Exception) -> None:
    """A thread was ended by an error: its process ends with it."""
    self.kill(thread.life, f"a thread has ended: {error}")

  # Disturbances

  def _disturbed(self, thread: Thread, operation: Any) -> bool:
    """Lets faults and latency at an operation; whether they took it over."""
    life = thread.life
    role = life.role
    if role.operations >= role.strike_at and (
      fault := self._due(role, operation)
    ):
      role.strikes.remove(fault)
      role.arm()
      self._count(fault, operation)
      self.log(role.name, f"fault: {fault.kind} at {describe(operation)}")
      return self._strike(thread, operation, fault)
    if type(operation) is operations.Point:
      return False
    if self.troubled and (failure := self._trouble(role, operation)):
      self._fail(thread, OSError(failure), _TIMEOUT_SECS)
      return True
    if self._fine:
      # Before it takes effect, after it, or both: mostly one will do, and
      # costs one event.
      chosen = role.random()
      there = role.random() ** 2 * _FINE_SECS if chosen < 0.6 else 0.0
      back = role.random() ** 2 * _FINE_SECS if chosen >= 0.4 else 0.0
      self._perform_later(thread, operation, there, back)
      return True
    return False

  def _due(self, role: Role, operation: Any) -> faults_lib.Fault | None:
    """The next fault that strikes this operation; others wait for theirs."""
    for fault in reversed(role.strikes):
      if fault.at > role.operations:
        break
      if self._applies(fault, operation):
        return fault
    return None

  def _applies(self, fault: faults_lib.Fault, operation: Any) -> bool:
    if fault.near:
      return isinstance(operation, _CHANGES) and operation.key.startswith(
        fault.near
      )
    if fault.kind in faults_lib.BEYOND_CONTRACT:
      return self._store.may_damage(operation)
    if fault.kind == faults_lib.UNLISTED:
      return type(operation) is operations.Write and (
        operation.key.startswith("contributions/")
      )
    if type(operation) is operations.Point:
      return fault.kind in faults_lib.AT_POINT
    return True

  def _count(self, fault: faults_lib.Fault, operation: Any) -> None:
    kind, where = fault.kind, fault.near or type(operation).__name__
    if type(operation) is operations.Point:
      where = operation.name
    for key in (kind, f"{kind}@{where}"):
      self.struck[key] = self.struck.get(key, 0) + 1

  def _strike(
    self, thread: Thread, operation: Any, fault: faults_lib.Fault
  ) -> bool:
    life, kind = thread.life, fault.kind
    self.late_until = max(self.late_until, self.now + fault.secs)
    if kind == faults_lib.STOP:
      self.stop(life, fault.secs)
      self._perform_later(thread, operation, fault.secs, 0.0, stopped=True)
      return True
    if kind == faults_lib.SLOW:
      self._perform_later(thread, operation, fault.secs, 0.0)
      return True
    if kind == faults_lib.FAIL_BEFORE:
      self._fail(thread, OSError("failed before it took effect"), 0.0)
      return True
    if kind == faults_lib.UNEXPECTED:
      self._fail(thread, UnexpectedError("out of memory"), 0.0)
      return True
    if kind == faults_lib.UNLISTED:
      self._store.hide(operation.key)
      self.at(
        self.now + fault.secs, lambda: self._store.hidden.discard(operation.key)
      )
      return False
    if kind == faults_lib.DUPLICATE:
      self.land_later(life, operation, fault.secs)
      return False
    if kind in (faults_lib.CORRUPT, faults_lib.LOST):
      # A write that succeeds, and does not last.
      value = self._execute[type(operation)](operation, life)
      self._store.damage(operation, lost=kind == faults_lib.LOST)
      self.wake(thread, 0.0, value)
      return True
    if kind == faults_lib.KILL_LATE:
      self.land_later(life, operation, fault.secs)
    elif kind != faults_lib.KILL_BEFORE:
      self._land(life, operation)
      if kind == faults_lib.TORN:
        self._store.damage(operation, lost=False)
    if kind == faults_lib.FAIL_AFTER:
      self._fail(thread, OSError("failed after it took effect"), 0.0)
    else:
      self.kill(life, kind)
    return True

  def _trouble(self, role: Role, operation: Any) -> str:
    """Why an operation fails now; "" if it does not."""
    if role.cut_off:
      if role.random() < _LOST_ANSWERS and role.life is not None:
        self._land(role.life, operation)
      return "the store cannot be reached"
    if self._store.full and isinstance(operation, faulty_store.TAKING_ROOM):
      return "the disk is full"
    return ""

  def _fail(self, thread: Thread, error: Exception, delay: float) -> None:
    self._order += 1
    self.log(thread.life.role.name, repr(error))
    entry = (self.now + delay, self._order, thread, thread.token, None, error)
    _push(self._heap, entry)

  def _land(self, life: Life, operation: Any) -> None:
    """An operation takes effect, and nobody hears its result."""
    with contextlib.suppress(*_FAILURES):
      self._execute[type(operation)](operation, life)
    self.log(life.role.name, f"{describe(operation)} (unheard)")

  def land_later(self, life: Life, operation: Any, secs: float) -> None:
    """An operation of a process that may be dead by then lands later."""
    self.at(self.now + secs, lambda: self._land(life, operation))

  def _perform_later(
    self,
    thread: Thread,
    operation: Any,
    there: float,
    back: float,
    stopped: bool = False,
  ) -> None:
    """An operation that takes effect later, be its process dead by then."""
    token, life = thread.token, thread.life

    def act() -> None:
      if stopped and thread.token != token:
        return  # it was never sent: its process was stopped, then killed
      value, error = None, None
      try:
        value = self._execute[type(operation)](operation, life)
      except _FAILURES as failure:
        error = failure
      if self.trace is not None:
        self._log_operation(life.role, operation, value, error)
      if thread.token == token:
        if back or life.stopped_until > self.now:
          self._order += 1
          time = self.now + back
          _push(self._heap, (time, self._order, thread, token, value, error))
        else:
          self.events += 1
          self._drive(thread, value, error)

    if there:
      self.at(self.now + there, act)
    else:
      act()

  def _log_operation(
    self, role: Role, operation: Any, value: Any, error: Any
  ) -> None:
    result = f"{error!r}" if error is not None else _short(value)
    self.log(role.name, f"{describe(operation)} -> {result}")


def describe(operation: Any) -> str:
  """An operation in a few words."""
  kind = type(operation).__name__
  if isinstance(operation, operations.Point):
    return f"point {operation.name}"
  if isinstance(operation, operations.Merge):
    keys = " ".join(c.key for c in operation.contributions)
    return f"Merge into {operation.payload}: {keys}"
  if isinstance(operation, operations.ReadPayload):
    return f"ReadPayload {operation.head.payload}"
  if isinstance(operation, operations.ReadState):
    return f"ReadState {operation.state.payload}"
  text = f"{kind} {operation[0]}"
  if isinstance(operation, operations.Write | operations.CompareAndSet):
    text += f" {_short(operation.record)}"
  return text


_SHOWN: tuple[str, ...] = (
  "owner",
  "token",
  "beat",
  "version",
  "clock",
  "base_version",
)
_SHOWN += ("first_step", "step", "versions", "open_rounds", "epoch", "cut")


def _short(value: Any) -> str:
  if isinstance(value, tuple) and value and hasattr(value[0], "__dict__"):
    value = value[0]
  if hasattr(value, "__dataclass_fields__"):
    shown = [
      f"{name}={getattr(value, name)}"
      for name in _SHOWN
      if name in value.__dataclass_fields__
    ]
    return f"{type(value).__name__}({' '.join(shown)})"
  return str(value)
