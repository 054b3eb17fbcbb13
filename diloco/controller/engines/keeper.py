"""What keeps one life of a role on a node of a Ray cluster.

It is sent to the node by value and needs nothing there but Python; the role
itself runs as a process of its own, as under the `process` engine, and ends
with its keeper.

A life holds a *permit*: a file in the run directory, made by the engine, which
takes it away before it starts a successor. A keeper that finds none kills its
role, and so does one that could not look for `lease_secs`. Who starts the
successor waits a little longer than that, so one life alone can write, even
where a node was given up for dead whose processes live.
"""

import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_POLL_SECS = 0.05
_SEE_NOTHING = 2  # exit code, as of a mistake in the configuration


@dataclasses.dataclass(frozen=True)
class Order:
  """A life to keep."""

  module: str  # run as `python -m`
  args: Sequence[str]
  env: Mapping[str, str]  # wins over the node's own
  log: str
  permit: str  # path of the file
  word: str  # what is in it
  wait_secs: float  # before the role may start
  lease_secs: float
  facts: Mapping[str, Any]  # for a later controller


class Keeper:
  """Becomes a Ray actor; `live` and the other methods run side by side."""

  def __init__(self, order: Order):
    """Starts nothing yet."""
    self._order = order
    self._living = threading.Lock()  # held while the role lives
    self._end: tuple[int, str] | None = None
    self._lock = threading.Lock()  # of what follows
    self._process: subprocess.Popen[bytes] | None = None
    self._killed = False
    self._seen = 0.0  # when the permit was last

  def facts(self) -> Mapping[str, Any]:
    """What a controller that did not start it must know."""
    return self._order.facts

  def live(self) -> tuple[int, str]:
    """Starts the role and waits for its end; asked again it only waits.

    The thread that starts a process must stay: the process ends with it.

    Returns:
      The exit code, or minus the number of the signal that ended it; and why,
      if the role has not said it in its log.
    """
    with self._living:
      if self._end is None:
        self._end = self._live()
      return self._end

  def signal(self, number: int) -> None:
    """Sends a signal to the role and all it started, or keeps it from that."""
    with self._lock:
      self._killed |= number == signal.SIGKILL
      if self._process is not None and not _ended(self._process):
        os.killpg(self._process.pid, number)

  def _live(self) -> tuple[int, str]:
    order, now = self._order, time.monotonic()
    if not pathlib.Path(order.permit).parent.is_dir() or self._look() is None:
      return _SEE_NOTHING, _unseen(order.permit)
    self._seen = now
    threading.Thread(target=self._watch, name="permit", daemon=True).start()
    start = time.monotonic() + order.wait_secs
    while time.monotonic() < start and not self._must_end():
      time.sleep(_POLL_SECS)
    with self._lock:
      if self._must_end():
        return -signal.SIGKILL, ""
      try:
        self._process = process = self._start()
      except OSError as error:
        return 1, str(error)
    while not _ended(process):
      if self._must_end():
        self.signal(signal.SIGKILL)
      time.sleep(_POLL_SECS)
    with self._lock:
      _kill_session(process.pid)  # what it started
      return process.wait(), ""

  def _start(self) -> subprocess.Popen[bytes]:
    order = self._order
    env = {**os.environ, **order.env, "DILOCO_KEEPER": str(os.getpid())}
    if not env.get("CUDA_VISIBLE_DEVICES", "all"):
      del env["CUDA_VISIBLE_DEVICES"]  # Ray hides what was not asked for
    with open(order.log, "ab") as log:
      return subprocess.Popen(
        [sys.executable, "-m", order.module, *order.args],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=env,
        start_new_session=True,
      )

  def _must_end(self) -> bool:
    late = time.monotonic() > self._seen + self._order.lease_secs
    return self._killed or late

  def _watch(self) -> None:
    """On a thread of its own: to look may hang with the file system."""
    while not self._killed and self._end is None:
      now, found = time.monotonic(), self._look()
      if found:
        self._seen = now
      elif found is False:
        self._killed = True
      time.sleep(self._order.lease_secs / 20)

  def _look(self) -> bool | None:
    """Whether the permit is there; None if that cannot be told."""
    try:
      # To open a file asks a network file system's server; to stat may not.
      found = pathlib.Path(self._order.permit).read_text()
    except FileNotFoundError:
      return False
    except OSError:
      return None
    return True if found == self._order.word else None


def _unseen(permit: str) -> str:
  run_dir = pathlib.Path(permit).parent.parent.parent
  return (
    f"node {socket.gethostname()} does not see the run directory {run_dir};"
    " on Ray all nodes share it: put it on a file system"
    " that they all have at this path"
  )


def _ended(process: subprocess.Popen[bytes]) -> bool:
  if process.returncode is not None:
    return True
  # Not reaped yet, its number cannot have gone to another session.
  look = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, process.pid, look) is not None


def _kill_session(pid: int) -> None:
  try:
    os.killpg(pid, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    return
