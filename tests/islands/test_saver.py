"""Saving in the background: what waits, what is kept, what counts."""

import pathlib
import threading
import types

import pytest
from cut_builder import PLAN, CutRun

from diloco.islands import publisher, saver
from diloco.snapshots import checkpoint, cuts, keys, records
from diloco.tape import events, reader, recorder

_PATIENCE_SECS = 20.0
ISLAND = 1


class Publisher:
  """Says whether what a save counts on has been committed."""

  identity = publisher.Identity(ISLAND, 2, 10)

  def __init__(self):
    self.open = threading.Event()
    self.open.set()
    self.asked = threading.Event()
    self.lost = set()  # steps

  def wait_settled(self, ticket):
    self.asked.set()
    assert self.open.wait(_PATIENCE_SECS)
    return ticket not in self.lost


class World:
  def __init__(self, run_dir, monkeypatch):
    self.run = CutRun(run_dir)
    self.published = Publisher()
    self.tape = recorder.Recorder(run_dir, f"island-{ISLAND}", 2)
    monkeypatch.setattr(saver.Saver, "_write", self._write)
    self.saver = saver.Saver(
      run_dir, self.run.store, PLAN, self.published, self.tape
    )
    self.folder = checkpoint.directory(run_dir, ISLAND)

  @staticmethod
  def _write(_, path, job):
    """Instead of arrays: nothing of what is tested here looks at them."""
    path.mkdir(parents=True)
    return checkpoint.Checkpoint(
      *(ISLAND, 2, job.serial, job.snapshot.step, 0, job.cut),
      *([[0, 0, 0]] * 2, {}, {}, 7),
    )

  def save(self, serial, *, cut=0, part=False, wait=True):
    state = types.SimpleNamespace(step=10 * serial)
    ticket = serial  # what the publisher is asked about
    self.saver.save(saver.Job(serial, state, (), cut, ticket, part))
    return wait and self.saver.wait(serial, _PATIENCE_SECS)

  def kept(self):
    """Serials of the checkpoints that count."""
    return sorted(
      checkpoint.read_marker(path).serial
      for path in checkpoint.completed(self.folder)
    )

  def told(self):
    return [
      (line["serial"], line["durable"], line["cut"])
      for line in reader.read(self.run.dir).events
      if line["event"] == events.CHECKPOINTED
    ]


@pytest.fixture
def world(tmp_path, monkeypatch):
  made = World(tmp_path, monkeypatch)
  yield made
  made.published.open.set()
  made.saver.close()
  made.tape.close()


def test_two_newest_are_kept_and_those_of_every_cut_there_is(world):
  for cut in (1, 2):
    world.run.perform(cuts.request([ISLAND], 2))
    assert world.save(cut, cut=cut, part=True)
  for serial in (3, 4, 5):
    assert world.save(serial, cut=2)
  assert world.kept() == [1, 2, 4, 5]
  world.run.perform(cuts.delete(1))
  assert world.save(6, cut=2)
  assert world.kept() == [2, 5, 6]
  assert world.told()[:3] == [(1, True, 1), (2, True, 2), (3, True, 0)]


def test_of_those_that_wait_the_newest_and_every_part_of_a_cut_is_made(world):
  for _ in range(2):
    world.run.perform(cuts.request([ISLAND], 2))
  world.published.open.clear()
  world.save(1, wait=False)
  assert world.published.asked.wait(_PATIENCE_SECS)  # it is under way
  world.save(2, wait=False)
  world.save(3, cut=1, part=True, wait=False)
  world.save(4, cut=2, part=True, wait=False)
  world.save(5, cut=2, wait=False)
  world.save(6, cut=2, wait=False)
  world.published.open.set()
  assert world.saver.wait(6, _PATIENCE_SECS)
  assert [serial for serial, _, _ in world.told()] == [1, 3, 4, 6]
  for cut, serial in ((1, 3), (2, 4)):
    part = world.run.store.read(keys.cut_part_key(cut, ISLAND), records.CutPart)
    assert part.step == 10 * serial
    assert pathlib.Path(part.checkpoint).name.endswith(f".{serial:06d}")


def test_save_that_counts_on_what_was_lost_leaves_nothing(world):
  world.run.perform(cuts.request([ISLAND], 2))
  world.published.lost = {2}
  assert world.save(1)
  assert not world.save(2, cut=1, part=True)
  assert world.kept() == [1]
  assert len(list(world.folder.iterdir())) == 1
  assert world.run.perform(cuts.look(1)).missing_islands == [ISLAND]
  assert world.told() == [(1, True, 0), (2, False, 1)]
  assert world.saver.may_count(1) and not world.saver.may_count(2)
