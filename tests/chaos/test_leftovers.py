"""Campaigns that are stopped, killed or still at work, and what they leave.

The campaign is real, in a process of its own; its trial is one that shuts the
disk, starts a process as a role would be, and waits.
"""

import os
import signal
import subprocess
import sys

import pytest
from observing import until

from diloco import errors
from diloco.chaos import campaign, store_faults
from diloco.report import liveness

_PATIENCE_SECS = 60.0

CAMPAIGN = """
import subprocess, sys, time
from diloco import cli
from diloco.chaos import injector

class Trial:
  def __init__(self, trial_dir, tokens, islands, syncers, disk):
    self.run_dir, self.disk = trial_dir / "run", disk

  def run(self, faults):
    (self.run_dir / "snapshots" / "head").write_text("kept")
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    role = subprocess.Popen(
      [*sleeper, "--run_dir", str(self.run_dir)],
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      start_new_session=True,
    )
    with getattr(self.disk, {shut!r})():
      print(role.pid, flush=True)
      for _ in range(6000):  # one long sleep could begin as the signal comes
        time.sleep(0.1)

  def clean_up(self):
    return []

injector.Trial = Trial
flags = ["--workdir=" + sys.argv[1], "--trials=1", "--kinds={kind}"]
sys.exit(cli.main(["chaos", *flags]))
"""


@pytest.fixture
def workdir(tmp_path):
  why = store_faults.may_mount(tmp_path / "probe")
  if why:
    pytest.skip(f"no file system can be mounted: {why}")
  workdir = tmp_path / "with blank"
  yield workdir
  for path in store_faults.mounted_below(workdir):
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def start(workdir):
  """Starts a campaign; returns it and its role, once the disk is shut."""
  made, roles = [], []

  def start(kind="disk_full"):
    shut = {"disk_full": "full", "read_only": "read_only"}[kind]
    script = CAMPAIGN.format(kind=kind, shut=shut)
    made.append(
      subprocess.Popen(
        [sys.executable, "-c", script, str(workdir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
    roles.append(int(made[-1].stdout.readline()))
    return made[-1], roles[-1]

  yield start
  for process in made:
    process.kill()
    process.communicate()
  for pid in filter(_lives, roles):
    os.kill(pid, signal.SIGKILL)


def _lives(pid):
  return liveness.start_ticks(pid) is not None


def _check_cleared(workdir, role):
  assert store_faults.mounted_below(workdir) == []
  snapshots = workdir / "run-000" / "run" / "snapshots"
  kept = sorted(path.name for path in snapshots.iterdir())
  assert kept == ["config", "head"]
  assert (snapshots / "head").read_text() == "kept"
  until(lambda: not _lives(role))


@pytest.mark.parametrize("kind", ["disk_full", "read_only"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_campaign_that_is_told_to_stop_leaves_nothing(
  start, workdir, kind, number
):
  process, role = start(kind)
  process.send_signal(number)
  out, err = process.communicate(timeout=_PATIENCE_SECS)
  assert process.returncode == 1
  assert out == "" and err == f"WARNING stopping signal={number.name}\n"
  _check_cleared(workdir, role)


@pytest.mark.parametrize("kind", ["disk_full", "read_only"])
def test_what_a_killed_campaign_left_is_cleared_by_the_next(
  start, workdir, kind
):
  process, role = start(kind)
  process.kill()
  process.wait()
  assert len(store_faults.mounted_below(workdir)) == 1 and _lives(role)
  with pytest.raises(errors.UserError, match="directory of its own"):
    campaign.Campaign(workdir, 1, 0)
  _check_cleared(workdir, role)


def test_campaign_at_work_is_left_alone(start, workdir):
  process, role = start()
  with pytest.raises(errors.UserError, match="a campaign is at work in it"):
    campaign.Campaign(workdir, 1, 0)
  assert len(store_faults.mounted_below(workdir)) == 1
  assert _lives(role) and process.poll() is None


def test_disks_elsewhere_are_not_taken_away(workdir):
  disk = store_faults.SmallDisk(workdir / "disk")
  (workdir / "other").mkdir()
  assert store_faults.mounted_below(workdir / "other") == []
  assert store_faults.mounted_below(workdir) == [workdir / "disk"]
  store_faults.keep_and_unmount(disk.path)
  assert store_faults.mounted_below(workdir) == []


def test_run_in_a_directory_that_was_never_a_campaigns_lives_on(tmp_path):
  run_dir = tmp_path / "run-000" / "run"
  run_dir.mkdir(parents=True)
  script = "import time; print(flush=True); time.sleep(600)"
  role = subprocess.Popen(
    [sys.executable, "-c", script, "--run_dir", str(run_dir)],
    stdout=subprocess.PIPE,
  )
  try:
    role.stdout.readline()
    campaign.clear_dead(tmp_path)
    assert _lives(role.pid)
    with campaign.own(tmp_path):
      pass
    assert role.wait(_PATIENCE_SECS) == -signal.SIGKILL
  finally:
    role.kill()
    role.communicate()


def test_second_signal_does_not_disturb_the_cleaning_up():
  before = signal.getsignal(signal.SIGTERM)
  cleaned = False
  with pytest.raises(KeyboardInterrupt), campaign.interruptible():
    try:
      signal.raise_signal(signal.SIGTERM)
    finally:
      signal.raise_signal(signal.SIGINT)
      signal.raise_signal(signal.SIGTERM)
      cleaned = True
  assert cleaned and signal.getsignal(signal.SIGTERM) is before
