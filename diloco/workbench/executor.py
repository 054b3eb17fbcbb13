"""Where the points of a sweep run: processes of this machine, so many cores.

Another executor (a cluster's, or one in virtual time) has the same methods.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

from diloco import process
from diloco.controller.engines import base
from diloco.controller.engines import process as process_engine
from diloco.workbench import worker


class Executor(Protocol):
  """Runs points, each by `worker`, which writes what became of it."""

  def adopt(self, name: str) -> bool:
    """Takes over a point that somebody does already; False: nobody does."""

  def start(self, name: str, cores: int) -> bool:
    """Begins a point; False while there is no room for it."""

  def running(self) -> Sequence[str]:
    """Names of the points that run."""

  def ended(self) -> dict[str, str]:
    """Points that ended since the last call, and how; "": begin it again."""

  def stop(self) -> None:
    """Asks all to save and end; asked again, to end at once."""


class Local:
  """Processes of this machine, each on cores of its own."""

  def __init__(self, workdir: pathlib.Path, cores: Sequence[int]):
    """Args: the sweep's directory, and the cores that it may use."""
    self._workdir = workdir
    self._cores = len(cores)
    self._free = list(cores)
    self._running: dict[str, tuple[base.Handle, list[int]]] = {}

  def adopt(self, name: str) -> bool:
    """Takes over a point of a sweep that was killed."""
    found = worker.holder(self._workdir, name)
    if found is None:
      return False
    handle = process_engine.AttachedHandle(found["pid"], found["ticks"])
    taken = [core for core in self._free if core in found["cores"]]
    self._free = [core for core in self._free if core not in taken]
    self._running[name] = handle, taken
    return True

  def start(self, name: str, cores: int) -> bool:
    """Begins a point on so many cores, at most all there are."""
    number = min(cores, self._cores)
    if len(self._free) < number:
      return False
    taken, self._free = self._free[:number], self._free[number:]
    # All points share what XLA compiled.
    cache = str(self._workdir / "compilation_cache")
    with self._log(name).open("ab") as log:
      started = subprocess.Popen(
        [
          *(sys.executable, "-m", worker.__name__),
          *(str(self._workdir), name, json.dumps(taken)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={
          "JAX_COMPILATION_CACHE_DIR": cache,
          **process.ISLAND_ENV,
          **os.environ,
        },
        start_new_session=True,
      )
    self._running[name] = process_engine.ProcessHandle(started), taken
    return True

  def running(self) -> Sequence[str]:
    """Names of the points that run."""
    return list(self._running)

  def ended(self) -> dict[str, str]:
    """Points that ended since the last call, and how; "": begin it again."""
    found = {}
    for name, (handle, cores) in list(self._running.items()):
      if cause := handle.cause_of_death():
        self._free = sorted([*self._free, *cores])
        del self._running[name]
        if cause != f"exit {worker.EXIT_BUSY}":
          found[name] = f"{cause}: {self._last_line(name)}"
        elif not self.adopt(name):
          found[name] = ""
    return found

  def stop(self) -> None:
    """Ends all, in order; at once if called again."""
    for handle, _ in self._running.values():
      handle.signal(signal.SIGTERM)

  def _log(self, name: str) -> pathlib.Path:
    return self._workdir / "points" / f"{name}.log"

  def _last_line(self, name: str) -> str:
    lines = self._log(name).read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")
