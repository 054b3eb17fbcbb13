"""An island's signs of life, in the store and to its controller."""

import itertools
import queue
import threading

import pytest

from diloco import errors, heartbeat
from diloco.snapshots import keys, members, records, store

_PATIENCE_SECS = 20.0


def _member():
  return records.Member("island-3", 1, 0, "n", step=8, present=True)


@pytest.fixture
def snapshots():
  return store.SnapshotStore("memory://")


def test_island_tells_its_controller_while_a_store_hangs(
  snapshots, monkeypatch
):
  hangs, told = threading.Event(), queue.Queue()
  works = snapshots.compare_and_set

  def once_it_answers(*args):
    assert hangs.wait(_PATIENCE_SECS)
    return works(*args)

  monkeypatch.setattr(snapshots, "compare_and_set", once_it_answers)
  beating = heartbeat.Heartbeat(snapshots, _member, 0.001, told.put)
  for _ in range(5):
    assert told.get(timeout=_PATIENCE_SECS).step == 8
  assert snapshots.read(keys.member_key("island-3"), records.Member) is None
  hangs.set()
  beating.close()
  assert snapshots.read(keys.member_key("island-3"), records.Member).beat > 0


def test_island_tells_its_controller_while_a_store_fails(
  snapshots, monkeypatch
):
  def fails(*args):
    raise RuntimeError("not what a store should raise")

  told = queue.Queue()
  monkeypatch.setattr(snapshots, "compare_and_set", fails)
  beating = heartbeat.Heartbeat(snapshots, _member, 0.001, told.put)
  for _ in range(5):
    told.get(timeout=_PATIENCE_SECS)
  monkeypatch.undo()
  beating.close()  # a last beat, which is written
  assert snapshots.read(keys.member_key("island-3"), records.Member).beat > 1


def test_leave_to_stand_still_ends_with_what_it_was_for():
  progress = heartbeat.Progress()
  assert progress.standing == (0, 0.0)
  with progress.may_take(300.0):
    counts = [progress.standing[0]]
    progress.moved()  # by a part of it
    assert progress.standing == (counts[0] + 1, 300.0)
  counts.append(progress.standing[0])
  assert progress.standing[1] == 0.0
  with pytest.raises(KeyError), progress.may_take(5.0):
    raise KeyError
  assert progress.standing[1] == 0.0
  # To begin and to end is progress too.
  assert 0 < counts[0] < counts[1] < progress.standing[0]


def test_every_beat_that_is_written_moves(snapshots):
  written, told = [], queue.Queue()
  works = snapshots.compare_and_set

  def compare_and_set(key, record, generation):
    written.append(record.beat)
    return works(key, record, generation)

  snapshots.compare_and_set = compare_and_set
  beating = heartbeat.Heartbeat(snapshots, _member, 0.001, told.put)
  told.get(timeout=_PATIENCE_SECS)
  beating.nudge()
  beating.close()
  assert written == list(range(1, len(written) + 1)) and len(written) >= 2


def _life(incarnation, nonce, beat=1):
  return records.Member("island-3", incarnation, beat, nonce)


def test_older_life_leaves_by_its_next_beat(snapshots):
  beating = heartbeat.Heartbeat(snapshots, lambda: _life(1, "old"), 3600.0)
  beating.check()
  snapshots.perform(members.take_place(_life(2, "new")))
  beating.close()  # a last beat
  with pytest.raises(errors.FencedError, match="life 2; this one is life 1"):
    beating.check()
  assert (
    snapshots.read(keys.member_key("island-3"), records.Member).nonce == "new"
  )


def test_of_two_processes_with_one_number_the_first_stays(snapshots):
  snapshots.perform(members.take_place(_life(2, "first")))
  with pytest.raises(errors.FencedError):
    snapshots.perform(members.take_place(_life(2, "second")))
  assert snapshots.perform(members.beat(_life(2, "first", 2)))


def test_place_is_taken_though_its_record_is_damaged(snapshots):
  key = keys.member_key("island-3")
  snapshots.perform(members.take_place(_life(1, "old")))
  snapshots._kvs.write(key, b"torn").result()
  snapshots.perform(members.take_place(_life(2, "new")))
  assert snapshots.read(key, records.Member).incarnation == 2


@pytest.mark.parametrize("number", [1, 2])
def test_one_process_has_the_place_however_two_come_and_beat(number):
  # Each comes and beats twice; all orders of what they ask of the store.
  for order in itertools.product((0, 1), repeat=10):
    shared, fenced = store.SnapshotStore("memory://"), [False, False]
    lives = [_life(1, "a"), _life(number, "b")]
    scripts, values = [_comes(life) for life in lives], [None, None]
    for who in (*order, *(0, 1) * 12):
      try:
        values[who] = shared.execute(scripts[who].send(values[who]))
      except errors.FencedError:
        fenced[who] = True
      except StopIteration:
        pass
    for who, life in enumerate(lives):  # the other may have come since
      try:
        assert shared.perform(members.beat(life)) or fenced[who]
      except errors.FencedError:
        fenced[who] = True
    assert fenced.count(True) == 1, order
    stays = lives[fenced.index(False)]
    assert number == 1 or stays.nonce == "b", order
    assert (
      shared.read(keys.member_key("island-3"), records.Member).nonce
      == stays.nonce
    )


def _comes(member):
  yield from members.take_place(member)
  for _ in range(2):
    yield from members.beat(member)


def test_two_lives_in_one_process_are_told_apart(tmp_path):
  first, second = (heartbeat.born(tmp_path, "syncer", 1) for _ in range(2))
  assert first.nonce != second.nonce and first.pid == second.pid
