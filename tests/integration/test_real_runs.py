"""Whole runs in real processes, some of which are killed on the way."""

import json
import math
import os
import signal
import time

import pytest
from real_run import Run

from diloco.tape import reader


@pytest.fixture
def make_run(tmp_path):
  made = []

  def make(**overrides):
    made.append(Run(tmp_path, **overrides))
    return made[-1]

  yield make
  for run in made:
    left = run.alive()
    run.kill_everything()
    assert not left, "processes were left behind"


def _check_books(facts):
  """Every trained token has exactly one fate."""
  assert facts["violations"] == []
  assert facts["tokens_unaccounted"] == 0
  total = facts["tokens_merged"] + facts["tokens_pending"]
  total += sum(facts["tokens_discarded"].values())
  assert facts["tokens_trained"] == total
  assert facts["ledger"]["balanced"]


def _events(run, name):
  return [e for e in reader.read(run.dir).events if e["event"] == name]


def test_run_survives_the_death_of_an_island_and_of_the_syncer(make_run):
  run = make_run(
    faults=(
      {"target": "island-1", "at_fraction": 0.2, "kind": "sigkill"},
      {"target": "syncer", "at_fraction": 0.4, "kind": "sigkill"},
    )
  )
  code, out, err = run.start("--json").finish()
  assert code == 0, err
  facts = run.summary()
  assert json.loads(out) == facts
  assert facts["status"] == "finished"
  assert facts["tokens_trained"] >= 60_000
  assert facts["islands"]["1"]["restarts"] == 1
  assert facts["final_eval_loss"] < 0.75 * math.log(256)
  _check_books(facts)
  merged = _events(run, "merged")
  again = [
    m
    for m in merged
    if any(
      c["island"] == 1 and c["incarnation"] == 2 for c in m["contributions"]
    )
  ]
  assert again, "the killed island did not contribute again"
  assert {m["incarnation"] for m in merged} == {1, 2}, "no syncer took over"
  for fragment in range(4):
    versions = [m["version"] for m in merged if m["fragment"] == fragment]
    assert versions == list(range(1, len(versions) + 1))
  assert (run.dir / "report.html").stat().st_size > 10_000


def test_interrupted_run_drains_saves_and_resumes(make_run):
  run = make_run()
  run.start()
  run.wait_for(lambda: run.steps(0) > 60 and run.steps(1) > 25)
  run.process.send_signal(signal.SIGINT)
  code, _, err = run.finish()
  assert code == 0, err
  before = run.summary()
  assert before["status"] == "stopped"
  _check_books(before)
  assert run.alive() == []
  assert len(_events(run, "checkpointed")) >= 2
  code, _, err = run.start().finish()
  assert code == 0, err
  after = run.summary()
  assert after["status"] == "finished" and after["sessions"] == 2
  assert after["tokens_trained"] > before["tokens_trained"]
  _check_books(after)
  started = [e for e in _events(run, "started") if e["incarnation"] == 2]
  assert {e["role"] for e in started} == {"island-0", "island-1"}
  for event in started:
    island = event["role"].removeprefix("island-")
    assert event["step"] == before["islands"][island]["steps"]
    assert "checkpoint" in event["restored_from"]


def test_run_whose_controller_was_killed_goes_on_and_is_taken_up_again(
  make_run,
):
  run = make_run(controller={"restart_base_secs": 0.1, "orphan_secs": 60.0})
  run.start()
  run.wait_for(lambda: run.steps(0) > 20)
  run.process.kill()
  run.finish()
  steps, versions = run.steps(0), len(_events(run, "merged"))
  run.wait_for(
    lambda: (
      run.steps(0) > steps + 20 and len(_events(run, "merged")) > versions + 4
    )
  )
  code, _, err = run.start().finish()
  assert code == 0, err
  facts = run.summary()
  assert facts["status"] == "finished"
  _check_books(facts)


def test_orphans_save_their_state_and_leave_by_themselves(make_run):
  run = make_run(controller={"restart_base_secs": 0.1, "orphan_secs": 1.0})
  run.start()
  run.wait_for(lambda: run.steps(0) > 20 and run.steps(1) > 10)
  run.process.kill()
  run.finish()
  run.wait_for(lambda: not run.alive(), secs=60)
  reasons = {e["reason"] for e in _events(run, "stopped")}
  assert reasons == {"no controller"}
  assert {e["role"] for e in _events(run, "checkpointed")} >= {
    "island-0",
    "island-1",
  }


def test_second_interrupt_kills_everything_at_once(make_run):
  run = make_run()
  run.start()
  run.wait_for(lambda: run.steps(0) > 5)
  for _ in range(2):
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
  started = time.monotonic()
  code, _, _ = run.finish()
  assert code == 1
  assert time.monotonic() - started < 30  # no drain, which may take a minute
  assert run.alive() == []
  _check_books(run.summary())


def test_hung_island_is_killed_and_started_again(make_run):
  run = make_run(controller={"restart_base_secs": 0.1, "hang_secs": 2.0})
  run.start()
  run.wait_for(lambda: run.steps(1) > 5)
  os.kill(run.pid("island-1"), signal.SIGSTOP)
  code, _, err = run.finish()
  assert code == 0, err
  facts = run.summary()
  assert facts["islands"]["1"]["restarts"] >= 1
  _check_books(facts)


def test_second_controller_in_a_live_directory_is_refused(make_run):
  run = make_run()
  first = run.start().process
  run.wait_for(lambda: run.steps(0) > 2)
  code, out, err = run.start().finish()
  assert (code, out) == (2, "")
  assert err.count("\n") == 1 and "alive" in err
  run.process = first
  run.process.send_signal(signal.SIGINT)
  assert run.finish()[0] == 0


def test_islands_of_different_meshes_adopt_bit_equal_values(make_run):
  run = make_run(
    total_tokens=30_000,
    fleet={
      "slices": (
        {"kind": "v5p", "topology": "2x4", "relative_speed": 1.0},
        {"kind": "v6e", "topology": "1", "relative_speed": 1.0},
      ),
      "pace_step_secs": 0.1,
    },
  )
  code, _, err = run.start().finish()
  assert code == 0, err
  _check_books(run.summary())
  started = {e["role"]: e["devices"] for e in _events(run, "started")}
  assert started == {"island-0": 8, "island-1": 1}
  digests = {}
  for event in _events(run, "adopted"):
    version = (event["fragment"], event["version"])
    digests.setdefault(version, {})[event["role"]] = event["digest"]
  both = [d for d in digests.values() if len(d) == 2]
  assert len(both) > 10
  assert all(len(set(d.values())) == 1 for d in both)
