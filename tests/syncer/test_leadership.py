"""Who leads: waiting, renewing, and being deposed."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
from cut_builder import CutRun, spoil

from diloco import config as config_lib
from diloco import errors, timing
from diloco.snapshots import (
  arrays,
  keys,
  layout,
  lease,
  operations,
  records,
  store,
)
from diloco.syncer import (
  core,
  grace,
  leadership,
  quorum,
  sources,
  weighting,
)


def _times(**overrides):
  chosen = config_lib.ControllerConfig(takeover_secs=6.0)
  return dataclasses.replace(timing.derive(chosen, 0.0), **overrides)


class Clock:
  """Time that passes while somebody sleeps; leaders renew meanwhile."""

  def __init__(self):
    self.now = 100.0
    self.renewing = {}  # leader -> when next

  def sleep(self, secs):
    self.now += secs
    for leader, due in list(self.renewing.items()):
      if self.now >= due:
        self.renewing[leader] = self.now + leader.renewal_secs
        leader.renew()


class Leader(leadership.Leadership):
  """One that waits for the lease in virtual time, and does no more."""

  def __init__(self, snapshots, clock, owner, **overrides):
    self.times, self.clock, self.store = _times(**overrides), clock, snapshots
    settings = core.Settings(
      1, quorum.MinimumQuorum(1), grace.FixedGrace(0.0), max_staleness=1
    )
    super().__init__(
      owner,
      leadership.Terms(self.times, settings, weighting.Weighting()),
      None,
      lambda: clock.now,
    )

  def execute(self, operation):
    if isinstance(operation, float):
      return self.clock.sleep(operation)
    return self.store.execute(operation)

  def wait(self, wanted):
    return operations.perform(self.waiting(wanted), self.execute)

  def take_over(self, wanted):
    return operations.perform(self.taking_over(wanted), self.execute)

  def hold(self, renewing):
    assert next(renewing) == self.renewal_secs
    self._renewing = renewing
    self.clock.renewing[self] = self.clock.now + self.renewal_secs

  def renew(self):
    """Lets the thread that renews go on to its next pause, or its end."""

    def until_its_pause():
      answer = None
      with contextlib.suppress(StopIteration):
        while not isinstance(operation := self._renewing.send(answer), float):
          try:
            answer = yield operation
          except operations.FAILURES as error:
            assert self._renewing.throw(error) == self.renewal_secs
            return
      return

    self.store.perform(until_its_pause())
    if self.fenced:
      self.clock.renewing.pop(self, None)
    return not self.fenced

  def close(self):
    self.clock.renewing.pop(self, None)
    with contextlib.suppress(errors.CorruptSnapshotError):
      self.store.perform(self.releasing())

  def num_fragments(self):
    pytest.fail("nobody takes over here")

  def stands_still(self, found):
    pytest.fail("nobody takes over here")


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def snapshots(tmp_path):
  return store.SnapshotStore(tmp_path.as_uri())


@pytest.fixture
def make(snapshots, clock):
  made = []

  def leader(owner, **overrides):
    made.append(Leader(snapshots, clock, owner, **overrides))
    return made[-1]

  yield leader
  for one in made:
    one.close()


def _always():
  return True


def test_free_lease_is_taken_at_once_and_given_up_in_order(make):
  first, second = make("first"), make("second")
  assert first.wait(_always) and first.token == 1
  first.close()
  looks = []
  assert second.wait(lambda: not looks.append(1))
  assert second.token == 2
  assert len(looks) == 1  # it did not wait for anything to expire


def test_long_merge_is_no_hang_and_one_that_stands_still_is(monkeypatch):
  monkeypatch.setattr(layout, "MAX_CHUNK_BYTES", 1 << 16)
  monkeypatch.setattr(layout, "MIN_CHUNK_BYTES", 1 << 16)
  tensors = store.SnapshotStore("memory://")
  values = np.zeros((1 << 12, 64), np.float32)
  tensors.arrays.write("p", [arrays.Tensor.whole("w", values)])
  watch, clock = leadership.HangWatch(10.0, 4.0), itertools.count(0, 4)

  def read(watched):
    source = sources.StoreSource(watched.arrays.open("p", "w"))
    for _ in source.blocks(1 << 14):
      watch.answered(float(next(clock)))  # the lease, on another thread

  read(tensors.watched(watch.asked))
  assert not watch.hung
  read(tensors)
  assert watch.hung


def test_leader_whose_main_thread_hangs_lets_the_lease_go(make, clock):
  first, second = make("first", hang_secs=30.0), make("second")
  first.wait(_always)
  begun = clock.now
  assert second.wait(_always)
  assert second.token == 2
  assert 30 < clock.now - begun < 30 + 2 * second.times.lease_ttl_secs
  assert first.hung
  with pytest.raises(errors.FencedError):
    first.check()


def test_merge_that_stands_still_shows_although_its_leader_gets_on(make, clock):
  leader = make("only", hang_secs=5.0)
  leader.wait(_always)
  for merges in (True, False):
    leader.check(merging=True)
    for _ in range(20):
      leader.gets_on()  # it looks at the store meanwhile
      if merges:
        leader.merge_gets_on()
      clock.sleep(leader.renewal_secs)
    assert leader.hung is not merges
  with pytest.raises(errors.FencedError):
    leader.check(merging=True)


def test_leader_that_asks_whether_it_leads_gets_on(make, clock):
  leader = make("only", hang_secs=5.0)
  leader.wait(_always)
  for _ in range(20):
    leader.check()
    clock.sleep(leader.renewal_secs)
  assert not leader.hung


def test_who_takes_over_leads_by_the_runs_times_once_all_heads_are_sound(
  tmp_path, clock
):
  run, found = CutRun(tmp_path), []
  run.commit(1, 3, {}, 1.0, cut=2)
  apart = dict(round_trip_secs=0.07, retry_secs=0.11, heartbeat_secs=0.5)
  leader = Leader(run.store, clock, "one", **apart)
  settings = dataclasses.replace(leader._terms.settings, num_fragments=2)
  leader._terms = leader._terms._replace(settings=settings)

  def num_fragments():
    yield from ()
    return 2

  leader.num_fragments = num_fragments

  def stands_still(one):
    found.append((one.fragment, one.version))
    run.commit(1, 3, {}, 1.0, cut=2)  # a controller sets the run back

  leader.stands_still = stands_still
  run.store.write(keys.SYNCER_LEASE, records.Lease("", 4, 0))
  spoil(run, keys.head_key(1))
  looks = iter(range(9))
  parts = leader.take_over(lambda: next(looks, None) is not None)
  times = leader.times
  assert found == [(1, 3)] and leader.token == 5
  assert parts.core.versions == [0, 3] and parts.core.cut == 2
  assert parts.heads.cut == 2 and parts.check == leader.check
  assert (parts.look_every_secs, parts.retry_secs, parts.least_pause_secs) == (
    *(times.heartbeat_secs, times.retry_secs, times.round_trip_secs),
  )


def test_who_waits_for_heads_leaves_when_it_is_not_wanted(make, clock):
  leader, looks = make("one"), []

  def no_plan():
    looks.append(clock.now)
    assert len(looks) < 9
    yield from ()
    return 0

  leader.num_fragments = no_plan
  assert leader.take_over(lambda: len(looks) < 5) is None
  assert len(looks) == 5 and leader.token


def test_only_who_leads_gives_the_lease_up(make, snapshots):
  first, second = make("first"), make("second")
  first.wait(_always)
  held = snapshots.read(keys.SYNCER_LEASE, records.Lease)
  for one in (second, first):
    one.fenced = one is first
    asked = []
    operations.perform(one.releasing(), asked.append)
    assert asked == []
  assert snapshots.read(keys.SYNCER_LEASE, records.Lease) == held


# When the store answered, with the moments at which the main thread asked
# between, and whether that is a hang of 5 s where answers are 2 s apart.
HANGS = {
  "asks now and then": ([1, 2, 3, 4, "asks", 5, 6, 7, 8, 9], False),
  "asks no more": ([1, "asks", 2, 3, 4, 5, 6, 7], True),
  "waits for the store": (["asks", 1, 1000, 2000], False),
  "hangs after an outage": ([1, 1000, *range(1001, 1005)], True),
  "stopped by a signal": (["asks", 1, 2, 1000], False),
}


@pytest.mark.parametrize("case", HANGS)
def test_leader_hangs_only_while_the_store_answers(case):
  seen, hangs = HANGS[case]
  watch = leadership.HangWatch(5.0, 2.0)
  for event in seen:
    if event == "asks":
      watch.asked()
    else:
      watch.answered(float(event))
  assert watch.hung == hangs


def test_lease_that_is_renewed_is_not_taken(make, snapshots, clock):
  first, second = make("first"), make("second")
  first.wait(_always)
  beats, until = set(), clock.now + 10 * second.times.lease_ttl_secs

  def wanted():
    beats.add(snapshots.read(keys.SYNCER_LEASE, records.Lease).beat)
    return clock.now < until

  assert not second.wait(wanted)
  assert second.token == 0 and len(beats) > 30
  first.check()


def test_silent_leader_is_replaced_and_finds_out(make, snapshots, clock):
  first, second = make("first"), make("second")
  first.wait(_always)
  del clock.renewing[first]  # it is stopped
  begun = clock.now
  assert second.wait(_always)
  assert second.token == 2
  late = 2 * second.times.standby_poll_secs
  assert clock.now - begun < second.times.lease_ttl_secs + late
  first.check()  # it sleeps and cannot know yet
  assert not first.renew()
  with pytest.raises(errors.FencedError):
    first.check()
  second.check()
  first.close()  # must not release what is not its own
  held = snapshots.read(keys.SYNCER_LEASE, records.Lease)
  assert held.owner == "second"


def test_failed_renewal_is_tried_again(make, snapshots, monkeypatch):
  leader = make("only")
  leader.wait(_always)
  with monkeypatch.context() as patch:

    def fails(operation):
      raise OSError("gone")

    patch.setattr(snapshots, "execute", fails)
    assert leader.renew()
  assert leader.renew()
  assert snapshots.read(keys.SYNCER_LEASE, records.Lease).beat == 1
  leader.check()


@pytest.mark.parametrize("heartbeat_secs", [0.1, 2.0])
def test_lease_moves_often_enough_whatever_the_heartbeat(make, heartbeat_secs):
  times = _times(heartbeat_secs=heartbeat_secs)
  renewal_secs = make("only", heartbeat_secs=heartbeat_secs).renewal_secs
  assert renewal_secs <= heartbeat_secs
  assert renewal_secs <= times.lease_ttl_secs / 4


def test_who_may_draw_no_token_tells_of_the_head_that_keeps_it_from_that(
  make, snapshots, tmp_path
):
  def num_fragments():
    return 2
    yield

  snapshots.write(keys.head_key(0), records.Head(0, 0, 3, "p", [], {}, {}))
  for key in (
    keys.head_key(1),
    keys.SYNCER_LEASE,
    lease.drawn_key(keys.SYNCER_LEASE),
  ):
    path = tmp_path / key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b'{"crc32": 1, "rec')
  only, told = make("only"), []
  only.num_fragments, only.stands_still = num_fragments, told.append
  looks = iter(range(100))
  assert not only.wait(lambda: not told and next(looks, None) is not None)
  assert {found.fragment for found in told} == {1}


def test_damaged_lease_is_taken_from_a_leader_that_lives(make, tmp_path):
  first, second = make("first"), make("second")
  first.wait(_always)
  (tmp_path / keys.SYNCER_LEASE).write_bytes(b"torn")
  assert second.wait(_always)
  assert second.token == 2
  assert not first.renew()
  with pytest.raises(errors.FencedError):
    first.check()
  second.check()
