"""What keeps one life of a role on a node of a Ray cluster.

It is sent to the node by value and needs nothing there but Python; the role
itself runs as a process of its own, as under the `process` engine, and ends
with its keeper.

A life holds a *permit*: a file in the run directory, made by the engine, which
takes it away before it starts a successor. A keeper that finds none kills its
role, and so does one that could not look for `lease_secs`. Who starts the
successor waits a little longer than that, so one life alone can write, even
where a node was given up for dead whose processes live.

A node that does not see the run directory gives the life a folder of its own
for as long as it lives, with what the role must know of the run (`Order.files`)
and nothing that another life could write to. What it records goes through the
run's store (`diloco.relay`), where an earlier life is fenced.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_POLL_SECS = 0.05
_SEE_NOTHING = 2  # exit code, as of a mistake in the configuration
_CONFIG = "config.json"
_LOG_BYTES = 1 << 20  # of a log that come back
_FOLDER = "diloco-life-"  # in the node's folder for temporary files


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
  run_dir: str
  # What a role must know of the run, by path below its directory; none if the
  # store is below it, too.
  files: Mapping[str, bytes]


class End(NamedTuple):
  """How a life ended.

  Attributes:
    code: exit code, or minus the number of the signal that ended it.
    why: if the role has not said it in its log; empty otherwise.
    log: the end of its log, if that is not in the run directory.
  """

  code: int
  why: str = ""
  log: bytes = b""


class Keeper:
  """Becomes a Ray actor; `live` and the other methods run side by side."""

  def __init__(self, order: Order):
    """Starts nothing yet."""
    self._order = order
    self._living = threading.Lock()  # held while the role lives
    self._end: End | None = None
    self._lock = threading.Lock()  # of what follows
    self._process: subprocess.Popen[bytes] | None = None
    self._killed = False
    self._seen = 0.0  # when the permit was last
    # Held while files are written, which may hang where a kill must not.
    self._writing = threading.Lock()
    self._files = dict(order.files)
    self._folder: pathlib.Path | None = None  # of a life that has its own

  def facts(self) -> Mapping[str, Any]:
    """What a controller that did not start it must know."""
    return self._order.facts

  def live(self) -> End:
    """Starts the role and waits for its end; asked again it only waits.

    The thread that starts a process must stay: the process ends with it.
    """
    with self._living:
      if self._end is None:
        self._end = self._lived()
      return self._end

  def put(self, name: str, data: bytes) -> None:
    """Changes a file of a life that does not see the run directory."""
    with self._writing:
      self._files[name] = data
      if self._folder is not None:
        _write(self._folder / name, data)

  def signal(self, number: int) -> None:
    """Sends a signal to the role and all it started, or keeps it from that."""
    with self._lock:
      self._killed |= number == signal.SIGKILL
      if self._process is not None and not _ended(self._process):
        os.killpg(self._process.pid, number)

  def _lived(self) -> End:
    order, now = self._order, time.monotonic()
    if order.files and not self._sees_run():
      return self._live_apart()
    if not pathlib.Path(order.permit).parent.is_dir() or self._look() is None:
      return End(_SEE_NOTHING, _unseen(order.run_dir))
    self._seen = now
    threading.Thread(target=self._watch, name="permit", daemon=True).start()
    return self._live(order.args, order.log)

  def _sees_run(self) -> bool:
    """Whether what is at the run directory's path here is the run's."""
    try:
      here = (pathlib.Path(self._order.run_dir) / _CONFIG).read_bytes()
      run = json.loads(self._order.files[_CONFIG])["id"]
      return bool(json.loads(here)["id"] == run)
    except (OSError, ValueError, KeyError, TypeError):
      return False

  def _live_apart(self) -> End:
    """Lives where nothing is the run's but what the order brings."""
    order = self._order
    self._seen = float("inf")
    try:
      folder, held = _own_folder()
    except OSError as error:
      return End(1, str(error))
    try:
      with self._writing:
        for name, data in self._files.items():
          _write(folder / name, data)
        self._folder = folder
      log = folder / "log"
      log.touch()
      here = {order.run_dir: str(folder)}
      end = self._live([here.get(a, a) for a in order.args], str(log))
      return end._replace(log=log.read_bytes()[-_LOG_BYTES:])
    except OSError as error:
      return End(1, str(error))
    finally:
      with self._writing:
        self._folder = None
      shutil.rmtree(folder, ignore_errors=True)
      os.close(held)

  def _live(self, args: Sequence[str], log: str) -> End:
    start = time.monotonic() + self._order.wait_secs
    while time.monotonic() < start and not self._must_end():
      time.sleep(_POLL_SECS)
    with self._lock:
      if self._must_end():
        return End(-signal.SIGKILL)
      try:
        self._process = process = self._start(args, log)
      except OSError as error:
        return End(1, str(error))
    while not _ended(process):
      if self._must_end():
        self.signal(signal.SIGKILL)
      time.sleep(_POLL_SECS)
    with self._lock:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # what it started
      return End(process.wait())

  def _start(
    self, args: Sequence[str], log_path: str
  ) -> subprocess.Popen[bytes]:
    order = self._order
    env = {**os.environ, **order.env, "DILOCO_KEEPER": str(os.getpid())}
    if not env.get("CUDA_VISIBLE_DEVICES", "all"):
      del env["CUDA_VISIBLE_DEVICES"]  # Ray hides what was not asked for
    with open(log_path, "ab") as log:
      return subprocess.Popen(
        [sys.executable, "-m", order.module, *args],
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


def _unseen(run_dir: str) -> str:
  return (
    f"node {socket.gethostname()} does not see the run directory {run_dir},"
    " and the run's store is in it: set config.store to a bucket, or put the"
    " directory on a file system that all nodes have at this path"
  )


def _own_folder() -> tuple[pathlib.Path, int]:
  """A new folder, and what it is held by; deletes those that nobody holds."""
  place = pathlib.Path(tempfile.gettempdir())
  for old in place.glob(f"{_FOLDER}*/held"):
    with contextlib.suppress(OSError):
      held = os.open(old, os.O_RDONLY)
      try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(old.parent, ignore_errors=True)  # its keeper was killed
      finally:
        os.close(held)
  folder = pathlib.Path(tempfile.mkdtemp(prefix="diloco-new-"))
  held = os.open(folder / "held", os.O_RDONLY | os.O_CREAT, 0o600)
  fcntl.flock(held, fcntl.LOCK_EX)
  name = folder.name.replace("diloco-new-", _FOLDER)
  return folder.rename(folder.with_name(name)), held


def _write(path: pathlib.Path, data: bytes) -> None:
  """Whole or not at all, and for this user alone."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(path.name + ".new")
  with contextlib.suppress(FileNotFoundError):
    new.unlink()  # it would keep its mode
  with os.fdopen(
    os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
  ) as file:
    file.write(data)
  new.replace(path)


def _ended(process: subprocess.Popen[bytes]) -> bool:
  if process.returncode is not None:
    return True
  # Not reaped yet, its number cannot have gone to another session.
  look = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, process.pid, look) is not None
