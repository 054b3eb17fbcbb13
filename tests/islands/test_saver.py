"""When a saved state counts, and what is left of one that does not."""

import gc
import os
import threading
import types
import weakref

import jax
import numpy as np
import pytest
import quadratic
from cut_builder import CutRun, spoil

from diloco import workers
from diloco.islands import (
  checkpoints,
  core,
  exchange,
  outbox,
  publisher,
  saver,
  saving,
)
from diloco.snapshots import (
  checkpoint,
  cuts,
  keys,
  operations,
  records,
  states,
)

IDENTITY = publisher.Identity(0, 3, 10, epoch=0)
POSITIONS = (core.Position(0, 0, 4), core.Position(0, 0, 0))
TICKET = outbox.Ticket((), ())  # nothing was under way


class Disk:
  """A saver of a tiny state, on a disk that is written at once."""

  def __init__(self, tmp_path, monkeypatch, url="memory://"):
    self.run = CutRun(tmp_path, url)
    self.done, self.tape = [], []
    self.written = threading.Event()
    self.on_its_way = outbox.Entry(core.Publish(0, 0, 0, 4, "drain"), None)
    self.failures = []  # of the disk
    self.trainer = quadratic.make_trainer()
    monkeypatch.setattr(checkpoints, "write", self._write)
    self.saver = saver.Saver(
      quadratic.setting(
        run_dir=tmp_path,
        identity=IDENTITY,
        snapshots=self.run.store,
        learner=self.trainer,
        tape=self,
      )
    )
    self.folder = checkpoint.directory(tmp_path, 0)

  def _write(self, writer, path, snapshot, plan, positions, **who):
    arrays = checkpoints.content_of(snapshot, plan, positions)
    path.mkdir(parents=True)
    (path / "arrays").write_bytes(
      b"".join(np.asarray(a).tobytes() for a in arrays.values())
    )
    if self.failures:
      raise self.failures.pop()
    self.done.append("written")
    self.written.set()
    return checkpoint.Checkpoint(
      **who,
      step=snapshot.step,
      positions=[list(p) for p in positions],
      leaves=dict.fromkeys(arrays, "digest"),
      files=checkpoint.file_sizes(path),
      num_bytes=sum(a.nbytes for a in arrays.values()),
    )

  # Of the tape

  def flush(self):
    self.done.append("flushed")

  def record(self, event, **fields):
    assert event == "checkpointed"
    self.tape.append(fields)

  def job(self, serial, *, cut=0, part=False, ticket=TICKET):
    quadratic.step(self.trainer)
    return saving.Job(
      serial, self.trainer.snapshot(), POSITIONS, cut, ticket, part
    )

  def save(self, serial, **what):
    """Saves the state after another step; says whether it counts."""
    self.saver.save(self.job(serial, **what))
    return self.saver.wait(serial, 20)

  def hold(self, serial=1, **what):
    """The thread is at a save that counts on what is on its way."""
    entries = (self.on_its_way,)
    ticket = outbox.Ticket(entries, entries)
    self.saver.save(self.job(serial, ticket=ticket, **what))
    assert self.written.wait(20)

  def saved(self):
    """Steps of the checkpoints that count, the newest first."""
    found = checkpoint.completed(self.folder)
    return [checkpoint.read_marker(path).step for path in found]

  def ask(self):
    return self.run.perform(cuts.request([0], 2)).cut

  def part(self, cut):
    return self.run.store.read(keys.cut_part_key(cut, 0), records.CutPart)


@pytest.fixture
def disk(tmp_path, monkeypatch):
  made = Disk(tmp_path, monkeypatch)
  yield made
  made.on_its_way.end("lost")
  made.saver.close()


def test_marker_is_written_last_and_says_what_was_saved(disk):
  commit, order = checkpoint.commit, disk.done
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      checkpoint,
      "commit",
      lambda *args: (order.append("marker"), commit(*args)),
    )
    assert disk.save(1, cut=6)
  assert order == ["written", "flushed", "marker"]
  (path,) = checkpoint.completed(disk.folder)
  assert path == checkpoint.path_of(disk.folder, 1, 3, 1)
  marker = checkpoint.verify(path)
  assert (marker.island, marker.incarnation, marker.serial) == (0, 3, 1)
  assert (marker.step, marker.epoch, marker.cut) == (1, 0, 6)
  assert marker.positions == [[0, 0, 4], [0, 0, 0]]
  # Two leaves with momenta, and the reference of what is not published.
  assert " ".join(sorted(marker.leaves)) == (
    "o000000 o000001 p000000 p000001 r000000"
  )
  (told,) = disk.tape
  assert told["durable"] and told["reason"] == ""
  assert (told["step"], told["serial"], told["cut"]) == (1, 1, 0)
  assert told["bytes"] == marker.num_bytes > 0 and told["secs"] >= 0.0


def test_what_is_written_leaves_the_core_to_the_steps(disk):
  disk.hold()
  nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
  (thread,) = (t for t in threading.enumerate() if t.name == "saver")
  given = os.getpriority(os.PRIO_PROCESS, thread.native_id)
  assert given == min(nice + 10, 19)


def test_save_counts_only_once_what_it_takes_for_published_is(disk):
  disk.hold()
  assert disk.saved() == []
  assert not disk.saver.wait(1, 0.0)
  assert disk.saver.may_count(1)
  assert disk.done == ["written"]
  disk.on_its_way.end("committed")
  assert disk.saver.wait(1, 20)
  assert disk.saved() == [1]


def test_save_is_not_waited_for_once_nobody_publishes_any_more(disk):
  disk.hold()
  looks = iter([True, True])

  def check():
    if not next(looks, False):
      raise workers.WorkerError("the publisher thread has ended")

  island = types.SimpleNamespace(
    _saver=disk.saver, _publisher=types.SimpleNamespace(check=check)
  )
  with pytest.raises(workers.WorkerError, match="publisher"):
    exchange.Exchange.wait_saved(island, 1, 20.0)


def test_save_goes_with_a_publication_it_counts_on(disk):
  disk.hold()
  disk.on_its_way.end("lost")
  assert not disk.saver.wait(1, 20)
  assert list(disk.folder.iterdir()) == []
  (told,) = disk.tape
  assert not told["durable"] and "was lost" in told["reason"]
  assert not disk.saver.may_count(1)
  assert disk.save(2)


def test_error_of_the_disk_costs_one_save(disk):
  disk.failures = [OSError("No space left\non device")]
  assert not disk.save(1)
  assert disk.saved() == [] and disk.tape[0]["reason"] == (
    "OSError: No space left on device"
  )
  # What was written of it would keep the disk full, and the next save from it.
  assert list(disk.folder.iterdir()) == []
  assert disk.save(2) and disk.saved() == [2]
  assert [t["durable"] for t in disk.tape] == [False, True]
  disk.saver.check()


def test_of_plain_saves_only_the_newest_waits_and_parts_all_do(disk):
  numbers = [disk.ask() for _ in range(2)]
  disk.hold()
  for serial, what in (
    (2, {}),
    (3, {"cut": numbers[0], "part": True}),
    (4, {}),
    (5, {"cut": numbers[1], "part": True}),
    (6, {}),
  ):
    disk.saver.save(disk.job(serial, **what))
  assert [disk.saver.may_count(n) for n in range(1, 7)] == [
    *(True, False, True),
    *(False, True, True),
  ]
  disk.on_its_way.end("committed")
  assert disk.saver.wait(6, 20)
  assert [t["serial"] for t in disk.tape] == [1, 3, 5, 6]


def test_only_the_newest_two_and_those_of_every_cut_are_kept(disk):
  for serial in (1, 2, 3):
    assert disk.save(serial, cut=disk.ask(), part=True)
  for serial in (4, 5, 6):
    assert disk.save(serial, cut=3)
  assert disk.saved() == [6, 5, 3, 2, 1]
  disk.run.perform(cuts.abandon(2, "for a test"))
  assert disk.save(7, cut=3) and disk.saved() == [7, 6, 3, 2, 1]
  disk.run.perform(cuts.delete(2))
  assert disk.save(8, cut=3) and disk.saved() == [8, 7, 3, 1]


def test_part_is_kept_although_a_stale_listing_lacks_its_cut(disk, monkeypatch):
  assert disk.save(1, cut=disk.ask(), part=True)
  monkeypatch.setattr(disk.run.store, "names", lambda prefix: [])
  for serial in (2, 3, 4):
    assert disk.save(serial, cut=1)
  assert disk.saved() == [4, 3, 1]


def test_part_of_a_cut_names_the_checkpoint_that_counts(disk, monkeypatch):
  cut, commit, pinned = disk.ask(), checkpoint.commit, []

  def watched(path, marker):
    pinned.append((path / f"{checkpoint.PIN}{cut}").exists())
    commit(path, marker)

  monkeypatch.setattr(checkpoint, "commit", watched)
  assert disk.save(1, cut=cut, part=True)
  assert pinned == [True]  # before it counts, or it could be pruned
  part = disk.part(cut)
  (path,) = checkpoint.completed(disk.folder)
  assert disk.run.dir.absolute() / part.checkpoint == path
  assert part.checksum == checkpoint.read_marker(path).crc32()
  assert (part.cut, part.epoch, part.island) == (cut, 0, 0)
  assert (part.incarnation, part.step) == (3, 1)
  assert part.positions == [[0, 0, 4], [0, 0, 0]]
  (told,) = disk.tape
  assert told["cut"] == cut


def test_part_is_not_written_before_its_checkpoint_counts(disk):
  cut = disk.ask()
  disk.hold(cut=cut, part=True)
  assert disk.part(cut) is None
  disk.on_its_way.end("lost")
  assert not disk.saver.wait(1, 20)
  assert disk.part(cut) is None


def test_plain_save_is_no_part(disk):
  cut = disk.ask()
  assert disk.save(1, cut=cut)
  assert disk.part(cut) is None


def test_part_the_store_refuses_is_tried_again(disk, monkeypatch):
  monkeypatch.setattr(saving, "_RETRY_SECS", (0.0, 0.0))
  cut, plain = disk.ask(), disk.run.store.compare_and_set
  # What nobody expects may pass as well.
  left = [OSError("full"), MemoryError("short"), OSError("full")]

  def fails(*args):
    if left:
      raise left.pop()
    return plain(*args)

  monkeypatch.setattr(disk.run.store, "compare_and_set", fails)
  assert disk.save(1, cut=cut, part=True)
  assert left == [] and disk.part(cut).step == 1


@pytest.fixture
def far(tmp_path, monkeypatch):
  """A saver whose store is elsewhere."""
  made = Disk(tmp_path / "run", monkeypatch, (tmp_path / "far").as_uri())
  yield made
  made.saver.close()


def copied(disk):
  copies = states.Copies(disk.run.store)
  names = copies.completed(disk.folder)
  return [copies.read_marker(disk.folder / name).step for name in names]


def test_state_that_counts_is_copied_to_a_store_elsewhere(far):
  for serial in (1, 2, 3):
    assert far.save(serial)
  assert copied(far) == far.saved() == [3, 2]


def test_part_of_a_cut_is_written_once_its_state_is_in_the_store(
  far, monkeypatch
):
  monkeypatch.setattr(saving, "_RETRY_SECS", (0.0, 0.0))
  cut, put = far.ask(), far.run.store.put
  left = [OSError("slow"), OSError("down")]

  def fails(key, data):
    assert far.part(cut) is None
    if left:
      raise left.pop()
    put(key, data)

  monkeypatch.setattr(far.run.store, "put", fails)
  assert far.save(1, cut=cut, part=True)
  assert left == [] and copied(far) == [1] and far.part(cut).step == 1
  monkeypatch.setattr(far.run.store, "put", put)
  for serial in (2, 3, 4):
    assert far.save(serial, cut=cut)
  assert copied(far) == [4, 3, 1]


def test_copy_that_fails_costs_neither_the_save_nor_the_next_copy(
  far, monkeypatch
):
  put = far.run.store.put

  def fails(key, data):
    raise OSError("no room")

  monkeypatch.setattr(far.run.store, "put", fails)
  assert far.save(1) and copied(far) == []
  assert far.tape[0]["durable"] and far.saved() == [1]
  monkeypatch.setattr(far.run.store, "put", put)
  assert far.save(2) and copied(far) == [2]


def test_part_that_cannot_be_copied_ends_with_its_cut(far, monkeypatch):
  cut = far.ask()

  def fails(key, data):
    far.run.perform(cuts.abandon(cut, "for a test"))
    raise OSError("too large")

  monkeypatch.setattr(far.run.store, "put", fails)
  assert far.save(1, cut=cut, part=True)
  assert far.part(cut) is None and far.saved() == [1]


def test_part_of_a_cut_that_has_ended_is_a_plain_save(disk):
  cut = disk.ask()
  disk.run.perform(cuts.abandon(cut, "for a test"))
  assert disk.save(1, cut=cut, part=True)
  assert disk.part(cut) is None and disk.saved() == [1]


@pytest.mark.parametrize("damaged", ["its request", "a part that is there"])
def test_cut_that_nobody_can_read_holds_no_later_save_up(
  disk, damaged, monkeypatch
):
  monkeypatch.setattr(saving, "_RETRY_SECS", (0.0, 0.0))
  cut = disk.ask()
  key = keys.cut_request_key(cut)
  if damaged != "its request":
    key = keys.cut_part_key(cut, 0)
    part = records.CutPart(cut, 0, 0, 2, 8, "checkpoints/x", 7, [])
    disk.run.store.write(key, part)
  spoil(disk.run, key)
  assert disk.save(1, cut=cut, part=True)
  assert disk.save(2, cut=cut) and disk.saved() == [2, 1]


def test_nothing_of_a_state_is_kept_once_it_is_saved(disk, monkeypatch):
  # Whoever collects what is logged keeps errors, and all that these have seen.
  monkeypatch.setattr(saver.logger, "disabled", True)
  for failures in ([], [OSError("No space left on device")]):
    disk.failures = failures
    job = disk.job(1)
    alive = [weakref.ref(x) for x in jax.tree.leaves(job.snapshot.opt_state)]
    disk.saver.save(job)
    del job
    disk.saver.wait(1, 20)
    gc.collect()
    assert [found() for found in alive] == [None] * len(alive)


def test_nobody_waits_for_a_thread_that_has_ended(disk, monkeypatch):
  def fail(event, **fields):
    raise TypeError("it cannot be told")

  monkeypatch.setattr(disk, "record", fail)
  disk.saver.save(disk.job(1))
  waiting = threading.Thread(
    target=disk.saver.wait, args=(1, 1000.0), daemon=True
  )
  waiting.start()
  waiting.join(20)
  assert not waiting.is_alive()
  disk.saver._loop.join()
  with pytest.raises(workers.WorkerError, match=r"saver.*cannot be told"):
    disk.saver.check()


def test_island_that_leaves_waits_for_no_store(disk, monkeypatch):
  cut, refused = disk.ask(), threading.Event()

  def fails(prefix):
    refused.set()
    raise OSError("gone")

  monkeypatch.setattr(disk.run.store, "names", fails)
  disk.saver.save(disk.job(1, cut=cut, part=True))
  disk.saver.save(disk.job(2))
  assert refused.wait(20)
  disk.saver.close()  # at once, whatever the pause between two attempts is
  (told,) = disk.tape
  assert not told["durable"] and "stopped before its part" in told["reason"]
  assert not disk.saver.wait(2, 0.0)


def test_state_comes_back_from_what_was_written_on_a_real_disk(tmp_path):
  trainer = quadratic.make_trainer(quadratic.Task(0.5))
  quadratic.step(trainer, 2)
  quadratic.publish(trainer, "b")
  quadratic.step(trainer)
  tape = types.SimpleNamespace(flush=lambda: None, record=lambda *_, **__: None)
  run = CutRun(tmp_path)
  made = saver.Saver(
    quadratic.setting(
      run_dir=tmp_path,
      identity=IDENTITY,
      snapshots=run.store,
      learner=trainer,
      tape=tape,
    )
  )
  positions = (core.Position(0, 0, 2), core.Position(0, 0, 0))
  made.save(saving.Job(1, trainer.snapshot(), positions, 0, TICKET))
  assert made.wait(1, 60)
  made.close()
  (path,) = checkpoint.completed(checkpoint.directory(tmp_path, 0))
  _, found = checkpoints.restore(path, trainer)
  change, velocity = quadratic.moved(0, 3, 0.5)
  assert found.step == 3
  learned = found.progress
  assert quadratic.held(learned.params) == {"a": change, "b": 1 + change}
  published, _ = quadratic.moved(0, 2, 0.5)
  assert quadratic.held(learned.references) == {
    "a": 0,
    "b": 1 + published,
  }
  leaves = [x for x in jax.tree.leaves(found.opt_state) if np.ndim(x)]
  assert {float(x[0]) for x in leaves} == {velocity}


def test_script_that_is_woken_for_nothing_waits_on():
  nothing = types.SimpleNamespace(_jobs=[], _stopped=False)
  script = saving.Saves.save_all(nothing)
  assert [next(script), next(script)] == [None, None]
  nothing._stopped = True
  assert list(script) == []


def test_part_the_store_refuses_is_tried_again_after_a_pause():
  def keep(job):
    raise OSError("read-only")

  one = types.SimpleNamespace(_stopped=False, keep=keep)
  script = saving.Saves._add_part(one, None, None)
  pauses = [next(script) for _ in range(3)]
  assert [type(pause) for pause in pauses] == [operations.Nap] * 3
  one._stopped = True
  with pytest.raises(RuntimeError, match="stopped"):
    next(script)
