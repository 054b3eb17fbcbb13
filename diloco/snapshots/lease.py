"""Leadership by compare-and-set, with a fencing token.

A lease names its owner and a token that grows with every change of owner. The
owner renews it by moving `beat`; anyone else watches `beat` by its own
monotonic clock and takes over when it has stood still for the time to live.
Wall clocks of two machines are never compared.

Holding the lease only makes progress likely. What makes it safe is that a new
owner raises the token of every head it will commit to, so that the
compare-and-set of a deposed owner fails.

No token is ever given to two processes, for what a syncer writes is named after
its token. A damaged lease is taken by who could not read it for the time to
live, a lost one is free. What token they had may be nowhere else, if its owner
never came to fence a head; so beside the lease lies the newest token that was
drawn, and the next one is above that one and those of the heads.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable

from diloco import errors
from diloco.snapshots import operations, records

_HEADS = operations.Names("heads")


@functools.cache
def _read(key: str) -> operations.Read:
  return operations.Read(key, records.Lease)


@functools.cache
def drawn_key(key: str) -> str:
  """Where the newest token is that was drawn of a lease."""
  return f"{key}.token"


class LeaseWatch:
  """Decides by the observer's own clock when a lease has expired.

  Attributes:
    held: the lease as it was seen last; None where it could not be read.
  """

  __slots__ = ("_seen", "_since", "_ttl_secs", "held")

  def __init__(self, ttl_secs: float):
    self.held: records.Lease | None = None
    self._ttl_secs = ttl_secs
    self._seen: Hashable = None
    self._since = 0.0

  def expired(self, lease: records.Lease | None, now: float) -> bool:
    """Whether `lease` has not been renewed for the time to live."""
    if lease is None or not lease.owner:
      return True
    return self._stands((lease.owner, lease.token, lease.beat), now)

  def unreadable(self, generation: Hashable, now: float) -> bool:
    """Whether the lease has been damaged in this way for the time to live.

    Nobody can renew a lease that nobody can read. Damaged, renewed unseen and
    damaged again, it has another generation.
    """
    return self._stands(("unreadable", generation), now)

  def _stands(self, seen: Hashable, now: float) -> bool:
    if seen != self._seen:
      self._seen, self._since = seen, now
      return False
    return now - self._since >= self._ttl_secs


def acquire(
  key: str,
  owner: str,
  watch: LeaseWatch,
  clock: Callable[[], float],
  home: str = "",
  above: int | None = None,
) -> operations.Procedure[int]:
  """Takes the lease if it is free, expired, or ours without our knowing.

  `above` is the newest token known to be taken, beside those of the lease
  itself; None looks for it in the heads, which syncers fence. Gives the fencing
  token; 0 when somebody else holds the lease.
  """
  try:
    lease, generation = yield _read(key)
  except errors.CorruptSnapshotError as error:
    lease, generation = None, error.generation
    free = watch.unreadable(generation, clock())
  else:
    # The time after the look, which may have taken long: a beat that is new now
    # would otherwise count as old as the look. An acquisition that failed may
    # have taken effect; its token is lost, the next one is as good.
    mine_unknown = lease is not None and lease.owner == owner
    free = watch.expired(lease, clock()) or mine_unknown
  watch.held = lease
  if not free:
    return 0
  if lease:
    above = max(lease.token, above or 0)
  elif above is None:
    above = yield from _newest_of_heads(key)
  token: int = yield from draw(key, above)
  if not token:
    return 0
  mine = records.Lease(owner, token, beat=0, home=home)
  taken = yield operations.CompareAndSet(key, mine, generation)
  return token if taken else 0


def draw(key: str, above: int) -> operations.Procedure[int]:
  """Draws a token that nobody has, for who is about to take the lease.

  It is above those known to be taken; 0 when somebody else drew meanwhile.
  """
  place = drawn_key(key)
  drawn, generation = yield from operations.sound(place, records.DrawnToken)
  token = max(above, drawn.token if drawn else 0) + 1
  mine = records.DrawnToken(token)
  drew = yield operations.CompareAndSet(place, mine, generation)
  return token if drew else 0


def drawn(key: str) -> operations.Procedure[int]:
  """The newest token drawn of a lease; 0 where none is known."""
  found, _ = yield operations.Read(drawn_key(key), records.DrawnToken)
  return found.token if found else 0


def _newest_of_heads(key: str) -> operations.Procedure[int]:
  """The newest token that heads have, for a lease that cannot tell.

  A head that is damaged too says nothing. Then that lease's newest drawn token,
  which none is above, will do.

  Raises:
    CorruptSnapshotError: neither can be read.
  """
  tokens = [0]
  for name in filter(str.isdecimal, (yield _HEADS)):
    try:
      head, _ = yield operations.read_head(int(name))
    except errors.CorruptSnapshotError:
      if not (yield from drawn(key)):
        raise
      continue
    tokens.append(head.token if head else 0)
  return max(tokens)


def renew(key: str, owner: str, token: int) -> operations.Procedure[bool]:
  """Moves the beat; False when somebody else holds the lease now."""
  lease, generation = yield _read(key)
  if lease is None or lease.token != token or lease.owner != owner:
    return False
  mine = dataclasses.replace(lease, beat=lease.beat + 1)
  renewed: bool = yield operations.CompareAndSet(key, mine, generation)
  return renewed


def release(
  key: str, owner: str, token: int, home: str = ""
) -> operations.Procedure[None]:
  """Gives the lease up, so that a successor need not wait."""
  lease, generation = yield operations.Read(key, records.Lease)
  if lease is not None and lease.token == token and lease.owner == owner:
    free = records.Lease("", token, lease.beat + 1, home)
    yield operations.CompareAndSet(key, free, generation)


def fence(key: str, token: int) -> operations.Procedure[None]:
  """Goes before what may be written under the lease of `token` alone.

  With 0 nobody has deposed who is about to write.

  Raises:
    FencedError: somebody has taken the lease since.
  """
  if not token:
    return
  lease, _ = yield _read(key)
  if lease is not None and lease.token > token:
    raise errors.FencedError(
      f"{key} was taken under token {lease.token}, after {token}"
    )
