"""The `process` engine: one OS process per role on this machine."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from diloco.controller.engines import base
from diloco.report import liveness

_KILL_SECS = 10.0
_POLL_SECS = 0.01


class ProcessHandle:
  """A role's process, in a session of its own."""

  def __init__(self, process: subprocess.Popen[bytes]):
    """Wraps a started process."""
    self._process = process

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


class ProcessEngine:
  """Starts roles as processes and remembers them across controllers."""

  def __init__(self, run_dir: pathlib.Path):
    """Args: the run's directory, where process numbers are kept."""
    self._record = run_dir / "control" / "processes.json"
    self._started: dict[str, tuple[int, int | None]] = {}

  def start(self, launch: base.Launch) -> ProcessHandle:
    """Starts a role and returns at once."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with launch.log.open("ab") as log:
      process = subprocess.Popen(
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
        os.sched_setaffinity(process.pid, launch.cores)
    self._started[launch.role] = (
      process.pid,
      liveness.start_ticks(process.pid),
    )
    self._record.parent.mkdir(parents=True, exist_ok=True)
    temporary = self._record.with_suffix(".tmp")
    temporary.write_text(json.dumps(self._started))
    temporary.rename(self._record)
    return ProcessHandle(process)

  def kill_leftovers(self) -> list[str]:
    """Ends roles that an earlier controller of this run left alive."""
    killed = []
    for role, (pid, ticks) in self._recorded().items():
      if ticks is None or liveness.start_ticks(pid) != ticks:
        continue  # it has ended; another process may have its number
      _signal_session(pid, signal.SIGKILL)
      killed.append(role)
      deadline = time.monotonic() + _KILL_SECS
      while liveness.start_ticks(pid) == ticks and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return killed

  def _recorded(self) -> dict[str, tuple[int, int | None]]:
    try:
      recorded = json.loads(self._record.read_text())
      return {
        role: (int(pid), ticks) for role, (pid, ticks) in recorded.items()
      }
    except (OSError, ValueError, TypeError, AttributeError):
      return {}
