"""What an island does with the programs that the controller dispatches.

They run in the order they come, but what is to be evaluated is read from the
store in the background, and others go on. An island that hears nothing more
repeats its last train window, so a controller's death or silence stops no
training; after `controller.orphan_secs` without one it drains, saves its state
and ends, so that no orphan survives.
"""

import logging
import queue
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from diloco import errors, timing
from diloco.snapshots import operations

logger = logging.getLogger(__name__)

_IDLE_SECS = 0.05

_Message = dict[str, Any]
_Facts = dict[str, Any]


class Reading:
  """Global versions that are read in the background, while training goes on.

  A store that answers nobody makes an island wait for nothing: what it cannot
  read is a figure it cannot tell.
  """

  def __init__(
    self, newest: Callable[[Callable[[], bool]], operations.Script[Any]]
  ):
    """Args: how to read them, as long as they are wanted."""
    self._newest = newest
    self._wanted = True
    self._found: Any = None

  def reading(self) -> operations.Script[None]:
    """Reads them; a thread of its own performs this."""
    try:
      self._found = yield from self._newest(lambda: self._wanted)
    except operations.FAILURES as error:
      self._found = error

  @property
  def done(self) -> bool:
    """Whether there is something to take."""
    return self._found is not None

  def take(self) -> Any:
    """What was read, once it is done; raises what it met."""
    if isinstance(self._found, Exception):
      raise self._found
    assert self._found is not None
    return self._found

  def give_up(self) -> None:
    """Nobody will take it; the store is not tried again."""
    self._wanted = False


class Doer(Protocol):
  """An island, as far as programs go."""

  times: timing.Timing
  progress: Any  # see `heartbeat.Progress`

  @property
  def step(self) -> int:
    """Inner steps done."""

  def training(
    self, num_steps: int, interrupted: Callable[[], bool]
  ) -> operations.Script[_Facts]:
    """Trains."""

  def idling(self) -> operations.Script[None]:
    """Adopts what is new and takes part in cuts, while it does no steps."""

  def draining(self, timeout_secs: float) -> operations.Script[_Facts]:
    """Publishes all progress."""

  def saving(self, *, wait: bool) -> operations.Script[_Facts]:
    """Saves its state."""

  def begin_reading(self) -> Any:
    """A `Reading` of the newest global versions, begun."""

  def evaluate(
    self, target: str, num_batches: int, reading: Any = None
  ) -> _Facts:
    """Held-out loss of what a `reading` has found, or of its own parameters."""

  def poison(self, fragment: int) -> _Facts:
    """Makes a fragment's values not finite."""

  def configure(self, settings: Mapping[str, Any]) -> _Facts:
    """Goes on by other settings."""


class ProgramRunner:
  """The main loop of an island process, as a script."""

  def __init__(self, island: Doer, channel: Any):
    """Args: who does the programs, and an end of a `channel.Client`'s kind."""
    self._island = island
    self._channel = channel
    self._queue: deque[_Message] = deque()
    self._last_window: dict[str, Any] | None = None
    self._preempted = False
    self._orphaned = False
    self._reading: Reading | None = None
    self._evaluating: _Message = {}  # that it is for

  def running(self) -> operations.Script[str]:
    """Runs programs until told to stop; returns why it stopped."""
    while True:
      self._island.progress.moved()
      self._receive(wait=not self._queue and self._last_window is None)
      if self._orphaned:
        return (yield from self._leave_orphaned())
      if self._reading is not None and self._reading.done:
        self._done(self._evaluating, self._evaluate(self._evaluating["args"]))
        self._reading = None
      elif self._queue:
        message = self._queue.popleft()
        if message["name"] == "stop":
          self._give_up_reading("the run is stopped")
          self._done(message, {"step": self._island.step})
          return str(message["args"].get("reason", "stopped"))
        self._preempted = False
        args = message["args"]
        if message["name"] == "evaluate" and args.get("target") == "global":
          self._give_up_reading("another was asked for")
          self._reading = self._island.begin_reading()
          self._evaluating = message
        else:
          self._done(message, (yield from self._run_program(message)))
      elif self._last_window is not None:
        # Still doing what it was last told; its steps need no answer.
        yield from self._train(self._last_window)
      else:
        yield from self._island.idling()

  def _run_program(self, message: _Message) -> operations.Script[_Facts]:
    name, args = message["name"], message["args"]
    match name:
      case "train":
        self._last_window = args
        return (yield from self._train(args))
      case "evaluate":
        return self._evaluate(args)
      case "checkpoint":
        return (yield from self._island.saving(**args))
      case "poison":
        return self._island.poison(**args)
      case "configure":
        return self._island.configure(**args)
      case "drain":
        self._last_window = None
        return (yield from self._island.draining(**args))
    return {"error": f"there is no program {name!r}"}

  def _evaluate(self, args: dict[str, Any]) -> _Facts:
    """What cannot be read now costs a figure, not the island."""
    try:
      return self._island.evaluate(**args, reading=self._reading)
    except operations.FAILURES as error:
      logger.warning("evaluation_failed error=%s", error)
      return {"error": errors.one_line(error)}

  def _give_up_reading(self, why: str) -> None:
    """Answers for an evaluation that the store was too slow for."""
    if self._reading is not None:
      self._reading.give_up()
      error = f"{why} before the store had given the parameters"
      self._done(self._evaluating, {"error": error})
      self._reading = None

  def _train(self, args: dict[str, Any]) -> operations.Script[_Facts]:
    return self._island.training(args["num_steps"], self._interrupted)

  def _interrupted(self) -> bool:
    self._receive(wait=False)
    return self._preempted or self._orphaned

  def _receive(self, *, wait: bool) -> None:
    """Moves messages into the queue; some end the train windows there."""
    while True:
      try:
        message = self._channel.inbox.get(
          block=wait, timeout=_IDLE_SECS if wait else None
        )
      except queue.Empty:
        break
      wait = False
      if message.get("type") != "program":
        continue
      anew = message["name"] == "train" and message.get("anew")
      if message.get("preempt"):
        self._preempted = True
      if message.get("preempt") or anew:
        for old in [m for m in self._queue if m["name"] == "train"]:
          self._queue.remove(old)
          self._done(old, {"steps": 0, "cancelled": True})
      self._queue.append(message)
    limit_secs = self._island.times.orphan_secs
    self._orphaned = self._channel.alone_secs() > limit_secs

  def _done(self, message: _Message, result: Any) -> None:
    self._channel.send(
      {"type": "done", "seq": message["seq"], "result": result}
    )

  def _leave_orphaned(self) -> operations.Script[str]:
    logger.warning("orphaned secs=%.1f", self._channel.alone_secs())
    yield from self._island.draining(self._island.times.drain_secs)
    yield from self._island.saving(wait=True)
    return "no controller"
