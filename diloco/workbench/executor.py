"""Where the points of a sweep run: on so many cores of this machine, or on Ray.

What a point is done by is the same: a process that any of them starts.
"""

import abc
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from diloco import config as config_lib
from diloco import process
from diloco.controller.engines import base, cluster, ray
from diloco.controller.engines import process as process_engine
from diloco.workbench import frozen, worker

_BUSY = f"exit {worker.EXIT_BUSY}"
_LEAVE_SECS = 10.0  # for a process that has written its outcome


class Executor(abc.ABC):
  """Runs points, each by `worker`, which writes what became of it."""

  def __init__(self, workdir: pathlib.Path):
    """Args: the sweep's directory."""
    self._workdir = workdir
    self._running: dict[str, tuple[base.Handle, Any]] = {}  # with its cores

  @abc.abstractmethod
  def adopt(self, name: str) -> bool:
    """Takes over a point of a sweep that was killed; False: nobody does it."""

  @abc.abstractmethod
  def start(self, name: str, cores: int) -> bool:
    """Begins a point; False while there is no room for it."""

  def running(self) -> Sequence[str]:
    """Names of the points that run, or wait for their turn."""
    return list(self._running)

  @abc.abstractmethod
  def ended(self) -> dict[str, str]:
    """Points that ended since the last call, and how; "": begin it again."""

  @abc.abstractmethod
  def stop(self) -> None:
    """Asks all to save and end; asked again, to end at once."""

  def close(self) -> None:  # noqa: B027
    """Lets go of what it holds; points go on."""

  def _arguments(self, name: str, cores: Sequence[int] | int) -> list[str]:
    return [str(self._workdir), name, json.dumps(cores), os.getcwd()]

  def _env(self) -> dict[str, str]:
    # All points share what XLA compiled.
    cache = str(self._workdir / "compilation_cache")
    return {"JAX_COMPILATION_CACHE_DIR": cache, **process.ISLAND_ENV}

  def _log(self, name: str) -> pathlib.Path:
    return self._workdir / "points" / f"{name}.log"

  def _told(self, name: str, cause: str) -> str:
    """How a point ended, with the last line of its log."""
    lines = self._log(name).read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"{cause}: {last}"


class Local(Executor):
  """Processes of this machine, each on cores of its own."""

  def __init__(self, workdir: pathlib.Path, cores: Sequence[int]):
    """Args: the sweep's directory, and the cores that it may use."""
    super().__init__(workdir)
    self._cores = len(cores)
    self._free = list(cores)

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
    with self._log(name).open("ab") as log:
      started = subprocess.Popen(
        [
          *(sys.executable, "-m", worker.__name__),
          *self._arguments(name, taken),
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**self._env(), **os.environ},
        start_new_session=True,
      )
    self._running[name] = process_engine.ProcessHandle(started), taken
    return True

  def ended(self) -> dict[str, str]:
    """Points that ended since the last call, and how; "": begin it again."""
    found = {}
    for name, (handle, cores) in list(self._running.items()):
      if cause := handle.cause_of_death():
        self._free = sorted([*self._free, *cores])
        del self._running[name]
        if cause != _BUSY:
          found[name] = self._told(name, cause)
        elif not self.adopt(name):
          found[name] = ""
    return found

  def stop(self) -> None:
    """Ends all, in order; at once if called again."""
    for handle, _ in self._running.values():
      handle.signal(signal.SIGTERM)


def on_ray(address: str) -> config_lib.RunConfig:
  """The cluster that `Ray` starts points on, as a run has it; "": any."""
  # A life ends, and another begins, when the islands that a lost one may have
  # left on its node have ended too: the engine waits for a sixth of this.
  times = {"hang_secs": 6 * config_lib.ControllerConfig().patience_secs}
  values = {"engine": "ray", "ray_address": address, "controller": times}
  return config_lib.from_mapping(values)


class Ray(Executor):
  """Processes on the nodes of a Ray cluster that share the sweep's directory.

  A node that is lost takes its points with it; they begin again elsewhere.
  """

  def __init__(self, workdir: pathlib.Path, config: config_lib.RunConfig):
    """Takes the sweep's directory, and `on_ray` of the cluster."""
    super().__init__(workdir)
    self._engine = ray.Engine(workdir, config)
    self._left: dict[str, base.Survivor] = {}  # by a sweep that was killed
    for name, found in self._engine.survivors().items():
      if frozen.outcome(workdir, name):
        found.handle.wait(_LEAVE_SECS)  # then Ray has its room back
      else:
        self._left[name] = found

  def adopt(self, name: str) -> bool:
    """Takes over a point of a sweep that was killed."""
    if found := self._left.pop(name, None):
      self._running[name] = found.handle, found.facts["cpus"]
    return name in self._running

  def start(self, name: str, cores: int) -> bool:
    """Begins a point on a node that has so many cores, or all of the largest.

    Points of which Ray would have to keep many waiting stay here.
    """
    nodes = [int(node.get("CPU", 0)) for node in cluster.nodes()]
    number = min(cores, max(nodes, default=1))
    taken = sum(cpus for _, cpus in self._running.values())
    if self._running and taken + number > sum(nodes):
      return False
    handle = self._engine.start(
      base.Launch(
        name,
        worker.__name__,
        self._arguments(name, number),
        self._log(name),
        self._env(),
        facts={"incarnation": time.time_ns() // 10**6, "cpus": number},
      )
    )
    self._running[name] = handle, number
    return True

  def ended(self) -> dict[str, str]:
    """Points that ended since the last call, and how; "": begin it again."""
    found = {}
    for name, (handle, _) in list(self._running.items()):
      if cause := handle.cause_of_death():
        del self._running[name]
        again = cause in (_BUSY, "node lost")
        found[name] = "" if again else self._told(name, cause)
    return found

  def stop(self) -> None:
    """Ends all, in order; at once if called again, or where none has begun."""
    for name, (handle, _) in self._running.items():
      begun = worker.begun(self._workdir, name, handle.pid)
      handle.signal(signal.SIGTERM if begun else signal.SIGKILL)

  def close(self) -> None:
    """Leaves the cluster, where what runs, runs on."""
    for found in self._left.values():
      found.handle.wait(_LEAVE_SECS)
    self._engine.close()
