"""What a try to make a version leaves behind, and what its successor finds."""

import dataclasses
import types

import pytest
from cut_builder import CutRun, close_of, spoil

from diloco import errors
from diloco.snapshots import keys, operations, records
from diloco.syncer import chores, cutting, heads, orders, protocol

CONTENT = heads.Content([[4]], {"told": 1}, "digest")


def _close(version):
  holes = {3: ((8, 16),)} if version > 1 else {}
  return close_of(version=version, clock={3: 8 * version}, holes=holes)


class Leader:
  """Heads on a store in which one operation of a try goes wrong."""

  def __init__(self, tmp_path):
    self.run = CutRun(tmp_path)
    self.heads = heads.Heads(7)
    self.run.perform(self.heads.fence(2))
    self.fails = {}  # operations by type, and how

  def execute(self, operation):
    effect = self.fails.get(type(operation))
    if effect == "refused":
      raise protocol.RefusedError({"one": "not_finite"})
    result = None if effect == "before" else self._do(operation)
    if effect:
      raise OSError("No space left on device")
    return result

  def _do(self, operation):
    if isinstance(operation, operations.Merge):
      # Of a payload there may be any part when its writer fails.
      self.run.store.write(f"{operation.payload}/params", records.DrawnToken(1))
      return None
    return self.run.execute(operation)

  def attempt(self, version=1, content_of=lambda merged: CONTENT):
    operations.perform(
      self.heads.close_round(_close(version), [], content_of),
      self.execute,
    )

  def fail(self, *fails):
    self.fails = dict(fails)
    with pytest.raises((OSError, protocol.RefusedError)):
      self.attempt()
    self.fails = {}

  def payloads(self):
    """Of versions after the first."""
    names = self.run.store.names("globals/0000")
    return [name for name in names if not name.startswith("000000000")]


@pytest.fixture
def leader(tmp_path):
  return Leader(tmp_path)


def test_head_of_a_version_says_whose_it_is_and_what_is_in_it(leader):
  leader.run.commit(0, 5, {1: 40}, 1.0)
  leader.run.perform(leader.heads.fence(2))
  leader.heads.cut = 2
  leader.attempt(6)
  head = leader.run.head(0)
  assert head == leader.heads.records[0]
  assert head.payload == keys.global_prefix(0, 6, "s7.1")
  assert (head.version, head.token, head.cut, head.clock) == (
    6,
    7,
    2,
    {"3": 48},
  )
  assert head.holes == {"3": [[8, 16]]}
  told = head.chunks, head.merged, head.digest
  assert told == CONTENT[:3]


def test_head_leads_from_the_last_versions_where_differences_are_sent(leader):
  sent = heads.Content(*CONTENT[:3], "bf16", "int4:128")
  for version in range(1, 6):
    leader.attempt(version, lambda merged: sent)
  head = leader.run.head(0)
  assert (head.codec, head.delta_codec) == ("bf16", "int4:128")
  payloads = [payload for _, payload in head.deltas]
  names = [keys.global_prefix(0, v, f"s7.{v}") for v in (3, 4, 5)]
  assert payloads == names
  leader.attempt(6)
  assert leader.run.head(0).deltas == []


def test_merge_is_told_the_share_of_islands_that_are_in(leader):
  chosen = [
    orders.Chosen(leader.run.publish(0, island, 0, 0, step), 0, 0.0, 0.0)
    for island, step in ((0, 8), (0, 16), (3, 8))
  ]
  close = dataclasses.replace(_close(1), chosen=tuple(chosen), absent=(1, 2, 5))
  asked = []

  def execute(operation):
    if isinstance(operation, operations.Merge):
      asked.append(operation.share)
    return leader.execute(operation)

  script = leader.heads.close_round(close, [1.0] * 3, lambda merged: CONTENT)
  operations.perform(script, execute)
  assert asked == [0.4]


def test_version_stays_in_the_epoch_of_the_one_before_it(leader):
  leader.run.store.write(keys.EPOCH, records.Epoch(3, 1))
  leader.run.commit(0, 5, {}, 1.0)
  leader.run.perform(leader.heads.fence(2))
  leader.attempt(6)
  assert leader.run.head(0).epoch == 3


@pytest.mark.parametrize("effect", ["before", "after", "refused"])
def test_merges_that_fail_leave_no_payload_behind(leader, effect):
  for _ in range(5):
    leader.fail((operations.Merge, effect))
    assert leader.payloads() == []
  leader.attempt()
  assert leader.payloads() == ["000000001.s7.6"]


def test_merge_whose_facts_the_tape_refuses_leaves_no_payload(leader):
  def refuse(merged):
    raise OSError("No space left on device")

  with pytest.raises(OSError, match="No space"):
    leader.attempt(content_of=refuse)
  assert leader.payloads() == []


def test_payload_that_could_not_be_deleted_is_deleted_before_another(leader):
  nothing_works = (operations.Merge, "after"), (operations.DeleteTree, "before")
  for _ in range(3):
    leader.fail(*nothing_works)
    assert leader.payloads() == ["000000001.s7.1"]
  leader.attempt()
  assert leader.payloads() == [leader.run.head(0).payload.rpartition("/")[2]]


def test_payload_whose_commit_may_come_late_stays_until_it_cannot(leader):
  leader.fail((operations.CompareAndSet, "before"))
  assert leader.payloads() == ["000000001.s7.1"]
  generation = leader.heads.held[0].generation
  leader.attempt()
  assert leader.payloads() == ["000000001.s7.2"]
  # What was on its way lands now.
  late = dataclasses.replace(leader.run.head(0), token=7)
  key = keys.head_key(0)
  assert not leader.run.store.compare_and_set(key, late, generation)


def test_tries_whose_commits_fail_leave_one_payload_at_most(leader):
  for _ in range(5):
    leader.fail((operations.CompareAndSet, "before"))
    assert len(leader.payloads()) <= 1
  leader.attempt()
  assert leader.payloads() == [leader.run.head(0).payload.rpartition("/")[2]]


def test_commit_that_succeeded_unheard_is_left_to_whoever_leads_next(leader):
  leader.fail((operations.CompareAndSet, "after"))
  with pytest.raises(errors.FencedError):
    leader.attempt()
  assert leader.run.head(0).version == 1
  assert leader.payloads() == ["000000001.s7.1"]


def test_head_is_not_written_anew_over_another_leader(leader):
  leader.fail((operations.CompareAndSet, "before"))
  leader.run.perform(heads.Heads(8).fence(2))
  with pytest.raises(errors.FencedError):
    leader.attempt()
  assert leader.run.head(0).token == 8


def test_every_head_is_looked_after_in_turn(leader):
  leader.run.store.write(keys.SYNCER_LEASE, records.Lease("me", 7, 1))
  before = leader.run.heads()
  for fragment in (0, 1):
    leader.run.store.delete(keys.head_key(fragment))
  healed = []
  for _ in range(2):
    healed += operations.perform(leader.heads.look_after(), leader.execute)
  assert healed == before == leader.run.heads()


@pytest.mark.parametrize("theirs", [True, False])
def test_head_that_is_another_as_it_is_put_back_is_not_held(leader, theirs):
  leader.run.store.write(keys.SYNCER_LEASE, records.Lease("me", 7, 1))
  before, key = leader.heads.held[0], keys.head_key(0)
  another = dataclasses.replace(before.head, token=8)
  leader.run.store.delete(key)

  def execute(operation):
    if theirs and isinstance(operation, operations.CompareAndSet):
      leader.run.store.write(key, another)
      return False
    return leader.execute(operation)

  if theirs:
    with pytest.raises(errors.FencedError, match="was taken over"):
      operations.perform(leader.heads.look_after(), execute)
    assert leader.run.head(0) == another and leader.heads.held[0] is before
    return
  operations.perform(leader.heads.look_after(), execute)
  # It is held as it is now: a commit finds its generation.
  leader.attempt()
  assert leader.run.head(0).version == 1


def test_head_that_is_lost_while_it_is_moved_is_put_back_afterwards(leader):
  leader.run.store.write(keys.SYNCER_LEASE, records.Lease("me", 7, 1))

  def execute(operation):
    if isinstance(operation, operations.Merge):
      leader.run.store.delete(keys.head_key(0))
      _looks(leader, 2)  # it merges meanwhile
    return leader.execute(operation)

  script = leader.heads.close_round(_close(1), [], lambda merged: CONTENT)
  with pytest.raises(protocol.SpoiledError, match="is lost"):
    operations.perform(script, execute)
  _looks(leader, 1)
  leader.attempt()
  assert leader.run.head(0).version == 1


def _looks(leader, count):
  for _ in range(2 * count):  # in turn at two heads
    operations.perform(leader.heads.look_after(), leader.execute)


def test_version_that_stays_and_cannot_be_read_is_told(leader):
  lease = records.Lease("me", 7, 1)
  leader.run.store.write(keys.SYNCER_LEASE, lease)
  for fragment in (0, 1):
    leader.run.commit(fragment, 5, {}, 5.0)
  leader.run.perform(leader.heads.fence(2))
  _looks(leader, 2)
  assert leader.heads.standing == {}
  # No island can fetch it; so none publishes, and nothing is merged.
  payload = leader.run.head(1).payload
  leader.run.store.delete_tree(f"{payload}/params")
  _looks(leader, 2)
  assert list(leader.heads.standing) == [1]
  assert payload in leader.heads.standing[1]
  leader.run.commit(1, 5, {}, 5.0)  # the store has it again
  _looks(leader, 4)
  assert leader.heads.standing == {}


def test_version_that_cannot_be_read_is_told_although_the_lease_is_damaged(
  leader,
):
  leader.run.store.write(keys.SYNCER_LEASE, records.Lease("me", 7, 1))
  spoil(leader.run, keys.SYNCER_LEASE)
  leader.run.store.delete_tree(leader.heads.records[1].payload)
  _looks(leader, 2)
  assert list(leader.heads.standing) == [1]


def test_version_that_stays_is_read_at_every_doubling_of_its_looks(leader):
  read = []

  def execute(operation):
    if isinstance(operation, operations.ReadPayload):
      return read.append((operation.head.fragment, looks))
    return leader.run.execute(operation)

  for looks in range(1, 40):
    for _ in range(2):
      operations.perform(leader.heads.look_after(), execute)
    if looks == 20:
      leader.attempt()  # fragment 0 moves on, and is counted anew
  assert [n for p, n in read if p == 1] == [2, 4, 8, 16, 32]
  assert [n for p, n in read if p == 0] == [2, 4, 8, 16, 22, 24, 28, 36]


def test_deposed_leader_does_not_tell_of_what_its_successor_deleted(leader):
  leader.run.store.write(keys.SYNCER_LEASE, records.Lease("other", 8, 1))
  for head in leader.heads.records:
    leader.run.store.delete_tree(head.payload)
  with pytest.raises(errors.FencedError):
    _looks(leader, 2)
  assert leader.heads.standing == {}


def test_commit_that_another_leader_has_taken_over_does_not_count(leader):
  done = leader.execute

  def execute(operation):
    result = done(operation)
    if isinstance(operation, operations.CompareAndSet):
      leader.run.perform(heads.Heads(8).fence(2))
    return result

  leader.execute = execute
  with pytest.raises(errors.FencedError):
    leader.attempt()
  assert leader.heads.records[0].version == 0


def test_head_counts_as_written_anew_only_if_its_generation_moved(leader):
  held = leader.heads.held[0]

  def refuse(operation):
    if isinstance(operation, operations.CompareAndSet):
      return False
    return leader.run.store.execute(operation)

  with pytest.raises(errors.FencedError):
    operations.perform(protocol.rewrite(held), refuse)
  rewritten = leader.run.perform(protocol.rewrite(held))
  assert rewritten.head == held.head
  assert rewritten.generation != held.generation


def test_who_takes_over_is_after_the_last_cut_that_is_known(leader):
  def recover(found):
    assert [head.token for head in found] == [8, 8]
    yield from ()
    return 4

  leader.run.commit(0, 5, {}, 1.0, cut=2)
  nobody = chores.Chores(cutting.CutKeeper(), 2)
  for cuts, last in ((None, 2), (types.SimpleNamespace(recover=recover), 4)):
    one = heads.Heads(8)
    taken = leader.run.perform(one.take_over(2, cuts, nobody))
    assert (taken, one.cut) == (last, last)


def test_heads_of_a_newer_leader_are_not_fenced(leader):
  leader.run.commit(1, 5, {}, 1.0, token=9)
  with pytest.raises(errors.FencedError, match="token 9"):
    leader.run.perform(heads.Heads(8).fence(2))
  assert leader.run.head(1).token == 9
