"""Where the points of a sweep run: on so many cores of this machine, or on Ray.

What a point is done by is the same: a process that any of them starts.
"""

import abc
import json
import os
import pathlib
import signal
import time
from collections.abc import Sequence
from typing import Any

from diloco import config as config_lib
from diloco import errors, process
from diloco.controller.engines import base, cluster, ray
from diloco.controller.engines import process as process_engine
from diloco.workbench import frozen, worker

_BUSY = f"exit {worker.EXIT_BUSY}"
_LEAVE_SECS = 10.0  # for a process that has written its outcome


class Executor(abc.ABC):
  """Runs points on an engine, each by `worker`, which writes its outcome."""

  def __init__(self, workdir: pathlib.Path, engine: base.Engine):
    """Takes the sweep's directory, and where points run."""
    self._workdir, self._engine = workdir, engine
    # With the cores, or how many, that each has.
    self._running: dict[str, tuple[base.Handle, Any]] = {}
    self._left = engine.survivors()  # of a sweep that was killed

  @abc.abstractmethod
  def _room(self, cores: int) -> Any:
    """So many cores, at most all there are, or how many; None: not now."""

  def adopt(self, name: str) -> bool:
    """Takes over a point of a sweep that was killed; False: nobody does it."""
    if found := self._left.pop(name, None):
      self._running[name] = found.handle, found.facts["cores"]
    return name in self._running

  def start(self, name: str, cores: int) -> bool:
    """Begins a point; False while there is no room for it."""
    taken = self._room(cores)
    if taken is None:
      return False
    frozen.outcome_path(self._workdir, name).unlink(missing_ok=True)
    # All points share what XLA compiled.
    cache = str(self._workdir / "compilation_cache")
    handle = self._engine.start(
      base.Launch(
        name,
        worker.__name__,
        [str(self._workdir), name, json.dumps(taken), os.getcwd()],
        self._log(name),
        {"JAX_COMPILATION_CACHE_DIR": cache, **process.MALLOC_ENV},
        facts={
          **{"incarnation": time.time_ns() // 10**6, "cores": taken},
          "cpus": taken if isinstance(taken, int) else len(taken),
        },
      )
    )
    self._running[name] = handle, taken
    return True

  def running(self) -> Sequence[str]:
    """Names of the points that run, or wait for their turn."""
    return list(self._running)

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
    """Asks all to save and end; asked again, to end at once."""
    for handle, _ in self._running.values():
      handle.signal(signal.SIGTERM)

  def close(self) -> None:  # noqa: B027
    """Lets go of what it holds; points go on."""

  def _log(self, name: str) -> pathlib.Path:
    return self._workdir / "points" / f"{name}.log"

  def _told(self, name: str, cause: str) -> str:
    """How a point ended, with the last line of its log."""
    try:
      lines = self._log(name).read_text(errors="replace").split("\n")
    except OSError as error:
      lines = [errors.one_line(error)]
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"{cause}: {last}"


class Local(Executor):
  """Processes of this machine, each on cores of its own."""

  def __init__(self, workdir: pathlib.Path, cores: Sequence[int]):
    """Args: the sweep's directory, and the cores that it may use."""
    super().__init__(workdir, process_engine.ProcessEngine(workdir))
    self._cores = list(cores)

  def _room(self, cores: int) -> Any:
    used = {core for _, taken in self._running.values() for core in taken}
    free = [core for core in self._cores if core not in used]
    number = min(cores, len(self._cores))
    return free[:number] if len(free) >= number else None

  def ended(self) -> dict[str, str]:
    """As of any, but for points that somebody else turned out to do."""
    found = super().ended()
    if "" in found.values():
      self._left = self._engine.survivors()
    return {
      n: cause for n, cause in found.items() if cause or not self.adopt(n)
    }


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

  _engine: ray.Engine

  def __init__(self, workdir: pathlib.Path, config: config_lib.RunConfig):
    """Takes the sweep's directory, and `on_ray` of the cluster."""
    super().__init__(workdir, ray.Engine(workdir, config))
    for name, found in list(self._left.items()):
      if frozen.outcome(workdir, name):
        found.handle.wait(_LEAVE_SECS)  # then Ray has its room back
        del self._left[name]

  def _room(self, cores: int) -> Any:
    """What a node has, or the largest all of; where Ray takes them at once.

    Points of which Ray would have to keep many waiting stay here.
    """
    nodes = [int(node.get("CPU", 0)) for node in cluster.nodes()]
    number = min(cores, max(nodes, default=1))
    taken = sum(cpus for _, cpus in self._running.values())
    return None if self._running and taken + number > sum(nodes) else number

  def stop(self) -> None:
    """As of any, and at once where a point has not begun."""
    for name, (handle, _) in self._running.items():
      begun = worker.begun(self._workdir, name, handle.pid)
      handle.signal(signal.SIGTERM if begun else signal.SIGKILL)

  def close(self) -> None:
    """Leaves the cluster, where what runs, runs on."""
    for found in self._left.values():
      found.handle.wait(_LEAVE_SECS)
    self._engine.close()
