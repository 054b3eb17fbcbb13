"""The thread that watches for new versions, on a store with damage."""

import contextlib
import dataclasses
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from cut_builder import PLAN, CutRun, filled, spoil

from diloco import errors, workers
from diloco.islands import (
  adopter,
  fetching,
  protocol,
  publisher,
  shards,
  watching,
)
from diloco.snapshots import keys, operations, records

_PATIENCE_SECS = 20.0


@pytest.fixture
def run(tmp_path):
  return CutRun(tmp_path)


def adopting(run, versions, poll_secs, heartbeat_secs, trip_secs=0.0, **more):
  shardings = dict.fromkeys("ab", jnp.zeros(4).sharding)
  setting = types.SimpleNamespace(
    identity=publisher.Identity(0, 1, 10),
    snapshots=run.store,
    learner=types.SimpleNamespace(
      fetcher=lambda store: fetching.Fetcher(store, PLAN, shardings),
      opt_state=(),
    ),
    times=types.SimpleNamespace(
      heartbeat_secs=heartbeat_secs, round_trip_secs=trip_secs
    ),
    **{"threads": workers.Threads(), **more},
  )
  held = [
    protocol.Fetched(records.Head(p, version, 0, "", [], {}, {}), None)
    for p, version in enumerate(versions)
  ]
  return adopter.Adopter(setting, held, lambda: poll_secs)


@pytest.fixture
def make(run):
  made = []

  def start(versions):
    made.append(adopting(run, versions, 0.005, 0.01))
    return made[-1]

  yield start
  for one in made:
    one.close()


def _take(thread, count):
  """Waits until that many versions have come."""
  deadline = time.monotonic() + _PATIENCE_SECS
  found = []
  while len(found) < count and time.monotonic() < deadline:
    found += thread.take().fetched
    time.sleep(0.005)
  return sorted(found, key=lambda f: f.head.fragment)


def test_newer_versions_are_fetched_from_what_the_board_says(run, make):
  run.commit(0, 1, {0: 8}, value=3.0)
  run.store.write(keys.BOARD, records.Board([1, 0], {}))
  (fetched,) = _take(make([0, 0]), 1)
  assert (fetched.head.fragment, fetched.head.version) == (0, 1)
  assert fetched.head.merged_step(0) == 8
  for tensor in PLAN.fragments[0]:
    np.testing.assert_array_equal(
      fetched.anchor[tensor.name], filled(tensor, 3.0)
    )


def test_damaged_board_does_not_hide_the_heads(run, make):
  run.store.write(keys.BOARD, records.Board([0, 0], {}))
  spoil(run, keys.BOARD)
  run.commit(0, 1, {0: 8}, value=1.0)
  run.commit(1, 4, {0: 8}, value=2.0)
  found = _take(make([0, 0]), 2)
  assert [(f.head.fragment, f.head.version) for f in found] == [(0, 1), (1, 4)]


def test_all_fragments_are_fetched_anew_without_a_word_on_the_board(
  run, make, monkeypatch
):
  monkeypatch.setattr(adopter, "_HEADS_EVERY_SECS", 1e6)
  run.commit(0, 1, {0: 8}, value=1.0)
  thread = make([0, 0])
  assert [f.head.fragment for f in _take(thread, 1)] == [0]
  thread.fetch_all_anew()
  found = _take(thread, 2)
  assert [(f.head.fragment, f.head.version) for f in found] == [(0, 1), (1, 0)]
  # Once is enough.
  run.commit(1, 1, {0: 8}, value=2.0)
  run.store.write(keys.BOARD, records.Board([1, 1], {}))
  assert [f.head.version for f in _take(thread, 1)] == [1]


def test_nothing_that_was_noticed_is_lost_to_an_island_in_a_long_step(
  run, make
):
  thread = make([0, 0])
  thread.close()
  call = records.PeerRequest(1, 1, [0, 0])
  for board, found in [
    (records.Board([1, 0], {}), watching.Notices(1, 2, None, 9.0)),
    (None, watching.Notices(cut=2, request=call)),
    (None, None),  # could not look
  ]:
    thread._show(watching.Seen(board, found))
  news = thread.take()
  assert news.board.versions == [1, 0]
  assert news.notices == watching.Notices(2, 2, call, 9.0)
  # A call and a verdict are told once, a cut is asked for as long as it is.
  assert thread.take().notices == watching.Notices(cut=2)
  assert thread.take().board is None


def test_error_nobody_expected_is_raised_on_the_thread_that_asks(
  run, make, monkeypatch
):
  monkeypatch.setattr(watching, "_RETRY_SECS", (0.0, 0.0))
  monkeypatch.setattr(watching, "_DAMAGED_SECS", (0.0, 0.0))

  def put(tensor, sharding):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of device memory")

  monkeypatch.setattr(shards, "put", put)
  run.commit(0, 1, {0: 8}, value=1.0)
  thread = make([0, 0])
  thread._loop.join()
  with pytest.raises(workers.WorkerError, match=r"adopter.*RESOURCE"):
    thread.check()


@pytest.mark.parametrize("told", ["its own", "another's", ""])
def test_version_is_taken_only_if_it_is_what_was_committed(run, told):
  shardings = dict.fromkeys("ab", jnp.zeros(4).sharding)
  head = run.commit(0, 1, {0: 8}, value=1.0)
  other = run.commit(0, 2, {0: 8}, value=2.0)
  fetcher = fetching.Fetcher(run.store, PLAN, shardings)
  if told == "another's":
    wrong = dataclasses.replace(head, digest=other.digest)
    with pytest.raises(errors.CorruptSnapshotError, match="digest differs"):
      fetcher.read(wrong)
    return
  found = fetcher.read(head if told else dataclasses.replace(head, digest=""))
  for tensor in PLAN.fragments[0]:
    np.testing.assert_array_equal(found[tensor.name], filled(tensor, 1.0))
  assert fetcher.bytes_read == 4 * sum(t.size for t in PLAN.fragments[0])


class Still(workers.Threads):
  """Time that the test moves, and a loop that it turns by hand."""

  now = 100.0

  def clock(self):
    return self.now

  def loop(self, name, script, execute, *, at_once=False):
    assert at_once  # an island that leaves waits for no fetch
    self.script, self.execute = script, execute
    idle = lambda: None  # noqa: E731
    changed = contextlib.nullcontext()
    return types.SimpleNamespace(start=idle, close=idle, changed=changed)

  def turn(self):
    """One look; to read a version takes 3 s."""
    answer = None
    while not isinstance(operation := self.script.send(answer), operations.Nap):
      answer = self.execute(operation)
      self.now += 3.0 * isinstance(operation, operations.ReadPayload)


def test_heads_of_a_store_that_is_far_are_looked_at_less_often(run):
  threads = Still()
  # 4 s for four round trips and two fragments.
  one = adopting(run, [0, 0], 0.5, 1e9, 0.5, threads=threads)
  run.commit(0, 1, {0: 8}, value=1.0)
  threads.turn()
  (fetched,) = one.take().fetched
  assert fetched.secs == 3.0 and fetched.head.version == 1
  run.commit(0, 2, {0: 8}, value=1.0)
  for now, found in ((103.9, []), (104.0, [2])):
    threads.now = now
    threads.turn()
    assert [f.head.version for f in one.take().fetched] == found


def test_resync_gives_up_what_is_at_hand_and_what_is_being_read(run):
  threads = Still()
  one = adopting(run, [0, 0], 0.5, 1e9, threads=threads)
  run.commit(0, 1, {0: 8}, value=1.0)
  threads.turn()
  one.fetch_all_anew()
  assert one.take().fetched == []
  threads = Still()
  one = adopting(run, [0, 0], 0.5, 1e9, threads=threads)
  execute = threads.execute

  def meanwhile(operation):
    if isinstance(operation, operations.ReadPayload):
      threads.execute = execute
      one.fetch_all_anew()
    return execute(operation)

  threads.execute = meanwhile
  for fragments in ([1], [0], []):
    threads.turn()
    assert [f.head.fragment for f in one.take().fetched] == fragments
