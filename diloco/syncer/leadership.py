"""A process's hold on the syncer's lease: waits for it, renews it, gives it up.

Several syncers may run; who holds the lease leads. The others are *standbys*:
they watch the lease by their own clocks and take it when it stands still. A
leader that was only stopped finds, when it wakes, a token that is not its own.
A leader whose main thread hangs lets the lease go: it is renewed only for who
gets on, every `hang_secs` at least. From one operation of the store to the
next, or from one part of a tensor to another, it does, however long a merge is.
Time in which the store does not answer counts for nothing, or an outage would
read as a hang.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable

from diloco import errors, timing, workers
from diloco.snapshots import keys, lease, records, store

logger = logging.getLogger(__name__)


class StrangerWatch:
  """Tells when a lease is kept from us by somebody who does not belong here."""

  def __init__(self, limit_secs: float, stranger: Callable[[str], bool]):
    """Args: how long that may last; whether a process is one, by name."""
    self._limit_secs = limit_secs
    self._stranger = stranger
    self._owner = ""  # the stranger, if one has it
    self._beat = 0  # when first seen
    self._since = 0.0

  def check(self, held: records.Lease | None, now: float) -> None:
    """Takes in who holds the lease at `now`, while it is out of reach.

    Raises:
      UserError: a stranger has held it for the whole limit.
    """
    owner = held.owner if held else ""
    # One of ours becomes a stranger when its seat is started anew after its
    # death; then its lease is not renewed, and free long before the limit.
    if not held or not owner or not self._stranger(_process(owner)):
      self._owner = ""
    elif owner != self._owner:
      self._owner, self._beat, self._since = owner, held.beat, now
    elif held.beat != self._beat and now - self._since >= self._limit_secs:
      raise errors.UserError(
        "the syncer's lease",
        f"it is held by the live process {_process(owner)}, which renews it and"
        " was not started by this run's controller",
        "end that process, or the run it belongs to",
      )


def _process(owner: str) -> str:
  """Name of an owner's process, which its leadership has made unique."""
  return owner.rpartition(".")[0]


class HangWatch:
  """Tells when the main thread does not get on although the store answers."""

  def __init__(self, limit_secs: float, longest_secs: float):
    """Args: how long it may stand still; longest time between two answers."""
    self._limit_secs = limit_secs
    self._longest_secs = longest_secs
    self._answered: float | None = None
    self._still_secs = 0.0

  def asked(self) -> None:
    """The main thread gets on."""
    self._still_secs = 0.0

  def answered(self, now: float) -> None:
    """The store answered another thread at `now`, monotonic seconds."""
    if self._answered is not None:
      secs = now - self._answered
      # What was longer was an outage, and may have stopped the main thread.
      self._still_secs += min(secs, self._longest_secs)
    self._answered = now

  @property
  def hung(self) -> bool:
    """Whether it stood still for too long."""
    return self._still_secs > self._limit_secs


class Leadership:
  """Of one process; several threads may ask whether it still leads."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    times: timing.Timing,
    owner: str,
    stranger: Callable[[str], bool],
  ):
    """Takes nothing yet.

    Args:
      snapshots: the store.
      times: the run's timeouts.
      owner: name of this process; another, in a container with the same
        names and numbers or in this very process, may have the same.
      stranger: whether the process of that name does not belong to this run.
    """
    self._store = snapshots
    self._times = times
    self._owner = f"{owner}.{secrets.token_hex(8)}"
    self._watch = lease.LeaseWatch(times.lease_ttl_secs)
    self._strangers = StrangerWatch(times.foreign_secs, stranger)
    self._stop = threading.Event()
    self._fenced = threading.Event()
    self._renewals: workers.Worker | None = None
    self._hang = HangWatch(times.hang_secs, times.lease_ttl_secs)
    self.token = 0  # 0 until it leads

  def wait(self, wanted: Callable[[], bool]) -> bool:
    """Waits for the lease; False when that is not `wanted` any more.

    Raises:
      UserError: a stranger keeps it.
    """
    beat_due = 0.0
    while not self.token:
      if not wanted():
        return False
      now = time.monotonic()
      try:
        if now >= beat_due:
          beat_due = now + self._times.heartbeat_secs
          self._look_for_strangers(now)
        self.token = self._store.perform(
          lease.acquire(
            keys.SYNCER_LEASE, self._owner, self._watch, time.monotonic
          )
        )
      except (OSError, errors.CorruptSnapshotError) as error:
        logger.warning("store_unreachable error=%s", error)
        time.sleep(self._times.retry_secs)
      if not self.token:
        time.sleep(self._times.standby_poll_secs)
    self._renewals = workers.Worker("lease", self._renew_on)
    return True

  def _look_for_strangers(self, now: float) -> None:
    try:
      held = self._store.read(keys.SYNCER_LEASE, records.Lease)
    except errors.CorruptSnapshotError as error:
      # Nobody renews it; it is replaced once its time to live is over.
      logger.warning("lease_damaged error=%s", error)
      held = None
    self._strangers.check(held, now)

  def gets_on(self) -> None:
    """Says that the main thread does, be it in the middle of a long merge."""
    self._hang.asked()

  def check(self) -> None:
    """Says that the main thread gets on; asks whether it still leads.

    Raises:
      FencedError: another process has taken the lease, or may by now.
      WorkerError: nobody renews it any more.
    """
    self._hang.asked()
    if self._renewals is not None:
      self._renewals.check()
    if self._fenced.is_set():
      raise errors.FencedError(
        f"the lease of token {self.token} was taken over"
      )

  @property
  def hung(self) -> bool:
    """Whether the lease was let go because the main thread hangs."""
    return self._hang.hung

  def close(self) -> None:
    """Gives the lease up, so that a successor need not wait."""
    self._stop.set()
    if self._renewals is not None:
      self._renewals.join()
    if not self.token or self._fenced.is_set():
      return
    try:
      self._store.perform(
        lease.release(keys.SYNCER_LEASE, self._owner, self.token)
      )
    except (OSError, errors.CorruptSnapshotError) as error:
      logger.warning("lease_not_released error=%s", error)

  @property
  def renewal_secs(self) -> float:
    """Time between renewals: the lease moves this often, or others take it."""
    return min(self._times.heartbeat_secs, self._times.lease_ttl_secs / 4)

  def _renew_on(self) -> None:
    while not self._stop.wait(self.renewal_secs) and self.renew():
      pass

  def renew(self) -> bool:
    """Renews the lease once; says whether to go on doing so."""
    try:
      held = self._store.perform(
        lease.renew(keys.SYNCER_LEASE, self._owner, self.token)
      )
    except (OSError, errors.CorruptSnapshotError) as error:
      logger.warning("renewal_failed error=%s", error)
      return True
    if not held:
      self._fenced.set()
      return False
    self._hang.answered(time.monotonic())
    if self._hang.hung:
      logger.warning("lease_let_go hang_secs=%.1f", self._times.hang_secs)
      self._fenced.set()
      return False
    return True
