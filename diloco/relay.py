"""How the records of a role reach a run directory that its node does not see.

Such a role lives in a folder of its node's own, and writes tape and metrics
there. Its `Relay` puts them into the run's store, piece by piece, and a tape's
before what follows from them: `flush` is what `recorder.Recorder.flush` calls.
Who controls the run takes the pieces into the run directory. Below the store's
root:

    relay/<role>-<life>/<file>/<offset>    whole lines

Lines since the last push are lost with the role, as if what they tell of had
never happened.

Such a life has its *permit* in the store, where `flush` looks for it, and so
every second does a thread. Who starts a successor takes it away first; a life
that finds none ends. One that cannot look goes on, for it cannot publish.

    permits/<role>.<life>                  a word that nobody else knows
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures

from diloco import errors, process, workers
from diloco.snapshots import store
from diloco.tape import recorder

# Below the folder of a role that has one of its own: the word of its permit.
APART = "control/apart"
PERMITS = "permits"
_ROOT = "relay"
_GROWING = (recorder.TAPE_DIR, recorder.METRICS_DIR)
_LOOK_SECS = 1.0  # for the permit
_LOOKS_A_PUSH = 3
_END_SECS = 60.0  # so long a role that leaves waits for its store
_TAIL_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class Relay:
  """What a role has recorded, on its way; safe to share among threads."""

  def __init__(
    self,
    folder: pathlib.Path,
    snapshots: store.SnapshotStore,
    role: str,
    incarnation: int,
  ):
    self._folder = folder
    self._store = snapshots
    self._life = f"{role}-{incarnation:04d}"
    self._permit = permit_key(role, incarnation)
    self._word = (folder / APART).read_bytes()
    self._lock = threading.Lock()  # of what follows
    self._ends: dict[str, int] = {}  # of each file, how much is in the store
    self._piece: tuple[str, int, bytes] | None = None  # not known to be there

  def flush(self) -> None:
    """Returns once all lines of the tape recorded before are in the store.

    Raises:
      OSError: the store fails; the lines stay, for the next call.
      FencedError: see `look`.
    """
    self.push((recorder.TAPE_DIR,))
    self.look()

  def push(self, folders: Iterable[str] = _GROWING) -> None:
    """Puts what is new into the store.

    Raises:
      OSError: the store fails; the lines stay, for the next call.
    """
    with self._lock:
      self._put()  # unchanged, for a part of it may have been taken already
      for folder in folders:
        for path in sorted((self._folder / folder).glob("*.jsonl")):
          name = f"{folder}/{path.name}"
          start = self._ends.get(name, 0)
          with path.open("rb") as file:
            file.seek(start)
            data = file.read()
          if data := data[: data.rfind(b"\n") + 1]:
            self._piece = name, start, data
            self._put()

  def look(self) -> None:
    """Returns if this life may go on.

    Raises:
      OSError: the store fails.
      FencedError: a successor is about to start, or has.
    """
    if self._store.get(self._permit) != self._word:
      raise errors.FencedError(f"the permit of {self._life} was withdrawn")

  def _put(self) -> None:
    if self._piece is None:
      return
    name, start, data = self._piece
    self._store.put(f"{_ROOT}/{self._life}/{name}/{start:016d}", data)
    self._ends[name], self._piece = start + len(data), None


def permit_key(role: str, incarnation: int) -> str:
  """Where the permit of a life is, below the store's root."""
  return f"{PERMITS}/{role}.{incarnation}"


@contextlib.contextmanager
def relayed(
  run_dir: pathlib.Path, role: str, incarnation: int
) -> Iterator[Callable[[], None]]:
  """Relays what a role records, if `run_dir` is a folder of its own.

  Yields:
    `Relay.flush`; nothing to be done where the directory is the run's.

  Raises:
    OSError: the store did not take the last lines within a minute.
    FencedError: a successor is about to start, or has.
  """
  if not (run_dir / APART).exists():
    yield lambda: None
    return
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  relay = Relay(run_dir, snapshots, role, incarnation)
  closing = threading.Event()

  def work() -> None:
    for turn in itertools.count():
      if closing.wait(_LOOK_SECS):
        return
      try:
        relay.look()
        if turn % _LOOKS_A_PUSH == 0:
          relay.push()
      except errors.FencedError as error:
        logger.warning("fenced error=%s", error)
        sys.stderr.flush()
        os._exit(process.EXIT_FAILED)  # whatever else it does
      except Exception as error:  # whatever it is, nobody else looks
        logger.warning("relay_waits error=%s", errors.one_line(error))

  worker = workers.Worker("relay", work)
  try:
    yield relay.flush
  finally:
    closing.set()
    worker.join()
    _push_at_last(relay)


def _push_at_last(relay: Relay) -> None:
  deadline = time.monotonic() + _END_SECS
  while True:
    try:
      relay.push()
      relay.look()
      return
    except OSError:
      if time.monotonic() > deadline:
        raise
      time.sleep(_LOOK_SECS)


def collect(
  run_dir: pathlib.Path,
  snapshots: store.SnapshotStore,
  known: Collection[str] = (),
) -> list[str]:
  """Takes what roles have relayed into the run directory; deletes nothing.

  What is there already is not written again, however an earlier call ended.

  Returns:
    Keys, below the store's root, that are there now and were not `known`.

  Raises:
    OSError: the store or the directory fails.
  """
  new = [
    (f"{_ROOT}/{key}", name, start)
    for key, name, start in pieces(snapshots.keys(_ROOT))
    if f"{_ROOT}/{key}" not in known
  ]
  taken = []
  with futures.ThreadPoolExecutor(snapshots.width) as pool:
    read = pool.map(snapshots.get, [piece[0] for piece in new])
    for data, (key, name, start) in zip(read, new, strict=True):
      if data and _append(run_dir / name, data, start):
        taken.append(key)
  return taken


def pieces(keys: Iterable[str]) -> Iterator[tuple[str, str, int]]:
  """Which keys are `<owner>/<file>/<offset>`; each with file and offset."""
  for key in keys:
    name, _, offset = key.partition("/")[2].rpartition("/")
    if offset.isdecimal() and recorder.is_record(name):
      yield key, name, int(offset)


def _append(path: pathlib.Path, data: bytes, start: int) -> bool:
  """Adds what a file does not have of a piece; False if an earlier one lacks.

  A tape is of one life, so offsets are those of the file. A metric log is of
  all lives, and no two of its lines are equal.
  """
  fd = recorder.open_lines(path)
  try:
    size = os.fstat(fd).st_size
    if path.parent.name == recorder.TAPE_DIR:
      if size < start:
        return False
      data = data[size - start :]
    else:
      length = len(data) + _TAIL_BYTES
      tail = os.pread(fd, length, max(0, size - length))
      held = set(tail.splitlines(keepends=True))
      lines = data.splitlines(keepends=True)
      data = b"".join(line for line in lines if line not in held)
    while data:
      data = data[os.write(fd, data) :]
  finally:
    os.close(fd)
  return True
