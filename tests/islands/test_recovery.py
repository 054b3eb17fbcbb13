"""Islands that come back: from checkpoints, peers, and global versions."""

import contextlib
import dataclasses
import json
import threading
import types

import cut_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from island_builder import make_config, make_island, running_syncer
from observing import events, until

from diloco import errors, process
from diloco.islands import (
  checkpoints,
  comeback,
  core,
  fetching,
  outbox,
  peer_protocol,
  protocol,
  recovery,
  swap,
)
from diloco.islands import island as island_lib
from diloco.islands import trainer as trainer_lib
from diloco.snapshots import (
  checkpoint,
  keys,
  operations,
  records,
  states,
  store,
)
from diloco.tasks import registry


def _open_store(run_dir):
  return store.SnapshotStore(process.store_url(run_dir))


def _values(island):
  params = island.learner.state.params
  return {name: np.array(value) for name, value in params.items()}


def _moments(island):
  leaves = jax.tree.leaves(island.learner.state.opt_state)
  return [np.array(x) for x in leaves if x.ndim]


def _merged_rows(run_dir, fragment, island=0):
  rows = [
    (c["first_step"], c["step"])
    for m in events(run_dir, "merged")
    if m["fragment"] == fragment
    for c in m["contributions"]
    if c["island"] == island
  ]
  return sorted(rows)


def test_unsent_progress_is_carried_on_and_repeated_steps_are_muted(
  tmp_path, run_dir, monkeypatch
):
  # A machine that is busy takes its time to answer.
  monkeypatch.setattr(island_lib, "_IN_FLIGHT_SECS", (60.0, 60.0))
  config = make_config(
    tmp_path, adoption="carry", codec="int4", error_feedback=True
  )
  first = make_island(config, run_dir)
  first.train(4)
  at_four = _values(first)  # fragment 0 is published here, 1 at step 5
  first.train(2)
  at_six = _values(first)
  moments = _moments(first)
  assert first.checkpoint(wait=True)["durable"]
  first.train(1)  # fragment 3 is published at step 7
  residuals = first.learner.swap.residuals(7)
  assert first._exchange.flush(60.0)
  first.close("test")

  second = make_island(config, run_dir, incarnation=2)
  started = events(run_dir, "started")[-1]
  assert started["step"] == second.step == 6
  assert started["unsent_from_step"] == [4, 5, 6, 7]
  assert started["base_versions"] == [0, 0, 0, 0]
  assert started["checkpoint"] == {"incarnation": 1, "serial": 1, "step": 6}
  assert started["peer"] is None and started["passed_over"] == []
  assert second.learner._stream.position == 6
  for before, after in zip(moments, _moments(second), strict=True):
    np.testing.assert_array_equal(before, after)
  anchors = second.learner.swap.anchors
  for name, held in anchors[0].items():
    expected = at_six[name] + (np.asarray(held) - at_four[name])
    np.testing.assert_array_equal(_values(second)[name], expected)
  for name, held in anchors[2].items():  # all of it was published
    np.testing.assert_array_equal(_values(second)[name], np.asarray(held))

  # What encoding left out is known of all but fragment 3.
  for fragment, before in residuals.items():
    loans = second.learner.swap._feedback[fragment]._loans
    assert len(loans) == (fragment != 3)
    for loan, of_before in zip(loans, before.loans, strict=False):
      assert loan.first_step == of_before.first_step == 0
      assert loan.end == of_before.end == [*loan.left][-1] == 4 + fragment
      for step, left in of_before.left.items():
        for name, held in left.items():
          np.testing.assert_array_equal(loan.left[step][name], held)
          assert np.asarray(held).any()

  second.train(1)
  (rebased,) = events(run_dir, "rebased")
  assert (rebased["fragment"], rebased["step"]) == (3, 7)
  for name, held in anchors[3].items():
    np.testing.assert_array_equal(_values(second)[name], np.asarray(held))

  with running_syncer(config, run_dir) as syncer:
    second.train(4)  # each fragment is published once
    syncer.drain()
    second.drain(60.0)
    snapshots = _open_store(run_dir)
    until(lambda: not snapshots.keys("contributions"))
  second.close("test")
  for fragment in range(4):
    reached = 0
    for first_step, step in _merged_rows(run_dir, fragment):
      assert first_step == reached, (fragment, first_step)
      reached = step
    assert reached == 11


def test_island_that_comes_back_waits_until_the_store_can_be_read(tmp_path):
  run = cut_builder.CutRun(tmp_path)
  whole = run.store.read(keys.head_key(1), records.Head)
  cut_builder.spoil(run, keys.head_key(1))
  waits = []

  def execute(operation):
    if not isinstance(operation, float):
      return coming.execute(operation)
    waits.append(operation)
    if len(waits) == 2:
      run.store.write(keys.head_key(1), whole)

  shardings = dict.fromkeys("ab", jnp.zeros(4).sharding)
  trainer = types.SimpleNamespace(
    plan=cut_builder.PLAN,
    fetcher=lambda store: fetching.Fetcher(store, cut_builder.PLAN, shardings),
  )
  coming = recovery.Recovery(tmp_path, run.store, trainer, 0, 2, 2.0)
  found = operations.perform(coming.find(2, 4), execute)
  assert len(waits) == 2
  assert [f.head for f in found.standing.fetched] == run.heads()


@pytest.mark.parametrize("heard", [None, "a peer's"])
@pytest.mark.parametrize("saved", [None, "its own"])
def test_error_feedback_is_taken_from_a_state_that_is_recent_alone(
  heard, saved
):
  progress = swap.Progress({"p": 1}, {"p": 2}, {0: "owed"})
  state = saved and types.SimpleNamespace(progress=progress, opt_state=saved)
  basis = protocol.Basis(
    comeback.Comeback(4, (core.Origin(0, 4),), (0,), "own"),
    protocol.Standing(0, None, 0, None, []),
    state=state,
    heard=heard and peer_protocol.Heard(None, heard),
  )

  def find(num_fragments, sync_every):
    yield from ()
    return basis

  resumed = {}
  learner = types.SimpleNamespace(
    plan=types.SimpleNamespace(num_fragments=1),
    resume=lambda *args, **more: resumed.update(more),
  )
  coming = types.SimpleNamespace(find=find, _learner=learner, _island=0)
  list(recovery.Recovery.recovering(coming, 4))
  assert resumed["opt_state"] == (heard or saved)
  owed = {} if heard else progress.residuals
  assert resumed["saved"] == (saved and progress._replace(residuals=owed))


def test_without_a_saved_state_or_a_peer_the_optimizer_is_new(
  tmp_path, run_dir
):
  config = make_config(tmp_path)
  first = make_island(config, run_dir)
  first.train(6)
  assert first._exchange.flush(60.0)
  first.close("test")
  second = make_island(config, run_dir, incarnation=2)
  started = events(run_dir, "started")[-1]
  assert second.step == 3  # fragment 3 is published up to there
  assert started["unsent_from_step"] == [4, 5, 6, 3]
  assert started["checkpoint"] is None and started["peer"] is None
  assert started["restored_from"] == "new optimizer, global versions"
  assert not any(m.any() for m in _moments(second))
  second.close("test")


def _damage_files(path):
  for file in path.rglob("arrays/**/*"):
    if file.is_file() and file.stat().st_size > 100:
      content = bytearray(file.read_bytes())
      content[len(content) // 2] ^= 1
      file.write_bytes(content)


def _tear_marker(path):
  marker = path / checkpoint.MARKER
  marker.write_bytes(marker.read_bytes()[:-9])


def _remove_a_file(path):
  next(p for p in (path / "arrays").rglob("*") if p.is_file()).unlink()


@pytest.mark.parametrize(
  "damage", [_damage_files, _tear_marker, _remove_a_file]
)
def test_damaged_checkpoint_is_passed_over_for_an_older_one(
  tmp_path, run_dir, damage
):
  config = make_config(tmp_path)
  first = make_island(config, run_dir)
  for _ in range(2):
    first.train(4)
    assert first.checkpoint(wait=True)["durable"]
  first.close("test")
  newest, older = checkpoint.completed(checkpoint.directory(run_dir, 0))
  assert checkpoint.read_marker(older).step == 4
  damage(newest)
  second = make_island(config, run_dir, incarnation=2)
  started = events(run_dir, "started")[-1]
  assert started["checkpoint"]["step"] == 4
  (reason,) = started["passed_over"]
  assert newest.name in reason or "Checkpoint record" in reason
  second.close("test")


@pytest.mark.parametrize("damaged", [False, True])
def test_state_is_taken_from_the_store_where_the_directory_is_gone(
  tmp_path, run_dir, damaged, monkeypatch
):
  config = make_config(tmp_path)
  config = dataclasses.replace(config, store=(tmp_path / "far").as_uri())
  elsewhere = tmp_path / "another machine" / "run"
  for place in (run_dir, elsewhere):
    process.write_config(config, place)
  first = make_island(config, run_dir)
  for _ in range(2):
    first.train(4)
    assert first.checkpoint(wait=True)["durable"]
  moments = _moments(first)
  first.close("test")
  if damaged:
    (newest, _) = checkpoint.completed(checkpoint.directory(run_dir, 0))
    _damage_files(tmp_path / "far" / "states" / "island-0" / newest.name)
  listed, fails = states.Copies.completed, [errors.StoreError("no answer")]

  def completed(copies, folder):
    if fails:  # a store that is gone for a moment costs no state
      raise fails.pop()
    return listed(copies, folder)

  monkeypatch.setattr(states.Copies, "completed", completed)
  second = make_island(config, elsewhere, incarnation=2)
  (started,) = events(elsewhere, "started")
  assert started["checkpoint"]["step"] == (4 if damaged else 8)
  assert len(started["passed_over"]) == damaged and not fails
  if not damaged:
    for before, after in zip(moments, _moments(second), strict=True):
      np.testing.assert_array_equal(before, after)
  second.close("test")


def test_checkpoint_counts_only_once_all_before_it_is_committed(
  tmp_path, run_dir, monkeypatch
):
  config = make_config(tmp_path)
  first = make_island(config, run_dir)
  first.train(3)
  assert first.checkpoint(wait=True)["durable"]
  write = first._store.write
  asked, settled = threading.Event(), outbox.settled

  def ask(ticket):
    asked.set()
    return settled(ticket)

  monkeypatch.setattr(outbox, "settled", ask)

  def fail_on_contributions(key, record):
    if key.startswith("contributions/"):
      raise OSError("the store takes no more")
    write(key, record)

  monkeypatch.setattr(first._store, "write", fail_on_contributions)
  first.train(1)
  first.checkpoint(wait=False)
  assert asked.wait(60)  # all is on disk but the marker
  first.times = dataclasses.replace(first.times, drain_secs=0.0)
  assert not first.checkpoint(wait=True)["durable"]
  first.close("test")
  (reason,) = [
    e["reason"] for e in events(run_dir, "checkpointed") if not e["durable"]
  ]
  assert "lost" in reason
  second = make_island(config, run_dir, incarnation=2)
  assert events(run_dir, "started")[-1]["checkpoint"]["step"] == 3
  second.close("test")


@contextlib.contextmanager
def _training_on(island):
  """Keeps an island busy in a thread."""
  stop = threading.Event()

  def train():
    while not stop.is_set():
      island.train(2, stop.is_set)

  thread = threading.Thread(target=train)
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()


def test_optimizer_comes_from_a_peer_on_another_mesh(tmp_path, run_dir):
  config = make_config(tmp_path, slices=("1x2", "1"), optimizer="muon")
  patient = dataclasses.replace(config.controller, heartbeat_secs=0.4)
  config = dataclasses.replace(config, controller=patient)
  healthy = make_island(config, run_dir, island=0)
  lost = make_island(config, run_dir, island=1)
  with running_syncer(config, run_dir):
    for _ in range(3):
      healthy.train(4)
      lost.train(4)
    lost.drain(60.0)
    lost.close("test")
    with _training_on(healthy):
      back = make_island(config, run_dir, island=1, incarnation=2)
    started = events(run_dir, "started")[-1]
    assert started["peer"]["island"] == 0, started
    assert started["peer"]["incarnation"] == 1
    assert started["checkpoint"] is None
    assert any(m.any() for m in _moments(back))
    assert back.step == started["step"] > 0
    back.train(2)
    back.close("test")
  healthy.close("test")
  assert not _open_store(run_dir).keys(keys.PEER_REQUESTS)


@pytest.mark.parametrize(
  ("topology", "optimizer"), [((1,), "muon"), ((2, 2), "adamw")]
)
def test_restored_state_steps_on_to_the_same_bits(
  tmp_path, topology, optimizer
):
  config = make_config(tmp_path, optimizer=optimizer, adoption="carry")
  task = registry.make_task(config.task.name, config.task.options)

  def make():
    return trainer_lib.Trainer(config, task, 0, topology, jax.devices())

  def step_on(trainer):
    for _ in range(2):
      trainer.do_step(trainer.take_batch())
    trainer.close()
    return [np.asarray(x) for x in jax.tree.leaves(trainer.state)]

  first = make()
  for _ in range(3):
    first.do_step(first.take_batch())
  snapshot = first.snapshot()
  expected = step_on(first)
  positions = [core.Position(0, 0, 0)] * 4
  path = tmp_path / "000000003.0001.000001"
  writer = checkpoints.checkpointer()
  who = {"island": 0, "incarnation": 1, "serial": 1, "epoch": 0, "cut": 0}
  marker = checkpoints.write(
    writer, path, snapshot, first.plan, positions, **who
  )
  writer.close()
  checkpoint.commit(path, marker)

  second = make()
  _, restored = checkpoints.restore(path, second)
  second.resume(
    3,
    second.swap.anchors,
    [0] * 4,
    opt_state=restored.opt_state,
    saved=restored.progress,
    carried=range(4),
  )
  for one, other in zip(expected, step_on(second), strict=True):
    np.testing.assert_array_equal(one, other)


def _request_cut(run_dir, cut, island=0):
  request = records.CutRequest(cut=cut, epoch=0, islands=[island])
  _open_store(run_dir).write(keys.cut_request_key(cut), request)


def test_island_takes_part_in_a_cut_once(tmp_path, run_dir):
  config = make_config(tmp_path)
  island = make_island(config, run_dir)
  island.train(3)
  _request_cut(run_dir, 1)
  snapshots = _open_store(run_dir)

  def part():
    island.train(1)
    return snapshots.read(keys.cut_part_key(1, 0), records.CutPart)

  until(part)
  taken = part()
  path = run_dir / taken.checkpoint
  assert checkpoint.read_marker(path).crc32() == taken.checksum
  assert checkpoint.verify(path).step == taken.step
  # What is published at this very step comes after the cut.
  assert [p[2] for p in taken.positions] == [
    max(s for s in range(taken.step) if s % 4 == p) for p in range(4)
  ]
  for _ in range(4):  # newer ones do not push it out
    island.train(1)
    assert island.checkpoint(wait=True)["durable"]
  assert path in checkpoint.completed(path.parent)
  stamps = {
    int(name.split(".")[3]): snapshots.read(
      keys.contribution_key(name), records.Contribution
    ).cut
    for name in snapshots.keys("contributions")
  }
  assert all(cut == (step >= taken.step) for step, cut in stamps.items()), (
    stamps
  )
  island.close("test")

  second = make_island(config, run_dir, incarnation=2)
  second.train(4)
  second.close("test")
  assert snapshots.read(keys.cut_part_key(1, 0), records.CutPart) == taken
  snapshots.delete_tree(keys.cut_prefix(1))
  third = make_island(config, run_dir, incarnation=3)
  for _ in range(3):
    third.train(1)
    assert third.checkpoint(wait=True)["durable"]
  third.close("test")
  assert path not in checkpoint.completed(path.parent)


def test_after_a_roll_back_only_the_cuts_own_checkpoint_is_used(
  tmp_path, run_dir
):
  config = make_config(tmp_path)
  island = make_island(config, run_dir)
  _request_cut(run_dir, 1)
  snapshots = _open_store(run_dir)

  def part():
    island.train(1)
    return snapshots.read(keys.cut_part_key(1, 0), records.CutPart)

  until(part)
  taken = part()
  island.train(2)
  assert island.checkpoint(wait=True)["durable"]
  island.close("test")
  snapshots.write(keys.EPOCH, records.Epoch(epoch=1, cut=1))
  for name in snapshots.keys("contributions"):
    key = keys.contribution_key(name)
    if snapshots.read(key, records.Contribution).cut:
      snapshots.delete(key)  # sent after the cut, as a restore would
  second = make_island(config, run_dir, incarnation=2)

  def published():
    second.train(1)
    return [n for n in snapshots.keys("contributions") if ".0002." in n]

  until(published)
  names = published()
  started = events(run_dir, "started")[-1]
  second.close("test")
  assert started["step"] == started["checkpoint"]["step"] == taken.step
  assert started["epoch"] == 1
  assert any("roll-back" in reason for reason in started["passed_over"])
  for name in names:
    record = snapshots.read(keys.contribution_key(name), records.Contribution)
    assert record.epoch == 1


def test_zero_is_a_start_like_any_other(tmp_path, run_dir):
  config = make_config(tmp_path)
  make_island(config, run_dir).close("test")
  island = make_island(config, run_dir, incarnation=2)
  started = events(run_dir, "started")[-1]
  assert started["step"] == 0
  assert started["restored_from"] == "initial parameters"
  assert json.dumps(started["passed_over"]) == "[]"
  island.close("test")


def test_checkpoint_of_other_fragments_is_passed_over(tmp_path, monkeypatch):
  snapshots = cut_builder.CutRun(tmp_path).store
  folder = checkpoint.directory(tmp_path, 1)
  for serial, fragments in ((1, 2), (2, 3)):
    path = checkpoint.path_of(folder, 8, 1, serial)
    path.mkdir(parents=True)
    marker = checkpoint.Checkpoint(
      1, 1, serial, 8, 0, 0, [[0, 0, 8]] * fragments, {}, {}, 0
    )
    checkpoint.commit(path, marker)
  monkeypatch.setattr(
    checkpoints, "restore", lambda path, _: (checkpoint.read_marker(path), path)
  )
  trainer = types.SimpleNamespace(plan=cut_builder.PLAN)
  coming = recovery.Recovery(tmp_path, snapshots, trainer, 1, 2, 2.0)
  standing = protocol.Standing(0, None, 0, None, [])
  marker, path = coming._newest_saved(2, standing)
  assert marker.serial == 1 and path.name.endswith("000001")
  (why,) = coming._passed_over
  assert "has other fragments" in why
