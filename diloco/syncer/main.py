"""Process of one syncer: `python -m diloco.syncer.main`. It never loads JAX.

Any number of them may run. One leads; the others are warm and wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import pathlib
import queue
import sys
from collections.abc import Callable, Mapping
from typing import Any

from diloco import channel as channel_lib
from diloco import config as config_lib
from diloco import (
  config_changes,
  errors,
  heartbeat,
  process,
  relay,
  timing,
  workers,
)
from diloco.snapshots import requests, store
from diloco.syncer import syncer as syncer_lib
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
  """Waits for the lease, leads, gives it up. Returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--run_dir", type=pathlib.Path, required=True)
  parser.add_argument("--role", default="syncer")
  parser.add_argument("--incarnation", type=int, required=True)
  args = parser.parse_args(argv)
  process.setup_role((), args.run_dir, args.role)
  try:
    told = args.run_dir, args.role, args.incarnation
    with relay.relayed(*told) as recorded:
      live(*told, recorded=recorded)
  except errors.FencedError as error:
    logger.warning("fenced error=%s", error)
    return process.EXIT_FAILED
  except Exception as error:
    return process.end_with(error, sys.stderr)
  return 0


def live(
  run_dir: pathlib.Path,
  role: str,
  incarnation: int,
  threads: workers.Threads = workers.Threads(),
  snapshots: store.SnapshotStore | None = None,
  recorded: Callable[[], None] = lambda: None,
) -> None:
  """Returns once the syncer has left in order.

  `snapshots` is the run's store, if others of this process use it too.

  Raises:
    FencedError: another one leads, or a later life has its place.
  """
  config = process.read_config(run_dir, or_copy=True)
  channel = channel_lib.Client(
    run_dir,
    role,
    {"incarnation": incarnation, "ready": False, "token": 0},
    lambda: threads.dead,
  )
  threads.at_death(channel.close)
  times = timing.derive(config.controller, 0.0)
  syncer: syncer_lib.Syncer | None = None

  def report() -> None:
    if syncer is None:
      channel.send({"type": "status", "merges": 0, "damaged": []})
    elif not syncer.hung:
      told = {"merges": syncer.num_merges, "damaged": syncer.damaged}
      channel.send({"type": "status", **told})

  # It lives before it has seen the store, which may be out of reach for long.
  reports = threads.pulse(report, times.heartbeat_secs, "report")
  waiting = Waiting(channel, times.orphan_secs)
  waiting.ready(token=0)
  tape = recorder.Recorder(run_dir, role, incarnation, recorded=recorded)
  threads.at_death(tape.close)
  requesting = None
  if snapshots is None:  # else these requests are counted with all others
    snapshots = store.SnapshotStore(process.store_url(run_dir))
    counter = requests.Counter(snapshots.url)
    requesting = threads.pulse(
      lambda: tape.record(events.STORE_REQUESTS, **counter.made()),
      requests.EVERY_SECS,
      "requests",
    )
  mine = heartbeat.born(run_dir, role, incarnation, threads)
  syncer = _make(snapshots, config, tape, mine.nonce, threads, waiting)
  place = heartbeat.Heartbeat(
    snapshots, lambda: mine, syncer.times.lease_ttl_secs, threads=threads
  )
  syncer.check_place = place.check
  with contextlib.suppress(OSError, errors.CorruptSnapshotError):
    syncer.read_plan()  # now, so that nothing is done first when it leads
  reason = "stopped"
  if syncer.take_over(lambda: waiting.wanted(syncer.configure)):
    waiting.ready(syncer.token)
    reason = syncer.run(channel)
  logger.info("leaving reason=%s", reason)
  syncer.close()
  place.close()
  reports.close()
  if requesting is not None:
    requesting.close()
  channel.close()
  tape.close()


def _make(
  snapshots: store.SnapshotStore,
  config: config_lib.RunConfig,
  tape: recorder.Recorder,
  owner: str,
  threads: workers.Threads,
  waiting: Waiting,
) -> syncer_lib.Syncer:
  """Makes the syncer once its store can tell by which timing, if it is wanted.

  It may lead for months, and must not by a guess.
  """
  times = timing.read(
    snapshots,
    config.controller,
    lambda: not threads.dead and waiting.wanted(),
  )
  if waiting.live:
    config = config_changes.with_live(config, waiting.live)
  return syncer_lib.Syncer(snapshots, config, tape, owner, threads, times)


class Waiting:
  """What a syncer that does not lead says to its controller, and hears.

  Attributes:
    live: the settings that it heard of last; empty if of none.
  """

  def __init__(self, channel: channel_lib.Client, orphan_secs: float):
    self.live: Mapping[str, Any] = {}
    self._channel = channel
    self._orphan_secs = orphan_secs
    self._stopped = False

  def ready(self, token: int) -> None:
    """Says that it is warm, or with a token that it leads."""
    self._channel.set_hello(ready=True, token=token)
    self._channel.send({"type": "ready", "token": token})

  def wanted(
    self, configure: Callable[[Mapping[str, Any]], None] = lambda live: None
  ) -> bool:
    """Whether to go on waiting; answers what was asked meanwhile."""
    while not self._stopped:
      try:
        message = self._channel.inbox.get_nowait()
      except queue.Empty:
        return self._channel.alone_secs() <= self._orphan_secs
      if message.get("type") == "program":
        result = {"leads": False}
        done = {"type": "done", "seq": message["seq"], "result": result}
        self._channel.send(done)
        if message["name"] == "configure":
          self.live = message["args"]["settings"]
          configure(self.live)
        self._stopped = message["name"] == "stop"
    return False


if __name__ == "__main__":
  process.leave(main())
