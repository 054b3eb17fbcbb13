"""How a campaign goes through its plan and adds up, with runs made by hand."""

import json

import pytest

from diloco import cli, errors, process
from diloco import config as config_lib
from diloco.chaos import campaign, injector
from diloco.controller.engines import cluster
from diloco.tape import recorder


class FakeTrial:
  """Does `capacity` faults, then ends; writes what a real run would."""

  capacity = 3
  stuck_at = None  # serial of a fault the run does not recover from
  skip = False  # whether rows are passed over

  def __init__(self, trial_dir, total_tokens, *_):
    self.run_dir = trial_dir / "run"
    self.dir = trial_dir
    self.keeper = type("Keeper", (), {"starts": 2})
    self.total_tokens = total_tokens

  def run(self, faults):
    done = faults[: self.capacity]
    with (self.dir / injector.FAULT_LOG).open("w") as log:
      for fault in done:
        line = fault.to_json() | {"wall_secs": 1.0, "roles": []}
        print(json.dumps(line | {"outcome": injector.DONE}), file=log)
    tape = recorder.Recorder(self.run_dir, "island-0", 1)
    tape.record("started", step=int(self.skip), tokens_per_step=10)
    tape.close()
    budget = {"tokens_trained": 1, "tokens_budget": 1}
    summary = {"status": "finished", **budget}
    (self.run_dir / "summary.json").write_text(json.dumps(summary))
    if self.stuck_at in [fault.serial for fault in done]:
      raise injector.StuckError("not recovered")
    return list(faults[self.capacity :])

  def clean_up(self):
    return []


@pytest.fixture
def fake_trial(monkeypatch):
  fake = type("Fake", (FakeTrial,), {})
  monkeypatch.setattr(injector, "Trial", fake)
  return fake


def _run(tmp_path, trials=8, per_run=5):
  kinds = ("sigkill", "sigstop")
  return campaign.Campaign(tmp_path / "c", trials, 1, kinds, per_run).run()


def test_runs_of_a_campaign_on_ray_are_placed_on_ray(
  tmp_path, fake_trial, monkeypatch
):
  asked = []
  monkeypatch.setattr(cluster, "check", asked.append)
  found = campaign.Campaign(
    tmp_path / "c", 2, 1, ("sigkill",), engine="ray"
  ).run()
  config = process.read_config(tmp_path / "c" / "run-000" / "run")
  assert (config.engine, [c.engine for c in asked]) == ("ray", ["ray"])
  assert found["command"].endswith("--engine=ray")


def test_campaign_on_no_cluster_is_refused(tmp_path, monkeypatch):
  monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
  with pytest.raises(errors.UserError, match="no Ray cluster"):
    campaign.Campaign(tmp_path / "c", 2, 1, engine="ray")
  assert not (tmp_path / "c").exists()


def test_faults_that_did_not_fit_go_into_the_next_run(tmp_path, fake_trial):
  result = _run(tmp_path)
  assert [run["faults"] for run in result["runs"]] == [3, 3, 2]
  assert result["done"] == 8 == sum(result["by_kind"].values())
  assert result["passed"] and result["not_reached"] == 0
  assert campaign.table(result).endswith("passed")


def test_broken_run_fails_the_campaign_and_names_its_coordinates(
  tmp_path, fake_trial
):
  fake_trial.stuck_at = 4
  result = _run(tmp_path)
  assert not result["passed"] and result["runs_broken"] == 1
  assert result["done"] == 8  # the rest of the plan was done all the same
  (broken,) = [run for run in result["runs"] if run["broken"]]
  assert broken["broken"] == ["not recovered"]
  assert 4 in [line["serial"] for line in broken["coordinates"]]
  text = campaign.table(result)
  assert "--seed=1" in text and text.endswith("FAILED")


def test_books_that_do_not_balance_fail_the_campaign(tmp_path, fake_trial):
  fake_trial.skip = True
  result = _run(tmp_path)
  assert result["runs_broken"] == len(result["runs"])
  assert "were skipped" in result["runs"][0]["broken"][0]


def test_campaign_gives_up_when_runs_take_no_fault(tmp_path, fake_trial):
  fake_trial.capacity = 0
  result = _run(tmp_path)
  assert not result["passed"]
  assert (result["done"], result["not_reached"]) == (0, 8)


def test_kinds_that_cannot_be_done_are_skipped_with_the_reason(
  tmp_path, fake_trial, monkeypatch
):
  monkeypatch.setattr(
    campaign.store_faults, "may_mount", lambda path: "not permitted"
  )
  kinds = ("sigkill", "disk_full")
  result = campaign.Campaign(tmp_path / "c", 12, 0, kinds).run()
  assert list(result["skipped_kinds"]) == ["disk_full"]
  assert "not permitted" in result["skipped_kinds"]["disk_full"]
  assert result["done"] < 12 and set(result["by_kind"]) == {"sigkill"}
  assert "skipped disk_full" in campaign.table(result)


def test_campaign_that_did_no_fault_at_all_has_not_passed(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(
    campaign.store_faults, "may_mount", lambda path: "not permitted"
  )
  result = campaign.Campaign(tmp_path / "c", 2, 0, ("disk_full",)).run()
  assert (result["done"], result["passed"]) == (0, False)
  assert campaign.table(result).endswith("FAILED")


def test_configuration_is_valid_and_grows_with_the_faults():
  small, large = (
    config_lib.from_mapping(campaign.values(n)).total_tokens for n in (2, 20)
  )
  assert large > 4 * small


def test_directory_in_use_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(errors.UserError, match="directory of its own"):
    campaign.Campaign(tmp_path, 4, 0)


def test_command_says_by_its_exit_code_whether_it_passed(
  tmp_path, fake_trial, capsys
):
  flags = [f"--workdir={tmp_path / 'a'}", "--trials=2", "--json"]
  flags += ["--kinds=sigkill"]
  assert cli.main(["chaos", *flags]) == 0
  assert json.loads(capsys.readouterr().out)["done"] == 2
  fake_trial.stuck_at = 0
  assert cli.main(["chaos", f"--workdir={tmp_path / 'b'}", "--trials=2"]) == 1
  assert "FAILED" in capsys.readouterr().out
  flags = [f"--workdir={tmp_path / 'c'}", "--kinds=earthquake"]
  assert cli.main(["chaos", *flags]) == 2
  assert "earthquake" in capsys.readouterr().err
