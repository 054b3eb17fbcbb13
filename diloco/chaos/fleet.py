"""A real run seen from outside: its processes, its leader, how far it is."""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator

import psutil

from diloco.report import liveness
from diloco.tape import events, reader

_END_SECS = 10.0
_POLL_SECS = 0.02


class Fleet:
  """Processes of a run and what its tapes tell; `look()` takes the news."""

  def __init__(self, run_dir: pathlib.Path):
    """Sees nothing yet; the run need not exist."""
    self.run_dir = run_dir
    self.stepped_secs: dict[int, float] = {}  # wall time of its newest step
    self.tokens = 0
    self.merged_secs = 0.0  # wall time of the newest merge
    self.session_secs = 0.0  # wall time at which the newest controller began
    self._leases: dict[int, tuple[str, int]] = {}  # token to who took it
    self._follower = reader.Follower(run_dir)

  def look(self) -> None:
    """Reads what was written since the last look."""
    record = self._follower.poll()
    for line in record.events:
      if line["event"] == events.LEASE_ACQUIRED:
        self._leases[line["token"]] = line["role"], line["incarnation"]
      elif line["event"] == events.RUN_STARTED:
        self.session_secs = line["wall_secs"]
      elif line["event"] == events.MERGED:
        self.merged_secs = max(self.merged_secs, line["wall_secs"])
    for island, lines in record.metrics.items():
      self.stepped_secs[island] = lines[-1]["wall_secs"]
      self.tokens += sum(line["tokens"] for line in lines)

  def living(self) -> dict[str, int]:
    """Process number of every role that lives."""
    found = liveness.living_roles(self.run_dir)
    return {role: life.pid for role, life in found.items()}

  def syncers(self) -> tuple[str | None, list[str]]:
    """The leading syncer, if it lives, and those that wait."""
    found = liveness.living_roles(self.run_dir)
    others = "island-", "evaluator"
    seats = [role for role in found if not role.startswith(others)]
    leader = None
    if self._leases:
      role, incarnation = self._leases[max(self._leases)]
      if role in found and found[role].incarnation == incarnation:
        leader = role
    return leader, [seat for seat in seats if seat != leader]

  def resolve(self, target: str) -> str | None:
    """The role a target stands for, None if there is none now."""
    leader, waiting = self.syncers()
    if target == "leader":
      return leader
    if target == "standby":
      return waiting[0] if leader and waiting else None
    return target if target in self.living() else None

  def signal(self, role: str, number: int) -> bool:
    """Sends a signal to all processes of a role; False if it is dead."""
    pid = self.living().get(role)
    if pid is None:
      return False
    with contextlib.suppress(ProcessLookupError):
      os.killpg(pid, number)
      return True
    return False

  def kill_all(self, kind: str = "") -> list[str]:
    """Kills every role of a kind, if one is named; returns who lived."""
    roles = [role for role in self.living() if role.startswith(kind)]
    return [role for role in roles if self.signal(role, signal.SIGKILL)]


def processes_of(run_dir: pathlib.Path) -> list[int]:
  """Living processes with the run's directory among their arguments."""
  return [pid for pid, _ in _commands_on(run_dir)]


def end_processes(run_dir: pathlib.Path) -> None:
  """Kills the command and the roles of a run, known to a record or not."""
  deadline = time.monotonic() + _END_SECS
  while time.monotonic() < deadline:
    # Others, such as somebody's `diloco status`, only look.
    working = [
      pid
      for pid, words in _commands_on(run_dir)
      if "--run_dir" in words or "resume" in words
    ]
    if not working:
      return
    for pid in working:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    time.sleep(_POLL_SECS)


def _commands_on(run_dir: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
  for found in psutil.process_iter(["cmdline"]):
    words = found.info["cmdline"] or []  # None of a zombie
    if str(run_dir) in words and found.pid != os.getpid():
      yield found.pid, words
