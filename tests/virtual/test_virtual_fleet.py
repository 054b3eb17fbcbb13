"""Whole runs in virtual time, of a task whose every step is known."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco import config as config_lib
from diloco import errors, timing
from diloco import run as run_lib
from diloco.islands import checkpoints, inner_step
from diloco.report import liveness, status, summary
from diloco.snapshots import arrays, keys, operations, records, store
from diloco.tape import reader
from diloco.tasks import registry, replicated
from diloco.virtual import fleet, memory, scheduler
from tests.islands import quadratic

KILLED = {"target": "island-1", "at_fraction": 0.3, "kind": "sigkill"}
POISONED = {"target": "island-0", "at_fraction": 0.6, "kind": "poison"}
DEPOSED = {"target": "syncer", "at_fraction": 0.5, "kind": "sigkill"}


def make_config(islands=3, speeds=(1.0, 0.6, 0.4), **fields):
  slices = [{"relative_speed": speeds[m]} for m in range(islands)]
  return config_lib.from_mapping(
    {
      "engine": "virtual",
      "total_tokens": 1500,
      "fleet": {"slices": slices, "pace_step_secs": 0.1, "jitter": 0.1},
      "sync": {"num_fragments": 2, "every": 4, "codec": "f32"},
      "programs": {"checkpoint_every_steps": 0, "final_eval_batches": 1},
    }
    | fields
  )


def run(config, folder, watch=lambda: None, task=None):
  """Trains; returns the outcome and the store that is left."""
  task = task or quadratic.Task()
  if config.replicas > 1:
    task = replicated.Replicated(task, config.replicas)
  tree = inner_step.ParamTree(task, config.seed)
  plan = tree.plan(config.sync)
  outcome = fleet.Fleet(config, folder, task, plan, None, watch).run()
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


def test_who_waits_for_others_does_no_step_meanwhile(tmp_path):
  config = make_config(
    2,
    speeds=(1.0, 1.0),
    method="diloco",
    fleet={"slices": [{}, {}], "pace_step_secs": 0.1},
    sync={"every": 2, "overlap_steps": 1, "codec": "f32"},
    virtual={"latency_secs": 0.03},
  )
  run(config, tmp_path)
  log = (tmp_path / "metrics" / "island-0.jsonl").read_text()
  lines = [json.loads(line) for line in log.splitlines()]
  ended = [line["wall_secs"] for line in lines]
  waited = [line.get("waited_secs", 0.0) for line in lines]
  assert len(lines) > 50
  for number in range(2, len(lines) - 1, 2):  # a round is before each of them
    assert waited[number] >= 0.06  # there and back
    took = ended[number] - ended[number - 2]
    assert took == pytest.approx(0.2 + waited[number])
  assert not any(waited[1::2])
  lost = summary.summarise(tmp_path)["chip_secs"]["lost"]
  assert lost["waiting"] == pytest.approx(2 * sum(waited), rel=0.05)


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
  assert waited["near"] == 0
  assert waited["far"] == pytest.approx(0.6)  # its tensors, then its record
  assert steps["near"] == pytest.approx(steps["far"])


class Broken(quadratic.Task):
  """Its loss is no number."""

  def loss(self, params, batch):
    loss, metrics = super().loss(params, batch)
    return loss * jnp.nan, metrics


def test_who_waits_for_others_does_not_wait_for_a_syncer_that_refuses_it(
  tmp_path,
):
  config = make_config(
    method="diloco", total_tokens=1200, sync={"every": 4, "codec": "f32"}
  )
  outcome, _ = run(config, tmp_path, task=Broken())
  assert outcome.status == "failed" and "nothing was merged" in outcome.reason
  (ended,) = secs_of(tmp_path, "run_finished")
  # 40 steps of 0.1 s each; an answer is waited for an hour.
  assert ended < 100
  found = summary.summarise(tmp_path)
  assert found["tokens_merged"] == 0 and not found["violations"]
  assert "not_finite: their updates held NaN" in found["warnings"][0]


def test_trace_kills_when_it_says(tmp_path):
  trace = tmp_path / "deaths.csv"
  trace.write_text("secs,target,repair_secs\n3,2,2\n6,syncer,0.5\n")
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


def test_job_lives_only_while_all_of_its_slices_do(tmp_path):
  trace = tmp_path / "deaths.csv"
  # The second dies while the first is away, the third as all are back.
  trace.write_text("secs,target,repair_secs\n3,0,2\n4,1,4\n9,2,0.5\n9.2,0,1\n")
  for method, deaths, starts in (
    ("data_parallel", [3, 9], [0, 8, 10.2]),
    ("elastic_data_parallel", [], [0]),
  ):
    config = make_config(
      method=method,
      total_tokens=900,
      sync={"every": 4, "codec": "f32"},
      virtual={"trace": f"{trace}"},
    )
    run(config, tmp_path / method)
    assert secs_of(tmp_path / method, "island_died") == pytest.approx(deaths)
    begun = secs_of(tmp_path / method, "island_started")[: len(starts)]
    assert begun == pytest.approx(starts), method


def test_who_comes_back_when_the_tokens_are_trained_does_no_more(tmp_path):
  trace = tmp_path / "deaths.csv"
  slow = {"latency_secs": 0.3}
  run(make_config(virtual=slow, total_tokens=600), tmp_path / "plain")
  (spent,) = secs_of(tmp_path / "plain", "run_stopping")
  trace.write_text(f"secs,target,repair_secs\n{spent - 2},2,1.5\n")
  config = make_config(virtual=slow | {"trace": f"{trace}"}, total_tokens=600)
  run(config, tmp_path / "late")
  (stopping,) = secs_of(tmp_path / "late", "run_stopping")
  ready = secs_of(tmp_path / "late", "island_ready")
  assert len(ready) == 4 and ready[-1] > stopping, "it must join after the end"
  log = tmp_path / "late" / "metrics" / "island-2.jsonl"
  steps = [json.loads(line) for line in log.read_text().splitlines()]
  assert all(line["wall_secs"] < stopping for line in steps), steps[-1]


def test_killed_lives_leave_nothing_open(tmp_path, monkeypatch):
  opened, closed, make = [], [], checkpoints.checkpointer

  def counted():
    writer = make()
    opened.append(writer)
    close = writer.close
    writer.close = lambda: (closed.append(writer), close())
    return writer

  monkeypatch.setattr(checkpoints, "checkpointer", counted)
  run(make_config(faults=[KILLED], total_tokens=600), tmp_path)
  assert len(opened) == 4 and set(map(id, opened)) == set(map(id, closed))


def test_slice_that_this_process_has_no_devices_for_is_refused(tmp_path):
  wide = f"{len(jax.devices()) + 1}"
  config = make_config(
    fleet={"slices": [{"topology": wide}], "pace_step_secs": 0.1}
  )
  with pytest.raises(errors.UserError, match="this process, which sees"):
    run(config, tmp_path)


@pytest.mark.parametrize(
  ("fields", "trace", "told"),
  [
    ({}, "secs,target\n3,island-3\n", "config.virtual.trace.*3 islands"),
    ({}, "secs\n3\n", r"config\.virtual\.trace.*its header is secs"),
    ({}, None, r"config\.virtual\.trace.*No such file"),
    ({"controller": {"takeover_secs": 1.0}}, "secs,target", "a round trip"),
  ],
)
def test_what_virtual_time_cannot_have_is_refused_before_anything(
  tmp_path, monkeypatch, fields, trace, told
):
  monkeypatch.setattr(registry, "make_task", lambda *_: quadratic.Task())
  path = tmp_path / "trace.csv"
  if trace is not None:
    path.write_text(trace)
  virtual = {"trace": str(path), "latency_secs": 0.3}
  config = make_config(**{"virtual": virtual} | fields)
  with pytest.raises(errors.UserError, match=told):
    run_lib.train(config.to_dict(), tmp_path / "run", quiet=True)
  assert not (tmp_path / "run").exists()


def secs_of(folder, kind):
  """When the controller told of such an event."""
  told = reader.stream(folder, only_role="controller").events
  return [event["wall_secs"] for event in told if event["event"] == kind]


def test_syncer_is_not_struck_once_the_budget_is_spent(tmp_path):
  slow = {"latency_secs": 0.3}
  run(make_config(virtual=slow, total_tokens=300), tmp_path / "plain")
  (began,) = secs_of(tmp_path / "plain", "run_stopping")
  (ended,) = secs_of(tmp_path / "plain", "run_finished")
  trace = tmp_path / "trace.csv"
  strikes = [f"{began + (ended - began) * n / 4},syncer,5" for n in (1, 2, 3)]
  trace.write_text("\n".join(["secs,target,repair_secs", *strikes]))
  config = make_config(virtual=slow | {"trace": str(trace)}, total_tokens=300)
  outcome, _ = run(config, tmp_path / "struck")
  assert outcome.status == "finished"
  assert secs_of(tmp_path / "struck", "run_finished") == [ended]


def test_run_that_is_interrupted_is_told_as_killed(tmp_path):
  turns = itertools.count()

  def interrupt():
    if next(turns) == 50:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run(make_config(), tmp_path, interrupt)
  assert status.status(tmp_path)["status"] == "killed"


def test_store_that_cannot_be_kept_fails_the_run_and_leaves_its_tape(
  tmp_path, monkeypatch
):
  def full(*_):
    raise errors.StoreError("no space left [device]")

  monkeypatch.setattr(memory.MemoryStore, "keep", full)
  outcome, _ = run(make_config(total_tokens=300), tmp_path)
  assert outcome.status == "failed" and "no space left)" in outcome.reason
  assert summary.summarise(tmp_path)["reason"] == outcome.reason


def test_drain_takes_as_long_as_the_link_needs(tmp_path):
  config = make_config(
    total_tokens=600,
    virtual={"latency_secs": 20.0},
  )
  outcome, _ = run(config, tmp_path)
  found = summary.summarise(tmp_path)
  assert outcome.status == "finished" and found["tokens_pending"] == 0
  # All is published; of what overlaps what is merged, the syncer says so.
  assert set(found["tokens_discarded"]) <= {"overlaps_merged"}


def test_fault_is_told_of_if_it_happens_and_waits_for_its_target(tmp_path):
  late = [fault | {"at_fraction": 1.0} for fault in (KILLED, DEPOSED)]
  run(make_config(faults=[KILLED, DEPOSED] * 2 + late), tmp_path)
  told = secs_of(tmp_path, "fault_injected")
  deaths = [
    *secs_of(tmp_path, "island_died"),
    *secs_of(tmp_path, "syncer_died"),
  ]
  assert len(set(told)) == 4 and told == sorted(deaths)


@pytest.mark.parametrize("bytes_per_sec", [0.0, 100.0])
def test_link_takes_its_time_for_the_bytes_that_move(bytes_per_sec):
  time, held = scheduler.Scheduler(), memory.MemoryStore()
  whole, packed = np.zeros(60, np.float32), np.zeros(30, np.uint8)
  tensors = [arrays.Tensor.whole("a", whole), arrays.Tensor.whole("b", packed)]
  took = []

  def execute(operation):
    if isinstance(operation, operations.WritePayload):
      return held.arrays.write(operation.prefix, operation.content)
    if isinstance(operation, operations.ReadState):
      return held.arrays.read("p", "b")
    return held.execute(operation)

  def script():
    for operation in (
      operations.WritePayload("p", tensors),
      operations.ReadState(None),
      operations.Names("p"),
      operations.Point("before_tape"),  # where one may die; it is no trip
    ):
      began = time.now
      yield operation
      took.append(time.now - began)

  link = scheduler.Link(0.5, bytes_per_sec, lambda: held.tree.moved)
  scheduler.Process(time, link).loop("any", script(), execute).start()
  time.run(lambda: len(took) == 4, 100.0)
  moved = [2.7, 0.3, 0.0] if bytes_per_sec else [0.0] * 3
  assert took == pytest.approx([*(0.5 + secs for secs in moved), 0.0])


def test_timeouts_follow_the_link(tmp_path):
  config = make_config(virtual={"latency_secs": 0.3}, total_tokens=100)
  _, snapshots = run(config, tmp_path)
  times = snapshots.read(timing.KEY, timing.Timing)
  assert times.round_trip_secs == 0.6
  assert times.heartbeat_secs >= 4 * times.round_trip_secs


@pytest.mark.parametrize(
  "fault", [{"target": "island-0", "kind": "sigstop"}, {"target": "standby"}]
)
def test_fault_that_virtual_time_does_not_have_is_refused(fault):
  with pytest.raises(errors.UserError, match=r"config\.faults\[0\]"):
    make_config(faults=[{"at_fraction": 0.5} | fault])


def test_virtual_time_needs_the_time_of_a_step():
  with pytest.raises(errors.UserError, match=r"fleet\.pace_step_secs"):
    config_lib.from_mapping({"engine": "virtual"})


@pytest.mark.parametrize(
  ("field", "value"), [("mtbi_secs", 5.0), ("trace", "deaths.csv")]
)
@pytest.mark.parametrize("engine", ["process", "inline"])
def test_deaths_that_would_not_happen_are_refused(engine, field, value):
  with pytest.raises(errors.UserError, match=f"config.virtual.{field} = "):
    make_config(engine=engine, virtual={field: value})


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
