"""The syncer's shell: taking over from a store that fails, and its loop."""

import contextlib
import dataclasses
import math
import queue
import threading
import time

import numpy as np
import pytest
from cut_builder import ISLANDS, PLAN, CutRun, lead, spoil

from diloco import config as config_lib
from diloco import config_changes, errors, workers
from diloco.snapshots import arrays, cuts, keys, operations, records
from diloco.syncer import grace, leadership, orders, round_merge
from diloco.syncer import syncer as syncer_lib
from diloco.tape import reader, recorder

_PATIENCE_SECS = 60.0


def _config(**overrides):
  config = config_lib.from_mapping({"controller": {"takeover_secs": 0.3}})
  sync = dataclasses.replace(config.sync, num_fragments=2, quorum=1)
  return dataclasses.replace(config, sync=sync, **overrides)


def perform(syncer, name, *args):
  """Lets a leader do one thing."""
  script = getattr(syncer._rounds, name)(*args)
  lead(syncer._rounds, syncer.execute, script)


def test_core_goes_by_the_runs_configuration():
  def settings(**sync):
    config = config_lib.RunConfig()
    config = dataclasses.replace(
      config, sync=dataclasses.replace(config.sync, **sync)
    )
    return syncer_lib.settings(config, 0.25)

  found = settings(num_fragments=3, quorum=2, max_staleness=5, suspend_after=6)
  assert (found.num_fragments, found.quorum.minimum) == (3, 2)
  assert (found.max_staleness, found.retry_secs) == (5, 0.25)
  assert found.suspension.after == 6 and not found.stale_opens
  assert settings(gate_factor=7.5).gate.factor == 7.5
  adaptive = settings(overlap_steps=4, grace_gamma=0.5).grace
  assert adaptive == grace.AdaptiveGrace(4, 0.5)
  assert settings(grace="0").grace == grace.FixedGrace(0.0)


class FailsOnce:
  """A store whose n-th operation since the lease was taken fails, once."""

  def __init__(self, works, error):
    self._works = works
    self._error = error
    self._leads = False
    self.left = 0

  def __call__(self, operation):
    point = isinstance(operation, operations.Point)
    if point or threading.current_thread().name == "lease":
      return self._works(operation)
    if self._leads:
      self.left -= 1
      if self.left == 0:
        raise self._error
    result = self._works(operation)
    if getattr(operation, "key", "") == keys.SYNCER_LEASE:
      self._leads |= isinstance(operation, operations.CompareAndSet)
    return result


@pytest.mark.parametrize(
  "error",
  [OSError("gone"), errors.CorruptSnapshotError("torn")],
  ids=["fails", "damaged"],
)
def test_standby_leads_whatever_single_operation_fails_as_it_takes_over(
  tmp_path, monkeypatch, error
):
  reached = True
  number = 0
  while reached:
    number += 1
    run = CutRun(tmp_path / str(number))
    run.perform(cuts.request(ISLANDS, 2))
    run.publish(0, 0, 0, 0, 8)
    fails = FailsOnce(run.store.execute, error)
    fails.left = number
    monkeypatch.setattr(run.store, "execute", fails)
    tape = recorder.Recorder(run.dir, "syncer", 1)
    syncer = syncer_lib.Syncer(run.store, _config(), tape, "test")
    assert syncer.take_over()
    assert syncer.token == 2  # the heads are at 1
    assert [h.token for h in run.heads()] == [2, 2]
    syncer.close()
    tape.close()
    reached = fails.left <= 0
  assert number > 10  # heads, cuts, payloads and what else there is


def test_standby_that_has_read_the_plan_leads_although_it_is_damaged(tmp_path):
  run = CutRun(tmp_path)
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  syncer = syncer_lib.Syncer(run.store, _config(), tape, "test")
  syncer.read_plan()
  run.store._kvs.write("plan", b"{").result()
  tries = iter(range(100))
  assert syncer.take_over(lambda: next(tries, None) is not None)
  syncer.close()
  tape.close()


def test_every_operation_of_a_leader_shows_that_it_gets_on(
  tmp_path, monkeypatch
):
  run, beats = CutRun(tmp_path), []
  monkeypatch.setattr(
    leadership.Leadership, "gets_on", lambda self: beats.append(1)
  )
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  syncer = syncer_lib.Syncer(run.store, _config(), tape, "test")
  assert syncer.take_over()
  assert len(beats) > 10
  beats.clear()
  payload = f"{run.head(0).payload}/params"
  syncer._store.arrays.open(payload, "a").read()
  syncer._store.arrays.write(
    "p", [arrays.Tensor.whole("a", np.zeros(4, np.float32))]
  )
  assert len(beats) == 3  # read; written: a description and a chunk
  syncer.close()
  tape.close()


def test_merge_that_fails_every_time_keeps_no_cut_waiting(tmp_path):
  config = _config()
  run = CutRun(tmp_path)
  run.store.delete_tree(run.head(0).payload)
  run.publish(0, 0, 0, 0, 8)
  run.store.write(
    keys.member_key("island-0"),
    records.Member("island-0", 1, 0, "n", step_secs=0.1, present=True),
  )
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  syncer = syncer_lib.Syncer(run.store, config, tape, "test")
  assert syncer.take_over()
  loop = threading.Thread(target=syncer.run)
  loop.start()
  try:
    deadline = time.monotonic() + _PATIENCE_SECS

    def wait_for(arrived):
      while not arrived():
        assert time.monotonic() < deadline
        time.sleep(0.05)

    def tries():
      tape.flush()
      found = reader.read(tmp_path).events
      return [e for e in found if e["event"] == "global_damaged"]

    wait_for(tries)
    asked = run.perform(cuts.request(ISLANDS, 2))
    heads = keys.cut_heads_key(asked.cut)
    wait_for(lambda: run.store.read(heads, records.CutHeads))
  finally:
    syncer.close()
    loop.join()
    tape.close()
  assert [h.version for h in run.heads()] == [0, 0]


# What a well-formed record can say that cannot be true.
IMPOSSIBLE = [
  {"plan_hash": "another"},
  {"fragment": 2},
  {"codec": "f16"},
  {"norms": []},
  {"norms": [1.0, 1.0]},
  {"chunks": []},
  {"chunks": [[4], [4]]},
  {"first_step": -1},
  {"first_step": 8},
  {"first_step": 9},
  {"c_tokens": 0},
  {"c_tokens": -1},
]


def test_record_that_cannot_be_true_is_rejected_and_others_are_merged(
  tmp_path,
):
  run = CutRun(tmp_path)
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  syncer = syncer_lib.Syncer(run.store, _config(), tape, "test")
  assert syncer.take_over()
  sound = dataclasses.replace(run.publish(0, 0, 0, 0, 8), norms=[2.0])
  run.store.write(keys.contribution_key(sound.key), sound)
  rejected = set()
  for island, lie in enumerate(IMPOSSIBLE, 1):
    wrong = dataclasses.replace(sound, island=island, **lie)
    run.store.write(keys.contribution_key(wrong.key), wrong)
    rejected.add(wrong.key)
  perform(syncer, "scan")
  perform(syncer, "handle", orders.Drain())
  syncer.close()
  tape.close()
  found = reader.read(tmp_path).events
  discarded = {
    e["key"]: e["reason"] for e in found if e["event"] == "discarded"
  }
  assert discarded == dict.fromkeys(rejected, "corrupt_record")
  for line in found:
    if line["event"] == "discarded":  # of the steps before nothing is known
      assert line["first_step"] == line["step"] > 0
  (merged,) = [e for e in found if e["event"] == "merged"]
  assert [c["key"] for c in merged["contributions"]] == [sound.key]
  assert run.waiting() == {}


@contextlib.contextmanager
def _leading(run):
  """A syncer that has taken over, and what it then has told by event."""
  tape = recorder.Recorder(run.dir, "syncer", 1)
  syncer = syncer_lib.Syncer(run.store, _config(), tape, "test")

  def told(name):
    tape.flush()
    return [e for e in reader.read(run.dir).events if e["event"] == name]

  assert syncer.take_over()
  try:
    yield syncer, told
  finally:
    syncer.close()
    tape.close()


def test_successor_tells_the_newest_merges_again_and_knows_their_cut(tmp_path):
  run = CutRun(tmp_path)
  sent = dataclasses.replace(run.publish(0, 0, 0, 0, 8, cut=3), norms=[2.0])
  run.store.write(keys.contribution_key(sent.key), sent)
  with _leading(run) as (syncer, told):
    perform(syncer, "scan")
    perform(syncer, "handle", orders.Drain())
    (before,) = told("merged")
  for tape in (tmp_path / "tape").iterdir():
    tape.unlink()  # its end, at least, may be lost
  with _leading(run) as (syncer, told):
    (again,) = told("merged")
    assert again["contributions"] == before["contributions"]
    assert (again["fragment"], again["version"]) == (0, 1)
    assert syncer._rounds.core.cut == 3
    assert syncer._rounds.core.versions == [1, 0]


class Link:
  """A controller's end of a channel, in memory."""

  def __init__(self, *messages):
    self.inbox = queue.Queue()
    for message in messages:
      self.inbox.put(message)
    self.sent, self.hello = [], {}

  def send(self, message):
    self.sent.append(message)

  def set_hello(self, **fields):
    self.hello |= fields

  def alone_secs(self):
    return 0.0


class HeldUp:
  """A merge that waits until it is let go, and a leader that goes on."""

  def __init__(self, run, monkeypatch):
    self._merge = round_merge.RoundMerger.merge
    self.begun, self.go_on = threading.Event(), threading.Event()
    self.told = threading.Event()  # of a round of fragment 1
    write = run.store.write

    def shown(key, record):
      write(key, record)
      if key == keys.BOARD and "1" in record.open_rounds:
        self.told.set()

    monkeypatch.setattr(run.store, "write", shown)
    monkeypatch.setattr(
      round_merge.RoundMerger, "merge", lambda *args: self.merge(*args)
    )
    publish(run, 0)

  def merge(self, merger, operation):
    self.begun.set()
    assert self.go_on.wait(_PATIENCE_SECS)
    return self._merge(merger, operation)


def publish(run, fragment):
  sent = run.publish(fragment, 0, 0, 0, 8)
  norms = [math.sqrt(t.size) for t in PLAN.fragments[fragment]]
  sent = dataclasses.replace(sent, norms=norms)
  run.store.write(keys.contribution_key(sent.key), sent)
  return sent


def test_what_arrives_during_a_merge_is_found_and_told_of(
  tmp_path, monkeypatch
):
  run = CutRun(tmp_path)
  held_up = HeldUp(run, monkeypatch)
  with _leading(run) as (syncer, told):
    loop = threading.Thread(target=syncer.run)
    loop.start()
    assert held_up.begun.wait(_PATIENCE_SECS)
    publish(run, 1)
    assert held_up.told.wait(_PATIENCE_SECS)
    assert [h.version for h in run.heads()] == [0, 0]
    assert [e["fragment"] for e in told("round_opened")] == [0, 1]
    # Told to stop, it lets the merge end, and leaves the round to another.
    syncer.stop()
    loop.join(_PATIENCE_SECS)
    assert not loop.is_alive()
    held_up.go_on.set()
  assert [h.version for h in run.heads()] == [0, 0]
  with _leading(run) as (syncer, _):
    perform(syncer, "scan")
    perform(syncer, "handle", orders.Drain())
    assert [h.version for h in run.heads()] == [1, 1]
  assert run.store.names("globals/0000") == [
    "000000000.s1.0.0",
    "000000001.s3.1",
  ]


def test_drain_is_answered_once_no_merge_is_under_way(tmp_path, monkeypatch):
  run = CutRun(tmp_path)
  held_up = HeldUp(run, monkeypatch)
  publish(run, 1)
  with _leading(run) as (syncer, told):
    turns = threading.Semaphore(0)
    over = syncer._rounds.over
    link = Link({"type": "program", "name": "drain", "seq": 7, "args": {}})

    def turn():
      turns.release()
      return over()

    monkeypatch.setattr(syncer._rounds, "over", turn)
    answered = threading.Event()
    send = link.send
    link.send = lambda message: (send(message), answered.set())
    loop = threading.Thread(target=syncer.run, args=(link,))
    loop.start()
    assert held_up.begun.wait(_PATIENCE_SECS)
    for _ in range(5):
      assert turns.acquire(timeout=_PATIENCE_SECS)
    assert not link.sent
    held_up.go_on.set()
    assert answered.wait(_PATIENCE_SECS)
    assert link.sent == [{"type": "done", "seq": 7, "result": {"idle": True}}]
    assert [e["fragment"] for e in told("merged")] == [0, 1]
    syncer.stop()
    loop.join(_PATIENCE_SECS)


def _fails_at_first(works, times=3):
  """What fails so often before it works."""
  failures = iter(range(times))

  def fails(*args):
    if next(failures, None) is not None:
      raise OSError("no store")
    return works(*args)

  return fails


def _drain(run, leads=lambda syncer: None):
  """Has a leader drain, until it answers; gives the answer."""
  link = Link({"type": "program", "name": "drain", "seq": 7, "args": {}})
  with _leading(run) as (syncer, _):
    leads(syncer)
    link.send = lambda message: (link.sent.append(message), syncer.stop())
    assert syncer.run(link) == "stopped"
  (answer,) = link.sent
  assert answer["seq"] == 7
  assert link.hello == {"draining": True}  # who comes next learns of it
  return answer["result"]


def test_drain_is_answered_once_the_store_was_looked_at(tmp_path, monkeypatch):
  run = CutRun(tmp_path)
  publish(run, 0)

  def fail(syncer):
    works, looks = syncer.execute, operations.Names("contributions")
    fails = _fails_at_first(works)
    monkeypatch.setattr(
      syncer, "execute", lambda o: (fails if o == looks else works)(o)
    )

  assert _drain(run, fail) == {"idle": True}
  assert [h.version for h in run.heads()] == [1, 0]


def test_second_drain_waits_for_what_came_after_the_first(
  tmp_path, monkeypatch
):
  run = CutRun(tmp_path)
  publish(run, 0)
  drains = [
    {"type": "program", "name": "drain", "seq": seq, "args": {}}
    for seq in (7, 8)
  ]
  link, versions = Link(drains[0]), []
  with _leading(run) as (syncer, _):
    works, looks = syncer.execute, operations.Names("contributions")
    fails = _fails_at_first(works)

    def execute(operation):
      does = fails if versions and operation == looks else works
      return does(operation)

    def send(message):
      versions.append([h.version for h in run.heads()])
      if message["seq"] == 8:
        syncer.stop()
        return
      publish(run, 1)
      link.inbox.put(drains[1])

    monkeypatch.setattr(syncer, "execute", execute)

    link.send = send
    assert syncer.run(link) == "stopped"
  assert versions == [[1, 0], [1, 1]]


def test_leader_merges_by_the_learning_rate_that_it_was_told_last(tmp_path):
  run = CutRun(tmp_path)
  with _leading(run) as (syncer, told):
    for fragment, rate in enumerate((0.25, 0.125)):
      live = config_changes.live(_config())
      syncer.configure(live | {"outer.learning_rate": rate})
      publish(run, fragment)
      perform(syncer, "scan")
      perform(syncer, "handle", orders.Drain())
      assert [e["learning_rate"] for e in told("merged")][fragment:] == [rate]


@pytest.mark.parametrize("trouble", ["merge fails", "head is spoiled"])
def test_drain_is_answered_once_what_kept_a_round_from_closing_is_over(
  tmp_path, monkeypatch, trouble
):
  run = CutRun(tmp_path)
  publish(run, 0)
  merge = round_merge.RoundMerger.merge
  spoilt = iter([keys.head_key(0)])

  def spoils(*args):
    for key in spoilt:
      spoil(run, key)
    return merge(*args)

  does = spoils if trouble == "head is spoiled" else _fails_at_first(merge)
  monkeypatch.setattr(round_merge.RoundMerger, "merge", lambda *a: does(*a))
  assert _drain(run) == {"idle": True}
  assert [h.version for h in run.heads()] == [1, 0]


def test_drain_waits_for_no_fragment_that_stands_still(tmp_path):
  run = CutRun(tmp_path)
  for fragment in (0, 1):
    publish(run, fragment)
  run.store.delete_tree(run.head(0).payload)
  assert _drain(run) == {"idle": False}
  assert [h.version for h in run.heads()] == [0, 1]


def test_islands_that_come_and_go_are_told_of_once(tmp_path):
  run = CutRun(tmp_path)

  def beat(island, beat):
    member = records.Member(
      f"island-{island}", 1, beat, "n", step_secs=0.1, present=True
    )
    run.store.write(keys.member_key(member.role), member)

  with _leading(run) as (syncer, told):
    beat(0, 1)
    beat(1, 1)
    for now in (0.0, 0.0):
      perform(syncer, "look_at_members", now)
    beat(1, 2)
    for _ in range(2):
      perform(syncer, "look_at_members", 1000.0)
    assert [e["island"] for e in told("member_joined")] == [0, 1]
    assert [e["island"] for e in told("member_lost")] == [0]
    beat(0, 2)
    perform(syncer, "look_at_members", 1000.0)
    assert [e["island"] for e in told("member_joined")] == [0, 1, 0]


def test_lease_is_renewed_by_a_thread_of_its_own(tmp_path, monkeypatch):
  run, renewed = CutRun(tmp_path), threading.Semaphore(0)
  execute = run.store.execute

  def watch(operation):
    result = execute(operation)
    if (
      threading.current_thread().name == "lease"
      and isinstance(operation, operations.CompareAndSet)
      and operation.key == keys.SYNCER_LEASE
    ):
      renewed.release()
    return result

  monkeypatch.setattr(run.store, "execute", watch)
  with _leading(run):
    for _ in range(3):
      assert renewed.acquire(timeout=_PATIENCE_SECS)
  held = run.store.read(keys.SYNCER_LEASE, records.Lease)
  assert held.owner == "" and held.beat > 3


def test_leader_whose_renewals_have_ended_leads_no_more(tmp_path, monkeypatch):
  run = CutRun(tmp_path)
  execute = run.store.execute

  def fails(operation):
    if threading.current_thread().name == "lease":
      raise KeyError("beat")
    return execute(operation)

  monkeypatch.setattr(run.store, "execute", fails)
  with _leading(run) as (syncer, _):
    syncer._renewals.join()
    with pytest.raises(workers.WorkerError, match="lease thread has ended"):
      syncer.check()


def test_damaged_lease_does_not_keep_a_leader_from_leaving(tmp_path):
  run = CutRun(tmp_path)
  with _leading(run) as (syncer, _):
    syncer._renewals.close()
    spoil(run, keys.SYNCER_LEASE)
