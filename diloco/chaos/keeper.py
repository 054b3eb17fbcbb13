"""The command of a run: started, and started again whenever it was killed.

Every start is the same command, `diloco resume`. It is what somebody would
write in a service file, and the only thing done for a run that was hit.
"""

import pathlib
import signal
import subprocess
import sys
import time
from typing import Literal

from diloco import process

_PAUSE_SECS = 0.5  # as a service manager waits

State = Literal["running", "down", "finished", "failed"]


class Keeper:
  """Keeps `diloco resume` alive until it ends by itself."""

  def __init__(self, run_dir: pathlib.Path, log: pathlib.Path):
    """Starts nothing yet."""
    self._run_dir = run_dir
    self._log = log
    self._process: subprocess.Popen[bytes] | None = None
    self._due = 0.0
    self.starts = 0
    self.failure = ""
    self.refused = False  # whether it failed because of what it was given

  def start(self, *flags: str) -> None:
    """Starts the command now."""
    command = [sys.executable, "-m", "diloco.cli", "resume"]
    with self._log.open("ab") as log:
      self._process = subprocess.Popen(
        [*command, str(self._run_dir), *flags],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
      )
    self.starts += 1

  def kill(self) -> None:
    """Kills the command; it will be started again."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()

  def tend(self) -> State:
    """Starts the command again if it was killed; says how it is."""
    if self._process is None:
      if time.monotonic() < self._due:
        return "down"
      self.start()
      return "running"
    code = self._process.poll()
    if code is None:
      return "running"
    if code == 0:
      return "finished"
    if code == -signal.SIGKILL:
      self._process = None
      self._due = time.monotonic() + _PAUSE_SECS
      return "down"
    self.refused = code == process.EXIT_USER_ERROR
    self.failure = f"the command ended with code {code}: {self._last_line()}"
    return "failed"

  def _last_line(self) -> str:
    lines = self._log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""
