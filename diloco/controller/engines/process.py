"""The `process` engine: one OS process per role on this machine."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from diloco import crash, process
from diloco.controller.engines import base
from diloco.report import liveness

_KILL_SECS = 10.0
_POLL_SECS = 0.01


class ProcessHandle:
  """A role's process, in a session of its own."""

  def __init__(self, started: subprocess.Popen[bytes]):
    """Wraps a started process."""
    self._process = started

  @property
  def pid(self) -> int:
    """Process number."""
    return self._process.pid

  def cause_of_death(self) -> str | None:
    """How it ended, as "exit 0" or "SIGKILL"; None while it lives."""
    code = self._poll()
    if code is None:
      return None
    if code < 0:
      with contextlib.suppress(ValueError):  # not every signal has a name
        return signal.Signals(-code).name
      return f"signal {-code}"
    return f"exit {code}"

  def signal(self, number: int) -> None:
    """Sends a signal to the whole session."""
    if self._poll() is None:
      _signal_session(self._process.pid, number)

  def wait(self, timeout_secs: float) -> bool:
    """Waits for its end; False on time-out."""
    deadline = time.monotonic() + timeout_secs
    while self._poll() is None:
      if time.monotonic() >= deadline:
        return False
      time.sleep(_POLL_SECS)
    return True

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


def _signal_session(pid: int, number: int) -> None:
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(pid, number)


class AttachedHandle:
  """A role's process that another controller started.

  It is not our child: its end shows in /proc, its exit code to nobody. Start
  ticks tell it from a later process of the same number.
  """

  def __init__(self, pid: int, ticks: int):
    """Args: process number and when it started."""
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

  def wait(self, timeout_secs: float) -> bool:
    """Waits for its end; False on time-out."""
    deadline = time.monotonic() + timeout_secs
    while self._lives():
      if time.monotonic() >= deadline:
        return False
      time.sleep(_POLL_SECS)
    return True

  def _lives(self) -> bool:
    return liveness.start_ticks(self._pid) == self._ticks


class ProcessEngine:
  """Starts roles as processes and remembers them across controllers."""

  def __init__(self, run_dir: pathlib.Path):
    """Args: the run's directory, where process numbers are kept."""
    self._run_dir = run_dir
    self._started: dict[str, dict[str, Any]] = {}

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
        env={**launch.env, **os.environ},
        start_new_session=True,
      )
    if launch.cores:
      # At once: a role that starts must not disturb those on other cores.
      with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(started.pid, launch.cores)
    crash.point("controller_start_role")
    try:
      self._remember(launch, started.pid)
    except OSError:
      _signal_session(started.pid, signal.SIGKILL)  # nobody would know of it
      started.wait()
      raise
    return ProcessHandle(started)

  def _remember(self, launch: base.Launch, pid: int) -> None:
    self._started[launch.role] = {
      "pid": pid,
      "start_ticks": liveness.start_ticks(pid),
      **launch.facts,
    }
    record = process.processes_path(self._run_dir)
    record.parent.mkdir(parents=True, exist_ok=True)
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(self._started))
    temporary.rename(record)

  def survivors(self) -> dict[str, base.Survivor]:
    """Roles an earlier controller of this run left alive, by name."""
    found = {}
    for role, facts in self._living().items():
      # Kept in the record, whoever is started from now on.
      self._started[role] = facts
      handle = AttachedHandle(facts["pid"], facts["start_ticks"])
      found[role] = base.Survivor(handle, facts)
    return found

  def kill_leftovers(self) -> list[str]:
    """Ends all roles of this run, whoever started them; returns who lived."""
    living = self._living()
    for facts in living.values():
      _signal_session(facts["pid"], signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECS
    while self._living() and time.monotonic() < deadline:
      time.sleep(_POLL_SECS)
    return list(living)

  def kill_stray(self, pid: int) -> None:
    """Ends a role that nobody remembers having started.

    Its controller died between starting it and writing that down.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
      if os.getsid(pid) == pid != os.getsid(0):
        _signal_session(pid, signal.SIGKILL)

  def _living(self) -> dict[str, dict[str, Any]]:
    """What the record says of those that live; numbers are used again."""
    return {
      role: facts
      for role, facts in process.read_processes(self._run_dir).items()
      if facts.get("start_ticks") is not None
      and liveness.start_ticks(facts["pid"]) == facts["start_ticks"]
    }
