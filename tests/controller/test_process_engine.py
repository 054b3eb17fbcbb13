"""The process engine with real processes."""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from observing import until

from diloco.controller.engines import base
from diloco.controller.engines import process as process_engine
from diloco.report import liveness

_PATIENCE_SECS = 20.0  # a Python start on a busy machine


# One role for all tests: it starts a grandchild if asked, says so, and waits.
ROLE = """
import pathlib, subprocess, sys, time
print("hello", *sys.argv[1:], flush=True)
if sys.argv[1] == "exit":
  sys.exit(int(sys.argv[2]))
if sys.argv[1] == "apart":
  from diloco import process
  process.setup_role((), pathlib.Path(sys.argv[2]).parent, "island-0")
child = subprocess.Popen(
  ["sleep", "600"], start_new_session=sys.argv[1] == "apart"
)
temporary = pathlib.Path(sys.argv[2] + ".tmp")
temporary.write_text(str(child.pid))
temporary.rename(sys.argv[2])
if sys.argv[1] == "leave":
  sys.exit(0)
time.sleep(600)
"""


class Engine(process_engine.ProcessEngine):
  """Remembers what it started."""

  def __init__(self, run_dir):
    super().__init__(run_dir)
    self.handles = []

  def start(self, launch):
    self.handles.append(super().start(launch))
    return self.handles[-1]


@pytest.fixture
def engine(tmp_path, monkeypatch):
  (tmp_path / "role_under_test.py").write_text(ROLE)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  engine = Engine(tmp_path / "run")
  yield engine
  for handle in engine.handles:
    handle.signal(signal.SIGKILL)
    assert handle.wait(_PATIENCE_SECS)


@pytest.fixture
def run_dir(tmp_path):
  return tmp_path / "run"


def start(engine, run_dir, *args, role="island-0"):
  log = run_dir / "logs" / f"{role}.log"
  return engine.start(base.Launch(role, "role_under_test", args, log))


def start_with_child(engine, run_dir, mode="wait", role="island-0"):
  """Returns the handle and its grandchild's process number."""
  place = run_dir / f"{role}.child"
  handle = start(engine, run_dir, mode, str(place), role=role)
  until(place.exists)
  return handle, int(place.read_text())


def is_alive(pid):
  return liveness.start_ticks(pid) is not None


@pytest.mark.parametrize("code", [0, 1, 2])
def test_exit_code_is_reported(engine, run_dir, code):
  handle = start(engine, run_dir, "exit", str(code))
  assert handle.wait(_PATIENCE_SECS)
  assert handle.cause_of_death() == f"exit {code}"
  assert handle.cause_of_death() == f"exit {code}"
  handle.signal(signal.SIGKILL)  # too late, and no error
  log = run_dir / "logs" / "island-0.log"
  assert log.read_text() == f"hello exit {code}\n"


def test_log_is_continued_by_the_next_life(engine, run_dir):
  for _ in range(2):
    assert start(engine, run_dir, "exit", "0").wait(_PATIENCE_SECS)
  log = run_dir / "logs" / "island-0.log"
  assert log.read_text().splitlines() == ["hello exit 0"] * 2


@pytest.mark.parametrize(
  ("number", "cause"),
  [
    (signal.SIGKILL, "SIGKILL"),
    (signal.SIGTERM, "SIGTERM"),
    (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}"),
  ],
)
def test_signal_is_reported_and_reaches_the_whole_session(
  engine, run_dir, number, cause
):
  handle, child = start_with_child(engine, run_dir)
  assert handle.cause_of_death() is None
  assert not handle.wait(0.05)
  handle.signal(number)
  assert handle.wait(_PATIENCE_SECS)
  assert handle.cause_of_death() == cause
  until(lambda: not is_alive(child))


@pytest.mark.parametrize("mode", ["wait", "leave"])
def test_what_a_dead_role_leaves_behind_ends_with_it(engine, run_dir, mode):
  handle, child = start_with_child(engine, run_dir, mode)
  if mode == "wait":
    os.kill(handle.pid, signal.SIGKILL)  # the role alone
  until(lambda: handle.cause_of_death() is not None)
  assert handle.cause_of_death() == {"wait": "SIGKILL", "leave": "exit 0"}[mode]
  until(lambda: not is_alive(child))


def test_stopped_role_can_be_killed(engine, run_dir):
  handle, _ = start_with_child(engine, run_dir)
  handle.signal(signal.SIGSTOP)
  assert handle.cause_of_death() is None
  handle.signal(signal.SIGKILL)
  assert handle.wait(_PATIENCE_SECS)
  assert handle.cause_of_death() == "SIGKILL"


_FORKS = """
import os, sys, time
from diloco import process
process.setup_role((), sys.argv[1], "island-0")
child = os.fork()
if not child:
  time.sleep(600)
print(child, flush=True)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(600)
"""


def test_role_outlives_what_ends_a_job_and_what_it_forks_does_not(tmp_path):
  with subprocess.Popen(
    [sys.executable, "-c", _FORKS, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
  ) as role:
    child = int(role.stdout.readline())
    role.terminate()
    os.kill(child, signal.SIGTERM)
    assert int(role.stdout.readline()) == -signal.SIGTERM
    assert role.poll() is None
    role.kill()
  assert role.returncode == -signal.SIGKILL


def test_role_is_out_of_reach_of_the_terminal(engine, run_dir):
  handle, child = start_with_child(engine, run_dir)
  assert os.getsid(handle.pid) == handle.pid != os.getsid(0)
  assert os.getpgid(child) == handle.pid


def test_leftovers_of_an_earlier_controller_are_ended(engine, run_dir):
  first, first_child = start_with_child(engine, run_dir, role="island-0")
  second, _ = start_with_child(engine, run_dir, role="syncer")
  dead = start(engine, run_dir, "exit", "0", role="island-1")
  assert dead.wait(_PATIENCE_SECS)
  first.signal(signal.SIGSTOP)
  later = process_engine.ProcessEngine(run_dir)
  assert sorted(later.kill_leftovers()) == ["island-0", "syncer"]
  for handle in (first, second):
    assert handle.wait(_PATIENCE_SECS)
    assert handle.cause_of_death() == "SIGKILL"
  until(lambda: not is_alive(first_child))
  assert later.kill_leftovers() == []


def test_process_with_a_number_used_again_is_spared(engine, run_dir):
  handle, child = start_with_child(engine, run_dir)
  ticks = liveness.start_ticks(handle.pid)
  for other in (ticks - 1, ticks + 1):
    earlier = process_engine.AttachedHandle(handle.pid, other)
    earlier.signal(signal.SIGKILL)
    assert earlier.wait(0)
    assert earlier.cause_of_death() == "unknown"
  assert handle.cause_of_death() is None
  assert is_alive(child)


def copy_beside(run_dir):
  return shutil.copytree(run_dir, run_dir.with_name("copy"))


def copy_in_place(run_dir):
  run_dir.rename(run_dir.with_name("moved"))
  return shutil.copytree(run_dir.with_name("moved"), run_dir)


@pytest.mark.parametrize("copy", [copy_beside, copy_in_place])
def test_processes_of_the_original_are_not_those_of_a_copy(
  engine, run_dir, copy
):
  handle, child = start_with_child(engine, run_dir)
  later = process_engine.ProcessEngine(copy(run_dir))
  assert later.survivors() == {}
  assert later.kill_leftovers() == []
  later.kill_stray(handle.pid)
  assert handle.cause_of_death() is None
  assert is_alive(child)


def test_next_controller_takes_a_role_up_with_what_was_known_of_it(
  engine, run_dir
):
  place = run_dir / "island-0.child"
  facts = {"incarnation": 3, "slice": 1, "cores": [0]}
  handle = engine.start(
    base.Launch(
      "island-0",
      "role_under_test",
      ["wait", str(place)],
      run_dir / "logs" / "island-0.log",
      facts=facts,
    )
  )
  until(place.exists)
  gone = start(engine, run_dir, "exit", "0", role="island-1")
  assert gone.wait(_PATIENCE_SECS)
  later = process_engine.ProcessEngine(run_dir)
  assert set(later.survivors()) == {"island-0"}
  found = later.survivors()["island-0"]
  assert found.handle.pid == handle.pid
  assert {name: found.facts[name] for name in facts} == facts
  assert found.handle.cause_of_death() is None
  assert not found.handle.wait(0.01)


@pytest.mark.parametrize("lives", [(1, 2), (2, 1)])
def test_of_two_lives_of_a_role_the_later_is_taken_up(engine, run_dir, lives):
  pids = {}
  for life in lives:  # a controller may die before it knows of its start
    launch = base.Launch(
      "island-0",
      "role_under_test",
      ["wait", str(run_dir / f"{life}.child")],
      run_dir / "logs" / "island-0.log",
      facts={"incarnation": life},
    )
    pids[life] = engine.start(launch).pid
    until((run_dir / f"{life}.child").exists)
  found = process_engine.ProcessEngine(run_dir).survivors()
  assert found["island-0"].handle.pid == pids[2]


def test_what_a_role_starts_in_a_session_of_its_own_is_not_taken_for_it(
  engine, run_dir
):
  handle, child = start_with_child(engine, run_dir, "apart")
  try:
    found = process_engine.ProcessEngine(run_dir).survivors()
    assert found["island-0"].handle.pid == handle.pid
    engine.kill_stray(child)
    assert is_alive(child)
  finally:
    os.kill(child, signal.SIGKILL)


def test_death_of_a_role_that_was_taken_up_is_noticed(engine, run_dir):
  handle, child = start_with_child(engine, run_dir)
  found = process_engine.ProcessEngine(run_dir).survivors()["island-0"].handle
  found.signal(signal.SIGKILL)
  assert found.wait(_PATIENCE_SECS)
  assert found.cause_of_death() == "unknown"
  until(lambda: not is_alive(child))
  assert handle.cause_of_death() == "SIGKILL"
  found.signal(signal.SIGKILL)  # harmless now


def test_what_a_role_that_was_taken_up_leaves_behind_ends_with_it(
  engine, run_dir
):
  handle, child = start_with_child(engine, run_dir)
  found = process_engine.ProcessEngine(run_dir).survivors()["island-0"].handle
  assert found.cause_of_death() is None
  os.kill(handle.pid, signal.SIGKILL)  # the role alone
  handle._process.wait()
  assert found.cause_of_death() == "unknown"
  until(lambda: not is_alive(child))


def test_stray_is_ended_but_never_a_process_of_our_own_session(engine, run_dir):
  handle, child = start_with_child(engine, run_dir)
  later = process_engine.ProcessEngine(run_dir)
  later.kill_stray(child)  # leads no session
  later.kill_stray(os.getpid())
  assert handle.cause_of_death() is None and is_alive(child)
  later.kill_stray(handle.pid)
  assert handle.wait(_PATIENCE_SECS)


def test_directory_without_roles_has_no_leftovers(tmp_path):
  assert process_engine.ProcessEngine(tmp_path).kill_leftovers() == []
  assert list(tmp_path.iterdir()) == []


def test_roles_run_under_this_interpreter(engine, run_dir):
  handle, _ = start_with_child(engine, run_dir)
  assert psutil.Process(handle.pid).cmdline()[0] == sys.executable


def test_role_runs_on_its_cores_from_the_start(engine, run_dir):
  core = min(os.sched_getaffinity(0))
  place = run_dir / "pinned.child"
  launch = base.Launch(
    role="pinned",
    module="role_under_test",
    args=["wait", str(place)],
    log=run_dir / "logs" / "pinned.log",
    cores=[core],
  )
  handle = engine.start(launch)
  assert os.sched_getaffinity(handle.pid) == {core}


def test_role_whose_cores_were_taken_from_the_machine_has_a_handle(
  engine, run_dir
):
  place = run_dir / "island-0.child"
  log = run_dir / "logs" / "island-0.log"
  args = "island-0", "role_under_test", ["wait", str(place)], log
  engine.start(base.Launch(*args, cores=[1023]))  # it says itself what it lacks
  engine.handles[0].signal(signal.SIGKILL)
  assert engine.handles[0].wait(_PATIENCE_SECS)
