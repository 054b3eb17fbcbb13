"""A run that trains in vain says so, and what to change."""

import dataclasses

import pytest
import run_builder

from diloco import config as config_lib
from diloco import launch
from diloco import run as run_lib
from diloco.report import narrative, summary, waste


@pytest.mark.parametrize(
  ("discarded", "setting"),
  [
    ({"overwritten": 290, "too_stale": 10}, "config.sync.adoption = 'carry'"),
    ({"overwritten": 10, "too_stale": 80}, "config.sync.max_staleness"),
    ({"publish_dropped": 60}, "config.sync.every"),
    ({"lost_with_island": 51}, "config.programs.checkpoint_every_steps"),
    ({"rolled_back": 400}, "config.programs.cut_every_secs"),
    (
      {"suspended": 90, "not_finite": 10, "too_stale": 20},
      "as suspended after not_finite: their updates held NaN or infinite",
    ),
    (
      {"suspended": 90, "not_finite": 1, "norm_outlier": 9},
      "as suspended after norm_outlier: raise config.sync.gate_factor",
    ),
    ({"suspended": 90}, "as suspended: see the report"),
    ({"a new reason": 60}, "see the report"),
  ],
)
def test_much_that_is_discarded_names_the_setting_to_change(discarded, setting):
  text = waste.warning(1000, discarded)
  assert setting in text and max(discarded, key=discarded.get) in text
  assert "\n" not in text


@pytest.mark.parametrize("discarded", [{}, {"overwritten": 50}])
def test_a_little_that_is_discarded_is_no_warning(discarded):
  assert waste.warning(1000, discarded) == ""
  assert waste.warning(0, {}) == ""


def test_much_that_is_in_no_version_at_the_end_is_a_warning_and_a_little_not():
  text = waste.left(1000, 384)
  assert "38.4 %" in text and "diloco resume" in text and "\n" not in text
  assert waste.left(1000, 50) == waste.left(0, 0) == ""


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_what_waits_is_a_warning_once_the_run_is_over(tmp_path, status):
  where = run_builder.simulate(tmp_path, run_builder.Plan())
  run = summary.load(where)
  run.view.sessions.last.status = status
  counts = run.ledger.tokens()
  ledger = dataclasses.replace(
    run.ledger, merged=0, pending=run.ledger.pending + run.ledger.merged
  )
  facts = summary.warnings(dataclasses.replace(run, ledger=ledger))
  assert counts.merged > counts.trained / 10
  assert any("no global version" in f for f in facts) is (status == "finished")


def test_every_setting_that_is_named_exists():
  fields = config_lib.RunConfig().to_dict()
  for text in waste._REMEDIES.values():
    for word in text.replace(",", " ").split():
      if word.startswith("config."):
        section, name = word.split(".")[1:]
        assert name in fields[section], word


def test_warning_is_in_summary_story_and_last_line(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(waste, "LIMIT", 0.0)
  where = run_builder.simulate(tmp_path, run_builder.Plan())
  run = summary.load(where)
  facts = summary.summary_of(run)
  assert len(facts["warnings"]) == 2
  for warning in facts["warnings"]:
    assert f"Warning: {warning}." in narrative.story(run)
  monkeypatch.setattr(
    run_lib,
    "train",
    lambda *_, **__: run_lib.Result("finished", facts, where / "report.html"),
  )
  assert launch.run({}, where) == 0
  last = capsys.readouterr().err.splitlines()[-1]
  assert all(warning in last for warning in facts["warnings"])
  assert "WARNING" in last and "report.html" in last


def test_run_without_waste_warns_of_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(waste, "LIMIT", 1.0)
  where = run_builder.simulate(tmp_path, run_builder.Plan())
  run = summary.load(where)
  assert summary.summary_of(run)["warnings"] == []
  assert not any("Warning" in sentence for sentence in narrative.story(run))


def test_defaults_give_nothing_up_at_adoption():
  config = config_lib.RunConfig()
  assert config.sync.adoption == "carry"
  assert (config.outer.learning_rate, config.outer.momentum) == (1.0, 0.0)


@pytest.mark.parametrize(
  ("momentum", "quorum", "every", "ruins"),
  [
    (0.9, 1, 12, True),
    (0.3, 1, 12, False),  # a gain of 1
    (0.9, 3, 12, False),
    (0.9, 1, 100, False),
    (0.0, 1, 12, False),
  ],
)
def test_momentum_that_ruined_runs_is_told_before_and_after(
  tmp_path, capsys, monkeypatch, momentum, quorum, every, ruins
):
  values = {
    "fleet": {"slices": [{"kind": "cpu", "topology": "1"}] * 3},
    "sync": {"quorum": quorum, "every": every, "num_fragments": 4},
    "outer": {"learning_rate": 0.7, "momentum": momentum},
  }
  text = waste.overshoot(config_lib.from_mapping(values))
  assert bool(text) is ruins and "\n" not in text
  where = run_builder.simulate(tmp_path, run_builder.Plan())
  run = summary.load(where)
  run.view.config = values
  assert (text in summary.warnings(run)) is ruins
  result = run_lib.Result("finished", {"warnings": []}, tmp_path)
  monkeypatch.setattr(run_lib, "train", lambda *_, **__: result)
  launch.run(values, tmp_path)
  told = capsys.readouterr().err
  assert ("warning: config.outer has a gain" in told) is ruins


@pytest.mark.parametrize("outer", [{"momentum": 1}, {"momentum": []}, None])
def test_configuration_that_is_damaged_has_the_other_warnings(tmp_path, outer):
  run = summary.load(run_builder.simulate(tmp_path, run_builder.Plan()))
  before = summary.warnings(run)
  run.view.config = {"outer": outer}
  assert before and summary.warnings(run) == before
