"""Cuts of real runs, and the way back to them after everything was killed."""

import json
import math
import os
import signal
import subprocess
import sys
import time

from diloco.snapshots import keys, records, store


def diloco(command, run, *flags):
  return subprocess.run(
    [sys.executable, "-m", "diloco.cli", command, str(run.dir), *flags],
    capture_output=True,
    text=True,
    timeout=240,
  )


def take_cut(run):
  done = diloco("cut", run, "--json")
  assert done.returncode == 0, done.stderr
  facts = json.loads(done.stdout)
  assert facts["status"] == "complete"
  assert done.stderr.splitlines()[0] == f"cut {facts['cut']} requested"
  return facts["cut"]


def kill_everything(run):
  """All at once: the controller first, or it would start the others again."""
  run.process.kill()
  for pid in run.alive():
    os.kill(pid, signal.SIGKILL)
  run.process.communicate()
  run.wait_for(lambda: not run.alive())


def damage_head(run, fragment):
  path = run.dir / "snapshots" / keys.head_key(fragment)
  path.write_bytes(path.read_bytes()[:-9])


def losses(run, name="evaluated"):
  return [e["loss"] for e in run.events(name) if e["target"] == "global"]


def test_run_goes_on_from_a_cut_after_all_was_killed_and_a_head_damaged(
  make_run,
):
  run = make_run(total_tokens=48_000)
  run.start()
  run.wait_for(lambda: len(run.events("merged")) > 12)
  cut = take_cut(run)
  merged = len(run.events("merged"))
  run.wait_for(lambda: len(run.events("merged")) > merged + 8)
  before = losses(run)
  kill_everything(run)
  damage_head(run, 2)
  resumed = diloco("resume", run)
  assert resumed.returncode == 0, resumed.stderr
  told = [x for x in resumed.stderr.splitlines() if x.startswith("restored")]
  assert len(told) == 1 and told[0].startswith(f"restored cut {cut} (fragment")
  (restored,) = run.events("restored")
  for fragment, (old, new) in enumerate(
    zip(restored["version_from"], restored["version_to"], strict=True)
  ):
    assert new > old
    versions = [
      e["version"] for e in run.events("merged") if e["fragment"] == fragment
    ]
    assert versions == sorted(versions)
    assert new + 1 in versions
  steps = {
    e["role"]: e["step"] for e in run.events("started") if e["incarnation"] > 1
  }
  for island, step in restored["steps"].items():
    assert steps[f"island-{island}"] == step
  facts = run.summary()
  assert facts["status"] == "finished"
  run.check_books()
  after = losses(run)[len(before) :]
  assert after[0] < before[0]  # it did not begin anew
  assert facts["final_eval_loss"] < 0.75 * math.log(256)


def test_cuts_are_taken_at_intervals_while_training_goes_on(make_run):
  programs = {
    "window_steps": 8,
    "checkpoint_every_steps": 0,
    "final_eval_batches": 4,
    "cut_every_secs": 1.0,
  }
  run = make_run(programs=programs)
  code, _, err = run.start().finish()
  assert code == 0, err
  completed = [e["cut"] for e in run.events("cut_completed")]
  assert len(completed) > 2
  kept = set((run.dir / "snapshots" / "cuts").glob("*/complete"))
  assert sorted(int(p.parent.name) for p in kept) == completed[-2:]
  run.check_books()
  resumed = diloco("resume", run, "--cut=last")
  assert resumed.returncode == 0, resumed.stderr
  (restored,) = run.events("restored")
  assert restored["cut"] == completed[-1]
  run.check_books()


def damage_tensors(run, fragment):
  """Cuts every stored chunk of every version of a fragment short."""
  for path in (run.dir / "snapshots" / "globals" / f"{fragment:04d}").rglob(
    "*"
  ):
    if path.is_file() and path.name != "zarr.json":
      os.truncate(path, path.stat().st_size // 2)


def damage_newest(run, fragment):
  """Cuts the tensors of a fragment's newest version short; gives it."""
  snapshots = store.SnapshotStore((run.dir / "snapshots").as_uri())
  head = snapshots.read(keys.head_key(fragment), records.Head)
  for path in (run.dir / "snapshots" / head.payload).rglob("*"):
    if path.is_file() and path.name != "zarr.json":
      os.truncate(path, path.stat().st_size // 2)
  return head.version


def test_run_that_is_on_goes_back_by_itself_when_a_version_is_damaged(make_run):
  run = make_run(total_tokens=48_000)
  run.start()
  run.wait_for(lambda: len(run.events("merged")) > 12)
  cut = take_cut(run)
  merged = len(run.events("merged"))
  run.wait_for(lambda: len(run.events("merged")) > merged + 8)
  while not run.events("global_damaged"):
    assert run.process.poll() is None
    damage_newest(run, 1)
    time.sleep(0.2)
  code, _, err = run.finish()
  assert code == 0, err
  assert sum(f"restored cut {cut} (" in x for x in err.splitlines()) == 1
  (restored,) = run.events("restored")
  assert restored["cut"] == cut
  facts = run.summary()
  assert (facts["status"], facts["sessions"]) == ("finished", 1)
  deaths = run.events("island_died") + run.events("syncer_died")
  assert [(e.get("island"), e["cause"]) for e in deaths] == []
  versions = [e["version"] for e in run.events("merged") if e["fragment"] == 1]
  assert max(versions) > restored["version_to"][1] + 2
  run.check_books()


def test_damage_stops_one_fragment_is_told_and_not_resumed_without_a_cut(
  make_run,
):
  run = make_run(total_tokens=48_000)
  run.start()
  run.wait_for(lambda: len(run.events("merged")) > 4)
  while not run.events("global_damaged"):
    assert run.process.poll() is None
    damage_tensors(run, 1)
    time.sleep(0.2)
  step = run.steps(0)
  run.wait_for(lambda: run.steps(0) > step + 10)
  status = json.loads(diloco("status", run, "--json").stdout)
  assert status["damaged"] and "fragment 1 stands still" in status["damaged"][0]
  run.wait_for(lambda: run.events("not_restored"), secs=30)
  status = json.loads(diloco("status", run, "--json").stdout)
  assert "the run has no cut" in status["damaged"][0]
  kill_everything(run)
  done = diloco("resume", run)
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1 and "fragment 1" in done.stderr
  assert diloco("resume", run, "--cut=3").returncode == 2
  assert diloco("cut", run).returncode == 2
  snapshots = store.SnapshotStore((run.dir / "snapshots").as_uri())
  assert snapshots.read(keys.EPOCH, records.Epoch) is None
