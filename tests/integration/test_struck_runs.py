"""Whole runs in real processes that lose what they stand on, and go on."""

import math
import os
import shutil
import signal

import real_run

from diloco.report import summary

_KEPT = ("control/controller.json", "config.json")


def test_run_survives_the_loss_of_all_but_its_island(make_run):
  run = make_run(
    total_tokens=real_run.ENDLESS,
    # One leaves the evaluator a core of its own.
    fleet={"slices": ({"topology": "1"},), "pace_step_secs": 0.04},
    programs={
      "window_steps": 8,
      "eval_every_tokens": 2_000,
      "eval_batches": 1,
      "evaluator": True,
    },
    controller={
      "restart_base_secs": 0.1,
      "orphan_secs": 6.0,
      "takeover_secs": 4.0,  # a busy machine silences nobody for so long
    },
    faults=(
      {"target": "standby", "at_fraction": 0.001, "kind": "sigkill"},
      {"target": "syncer", "at_fraction": 0.002, "kind": "sigstop"},
    ),
  )
  run.start()
  run.wait_for(lambda: run.losses(), secs=300)
  os.kill(run.pid("evaluator"), signal.SIGKILL)
  # Whoever writes a file meanwhile does not write it into what is deleted.
  gone = (run.dir / "control").rename(run.dir.with_name("gone"))
  shutil.rmtree(gone)
  (run.dir / "config.json").unlink()
  run.wait_for(lambda: all((run.dir / n).exists() for n in _KEPT))

  def leaders():
    return [(e["role"], e["token"]) for e in run.events("lease_acquired")]

  def late():
    first, *others = leaders()
    merged = [e for e in run.events("merged") if e["token"] > first[1]]
    assert {e["role"] for e in merged} <= {role for role, _ in others}
    return {(e["fragment"], e["version"]) for e in merged}

  run.wait_for(lambda: len(late()) > 8 and len(run.events("syncer_died")) > 1)
  run.wait_for(lambda: len(run.events("syncer_started")) > 3)
  run.wait_for(lambda: run.events("evaluated")[-1]["incarnation"] == 2)
  # One that takes long to be had may have cost a token on the way.
  assert len(leaders()) == 2 and leaders()[0][1] < leaders()[1][1]
  run.process.kill()
  _, _, err = run.finish()
  facts = summary.summarise(run.dir)
  targets = [(f["target"], f["cause"]) for f in facts["faults"]]
  assert targets[0] == ("standby", "SIGKILL") and targets[1][0] == "syncer"
  assert facts["syncer"]["takeovers"] == 1
  # The stopped one can never lead again; another waits in its place.
  died = [(e["seat"], e["led"]) for e in run.events("syncer_died")]
  assert died == [(leaders()[1][0], False), (leaders()[0][0], False)]
  assert facts["syncer"]["standby_deaths"] == 2
  assert "cause=deposed" in err and facts["syncer"]["starts"] == 4
  # Orphans save their state and leave by themselves.
  run.wait_for(lambda: not run.alive())
  assert {e["reason"] for e in run.events("stopped")} == {"no controller"}
  assert {e["role"] for e in run.events("checkpointed")} == {"island-0"}
  (died,) = run.events("evaluator_died")
  assert died["cause"] == "SIGKILL" and not run.events("island_died")
  assert {e["role"] for e in run.events("evaluated")} == {"evaluator"}
  assert all(map(math.isfinite, run.losses()))
  for path in [run.dir, *run.dir.rglob("*")]:
    assert not path.stat().st_mode & 0o077, f"others may use {path}"
  run.check_books()


HANGING = """
import pathlib
import sys
import threading

from tests.integration import bowl


def make(options):
  flag = pathlib.Path(options["flag"])
  task = bowl.Bowl()
  batches = task.batches

  def hanging(split, **share):
    if split == "heldout" and "--island" in sys.argv and not flag.exists():
      flag.touch()
      threading.Event().wait()
    return batches(split, **share)

  task.batches = hanging
  return task
"""


def test_hung_islands_are_started_again_and_a_second_interrupt_kills_at_once(
  make_run, tmp_path, monkeypatch
):
  (tmp_path / "hanging.py").write_text(HANGING)
  paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
  run = make_run(
    total_tokens=real_run.ENDLESS,
    controller={"restart_base_secs": 0.1, "hang_secs": 3.0},
  )
  options = {"flag": str(tmp_path / "hung")}
  run.values["task"] = {"name": "hanging:make", "options": options}
  run.write_config()
  run.start()
  run.wait_for(lambda: run.steps(1) > 5)
  os.kill(run.pid("island-1"), signal.SIGSTOP)
  run.wait_for(
    lambda: (
      {e["role"] for e in run.events("started") if e["incarnation"] == 2}
      == {"island-0", "island-1"}
      and any(e["incarnation"] == 2 for e in run.events("evaluated"))
    )
  )
  for m in (0, 1):  # nobody is done before the second signal is heard
    os.kill(run.pid(f"island-{m}"), signal.SIGSTOP)
  run.process.send_signal(signal.SIGINT)
  run.wait_for(lambda: run.events("run_stopping"))  # two that wait are one
  run.process.send_signal(signal.SIGINT)
  code, _, err = run.finish()
  assert code == 1
  assert run.events("stopped") == []  # nobody was asked to drain and leave
  assert run.alive() == []
  causes = {e["island"]: e["cause"] for e in run.events("island_died")}
  # Its heartbeats went on: it was not for silence.
  assert causes[0].startswith("SIGKILL: no progress for")
  assert causes[1].startswith("SIGKILL: no ")
  assert "role=island-0 cause=no progress" in err
  assert all(i["restarts"] for i in run.summary()["islands"].values())
  run.check_books()
