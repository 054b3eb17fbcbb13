"""Faults done to one real run, each after it has recovered from the last.

Each fault is a line of `chaos.jsonl`: its coordinates, when it was done
(`wall_secs`), what it hit (`roles`), until when it lasted (`over_secs`), when
the run had recovered (`recovered_secs`), and the `outcome`: "done", or why it
could not be done.
"""

import contextlib
import json
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from diloco import crash, process
from diloco.chaos import faults as faults_lib
from diloco.chaos import fleet as fleet_lib
from diloco.chaos import store_faults

CONTROLLER = "controller"
FAULT_LOG = "chaos.jsonl"
DONE = "done"
State = Literal["running", "down", "finished", "failed"]

_POLL_SECS = 0.05
_RESTART_SECS = 0.5  # as a service manager waits
_RECOVERY_SECS = 240.0
_ENDING_SECS = 300.0
_FIRED_SECS = 60.0
_AIM_SECS = 0.8  # the leader stands still while an object is looked for
_LAST_SHARE = 0.85  # of the budget; then it is too late for another fault


def read_log(trial_dir: pathlib.Path) -> list[dict[str, Any]]:
  """Lines of a trial's fault log; none if no fault was done."""
  try:
    text = (trial_dir / FAULT_LOG).read_text()
  except FileNotFoundError:
    return []
  return [json.loads(line) for line in text.splitlines()]


class StuckError(Exception):
  """The run did not recover, or the command failed by itself."""


class Keeper:
  """Keeps `diloco resume` alive until it ends by itself.

  It is started again whenever it was killed, as somebody's service file would:
  nothing else is done for a run that was hit.
  """

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

  def kill(self) -> bool:
    """Kills the command; it will be started again. False if it had ended."""
    if self._process is None or self._process.poll() is not None:
      return False
    self._process.kill()
    return self._process.wait() == -signal.SIGKILL

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
      self._due = time.monotonic() + _RESTART_SECS
      return "down"
    self.refused = code == process.EXIT_USER_ERROR
    self.failure = f"the command ended with code {code}: {self._last_line()}"
    return "failed"

  def _last_line(self) -> str:
    lines = self._log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""


class Trial:
  """One run and the faults meant for it."""

  def __init__(
    self,
    trial_dir: pathlib.Path,
    total_tokens: int,
    num_islands: int,
    num_syncers: int,
    disk: store_faults.SmallDisk | None,
  ):
    """Knows the run, whose configuration must be in its directory.

    Args:
      trial_dir: holds `run`, its directory, and gets `chaos.jsonl`.
      total_tokens: the run's budget.
      num_islands: M.
      num_syncers: the leading one and those that wait.
      disk: what the store is on, if it is small.
    """
    self.run_dir = trial_dir / "run"
    self.fleet = fleet_lib.Fleet(self.run_dir)
    self.keeper = Keeper(self.run_dir, trial_dir / "command.log")
    self._log = trial_dir / FAULT_LOG
    self._total_tokens = total_tokens
    self._num_islands = num_islands
    self._num_syncers = num_syncers
    self._disk = disk
    self._state: State = "down"
    crash.arm(self.run_dir, [])  # so that every process looks for points

  def run(self, faults: Sequence[faults_lib.Fault]) -> list[faults_lib.Fault]:
    """Runs to the end of the budget; returns the faults left over.

    Raises:
      StuckError: the run broke.
    """
    left = list(faults)
    self.keeper.start()
    self._wait_recovered(time.time())
    while left and self._may_go_on(left[0]):
      self._pause(left[0].pause_secs)
      if self._state == "finished":
        break  # there is nothing left to hit
      fault = left.pop(0)
      line: dict[str, Any] = fault.to_json()
      try:
        self._inject(fault, line)
        done = line["outcome"] == DONE
        if (done or line["roles"]) and not fault.ends_run:
          now = time.time() if done else line["wall_secs"]
          over_secs = line.setdefault("over_secs", now)
          line["recovered_secs"] = self._wait_recovered(
            over_secs, new_controller=CONTROLLER in line["roles"]
          )
      finally:
        self._write(line)
    self._pause(_ENDING_SECS)
    if self._state != "finished":
      raise StuckError(f"the budget was not trained in {_ENDING_SECS:.0f} s")
    return left

  def clean_up(self) -> list[int]:
    """Kills whatever is left of the run; returns what should not have been."""
    finished = self.keeper.tend() == "finished"
    left = fleet_lib.processes_of(self.run_dir) if finished else []
    self.keeper.kill()
    fleet_lib.end_processes(self.run_dir)
    return left

  def _may_go_on(self, fault: faults_lib.Fault) -> bool:
    """Whether there is budget left for another fault."""
    self.fleet.look()
    if self._state == "finished":
      return False
    done = self.fleet.tokens / self._total_tokens
    return fault.ends_run or done < _LAST_SHARE

  def _inject(self, fault: faults_lib.Fault, line: dict[str, Any]) -> None:
    """Does a fault and says in `line` how that went."""
    self.fleet.look()
    line.update(wall_secs=time.time(), roles=[], outcome=DONE)
    match fault.kind:
      case "sigkill":
        self._kill_one(fault.target, line)
      case "sigstop":
        self._stop_one(fault, line)
      case "all_islands":
        line["roles"] = self.fleet.kill_all("island-")
        self._need_hit("island", line)
      case "everything":
        self._kill_everything(line)
        self._need_hit("role", line)
      case "crash_point":
        self._crash(fault, line)
      case "corrupt":
        self._corrupt(fault, line)
      case _:
        self._shut_store(fault, line)

  def _kill_one(self, target: str, line: dict[str, Any]) -> None:
    if target == CONTROLLER:
      line["roles"] = self._kill_controller()
    else:
      role = self.fleet.resolve(target)
      if role is not None and self.fleet.signal(role, signal.SIGKILL):
        line["roles"] = [role]
    self._need_hit(target, line)

  def _kill_everything(self, line: dict[str, Any]) -> None:
    # The controller first, or it would see the others die.
    line["roles"] = [*self._kill_controller(), *self.fleet.kill_all()]

  def _kill_controller(self) -> list[str]:
    return [CONTROLLER] if self.keeper.kill() else []

  def _need_hit(self, target: str, line: dict[str, Any]) -> None:
    """A fault that hit no role was not done."""
    if not line["roles"]:
      line["outcome"] = f"no {target} was alive"

  def _stop_one(self, fault: faults_lib.Fault, line: dict[str, Any]) -> None:
    role = self.fleet.resolve(fault.target)
    if role is None or not self.fleet.signal(role, signal.SIGSTOP):
      line["outcome"] = f"no {fault.target} was alive"
      return
    line["roles"] = [role]
    pid = self.fleet.living().get(role)
    self._pause(fault.hold_secs)
    if self.fleet.living().get(role) == pid:  # else it was replaced
      self.fleet.signal(role, signal.SIGCONT)

  def _crash(self, fault: faults_lib.Fault, line: dict[str, Any]) -> None:
    """Arms a point, sees to it that it is passed, and waits for the death."""
    coordinate = crash.Coordinate(
      fault.target, fault.point, fault.occurrence, fault.serial
    )
    crash.arm(self.run_dir, [coordinate])
    self._pull(fault, line)
    ends = fault.ends_run
    deadline = time.monotonic() + (_ENDING_SECS if ends else _FIRED_SECS)
    why = "the point was not passed"
    while time.monotonic() < deadline:
      for fired in crash.fired(self.run_dir):
        if fired.coordinate == coordinate:
          line["roles"] = [*line["roles"], fired.role]
          line["wall_secs"] = fired.wall_secs
          return
      try:
        if self._tend() == "finished":
          break
      except StuckError as error:
        if fault.trigger != "restore" or not self.keeper.refused:
          raise
        why = str(error)  # there is no cut to return to
        self.keeper.start()
        break
      time.sleep(_POLL_SECS)
    crash.arm(self.run_dir, [])
    line["outcome"] = why

  def _pull(self, fault: faults_lib.Fault, line: dict[str, Any]) -> None:
    """Does what makes a fleet pass the point."""
    role = None
    match fault.trigger:
      case "kill_leader":
        role = self.fleet.resolve(faults_lib.LEADER)
      case "kill_island":
        role = fault.target if fault.target in self.fleet.living() else None
        role = role or self.fleet.resolve("island-0")
      case "restore":
        self._kill_everything(line)
        self.keeper.start("--cut=last")
    if role is not None and self.fleet.signal(role, signal.SIGKILL):
      line["roles"] = [role]

  def _corrupt(self, fault: faults_lib.Fault, line: dict[str, Any]) -> None:
    """Damages an object; the leader stands still, or it would be gone."""
    rng = random.Random(fault.serial)
    snapshots = self.run_dir / "snapshots"
    leader = self.fleet.resolve(faults_lib.LEADER)
    if leader is not None:
      self.fleet.signal(leader, signal.SIGSTOP)
    try:
      deadline = time.monotonic() + _AIM_SECS
      key = None
      while key is None and time.monotonic() < deadline:
        key = store_faults.damage_one(
          snapshots, fault.target, fault.damage, rng
        )
        time.sleep(0.0 if key else 0.005)
    finally:
      if leader is not None:
        self.fleet.signal(leader, signal.SIGCONT)
    line["wall_secs"] = time.time()
    line["key"] = key
    if key is None:
      line["outcome"] = f"there was no {fault.target} to damage"

  def _shut_store(self, fault: faults_lib.Fault, line: dict[str, Any]) -> None:
    if self._disk is None:
      line["outcome"] = "the store is on no small disk"
      return
    full = fault.kind == "disk_full"
    try:
      with self._disk.full() if full else self._disk.read_only():
        line["wall_secs"] = time.time()
        self._pause(fault.hold_secs)
    except OSError as error:
      line["outcome"] = f"it could not be shut: {error}"

  def _tend(self) -> State:
    """Sees to the command."""
    self._state = self.keeper.tend()
    if self._state == "failed":
      raise StuckError(self.keeper.failure)
    return self._state

  def _pause(self, secs: float) -> None:
    for _ in self._until(secs):
      pass

  def _until(self, secs: float) -> Iterator[None]:
    """Gives turns for so long, or until the run has finished."""
    deadline = time.monotonic() + secs
    while self._tend() != "finished" and time.monotonic() < deadline:
      yield
      time.sleep(min(_POLL_SECS, max(deadline - time.monotonic(), 0.0)))

  def _wait_recovered(
    self, since: float, *, new_controller: bool = False
  ) -> float | None:
    """Waits until all roles live, all islands step and something is merged.

    All of it must have happened after `since`, Unix time, and another
    controller have begun with `new_controller`. Returns the wall time of the
    last thing that was missing; None if the run finished.

    Raises:
      StuckError: it takes too long.
    """
    for _ in self._until(_RECOVERY_SECS):
      self.fleet.look()
      stepped = self.fleet.stepped_secs
      moments = [stepped.get(m, 0.0) for m in range(self._num_islands)]
      moments.append(self.fleet.merged_secs)
      if new_controller:
        moments.append(self.fleet.session_secs)
      # Who lives takes longest to see.
      if self._state == "running" and min(moments) > since and self._all_live():
        return max(moments)
    if self._state == "finished":
      return None
    raise StuckError(f"not recovered after {_RECOVERY_SECS:.0f} s")

  def _all_live(self) -> bool:
    leader, waiting = self.fleet.syncers()
    living = self.fleet.living()
    return (
      leader is not None
      and len(waiting) >= self._num_syncers - 1
      and all(f"island-{m}" in living for m in range(self._num_islands))
    )

  def _write(self, line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError), self._log.open("a") as file:
      file.write(json.dumps(line) + "\n")
