"""The `process` engine: one OS process per role on this machine.

A role's process carries in its environment which run directory it belongs to
and what a later controller must know of it. So one is found that has not signed
in yet, or that the store knows nothing of; who lives elsewhere the store tells.
"""

import contextlib
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil

from diloco import crash, process
from diloco.controller.engines import base
from diloco.report import liveness

logger = logging.getLogger(__name__)

_KILL_SECS = 10.0
_POLL_SECS = 0.01


class ProcessHandle(base.Handle):
  """A role's process, in a session of its own."""

  def __init__(self, started: subprocess.Popen[bytes]):
    self._process = started

  @property
  def pid(self) -> int:
    """Process number."""
    return self._process.pid

  def cause_of_death(self) -> str | None:
    """How it ended, as "exit 0" or "SIGKILL"; None while it lives."""
    code = self._poll()
    return None if code is None else cause(code)

  def signal(self, number: int) -> None:
    """Sends a signal to the whole session."""
    if self._poll() is None:
      _signal_session(self._process.pid, number)

  def _poll(self) -> int | None:
    """The exit code once it has ended; takes what it started with it."""
    pid = self._process.pid
    if self._process.returncode is None:
      # Not reaped yet, its number cannot have gone to another session.
      look = os.WEXITED | os.WNOHANG | os.WNOWAIT
      if os.waitid(os.P_PID, pid, look) is None:
        return None
      _signal_session(pid, signal.SIGKILL)
    return self._process.poll()


def cause(code: int) -> str:
  """Says how a process ended: "exit 0" or "SIGKILL".

  `code` is that of its exit, or minus the number of a signal.
  """
  if code < 0:
    with contextlib.suppress(ValueError):  # not every signal has a name
      return signal.Signals(-code).name
    return f"signal {-code}"
  return f"exit {code}"


def _signal_session(pid: int, number: int) -> None:
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(pid, number)


class AttachedHandle(base.Handle):
  """A role's process that another controller started.

  It is not our child: its end shows in /proc, its exit code to nobody. Start
  ticks tell it from a later process of the same number.
  """

  def __init__(self, pid: int, ticks: int):
    self._pid = pid
    self._ticks = ticks
    self._gone = False

  @property
  def pid(self) -> int:
    """Process number."""
    return self._pid

  def cause_of_death(self) -> str | None:
    """Only that it ended, not how; None while it lives."""
    if not self._gone and not self._lives():
      self._gone = True
      if liveness.start_ticks(self._pid) is None:  # nobody else has the number
        _signal_session(self._pid, signal.SIGKILL)  # what it started
    return "unknown" if self._gone else None

  def signal(self, number: int) -> None:
    """Sends a signal to the whole session."""
    if self._lives():
      _signal_session(self._pid, number)

  def _lives(self) -> bool:
    return liveness.start_ticks(self._pid) == self._ticks


def python_path() -> str:
  """Where modules are found here, for the environment of roles."""
  places = [os.environ.get("PYTHONPATH", ""), *sys.path]
  return os.pathsep.join(filter(None, places))


class ProcessEngine(base.Engine):
  """Starts roles as processes, and finds those of earlier controllers."""

  apart = binds = True
  host = base.LOOPBACK

  def __init__(self, run_dir: pathlib.Path):
    self._run_dir = run_dir

  def start(self, launch: base.Launch) -> ProcessHandle:
    """Starts a role and returns at once.

    Raises:
      OSError: there is no room for one more process or file.
    """
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with launch.log.open("ab") as log:
      started = subprocess.Popen(
        [sys.executable, "-m", launch.module, *launch.args],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={
          **launch.env,
          **os.environ,
          # Where a task was found here, as beside a script, it is found there.
          "PYTHONPATH": python_path(),
          process.ROLE: self._label(launch),
        },
        start_new_session=True,
      )
    if launch.cores:
      # At once: a role that starts must not disturb those on other cores. It
      # says itself what it lacks if the machine has lost these.
      with contextlib.suppress(OSError):
        os.sched_setaffinity(started.pid, launch.cores)
    crash.point("controller_start_role")
    return ProcessHandle(started)

  def _label(self, launch: base.Launch) -> str:
    return json.dumps(
      {
        "run": process.directory_id(self._run_dir),
        "role": launch.role,
        "facts": launch.facts,
      }
    )

  def survivors(self) -> dict[str, base.Survivor]:
    """Roles an earlier controller of this run left alive, by name."""
    found: dict[str, base.Survivor] = {}
    for role, facts in self._living():
      other = found.get(role)
      if other and _life(other.facts) > _life(facts):
        continue  # that one's successor
      handle = AttachedHandle(facts["pid"], facts["start_ticks"])
      found[role] = base.Survivor(handle, facts)
    return found

  def kill_leftovers(self) -> list[str]:
    """Ends all roles of this run, whoever started them; returns who lived."""
    living = self._living()
    for _, facts in living:
      _signal_session(facts["pid"], signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECS
    while self._living() and time.monotonic() < deadline:
      time.sleep(_POLL_SECS)
    return [role for role, _ in living]

  def kill_stray(self, pid: int) -> None:
    """Ends a role of this run that is not the one known by its name."""
    if any(facts["pid"] == pid for _, facts in self._living()):
      _signal_session(pid, signal.SIGKILL)

  def _living(self) -> list[tuple[str, dict[str, Any]]]:
    """Roles of this very directory that live, and what is known of each.

    Processes of a run that this directory was copied from are not ours.
    """
    try:
      run = process.directory_id(self._run_dir)
    except FileNotFoundError:
      return []
    found = []
    for pid in psutil.pids():
      label = _read_label(pid)
      ticks = liveness.start_ticks(pid)
      if label.get("run") == run and ticks is not None:
        facts = {"pid": pid, "start_ticks": ticks, **label["facts"]}
        found.append((label["role"], facts))
    return found


def _read_label(pid: int) -> dict[str, Any]:
  """What a role's process carries; empty for any other process."""
  try:
    if os.getsid(pid) != pid:
      return {}  # a role leads its session; what it started does not
    label = json.loads(psutil.Process(pid).environ().get(process.ROLE, "{}"))
  except (OSError, ValueError, psutil.Error):
    return {}  # gone meanwhile, or somebody else's
  return label if isinstance(label, dict) else {}


def _life(facts: Mapping[str, Any]) -> int:
  return int(facts.get("incarnation", 0))
