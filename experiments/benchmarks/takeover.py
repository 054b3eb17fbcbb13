"""Takeover: from the death of a leading syncer to its successor's work.

Question: how long does nobody merge when the leader is killed? Real processes
on a store with a plan and heads but no islands; the leader is SIGKILLed again
and again, at changing points of its heartbeat, and started anew as the standby.
The time ends when the successor has fenced every head and says that it leads:
the next thing it does is to look for contributions.

Command: `diloco bench takeover --json`; cost: two minutes.
"""

import pathlib
import queue
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from diloco import channel as channel_lib
from diloco import config as config_lib
from diloco import process, timing
from diloco.controller.engines import base
from diloco.controller.engines import process as process_engine
from diloco.fragments import partition
from diloco.snapshots import keys, records, store

_PATIENCE_SECS = 60.0  # two Python starts on a busy machine


class Seats:
  """A run directory with syncer processes, and what they say."""

  def __init__(
    self,
    run_dir: pathlib.Path,
    num_fragments: int,
    takeover_secs: float = 0.0,
  ):
    """Makes the directory and its store; starts nothing yet."""
    self.dir = run_dir
    self.num_fragments = num_fragments
    config = config_lib.from_mapping(
      {
        "sync": {"num_fragments": num_fragments},
        "controller": {"takeover_secs": takeover_secs},
      }
    )
    process.write_config(config, run_dir)
    self.store = store.SnapshotStore(process.store_url(run_dir))
    tensors = [
      partition.Tensor(f"t{i}", (4,), "rda") for i in range(num_fragments)
    ]
    self.store.write_plan(partition.partition(tensors, num_fragments))
    for p in range(num_fragments):
      merged = {"fragment": p, "version": 0}
      head = records.Head(p, 0, 0, f"globals/{p}", [[4]], {}, merged)
      self.store.write(keys.head_key(p), head)
    self.times = timing.settle(self.store, config, anew=True)
    self.engine = process_engine.ProcessEngine(run_dir)
    self.server = channel_lib.Server(0)
    self.server.announce(run_dir, {})
    self.handles: dict[str, process_engine.ProcessHandle] = {}
    self.tokens: dict[str, int] = {}  # of who is ready; 0 for who waits
    self._lives: dict[str, int] = {}

  def start(self, role: str) -> None:
    """Starts a new life of a seat, once the last one is over."""
    if role in self.handles:
      assert self.handles[role].wait(_PATIENCE_SECS)
    self.tokens.pop(role, None)
    life = self._lives[role] = self._lives.get(role, 0) + 1
    args = ["--run_dir", str(self.dir), "--role", role]
    args += ["--incarnation", str(life)]
    log = self.dir / "logs" / f"{role}.log"
    self.handles[role] = self.engine.start(
      base.Launch(role, "diloco.syncer.main", args, log)
    )

  def listen(self, until: Callable[[], Any]) -> None:
    """Takes messages until something holds."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while not until():
      if time.monotonic() > deadline:
        raise TimeoutError(f"the logs say {self._logs()}")
      try:
        role, message = self.server.inbox.get(timeout=0.01)
      except queue.Empty:
        continue
      if message.get("pid", self.handles[role].pid) != self.handles[role].pid:
        continue
      # A role that is ready before it is connected says so in its hello.
      if message["type"] == "ready" or message.get("ready"):
        self.tokens[role] = message["token"]

  def leader(self, above: int = 0) -> str | None:
    """Who leads, under a token beyond `above`."""
    leading = [r for r, token in self.tokens.items() if token > above]
    return leading[0] if leading else None

  def start_both(self) -> None:
    """Starts a leader, then a standby."""
    self.start("syncer")
    self.listen(lambda: self.leader() == "syncer")
    self.start("standby")
    self.listen(lambda: "standby" in self.tokens)

  def kill_leader(self, token: int) -> tuple[str, float]:
    """Kills who leads under `token`; returns who, and seconds without leader.

    The seat that died is started again and waits when this returns.
    """
    dead = self.leader()
    assert dead is not None
    self.handles[dead].signal(signal.SIGKILL)
    killed = time.monotonic()
    self.listen(lambda: self.leader(above=token))
    secs = time.monotonic() - killed
    self.start(dead)
    self.listen(lambda: self.tokens.get(dead) == 0)
    return dead, secs

  def _logs(self) -> dict[str, str]:
    return {p.name: p.read_text()[-2000:] for p in self.dir.glob("logs/*")}

  def close(self) -> None:
    """Ends all processes."""
    for handle in self.handles.values():
      handle.signal(signal.SIGKILL)
      handle.wait(_PATIENCE_SECS)
    self.server.close()


def run(kills: int = 50, num_fragments: int = 24) -> dict[str, Any]:
  """Kills leaders; returns seconds without one."""
  with tempfile.TemporaryDirectory() as folder:
    seats = Seats(pathlib.Path(folder) / "run", num_fragments)
    try:
      seats.start_both()
      beat = seats.times.heartbeat_secs
      secs = []
      for token in range(1, kills + 1):
        time.sleep(beat * (1 + token % 7 / 7))  # anywhere between two beats
        secs.append(seats.kill_leader(token)[1])
    finally:
      seats.close()
  return {
    "kills": kills,
    "num_fragments": num_fragments,
    "chosen_secs": seats.times.takeover_secs,
    "round_trip_secs": seats.times.round_trip_secs,
    "takeover_secs_min": min(secs),
    "takeover_secs_p50": statistics.median(secs),
    "takeover_secs_p99": sorted(secs)[max(0, round(0.99 * len(secs)) - 1)],
    "takeover_secs_max": max(secs),
  }
