"""What a leading syncer tells and deletes, and what it does not forget."""

import dataclasses

import pytest

from diloco import errors
from diloco.snapshots import keys, operations, records
from diloco.syncer import chores, cutting, orders

BOARD = records.Board([1], {})
NAMES = ["0000.0000.0001.000000008", "0000.0001.0001.000000008"]


class Store:
  """Does what it is told, writes it down, and refuses what it must."""

  def __init__(self, **listings):
    self.done = []
    self.refused = ()  # operations, by the beginning of their key
    self.listings = listings
    self.damaged = set()
    self.records = {}

  def __call__(self, operation):
    if isinstance(operation, operations.Point):
      return None
    if isinstance(operation, operations.Names):
      return sorted(self.listings.get(operation.prefix, ()))
    if isinstance(operation, operations.Read):
      if operation.key in self.damaged:
        raise errors.CorruptSnapshotError("torn")
      return self.records.get(operation.key), 0
    if operation[0].startswith(self.refused or "nothing"):
      raise OSError("the disk is full")
    self.done.append(operation)
    return None

  def deleted(self):
    return [o[0] for o in self.done if not isinstance(o, operations.Write)]


class Pins(cutting.CutKeeper):
  """Some payloads belong to a cut."""

  def __init__(self, *pinned):
    self._pinned = pinned

  def is_pinned(self, name):
    return name in self._pinned

  def is_pinned_payload(self, prefix):
    return prefix in self._pinned


def _payload(version):
  return keys.global_prefix(0, version, f"s1.{version}")


def _head(version):
  return records.Head(0, version, 2, _payload(version), [], {}, {})


def _leader(execute, pins=None, keep_versions=2, version=0):
  one = chores.Chores(pins or cutting.CutKeeper(), keep_versions)
  operations.perform(one.take_over([_head(version)]), execute)
  return one


def _committed(one, version, execute, merged=()):
  operations.perform(one.clear_up(_head(version), BOARD, merged), execute)


def test_islands_are_told_before_anything_is_deleted():
  execute = Store()
  _committed(_leader(execute), 1, execute, NAMES)
  assert execute.done == [
    operations.Write(keys.BOARD, BOARD),
    *(
      operation
      for name in NAMES
      for operation in (
        operations.Delete(keys.contribution_key(name)),
        operations.DeleteTree(keys.payload_prefix(name)),
      )
    ),
  ]


def test_all_is_done_although_the_board_is_refused():
  execute = Store()
  one = _leader(execute, keep_versions=0)
  _committed(one, 1, execute)
  execute.refused = (keys.BOARD,)
  with pytest.raises(OSError, match="full"):
    _committed(one, 2, execute, NAMES)
  assert _payload(1) in execute.deleted()
  assert {keys.contribution_key(n) for n in NAMES} <= set(execute.deleted())


def test_of_a_pinned_contribution_only_the_record_goes():
  execute = Store()
  one = _leader(execute, Pins(NAMES[0]))
  for name in NAMES:
    operations.perform(one.delete(name), execute)
  assert execute.deleted() == [
    keys.contribution_key(NAMES[0]),
    keys.contribution_key(NAMES[1]),
    keys.payload_prefix(NAMES[1]),
  ]


def test_what_may_be_merged_late_keeps_no_version_for_ever():
  kept = [chores.versions_kept(n) for n in (0, 2, 8, 9, 1_000_000)]
  assert kept == [3, 4, 10, 10, 10]


def test_newest_versions_and_those_of_cuts_are_kept():
  left = [_payload(v).rpartition("/")[2] for v in (3, 4, 5)]
  never_committed, of_a_successor = "000000006.s1.9", "000000006.s3.1"
  listing = [*left, never_committed, of_a_successor, "a lock"]
  execute = Store(**{"globals/0000": listing})
  one = _leader(execute, Pins(_payload(4)), version=5)
  assert execute.deleted() == [f"globals/0000/{never_committed}"]
  execute.done.clear()
  deleted = []
  for version in range(6, 10):
    _committed(one, version, execute)
    deleted.append(execute.deleted())
    execute.done.clear()
  assert deleted == [
    [_payload(3)],
    [],
    [_payload(5)],
    [f"globals/0000/{of_a_successor}", _payload(6)],
  ]


@pytest.mark.parametrize(
  ("name", "goes"),
  [
    *(("6.s1.1", True), ("6.s01.7", True), ("17.s0.1", True)),
    *(("6.s2.1", False), ("6.s10.1", False)),  # by this leader, and a later one
    *(("5.s1.1", False), ("4.s1.9", False)),  # not beyond the head
    *(("6.s", False), ("6.sx.1", False), ("6.i1.1", False), ("6", False)),
    *(("x.s1.1", False), ("6.1.1", False), ("6.ss1.1", False)),
  ],
)
def test_version_beyond_the_head_by_an_earlier_leader_was_never_committed(
  name, goes
):
  execute = Store(**{"globals/0000": [name]})
  _leader(execute, version=5)
  assert execute.deleted() == [f"globals/0000/{name}"] * goes


def test_version_that_could_not_be_deleted_is_deleted_with_the_next():
  execute = Store()
  one = _leader(execute, keep_versions=1)
  for version in (1, 2):
    _committed(one, version, execute)
  execute.refused = ("globals",)
  with pytest.raises(OSError, match="full"):
    _committed(one, 3, execute)
  execute.refused = ()
  _committed(one, 4, execute)
  _committed(one, 5, execute)
  assert execute.deleted() == [_payload(v) for v in (1, 2, 3)]


def test_record_that_cannot_be_read_is_told_of_once():
  execute = Store(contributions=NAMES)
  execute.damaged = set(map(keys.contribution_key, NAMES))
  execute.refused = ("contributions",)
  one = _leader(execute)
  broken = operations.perform(one.look(), execute)[1]
  assert [name for name, _ in broken] == NAMES
  for name in NAMES:
    operations.perform(one.delete(name), execute)
  assert not operations.perform(one.look(), execute)[1]
  execute.refused = ()
  assert one.pending
  operations.perform(one.tidy(0.0), execute)
  assert not one.pending
  # It comes back, delivered twice.
  assert operations.perform(one.look(), execute)[1]


def test_what_others_leave_among_the_records_is_not_read():
  execute = Store(contributions=[".nfs01", *NAMES[:1], "0000.0000.x"])
  execute.records = {keys.contribution_key(NAMES[0]): "a record"}
  one = _leader(execute)
  read = []

  def watched(operation):
    read.extend(
      [operation.key] if isinstance(operation, operations.Read) else []
    )
    return execute(operation)

  found = operations.perform(one.look(), watched)
  assert found == ([(NAMES[0], "a record")], [])
  assert read == [keys.contribution_key(NAMES[0])]


def test_what_is_still_to_be_deleted_is_found_no_more():
  record = records.Contribution(
    *(0, 1, 0, 0, 0, 8, 10, "f32", "plan", ""), [], 0, [], 0, 0
  )
  execute = Store(contributions=NAMES[:1])
  execute.records = {keys.contribution_key(NAMES[0]): record}
  execute.refused = ("contributions",)
  one = _leader(execute)
  assert operations.perform(one.look(), execute)[0]
  operations.perform(one.delete(NAMES[0]), execute)
  execute.listings["contributions"] = []  # a stale listing
  assert operations.perform(one.look(), execute) == ([], [])
  execute.listings["contributions"] = NAMES[:1]
  assert not operations.perform(one.look(), execute)[0]


def test_store_that_refuses_deletions_is_asked_ever_less_often(
  monkeypatch,
):
  execute = Store()
  execute.refused = ("contributions",)
  one, asked, said = _leader(execute), [], []
  monkeypatch.setattr(chores.logger, "warning", lambda *what: said.append(what))

  def counted(operation):
    asked.append(operation[0])
    return execute(operation)

  for name in NAMES:
    operations.perform(one.delete(name), counted)
  for turn in range(10_000):
    operations.perform(one.tidy(0.01 * turn), counted)
  refused = [key for key in asked if key.startswith("contributions")]
  assert len(refused) < 20
  assert set(refused) == set(map(keys.contribution_key, NAMES))
  assert [what[1] for what in said] == NAMES[:1]
  # One that is refused for ever keeps no other waiting.
  execute.refused = (keys.contribution_key(NAMES[0]),)
  for now in (200.0, 300.0):
    operations.perform(one.tidy(now), execute)
  assert execute.deleted() == [
    keys.contribution_key(NAMES[1]),
    keys.payload_prefix(NAMES[1]),
  ]
  execute.refused = ()
  operations.perform(one.tidy(400.0), execute)
  assert keys.contribution_key(NAMES[0]) in execute.deleted()
  assert not one.pending and not one.known
  # What works again has failed no time yet: pauses begin with the shortest.
  execute.refused = ("contributions",)
  operations.perform(one.delete(NAMES[0]), execute)
  operations.perform(one.tidy(500.0), execute)
  execute.refused = ()
  operations.perform(one.tidy(500.2), execute)
  assert not one.pending


def test_verdict_that_got_lost_is_told_again_and_no_other():
  execute = Store()
  one = _leader(execute)
  operations.perform(one.remind(0), execute)  # nobody told it anything
  action = orders.Quarantine(0, 1, 0, "not_finite", 1, 0.0)
  operations.perform(one.accuse(action), execute)
  ((key, verdict),) = execute.done
  assert (verdict.offences, verdict.reason) == (1, "not_finite")
  execute.records[key] = verdict
  operations.perform(one.remind(0), execute)
  assert len(execute.done) == 1
  older = dataclasses.replace(verdict, incarnation=0)  # of a store gone back
  for spoil in (
    lambda: execute.records.update({key: older}),
    execute.records.clear,
    lambda: execute.damaged.add(key),
  ):
    execute.done.clear()
    spoil()
    operations.perform(one.remind(0), execute)
    assert execute.done == [operations.Write(key, verdict)]


def test_record_that_has_gone_is_not_known_any_more():
  execute = Store(contributions=NAMES)
  for name in NAMES:
    execute.records[keys.contribution_key(name)] = f"record {name}"
  one = _leader(execute)
  assert len(operations.perform(one.look(), execute)[0]) == 2
  assert one.known == set(NAMES)
  assert operations.perform(one.look(), execute)[0] == []
  execute.listings["contributions"] = NAMES[1:]
  assert operations.perform(one.look(), execute)[0] == []
  assert one.known == {NAMES[1]}
  execute.listings["contributions"] = NAMES
  found = operations.perform(one.look(), execute)[0]
  assert [name for name, _ in found] == NAMES[:1]


def test_verdict_the_store_refuses_is_told_until_it_takes_it():
  execute, asked = Store(), []
  one = _leader(execute)

  def counted(operation):
    asked.append(operation[0])
    return execute(operation)

  execute.refused = ("verdicts",)
  for island in (3, 4):
    accused = orders.Quarantine(island, 1, 0, "not_finite", 2, 20.0)
    with pytest.raises(OSError, match="full"):
      operations.perform(one.accuse(accused), execute)
  for turn in range(10_000):
    operations.perform(one.tidy(0.01 * turn), counted)
  assert set(asked) == {keys.verdict_key(3), keys.verdict_key(4)}
  assert len(asked) < 20 and one.pending
  # One that is refused for ever keeps no other waiting.
  execute.refused = (keys.verdict_key(3),)
  for now in (200.0, 300.0):
    operations.perform(one.tidy(now), execute)
  told = records.Verdict(4, 1, 2, 0, "not_finite", 20.0)
  assert execute.done == [operations.Write(keys.verdict_key(4), told)]
  execute.refused = ()
  operations.perform(one.tidy(400.0), execute)
  assert execute.done[1][1].island == 3
  assert not one.pending


def test_payload_without_a_record_goes_once_its_island_has_passed_it():
  def name(fragment, step):
    return keys.contribution_name(fragment, 5, 1, step)

  payloads = [*(name(0, s) for s in (7, 8, 9)), name(1, 8), "lost+found"]
  execute = Store(payloads=payloads, contributions=[name(0, 7)])
  one = chores.Chores(Pins(name(0, 6)), 2)
  execute.listings["payloads"] += [name(0, 6), name(0, 4)]
  head = records.Head(0, 1, 2, _payload(1), [], {"5": 8}, {})
  operations.perform(one.take_over([head]), execute)
  assert execute.deleted() == [
    keys.payload_prefix(name(0, 4)),
    keys.payload_prefix(name(0, 8)),
  ]


def test_island_that_was_told_nothing_is_reminded_of_nothing():
  asked = []
  one = chores.Chores(cutting.CutKeeper(), 2)
  operations.perform(one.remind(3), asked.append)
  assert asked == [] and not one.pending
