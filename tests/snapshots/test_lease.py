"""The lease, one operation at a time."""

import pytest

from diloco.snapshots import lease, records

TTL_SECS = 5.0


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
  """A try to take the lease; gives the token, or None for no try."""
  procedure = lease.acquire("lease", "me", watch, clock)
  next(procedure)
  clock.now += read_secs
  try:
    procedure.send((held, b"1"))
  except StopIteration as end:
    assert end.value == 0
    return None
  with pytest.raises(StopIteration) as end:
    procedure.send(True)
  return end.value.value


def test_beat_seen_by_a_slow_look_is_as_young_as_its_end(clock):
  watch = lease.LeaseWatch(TTL_SECS)
  held = records.Lease("leader", 3, beat=7)
  assert look(watch, clock, held, read_secs=2 * TTL_SECS) is None
  # The leader has a whole time to live to move it, from when it was read.
  clock.now += TTL_SECS / 2
  assert look(watch, clock, held, read_secs=0.0) is None
  clock.now += TTL_SECS / 2
  assert look(watch, clock, held, read_secs=0.0) == 4


# (what is held, seconds since it was first seen) -> token
LOOKS = {
  "nobody ever": (None, 0.0, 1),
  "free": (records.Lease("", 6, 2), 0.0, 7),
  "held": (records.Lease("leader", 3, 7), TTL_SECS - 0.1, None),
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
  procedure = lease.acquire("lease", "me", lease.LeaseWatch(TTL_SECS), clock)
  next(procedure)
  procedure.send((None, b""))
  with pytest.raises(StopIteration) as end:
    procedure.send(False)
  assert end.value.value == 0
