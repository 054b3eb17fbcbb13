"""Leadership by compare-and-set, with a fencing token.

A lease names its owner and a token that grows with every change of owner. The
owner renews it by moving `beat`; anyone else watches `beat` by its own
monotonic clock and takes over when it has stood still for the time to live.
Wall clocks of two machines are never compared.

Holding the lease only makes progress likely. What makes it safe is that a new
owner raises the token of every head it will commit to, so that the
compare-and-set of a deposed owner fails.
"""

from diloco.snapshots import records, store


class LeaseWatch:
  """Decides by the observer's own clock when a lease has expired."""

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


class LeaseHolder:
  """Takes and renews one lease for one owner."""

  def __init__(self, snapshots: store.SnapshotStore, key: str, owner: str):
    """Args: the store, the lease's key, a name no other process has."""
    self._store = snapshots
    self._key = key
    self._owner = owner
    self._token = 0

  @property
  def token(self) -> int:
    """Fencing token of the last acquisition."""
    return self._token

  def try_acquire(self, watch: LeaseWatch, now: float) -> bool:
    """Takes the lease if it is free or expired; says whether it did."""
    lease, generation = self._store.read_for_update(self._key, records.Lease)
    if not watch.expired(lease, now):
      return False
    token = (lease.token if lease else 0) + 1
    mine = records.Lease(self._owner, token, beat=0)
    if not self._store.compare_and_set(self._key, mine, generation):
      return False
    self._token = token
    return True

  def renew(self) -> bool:
    """Moves the beat; False when somebody else holds the lease now."""
    lease, generation = self._store.read_for_update(self._key, records.Lease)
    if lease is None or lease.token != self._token:
      return False
    mine = records.Lease(self._owner, self._token, lease.beat + 1)
    return self._store.compare_and_set(self._key, mine, generation)

  def release(self) -> None:
    """Gives the lease up, so that a successor need not wait."""
    lease, generation = self._store.read_for_update(self._key, records.Lease)
    if lease is not None and lease.token == self._token:
      free = records.Lease("", self._token, lease.beat + 1)
      self._store.compare_and_set(self._key, free, generation)
