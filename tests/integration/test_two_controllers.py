"""A real run whose controller is stopped for so long that another takes over.

The other is told that it is on another machine, so that it can see of the first
no more than its lease; both reach one directory, as nodes that share a disk do.
Later it meets an error that nobody foresaw, and a third goes on.
"""

import signal
import subprocess
import sys

import pytest
import real_run

from diloco.snapshots import keys, records, store

ELSEWHERE = """
import pathlib
import sys
from diloco import cli
from diloco.controller import change
from diloco.report import liveness

liveness.machine = lambda: "another machine"
surprise = pathlib.Path(sys.argv[2], "control", "surprise")
look = change.take_up
change.take_up = lambda *given: 1 / (not surprise.exists()) and look(*given)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  with real_run.Run(
    tmp_path_factory.mktemp("two"),
    total_tokens=real_run.ENDLESS,
    fleet=real_run.fleet(0.12),
    # A busy machine silences no leader for as long as its lease then lasts.
    controller={"restart_base_secs": 0.1, "takeover_secs": 3.0},
  ) as run:
    run.start()
    run.wait_for(lambda: run.steps(0) and run.steps(1))
    run.pids = sorted(run.alive())
    run.first = run.process
    run.first.send_signal(signal.SIGSTOP)
    try:
      run.process = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, "resume", str(run.dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      run.wait_for(lambda: len(run.events("reattached")) == 4)
      run.files = controllers_files(run)
      steps, merges = run.steps(0), len(run.events("merged"))
      run.first.send_signal(signal.SIGCONT)
      run.woken = *run.first.communicate(timeout=60), run.first.returncode
      run.files_after = controllers_files(run)
      run.wait_for(
        lambda: (
          run.steps(0) > steps + 5 and len(run.events("merged")) > merges + 1
        )
      )
      (run.dir / "control" / "surprise").touch()
      run.detached = run.finish()
      run.start_command("resume", str(run.dir))
      run.wait_for(lambda: len(run.events("reattached")) == 8)
      run.pids_after = sorted(run.alive())
      run.process.send_signal(signal.SIGINT)
      run.end = run.finish()
    finally:
      run.first.kill()
    yield run


def controllers_files(run):
  """What is of the first controller, or of whoever is the controller."""
  folder = run.dir / "control"
  paths = [*run.dir.glob("tape/controller-0001.jsonl"), *folder.glob("*.json")]
  return {path.name: path.read_bytes() for path in paths}


def test_other_controllers_take_up_the_living_roles(run):
  assert run.pids == run.pids_after and len(run.pids) == 4
  tokens = [e["token"] for e in run.events("run_started")]
  assert tokens == [1, 2, 3]


def test_first_one_wakes_and_leaves_everything_as_it_is(run):
  out, err, code = run.woken
  assert (code, out) == (1, "")
  assert err.splitlines()[-1].startswith("error: the run in")
  assert "another controller took the run over" in err
  assert run.files == run.files_after


def test_error_nobody_foresaw_ends_the_controller_alone(run):
  code, out, err = run.detached
  assert (code, out) == (1, "")
  last = err.splitlines()[-1]
  assert "the controller failed (ZeroDivisionError" in last
  assert "take them up with 'diloco resume" in last


def test_run_ends_in_order_and_its_books_are_balanced(run):
  code, _, err = run.end
  assert code == 0, err
  run.check_books()
  assert run.summary()["status"] == "stopped"
  left = store.SnapshotStore((run.dir / "snapshots").as_uri() + "/")
  lease = left.read(keys.CONTROLLER_LEASE, records.Lease)
  assert (lease.owner, lease.token) == ("", 3)
