"""Writers of the run's record: tapes of events and logs of metrics.

A line is one JSON object and one `os.write` on an append-only descriptor. So
a process killed at any instant leaves whole lines and at most one torn line
at the very end; whoever opens the file for writing next cuts that one off. A
full disk costs no event either: lines wait in memory until there is room.
"""

import errno
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from diloco.tape import events

TAPE_DIR = "tape"
METRICS_DIR = "metrics"

_HEADER = ("event", "role", "incarnation", "wall_secs")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MAX_WAITING_BYTES = 64 << 20
_TAIL_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class Recorder:
  """The tape of one role in one incarnation; safe to share among threads."""

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    role: str,
    incarnation: int,
    clock: Callable[[], float] = time.time,
    recorded: Callable[[], None] = lambda: None,
  ):
    """Opens `tape/<role>-<incarnation>.jsonl`, creating folders as needed.

    Args:
      run_dir: directory of the run.
      role: "controller", "syncer", "island-<m>" or "evaluator".
      incarnation: which life of the role this is, from 1.
      clock: gives `wall_secs`; a simulated run passes its own.
      recorded: makes sure that the run has the lines, too, where this is not
        its directory (`diloco.relay`); may raise an OSError.
    """
    self.path = tape_path(run_dir, role, incarnation)
    self._role = role
    self._incarnation = incarnation
    self._clock = clock
    self._recorded = recorded
    self._lines = _LineWriter(self.path)

  def record(self, event: str, /, **fields: Any) -> None:
    """Appends one event; the line is with the kernel when this returns."""
    clash = [name for name in fields if name in _HEADER]
    if clash:
      raise ValueError(
        f"event {event!r} with the field {clash[0]!r}: every line has that"
        " field already; use another name"
      )
    self._lines.write(
      {
        "event": event,
        "role": self._role,
        "incarnation": self._incarnation,
        "wall_secs": self._clock(),
        **fields,
      }
    )

  def discarded(
    self, key: str, reason: str, sent: Any = None, **more: Any
  ) -> None:
    """Appends that a contribution will not be merged.

    Args:
      key: of the contribution, which says whose it is.
      reason: why.
      sent: its record, or what a tape tells of it; None if neither is known.
      **more: further fields.
    """
    fragment, island, incarnation, step = map(int, key.split("."))
    self.record(
      events.DISCARDED,
      fragment=fragment,
      key=key,
      island=island,
      island_incarnation=incarnation,
      first_step=sent.first_step if sent else step,
      step=step,
      c_tokens=sent.c_tokens if sent else 0,
      reason=reason,
      **more,
    )

  def flush(self) -> None:
    """Makes sure that the kernel has every line recorded so far.

    It has, unless the disk is full. What follows from a line and outlives this
    process, as a commit record does, waits for this.

    Raises:
      OSError: there is no room; the lines still wait in memory. Or the run
        could not be told.
    """
    self._lines.flush()
    self._recorded()

  def close(self) -> None:
    """Closes the file; recording afterwards is an error."""
    self._lines.close()


class MetricLog:
  """The metric log of one island, one file for all its incarnations."""

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    island: int,
    clock: Callable[[], float] = time.time,
  ):
    """Opens `metrics/island-<m>.jsonl` behind the lines already there."""
    self.path = metrics_path(run_dir, island)
    self._clock = clock
    self._lines = _LineWriter(self.path)

  def record(self, **fields: Any) -> None:
    """Appends one step's metrics; `wall_secs` is now unless it is given."""
    fields.setdefault("wall_secs", self._clock())
    self._lines.write(fields)

  def close(self) -> None:
    """Closes the file; recording afterwards is an error."""
    self._lines.close()


def tape_path(
  run_dir: str | os.PathLike[str], role: str, incarnation: int
) -> pathlib.Path:
  """Returns where the tape of one role and incarnation is."""
  return pathlib.Path(run_dir) / TAPE_DIR / f"{role}-{incarnation:04d}.jsonl"


def metrics_path(run_dir: str | os.PathLike[str], island: int) -> pathlib.Path:
  """Returns where the metric log of an island is."""
  return pathlib.Path(run_dir) / METRICS_DIR / f"island-{island}.jsonl"


def is_record(name: str) -> bool:
  """Whether a path below a run's directory is that of a tape or metric log."""
  folder, _, file = name.partition("/")
  ours = folder in (TAPE_DIR, METRICS_DIR) and "/" not in file
  return ours and file.endswith(".jsonl")


class _LineWriter:
  """Appends JSON lines whole, and keeps them while the disk is full."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._lock = threading.Lock()
    self._waiting = b""  # what a full disk has not taken yet
    self._full = False  # whether that has been said
    self._closed = False
    self._fd: int | None = None
    self._write(b"")  # opens it

  def write(self, fields: dict[str, Any]) -> None:
    line = json.dumps(fields, separators=(",", ":"), default=_plain)
    with self._lock:
      if self._closed:
        raise ValueError(f"{self._path.name} is closed")
      self._append(self._waiting + line.encode() + b"\n")

  def _append(self, data: bytes) -> None:
    """Writes `data` with one call; a full disk leaves the rest waiting."""
    self._waiting = data[self._write(data) :]

  def _write(self, data: bytes) -> int:
    """Opens the file unless it is, and writes; returns how much went in."""
    try:
      if self._fd is None:
        self._fd = open_lines(self._path)
      written = os.write(self._fd, data)
      refused = written < len(data)
    except OSError as error:
      if error.errno not in _NO_ROOM or len(data) > _MAX_WAITING_BYTES:
        raise
      written, refused = 0, True
    if refused and not self._full:
      logger.warning("disk_full file=%s lines_wait_in_memory=1", self._path)
    self._full = refused
    return written

  def flush(self) -> None:
    with self._lock:
      if self._waiting:
        self._append(self._waiting)
      if self._waiting:
        raise OSError(
          errno.ENOSPC, "no room for lines of the tape", str(self._path)
        )

  def close(self) -> None:
    with self._lock:
      if self._closed:
        return
      self._closed = True
      if self._waiting:
        self._append(self._waiting)
      if self._waiting:
        logger.warning(
          "lines_lost file=%s bytes=%d", self._path, len(self._waiting)
        )
      if self._fd is not None:
        os.close(self._fd)


def open_lines(path: pathlib.Path) -> int:
  """Opens a file to append lines to, behind the last whole one.

  Folders are made as needed. Returns a descriptor, the caller's to close.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
  fd = os.open(path, flags, 0o644)
  _cut_torn_tail(fd)
  return fd


def _cut_torn_tail(fd: int) -> None:
  """Drops what follows the last newline: an earlier writer died there."""
  end = size = os.fstat(fd).st_size
  while end > 0:
    start = max(0, end - _TAIL_BYTES)
    newline = os.pread(fd, end - start, start).rfind(b"\n")
    if newline >= 0:
      end = start + newline + 1
      break
    end = start
  if end < size:
    os.ftruncate(fd, end)


def _plain(value: Any) -> Any:
  """Turns array scalars and paths into what JSON knows."""
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if hasattr(value, "tolist"):
    return value.tolist()
  raise TypeError(f"a {type(value).__name__} cannot go on the tape")
