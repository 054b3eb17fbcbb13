"""Whether the controller of a run is alive.

A process id alone proves nothing, for ids are used again. Together with the
time the process started it names one process for as long as the machine is
up.
"""

import functools
import itertools
import json
import os
import pathlib
import secrets
import time
from typing import Any, NamedTuple

import psutil

from diloco import process

UNSEEN_SECS = 60.0  # of a role elsewhere, and of clocks that differ
_over: set[str] = set()  # names of this process's that stand for nobody now
_START_TIME = 19  # field 22 of /proc/<pid>/stat, counted behind the name


def start_ticks(pid: int) -> int | None:
  """Returns when a process started, in clock ticks after boot.

  None if there is no such process or it is a zombie. What psutil tells is a
  time of day, which moves when the clock is set.
  """
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
  except OSError:
    return None
  fields = stat.rpartition(")")[2].split()  # a name may hold spaces and )
  return None if fields[0] in "ZX" else int(fields[_START_TIME])


@functools.cache
def machine() -> str:
  """What tells the boot of a machine, and the space, that numbers processes.

  Processes with one number live on other machines and in other containers.
  """
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return ""


class Life(NamedTuple):
  """A process of a role."""

  incarnation: int
  pid: int


def living_roles(run_dir: str | os.PathLike[str]) -> dict[str, Life]:
  """The newest process of each role of a run that lives on this machine.

  Its command line tells it, whatever engine started it.
  """
  place = os.path.realpath(run_dir)
  found: dict[str, Life] = {}
  for each in psutil.process_iter(["cmdline"]):
    told = dict(itertools.pairwise(each.info["cmdline"] or []))
    if "--incarnation" not in told or "--run_dir" not in told:
      continue
    if os.path.realpath(told["--run_dir"]) == place:
      island, seat = told.get("--island"), told.get("--role", "evaluator")
      role = seat if island is None else f"island-{island}"
      life = Life(int(told["--incarnation"]), each.pid)
      found[role] = max(found.get(role, life), life)
  return found


def name_process() -> str:
  """A name of this process that no other has, anywhere."""
  pid = os.getpid()
  facts = [machine(), pid, start_ticks(pid), secrets.token_hex(8)]
  return json.dumps(facts)


def is_over(name: str) -> None:
  """Whoever this process named has ended, and the process has not."""
  _over.add(name)


def lives(name: str) -> bool | None:
  """Whether the process that `name_process` named lives; None: not known here.

  Such is one of another machine or container, or this very process, of another
  of its sessions.
  """
  if name in _over:
    return False
  try:
    place, pid, ticks, _ = json.loads(name)
  except (ValueError, TypeError):
    return None
  if not place or place != machine():
    return None
  there = start_ticks(pid) == ticks is not None
  return None if there and pid == os.getpid() else there


def announcement(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
  """What a controller writes of itself, so that others find it alive."""
  pid = os.getpid()
  return {
    "pid": pid,
    "started_ticks": start_ticks(pid),
    "machine": machine(),
    "directory": process.directory_id(run_dir),
  }


def controller_alive(run_dir: str | os.PathLike[str]) -> bool:
  """Whether the controller that announced itself in `run_dir` still runs.

  Of a run elsewhere, whether it has been seen in the run's store of late.
  """
  if origin := process.origin(run_dir):
    return abs(time.time() - origin["seen_secs"]) < UNSEEN_SECS
  return controller_pid(run_dir) is not None


def controller_pid(run_dir: str | os.PathLike[str]) -> int | None:
  """Process id of the controller that announced itself, if it still runs."""
  path = pathlib.Path(run_dir) / "control" / "controller.json"
  try:
    announced = json.loads(path.read_text())
    pid, ticks = int(announced["pid"]), announced["started_ticks"]
    if announced["directory"] != process.directory_id(run_dir):
      return None  # copied from the run it is of
    if announced.get("machine", machine()) != machine():
      return None  # a number of another machine
  except process.UNREADABLE:
    return None
  return pid if ticks is not None and start_ticks(pid) == ticks else None
