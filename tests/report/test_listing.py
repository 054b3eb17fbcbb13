"""`diloco ls`: runs told from the ends of their files."""

import errno
import json
import os
import pathlib
import threading

import pytest
import run_builder

from diloco import cli, process
from diloco import config as config_lib
from diloco.report import listing, liveness, roster, status, summary


@pytest.fixture
def make(tmp_path):
  """Makes a run's directory below the folder."""

  def make(name, **plan):
    run_dir = tmp_path / name
    run_builder.simulate(run_dir, run_builder.Plan(secs=6.0, **plan))
    config = config_lib.from_mapping({"name": name, "total_tokens": 50_000})
    process.write_config(config, run_dir)
    return run_dir

  return make


def test_runs_are_listed_with_state_and_result(tmp_path, make, capsys):
  told = summary.write_summary(make("deep/done"))
  make("torn", finish=False)
  (make("broken") / "config.json").write_text("{")
  (tmp_path / "broken" / "snapshots" / "config").unlink()
  foreign = tmp_path / "model"
  foreign.mkdir()
  (foreign / "config.json").write_text('{"vocab_size": 256}')
  assert cli.main(["ls", str(tmp_path), "--json"]) == 0
  found = json.loads(capsys.readouterr().out)["runs"]
  by_dir = {os.path.relpath(one["dir"], tmp_path): one for one in found}
  assert list(by_dir) == ["broken", "deep/done", "torn"]
  assert [one["status"] for one in by_dir.values()] == [
    *("unreadable", "finished", "crashed")
  ]
  done, torn = by_dir["deep/done"], by_dir["torn"]
  assert done["tokens"] == told["tokens_trained"] > 0
  assert done["final_eval_loss"] == told["final_eval_loss"]
  assert (torn["name"], torn["tokens_budget"]) == ("torn", 50_000)
  assert torn["tokens"] == summary.summarise(torn["dir"])["tokens_trained"]
  assert torn["final_eval_loss"] is None
  assert cli.main(["ls", str(tmp_path)]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 4 and "crashed" in lines[-1]


def test_state_is_that_of_the_newest_of_ten_thousand_lives(tmp_path, make):
  run_dir = make("old")
  tape = run_dir / "tape" / "controller-0001.jsonl"
  first, *_ = tape.read_text().splitlines(keepends=True)
  tape.with_name("controller-9999.jsonl").write_text(first)
  tape.rename(tape.with_name("controller-10000.jsonl"))
  assert listing.runs(run_dir)[0]["status"] == "finished"


def test_living_run_is_running(make, monkeypatch):
  run_dir = make("live", finish=False)
  monkeypatch.setattr(liveness, "controller_alive", lambda path: True)
  (found,) = listing.runs(run_dir)
  assert found["status"] == "running"


def test_nothing_to_list_is_said(tmp_path, capsys):
  assert cli.main(["ls", str(tmp_path)]) == 0
  assert "no run below" in capsys.readouterr().err


def test_no_file_is_read_whole(make, monkeypatch):
  run_dir = make("long")
  monkeypatch.setattr(listing, "_TAIL_BYTES", 4096)
  sizes = [path.stat().st_size for path in run_dir.glob("*/*.jsonl")]
  assert max(sizes) > 4096
  (found,) = listing.runs(run_dir.parent)
  assert found["status"] == "finished" and found["tokens"] > 0


def test_run_that_never_started_is_what_status_calls_it(tmp_path):
  process.write_config(config_lib.RunConfig(), tmp_path / "new")
  (tmp_path / "new" / "snapshots").mkdir(exist_ok=True)
  (found,) = listing.runs(tmp_path)
  assert found["status"] == status.status(tmp_path / "new")["status"] == "empty"


def test_controller_that_was_refused_changes_no_state(tmp_path, make):
  run_dir = make("done")
  (run_dir / "tape" / "controller-0002.jsonl").touch()
  (found,) = listing.runs(tmp_path)
  assert found["status"] == status.status(run_dir)["status"] == "finished"


DEEP = "[" * 50_000
STRANGE = {
  "deep": ("metrics/island-0.jsonl", DEEP),
  "large": ("metrics/island-0.jsonl", f'{{"step": 1, "tokens": {9**999}}}'),
  "words": (
    "summary.json",
    '{"status": "finished", "tokens_trained": "x", "final_eval_loss": "y"}',
  ),
  "no number": (
    "summary.json",
    f'{{"status": "x", "tokens_trained": 1e999, "final_eval_loss": {9**999}}}',
  ),
  "deep summary": ("summary.json", DEEP),
  "another summary": ("summary.json", "{}"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_files_change_nothing_of_what_is_listed(tmp_path, make, name):
  run_dir = make("one", finish=name not in ("deep", "large"))
  before = listing.runs(tmp_path)
  file, text = STRANGE[name]
  with open(run_dir / file, "a") as out:
    out.write(text + "\n")
  found = listing.runs(tmp_path)
  assert [one["tokens"] for one in found] == [one["tokens"] for one in before]
  listing.show(found)


def test_folder_that_is_closed_to_us_hides_no_other(
  tmp_path, make, monkeypatch
):
  make("one")
  make("two")
  (tmp_path / "theirs").mkdir()
  holds_run, open_ = process.holds_run, pathlib.Path.open

  def refuse(path, *args, **options):
    if "two" in path.parts and path.name.startswith("controller"):
      raise PermissionError(path)
    return open_(path, *args, **options)

  def closed(folder):
    if folder.name == "theirs":
      raise PermissionError(folder)
    return holds_run(folder)

  monkeypatch.setattr(process, "holds_run", closed)
  monkeypatch.setattr(pathlib.Path, "open", refuse)
  found = listing.runs(tmp_path)
  assert [one["status"] for one in found] == ["finished", "unreadable"]


def test_folder_that_is_asked_for_and_closed_to_us_is_not_called_empty(
  tmp_path, monkeypatch, capsys
):
  def refuse(path):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

  monkeypatch.setattr(os, "scandir", refuse)  # os.walk would pass it over
  assert cli.main(["ls", str(tmp_path)]) == 2
  assert f"{tmp_path}: Permission denied" in capsys.readouterr().err


def test_stores_are_asked_side_by_side(tmp_path, make, monkeypatch):
  all_asked = threading.Barrier(3)

  def look(run_dir):
    all_asked.wait(timeout=60)
    return {"syncer": {"state": "dead"}}

  for name in ("one", "three", "two"):
    make(name, finish=False)
  monkeypatch.setattr(roster, "look", look)
  found = listing.runs(tmp_path)
  assert [one["roles"] for one in found] == [{"syncer": "dead"}] * 3


def test_store_that_fails_hides_its_own_roles_and_says_why(
  make, monkeypatch, caplog
):
  def fail(run_dir):
    raise ValueError("what nobody foresaw")

  monkeypatch.setattr(roster, "look", fail)
  run_dir = make("one", finish=False)
  (found,) = listing.runs(run_dir)
  assert (found["status"], found["roles"]) == ("crashed", None)
  assert "what nobody foresaw" in caplog.text
  assert "no answer" not in caplog.text


def test_stores_that_hang_keep_no_other_from_being_asked(
  tmp_path, make, monkeypatch
):
  asked = threading.Event()

  def look(run_dir):
    if run_dir.endswith("two"):
      asked.set()
      return {"syncer": {"state": "dead"}}
    assert asked.wait(timeout=60)
    return None

  for name in ("one", "two"):
    make(name, finish=False)
  monkeypatch.setattr(roster, "look", look)
  monkeypatch.setattr(listing, "_AT_ONCE", 1)
  monkeypatch.setattr(listing, "_TURN_SECS", 0.01)
  found = listing.runs(tmp_path)
  assert [one["roles"] for one in found] == [None, {"syncer": "dead"}]


def test_store_that_never_answers_is_not_waited_for(make, monkeypatch, caplog):
  answered = threading.Event()
  monkeypatch.setattr(roster, "look", lambda run_dir: answered.wait() and None)
  monkeypatch.setattr(listing, "_PATIENCE_SECS", 0.0)
  run_dir = make("one", finish=False)
  (found,) = listing.runs(run_dir)
  assert (found["status"], found["roles"]) == ("crashed", None)
  assert f"roles_unknown dir={run_dir}" in caplog.text
  answered.set()
