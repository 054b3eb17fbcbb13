"""What every engine promises: one run of each, looked at from all sides."""

import numpy as np
import pytest

from diloco import errors
from diloco import run as run_lib
from diloco.report import listing, liveness
from diloco.tape import reader
from diloco.workbench import opened
from experiments.benchmarks import ray_cluster
from tests.islands import quadratic

# A process takes seconds to come back; the others must train on meanwhile.
PACES = {"process": 0.08, "inline": 0.02, "ray": 0.2, "virtual": 0.02}
FAULTS = [
  {"target": "island-1", "at_fraction": 0.1, "kind": "sigkill"},
  {"target": "syncer", "at_fraction": 0.3, "kind": "sigkill"},
  {"target": "island-0", "at_fraction": 0.5, "kind": "poison"},
]


def make_config(engine, **fields):
  return {
    "engine": engine,
    "total_tokens": 3000,
    "task": {"name": "tests.islands.quadratic:make"},
    "fleet": {
      "slices": [{"relative_speed": 1.0}, {"relative_speed": 0.6}],
      "pace_step_secs": PACES[engine],
    },
    "sync": {"num_fragments": 2, "every": 4, "codec": "f32"},
    "programs": {
      "window_steps": 4,
      "checkpoint_every_steps": 20,
      "final_eval_batches": 1,
      "cut_every_secs": 0.0,
    },
    # However busy the machine, all are there before the first step.
    "controller": {"restart_base_secs": 0.1, "gather_secs": 600.0},
  } | fields


class Made:
  """A run that was made, and what can be read of it."""

  def __init__(self, engine, folder):
    self.engine, self.dir = engine, folder / "run"
    self.config = make_config(engine, faults=FAULTS)
    self.result = run_lib.train(self.config, self.dir, quiet=True)
    self.facts = self.result.summary
    self.record = reader.read(self.dir, strict=True)

  def events(self, name, **fields):
    return [
      line
      for line in self.record.events
      if line["event"] == name and fields.items() <= line.items()
    ]


@pytest.fixture(scope="module")
def ray_nodes():
  with ray_cluster.running({"num_cpus": 6}):
    yield


@pytest.fixture
def engine(request):
  """Its name, with what it needs."""
  if request.param == "ray":
    request.getfixturevalue("ray_nodes")
  return request.param


@pytest.fixture(scope="module", params=PACES)
def made(request, tmp_path_factory):
  if request.param == "ray":
    request.getfixturevalue("ray_nodes")
  return Made(request.param, tmp_path_factory.mktemp(request.param))


def test_run_trains_its_budget_whoever_dies(made):
  assert made.result.status == "finished"
  assert made.facts["tokens_trained"] >= 3000
  assert made.facts["tokens_unaccounted"] == 0
  assert made.facts["violations"] == made.facts["problems"] == []
  assert not liveness.controller_alive(made.dir)


def test_every_fault_is_injected_once_and_told(made):
  # On a busy machine a role may be killed for its silence besides.
  found = [
    (f["target"], f["kind"]) for f in made.facts["faults"] if f["injected"]
  ]
  assert found == [(f["target"], f["kind"]) for f in FAULTS]
  died = made.events("island_died", island=1)
  assert [d["cause"] for d in died] == ["SIGKILL"]
  assert made.events("syncer_died", led=True, cause="SIGKILL")


def test_killed_island_comes_back_where_it_was(made):
  first, second = made.events("started", role="island-1")
  assert (first["incarnation"], second["incarnation"]) == (1, 2)
  assert second["step"] > first["step"] == 0
  later = made.events("published", role="island-1", incarnation=2)
  assert later and all(p["first_step"] >= second["step"] for p in later)


def test_another_syncer_leads_on(made):
  tokens = [lease["token"] for lease in made.events("lease_acquired")]
  assert len(tokens) > 1 and len(set(tokens)) == len(tokens)
  assert made.events("merged", token=max(tokens))


def test_poisoned_values_are_refused_and_mended(made):
  assert made.events("quarantined", island=0, reason="not_finite")
  assert made.events("resynced", role="island-0")


def test_result_can_be_taken_and_told(made):
  run = opened.Run(made.dir)
  assert run.state == "finished"
  assert all(np.isfinite(v).all() for v in run.values().params.values())
  last = run.tape("merged").iloc[-1]
  told = run.explain(int(last.fragment), int(last.version))
  assert f"version {last.version}" in told
  assert "finished" in made.result.report.read_text()
  (listed,) = listing.runs(made.dir.parent)
  assert listed["status"] == "finished"


def test_what_follows_the_run(made):
  more = made.config | {"total_tokens": 3001}
  if made.engine == "virtual":
    with pytest.raises(errors.UserError, match="cannot go on"):
      run_lib.train(more, made.dir, quiet=True)
    return
  before = made.facts["tokens_trained"]
  again = run_lib.train(more, made.dir, quiet=True)
  assert again.status == "finished"
  assert again.summary["tokens_trained"] >= before
  assert again.summary["tokens_unaccounted"] == 0
  restored = [
    line["restored_from"]
    for line in reader.read(made.dir).events
    if line["event"] == "started" and line["step"] > 100
  ]
  assert restored and all("checkpoint" in text for text in restored)


def mistaken(options):
  """A task whose stream fails, but not for who tries it before the run."""

  class Task(quadratic.Task):
    def batches(self, split, **share):
      stream = super().batches(split, **share)
      return Broken(1) if share["share"] == 1 else stream

  class Broken(quadratic.Stream):
    def __next__(self):
      raise ZeroDivisionError("in my own stream")

  return Task()


@pytest.mark.parametrize("engine", PACES, indirect=True)
def test_mistake_of_the_users_own_is_theirs(tmp_path, engine):
  task = {"name": f"{__name__}:mistaken"}
  config = make_config(engine, task=task)
  config["controller"]["standbys"] = 0
  with pytest.raises(errors.UserError, match="in my own stream") as refused:
    run_lib.train(config, tmp_path / "run", quiet=True)
  assert "ZeroDivisionError" in str(refused.value)
  assert "test_engines.py:" in str(refused.value)
  logs = (tmp_path / "run" / "logs").glob("*")
  assert any("ZeroDivisionError: in my" in log.read_text() for log in logs)


@pytest.mark.parametrize(
  ("method", "fragments"), [("diloco", 1), ("eager", 2), ("data_parallel", 1)]
)
def test_synchronous_methods_make_the_same_versions_in_any_time(
  tmp_path, method, fragments
):
  made = {}
  for engine in ("inline", "virtual"):
    config = make_config(engine, method=method, total_tokens=800)
    config["sync"] |= {"num_fragments": fragments}
    result = run_lib.train(config, tmp_path / engine, quiet=True)
    assert result.status == "finished"
    assert result.summary["tokens_unaccounted"] == 0
    made[engine] = {
      (line["fragment"], line["version"]): line["digest"]
      for line in reader.read(tmp_path / engine, strict=True).events
      # The last is of as many steps as were done until the end was heard of.
      if line["event"] == "merged" and line["version"] <= 8
    }
  assert len(made["inline"]) == 8 * fragments
  assert made["inline"] == made["virtual"]


def test_methods_train_with_real_processes(tmp_path):
  for method, sync, steps in (
    ("streaming", {}, {0: 4, 1: 4}),
    # H goes by speed.
    ("async_local_sgd", {"every": 8, "num_fragments": 1}, {0: 8, 1: 4}),
  ):
    config = make_config("process", method=method, total_tokens=500)
    config["sync"] |= sync
    config["outer"] = {"momentum": 0.5}
    result = run_lib.train(config, tmp_path / method, quiet=True)
    assert result.status == "finished"
    assert result.summary["tokens_unaccounted"] == 0
    found = {0: 0, 1: 0}
    for line in reader.read(tmp_path / method, strict=True).events:
      if line["event"] == "merged":
        for sent in line["contributions"]:
          done = sent["step"] - sent["first_step"]
          found[sent["island"]] = max(done, found[sent["island"]])
    assert found == steps
