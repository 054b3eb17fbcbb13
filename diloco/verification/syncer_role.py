"""A syncer of the simulated world: the shell's loop around production parts.

It does what `diloco.syncer` does live, in the same order: take the lease,
fence the heads, then scan, merge and commit, while another thread renews the
lease. Decisions are the core's, orders of operations the procedures'.
"""

from __future__ import annotations

from typing import Any

from diloco import errors
from diloco.snapshots import keys, lease, operations, records
from diloco.syncer import chores as chores_lib
from diloco.syncer import core as core_lib
from diloco.syncer import cutting, members, protocol, weighting
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
    "members",
    "owner",
    "random",
    "thread",
    "token",
    "watch",
    "weighting",
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
    self.members = members.MemberWatch(world.member_ttl_secs)
    self.token = 0
    self.fenced = False
    self.thread: kernel_lib.Thread | None = None
    self.weighting = weighting.Weighting(
      arithmetic.DECAY, max_staleness=world.schedule.max_staleness
    )

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
    yield from self._lead()

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

  def _check_lease(self) -> None:
    if self.fenced:
      raise errors.FencedError(f"the lease of token {self.token} was taken")

  def _take_over(self) -> kernel_lib.Script:
    self.heads = heads_lib.Heads(self.token, _make_head)
    while True:
      self._check_lease()
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

  def _lead(self) -> kernel_lib.Script:
    world, kernel, life = self.world, self.kernel, self.life
    rate, offset = life.rate, life.offset
    self.thread = thread = life.threads[0]
    members_due, shown = 0.0, False
    while True:
      if self.fenced:
        self._check_lease()
      now = offset + rate * kernel.now
      try:
        if not shown:
          yield from self._show_board()
          shown = True
        if now >= members_due:
          members_due = now + world.heartbeat_secs
          yield from self.heads.look_after()
          if self.cuts is not None:
            for event in self.cuts.look(self.core.channel):
              actions = self.core.handle(event, offset + rate * kernel.now)
              yield from self._do(actions)
          yield from self._look_at_members(now)
        if self.chores.pending:
          yield from self.chores.tidy()
        yield from self._scan()
        now = offset + rate * kernel.now
        deadline = self.core.next_deadline()
        if world.draining:
          yield from self._do(self.core.handle(core_lib.Drain(), now))
        elif deadline is not None and now >= deadline:
          yield from self._do(self.core.handle(core_lib.Tick(), now))
      except operations.FAILURES:
        yield RETRY_SECS
      pause = 0.05 + _LOOK_SECS * self.random() if thread.missed else _POLL_SECS
      deadline = self.core.next_deadline()
      if deadline is not None:
        pause = min(pause, max(deadline - offset - rate * kernel.now, 0.01))
      yield operations.Nap(pause)

  def _look_at_members(self, now: float) -> kernel_lib.Script:
    found, _ = yield from protocol.members()
    present = self.members.present(found, now)
    actions = self.core.handle(
      core_lib.Membership(present), self.kernel.clock(self.life)
    )
    if actions:
      yield from self._do(actions)

  def _scan(self) -> kernel_lib.Script:
    _, found, broken = yield from self.chores.look()
    for name, _ in broken:
      self.world.checker.rejected(self, name)
      yield from self.chores.delete(name)
    if not found:
      return
    arrived = core_lib.Arrived([record for _, record in found])
    self.world.checker.arrived(self, arrived.contributions)
    actions = self.core.handle(arrived, self.kernel.clock(self.life))
    if actions:
      yield from self._do(actions)

  def _do(self, actions: list[Any]) -> kernel_lib.Script:
    """Does all of `actions`, whatever the store makes of some of them."""
    failure: BaseException | None = None
    for action in actions:
      if self.fenced:
        self._check_lease()
      kind = type(action)
      try:
        if kind is core_lib.Close:
          yield from self._close_round(action)
        elif kind is core_lib.Open:
          yield from self._show_board()
        elif kind is core_lib.Discard:
          self.world.checker.discarded(self, action.contribution, action.reason)
          yield from self.chores.delete(action.contribution.key)
        elif kind is core_lib.Cut and self.cuts is not None:
          self.cuts.take_part(action.number, self.heads.records)
        elif kind is core_lib.Quarantine:
          self.world.checker.seen["quarantined"] += 1
          if action.suspended_secs:
            self.world.disturbed(action.suspended_secs)
          yield from self.chores.accuse(action)
        elif kind is core_lib.Remind:
          yield from self.chores.remind(action.island)
        elif kind is core_lib.Forget:
          self.world.checker.forgotten(self, action.contribution)
          yield from self.chores.delete(action.contribution.key)
      except OSError as error:
        failure = error
    if failure is not None:
      raise failure

  def _show_board(self) -> kernel_lib.Script:
    yield operations.Write(keys.BOARD, self._board())

  def _board(self) -> records.Board:
    opened = self.core.open_rounds
    rounds = {str(p): m for p, m in opened.items()} if opened else opened
    board = _new(records.Board)
    fields = {"versions": self.core.versions, "open_rounds": rounds}
    _set(board, "__dict__", fields)
    return board

  def _close_round(self, close: core_lib.Close) -> kernel_lib.Script:
    kernel, life, world = self.kernel, self.life, self.world
    fragment = close.fragment
    world.checker.closing(self, close)
    weight = self.weighting.weight
    weights = []
    for chosen in close.chosen:
      record: Any = chosen.contribution
      weights.append(weight(record.c_tokens, record.c_steps, chosen.staleness))
    try:
      if not world.schedule.fine:
        yield 0.08 * self.random()
      if self.fenced:
        self._check_lease()
      yield from self.heads.close_round(close, weights, _content_of)
    except protocol.RefusedError as refused:
      later = self.core.handle(
        core_lib.MergeRefused(fragment, refused.reasons), kernel.clock(life)
      )
      yield from self._do(later)
      return
    except operations.FAILURES:
      self.core.handle(core_lib.MergeFailed(fragment), kernel.clock(life))
      return
    yield from self._committed(close)

  def _committed(self, close: core_lib.Close) -> kernel_lib.Script:
    fragment, now = close.fragment, self.kernel.clock(self.life)
    ready_at = close.closed_at - close.queued_secs
    self.world.checker.committed(self, close, now - ready_at)
    later = self.core.handle(core_lib.Committed(fragment), now)
    failure: BaseException | None = None
    yield operations.Point("before_tape")
    head = self.heads.held[fragment].head
    merged = [chosen.contribution.key for chosen in close.chosen]
    try:
      yield from self.chores.clear_up(head, self._board(), merged)
    except OSError as error:
      failure = error
    if later:
      yield from self._do(later)
    if failure is not None:
      raise failure


# What frozen dataclasses check while they are made costs too much here.
_new = object.__new__
_set = object.__setattr__
_CONTENT = heads_lib.Content([[1]], {}, "")


def _make_head(**fields: Any) -> records.Head:
  head = _new(records.Head)
  _set(head, "__dict__", fields)
  return head


def _content_of(merged: Any) -> heads_lib.Content:
  return _CONTENT
