"""Whole runs in real processes, some of which are killed on the way."""

import json
import os
import shutil
import signal
import time

_KEPT = ("control/controller.json", "control/processes.json", "config.json")


def test_interrupted_run_drains_saves_and_resumes(make_run):
  run = make_run()
  run.start()
  run.wait_for(lambda: run.steps(0) > 60 and run.steps(1) > 25)
  run.process.send_signal(signal.SIGINT)
  code, _, err = run.finish()
  assert code == 0, err
  before = run.summary()
  assert before["status"] == "stopped"
  run.check_books()
  assert run.alive() == []
  assert len(run.events("checkpointed")) >= 2
  code, _, err = run.start().finish()
  assert code == 0, err
  after = run.summary()
  assert after["status"] == "finished" and after["sessions"] == 2
  assert after["tokens_trained"] > before["tokens_trained"]
  run.check_books()
  started = [e for e in run.events("started") if e["incarnation"] == 2]
  assert {e["role"] for e in started} == {"island-0", "island-1"}
  for event in started:
    island = event["role"].removeprefix("island-")
    assert event["step"] == before["islands"][island]["steps"]
    assert "checkpoint" in event["restored_from"]


def test_roles_that_outlive_their_controller_are_not_started_again(make_run):
  run = make_run(total_tokens=48_000)
  run.start()
  run.wait_for(lambda: run.steps(0) > 20 and run.steps(1) > 10)
  roles = ("island-0", "island-1", "syncer", "standby")
  before = {role: run.pid(role) for role in roles}
  run.process.kill()
  run.finish()
  steps, versions = run.steps(0), len(run.events("merged"))
  run.wait_for(
    lambda: (
      run.steps(0) > steps + 20 and len(run.events("merged")) > versions + 4
    )
  )
  run.start()
  run.wait_for(lambda: len(run.events("reattached")) == len(roles))
  assert sorted(before.values()) == sorted(run.alive())
  code, _, err = run.finish()
  assert code == 0, err
  taken_up = {e["peer"]: e for e in run.events("reattached")}
  assert {role: e["pid"] for role, e in taken_up.items()} == before
  assert {e["peer_incarnation"] for e in taken_up.values()} == {1}
  assert taken_up["island-0"]["step"] >= steps  # it trained meanwhile
  assert {e["incarnation"] for e in run.events("started")} == {1}
  dispatched = run.events("program_dispatched")
  numbers = [(e["island"], e["seq"]) for e in dispatched]
  assert len(set(numbers)) == len(numbers)
  facts = run.summary()
  assert facts["status"] == "finished" and facts["sessions"] == 2
  assert facts["islands"]["0"]["restarts"] == 0
  assert facts["syncer"]["starts"] == 2 and facts["syncer"]["takeovers"] == 0
  assert run.alive() == []
  run.check_books()


def test_roles_that_were_told_another_configuration_are_started_again(make_run):
  run = make_run()
  run.start()
  run.wait_for(lambda: run.steps(0) > 20 and run.steps(1) > 10)
  run.process.kill()
  run.finish()
  run.values["total_tokens"] = 48_000
  run.write_config()
  code, _, err = run.start().finish()
  assert code == 0, err
  assert "config_changed" in err
  assert run.events("reattached") == []
  facts = run.summary()
  assert facts["tokens_trained"] >= 48_000
  run.check_books()


def test_what_died_with_its_controller_is_started_and_the_rest_taken_up(
  make_run,
):
  run = make_run(total_tokens=48_000)
  run.start()
  run.wait_for(lambda: run.steps(0) > 20 and run.steps(1) > 10)
  run.process.kill()
  run.finish()
  for role in ("island-1", "syncer"):
    os.kill(run.pid(role), signal.SIGKILL)
  code, _, err = run.start().finish()
  assert code == 0, err
  taken_up = {e["peer"] for e in run.events("reattached")}
  assert taken_up == {"island-0", "standby"}
  lives = {e["role"]: e["incarnation"] for e in run.events("started")}
  assert lives == {"island-0": 1, "island-1": 2}
  run.check_books()


def test_syncer_that_was_draining_does_not_train_on_in_the_next_session(
  make_run,
):
  run = make_run()
  run.start()
  run.wait_for(lambda: run.steps(0) > 20 and run.steps(1) > 10)
  # The standby is told to stop before the leader and holds up the end.
  (leader,) = {e["role"] for e in run.events("lease_acquired")}
  (waiting,) = {"syncer", "standby"} - {leader}
  os.kill(run.pid(waiting), signal.SIGSTOP)
  run.process.send_signal(signal.SIGINT)
  run.wait_for(lambda: len(run.events("stopped")) == 2)
  run.process.kill()
  run.finish()
  os.kill(run.pid(waiting), signal.SIGCONT)
  code, _, err = run.start().finish()
  assert code == 0, err
  assert "draining_seat_ended" in err
  facts = run.summary()
  assert facts["status"] == "finished"
  assert facts["syncer"]["takeovers"] == 1
  run.check_books()


def test_run_survives_the_loss_of_its_hints_its_standby_and_its_leader(
  make_run,
):
  run = make_run(
    total_tokens=48_000,
    faults=(
      {"target": "standby", "at_fraction": 0.2, "kind": "sigkill"},
      {"target": "syncer", "at_fraction": 0.5, "kind": "sigstop"},
    ),
  )
  run.start()
  run.wait_for(lambda: run.steps(0) > 10)
  shutil.rmtree(run.dir / "control")
  (run.dir / "config.json").unlink()
  run.wait_for(lambda: all((run.dir / n).exists() for n in _KEPT), secs=10)
  code, _, err = run.finish()
  assert code == 0, err
  leaders = [(e["role"], e["token"]) for e in run.events("lease_acquired")]
  assert [token for _, token in leaders] == [1, 2]
  facts = run.summary()
  targets = [(f["target"], f["cause"]) for f in facts["faults"]]
  assert targets[0] == ("standby", "SIGKILL") and targets[1][0] == "syncer"
  assert facts["syncer"]["takeovers"] == 1
  # The stopped one can never lead again; another waits in its place.
  died = [(e["seat"], e["led"]) for e in run.events("syncer_died")]
  assert died == [(leaders[1][0], False), (leaders[0][0], False)]
  assert facts["syncer"]["standby_deaths"] == 2
  assert "cause=deposed" in err and facts["syncer"]["starts"] == 4
  late = [e for e in run.events("merged") if e["role"] == leaders[1][0]]
  assert len({(e["fragment"], e["version"]) for e in late}) > 8
  for path in [run.dir, *run.dir.rglob("*")]:
    assert not path.stat().st_mode & 0o077, f"others may use {path}"
  run.check_books()


def test_orphans_save_their_state_and_leave_by_themselves(make_run):
  run = make_run(controller={"restart_base_secs": 0.1, "orphan_secs": 1.0})
  run.start()
  run.wait_for(lambda: run.steps(0) > 20 and run.steps(1) > 10)
  run.process.kill()
  run.finish()
  run.wait_for(lambda: not run.alive(), secs=60)
  reasons = {e["reason"] for e in run.events("stopped")}
  assert reasons == {"no controller"}
  assert {e["role"] for e in run.events("checkpointed")} >= {
    "island-0",
    "island-1",
  }


def test_second_controller_is_refused_and_second_interrupt_kills_at_once(
  make_run,
):
  run = make_run()
  first = run.start().process
  run.wait_for(lambda: run.steps(0) > 5)
  code, out, err = run.start().finish()
  assert (code, out) == (2, "")
  assert err.count("\n") == 1 and "alive" in err
  run.process = first
  for _ in range(2):
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
  code, _, _ = run.finish()
  assert code == 1
  assert run.events("stopped") == []  # nobody was asked to drain and leave
  assert run.alive() == []
  run.check_books()


def test_hung_island_is_killed_and_started_again(make_run):
  run = make_run(controller={"restart_base_secs": 0.1, "hang_secs": 2.0})
  run.start()
  run.wait_for(lambda: run.steps(1) > 5)
  os.kill(run.pid("island-1"), signal.SIGSTOP)
  code, _, err = run.finish()
  assert code == 0, err
  facts = run.summary()
  assert facts["islands"]["1"]["restarts"] >= 1
  run.check_books()


HANGING = """
import pathlib
import threading

from diloco.tasks import registry


class Stream:
  def __init__(self, stream, flag):
    self._stream, self._flag, self._taken = stream, flag, 0

  def __next__(self):
    self._taken += 1
    if self._taken == 2:
      try:
        self._flag.open("x").close()
      except FileExistsError:
        return next(self._stream)
      threading.Event().wait()
    return next(self._stream)

  def __getattr__(self, name):
    return getattr(self._stream, name)


def make(options):
  options = dict(options)
  flag = pathlib.Path(options.pop("flag"))
  task = registry.make_task("language_model", options)
  batches = task.batches

  def hanging(split, **share):
    stream = batches(split, **share)
    return Stream(stream, flag) if split == "heldout" else stream

  task.batches = hanging
  return task
"""


def test_island_that_hangs_in_an_evaluation_is_killed_and_started_again(
  make_run, tmp_path, monkeypatch
):
  (tmp_path / "hanging.py").write_text(HANGING)
  paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
  run = make_run(
    controller={"restart_base_secs": 0.1, "hang_secs": 3.0},
  )
  options = run.values["task"]["options"] | {"flag": str(tmp_path / "hung")}
  run.values["task"] = {"name": "hanging:make", "options": options}
  run.values["programs"]["eval_batches"] = 2
  run.write_config()
  code, _, err = run.start().finish()
  assert code == 0, err
  (died,) = run.events("island_died")
  assert died["island"] == 0
  assert died["cause"].startswith("SIGKILL: no progress for")
  assert "role=island-0 cause=no progress" in err
  # Heartbeats went on: it was not for silence.
  assert "no sign of life" not in err
  again = [e for e in run.events("evaluated") if e["incarnation"] == 2]
  assert again
  facts = run.summary()
  assert facts["status"] == "finished"
  run.check_books()


def test_islands_of_different_meshes_adopt_bit_equal_values(make_run):
  run = make_run(
    fleet={
      "slices": (
        {"kind": "v5p", "topology": "2x2", "relative_speed": 1.0},
        {"kind": "v6e", "topology": "1", "relative_speed": 1.0},
      ),
      "pace_step_secs": 0.04,
    },
    sync={"num_fragments": 4, "every": 8, "split_tensors": True},
  )
  code, out, err = run.start("--quiet", "--json").finish()
  assert code == 0, err
  assert json.loads(out) == run.summary()
  run.check_books()
  started = {e["role"]: e["devices"] for e in run.events("started")}
  assert started == {"island-0": 4, "island-1": 1}
  digests = {}
  for event in run.events("adopted"):
    version = (event["fragment"], event["version"])
    digests.setdefault(version, {})[event["role"]] = event["digest"]
  both = [d for d in digests.values() if len(d) == 2]
  assert len(both) > 10
  assert all(len(set(d.values())) == 1 for d in both)
