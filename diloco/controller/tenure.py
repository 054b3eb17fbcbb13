"""Who controls a run: a lease in its store, with a fencing token.

A run has one controller at a time, on whatever machine, and is in one
directory, the lease's *home*, also while it has no controller. That who holds
the lease has died is seen at once on its own machine; elsewhere the lease must
stand still for the time to live. A thread that does nothing else renews it, so
that neither a busy turn nor a long operation of the store loses it.

Only who was told a moment ago that the lease is its own touches processes and
files; what is written for a restore or a cut is refused by the store's own
records (`restore.hold`, `lease.fence`). A controller that was stopped finds
when it wakes that it cannot be sure, and asks first.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from diloco import errors, workers
from diloco.controller import move
from diloco.report import liveness
from diloco.snapshots import keys, lease, operations, records, restore, store

logger = logging.getLogger(__name__)

_RENEWALS = 5  # in a time to live
_SURE = 2 / 3  # of a time to live after a renewal nobody else has the lease
_ASK_SECS = 2.0  # what a store does not answer by then is no reason to wait
_EXCUSED = 1 / 3  # of a time to live for which it is not asked again then


class Unopposed:
  """Hold of a controller that nobody deposes.

  Attributes:
    token: the fencing token; 0 for none.
  """

  token = 0

  def check(self) -> None:
    """Raises `FencedError` once another controller has the run."""


class Watch(lease.LeaseWatch):
  """Watches the lease, and sees deaths on this machine at once."""

  def __init__(
    self,
    ttl_secs: float,
    check: Callable[[records.Lease], None] = lambda held: None,
    *,
    copied: bool = False,
  ):
    """Does not know the lease yet.

    `check` raises for a lease that must not be taken. Where the store may be a
    copy (`copied`), whom the lease names does not renew it; that it lives tells
    nothing then.
    """
    super().__init__(ttl_secs)
    self._check = check
    self._copied = copied

  def lives(self, owner: str) -> bool | None:
    """Whether who holds the lease lives; None where that cannot be told."""
    found = liveness.lives(owner)
    return None if found and self._copied else found

  def expired(self, lease: records.Lease | None, now: float) -> bool:
    """See `LeaseWatch`."""
    if lease is not None:
      self._check(lease)
      if lease.owner and self.lives(lease.owner) is False:
        return True
    return super().expired(lease, now)


class Tenure(Unopposed):
  """A controller's own hold on its run, until it is closed. Thread-safe."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    mine: records.Lease,
    ttl_secs: float,
    clock: Callable[[], float] = functools.partial(
      time.clock_gettime, time.CLOCK_BOOTTIME
    ),
  ):
    """Renews a lease that was taken just now, as `mine` was written there.

    `clock` counts the seconds in which the machine slept.
    """
    self.token = mine.token
    self.home = mine.home  # what it leaves behind
    self._store = snapshots
    self._mine = mine
    self._ttl_secs = ttl_secs
    self._clock = clock
    self._sure_until = clock()  # it may have been stopped since it took it
    self._lost = False
    self._failed = 0  # times that the store did
    self._renewals = workers.Loop("tenure", self._renew(), snapshots.execute)
    self._renewals.start()

  def __enter__(self) -> Tenure:
    return self

  def __exit__(self, *_: object) -> None:
    """Gives the lease up, so that a successor need not wait."""
    text = "waiting for the run's store to answer, to give its lease up"
    told = threading.Timer(_ASK_SECS, print, [text], {"file": sys.stderr})
    told.start()
    try:
      self._renewals.close()
      if self._lost:
        return
      freed = lease.release(
        keys.CONTROLLER_LEASE, self._mine.owner, self.token, self.home
      )
      self._store.perform(freed)
    except operations.FAILURES as error:
      logger.warning("lease_not_released error=%s", errors.one_line(error))
    finally:
      told.cancel()

  def check(self) -> None:
    """Goes before what only the one controller of a run may do.

    In time in which the store answers nobody, nobody can have taken the lease.

    Raises:
      FencedError: another controller has the run.
      WorkerError: nobody renews the lease any more.
    """
    self._renewals.check()
    with self._renewals.changed:
      if not self._settled():
        failed = self._failed
        self._renewals.wake()
        self._renewals.changed.wait_for(
          lambda: self._settled() or self._failed > failed, _ASK_SECS
        )
      if self._lost:
        raise errors.FencedError(
          f"another controller took the run over, after token {self.token}"
        )
      if not self._settled():
        self._sure_until = self._clock() + _EXCUSED * self._ttl_secs

  def renew_within(self, ttl_secs: float) -> None:
    """Goes by another time to live, by which others watch from now on."""
    with self._renewals.changed:
      self._ttl_secs = ttl_secs
      self._sure_until = self._clock()
      self._renewals.wake()

  def _settled(self) -> bool:
    return self._lost or self._clock() < self._sure_until

  def _renew(self) -> operations.Script[None]:
    told = False  # of an outage, once
    while True:
      yield operations.Nap(self._ttl_secs / _RENEWALS)
      began = self._clock()
      try:
        self._lost = not (yield from self._still_mine())
      except operations.FAILURES as error:
        if not told:
          logger.warning("renewal_failed error=%s", errors.of_store(error))
        told = True
        self._failed += 1
        continue
      if self._lost:
        logger.warning("lease_gone token=%d", self.token)
        return
      told = False
      self._sure_until = began + _SURE * self._ttl_secs

  def _still_mine(self) -> operations.Procedure[bool]:
    """Moves the beat; puts back a lease that was damaged or deleted."""
    key, mine = keys.CONTROLLER_LEASE, self._mine
    try:
      if (yield from lease.renew(key, mine.owner, mine.token)):
        return True
      found, generation = yield operations.Read(key, records.Lease)
    except errors.CorruptSnapshotError as error:
      found, generation = None, error.generation
    if found is not None:
      return (found.owner, found.token) == (mine.owner, mine.token)
    newest = yield from restore.newest_token()
    if max((yield from lease.drawn(key)), newest) > mine.token:
      return False  # somebody is about to take it, or did
    put_back: bool = yield operations.CompareAndSet(key, mine, generation)
    return put_back


def take(
  snapshots: store.SnapshotStore,
  home: str,
  ttl_secs: float,
  what: str,
  watch: Watch | None = None,
  *,
  owner: str = "",
  copied: bool = False,
  unused: Callable[[], bool] = lambda: False,
) -> Tenure:
  """Makes this process the one controller of a run.

  Args:
    snapshots: the run's store.
    home: id of the directory that the run is in, or is to go on in.
    ttl_secs: of the lease.
    what: the run, for a user.
    watch: has seen the lease before; takes it from whatever home. By default
      the run must be in this one, or nowhere.
    owner: who takes it, by `liveness.name_process`; drawn if none is given.
    copied: see `Watch`.
    unused: whether nothing of a run is there. Then the directory that the lease
      names is that of a controller which died before it wrote anything.

  Raises:
    UserError: a controller of the run lives, or it is in another directory.
    OSError: the store fails.
  """
  if watch is None:
    watch = Watch(
      ttl_secs,
      lambda held: move.check_home(held, home, what, unused, liveness.lives),
      copied=copied,
    )
  owner = owner or liveness.name_process()
  script = move.taking(
    *(owner, home, what, ttl_secs, watch), time.monotonic, say
  )
  token = operations.perform(script, functools.partial(execute, snapshots))
  mine = Tenure(snapshots, records.Lease(owner, token, 0, home), ttl_secs)
  try:
    snapshots.perform(restore.hold(token))
  except BaseException as error:
    mine.home = watch.held.home if watch.held else ""
    mine.__exit__()
    if isinstance(error, errors.FencedError):
      raise move.alive(what) from error
    raise
  return mine


def is_unused(snapshots: store.SnapshotStore) -> bool:
  """Whether a store holds no more of a run than who was about to begin it.

  Raises:
    OSError: the store cannot be read.
  """
  key = keys.CONTROLLER_LEASE
  begun = {key, lease.drawn_key(key), keys.EPOCH, keys.SEEN}
  return begun.issuperset(snapshots.keys(""))


def say(text: str) -> None:
  """Tells the user what is waited for."""
  print(text, file=sys.stderr)


def execute(snapshots: store.SnapshotStore, operation: Any) -> Any:
  """Does one operation, or pause, before there is a session."""
  if isinstance(operation, float):
    return time.sleep(operation)
  return snapshots.execute(operation)
