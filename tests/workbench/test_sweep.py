"""Sweeps of simulations: frozen, done once each, killed and gone on with."""

import errno
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import types

import pandas
import pytest
from observing import holder, until

from diloco import cli, process
from diloco.report import liveness
from diloco.workbench import executor, frozen, worker
from diloco.workbench import sweep as sweep_lib
from diloco.workbench import table as table_lib

SWEEP = """
from diloco import hyper

COMMON = {{"chips": 20_000, "windows": 0}}


def get_sweep():
  return hyper.product([COMMON], {points})
"""
EIGHT = 'hyper.product(hyper.sweep("islands", [1, 2]), '
EIGHT += 'hyper.sweep("days", [1, 2, 3, 4]))'
LONG = 'hyper.chain(hyper.sweep("days", [1]), [{"days": 30, "seeds": 50_000}])'


def write(folder, points):
  path = folder / "sweep.py"
  path.write_text(SWEEP.format(points=points))
  return path


def sweep(capsys, *flags):
  code = cli.main(["sweep", *map(str, flags)])
  out, err = capsys.readouterr()
  return code, out, err


def outcomes(workdir):
  """What is written of points that are done, by name."""
  return {
    path.stem: path.read_bytes() for path in workdir.glob("points/*.json")
  }


def table(workdir):
  return pandas.read_csv(workdir / "table.csv", index_col="name")


def test_killed_sweep_goes_on_and_does_no_point_twice(capsys, tmp_path):
  path, workdir = write(tmp_path, EIGHT), tmp_path / "out"
  flags = [f"--sweep={path}", f"--workdir={workdir}", "--cores=1"]
  command = [sys.executable, "-m", "diloco.cli", "sweep", *flags]
  with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
    until(lambda: len(outcomes(workdir)) >= 2)
    first.kill()
  names = [point.name for point in frozen.read(workdir).points]
  left = [name for name in names if holder(workdir, name)]
  for name in left:  # killed in the middle, if it still was
    if facts := holder(workdir, name):
      os.kill(facts["pid"], signal.SIGKILL)
  # One that is still ending would be taken for one that is at work.
  until(lambda: not any(holder(workdir, name) for name in left))
  before = outcomes(workdir)
  assert 2 <= len(before) < 8

  code, _, err = sweep(capsys, *flags)
  assert code == 0
  assert f"{len(before)} done" in err and "8 of 8 points done" in err
  after = outcomes(workdir)
  assert len(after) == 8
  assert {name: after[name] for name in before} == before
  found = table(workdir)
  assert list(found.index) == names
  assert set(found["status"]) == {"finished"}
  assert found["goodput.mean"].between(0.5, 1).all()
  assert pandas.read_parquet(workdir / "table.parquet").shape[0] == 8
  assert (workdir / "figure.png").read_bytes()[:4] == b"\x89PNG"

  # Once more: nothing is left to do, and an edit changes nothing.
  path.write_text("nonsense(")
  code, out, err = sweep(capsys, *flags, "--json")
  assert code == 0 and "0 to begin" in err
  assert "not what it was when this sweep started" in err
  assert [row["name"] for row in json.loads(out)["points"]] == names
  assert outcomes(workdir) == after


def test_points_that_are_asked_for_are_done_and_others_wait(capsys, tmp_path):
  path = write(tmp_path, 'hyper.sweep("days", [1, 2, 3])')
  workdir = tmp_path / "out"
  flags = f"--sweep={path}", f"--workdir={workdir}"
  code, _, err = sweep(capsys, *flags, "--only=days=4*")
  assert code == 2 and "none of the 3 points has such a name" in err
  assert "days=1" in err and not workdir.exists()

  code, _, err = sweep(capsys, *flags, "--only=days=[23]")
  assert code == 0 and "[2/2]" in err
  assert "3 points, 0 done, 0 still running, 2 to begin, 1 left out" in err
  assert "2 of 3 points done; the same command goes on without --only" in err
  first = outcomes(workdir)
  assert set(first) == {"days=2", "days=3"}
  assert table(workdir)["status"]["days=1"] == "pending"

  code, _, err = sweep(capsys, *flags)
  assert code == 0 and "1 to begin" in err and "left out" not in err
  assert first.items() < outcomes(workdir).items()


@pytest.fixture
def running(tmp_path):
  """A point that is on, its sweep dead or alive, and its process."""
  workdir = tmp_path / "out"
  frozen.write(workdir, frozen.build(*_built(write(tmp_path, LONG))))
  first = executor.Local(workdir, [0])
  assert first.start("days=30,seeds=50000", 1)
  facts = until(lambda: holder(workdir, "days=30,seeds=50000"))
  yield workdir, first, facts["pid"]
  os.kill(facts["pid"], signal.SIGKILL)
  assert until(first.ended)


def _built(path):
  from diloco import hyper

  return str(path), hyper.load(str(path))[0], "simulate"


def test_point_of_a_dead_sweep_is_adopted_with_its_cores(running):
  workdir, _, _ = running
  second = executor.Local(workdir, [0, 1])
  assert second.adopt("days=30,seeds=50000")
  assert not second.adopt("days=1")
  assert second.running() == ["days=30,seeds=50000"]
  assert not second.start("days=1", 2)  # core 0 is taken
  second.stop()
  assert "unknown" in until(second.ended)["days=30,seeds=50000"]


def test_point_that_was_not_found_is_adopted_when_it_is_begun_again(running):
  workdir, _, pid = running
  second = executor.Local(workdir, [1])
  assert second.start("days=30,seeds=50000", 1)
  until(lambda: not second.ended() and _pids(second) == [pid])
  assert liveness.start_ticks(pid)


def _pids(made):
  return [handle.pid for handle, _ in made._running.values()]


def test_point_that_waits_for_room_is_what_it_was(running):
  workdir, first, _ = running
  frozen.set_outcome(workdir, "days=1", {"status": "failed"})
  made = sweep_lib.Runner(workdir, frozen.read(workdir), first)
  (point,) = made._queue(retry=True)
  assert point.name == "days=1" and not made._begin(point)
  assert frozen.outcome(workdir, "days=1") == {"status": "failed"}


def test_what_a_point_starts_is_not_taken_for_it(tmp_path, monkeypatch):
  monkeypatch.setenv(process.ROLE, "the label of a point")
  monkeypatch.setattr(worker, "_done", lambda *_: {"status": _label()})
  (tmp_path / "points").mkdir()
  worker.main([str(tmp_path), "one", "[]", os.getcwd()])
  assert frozen.outcome(tmp_path, "one") == {"status": "none"}


def _label():
  return os.environ.get(process.ROLE, "none")


def test_point_says_that_others_have_its_cores(monkeypatch, caplog):
  core = 10**6 + os.getpid()  # that no other test takes
  monkeypatch.setattr(worker.os, "sched_getaffinity", lambda _: {core})
  monkeypatch.setattr(worker, "_claims", [])
  with socket.socket(socket.AF_UNIX) as other:
    other.bind(f"\0diloco-core-{core}")
    assert worker._free_cores(1) == [] == worker._claims
  assert "wanted=1 free=0" in caplog.text and "other users" in caplog.text
  assert worker._free_cores(1) == [core]
  worker._claims.pop().close()


def test_failed_point_is_told_and_retried_alone(capsys, tmp_path):
  # What no simulation can follow is found out only when it begins.
  points = '[{"days": 1}, {"days": 1e9, "name": "endless"}]'
  path, workdir = write(tmp_path, points), tmp_path / "out"
  flags = [f"--sweep={path}", f"--workdir={workdir}"]
  code, _, err = sweep(capsys, *flags)
  assert code == 1
  assert "failed: endless: " in err and "can be followed" in err
  assert "1 of 2 points done; --retry" in err
  assert "can be followed" in table(workdir)["reason"]["endless"]
  before = outcomes(workdir)

  code, _, err = sweep(capsys, *flags)
  assert code == 1 and "0 to begin" in err
  assert outcomes(workdir) == before
  code, _, err = sweep(capsys, *flags, "--retry")
  assert code == 1 and "1 to begin" in err
  after = outcomes(workdir)
  assert after["endless"] != before.pop("endless")
  assert {name: after[name] for name in before} == before


def test_ctrl_c_stops_and_the_same_command_goes_on(capsys, tmp_path):
  path, workdir = write(tmp_path, LONG), tmp_path / "out"
  flags = [f"--sweep={path}", f"--workdir={workdir}", "--cores=1"]
  command = [sys.executable, "-m", "diloco.cli", "sweep", *flags]
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as first:
    name = "days=30,seeds=50000"
    facts = until(lambda: workdir.exists() and holder(workdir, name))
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
  assert first.returncode == 0
  assert "stopping" in err
  assert "1 of 2 points done; the same command goes on" in err
  assert liveness.start_ticks(facts["pid"]) is None
  assert list(table(workdir)["status"]) == ["finished", "pending"]


class Interrupting(io.StringIO):
  """Has its writer interrupted as it tells how many points there are."""

  def write(self, text):
    if "to begin" in text:
      signal.raise_signal(signal.SIGINT)
    return super().write(text)


def test_ctrl_c_is_heeded_from_the_first_line_on(capsys, tmp_path, monkeypatch):
  path, workdir = write(tmp_path, LONG), tmp_path / "out"
  with monkeypatch.context() as patch:
    patch.setattr(sys, "stderr", told := Interrupting())
    code, _, _ = sweep(capsys, f"--sweep={path}", f"--workdir={workdir}")
  assert code == 0
  assert "0 of 2 points done; the same command goes on" in told.getvalue()
  assert list(table(workdir)["status"]) == ["pending", "pending"]


TRAINED = """
from diloco import hyper
def get_config():
  return {{"total_tokens": 1000}}
def get_sweep():
  return {points}
"""


@pytest.mark.parametrize(
  ("text", "flags", "why"),
  [
    (SWEEP, (), "no points"),
    (SWEEP.replace("{points}", "[{{'days': 1}}] * 2"), (), "two points"),
    (SWEEP.replace("{points}", "[{{'color': 1}}]"), (), "--color"),
    (SWEEP.replace("{points}", "[{{'name': '../x'}}]"), (), "directory's name"),
    (
      SWEEP.replace("{points}", "hyper.sweep('days', range(1, 202))"),
      (),
      "add --yes",
    ),
    (SWEEP.replace("{points}", "[{{'days': 1}}]"), ("--cores=0",), "cores=0"),
    (SWEEP.replace("{points}", "[{{'days': 1}}]"), ("--retry",), "no sweep in"),
    (
      SWEEP.replace("{points}", "[{{'days': 1}}]"),
      ("--ray=127.0.0.1:1",),
      "--ray=127.0.0.1:1: no Ray cluster can be reached there",
    ),
    (
      SWEEP.replace("{points}", "[{{'days': 1}}]"),
      ("--ray=auto", "--cores=1"),
      "leave --cores out",
    ),
    (
      TRAINED.replace("{points}", "[{{'engine': 'ray'}}]"),
      ("--ray=auto",),
      "places of their own",
    ),
    (
      TRAINED.replace("{points}", "[{{'sync.quorom': 1}}]"),
      (),
      "did you mean config.sync.quorum?",
    ),
    (
      TRAINED.replace("{points}", "[{{'fleet.slices[3].kind': 1}}]"),
      (),
      "no such field",
    ),
    (
      TRAINED.replace("{points}", "[{{'sync.quorum': 7, 'name': 'seven'}}]"),
      (),
      "the point 'seven'",
    ),
    (
      TRAINED.replace(
        "{points}", "[{{'seed': 0}}, {{'sync.every': 24, 'name': 'same'}}]"
      ),
      (),
      "'seed=0' and 'same': they differ in nothing but their names",
    ),
  ],
)
def test_bad_sweep_is_refused_in_one_line_and_leaves_no_trace(
  capsys, tmp_path, text, flags, why
):
  path = tmp_path / "sweep.py"
  path.write_text(text.format(points="[]"))
  workdir = tmp_path / "out"
  code, out, err = sweep(
    capsys, f"--sweep={path}", f"--workdir={workdir}", *flags
  )
  assert (code, out, err.count("\n")) == (2, "", 1), err
  assert why in err
  assert not workdir.exists()


def test_many_points_are_asked_for_at_a_terminal(capsys, tmp_path, monkeypatch):
  terminal = io.StringIO("no\n")
  terminal.isatty = lambda: True  # type: ignore[method-assign]
  monkeypatch.setattr(sys, "stdin", terminal)
  path = write(tmp_path, 'hyper.sweep("days", range(1, 202))')
  code, _, err = sweep(capsys, f"--sweep={path}", f"--workdir={tmp_path}/out")
  assert code == 2 and "201 points. Do them all? [y/N]" in err
  assert not (tmp_path / "out").exists()


def test_directory_that_is_not_this_sweeps_is_refused(capsys, tmp_path):
  path, workdir = write(tmp_path, "[{'days': 1}]"), tmp_path / "out"
  flags = [f"--sweep={path}", f"--workdir={workdir}"]
  workdir.mkdir()
  (workdir / "thesis.tex").write_text("years of work")
  code, _, err = sweep(capsys, *flags)
  assert code == 2 and "holds no sweep" in err
  (workdir / "thesis.tex").unlink()
  assert sweep(capsys, *flags)[0] == 0

  other = tmp_path / "other.py"
  other.write_text(path.read_text() + "\n")
  code, _, err = sweep(capsys, f"--sweep={other}", flags[1])
  assert code == 2 and "the sweep of sweep.py" in err

  index = workdir / frozen.FILE
  whole = index.read_text()
  index.write_text(whole.replace('"days": 1', '"days": 2', 1))
  code, _, err = sweep(capsys, flags[1])
  assert code == 2 and "point 'point' was changed" in err
  index.write_text(whole.replace("diloco-sweep-1", "diloco-sweep-0"))
  code, _, err = sweep(capsys, flags[1])
  assert code == 2 and "has format 'diloco-sweep-0'" in err
  assert pathlib.Path(workdir / "table.csv").exists()


def test_table_is_whole_before_any_point_has_begun(capsys, tmp_path):
  points = (frozen.Point("a", {"seed": 0}, {}), frozen.Point("b", {}, {}))
  sweep = frozen.Sweep("train", "sweep.py", "0", points)
  frozen.write(tmp_path, sweep)
  assert [row["status"] for row in table_lib.write(tmp_path, sweep)] == [
    "pending",
    "pending",
  ]
  assert "no point has a result yet" in capsys.readouterr().err
  assert list(table(tmp_path).index) == ["a", "b"]


def test_time_left_counts_only_what_this_sweep_has_done(
  capsys, tmp_path, monkeypatch
):
  points = tuple(frozen.Point(name, {}, {}) for name in ("half", "new"))
  made = frozen.Sweep("train", "sweep.py", "", points)
  doing = types.SimpleNamespace(
    adopt=lambda name: name == "half", running=lambda: ["half"]
  )
  runner = sweep_lib.Runner(tmp_path, made, doing)
  monkeypatch.setattr(sweep_lib.Runner, "_share", lambda self, name: 0.5)
  runner._queue(retry=False)
  monkeypatch.setattr(sweep_lib.Runner, "_share", lambda self, name: 0.75)
  runner._begun = time.monotonic() - 100.0
  runner._progress()
  # A quarter took 100 s, and five quarters are left.
  assert "about 8 min 20 s" in capsys.readouterr().err


def test_point_that_cannot_be_started_fails_alone(tmp_path, capsys):
  points = tuple(frozen.Point(name, {}, {}) for name in ("one", "two"))
  made = frozen.Sweep("simulate", "sweep.py", "", points)
  frozen.write(tmp_path, made)
  local = executor.Local(tmp_path, [0])

  def start(launch):
    if launch.role == "one":
      raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return types.SimpleNamespace(cause_of_death=lambda: "exit 3")

  local._engine = types.SimpleNamespace(start=start)
  sweep_lib.Runner(tmp_path, made, local).run(retry=False)
  one, two = (frozen.outcome(tmp_path, point.name) for point in points)
  assert one["status"] == two["status"] == "failed"
  assert "it could not be started: BlockingIOError" in one["reason"]
  # Whose log is gone too.
  assert two["reason"].startswith("it ended by exit 3: FileNotFoundError")
  assert "2/2" in capsys.readouterr().err


def test_sweep_looks_seldom_at_points_that_are_long_to_read(
  tmp_path, monkeypatch
):
  point = frozen.Point("one", {}, {})
  made = frozen.Sweep("train", "sweep.py", "", (point,))
  doing = types.SimpleNamespace(running=lambda: ["one"])
  now = [100.0]
  monkeypatch.setattr(sweep_lib.time, "monotonic", lambda: now[0])
  runner = sweep_lib.Runner(tmp_path, made, doing)

  def share(self, name):
    now[0] += 2.0
    return 0.5

  monkeypatch.setattr(sweep_lib.Runner, "_share", share)
  assert runner._tell_at == 115.0
  runner._progress()
  assert runner._tell_at == 202.0


def test_points_are_named_by_what_differs():
  points = [
    {"sync.quorum": 1, "a.rate": 0.5, "b.rate": 1, "seed": 0, "on": True},
    {"sync.quorum": 2, "a.rate": 0.1, "b.rate": 2, "seed": 0, "on": False},
    {"seed": 0, "name": "mine"},
  ]
  assert frozen.names(points, "point") == [
    "quorum=1,a.rate=0.5,b.rate=1,on=true",
    "quorum=2,a.rate=0.1,b.rate=2,on=false",
    "mine",
  ]
  assert frozen.names([{"seed": 0}], "point") == ["point"]
