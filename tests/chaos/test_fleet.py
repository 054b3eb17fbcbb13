"""A run seen from outside: processes of the test's own in the roles' places."""

import os
import signal
import subprocess
import sys

import pytest

from diloco.chaos import fleet as fleet_lib
from diloco.tape import recorder

_SLEEPER = "import sys, time; print(flush=True); time.sleep(600)"


@pytest.fixture
def sleepers(tmp_path):
  """Two syncers, an island and an evaluator, by what their commands say."""
  told = {
    "syncer": ["--role", "syncer"],
    "standby": ["--role", "standby"],
    "island-0": ["--island", "0"],
    "evaluator": [],
  }
  common = ["--run_dir", str(tmp_path), "--incarnation", "2"]
  roles = {
    role: subprocess.Popen(
      [sys.executable, "-c", _SLEEPER, *common, *words],
      stdout=subprocess.PIPE,
      start_new_session=True,
    )
    for role, words in told.items()
  }
  for child in roles.values():
    assert child.stdout is not None
    child.stdout.readline()  # it is a session of its own by now
  yield roles
  for child in roles.values():
    child.kill()
    child.communicate()


def _lease(tmp_path, role, token, incarnation=2):
  tape = recorder.Recorder(tmp_path, role, incarnation)
  tape.record("lease_acquired", token=token)
  tape.close()


@pytest.fixture
def fleet(tmp_path, sleepers):
  return fleet_lib.Fleet(tmp_path)


def test_leader_is_who_took_the_newest_lease(tmp_path, fleet):
  assert fleet.resolve("leader") is None
  _lease(tmp_path, "syncer", 1)
  fleet.look()
  assert fleet.syncers() == ("syncer", ["standby"])
  _lease(tmp_path, "standby", 2)
  fleet.look()
  assert (fleet.resolve("leader"), fleet.resolve("standby")) == (
    "standby",
    "syncer",
  )


def test_seat_whose_leading_life_is_over_does_not_lead(tmp_path, fleet):
  _lease(tmp_path, "syncer", 1, incarnation=1)
  fleet.look()
  assert fleet.syncers() == (None, ["syncer", "standby"])
  assert fleet.resolve("standby") is None


def test_signal_reaches_a_role_and_the_dead_are_known(fleet, sleepers):
  assert fleet.signal("island-0", signal.SIGKILL)
  assert sleepers["island-0"].wait() == -signal.SIGKILL
  assert not fleet.signal("island-0", signal.SIGKILL)
  assert set(fleet.living()) == {"syncer", "standby", "evaluator"}
  assert fleet.resolve("island-0") is None


def test_all_are_killed_at_once(fleet, sleepers):
  assert set(fleet.kill_all()) == set(sleepers)
  codes = {child.wait() for child in sleepers.values()}
  assert codes == {-signal.SIGKILL}
  assert fleet.living() == {}


def test_processes_of_a_run_are_found_by_its_directory(tmp_path, sleepers):
  found = fleet_lib.processes_of(tmp_path)
  assert set(found) == {child.pid for child in sleepers.values()}
  assert os.getpid() not in found
  assert fleet_lib.processes_of(tmp_path / "other") == []


def test_progress_is_what_the_logs_say(tmp_path, fleet):
  log = recorder.MetricLog(tmp_path, 1)
  for step in (1, 2):
    log.record(step=step, tokens=10, incarnation=1, wall_secs=float(step))
  tape = recorder.Recorder(tmp_path, "syncer", 1, clock=lambda: 7.0)
  tape.record("merged", fragment=0, version=1, contributions=[])
  fleet.look()
  fleet.look()
  assert fleet.stepped_secs[1] == 2.0
  assert (fleet.tokens, fleet.merged_secs) == (20, 7.0)
