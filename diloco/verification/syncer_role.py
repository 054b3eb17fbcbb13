"""A syncer of the simulated world: takes the lease and the heads, then leads.

How it leads is production code, `diloco.syncer.leader`, while another thread
renews the lease; the checker hears of all that it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco import errors
from diloco.snapshots import keys, lease, operations, records
from diloco.syncer import chores as chores_lib
from diloco.syncer import core as core_lib
from diloco.syncer import cutting, leader, members, protocol, weighting
from diloco.syncer import heads as heads_lib
from diloco.verification import arithmetic
from diloco.verification import kernel as kernel_lib

RETRY_SECS = 0.2
_POLL_SECS = 0.8
_LOOK_SECS = 0.1  # from a commit record to the look that finds it, at most
_STANDBY_POLL_SECS = 0.9


class StoreAtOnce:
  """A store to production code that calls one, as `store.SnapshotStore`."""

  def __init__(self, kernel: kernel_lib.Kernel, life: kernel_lib.Life):
    self._kernel = kernel
    self._life = life

  def perform(self, procedure: operations.Procedure[Any]) -> Any:
    """Performs a procedure."""
    return self._kernel.perform(self._life, procedure)

  def delete_tree(self, prefix: str) -> None:
    """Deletes everything below a prefix."""

    def procedure() -> operations.Procedure[None]:
      yield operations.DeleteTree(prefix)

    self.perform(procedure())


class Syncer:
  """One incarnation of a syncer process, leading or waiting to."""

  __slots__ = (
    "chores",
    "core",
    "cuts",
    "fenced",
    "heads",
    "kernel",
    "life",
    "owner",
    "random",
    "thread",
    "token",
    "watch",
    "world",
  )

  core: core_lib.SyncerCore
  heads: heads_lib.Heads

  def __init__(self, world: Any, life: kernel_lib.Life):
    self.world = world
    self.kernel: kernel_lib.Kernel = world.kernel
    self.life = life
    self.random = life.role.random
    self.owner = f"{life.role.name}.{life.incarnation}"
    at_once: Any = StoreAtOnce(self.kernel, life)
    self.cuts = cutting.CutKeeper(at_once) if world.schedule.cuts else None
    self.chores = chores_lib.Chores(
      self.cuts or chores_lib.NoPins(),
      chores_lib.versions_kept(world.schedule.max_staleness),
    )
    self.watch = lease.LeaseWatch(world.lease_ttl_secs)
    self.token = 0
    self.fenced = False
    self.thread: kernel_lib.Thread | None = None

  def forget(self) -> None:
    """Lets go of its thread, which holds it."""
    self.thread = None

  def run(self) -> kernel_lib.Script:
    """The main thread."""
    world, kernel, life = self.world, self.kernel, self.life
    yield world.boot_secs * (0.5 + self.random())
    while not self.token:
      try:
        self.token = yield from lease.acquire(
          keys.SYNCER_LEASE, self.owner, self.watch, lambda: kernel.clock(life)
        )
      except operations.FAILURES:
        yield RETRY_SECS
        continue
      if not self.token:
        yield _STANDBY_POLL_SECS
    kernel.start(life, self.renew())
    yield operations.Point("after_lease")
    yield from self._take_over()
    yield from _Leader(self).lead()

  def renew(self) -> kernel_lib.Script:
    """The thread that renews the lease."""
    pause = self.world.renew_secs
    while True:
      yield pause
      try:
        held = yield from lease.renew(keys.SYNCER_LEASE, self.owner, self.token)
      except operations.FAILURES:
        continue
      if not held:
        self.fenced = True
        return

  def check_lease(self) -> None:
    """Raises `FencedError` once another leads."""
    if self.fenced:
      raise errors.FencedError(f"the lease of token {self.token} was taken")

  def _take_over(self) -> kernel_lib.Script:
    self.heads = heads_lib.Heads(self.token, _make_head)
    while True:
      self.check_lease()
      try:
        cut = yield from self.heads.take_over(
          self.world.schedule.fragments, self.cuts, self.chores
        )
        break
      except (*operations.FAILURES, LookupError):
        yield RETRY_SECS
    heads = self.heads.records
    self.core = core_lib.SyncerCore(
      self.world.core_settings,
      protocol.starts(heads),
      epoch=max(head.epoch for head in heads),
      cut=cut,
    )
    self.world.checker.took_over(self)


class _Leader(leader.Leader):
  """One leadership; the checker hears of all it does."""

  def __init__(self, syncer: Syncer):
    world = syncer.world
    super().__init__(
      leader.Parts(
        core=syncer.core,
        heads=syncer.heads,
        weights=weighting.Weighting(
          arithmetic.DECAY, max_staleness=world.schedule.max_staleness
        ),
        cuts=syncer.cuts,
        chores=syncer.chores,
        members=members.MemberWatch(world.member_ttl_secs),
        look_every_secs=world.heartbeat_secs,
        retry_secs=RETRY_SECS,
      ),
      lambda: syncer.kernel.clock(syncer.life),
    )
    self._syncer = syncer
    self._world = world
    self._checker = world.checker
    self._random = syncer.random
    syncer.thread = self._thread = syncer.life.threads[0]

  def check(self) -> None:
    if self._syncer.fenced:
      self._syncer.check_lease()

  def draining(self) -> bool:
    draining: bool = self._world.draining
    return draining

  def over(self) -> str:
    return ""

  def pause_secs(self, now: float, deadline: float | None) -> float:
    pause = _POLL_SECS
    if self._thread.missed:
      pause = 0.05 + _LOOK_SECS * self._random()
    if deadline is not None:
      pause = min(pause, max(deadline - now, 0.01))
    return pause

  def merging(self, close: core_lib.Close) -> kernel_lib.Script:
    if not self._world.schedule.fine:
      yield 0.08 * self._random()
    self.check()

  def content_of(
    self, close: core_lib.Close, weights: Sequence[float], merged: Any
  ) -> heads_lib.Content:
    self.check()
    return _CONTENT

  def arrived(self, found: Sequence[records.Contribution]) -> None:
    self._checker.arrived(self._syncer, found)

  def rejected(self, name: str, why: str) -> None:
    self._checker.rejected(self._syncer, name)

  def acts(self, action: core_lib.Action) -> None:
    syncer, checker = self._syncer, self._checker
    match action:
      case core_lib.Close():
        checker.closing(syncer, action)
      case core_lib.Discard(contribution, reason):
        checker.discarded(syncer, contribution, reason)
      case core_lib.Quarantine():
        checker.seen["quarantined"] += 1
        if action.suspended_secs:
          self._world.disturbed(action.suspended_secs)
      case core_lib.Forget(contribution):
        checker.forgotten(syncer, contribution)

  def committed(self, close: core_lib.Close) -> None:
    ready_at = close.closed_at - close.queued_secs
    self._checker.committed(self._syncer, close, self._clock() - ready_at)

  def board(self) -> records.Board:
    opened = self.core.open_rounds
    rounds = {str(p): m for p, m in opened.items()} if opened else opened
    board = _new(records.Board)
    fields = {"versions": self.core.versions, "open_rounds": rounds}
    _set(board, "__dict__", fields)
    return board


# What frozen dataclasses check while they are made costs too much here.
_new = object.__new__
_set = object.__setattr__
_CONTENT = heads_lib.Content([[1]], {}, "")


def _make_head(**fields: Any) -> records.Head:
  head = _new(records.Head)
  _set(head, "__dict__", fields)
  return head
