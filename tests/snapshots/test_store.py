import errno
import json
import os
import threading

import flaky_s3
import numpy as np
import pytest

from diloco import errors
from diloco.fragments import partition
from diloco.snapshots import (
  arrays,
  keys,
  lease,
  operations,
  records,
  requests,
  store,
)


@pytest.fixture(params=["file", "memory", "s3"])
def snapshots(request, tmp_path):
  if request.param == "file":
    return store.SnapshotStore((tmp_path / "with space").as_uri())
  if request.param == "s3":
    s3 = request.getfixturevalue("s3")
    return store.SnapshotStore(s3.place(f"{tmp_path.name}/with%20space"))
  return store.SnapshotStore("memory://")


def _plan(size):
  return partition.partition([partition.Tensor("w", (size,), "rda")], 1)


def test_missing_record_is_none_and_missing_key_deletes(snapshots):
  assert snapshots.read(keys.BOARD, records.Board) is None
  snapshots.delete(keys.BOARD)


def test_compare_and_set_fails_on_a_stale_generation(snapshots):
  _, first = snapshots.read_for_update("k", records.Lease)
  assert snapshots.compare_and_set("k", records.Lease("a", 1, 0), first)
  assert not snapshots.compare_and_set("k", records.Lease("b", 1, 0), first)
  found, second = snapshots.read_for_update("k", records.Lease)
  assert found == records.Lease("a", 1, 0)
  assert snapshots.compare_and_set("k", records.Lease("b", 2, 0), second)


def test_of_many_threads_exactly_one_creates_each_key(snapshots):
  winners = []

  def create(name):
    for i in range(20):
      found, generation = snapshots.read_for_update(f"k{i}", records.Lease)
      mine = records.Lease(name, i, 0)
      if found is None and snapshots.compare_and_set(f"k{i}", mine, generation):
        winners.append(i)

  threads = [threading.Thread(target=create, args=(f"t{n}",)) for n in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(winners) == list(range(20))


def _named_records():
  """Records whose content says where they belong, as a function of a number."""
  none: list = []
  return {
    "head": lambda n: records.Head(n, 1, 1, "globals/x", none, {}, {}),
    "contribution": lambda n: records.Contribution(
      0, 1, n, 0, 0, 8, 8, "f32", "plan", "payloads/x", none, 4, none
    ),
    "member": lambda n: records.Member(f"island-{n}", 1, 1, "n"),
    "verdict": lambda n: records.Verdict(n, 1, 1, 0, "not_finite", 0.0),
    "cut request": lambda n: records.CutRequest(n, 0, none),
    "cut part": lambda n: records.CutPart(1, 0, n, 1, 8, "x", 0, none),
    "cut heads": lambda n: records.CutHeads(n, 0, 1, none),
    "cut channel": lambda n: records.CutChannel(n, 1, none),
    "cut complete": lambda n: records.CutComplete(n, 0, {}),
    "cut abandoned": lambda n: records.CutAbandoned(n, "why"),
    "peer request": lambda n: records.PeerRequest(n, 1, none),
    "peer state": lambda n: records.PeerState(
      1, n, 0, 1, 8, none, "peers/x", {}, {}, ""
    ),
  }


@pytest.mark.parametrize("name", _named_records())
def test_whole_record_under_the_key_of_another_is_corrupt(name):
  snapshots = store.SnapshotStore("memory://")
  mine, other = (_named_records()[name](n) for n in (1, 2))
  key = mine.key_in_store()
  snapshots.write(key, mine)
  assert snapshots.read(key, type(mine)) == mine
  snapshots.write(key, other)
  with pytest.raises(errors.CorruptSnapshotError, match="belongs under") as why:
    snapshots.read(key, type(mine))
  # As with any damage, it can be replaced by compare-and-set.
  assert snapshots.compare_and_set(key, mine, why.value.generation)
  assert snapshots.read(key, type(mine)) == mine


def test_operations_are_signs_of_getting_on_for_who_watches(snapshots):
  beats = []
  watched = snapshots.watched(lambda: beats.append(1))
  for number, operation in enumerate(
    [operations.Read("lease", records.Lease), operations.Names("members")], 1
  ):
    watched.execute(operation)
    snapshots.execute(operation)
    assert len(beats) == number


def test_list_is_confined_to_its_prefix_and_sorted(snapshots):
  for key in ["a/2", "a/1", "ab/3", "b/4", "a/sub/5"]:
    snapshots.write(key, records.Lease("", 0, 0))
  assert snapshots.keys("a") == ["1", "2", "sub/5"]
  snapshots.delete_tree("a")
  assert snapshots.keys("a") == []
  assert snapshots.keys("ab") == ["3"]


def test_tree_that_is_not_deleted_is_told(tmp_path, monkeypatch):
  snapshots = store.SnapshotStore(tmp_path.as_uri())
  snapshots.delete_tree("none")
  snapshots.put("a/file", b"1")
  with pytest.raises(errors.StoreError, match="a/file is not deleted"):
    snapshots.delete_tree("a/file")
  assert snapshots.get("a/file") == b"1"

  def refuse(path, **_):
    raise PermissionError(errno.EACCES, "no", path)

  monkeypatch.setattr(os, "unlink", refuse)
  with pytest.raises(errors.StoreError, match="a is not deleted"):
    snapshots.delete_tree("a")


@pytest.mark.parametrize("meanwhile", ["deleted", "written"])
def test_tree_is_deleted_beside_others_who_delete_or_write_in_it(
  tmp_path, monkeypatch, meanwhile
):
  snapshots = store.SnapshotStore(tmp_path.as_uri())
  for name in ("a/1", "a/2", "a/sub/3"):
    snapshots.put(name, b"1")
  unlink = os.unlink
  once = iter([1])

  def interfere(path, **how):
    for _ in once:
      if meanwhile == "deleted":
        unlink(path, **how)
      else:
        (tmp_path / "a" / "new").write_bytes(b"2")
    unlink(path, **how)

  monkeypatch.setattr(os, "unlink", interfere)
  snapshots.delete_tree("a")
  assert snapshots.keys("a") == (["new"] if meanwhile == "written" else [])


def test_requests_are_counted_as_the_server_counts_them(s3, tmp_path):
  snapshots = store.SnapshotStore(s3.place(tmp_path.name))
  before, counter = s3.counts(), requests.Counter(snapshots.url)
  _, absent = snapshots.read_for_update("k", records.Lease)
  assert snapshots.compare_and_set("k", records.Lease("", 1, 0), absent)
  snapshots.arrays.write(
    "a", [arrays.Tensor.whole("x", np.zeros((4, 4), np.float32))]
  )
  snapshots.arrays.read("a", "x")
  assert snapshots.names("a") == ["x"]
  snapshots.delete_tree("a")
  after = s3.counts()
  served = {kind: after[kind] - before.get(kind, 0) for kind in after}
  made = counter.made()
  assert made["over_secs"] > 0
  assert made["reads"] == served["GET"] == 4
  assert made["writes"] == served["PUT"] == 3
  assert made["deletes"] == served["DELETE"] == 2
  assert made["lists"] == served["LIST"] == 2


def test_write_that_is_refused_is_no_deletion(tmp_path, s3):
  for url in (tmp_path.as_uri(), s3.place(tmp_path.name)):
    snapshots = store.SnapshotStore(url)
    counter = requests.Counter(snapshots.url)
    _, absent = snapshots.read_for_update("k", records.Lease)
    for taken in (True, False):
      mine = records.Lease("a", 1, int(taken))
      assert snapshots.compare_and_set("k", mine, absent) == taken
    snapshots.delete("k")
    made = counter.made()
    assert (made["writes"], made["deletes"]) == (2, 1), url


def test_write_that_is_under_way_is_no_deletion_taken_back(monkeypatch):
  counts = {"batch_read": 0, "list": 0, "write": 1, "write_latency_ms": 0}

  def collect(place):
    return [
      {"name": place + name, "values": [{"value": n, "count": n}]}
      for name, n in counts.items()
    ]

  monkeypatch.setattr(
    requests.ts, "experimental_collect_matching_metrics", collect
  )
  counter = requests.Counter("s3://bucket/run")
  counts["write_latency_ms"] = 1
  made = counter.made()
  assert (made["writes"], made["deletes"]) == (1, 0)


def test_equal_records_are_told_apart_in_a_bucket_too(snapshots):
  mine = records.Lease("a", 1, 0)
  snapshots.write("k", mine)
  found, first = snapshots.read_for_update("k", records.Lease)
  snapshots.write("k", mine)
  again, second = snapshots.read_for_update("k", records.Lease)
  assert found == again == mine and first != second
  # Who has seen the first comes too late, although nothing looks different.
  assert not snapshots.compare_and_set("k", records.Lease("b", 2, 0), first)
  assert snapshots.compare_and_set("k", records.Lease("b", 2, 0), second)


def test_each_gives_results_in_order_and_the_first_failure(snapshots):
  for i in range(5):
    snapshots.write(f"k{i}", records.Lease("a", i, 0))

  def token(key):
    record, _ = yield operations.Read(key, records.Lease)
    if record is None:
      raise LookupError(key)
    return record.token

  def perform(*names):
    procedure = snapshots.each(token(name) for name in names)
    return operations.perform(procedure, execute)

  def execute(operation):
    if isinstance(operation, operations.Compute):
      return operation.work()
    return snapshots.execute(operation)

  assert perform() == []
  assert perform("k3", "k0", "k4") == [3, 0, 4]
  with pytest.raises(LookupError, match="x1"):
    perform("k0", "x1", "k1", "x2")


def test_deleted_tree_leaves_no_directories_behind(tmp_path):
  snapshots = store.SnapshotStore(tmp_path.as_uri())
  tensor = arrays.Tensor.whole("layer/w", np.ones((4, 4), np.float32))
  snapshots.arrays.write("payloads/x", [tensor])
  snapshots.delete_tree("payloads/x")
  assert not list((tmp_path / "payloads").iterdir())


def test_plan_is_written_once_and_another_is_refused(snapshots):
  assert snapshots.read_plan() is None
  snapshots.write_plan(_plan(4))
  snapshots.write_plan(_plan(4))
  assert snapshots.read_plan() == _plan(4)
  with pytest.raises(errors.UserError, match="fragment plan"):
    snapshots.write_plan(_plan(5))


@pytest.mark.parametrize("newer", [-1, 1])
def test_store_of_another_format_is_refused(snapshots, newer):
  snapshots.write_plan(_plan(4))
  data = json.loads(snapshots._kvs.read("plan").result().value)
  data["format"] += newer
  snapshots._kvs.write("plan", json.dumps(data)).result()
  with pytest.raises(errors.UserError, match="has format"):
    snapshots.read_plan()


def test_answers_to_peers_lie_under_prefixes_of_their_own():
  who = {"island": 0, "incarnation": 1, "server": 1, "life": 1, "step": 8}
  prefixes = {keys.peer_payload_prefix(**who)}
  prefixes |= {keys.peer_payload_prefix(**who | {name: 9}) for name in who}
  assert len(prefixes) == 1 + len(who)


@pytest.mark.parametrize(
  "name",
  [
    "0000.0001.0002.000000008.part",
    ".0000.0001.0002.000000008",
    "0000.0001.0002",
    "0000.0001.0002.8a",
  ],
)
def test_what_others_leave_in_a_folder_is_no_contribution(name):
  assert not keys.is_contribution_name(name)
  assert keys.is_contribution_name(keys.contribution_name(0, 1, 2, 8))


def _acquire(snapshots, owner, watch, now):
  return snapshots.perform(
    lease.acquire(keys.SYNCER_LEASE, owner, watch, lambda: now)
  )


def _renew(snapshots, owner, token):
  return snapshots.perform(lease.renew(keys.SYNCER_LEASE, owner, token))


def test_lease_goes_to_one_owner_and_expires_by_the_observers_clock(snapshots):
  watch = lease.LeaseWatch(ttl_secs=10)
  first = _acquire(snapshots, "first", lease.LeaseWatch(10), now=0)
  assert first
  assert not _acquire(snapshots, "second", watch, now=100)  # the first look
  assert _renew(snapshots, "first", first)
  assert not _acquire(snapshots, "second", watch, now=109)  # the beat moved
  assert not _acquire(snapshots, "second", watch, now=118)
  second = _acquire(snapshots, "second", watch, now=119)
  assert second > first
  assert not _renew(snapshots, "first", first)
  assert _renew(snapshots, "second", second)


@pytest.mark.parametrize(
  "call",
  [
    lambda s: s.read(keys.BOARD, records.Board),
    lambda s: s.write("k", records.Lease("", 0, 0)),
    lambda s: s.compare_and_set("k", records.Lease("", 0, 0), b""),
    lambda s: s.keys("contributions"),
    lambda s: s.delete("k"),
    lambda s: s.read_plan(),
  ],
)
@pytest.mark.parametrize(
  ("raised", "told"),
  [
    # TensorStore raises ValueError for a full disk.
    (ValueError("RESOURCE_EXHAUSTED: no space left"), "RESOURCE_EXHAUSTED"),
    (TimeoutError(), "no answer of the snapshot store within 60 s"),
  ],
)
def test_failing_store_is_its_own_error_whatever_it_raises(
  snapshots, call, raised, told
):
  class Failing:
    def result(self, timeout):
      raise raised

  class FailingStore:
    def __getattr__(self, name):
      return lambda *args, **kwargs: Failing()

  snapshots._kvs = FailingStore()
  with pytest.raises(errors.StoreError, match=told):
    call(snapshots)


def test_damaged_record_is_replaced_only_as_it_was_found(snapshots):
  snapshots._kvs.write("k", b"torn").result()
  with pytest.raises(errors.CorruptSnapshotError) as damaged:
    snapshots.read("k", records.Lease)
  generation = damaged.value.generation
  assert generation
  snapshots.write("k", records.Lease("theirs", 1, 0))
  assert not snapshots.compare_and_set(
    "k", records.Lease("mine", 2, 0), generation
  )
  assert snapshots.read("k", records.Lease).owner == "theirs"


class Overtaken:
  """A store that tells every writer that its write was the one that counts."""

  def __init__(self, kvs, left):
    self._kvs, self._left = kvs, left

  def write(self, key, data, **conditions):
    done = self._kvs.write(key, data, **conditions)
    done.result()
    self._kvs.write(key, self._left).result()
    return done

  def __getattr__(self, name):
    return getattr(self._kvs, name)


def test_of_two_writers_that_both_were_told_yes_one_has_won(snapshots):
  _, absent = snapshots.read_for_update("k", records.Lease)
  theirs = records.Lease("theirs", 1, 0)
  snapshots._kvs = Overtaken(snapshots._kvs, theirs.to_bytes())
  mine = records.Lease("mine", 1, 0)
  assert not snapshots.compare_and_set("k", mine, absent)


def test_record_that_is_damaged_as_it_is_written_is_lost_to_nobody(snapshots):
  _, absent = snapshots.read_for_update("k", records.Lease)
  snapshots._kvs = Overtaken(snapshots._kvs, b"torn")
  with pytest.raises(OSError, match="damaged"):
    snapshots.compare_and_set("k", records.Lease("mine", 1, 0), absent)


@pytest.mark.parametrize("faults", [[flaky_s3.LOST], [409, 503], [429]])
def test_write_on_a_condition_is_known_for_ours_whatever_the_answer(
  faults, monkeypatch
):
  for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    monkeypatch.setenv(name, "any")
  with flaky_s3.serving() as server:
    snapshots = store.SnapshotStore(server.url)
    for beat in range(2):  # created, then moved on
      _, seen = snapshots.read_for_update("k", records.Lease)
      server.faults[:] = faults
      mine, late = (records.Lease(who, 1, beat) for who in ("me", "late"))
      assert snapshots.compare_and_set("k", mine, seen)
      assert not server.faults
      assert not snapshots.compare_and_set("k", late, seen)
      assert snapshots.read("k", records.Lease) == mine
