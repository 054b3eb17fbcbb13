"""Leadership by compare-and-set, with a fencing token.

A lease names its owner and a token that grows with every change of owner. The
owner renews it by moving `beat`; anyone else watches `beat` by its own
monotonic clock and takes over when it has stood still for the time to live.
Wall clocks of two machines are never compared.

Holding the lease only makes progress likely. What makes it safe is that a new
owner raises the token of every head it will commit to, so that the
compare-and-set of a deposed owner fails.
"""

import functools
from collections.abc import Callable

from diloco.snapshots import operations, records


@functools.cache
def _read(key: str) -> operations.Read:
  return operations.Read(key, records.Lease)


class LeaseWatch:
  """Decides by the observer's own clock when a lease has expired."""

  __slots__ = ("_seen", "_since", "_ttl_secs")

  def __init__(self, ttl_secs: float):
    self._ttl_secs = ttl_secs
    self._seen: tuple[str, int, int] | None = None
    self._since = 0.0

  def expired(self, lease: records.Lease | None, now: float) -> bool:
    """Whether `lease` has not been renewed for the time to live.

    Args:
      lease: what the store holds now; None when nobody ever held it.
      now: the observer's monotonic clock, seconds.
    """
    if lease is None or not lease.owner:
      return True
    seen = (lease.owner, lease.token, lease.beat)
    if seen != self._seen:
      self._seen, self._since = seen, now
      return False
    return now - self._since >= self._ttl_secs


def acquire(
  key: str, owner: str, watch: LeaseWatch, clock: Callable[[], float]
) -> operations.Procedure[int]:
  """Takes the lease if it is free, expired, or ours without our knowing.

  Args:
    key: of the lease.
    owner: a name no other process has.
    watch: this observer's view of the lease.
    clock: the observer's monotonic clock, seconds.

  Returns:
    The fencing token; 0 when somebody else holds the lease.
  """
  lease, generation = yield _read(key)
  # After the look, which may have taken long: a beat that is new now would
  # otherwise count as old as the look.
  now = clock()
  # An acquisition that failed may have taken effect. Its token is lost; the
  # next one is as good.
  mine_unknown = lease is not None and lease.owner == owner
  if not watch.expired(lease, now) and not mine_unknown:
    return 0
  token: int = (lease.token if lease else 0) + 1
  mine = records.Lease(owner, token, beat=0)
  taken = yield operations.CompareAndSet(key, mine, generation)
  return token if taken else 0


def renew(key: str, owner: str, token: int) -> operations.Procedure[bool]:
  """Moves the beat; False when somebody else holds the lease now."""
  lease, generation = yield _read(key)
  if lease is None or lease.token != token or lease.owner != owner:
    return False
  mine = records.Lease(owner, token, lease.beat + 1)
  renewed: bool = yield operations.CompareAndSet(key, mine, generation)
  return renewed


def release(key: str, owner: str, token: int) -> operations.Procedure[None]:
  """Gives the lease up, so that a successor need not wait."""
  lease, generation = yield operations.Read(key, records.Lease)
  if lease is not None and lease.token == token and lease.owner == owner:
    free = records.Lease("", token, lease.beat + 1)
    yield operations.CompareAndSet(key, free, generation)
