"""Whole runs in virtual time, of a task whose every step is known."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from diloco import config as config_lib
from diloco import errors
from diloco import run as run_lib
from diloco.islands import inner_step
from diloco.report import liveness, summary
from diloco.snapshots import keys, records, store
from diloco.tape import reader
from diloco.tasks import registry, replicated
from diloco.virtual import fleet
from tests.islands import quadratic

KILLED = {"target": "island-1", "at_fraction": 0.3, "kind": "sigkill"}
POISONED = {"target": "island-0", "at_fraction": 0.6, "kind": "poison"}
DEPOSED = {"target": "syncer", "at_fraction": 0.5, "kind": "sigkill"}


def make_config(islands=3, speeds=(1.0, 0.6, 0.4), **fields):
  slices = [{"relative_speed": speeds[m]} for m in range(islands)]
  return config_lib.from_mapping(
    {
      "engine": "virtual",
      "total_tokens": 3000,
      "fleet": {"slices": slices, "pace_step_secs": 0.1, "jitter": 0.1},
      "sync": {"num_fragments": 2, "every": 4, "codec": "f32"},
      "programs": {"checkpoint_every_steps": 0, "final_eval_batches": 1},
    }
    | fields
  )


def run(config, folder):
  """Trains; returns the outcome and the store that is left."""
  task = quadratic.Task()
  if config.replicas > 1:
    task = replicated.Replicated(task, config.replicas)
  tree = inner_step.ParamTree(task, config.seed)
  plan = tree.plan(config.sync)
  outcome = fleet.Fleet(config, folder, task, plan, None).run()
  return outcome, store.SnapshotStore((folder / "snapshots").as_uri())


def record_of(folder):
  """All that a run has written of itself, by file."""
  files = [*folder.glob("tape/*"), *folder.glob("metrics/*")]
  return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize(
  "fields",
  [
    {"faults": [KILLED, DEPOSED, POISONED]},
    {"virtual": {"mtbi_secs": 4.0, "repair_secs": 1.0, "latency_secs": 0.01}},
    {
      "faults": [KILLED, DEPOSED],
      "sync": {
        "num_fragments": 2,
        "every": 4,
        "codec": "int4",
        "down_codec": "int4",
        "error_feedback": True,
      },
    },
    {
      "method": "eager",
      "total_tokens": 1000,
      "sync": {"num_fragments": 2, "every": 4, "codec": "f32"},
      "faults": [KILLED, DEPOSED],
    },
    {
      "method": "elastic_data_parallel",
      "total_tokens": 400,
      "sync": {"every": 4, "codec": "f32"},
      "faults": [KILLED | {"target": "island-0"}],
      "virtual": {
        "mtbi_secs": 1.0,
        "repair_secs": 0.5,
        "reconfigure_secs": 0.2,
      },
    },
  ],
  ids=["faults", "drawn", "codecs", "eager", "elastic"],
)
def test_same_seed_gives_the_same_run_and_every_token_has_a_fate(
  tmp_path, fields
):
  config = make_config(**fields)
  for name in "ab":
    outcome, _ = run(config, tmp_path / name)
    assert outcome.status == "finished"
  first = record_of(tmp_path / "a")
  assert first == record_of(tmp_path / "b")
  assert len(first) > 6  # an island had a second life
  found = summary.summarise(tmp_path / "a")
  assert found["tokens_unaccounted"] == 0 and not found["violations"]
  assert found["tokens_trained"] >= config.total_tokens
  other = dataclasses.replace(config, seed=1)
  run(other, tmp_path / "c")
  assert record_of(tmp_path / "c") != first


def test_sixty_four_islands_fit_and_share_what_is_compiled(
  tmp_path, monkeypatch
):
  compiled, compile_step = [], inner_step.compile_step

  def counted(*args):
    compiled.append(args)
    return compile_step(*args)

  monkeypatch.setattr(inner_step, "compile_step", counted)
  config = make_config(64, [1.0] * 64, total_tokens=64 * 12 * 10)
  outcome, _ = run(config, tmp_path)
  assert outcome.status == "finished" and len(compiled) == 1
  found = summary.summarise(tmp_path)
  assert found["tokens_unaccounted"] == 0 and not found["violations"]
  merges = reader.stream(tmp_path, only_role="syncer").events
  merged = {
    contribution["island"]
    for line in merges
    if line["event"] == "merged"
    for contribution in line["contributions"]
  }
  assert merged == set(range(64))


def test_steps_take_what_the_pace_says_and_wait_for_nobody(tmp_path):
  config = make_config(
    fleet={
      "slices": [{"relative_speed": s} for s in (1.0, 0.5)],
      "pace_step_secs": 0.1,
    }
  )
  run(config, tmp_path)
  gaps = {}
  for path in sorted(tmp_path.glob("metrics/*")):
    lines = map(json.loads, path.read_text().splitlines())
    gaps[path.stem] = {round(line["gap_secs"] or 0, 9) for line in lines} - {0}
  assert gaps == {"island-0": {0.1}, "island-1": {0.2}}


def test_one_island_that_sends_every_step_is_plain_training(tmp_path):
  config = make_config(
    1,
    total_tokens=100,
    sync={"num_fragments": 1, "every": 1, "overlap_steps": 1, "codec": "f32"},
  )
  outcome, snapshots = run(config, tmp_path)
  assert outcome.status == "finished"
  head = snapshots.read(keys.head_key(0), records.Head)
  learned, _ = quadratic.moved(0, 10)
  for name, start in (("a", 0.0), ("b", 1.0)):
    found = snapshots.arrays.read(f"{head.payload}/params", name)
    assert np.array_equal(found, np.full_like(found, start + learned))


def test_slow_link_delays_what_is_merged_and_no_step(tmp_path):
  waited, steps = {}, {}
  for name, secs in (("near", 0.0), ("far", 0.3)):
    config = make_config(
      virtual={"latency_secs": secs}, controller={"takeover_secs": 60.0}
    )
    run(config, tmp_path / name)
    stream = reader.stream(tmp_path / name, only_role="island-0")
    published = [e for e in stream.events if e["event"] == "published"]
    waited[name] = min(event["secs"] for event in published)
    log = tmp_path / name / "metrics" / "island-0.jsonl"
    lines = map(json.loads, log.read_text().splitlines())
    steps[name] = [line["gap_secs"] for line in lines][1:50]
  assert waited["near"] == 0 and waited["far"] >= 0.6
  assert steps["near"] == pytest.approx(steps["far"])


def test_trace_kills_when_it_says(tmp_path):
  trace = tmp_path / "deaths.csv"
  trace.write_text("secs,target,repair_secs\n3,island-2,2\n6,syncer,0.5\n")
  run(make_config(virtual={"trace": f"{trace}"}), tmp_path / "run")
  told = reader.stream(tmp_path / "run", only_role="controller").events
  found = [
    (round(e["wall_secs"], 3), e["event"])
    for e in told
    if e.get("island", 2) == 2
    and 0 < e["wall_secs"] < 7
    and e["event"].endswith(("died", "started"))
  ]
  assert found == [
    (3.0, "island_died"),
    (5.0, "island_started"),
    (6.0, "syncer_died"),
    (6.5, "syncer_started"),
  ]
  trace.write_text("secs,target\n3,island-3\n")
  with pytest.raises(errors.UserError, match="one of 3 islands"):
    run(make_config(virtual={"trace": f"{trace}"}), tmp_path / "other")


def test_slice_that_this_process_has_no_devices_for_is_refused(tmp_path):
  wide = f"{len(jax.devices()) + 1}"
  config = make_config(
    fleet={"slices": [{"topology": wide}], "pace_step_secs": 0.1}
  )
  with pytest.raises(errors.UserError, match="this process, which sees"):
    run(config, tmp_path)


@pytest.mark.parametrize(
  "fault", [{"target": "island-0", "kind": "sigstop"}, {"target": "standby"}]
)
def test_fault_that_virtual_time_does_not_have_is_refused(fault):
  with pytest.raises(errors.UserError, match=r"config\.faults\[0\]"):
    make_config(faults=[{"at_fraction": 0.5} | fault])


def test_virtual_time_needs_the_time_of_a_step():
  with pytest.raises(errors.UserError, match=r"fleet\.pace_step_secs"):
    config_lib.from_mapping({"engine": "virtual"})


def test_mistake_of_the_users_own_is_theirs_at_once(tmp_path, monkeypatch):
  class Task(quadratic.Task):
    def batches(self, split, **share):
      stream = super().batches(split, **share)
      return BadStream(100 * share["share"]) if split == "train" else stream

  seen = []

  class BadStream(quadratic.Stream):
    def __next__(self):
      seen.append(liveness.controller_alive(tmp_path / "run"))
      if self.position == 20:
        raise ZeroDivisionError("in my own stream")
      return super().__next__()

  monkeypatch.setattr(registry, "make_task", lambda *_: Task())
  config = make_config().to_dict()
  with pytest.raises(errors.UserError, match="in my own stream") as refused:
    run_lib.train(config, tmp_path / "run", quiet=True)
  assert any(seen) and not liveness.controller_alive(tmp_path / "run")
  (log,) = (tmp_path / "run" / "logs").glob("*")
  assert "test_virtual_fleet.py" in str(refused.value)
  assert "ZeroDivisionError: in my own stream" in log.read_text()
  with pytest.raises(errors.UserError, match="cannot go on"):
    run_lib.train(config, tmp_path / "run", quiet=True)
