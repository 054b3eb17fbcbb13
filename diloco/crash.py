"""Named crash points: instants at which a process can be made to die.

The code passes a *point* by name: `crash.point("after_payload")`. A campaign
arms *coordinates* in `control/crash_points.json`; a process that makes the
pass a coordinate names kills itself with SIGKILL, as if the machine had taken
it. A coordinate is consumed once: it goes into `control/crash_fired.jsonl`,
which is on the disk before the process dies, so a role that is started again
does not die at it again.

A process looks for coordinates only if the file of armed ones exists at its
birth. In all other runs a point costs one look at a variable.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Every point of the code, with the role that passes it.
POINTS = {
  "after_payload": "island",
  "before_commit_record": "island",
  "after_commit_record": "island",
  "mid_adopt": "island",
  "mid_checkpoint": "island",
  "after_checkpoint": "island",
  "mid_recovery": "island",
  "after_merge": "syncer",
  "before_head_cas": "syncer",
  "after_head_cas": "syncer",
  "before_tape": "syncer",
  "before_delete": "syncer",
  "after_lease": "syncer",
  "mid_fence": "syncer",
  "after_fence": "syncer",
  "mid_cut": "any",
  "mid_restore": "controller",
  "before_cut_complete": "controller",
  "controller_dispatch": "controller",
  "controller_start_role": "controller",
  "controller_stopping": "controller",
}
ANY_ROLE = "*"


class Coordinate(NamedTuple):
  """Where to die: at the `occurrence`-th pass of `role` through `point`.

  Passes are counted in one process, from 1, beginning with the first pass at
  which the process finds the coordinate armed; another process begins anew.
  `role` may be "*", the first of any to get there. `serial` tells two
  coordinates apart that are otherwise equal.
  """

  role: str
  point: str
  occurrence: int = 1
  serial: int = 0


class Fired(NamedTuple):
  """A coordinate at which `role` died, at `wall_secs` (Unix time)."""

  coordinate: Coordinate
  role: str
  wall_secs: float


class _Passes:
  """Armed coordinates as one process sees them, and its passes so far."""

  def __init__(self, armed: pathlib.Path, fired: pathlib.Path, role: str):
    self._armed = armed
    self._fired = fired
    self._role = role
    self._lock = threading.Lock()
    self._stamp: tuple[int, int] | None = None
    self._left: dict[str, list[Coordinate]] = {}  # by point
    self._counts: dict[Coordinate, int] = {}

  def passed(self, name: str) -> None:
    """Counts a pass; does not return if it was the last one."""
    with self._lock:
      self._look()
      for coordinate in self._left.get(name, ()):
        count = self._counts.get(coordinate, 0) + 1
        self._counts[coordinate] = count
        if count == coordinate.occurrence and self._consume(coordinate):
          os.kill(os.getpid(), signal.SIGKILL)

  def _look(self) -> None:
    """Reads the armed coordinates again if their file has changed."""
    try:
      stat = os.stat(self._armed)
    except OSError:
      return
    stamp = stat.st_mtime_ns, stat.st_ino
    if stamp == self._stamp:
      return
    self._stamp = stamp
    self._left = {}
    for item in json.loads(self._armed.read_text()):
      coordinate = Coordinate(*item)
      if coordinate.role in (self._role, ANY_ROLE):
        self._left.setdefault(coordinate.point, []).append(coordinate)

  def _consume(self, coordinate: Coordinate) -> bool:
    """Puts a coordinate on the disk as fired; False if it was already.

    Without room for it, or a disk to write on, nobody dies.
    """
    mine = Fired(coordinate, self._role, time.time())
    line = (json.dumps(mine) + "\n").encode()
    with contextlib.suppress(OSError), _locked(self._fired) as fd:
      if coordinate not in [f.coordinate for f in _fired_lines(self._fired)]:
        written = os.write(fd, line)
        os.fsync(fd)
        return written == len(line)
    return False


_passes: _Passes | None = None


def configure(run_dir: str | os.PathLike[str], role: str) -> None:
  """Says who this process is, by its role's name; called once, at its birth."""
  global _passes
  armed, fired = _paths(run_dir)
  _passes = _Passes(armed, fired, role) if armed.exists() else None


def point(name: str) -> None:
  """Dies here if this pass is armed."""
  if _passes is not None:
    _passes.passed(name)


def arm(
  run_dir: str | os.PathLike[str], coordinates: Iterable[Coordinate]
) -> None:
  """Replaces the armed coordinates of a run; fired ones stay fired.

  Processes that were born without the file do not look for it.

  Raises:
    ValueError: there is no such point, or the occurrence is not positive.
  """
  wanted = list(coordinates)
  for coordinate in wanted:
    if coordinate.point not in POINTS or coordinate.occurrence < 1:
      raise ValueError(
        f"{coordinate}: a point is one of {', '.join(POINTS)}, an occurrence is"
        " at least 1"
      )
  armed, _ = _paths(run_dir)
  armed.parent.mkdir(parents=True, exist_ok=True)
  temporary = armed.with_suffix(".tmp")
  temporary.write_text(json.dumps(wanted))
  temporary.rename(armed)


def fired(run_dir: str | os.PathLike[str]) -> list[Fired]:
  """Coordinates at which processes have died, in that order."""
  return _fired_lines(_paths(run_dir)[1])


def _paths(
  run_dir: str | os.PathLike[str],
) -> tuple[pathlib.Path, pathlib.Path]:
  control = pathlib.Path(run_dir) / "control"
  return control / "crash_points.json", control / "crash_fired.jsonl"


def _fired_lines(path: pathlib.Path) -> list[Fired]:
  try:
    whole = path.read_bytes().split(b"\n")[:-1]
  except FileNotFoundError:
    return []
  found = []
  for line in whole:
    with contextlib.suppress(ValueError):  # torn by a full disk
      coordinate, role, wall_secs = json.loads(line)
      found.append(Fired(Coordinate(*coordinate), role, wall_secs))
  return found


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[int]:
  """Opens a file to append to, alone among all processes of the run."""
  fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
  try:
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
  finally:
    os.close(fd)
