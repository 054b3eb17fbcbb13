"""What the syncer's shell does while the store fails now and then."""

import contextlib
import dataclasses
import math

import pytest
from cut_builder import PLAN, CutRun, lead, spoil

from diloco import errors
from diloco.snapshots import cuts, keys, operations, records
from diloco.syncer import (
  chores,
  core,
  cutting,
  grace,
  heads,
  members,
  orders,
  outer_optimizer,
  protocol,
  quorum,
  round_merge,
  rounds,
  weighting,
)
from diloco.syncer import (
  leader as leader_lib,
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

  def __init__(self, run_dir, monkeypatch, decay=1.0, version=0):
    self.run = CutRun(run_dir)
    if version:
      self.run.commit(0, version, {}, 0.0)
    self.tape = recorder.Recorder(run_dir, "syncer", 1)
    self._patch = monkeypatch
    keeper = cutting.CutKeeper()
    outer = outer_optimizer.OuterOptimizer(0.5, 0.0)
    self.now = 0.0
    self.chores = chores.Chores(keeper, keep_versions=3)
    self.run.store.perform(self.chores.take_over(self.run.heads()))
    held = heads.Heads(1)
    self.run.store.perform(held.fence(2))
    self.check = lambda: None
    self.rounds = rounds.Rounds(
      PLAN,
      round_merge.RoundMerger(self.run.store, PLAN, "mean", outer),
      self.tape,
      rounds.Orders(),
      leader_lib.Parts(
        lambda merging: self.check(),
        core.SyncerCore(SETTINGS, protocol.starts(self.run.heads())),
        held,
        weighting.Weighting(decay, 4),
        keeper,
        self.chores,
        members.MemberWatch(60.0),
        look_every_secs=1.0,
        retry_secs=0.0,
      ),
    )
    self.handle(orders.Membership({0: 0.1}))

  def handle(self, event):
    self.lead(self.rounds.handle(event))

  def look_after_heads(self):
    self.lead(self.rounds.look_after_heads())

  def lead(self, script):
    lead(self.rounds, self.run.execute, script)

  def publish(self, step, norm=None, fragment=0, first=0, base=0):
    record = self.run.publish(fragment, 0, base, first, step)
    norms = [norm or math.sqrt(t.size) for t in PLAN.fragments[fragment]]
    record = dataclasses.replace(record, norms=norms)
    self.run.store.write(keys.contribution_key(record.key), record)
    return record

  def send(self, step, norm=None, **what):
    """Publishes, and lets the syncer see it."""
    record = self.publish(step, norm, **what)
    self.look()
    return record

  def look(self):
    found, _ = self.run.store.perform(self.chores.look())
    self.handle(orders.Arrived([record for _, record in found]))
    self.handle(orders.Tick())

  def tidy(self):
    self.now += 100.0
    self.run.store.perform(self.chores.tidy(self.now))

  def break_store(self, name, key=""):
    """The named method fails, for one key or all, until mended."""
    works = getattr(self.run.store, name)

    def fails(what, *rest):
      if key in what:
        raise OSError("the disk is full")
      return works(what, *rest)

    self._patch.setattr(self.run.store, name, fails)

  def patch(self, where, name, value):
    self._patch.setattr(where, name, value)

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


def test_round_is_merged_although_the_request_of_its_cut_is_damaged(leader):
  leader.run.perform(cuts.request([0], 2))
  spoil(leader.run, keys.cut_request_key(1))
  sent = dataclasses.replace(leader.publish(8), cut=1)
  leader.run.store.write(keys.contribution_key(sent.key), sent)
  with pytest.raises(errors.CorruptSnapshotError, match="CutRequest"):
    leader.look()
  assert leader.run.head(0).version == 1
  assert leader.run.waiting() == {}
  leader.send(16, first=8, base=1)
  assert leader.run.head(0).version == 2


def test_versions_after_a_cut_are_stamped_although_its_part_was_refused(leader):
  leader.run.perform(cuts.request([0], 2))
  sent = dataclasses.replace(leader.publish(8), cut=1)
  leader.run.store.write(keys.contribution_key(sent.key), sent)
  leader.break_store("compare_and_set", "cuts")
  with pytest.raises(OSError, match="full"):
    leader.look()
  assert [h.cut for h in leader.run.heads()] == [1, 0]


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
  found, _ = leader.run.store.perform(leader.chores.look())

  def taken_over():
    raise errors.FencedError("the lease was taken over")

  with pytest.raises(errors.FencedError):
    leader.check = taken_over
    leader.handle(orders.Arrived([record for _, record in found]))
  assert set(leader.run.waiting()) == {s.key for s in sent}
  assert leader.run.store.keys(sent[0].payload)
  assert leader.events("discarded") == []


def test_verdict_that_could_not_be_written_is_told_again(leader):
  leader.break_store("write", "verdicts")
  with pytest.raises(OSError, match="full"):
    leader.send(8, norm=math.nan)
  leader.tidy()  # still broken
  leader.mend_store()
  assert leader.verdict() is None
  leader.tidy()
  assert (leader.verdict().island, leader.verdict().offences) == (0, 1)
  assert leader.verdict().reason == "not_finite"
  assert leader.run.waiting() == {}
  told = leader.events("quarantined")
  assert [e["offences"] for e in told] == [1]


def test_leader_looks_and_merges_although_nothing_can_be_told(leader):
  for what in (keys.BOARD, "verdicts"):
    leader.break_store("write", what)
  with pytest.raises(OSError, match="full"):
    leader.send(8, norm=math.nan)
  leader.publish(8, fragment=1)
  turns, pauses = iter(["", "", "", "enough"]), []
  leader.rounds.over = lambda: next(turns)
  leader.rounds._parts = leader.rounds._parts._replace(retry_secs=1.5)

  def execute(operation):
    if isinstance(operation, float):
      return pauses.append(operation)
    nap = isinstance(operation, operations.Nap)
    return None if nap else leader.run.execute(operation)

  with pytest.raises(OSError, match="full"):  # at its end, of the board
    lead(leader.rounds, execute, leader.rounds.lead())
  assert leader.run.head(1).version == 1
  assert pauses and set(pauses) == {1.5}  # a store that fails is not hurried


def lose(run, key):
  run.store.delete(key)


def swap(run, key):
  run.store.write(key, run.head(1))


def leads(leader):
  leader.run.store.write(keys.SYNCER_LEASE, records.Lease("me", 1, 4))


@pytest.mark.parametrize("damage", [spoil, lose, swap])
def test_leader_puts_back_a_head_that_the_store_has_spoiled(leader, damage):
  leads(leader)
  leader.send(8)
  before = leader.run.head(0)
  damage(leader.run, keys.head_key(0))
  leader.look_after_heads()
  assert leader.run.head(0) == before
  leader.send(16, first=8, base=1)
  assert leader.run.head(0).version == 2
  (healed,) = leader.events("head_healed")
  assert (healed["fragment"], healed["version"]) == (0, 1)
  assert leader.rounds.damaged == []


def test_head_found_spoiled_by_a_commit_is_put_back_and_merged_upon(leader):
  leads(leader)
  leader.send(8)
  for version in (1, 2):  # each time it is told
    spoil(leader.run, keys.head_key(0))
    leader.send(8 * version + 8, first=8 * version, base=version)
    assert leader.rounds.damaged == [0]
    assert len(leader.events("global_damaged")) == version
    for _ in range(2):  # both heads
      leader.look_after_heads()
    leader.handle(orders.Tick())
    assert leader.run.head(0).version == version + 1
    assert leader.rounds.damaged == []


@pytest.mark.parametrize("lease", [None, ("me", 2, 4), ("", 1, 5)])
def test_deposed_leader_leaves_a_spoiled_head_alone(leader, lease):
  leader.send(8)
  if lease:
    leader.run.store.write(keys.SYNCER_LEASE, records.Lease(*lease))
  spoil(leader.run, keys.head_key(0))
  with pytest.raises(errors.FencedError):
    leader.look_after_heads()
  with pytest.raises(errors.CorruptSnapshotError):
    leader.run.head(0)


def test_head_is_not_put_back_over_a_commit_nobody_heard_of(leader):
  leads(leader)
  works = leader.run.store.execute

  def unheard(operation):
    result = works(operation)
    if isinstance(operation, operations.CompareAndSet):
      raise OSError("the answer is lost")
    return result

  leader.patch(leader.run.store, "execute", unheard)
  leader.handle(orders.Arrived([leader.publish(8)]))
  leader.mend_store()
  spoil(leader.run, keys.head_key(0))
  for _ in range(3):
    leader.look_after_heads()
  assert leader.rounds.damaged == [0]
  (told,) = leader.events("global_damaged")
  assert "a later one may have been there" in told["reason"]


def test_fragment_whose_tensors_are_gone_stands_still_and_no_other(leader):
  leads(leader)
  leader.send(8)
  leader.run.store.delete_tree(leader.run.head(0).payload)
  leader.send(16, first=8, base=1)
  for _ in range(3):
    leader.look_after_heads()
  assert leader.rounds.damaged == [0]
  leader.send(8, fragment=1)
  leader.look()
  assert leader.run.head(1).version == 1
  assert len(leader.events("global_damaged")) == 1


def test_contribution_weighs_less_for_each_version_it_is_behind(
  tmp_path, monkeypatch
):
  leader = Leader(tmp_path, monkeypatch, decay=0.5, version=2)
  for base, first in ((0, 0), (1, 8), (2, 16)):
    leader.publish(first + 8, base=base, first=first)
  leader.look()
  leader.tape.flush()
  (merged,) = leader.events("merged")
  found = {c["staleness"]: c["weight"] for c in merged["contributions"]}
  # (800 tokens)^2 / 8 steps, halved for each version.
  assert found == {0: 80_000, 1: 40_000, 2: 20_000}
  leader.tape.close()


def test_lease_and_tape_are_seen_to_between_the_merge_and_its_commit(leader):
  done = []

  def note(name, method):
    def call(*args, **kwargs):
      done.append(name)
      return method(*args, **kwargs)

    return call

  execute = leader.run.store.execute

  def look(operation):
    if isinstance(operation, operations.CompareAndSet):
      done.append("commit")
    return execute(operation)

  leader.patch(leader.run.store, "execute", look)
  leader.patch(leader.tape, "flush", note("flush", leader.tape.flush))
  write = note("payload", leader.run.store.arrays.write)
  leader.publish(8)
  leader.patch(leader.run.store.arrays, "write", write)
  found, _ = leader.run.store.perform(leader.chores.look())
  arrived = orders.Arrived([record for _, record in found])
  leader.check = note("lease", lambda: None)
  leader.handle(arrived)
  first = done[: done.index("commit") + 1]
  assert first[-4:] == ["payload", "flush", "lease", "commit"]


def test_leader_deposed_during_a_merge_commits_nothing(leader):
  leader.publish(8)
  found, _ = leader.run.store.perform(leader.chores.look())
  works, merged = leader.run.store.arrays.write, []

  def write(*args):
    merged.append(args)
    works(*args)

  leader.patch(leader.run.store.arrays, "write", write)

  def check():
    if merged:
      raise errors.FencedError("the lease was taken over")

  with pytest.raises(errors.FencedError):
    leader.check = check
    leader.handle(orders.Arrived([r for _, r in found]))
  assert leader.run.head(0).version == 0
  assert leader.events("merged") == []


def test_tape_has_every_field_of_what_was_decided(leader):
  sent = dataclasses.replace(leader.publish(8, first=3), incarnation=4)
  discard = orders.Discard(sent, "too_stale", 2.5)
  verdict = orders.Quarantine(1, 7, 1, "not_finite", 3, 10.0)
  fields = {
    "round_opened": {"fragment": 1, "version": 5, "island": 2},
    "discarded": {
      **{"fragment": 0, "key": sent.key, "island": 0, "island_incarnation": 4},
      **{"first_step": 3, "step": 8, "c_tokens": sent.c_tokens},
      **{"reason": "too_stale", "arrived_at": 2.5},
    },
    "quarantined": {
      **{"island": 1, "island_incarnation": 7, "fragment": 1},
      **{"reason": "not_finite", "offences": 3, "suspended_secs": 10.0},
    },
  }
  for action in (orders.Open(1, 5, 2), discard, verdict):
    leader.rounds.acts(action)
  for name, expected in fields.items():
    (line,) = leader.events(name)
    assert expected.items() <= line.items()


# Seconds: of a step, asked at least, until a round is due; and the pause.
PAUSES = [
  (0.2, 0.0, None, 0.01),  # a twentieth of a step
  (0.02, 0.0, None, 0.002),
  (9.0, 0.0, None, 0.05),
  (0.2, 0.03, None, 0.03),  # the store is far
  (0.2, 0.0, 9.0, 0.01),
  (0.2, 0.0, 0.005, 0.005),
  (0.2, 0.0, -1.0, 0.002),
]


def test_pause_is_a_share_of_the_fastest_step_until_a_round_is_due(leader):
  one, parts = leader.rounds, leader.rounds._parts
  for step_secs, least_secs, due_in, pause_secs in PAUSES:
    one._parts = parts._replace(least_pause_secs=least_secs)
    one.present({0: 20.0, 1: step_secs, 2: 0.0})  # that one has done no step
    deadline = None if due_in is None else 100.0 + due_in
    assert one.pause_secs(100.0, deadline) == pytest.approx(pause_secs)


def test_each_turn_does_what_is_due(leader):
  leads(leader)
  now, boards, looks = [0.0], [], []
  leader.rounds._clock = lambda: now[0]
  for island in (0, 1):
    member = records.Member(
      f"island-{island}", 1, 1, "", step_secs=0.5, present=True
    )
    leader.run.store.write(keys.member_key(member.role), member)
  leader.publish(8)

  def execute(operation):
    if isinstance(operation, operations.Nap):
      now[0] += 0.4
      return None
    if isinstance(operation, operations.Write) and operation.key == keys.BOARD:
      boards.append(now[0])
    if operation == operations.Names("members"):
      looks.append(now[0])
    return leader.run.execute(operation)

  turns = iter([""] * 5 + ["enough"])
  leader.rounds.over = lambda: next(turns)
  lead(leader.rounds, execute, leader.rounds.lead())
  # What a predecessor told may be old; then the round is told of.
  assert boards[:2] == [0.0, 0.0] and looks == [0.0, pytest.approx(1.2)]
  assert leader.run.head(0).version == 1
  (merged,) = leader.events("merged")
  assert merged["absent"] == [1] and leader.rounds.step_secs == 0.5


def test_leader_says_whether_its_merge_has_to_get_on(leader):
  said, parts = {}, leader.rounds._parts

  def asks(when):
    tell = {"check": lambda merging: said.update({when: merging})}
    leader.rounds._parts = parts._replace(**tell)
    leader.rounds.check()

  def merging():
    asks("during")
    yield from ()

  leader.rounds.merging = merging
  leader.rounds.wake = lambda: asks("after")  # its merge has ended
  asks("before")
  leader.send(8)
  assert said == {"before": False, "during": True, "after": False}


@pytest.mark.parametrize("refused", ["", keys.BOARD])
def test_what_a_commit_leaves_over_is_discarded(leader, refused):
  late = leader.publish(16)

  def merging():
    leader.run.perform(leader.rounds.handle(orders.Arrived([late])))
    yield from ()

  leader.rounds.merging = merging
  sent = leader.publish(8)
  if refused:
    leader.break_store("write", refused)
  with pytest.raises(OSError) if refused else contextlib.nullcontext():
    leader.handle(orders.Arrived([sent]))
  (discarded,) = leader.events("discarded")
  assert discarded["key"] == late.key
  assert discarded["reason"] == "overlaps_merged"
  assert leader.run.waiting() == {}


def test_tape_has_the_norm_of_all_tensors_of_a_contribution(leader):
  sent = dataclasses.replace(leader.publish(8), norms=[2.0, 3.0, 6.0])
  known = dict(staleness=1, waited_secs=0.5, arrived_at=2.5)
  chosen = orders.Chosen(sent, **known)
  (told,) = rounds._contributions([chosen], [0.75])
  assert told["norm"] == pytest.approx(7.0)
  assert known.items() <= told.items() and told["weight"] == 0.75
