"""An island's life: it joins, says that it is ready, does programs, leaves.

Programs are what the controller dispatches. They run in the order they come,
but what is to be evaluated is read from the store in the background, and others
go on. An island that hears nothing more repeats its last train window, so a
controller's death or silence stops no training; after `controller.orphan_secs`
without one it drains, saves its state and ends, so that no orphan survives.
"""

import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax

from diloco import channel as channel_lib
from diloco import config as config_lib
from diloco import errors, workers
from diloco.islands import evaluation, link
from diloco.islands import island as island_lib
from diloco.islands import trainer as trainer_lib
from diloco.snapshots import operations, records
from diloco.tasks import task as task_lib

logger = logging.getLogger(__name__)

_IDLE_SECS = 0.05


class ProgramRunner:
  """The main loop of an island process, as a script."""

  def __init__(
    self,
    island: island_lib.Island,
    channel: channel_lib.Client,
    config: config_lib.RunConfig,
  ):
    self._island = island
    self._channel = channel
    self._config = config
    self._queue: deque[channel_lib.Message] = deque()
    self._last_window: dict[str, Any] | None = None
    self._preempted = False
    self._orphaned = False
    self._reading: evaluation.Reading | None = None
    self._evaluating: channel_lib.Message = {}  # that it is for

  def running(self) -> operations.Script[str]:
    """Runs programs until told to stop; returns why it stopped."""
    while True:
      self._island.progress.moved()
      self._receive(wait=not self._queue and self._last_window is None)
      if self._orphaned:
        return self._leave_orphaned()
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
        self._island.look()

  def _run_program(
    self, message: channel_lib.Message
  ) -> operations.Script[dict[str, Any]]:
    name, args = message["name"], message["args"]
    match name:
      case "train":
        self._last_window = args
        return (yield from self._train(args))
      case "evaluate":
        return self._evaluate(args)
      case "checkpoint":
        return self._island.checkpoint(**args)
      case "poison":
        return self._island.poison(**args)
      case "configure":
        return self._island.configure(**args)
      case "drain":
        self._last_window = None
        return self._island.drain(**args)
    return {"error": f"there is no program {name!r}"}

  def _evaluate(self, args: dict[str, Any]) -> dict[str, Any]:
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

  def _train(self, args: dict[str, Any]) -> operations.Script[dict[str, Any]]:
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

  def _done(self, message: channel_lib.Message, result: Any) -> None:
    self._channel.send(
      {"type": "done", "seq": message["seq"], "result": result}
    )

  def _leave_orphaned(self) -> str:
    logger.warning("orphaned secs=%.1f", self._channel.alone_secs())
    self._island.drain(self._island.times.drain_secs)
    self._island.checkpoint(wait=True)
    return "no controller"


def live(
  spec: island_lib.Spec,
  config: config_lib.RunConfig,
  task: task_lib.Task,
  devices: Sequence[jax.Device],
  threads: workers.Threads = workers.Threads(),
  like: trainer_lib.Trainer | None = None,
  joined: Callable[[], None] = lambda: None,
) -> None:
  """Returns once the island, see `island.Island`, has left in order.

  `joined` is called when all that start-up makes is there.

  Raises:
    UserError: the task does not fit the mesh or the run.
  """
  role = f"island-{spec.island}"
  channel = channel_lib.Client(
    spec.run_dir,
    role,
    {"island": spec.island, "incarnation": spec.incarnation, "ready": False},
    lambda: threads.dead,
  )
  threads.at_death(channel.close)

  def report(member: records.Member, standing: tuple[int, float]) -> None:
    channel.set_hello(step=member.step)
    progress, extra_secs = standing
    channel.send(
      {
        "type": "status",
        "step": member.step,
        "step_secs": member.step_secs,
        "progress": progress,
        "extra_secs": extra_secs,
      }
    )

  loop = link.load(config.loop) if config.loop else None
  island = island_lib.Island(spec, config, task, devices, report, threads, like)
  threads.at_death(island.abandon)

  def living() -> operations.Script[None]:
    yield from island.joining()
    joined()
    threads.check()
    channel.set_hello(ready=True, step=island.step)
    channel.send({"type": "ready", "step": island.step})
    reason = yield from ProgramRunner(island, channel, config).running()
    island.close(reason)

  if loop is None:
    island.perform(living())
  else:
    link.Link(island, living(), config, spec.island).run(loop)
  channel.close()
