"""A syncer of the simulated world; the checker hears of all that it does.

How it comes to lead, leads and holds on to it is production code:
`diloco.syncer.leadership` and `diloco.syncer.leader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco.controller import program as program_lib
from diloco.snapshots import records
from diloco.syncer import cutting, leader, leadership, orders, weighting
from diloco.syncer import heads as heads_lib
from diloco.verification import arithmetic, session_end, values
from diloco.verification import kernel as kernel_lib

_RENEWAL_SECS = 0.6
_POLL_SECS = 0.8
_LONG_MERGES, _LONG_MERGE_SECS = 0.1, 2.0  # share of all, and at most so long
_LOOK_SECS = 0.1  # from a commit record to the look that finds it, at most


class Syncer(leadership.Leadership):
  """One incarnation of a syncer process, leading or waiting to."""

  def __init__(self, world: Any, life: kernel_lib.Life):
    self.world = world
    self.kernel: kernel_lib.Kernel = world.kernel
    self.life = life
    self.random = life.role.random
    settings = world.core_settings
    weights = weighting.Weighting(
      arithmetic.DECAY,
      settings.max_staleness,
      "hyperbolic"
      if arithmetic.is_hyperbolic(world.schedule.seed)
      else "exponential",
    )
    super().__init__(
      f"{life.role.name}.{life.incarnation}",
      leadership.Terms(world.times, settings, weights),
      cutting.CutKeeper() if world.schedule.cuts else None,
      lambda: self.kernel.clock(life),
    )
    self.renewal_secs = _RENEWAL_SECS
    self.thread: kernel_lib.Thread | None = None
    self.inbox = session_end.Inbox(world, life)
    self.to_drain: program_lib.Program | None = None
    self.has_drained = self.to_leave = False
    self._renewals: kernel_lib.Thread | None = None
    self._leads = False
    self.num_merges = 0
    self._standing: set[int] = set()  # see production

  @property
  def damaged(self) -> list[int]:
    """Fragments whose newest version cannot be read, as far as it knows."""
    return sorted(self.heads.standing if self._leads else self._standing)

  def forget(self) -> None:
    """Lets go of everything."""
    self.__dict__.clear()

  def run(self) -> kernel_lib.Script:
    """The main thread."""
    yield self.world.boot_secs * (0.5 + self.random())
    parts = yield from self.taking_over(lambda: session_end.waits_on(self))
    if parts is not None:
      self.world.checker.took_over(self)
      self._leads = True
      yield from _Leader(self, parts).lead()
    yield from session_end.leave(self)

  def hold(self, renewing: kernel_lib.Script) -> None:
    """See `Leadership`."""
    self._renewals = self.kernel.start(self.life, renewing)

  def stop_renewing(self) -> None:
    """Ends the thread that renews the lease."""
    if self._renewals is not None:
      self._renewals.token = -1

  def num_fragments(self) -> kernel_lib.Script:
    """See `Leadership`; there is no plan to read."""
    yield from ()
    return self.world.schedule.fragments

  def stands_still(self, found: heads_lib.Standstill) -> None:
    """See `Leadership`."""
    self._standing.add(found.fragment)

  def make_head(self, **fields: Any) -> records.Head:
    """See `Leadership`; not checked, for that costs too much here."""
    return values.quick(records.Head, **fields)


class _Leader(leader.Leader):
  """One leadership; the checker hears of all it does."""

  def __init__(self, syncer: Syncer, parts: leader.Parts):
    super().__init__(parts, lambda: syncer.kernel.clock(syncer.life))
    self._syncer = syncer
    self._world = syncer.world
    self._checker = syncer.world.checker
    self._random = syncer.random
    syncer.thread = self._thread = syncer.life.threads[0]
    self._merger = syncer.kernel.start(syncer.life, self.merge())

  def wake_merger(self) -> None:
    self._syncer.kernel.nudge(self._merger, 0.0)

  def wake(self) -> None:
    self._syncer.kernel.nudge(self._thread, 0.0)

  def draining(self) -> bool:
    return self._world.draining or self._syncer.to_drain is not None

  def over(self) -> str:
    return session_end.leads_on(self._syncer, self)

  def pause_secs(self, now: float, deadline: float | None) -> float:
    pause = _POLL_SECS
    if self._thread.missed:
      pause = 0.05 + _LOOK_SECS * self._random()
    if deadline is not None:
      pause = min(pause, max(deadline - now, 0.01))
    return pause

  def merging(self) -> kernel_lib.Script:
    if not self._world.schedule.fine:
      long = self._random() < _LONG_MERGES
      yield (_LONG_MERGE_SECS if long else 0.08) * self._random()

  def content_of(
    self, close: orders.Close, weights: Sequence[float], merged: Any
  ) -> heads_lib.Content:
    self.check()
    return _CONTENT

  def arrived(self, found: Sequence[records.Contribution]) -> None:
    self._checker.seen["arrived_in_a_merge"] += self.is_merging
    self._checker.arrived(self._syncer, found)

  def rejected(self, name: str, why: str) -> None:
    self._checker.rejected(self._syncer, name)

  def acts(self, action: orders.Action) -> None:
    syncer, checker = self._syncer, self._checker
    match action:
      case orders.Close():
        checker.closing(syncer, action)
      case orders.Discard(contribution, reason):
        checker.discarded(syncer, contribution, reason)
      case orders.Cut():
        checker.seen["cut_in_a_merge"] += self.is_merging
      case orders.Quarantine():
        checker.seen["quarantined"] += 1
        if action.suspended_secs:
          self._world.disturbed(action.suspended_secs)
      case orders.Forget(contribution):
        checker.forgotten(syncer, contribution)

  def committed(self, close: orders.Close) -> None:
    self._syncer.num_merges += 1
    ready_at = close.closed_at - close.queued_secs
    self._checker.committed(self._syncer, close, self._clock() - ready_at)

  def board(self) -> records.Board:
    opened = self.core.open_rounds
    rounds = {str(p): m for p, m in opened.items()} if opened else opened
    return values.quick(
      records.Board, versions=self.core.versions, open_rounds=rounds
    )


_CONTENT = heads_lib.Content([[1]], {}, "")
