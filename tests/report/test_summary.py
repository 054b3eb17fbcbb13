"""The summary of finished, crashed and empty runs."""

import json
import pathlib
import threading

import pytest
import run_builder

from diloco import cli, errors, process
from diloco import config as config_lib
from diloco.report import summary
from diloco.tape import events, recorder

_PLAN = run_builder.Plan(
  islands=(
    run_builder.Island(),
    run_builder.Island(0.2, "v5p", 0.5, paced=True),
    run_builder.Island(0.15),
  ),
  faults=((1, 8.0), (None, 12.0)),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  return run_builder.simulate(tmp_path_factory.mktemp("finished"), _PLAN)


def test_finished_run_has_every_figure(finished):
  facts = summary.summarise(finished)
  assert facts["status"] == "finished" and facts["method"]
  assert 1.45 < facts["final_eval_loss"] < 2.0
  assert facts["final_eval_bits_per_token"] == pytest.approx(
    facts["final_eval_loss"] * 1.442695, rel=1e-6
  )
  assert facts["wall_secs"] == pytest.approx(20.15, abs=0.01)
  assert 0.5 < facts["goodput"] < 1
  versions = facts["global_versions"]
  assert 0 < versions["fragment_min"] <= versions["fragment_max"]
  assert versions["total"] == facts["merges"]["count"]
  assert sum(facts["merges"]["contributors"].values()) == versions["total"]
  assert facts["bytes_published"] > 0 and facts["bytes_adopted"] > 0
  assert not facts["violations"] and not facts["problems"]


def test_tokens_add_up(finished):
  facts = summary.summarise(finished)
  parts = [facts["tokens_merged"], facts["tokens_pending"]]
  parts += facts["tokens_discarded"].values()
  assert sum(parts) + facts["tokens_unaccounted"] == facts["tokens_trained"]
  by_island = [island["tokens"] for island in facts["islands"].values()]
  assert sum(by_island) == facts["tokens_trained"]
  exact = facts["ledger"]
  assert exact["balanced"] and exact["unaccounted"] == 0
  assert exact["trained"] == 4 * facts["tokens_trained"]
  assert exact["trained"] == exact["merged"] + exact["pending"] + sum(
    exact["discarded"].values()
  )


def test_islands_say_what_they_are_and_how_they_fared(finished):
  islands = summary.summarise(finished)["islands"]
  assert list(islands) == ["0", "1", "2"]
  assert islands["1"]["paced"] and islands["1"]["kind"] == "v5p"
  assert not islands["0"]["paced"]
  assert [island["restarts"] for island in islands.values()] == [0, 1, 0]
  assert islands["0"]["step_secs_p50"] == pytest.approx(0.097)
  assert islands["0"]["fault_gap_over_median"] < 1.5
  assert all(island["stall_secs"] >= 0 for island in islands.values())
  assert all(island["staleness_mean"] >= 0 for island in islands.values())


def test_faults_say_who_felt_them(finished):
  faults = summary.summarise(finished)["faults"]
  assert [fault["target"] for fault in faults] == ["island-1", "syncer"]
  assert set(faults[0]["gap_over_median"]) == {"0", "2"}
  assert set(faults[1]["gap_over_median"]) == {"0", "1", "2"}
  assert faults[0]["back_secs"] == pytest.approx(3.2, abs=0.1)
  assert faults[1]["back_secs"] == pytest.approx(1.55, abs=0.01)


def test_summary_file_is_strict_json(finished):
  facts = summary.write_summary(finished)

  def refuse(name):
    raise AssertionError(name)

  text = (finished / "summary.json").read_text()
  assert json.loads(text, parse_constant=refuse) == facts


def test_crashed_run_is_summarised_as_far_as_it_went(tmp_path):
  plan = run_builder.Plan(finish=False, secs=6.0)
  facts = summary.summarise(run_builder.simulate(tmp_path, plan))
  assert facts["status"] == "crashed"  # nobody is left to end it
  assert facts["islands"]["0"]["state"] == "dead"
  assert facts["tokens_trained"] > 0 and facts["ledger"]["balanced"]
  assert facts["final_eval_loss"] is not None


def test_run_killed_at_any_moment_balances(tmp_path):
  for tenths in range(0, 80, 3):
    plan = run_builder.Plan(
      finish=False, secs=tenths / 10, faults=((0, 2.5),), restart_secs=1.0
    )
    facts = summary.summarise(
      run_builder.simulate(tmp_path / str(tenths), plan)
    )
    assert facts["ledger"]["balanced"], facts["violations"]


def test_empty_run_has_zeros_and_unknowns(tmp_path):
  facts = summary.summarise(tmp_path)
  assert facts["status"] == "empty"
  assert facts["tokens_trained"] == 0 and facts["goodput"] is None
  assert facts["final_eval_loss"] is None and facts["islands"] == {}
  json.dumps(facts, allow_nan=False)


def test_missing_run_is_the_users_mistake(tmp_path):
  with pytest.raises(errors.UserError):
    summary.summarise(tmp_path / "nowhere")


def test_broken_line_and_broken_rule_are_in_the_summary(tmp_path):
  plan = run_builder.Plan(secs=5.0)
  run_dir = run_builder.simulate(tmp_path, plan)
  path = recorder.tape_path(run_dir, "syncer", 1)
  lines = path.read_text().splitlines(keepends=True)
  merges = [json.loads(line) for line in lines if "merged" in line]
  again = dict(merges[0], version=merges[-1]["version"] + 1)
  path.write_text("".join(lines) + "broken\n" + json.dumps(again) + "\n")
  facts = summary.summarise(run_dir)
  assert any("merged twice" in text for text in facts["violations"])
  assert any("syncer-0001.jsonl, line" in text for text in facts["problems"])
  assert not facts["ledger"]["balanced"]


def test_figures_that_are_not_finite_become_unknown(tmp_path):
  run_dir = run_builder.simulate(tmp_path, run_builder.Plan(secs=3.0))
  tape = recorder.Recorder(run_dir, "island-0", 1, lambda: 4e9)
  tape.record(events.EVALUATED, target="global", step=1, loss=float("nan"))
  tape.close()
  log = recorder.MetricLog(run_dir, 0)
  log.record(step=9999, loss=float("inf"), tokens=1, incarnation=1)
  log.close()
  facts = summary.summarise(run_dir)
  assert facts["final_eval_loss"] is None
  json.dumps(facts, allow_nan=False)


def test_summary_of_half_the_tapes_does_not_replace_that_of_all(
  tmp_path, capsys
):
  run_dir = run_builder.simulate(tmp_path / "run", _PLAN)
  process.write_config(config_lib.RunConfig(), run_dir)
  whole = summary.write_summary(run_dir)
  tape = next(run_dir.glob("tape/syncer-*.jsonl"))
  lines = tape.read_bytes()
  tape.unlink()
  assert cli.main(["report", str(run_dir)]) == 0
  assert f"({tape.parent.name}/{tape.name}, 1 files" in capsys.readouterr().err
  assert json.loads((run_dir / "summary.json").read_text()) == whole
  part = json.loads((run_dir / "summary.partial.json").read_text())
  assert part["merges"]["count"] < whole["merges"]["count"]
  assert (run_dir / "report.partial.html").exists()
  tape.write_bytes(b"garbage\n" * 50)  # no better than none
  summary.write_summary(run_dir)
  assert json.loads((run_dir / "summary.json").read_text()) == whole
  tape.write_bytes(lines)
  assert summary.write_summary(run_dir) == whole
  more = recorder.Recorder(run_dir, "controller", 2)
  more.record(events.RUN_STARTED)
  more.close()
  assert summary.write_summary(run_dir)["sessions"] == 2
  assert json.loads((run_dir / "summary.json").read_text())["sessions"] == 2


def test_end_of_a_session_keeps_a_summary_of_lines_that_are_gone(tmp_path):
  run_dir = run_builder.simulate(tmp_path / "run", _PLAN)
  whole = summary.write_summary(run_dir)
  next(run_dir.glob("tape/syncer-*.jsonl")).unlink()
  run = summary.load(run_dir)
  summary.set_aside(run_dir, run)
  part = summary.write_summary(run_dir, run)
  assert json.loads((run_dir / "summary.json").read_text()) == part
  earlier = (run_dir / "summary.earlier.json").read_text()
  assert json.loads(earlier) == whole


@pytest.mark.parametrize(
  ("status", "state"), [("finished", "done"), ("stopped", "stopped")]
)
def test_run_that_has_ended_has_no_starting_islands(tmp_path, status, state):
  run_dir = run_builder.simulate(tmp_path / "run")
  tape = recorder.Recorder(run_dir, "controller", 2)
  tape.record(events.RUN_STARTED, islands=2)
  tape.record(
    events.ISLAND_STARTED, island=0, island_incarnation=2, pid=1, cores=[0]
  )
  tape.record(events.RUN_FINISHED, status=status, reason="budget is spent")
  tape.close()
  islands = summary.summarise(run_dir)["islands"]
  assert [island["state"] for island in islands.values()] == [state] * 2


def test_two_who_write_a_file_at_once_do_not_meet(tmp_path, monkeypatch):
  path, write = tmp_path / "report.html", pathlib.Path.write_text

  def meet(self, text, **options):
    write(self, text, **options)
    monkeypatch.undo()
    other = threading.Thread(target=summary.replace, args=(path, "theirs"))
    other.start()
    other.join()

  monkeypatch.setattr(pathlib.Path, "write_text", meet)
  summary.replace(path, "mine")
  assert path.read_text() == "mine"
  assert list(tmp_path.iterdir()) == [path]


def test_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
  (tmp_path / "folder").mkdir()
  with pytest.raises(IsADirectoryError):
    summary.replace(tmp_path / "folder", "text")
  assert [path.name for path in tmp_path.iterdir()] == ["folder"]
