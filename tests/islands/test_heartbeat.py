"""An island's signs of life, in the store and to its controller."""

import queue
import threading

import pytest

from diloco.islands import heartbeat
from diloco.snapshots import keys, records, store

_PATIENCE_SECS = 20.0


def _member(beat):
  return records.Member(3, 1, beat, 8, 0.1, present=True)


@pytest.fixture
def snapshots():
  return store.SnapshotStore("memory://")


def test_island_tells_its_controller_while_a_store_hangs(
  snapshots, monkeypatch
):
  hangs, told = threading.Event(), queue.Queue()
  write = snapshots.write

  def write_once_it_answers(key, record):
    assert hangs.wait(_PATIENCE_SECS)
    write(key, record)

  monkeypatch.setattr(snapshots, "write", write_once_it_answers)
  beating = heartbeat.Heartbeat(snapshots, _member, 0.001, told.put)
  for _ in range(5):
    assert told.get(timeout=_PATIENCE_SECS).step == 8
  assert snapshots.read(keys.member_key(3), records.Member) is None
  hangs.set()
  beating.close()
  assert snapshots.read(keys.member_key(3), records.Member).beat > 0


def test_island_tells_its_controller_while_a_store_fails(
  snapshots, monkeypatch
):
  def write(key, record):
    raise RuntimeError("not what a store should raise")

  told = queue.Queue()
  monkeypatch.setattr(snapshots, "write", write)
  beating = heartbeat.Heartbeat(snapshots, _member, 0.001, told.put)
  for _ in range(5):
    told.get(timeout=_PATIENCE_SECS)
  monkeypatch.undo()
  beating.close()  # a last beat, which is written
  assert snapshots.read(keys.member_key(3), records.Member).beat > 1


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
  snapshots.write = lambda key, record: written.append(record.beat)
  beating = heartbeat.Heartbeat(snapshots, _member, 0.001, told.put)
  told.get(timeout=_PATIENCE_SECS)
  beating.nudge()
  beating.close()
  assert written == list(range(1, len(written) + 1)) and len(written) >= 2
