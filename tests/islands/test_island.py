"""Whole islands against a real syncer and a real store, in one process."""

import queue
import threading
import time
import types

import jax
import numpy as np
import pytest
from island_builder import make_config, make_island, running_syncer
from observing import events, until

from diloco import errors, process
from diloco.islands import hands, recovery, runner
from diloco.islands import island as island_lib
from diloco.snapshots import checkpoint, keys, operations, records, store
from diloco.tape import ledger, reader


def _heads(snapshots, config):
  return [
    snapshots.read(keys.head_key(p), records.Head)
    for p in range(config.sync.num_fragments)
  ]


def _settle(island, config, run_dir):
  """Lets an island adopt whatever the heads hold now."""
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  core = island._exchange.core

  def adopted():
    island.look()
    heads = _heads(snapshots, config)
    return [p.base for p in core.positions] == [h.version for h in heads]

  until(adopted)


def test_sharded_and_single_device_islands_adopt_bit_equal_values(
  tmp_path, run_dir
):
  config = make_config(
    tmp_path, slices=("2x2", "1"), optimizer="adamw", codec="f32"
  )
  sharded = make_island(config, run_dir, island=0)
  single = make_island(config, run_dir, island=1)
  spread = [
    x
    for x in sharded.learner.state.params.values()
    if len(x.sharding.device_set) == 4
  ]
  assert any(not x.sharding.is_fully_replicated for x in spread)
  with running_syncer(config, run_dir) as syncer:
    for _ in range(4):
      sharded.train(4)
      single.train(3)
      time.sleep(0.1)
    sharded.drain(60.0)
    single.drain(60.0)
    syncer.drain()
    snapshots = store.SnapshotStore(process.store_url(run_dir))
    until(lambda: not snapshots.keys("contributions"))
    _settle(sharded, config, run_dir)
    _settle(single, config, run_dir)
    merged = events(run_dir, "merged")
    together = [
      m for m in merged if {c["island"] for c in m["contributions"]} == {0, 1}
    ]
    assert together, "no round had both islands"
    for name, value in single.learner.state.params.items():
      np.testing.assert_array_equal(
        np.asarray(sharded.learner.state.params[name]), np.asarray(value), name
      )
      assert sharded.learner.state.params[
        name
      ].sharding == sharded.learner.placement.param(name, value.shape)
    sharded.close("test")
    single.close("test")
  assert ledger.compute(reader.read(run_dir), 4).balanced


def test_global_parameters_learn_and_every_token_has_a_fate(tmp_path, run_dir):
  config = make_config(tmp_path)
  island = make_island(config, run_dir)
  before = island.evaluate("global", 2)["loss"]
  with running_syncer(config, run_dir):
    for _ in range(10):
      island.train(4)
      time.sleep(0.02)
    island.drain(60.0)
    snapshots = store.SnapshotStore(process.store_url(run_dir))
    until(lambda: not snapshots.keys("contributions"))
    after = island.evaluate("global", 2)
    island.close("test")
  assert after["loss"] < before - 0.5
  assert after["version"] >= 1
  book = ledger.compute(reader.read(run_dir), 4)
  assert book.balanced and not book.violations
  assert book.tokens().trained == 40 * 4 * 32


def test_island_trains_on_without_a_syncer_and_loses_nothing(tmp_path, run_dir):
  config = make_config(tmp_path, adoption="carry")
  island = make_island(config, run_dir)
  island.train(20)
  assert not events(run_dir, "merged")
  with running_syncer(config, run_dir):
    until(lambda: len(events(run_dir, "merged")) >= 4)
    island.train(1)
    island.drain(60.0)
    snapshots = store.SnapshotStore(process.store_url(run_dir))
    until(lambda: not snapshots.keys("contributions"))
    island.close("test")
  tokens = ledger.compute(reader.read(run_dir), 4).tokens()
  assert tokens.merged == tokens.trained == 21 * 4 * 32


def test_drain_in_an_outage_publishes_what_comes_after_an_answer(
  tmp_path, run_dir, monkeypatch
):
  island = make_island(
    config := make_config(tmp_path, adoption="carry"), run_dir
  )
  exchange, outage, now = island._exchange, threading.Event(), [0.0]
  fetch, publish_all = exchange._adopter._fetcher.execute, exchange.publish_all

  def fail(operation):
    if outage.is_set() and isinstance(operation, operations.ReadPayload):
      raise OSError("no store")
    return fetch(operation)

  def heal():
    publish_all()
    outage.clear()

  def clock():
    now[0] += 1.0 if outage.is_set() else 1e-3
    return now[0]

  monkeypatch.setattr(exchange._adopter._fetcher, "execute", fail)
  monkeypatch.setattr(exchange, "publish_all", heal)
  monkeypatch.setattr(island, "_clock", clock)
  outage.set()
  with running_syncer(config, run_dir):

    def is_overtaken():
      island.train(1)
      return exchange.core.overtaken

    until(is_overtaken)
    island.train(1)
    assert island.drain(600.0)["flushed"]
    snapshots = store.SnapshotStore(process.store_url(run_dir))
    until(lambda: not snapshots.keys("contributions"))
    island.close("test")
  # What is discarded was published anew before its answer was known.
  assert not ledger.compute(reader.read(run_dir), 4).tokens().pending


def test_whatever_the_main_thread_does_moves_its_progress(tmp_path, run_dir):
  island = make_island(make_config(tmp_path), run_dir)

  def moves(work):
    before, _ = island.progress.standing
    work()
    count, extra_secs = island.progress.standing
    assert extra_secs == 0.0  # nothing of a wait is left over
    return count - before

  assert moves(lambda: island.train(5)) - moves(lambda: island.train(3)) >= 2
  local = [moves(lambda n=n: island.evaluate("local", n)) for n in (1, 3)]
  assert local[1] - local[0] >= 2
  assert moves(lambda: island.drain(1.0)) >= 1
  assert moves(lambda: island.checkpoint(wait=True)) >= 1
  island.close("test")


class Channel:
  """A controller's, in the place of one that has nothing to say."""

  def __init__(self):
    self.inbox = queue.Queue()
    self.sent = []
    self.send = self.sent.append

  def alone_secs(self):
    return 0.0


def test_island_that_has_nothing_to_do_moves_its_progress_too(
  tmp_path, run_dir
):
  config = make_config(tmp_path)
  island = make_island(config, run_dir)
  channel = Channel()
  programs = runner.ProgramRunner(island, channel)
  thread = threading.Thread(target=lambda: island.perform(programs.running()))
  thread.start()
  try:
    until(lambda: island.progress.standing[0] > 3)
  finally:
    stop = {"type": "program", "seq": 1, "name": "stop", "args": {}}
    channel.inbox.put(stop)
    thread.join()
  assert [message["seq"] for message in channel.sent] == [1]
  island.close("test")


def test_other_threads_see_how_long_a_wait_may_take(
  tmp_path, run_dir, monkeypatch
):
  island = make_island(make_config(tmp_path), run_dir)
  island.train(2)
  assert island._member(2).present
  told = []

  def look(*_):
    told.append(island.progress.standing[1])
    return True

  monkeypatch.setattr(island._exchange, "flush", look)
  monkeypatch.setattr(island._exchange, "wait_saved", look)
  pauses = []  # in the log of steps: what is waited for is no slow step
  monkeypatch.setattr(island._log, "pause", lambda: pauses.append(len(told)))
  island.drain(7.0)
  assert not island._member(2).present  # no round waits for it any more
  island.checkpoint(wait=False)
  island.checkpoint(wait=True)
  assert pauses == [0, 1]
  assert 0.0 < told[0] <= 7.0
  assert told[1] == island.times.drain_secs
  monkeypatch.undo()
  island.close("test")


def test_island_with_a_saved_state_begins_no_run_anew(tmp_path, run_dir):
  folder = checkpoint.directory(run_dir, 0)
  path = checkpoint.path_of(folder, 8, 1, 1)
  path.mkdir(parents=True)
  (path / checkpoint.MARKER).touch()
  with pytest.raises(errors.CorruptSnapshotError, match="is lost"):
    make_island(make_config(tmp_path), run_dir, incarnation=2)


def test_island_that_starts_waits_for_a_store_that_fails(
  tmp_path, run_dir, monkeypatch
):
  class JoinedError(Exception):
    pass

  def recover(*_):
    raise JoinedError

  def failing_once(name):
    plain, failed = getattr(store.SnapshotStore, name), []

    def call(*args):
      if not failed:
        failed.append(name)
        raise OSError("no route to the store")
      return plain(*args)

    monkeypatch.setattr(store.SnapshotStore, name, call)
    return failed

  waits = []
  clock = types.SimpleNamespace(sleep=waits.append)
  monkeypatch.setattr(island_lib, "time", clock)
  monkeypatch.setattr(recovery.Recovery, "recovering", recover)
  names = ("write_plan", "read_for_update", "compare_and_set")
  failed = [failing_once(name) for name in names]
  config = make_config(tmp_path)
  with pytest.raises(JoinedError):
    make_island(config, run_dir)
  assert all(failed) and all(waits)
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  assert [head.version for head in _heads(snapshots, config)] == [0] * 4


def test_another_fragment_plan_is_refused(tmp_path, run_dir):
  config = make_config(tmp_path)
  make_island(config, run_dir).close("test")
  other = make_config(tmp_path, num_fragments=3)
  with pytest.raises(errors.UserError, match="fragment plan"):
    make_island(other, run_dir, incarnation=2)


@pytest.mark.parametrize("adoption", ["overwrite", "blend", "carry"])
def test_nothing_is_compiled_once_an_island_has_joined(
  tmp_path, run_dir, adoption
):
  config = make_config(tmp_path, adoption=adoption)
  island = make_island(config, run_dir, alone=True)

  def adopted_often():
    island.train(2)
    return len(events(run_dir, "adopted")) > 4

  with running_syncer(config, run_dir):
    with jax.log_compiles(), _NoCompilation():
      until(adopted_often, secs=60.0)
      assert island._exchange.wait_saved(island._exchange.save(), 60.0)
    island.close("test")


class _NoCompilation:
  """Fails if JAX compiles anything inside."""

  def __enter__(self):
    import logging

    self._records = []
    self._handler = logging.Handler()
    self._handler.emit = self._records.append
    self._logger = logging.getLogger("jax")
    self._logger.addHandler(self._handler)

  def __exit__(self, *_):
    self._logger.removeHandler(self._handler)
    compiled = [
      r.getMessage() for r in self._records if "Compiling" in r.getMessage()
    ]
    assert not compiled, compiled


def test_island_that_waits_does_no_step_before_the_answer(tmp_path, run_dir):
  config = make_config(tmp_path, num_fragments=1, quorum=1, wait_secs=60.0)
  island = make_island(config, run_dir)
  with running_syncer(config, run_dir):
    island.train(12)
    assert not island._exchange.core.in_flight
  island.close("test")
  adopted = events(run_dir, "adopted")
  assert [(e["step"], e["version"]) for e in adopted] == [
    *((4, 1), (8, 2), (12, 3))
  ]
  for event in adopted:  # nothing was learned meanwhile that could be lost
    assert event["lost_from_step"] == event["lost_to_step"] == event["step"]


def test_island_whose_wait_is_over_or_interrupted_goes_on(
  tmp_path, run_dir, caplog
):
  config = make_config(tmp_path, num_fragments=1, quorum=1, wait_secs=0.1)
  island = make_island(config, run_dir)
  assert island.train(5)["step"] == 5  # nobody answers
  assert [r.message for r in caplog.records if "no_answer" in r.message] == [
    "no_answer step=4"
  ]
  island._exchange.core._wait_secs = 1e6
  asked = iter([False, False, True])  # after steps 6, 7 and 8
  island.train(5, lambda: next(asked, True))
  assert island.step == 8
  # Asked something else, it waits for the same answer before its next step.
  assert island.train(5, lambda: True)["step"] == 8
  island.close("test")


@pytest.mark.parametrize("paced", [True, False])
def test_paced_steps_keep_their_slots_and_make_up_for_none(paced):
  now, did, pauses = [0.0], [], []
  waits = iter([0.0, 0.0, 0.25, 0.0, 0.0])  # before the first step, after each

  def wait_for_answers(interrupted):
    yield from ()
    secs = next(waits)
    now[0] += secs
    return secs

  island = types.SimpleNamespace(
    step=0,
    _present=False,
    _clock=lambda: now[0],
    _wait_for_answers=wait_for_answers,
    _do_step=None,
    _exchange=types.SimpleNamespace(
      core=types.SimpleNamespace(holds=lambda now: False),
      between_steps=lambda: did.append("exchange"),
    ),
    _pace=types.SimpleNamespace(
      step_secs=float(paced), next_secs=lambda step: 1.0
    ),
    _log=types.SimpleNamespace(
      dispatched=lambda step, metrics, at: did.append((step, metrics, at)),
      finish=lambda: did.append("finish"),
      loss=1.5,
    ),
    learner=types.SimpleNamespace(step=4),
    progress=types.SimpleNamespace(moved=lambda: did.append("moved")),
  )
  script = island_lib.Island.training(island, 4, lambda: len(pauses) == 4)
  durations, answer = iter([0.25, 0.5, 5.0, 0.25]), None
  with pytest.raises(StopIteration) as end:
    while True:
      operation = script.send(answer)
      if isinstance(operation, float):
        pauses.append(operation)
        now[0] += operation
      else:
        answer = {"loss": now[0]}
        now[0] += next(durations)
  assert end.value.value == {"steps": 0, "step": 0, "loss": 1.5}
  # The second waits for an answer; the third takes five slots, and the fourth
  # has its own after it.
  assert pauses == ([0.75, 0.5, 0.0, 0.75] if paced else [])
  begun = [0.0, 1.0, 2.25, 7.25] if paced else [0.0, 0.25, 1.0, 6.0]
  one = [["exchange", (4, {"loss": t}, t), "moved"] for t in begun]
  each = [what + ["finish"] * paced for what in one]
  assert did == [*(x for what in each for x in what), "finish"]
  assert island._present


class _ReadError(Exception):
  """An island has read what it goes on from."""


def test_earlier_lives_leave_before_what_they_published_is_read():
  done = []

  def patiently(do):
    done.append(do)
    yield from ()

  def recovering(sync_every):
    done.append(sync_every)
    raise _ReadError

  joining = types.SimpleNamespace(
    _spec=types.SimpleNamespace(island=0),
    learner=None,
    _patiently=patiently,
    _publish_initial="initial",
    _take_place="place",
    _recovery=types.SimpleNamespace(recovering=recovering),
    _config=types.SimpleNamespace(sync_every=lambda island: 4),
  )
  with pytest.raises(_ReadError):
    list(island_lib.Island.joining(joining))
  assert done[1:] == ["initial", "place", 4]


@pytest.mark.parametrize("overtaken", [False, True])
@pytest.mark.parametrize("limit_secs", [3.0, 100.0])
def test_drain_waits_longer_for_what_is_known_to_be_there(
  overtaken, limit_secs
):
  now, did = [0.0], []

  class Hands(types.SimpleNamespace):
    def publish_all(self):
      did.append(now[0])

  core = types.SimpleNamespace(in_flight=[0], overtaken=overtaken)
  script = hands.Hands.publishing_all(
    Hands(core=core),
    clock=lambda: now[0],
    look=lambda: None,
    flushed=lambda: True,
    patience=hands.Patience(2.0, 7.0, limit_secs),
    poll_secs=0.5,
  )
  for secs in script:
    now[0] += secs
  first = min(limit_secs, 7.0 if overtaken else 2.0)
  again = [min(limit_secs, 14.0)] if overtaken else []
  assert did == [first, *again]


@pytest.mark.parametrize("answered_after", [0, 3, None])
def test_hand_over_saves_once_all_is_answered_or_time_is_up(answered_after):
  now, did = [0.0], []

  def look():
    did.append("look")
    core.in_flight = [0] * (len(did) != answered_after)

  def saved(serial, timeout_secs):
    assert (serial, timeout_secs) == (7, 0.0)
    did.append("wait")
    return did.count("wait") == 2

  def draining(timeout_secs):
    did.clear()
    yield 0.0

  core = types.SimpleNamespace(in_flight=[0] if answered_after != 0 else [])
  exchange = types.SimpleNamespace(
    core=core,
    save=lambda: did.append("save") or 7,
    wait_saved=saved,
  )
  leaving = types.SimpleNamespace(
    draining=draining, _exchange=exchange, _clock=lambda: now[0], look=look
  )
  for secs in island_lib.Island.handing_over(leaving, 0.1):
    now[0] += secs
  looks = did.count("look")
  rest = ["save", "wait", "wait"]
  assert did[:looks] == ["look"] * looks
  if answered_after is None:
    assert now[0] >= 0.1 and did[looks:] == rest[:2]
  else:
    assert looks == answered_after and did[looks:] == rest


def test_strange_and_abandoned_files_in_the_store_disturb_nobody(
  tmp_path, run_dir
):
  config = make_config(tmp_path)
  island = make_island(config, run_dir)
  root = run_dir / "snapshots"
  (root / "contributions").mkdir()
  (root / "contributions" / ".nfs0001").write_bytes(b"left by the system")
  island.train(9)
  island.drain(60.0)
  with running_syncer(config, run_dir):
    snapshots = store.SnapshotStore(process.store_url(run_dir))
    until(lambda: snapshots.keys("contributions") == [".nfs0001"])
  island.close("test")
  past, future = "0000.0000.0001.000000001", "0000.0000.0001.000000999"
  for name in (past, future):
    (root / "payloads" / name).mkdir(parents=True)
    (root / "payloads" / name / "x").write_bytes(b"no record names this")
  successor = make_island(config, run_dir, incarnation=2)
  assert successor.step == 9
  with running_syncer(config, run_dir, incarnation=2):
    until(lambda: not (root / "payloads" / past).exists())
  assert (root / "payloads" / future).exists()
  successor.close("test")
