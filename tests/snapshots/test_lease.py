"""The lease, one operation at a time."""

import dataclasses

import pytest

from diloco import errors
from diloco.snapshots import keys, lease, operations, records

TTL_SECS = 5.0
KEY = "lease"
COMPARE_AND_SET = operations.CompareAndSet


class Records:
  """A store of records that can be damaged."""

  def __init__(self, head_tokens=()):
    self._records = {}
    self._damaged = set()
    self._generation = 0
    self._head_tokens = head_tokens
    for p, token in enumerate(head_tokens):
      head = records.Head(p, 0, token, "", [], {}, {})
      self._records[keys.head_key(p)] = head, 0

  def execute(self, operation):
    match operation:
      case operations.Names("heads"):
        return [f"{p:04d}" for p in range(len(self._head_tokens))]
      case operations.Read(key):
        if key in self._damaged:
          error = errors.CorruptSnapshotError("torn")
          error.generation = self._records[key][1]
          raise error
        return self._records.get(key, (None, None))
      case operations.CompareAndSet(key, record, generation):
        if self._records.get(key, (None, None))[1] != generation:
          return False
        self._generation += 1
        self._records[key] = record, self._generation
        self._damaged.discard(key)
        return True
    raise AssertionError(operation)

  def acquire(self, owner, clock, watch=None, above=None):
    watch = watch or lease.LeaseWatch(TTL_SECS)
    return operations.perform(
      lease.acquire(KEY, owner, watch, clock, above=above), self.execute
    )

  def read(self, key):
    return self._records[key][0]

  def damage(self, key):
    self._damaged.add(key)

  def mend(self, key):
    self._damaged.discard(key)

  def lose(self, key):
    del self._records[key]


class Clock:
  """Stands still until moved."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


def look(watch, clock, held, read_secs):
  """A try to take a lease that is in the store; gives the token, or 0."""

  def execute(operation):
    if operation[0] != "lease":
      return Records().execute(operation)
    if isinstance(operation, operations.Read):
      clock.now += read_secs
      return held, b"1"
    assert operation.generation == b"1"
    return True

  return operations.perform(lease.acquire("lease", "me", watch, clock), execute)


def test_beat_seen_by_a_slow_look_is_as_young_as_its_end(clock):
  watch = lease.LeaseWatch(TTL_SECS)
  held = records.Lease("leader", 3, beat=7)
  assert look(watch, clock, held, read_secs=2 * TTL_SECS) == 0
  # The leader has a whole time to live to move it, from when it was read.
  clock.now += TTL_SECS / 2
  assert look(watch, clock, held, read_secs=0.0) == 0
  clock.now += TTL_SECS / 2
  assert look(watch, clock, held, read_secs=0.0) == 4


# (what is held, seconds since it was first seen) -> token
LOOKS = {
  "nobody ever": (None, 0.0, 1),
  "free": (records.Lease("", 6, 2), 0.0, 7),
  "held": (records.Lease("leader", 3, 7), TTL_SECS - 0.1, 0),
  "expired": (records.Lease("leader", 3, 7), TTL_SECS, 4),
  "mine, and I do not know it": (records.Lease("me", 3, 0), 0.0, 4),
}


@pytest.mark.parametrize("case", LOOKS)
def test_lease_is_taken_when_free_expired_or_mine(case, clock):
  held, since_secs, token = LOOKS[case]
  watch = lease.LeaseWatch(TTL_SECS)
  watch.expired(held, clock())
  clock.now += since_secs
  assert look(watch, clock, held, read_secs=0.0) == token


def test_lease_somebody_else_took_meanwhile_is_not_ours(clock):
  store = Records()
  procedure = lease.acquire(KEY, "me", lease.LeaseWatch(TTL_SECS), clock)
  operation = next(procedure)
  with pytest.raises(StopIteration) as end:
    while True:
      if operation[0] == KEY and isinstance(operation, COMPARE_AND_SET):
        assert store.acquire("other", clock) == 2
      operation = procedure.send(store.execute(operation))
  assert end.value.value == 0
  assert store.read(KEY).owner == "other"


def test_of_two_that_draw_a_token_at_once_one_has_it(clock):
  store = Records()
  procedure = lease.acquire(KEY, "me", lease.LeaseWatch(TTL_SECS), clock)
  operation = next(procedure)
  with pytest.raises(StopIteration) as end:
    while True:
      if isinstance(operation, COMPARE_AND_SET):
        assert store.acquire("other", clock) == 1
      operation = procedure.send(store.execute(operation))
  assert end.value.value == 0
  assert store.read(KEY) == records.Lease("other", 1, 0)


def test_damaged_lease_is_taken_after_its_time_to_live(clock):
  store, watch = Records(head_tokens=(3, 7)), lease.LeaseWatch(TTL_SECS)
  assert store.acquire("leader", clock) == 8
  store.damage(KEY)
  assert store.acquire("me", clock, watch) == 0
  clock.now += TTL_SECS - 0.1
  assert store.acquire("me", clock, watch) == 0
  clock.now += 0.1
  # The leader never came to fence a head; nobody gets its token.
  assert store.acquire("me", clock, watch) == 9
  assert store.read(KEY) == records.Lease("me", 9, 0)
  renewal = lease.renew(KEY, "leader", 8)
  assert not operations.perform(renewal, store.execute)


def test_lease_renewed_unseen_between_two_damages_is_as_young_as_the_second(
  clock,
):
  store, watch = Records(), lease.LeaseWatch(TTL_SECS)
  assert store.acquire("leader", clock) == 1
  store.damage(KEY)
  assert store.acquire("me", clock, watch) == 0
  clock.now += TTL_SECS
  store.mend(KEY)
  renewal = lease.renew(KEY, "leader", 1)
  assert operations.perform(renewal, store.execute)
  store.damage(KEY)
  assert store.acquire("me", clock, watch) == 0
  clock.now += TTL_SECS
  assert store.acquire("me", clock, watch) == 2


def test_lease_that_can_be_read_again_is_watched_from_then_on(clock):
  store, watch = Records(), lease.LeaseWatch(TTL_SECS)
  assert store.acquire("leader", clock) == 1
  store.damage(KEY)
  assert store.acquire("me", clock, watch) == 0
  clock.now += TTL_SECS
  store.mend(KEY)
  assert store.acquire("me", clock, watch) == 0
  clock.now += TTL_SECS
  assert store.acquire("me", clock, watch) == 2


# What is lost or damaged -> the token of who comes next. The leader had 9, and
# had not fenced the heads of 7 when that happened.
DAMAGE = {
  "lost lease": (["lose"], [], 10),
  "damaged lease": (["damage"], [], 10),
  "lost token": ([], ["lose"], 10),
  "damaged token": ([], ["damage"], 10),
  # Then the heads are all there is.
  "both lost": (["lose"], ["lose"], 8),
  "both damaged": (["damage"], ["damage"], 8),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_token_is_above_all_that_the_store_still_knows(case, clock):
  of_lease, of_token, token = DAMAGE[case]
  store, watch = Records(head_tokens=(3, 7)), lease.LeaseWatch(TTL_SECS)
  for _ in range(2):  # it did not hear that the first try succeeded
    store.acquire("leader", clock)
  assert store.read(KEY).token == 9
  for what in of_lease:
    getattr(store, what)(KEY)
  for what in of_token:
    getattr(store, what)(f"{KEY}.token")
  while not store.acquire("next", clock, watch):
    clock.now += TTL_SECS
  assert store.read(KEY) == records.Lease("next", token, 0)


@pytest.mark.parametrize("there", [None, 3, 12])
@pytest.mark.parametrize("drawn", [None, 5])
@pytest.mark.parametrize("above", [0, 9])
def test_token_is_above_what_is_known_elsewhere(there, drawn, above, clock):
  store = Records()
  if there:
    store.execute(COMPARE_AND_SET(KEY, records.Lease("", there, 1), None))
  if drawn:
    token = records.DrawnToken(drawn)
    store.execute(COMPARE_AND_SET(f"{KEY}.token", token, None))
  newest = max(there or 0, drawn or 0, above)
  assert store.acquire("me", clock, above=above) == newest + 1


@pytest.mark.parametrize("hurt", ["lose", "damage"])
def test_damaged_head_keeps_nobody_from_an_unreadable_lease(hurt, clock):
  store, watch = Records(head_tokens=(3, 7)), lease.LeaseWatch(TTL_SECS)
  for _ in range(2):
    store.acquire("leader", clock)
  getattr(store, hurt)(KEY)
  for fragment in (0, 1):
    store.damage(keys.head_key(fragment))
  while not store.acquire("next", clock, watch):
    clock.now += TTL_SECS
  assert store.read(KEY).token == 10
  # Unless nothing tells how far tokens have come.
  getattr(store, hurt)(KEY)
  store.damage(f"{KEY}.token")
  with pytest.raises(errors.CorruptSnapshotError):
    for _ in range(2):
      store.acquire("another", clock, watch)
      clock.now += TTL_SECS


def test_every_renewal_moves_the_beat(clock):
  store = Records()
  token = store.acquire("me", clock)
  beats = []
  for _ in range(3):
    assert operations.perform(lease.renew(KEY, "me", token), store.execute)
    beats.append(store.read(KEY).beat)
  assert beats == [1, 2, 3]
  assert store.read(KEY) == records.Lease("me", token, 3)


def test_lease_whose_beat_moves_is_not_taken(clock):
  store, watch = Records(), lease.LeaseWatch(TTL_SECS)
  token = store.acquire("leader", clock)
  for _ in range(5):
    assert store.acquire("me", clock, watch) == 0
    clock.now += TTL_SECS - 0.1
    operations.perform(lease.renew(KEY, "leader", token), store.execute)
  assert store.acquire("me", clock, watch) == 0
  clock.now += TTL_SECS
  assert store.acquire("me", clock, watch) == token + 1


# Of a lease: who asks, under which token, and whether it is that one's.
HOLDERS = [("me", 3, True), ("me", 2, False), ("you", 3, False)]


@pytest.mark.parametrize(("owner", "token", "holds"), HOLDERS)
def test_only_its_holder_renews_or_frees_a_lease(owner, token, holds):
  held = Records()
  mine = records.Lease("me", 3, 7, "home")
  for there in (None, mine):
    if there:
      assert held.execute(COMPARE_AND_SET(KEY, there, None))
    renewed = operations.perform(lease.renew(KEY, owner, token), held.execute)
    assert renewed == (holds and there is not None)
  renewed = dataclasses.replace(mine, beat=8) if holds else mine
  assert held.read(KEY) == renewed
  operations.perform(lease.release(KEY, owner, token, "there"), held.execute)
  freed = records.Lease("", 3, 9, "there") if holds else renewed
  assert held.read(KEY) == freed


@pytest.mark.parametrize(
  ("there", "token", "fenced"),
  [(None, 3, False), (2, 3, False), (3, 3, False), (4, 3, True), (4, 0, False)],
)
def test_fence_stops_who_is_older_than_the_lease(there, token, fenced):
  held = Records()
  if there:
    held.execute(COMPARE_AND_SET(KEY, records.Lease("x", there, 1), None))
  try:
    operations.perform(lease.fence(KEY, token), held.execute)
    assert not fenced
  except errors.FencedError:
    assert fenced


def test_no_token_is_known_before_one_is_drawn():
  held = Records()
  assert operations.perform(lease.drawn(KEY), held.execute) == 0
  assert operations.perform(lease.draw(KEY, 4), held.execute) == 5
  assert operations.perform(lease.drawn(KEY), held.execute) == 5
