"""Process of a run's evaluator: `python -m diloco.islands.evaluator`.

It measures the held-out loss of the newest global versions, so that no island
has to. It is no member of the run and publishes nothing: nobody waits for it,
and what it cannot do in time is left out. It computes on the processor, on a
core of its own if the islands leave one; otherwise on any, while nobody else
has use for it. Cores share caches and memory, so it rests most of the time.
"""

import argparse
import contextlib
import functools
import logging
import os
import pathlib
import queue
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from diloco import channel as channel_lib
from diloco import config as config_lib
from diloco import errors, heartbeat, process, relay, timing, workers
from diloco.islands import devices
from diloco.snapshots import operations, requests, store, versions
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)

ROLE = "evaluator"
_POLL_SECS = 0.5
# Times `hang_secs`, without progress: where all cores are busy it gets little
# of them, and that is no hang.
_PATIENCE = 100

_SHARE = 0.1  # of a core that it takes while it evaluates
_NAP_SECS = 0.1  # between two looks whether somebody waits

# Parameters by leaf and a number of batches to what `held_out_loss` returns.
Measure = Callable[[Mapping[str, Any], int], dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
  """Evaluates until told to stop. Returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--run_dir", type=pathlib.Path, required=True)
  parser.add_argument("--incarnation", type=int, required=True)
  parser.add_argument("--cores", type=int, nargs="*", default=[])
  args = parser.parse_args(argv)
  process.setup_role(args.cores, args.run_dir, ROLE)
  if not args.cores:
    _give_way()
  try:
    with relay.relayed(args.run_dir, ROLE, args.incarnation):
      live(args.run_dir, args.incarnation)
  except Exception as error:
    return process.end_with(error, sys.stderr)
  return 0


def _give_way() -> None:
  """Has this process run while no other wants to.

  A session may be scheduled as a group, within which alone that would count;
  so the group gives way too, if it is this process's own.
  """
  os.nice(19)
  with contextlib.suppress(OSError):  # a container may forbid it
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
  if os.getsid(0) == os.getpid():
    with contextlib.suppress(OSError):
      pathlib.Path("/proc/self/autogroup").write_text("19")


def live(run_dir: pathlib.Path, incarnation: int) -> None:
  """Returns once it has left in order.

  Raises:
    UserError: the task cannot be made.
    FencedError: a later life has its place.
  """
  config = process.read_config(run_dir, or_copy=True)
  # It can be asked from now on, however long it takes to load what it needs.
  hello = {"incarnation": incarnation, "ready": True}
  channel = channel_lib.Client(run_dir, ROLE, hello)
  times = timing.derive(config.controller, 0.0)
  progress = heartbeat.Progress(lambda: place.check())
  patience = {"extra_secs": _PATIENCE * times.hang_secs}

  def report() -> None:
    told = {"progress": progress.standing[0], **patience}
    channel.send({"type": "status", **told})

  reports = workers.Pulse(report, times.heartbeat_secs, "report")
  tape = recorder.Recorder(run_dir, ROLE, incarnation)
  snapshots = store.SnapshotStore(process.store_url(run_dir, config))
  mine = heartbeat.born(run_dir, ROLE, incarnation)
  place = heartbeat.Heartbeat(
    snapshots,
    lambda: mine,
    timing.read(snapshots, config.controller).lease_ttl_secs,
  )
  counter = requests.Counter(snapshots.url)
  requesting = workers.Pulse(
    lambda: tape.record(events.STORE_REQUESTS, **counter.made()),
    requests.EVERY_SECS,
    "requests",
  )

  def awaited() -> bool:
    alone = channel.alone_secs() > times.orphan_secs
    return alone or not channel.inbox.empty()

  pace = Pace(awaited)
  measure = _measure(run_dir, config, progress, pace)
  evaluator = functools.partial(evaluate, snapshots, tape, measure)
  _serve(channel, times.orphan_secs, evaluator, progress)
  for one in (place, reports, requesting, channel, tape):
    one.close()


def _measure(
  run_dir: pathlib.Path,
  config: config_lib.RunConfig,
  progress: heartbeat.Progress,
  pace: "Pace",
) -> Measure:
  """Loads JAX, for the processor alone, and the run's task."""
  chosen = devices.environ((0,), os.environ)
  os.environ |= chosen | {"JAX_PLATFORMS": "cpu"}
  import jax

  from diloco.islands import compilation, evaluation, inner_step
  from diloco.tasks import registry

  compilation.use_cache(run_dir / "compilation_cache")
  task = registry.make_task(config.task.name, config.task.options)
  tree = inner_step.ParamTree(task, config.seed)
  eval_loss = jax.jit(task.eval_loss)

  def measure(flat: Mapping[str, Any], num_batches: int) -> dict[str, Any]:
    params = jax.device_put(tree.unflatten(flat))

    def at_ease(batch: Any) -> Any:
      done = jax.block_until_ready(eval_loss(params, batch))
      progress.moved()
      pace.rest()
      return done

    return evaluation.held_out_loss(task, num_batches, at_ease)

  return measure


class Pace:
  """Rests after work, so that of a core only a share is taken.

  Rests end early once somebody waits: then no island trains, or soon none.
  """

  def __init__(
    self,
    awaited: Callable[[], bool],
    clock: Callable[[], float] = time.process_time,
    sleep: Callable[[float], None] = time.sleep,
  ):
    self._awaited = awaited
    self._clock = clock
    self._sleep = sleep
    self._worked_secs: float | None = None  # up to the last rest

  def rest(self) -> None:
    """Rests for what was done since the last time; the first is a start."""
    if self._worked_secs is not None:
      worked = self._clock() - self._worked_secs
      left = worked * (1 / _SHARE - 1)
      while left > 0 and not self._awaited():
        self._sleep(min(left, _NAP_SECS))
        left -= _NAP_SECS
    self._worked_secs = self._clock()


def evaluate(
  snapshots: store.SnapshotStore,
  tape: recorder.Recorder,
  measure: Measure,
  num_batches: int,
  **told: int,
) -> dict[str, Any]:
  """Returns the newest versions' held-out loss, or why it has none as `error`.

  The tape is told of it, and the `step` of the island that is furthest and how
  many evaluations were due and left out, as `skipped`.
  """
  started = time.monotonic()
  if told["skipped"]:
    logger.warning("behind skipped=%d", told["skipped"])
  try:
    read = versions.Versions(snapshots).read()
  except (errors.UserError, *operations.FAILURES) as error:
    logger.warning("evaluation_failed error=%s", error)
    return {"error": errors.one_line(error)}
  result = {
    "version": min(read.versions),
    "newest_version": max(read.versions),
    **measure(read.params, num_batches),
    "secs": time.monotonic() - started,
  }
  tape.record(events.EVALUATED, target="global", **told, **result)
  return result


def _serve(
  channel: channel_lib.Client,
  orphan_secs: float,
  evaluator: Callable[..., dict[str, Any]],
  progress: heartbeat.Progress,
) -> None:
  """Does what the controller asks, until it says stop or is gone."""
  while channel.alone_secs() <= orphan_secs:
    progress.moved()
    with contextlib.suppress(queue.Empty):
      message = channel.inbox.get(timeout=_POLL_SECS)
      if message.get("type") != "program":
        continue
      result = {}
      if message["name"] == "evaluate":
        result = evaluator(**message["args"])
      done = {"type": "done", "seq": message["seq"], "result": result}
      channel.send(done)
      if message["name"] == "stop":
        return


if __name__ == "__main__":
  process.leave(main())
