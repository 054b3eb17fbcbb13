"""How a process comes to lead, and holds on to it: scripts for every world.

Several syncers may run; who holds the lease leads. The others are *standbys*:
they watch the lease by their own clocks and take it when it stands still. A
leader that was only stopped finds, when it wakes, a token that is not its own.
A leader that hangs lets the lease go: it is renewed only for who gets on, every
`hang_secs` at least. From one operation of the store to the next, or from one
part of a tensor to another, it does, however long a merge is. While a merge is
under way it is the merge that has to, or one that stands still would not show.
Time in which the store does not answer counts for nothing, or an outage would
read as a hang.

Who has taken the lease *takes over* before it leads: it fences the heads and
learns from the store what its predecessors left behind.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco import errors, timing
from diloco.snapshots import keys, lease, operations, records
from diloco.syncer import chores as chores_lib
from diloco.syncer import core as core_lib
from diloco.syncer import cutting, leader, members, protocol, weighting
from diloco.syncer import heads as heads_lib

logger = logging.getLogger(__name__)

_AFTER_LEASE = operations.Point("after_lease")


class HangWatch:
  """Tells when a leader does not get on although the store answers."""

  def __init__(self, limit_secs: float, longest_secs: float):
    """Args: how long it may stand still; longest time between two answers."""
    self._limit_secs = limit_secs
    self._longest_secs = longest_secs
    self._answered: float | None = None
    self._still_secs = 0.0

  def asked(self) -> None:
    """It gets on."""
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


class Terms(NamedTuple):
  """What a syncer waits and leads by."""

  times: timing.Timing  # the run's timeouts
  settings: core_lib.Settings  # policies of the core
  weights: weighting.Weighting  # of contributions


class Leadership(abc.ABC):
  """Of one process; several threads may ask whether it still leads.

  Attributes:
    token: fencing token; 0 until it has the lease.
    fenced: whether another process has taken the lease, or may by now.
    heads: of all fragments, once it has taken over.
    cuts: takes this syncer's part in cuts; None in a run without.
    renewal_secs: the lease moves this often, or others take it.
  """

  heads: heads_lib.Heads
  each: operations.Each = staticmethod(operations.in_turn)

  def __init__(
    self,
    owner: str,
    terms: Terms,
    cuts: cutting.CutKeeper | None,
    clock: Callable[[], float],
  ):
    """Takes nothing yet; no other process has the name of `owner`."""
    times = terms.times
    self.token = 0
    self.fenced = False
    self.cuts = cuts
    self.chores = chores_lib.Chores(
      cuts or cutting.CutKeeper(),
      chores_lib.versions_kept(terms.settings.max_staleness),
      self.each,
    )
    self.renewal_secs = min(times.heartbeat_secs, times.lease_ttl_secs / 4)
    self._owner = owner
    self._terms = terms
    self._clock = clock
    self._watch = lease.LeaseWatch(times.lease_ttl_secs)
    self._merging = False
    self._hang = HangWatch(times.hang_secs, times.lease_ttl_secs)

  @abc.abstractmethod
  def hold(self, renewing: operations.Script[None]) -> None:
    """It has the lease: performs what renews it in a thread of its own."""

  @abc.abstractmethod
  def num_fragments(self) -> operations.Procedure[int]:
    """Gives P; 0 while the islands have not written the plan."""

  @abc.abstractmethod
  def stands_still(self, found: heads_lib.Standstill) -> None:
    """A fragment nobody can commit to keeps it from taking over."""

  def make_head(self, **fields: Any) -> records.Head:
    """Makes a head from its fields."""
    return records.Head(**fields)

  @property
  def hung(self) -> bool:
    """Whether the lease was let go because it hangs."""
    return self._hang.hung

  def gets_on(self) -> None:
    """Says that the leading thread does; a merge gets on by itself."""
    if not self._merging:
      self._hang.asked()

  def merge_gets_on(self) -> None:
    """Says that the merging thread does, in the middle of a long merge."""
    self._hang.asked()

  def check(self, merging: bool = False) -> None:
    """Says that the leading thread gets on; asks whether it still leads.

    Raises:
      FencedError: another process has taken the lease, or may by now.
    """
    self._merging = merging
    self.gets_on()
    if self.fenced:
      raise errors.FencedError(
        f"the lease of token {self.token} was taken over"
      )

  def waiting(self, wanted: Callable[[], bool]) -> operations.Script[bool]:
    """Waits for the lease while `wanted`, has it renewed; says if it has it."""
    times = self._terms.times
    while wanted():
      try:
        self.token = yield from lease.acquire(
          keys.SYNCER_LEASE, self._owner, self._watch, self._clock
        )
      except operations.FAILURES as error:
        logger.warning("no_lease error=%s", errors.of_store(error))
        if isinstance(error, errors.CorruptSnapshotError):
          with contextlib.suppress(*operations.FAILURES):
            yield from self._tell_standstills()
        yield times.retry_secs
        continue
      if self.token:
        self.hold(self.renewing())
        return True
      yield times.standby_poll_secs
    return False

  def renewing(self) -> operations.Script[None]:
    """Renews the lease, until it is lost or its owner hangs."""
    while True:
      yield self.renewal_secs
      try:
        held = yield from lease.renew(
          keys.SYNCER_LEASE, self._owner, self.token
        )
      except operations.FAILURES as error:
        logger.warning("renewal_failed error=%s", error)
        continue
      self._hang.answered(self._clock())
      if held and not self.hung:
        continue
      logger.warning("lease_gone token=%d hung=%s", self.token, self.hung)
      self.fenced = True
      return

  def releasing(self) -> operations.Procedure[None]:
    """Gives the lease up, so that a successor need not wait."""
    if self.token and not self.fenced:
      yield from lease.release(keys.SYNCER_LEASE, self._owner, self.token)

  def taking_over(
    self, wanted: Callable[[], bool]
  ) -> operations.Script[leader.Parts | None]:
    """Waits for the lease and the heads; afterwards this process leads.

    Gives what to lead with; None when it was not `wanted` any more.

    Raises:
      FencedError: somebody else took the lease meanwhile.
    """
    if not (yield from self.waiting(wanted)):
      return None
    yield _AFTER_LEASE
    self.heads = heads_lib.Heads(self.token, self.make_head, self.each)
    while (cut := (yield from self._fence())) is None:
      if not wanted():
        return None
    heads = self.heads.records
    terms, times = self._terms, self._terms.times
    return leader.Parts(
      check=self.check,
      core=core_lib.SyncerCore(
        terms.settings,
        protocol.starts(heads),
        epoch=max(head.epoch for head in heads),
        cut=cut,
      ),
      heads=self.heads,
      weights=terms.weights,
      cuts=self.cuts,
      chores=self.chores,
      members=members.MemberWatch(times.member_ttl_secs),
      look_every_secs=times.heartbeat_secs,
      retry_secs=times.retry_secs,
      least_pause_secs=times.round_trip_secs,
      each=self.each,
    )

  def _tell_standstills(self) -> operations.Procedure[None]:
    fragments = yield from self.num_fragments()
    for found in (yield from heads_lib.standstills(fragments)):
      self.stands_still(found)

  def _fence(self) -> operations.Script[int | None]:
    """Tries to hold all heads, and to learn what predecessors left behind.

    Gives the last cut these heads are after. None, after a pause, while islands
    still write them, while the store fails, or if one is damaged or lost: that
    takes a return to a cut, and until then islands train on.
    """
    self.check()
    pause_secs = self._terms.times.standby_poll_secs
    try:
      if fragments := (yield from self.num_fragments()):
        try:
          return (
            yield from self.heads.take_over(fragments, self.cuts, self.chores)
          )
        except (LookupError, errors.CorruptSnapshotError):
          yield from self._tell_standstills()
    except operations.FAILURES as error:
      logger.warning("store_unreachable error=%s", error)
      pause_secs = self._terms.times.retry_secs
    yield pause_secs
    return None
