"""A real run without cuts: all islands are killed at once, then everything.

Training goes on from there. At last a version is damaged, and cannot.
"""

import json
import os
import signal
import time

import pytest
import real_run

from diloco.report import summary
from diloco.snapshots import keys, records, store


def damage_tensors(run, fragment):
  """Cuts every stored chunk of every version of a fragment short."""
  folder = run.dir / "snapshots" / "globals" / f"{fragment:04d}"
  for path in folder.rglob("*"):
    if path.is_file() and path.name != "zarr.json":
      os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """`killed` has how many losses there were before each of the two blows."""
  with real_run.Run(
    tmp_path_factory.mktemp("killed"),
    total_tokens=real_run.ENDLESS,
    programs={
      "window_steps": 4,
      "eval_every_tokens": 2_000,
      "eval_batches": 4,
      "checkpoint_every_steps": 20,
    },
  ) as run:
    run.start()
    run.wait_for(lambda: len(run.losses()) >= 4)
    for m in (0, 1):
      os.kill(run.pid(f"island-{m}"), signal.SIGKILL)
    run.killed = [len(run.losses())]
    run.wait_for(lambda: len(run.losses()) >= run.killed[0] + 2)
    run.kill_everything()
    run.killed.append(len(run.losses()))
    run.start()
    run.wait_for(lambda: len(run.losses()) >= run.killed[1] + 2)
    run.learnt = run.losses()
    yield run
    run.kill_everything()


def test_held_out_loss_goes_on_where_everything_was_killed(run):
  found, first = run.learnt, run.killed[0]
  start, gain = found[0], found[0] - found[first - 1]
  assert gain > 0.5, found
  for killed in run.killed:
    # Nothing of what was learnt is lost but noise; from the beginning it would
    # be all of it.
    assert found[killed] < start - 0.8 * gain, found
  assert found[-1] < found[first - 1], found


@pytest.fixture(scope="module")
def damaged(run):
  """The run after one fragment's tensors were damaged, and all killed."""
  while not run.events("global_damaged"):
    assert run.process.poll() is None
    damage_tensors(run, 1)
    time.sleep(0.2)
  step = run.steps(0)
  run.wait_for(lambda: run.steps(0) > step + 10)
  run.wait_for(lambda: run.events("not_restored"))
  run.status = json.loads(run.command("status", "--json")[1])
  run.kill_everything()
  return run


def test_damage_stops_one_fragment_is_told_and_not_resumed_without_a_cut(
  damaged,
):
  (told,) = damaged.status["damaged"]
  assert "fragment 1 stands still" in told and "the run has no cut" in told
  code, _, err = damaged.command("resume")
  assert code == 2
  assert err.count("\n") == 1 and "fragment 1" in err
  assert damaged.command("resume", "--cut=3")[0] == 2
  assert damaged.command("cut")[0] == 2
  snapshots = store.SnapshotStore((damaged.dir / "snapshots").as_uri())
  assert snapshots.read(keys.EPOCH, records.Epoch).epoch == 0


def test_books_of_all_that_was_killed_and_damaged_are_balanced(damaged):
  damaged.check_books()
  facts = summary.summarise(damaged.dir)
  assert all(i["restarts"] >= 1 for i in facts["islands"].values())
