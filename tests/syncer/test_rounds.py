"""What the syncer's shell does while the store fails now and then."""

import dataclasses
import math

import pytest
from cut_builder import PLAN, CutRun

from diloco import errors
from diloco.snapshots import keys, records
from diloco.syncer import (
  chores,
  committer,
  core,
  cutting,
  grace,
  heads,
  outer_optimizer,
  quorum,
  rounds,
  weighting,
)
from diloco.tape import reader, recorder

SETTINGS = core.Settings(
  num_fragments=2,
  quorum=quorum.MinimumQuorum(1),
  grace=grace.FixedGrace(0.0),
  max_staleness=4,
)


class Leader:
  """A syncer without lease and loop, on a store that can be broken."""

  def __init__(self, run_dir, monkeypatch):
    self.run = CutRun(run_dir)
    self.tape = recorder.Recorder(run_dir, "syncer", 1)
    self._patch = monkeypatch
    keeper = cutting.CutKeeper(self.run.store)
    outer = outer_optimizer.OuterOptimizer(0.5, 0.0)
    self.chores = chores.Chores(keeper, keep_versions=3)
    self.run.store.perform(self.chores.take_over(self.run.heads()))
    held = heads.Heads(1)
    self.run.store.perform(held.fence(2))
    self.rounds = rounds.Rounds(
      self.run.store,
      core.SyncerCore(SETTINGS, [(0, {}), (0, {})]),
      committer.Committer(self.run.store, PLAN, held, "mean", outer),
      weighting.Weighting(1.0, 4),
      keeper,
      self.chores,
      self.tape,
    )
    self.rounds.handle(core.Membership({0: 0.1}))

  def publish(self, step, norm=None, fragment=0):
    record = self.run.publish(fragment, 0, 0, 0, step)
    norms = [norm or math.sqrt(t.size) for t in PLAN.fragments[fragment]]
    record = dataclasses.replace(record, norms=norms)
    self.run.store.write(keys.contribution_key(record.key), record)
    return record

  def send(self, step, norm=None):
    """Publishes, and lets the syncer see it."""
    record = self.publish(step, norm)
    self.look()
    return record

  def look(self):
    _, found, _ = self.run.store.perform(self.chores.look())
    self.rounds.handle(core.Arrived([record for _, record in found]))
    self.rounds.handle(core.Tick())

  def tidy(self):
    self.run.store.perform(self.chores.tidy())

  def break_store(self, name, key=""):
    """The named method fails, for one key or all, until mended."""
    works = getattr(self.run.store, name)

    def fails(what, *rest):
      if key in what:
        raise OSError("the disk is full")
      return works(what, *rest)

    self._patch.setattr(self.run.store, name, fails)

  def mend_store(self):
    self._patch.undo()

  def events(self, name):
    found = reader.read(self.run.dir).events
    return [e for e in found if e["event"] == name]

  def verdict(self):
    return self.run.store.read(keys.verdict_key(0), records.Verdict)


@pytest.fixture
def leader(tmp_path, monkeypatch):
  made = Leader(tmp_path, monkeypatch)
  yield made
  made.tape.close()


def test_merge_of_a_damaged_fragment_ends_nobody_elses_turn(leader):
  leader.run.store.delete_tree(leader.run.head(0).payload)
  for fragment in (0, 1):
    leader.publish(8, fragment=fragment)
  leader.look()  # raises nothing, so its loop goes on at once
  assert [h.version for h in leader.run.heads()] == [0, 1]
  assert [e["fragment"] for e in leader.events("global_damaged")] == [0]


def test_merged_record_that_could_not_be_deleted_is_deleted_later(leader):
  leader.break_store("delete", "contributions")
  sent = leader.send(8)
  assert leader.run.head(0).version == 1
  assert list(leader.run.waiting()) == [sent.key]
  leader.tidy()  # still broken
  leader.mend_store()
  assert sent.key in leader.run.waiting()
  leader.tidy()
  assert leader.run.waiting() == {}
  assert not leader.run.store.keys(sent.payload)
  assert len(leader.events("merged")) == 1


def test_record_of_a_merge_is_deleted_although_the_board_was_refused(leader):
  leader.break_store("write", keys.BOARD)
  with pytest.raises(OSError, match="full"):
    leader.send(8)
  leader.mend_store()
  assert leader.run.head(0).version == 1
  leader.tidy()
  assert leader.run.waiting() == {}


def test_discarded_record_that_could_not_be_deleted_is_deleted_later(leader):
  leader.send(8)
  leader.break_store("delete", "contributions")
  sent = leader.send(12)  # with steps that are merged
  leader.mend_store()
  assert [e["key"] for e in leader.events("discarded")] == [sent.key]
  assert list(leader.run.waiting()) == [sent.key]
  leader.tidy()
  assert leader.run.waiting() == {}
  assert sent.key not in leader.chores.known
  assert len(leader.events("discarded")) == 1


def test_deposed_leader_that_notices_deletes_nothing(leader):
  # Two publications of one island: the first is superseded.
  sent = [leader.run.publish(0, 0, 0, 0, step) for step in (8, 12)]
  _, found, _ = leader.run.store.perform(leader.chores.look())

  def taken_over():
    raise errors.FencedError("the lease was taken over")

  with pytest.raises(errors.FencedError):
    leader.rounds.handle(
      core.Arrived([record for _, record in found]), taken_over
    )
  assert set(leader.run.waiting()) == {s.key for s in sent}
  assert leader.run.store.keys(sent[0].payload)
  assert leader.events("discarded") == []


def test_verdict_that_could_not_be_written_is_told_again(leader):
  leader.break_store("write", "verdicts")
  with pytest.raises(OSError, match="full"):
    leader.send(8, norm=math.nan)
  with pytest.raises(OSError, match="full"):
    leader.tidy()
  leader.mend_store()
  assert leader.verdict() is None
  leader.tidy()
  assert (leader.verdict().island, leader.verdict().offences) == (0, 1)
  assert leader.verdict().reason == "not_finite"
  assert leader.run.waiting() == {}
  told = leader.events("quarantined")
  assert [e["offences"] for e in told] == [1]
