"""A leading syncer: looks at the store, tells the core, does what it answers.

Two threads lead. One looks and decides, and does all that is small. The other
merges, one round at a time, and hands back what came of it; while it does, what
else arrives is found, judged and told of. A round that closes is one script of
the first thread, from what earlier tries left to what is deleted after the
commit: it is put aside while its merge runs.

Scripts (see `diloco.snapshots.operations`): the live syncer and the simulated
one lead by these very lines. What a world adds is in a subclass: who holds the
lease, where decisions are told, and what a version's contents are. Nothing is
decided here: the order of operations is in `diloco.syncer.heads` and
`diloco.syncer.chores`, whom to merge and whom to refuse in
`diloco.syncer.core`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from diloco.snapshots import keys, operations, records
from diloco.syncer import chores as chores_lib
from diloco.syncer import core as core_lib
from diloco.syncer import cutting, orders, protocol, weighting
from diloco.syncer import heads as heads_lib
from diloco.syncer import members as members_lib

_BEFORE_TAPE = operations.Point("before_tape")


class Parts(NamedTuple):
  """What a leader works with."""

  # Told whether a merge is under way; raises `FencedError` when another leads.
  check: Callable[[bool], None]
  core: core_lib.SyncerCore
  heads: heads_lib.Heads
  weights: weighting.Weighting
  cuts: cutting.CutKeeper | None
  chores: chores_lib.Chores
  members: members_lib.MemberWatch
  look_every_secs: float  # time between two looks at members, cuts and heads
  retry_secs: float  # pause after a failure of the store
  # Between two turns; a store that is far is not asked more.
  least_pause_secs: float = 0.0
  each: operations.Each = operations.in_turn


class Witness:
  """Hears of all that a leader does; this one keeps none of it."""

  def refusal(self, record: records.Contribution) -> str:
    """Why a well-formed record cannot be true; empty if it can."""
    return ""

  def arrived(self, found: Sequence[records.Contribution]) -> None:
    """These records were found."""

  def rejected(self, name: str, why: str) -> None:
    """A record of that name cannot be trusted."""

  def acts(self, action: orders.Action) -> None:
    """An action is about to be done."""

  def merging(self) -> operations.Script[None]:
    """A merge is about to begin, in the thread that merges."""
    yield from ()

  def committed(self, close: orders.Close) -> None:
    """A version is the head; nobody else knows."""

  def told(self, close: orders.Close) -> None:
    """A version is to be told of."""

  def failed(self, error: Exception, close: orders.Close | None) -> None:
    """The store failed, in a merge or elsewhere."""

  def healed(self, healed: Sequence[records.Head]) -> None:
    """Heads were looked at, and these put back."""

  def present(self, present: Mapping[int, float]) -> None:
    """These islands are there, and this long is a step of theirs."""

  def unreadable(self, name: str, why: str) -> None:
    """A member's record cannot be read."""


class Leader(Witness, abc.ABC):
  """One leadership.

  Attributes:
    drained: whether, since it was last set to false, a turn in which the store
      answered has left no round to close, but of fragments that stood still
      although it had looked after them.
  """

  def __init__(self, parts: Parts, clock: Callable[[], float]):
    """Does nothing yet; `clock` gives monotonic seconds."""
    self.core = parts.core
    self.heads = parts.heads
    self.cuts = parts.cuts
    self.chores = parts.chores
    self.drained = False
    self._parts = parts
    self._clock = clock
    self._aside: operations.Script[None] | None = None  # a round being merged
    self._asked: operations.Merge | None = None
    self._merged: tuple[Any, Exception | None] | None = None

  @property
  def is_merging(self) -> bool:
    """Whether a merge is under way."""
    return self._aside is not None

  def check(self) -> None:
    """Raises `FencedError` when another leads."""
    self._parts.check(self.is_merging and self._merged is None)

  @abc.abstractmethod
  def wake_merger(self) -> None:
    """Wakes the thread that merges: there is something to merge."""

  @abc.abstractmethod
  def wake(self) -> None:
    """Wakes the thread that leads: a merge has ended."""

  @abc.abstractmethod
  def draining(self) -> bool:
    """Whether every round is to be closed as soon as its quorum allows."""

  @abc.abstractmethod
  def over(self) -> str:
    """Asked before each turn: why to stop leading, if so."""

  @abc.abstractmethod
  def pause_secs(self, now: float, deadline: float | None) -> float:
    """Time until the next turn; `deadline` is when the core is due."""

  @abc.abstractmethod
  def content_of(
    self, close: orders.Close, weights: Sequence[float], merged: Any
  ) -> heads_lib.Content:
    """Completes a head from what a merge gave, right before its commit."""

  def board(self) -> records.Board:
    """What the islands are to know."""
    rounds = {str(p): m for p, m in self.core.open_rounds.items()}
    return records.Board(self.core.versions, rounds)

  def lead(self) -> operations.Script[str]:
    """Leads until `over` says why not to; it may be woken between turns.

    Raises:
      FencedError: another syncer leads now.
    """
    clock, core, chores = self._clock, self.core, self.chores
    standing = self.heads.standing
    look_due, shown = 0.0, False
    while not (reason := self.over()):
      self.check()
      now = clock()
      try:
        if not shown:
          shown = True  # a hint: it may be refused
          yield operations.Write(keys.BOARD, self.board())
        yield from self.finish()
        # A drain waits for a round whose head may be put back.
        awaited = self.draining() and core.quorate & standing.keys()
        if now >= look_due or awaited:
          look_due = now + self._parts.look_every_secs
          yield from self.look_around(now)
        stood = set(standing)
        if chores.pending:
          yield from chores.tidy(now)
        yield from self.scan()
        deadline = core.next_deadline()
        if self.draining():
          yield from self.handle(orders.Drain())
          left = core.quorate - stood
          self.drained = not left and not self.is_merging
        elif deadline is not None and clock() >= deadline:
          yield from self.handle(orders.Tick())
      except operations.FAILURES as error:
        self.failed(error, None)
        yield self._parts.retry_secs
      yield operations.Nap(self.pause_secs(clock(), core.next_deadline()))
    return reason

  def look_around(self, now: float) -> operations.Script[None]:
    """Looks at what changes rarely: heads, cuts, members."""
    yield from self.look_after_heads()
    if self.cuts is not None:
      for event in (yield from self.cuts.look(self.core.channel)):
        yield from self.handle(event)
    yield from self.look_at_members(now)

  def look_at_members(self, now: float) -> operations.Script[None]:
    """Tells the core which islands are there at `now`."""
    found, unreadable = yield from protocol.members(self._parts.each)
    for name, why in unreadable:
      self.unreadable(name, why)
    present = self._parts.members.present(found, now)
    self.present(present)
    yield from self.handle(orders.Membership(present))

  def look_after_heads(self) -> operations.Procedure[None]:
    """Puts heads back that the store has spoiled."""
    self.healed((yield from self.heads.look_after()))

  def scan(self) -> operations.Script[None]:
    """Reads commit records that are new."""
    found, broken = yield from self.chores.look()
    for name, why in broken:
      yield from self._reject(name, why)
    sound = []
    for name, record in found:
      if why := self.refusal(record):
        yield from self._reject(name, why)
      else:
        sound.append(record)
    if sound:
      self.arrived(sound)
      yield from self.handle(orders.Arrived(sound))

  def _reject(self, name: str, why: str) -> operations.Procedure[None]:
    self.rejected(name, why)
    yield from self.chores.delete(name)

  def handle(self, event: orders.Event) -> operations.Script[None]:
    """Tells the core, and does what it answers.

    All of it is done, whatever the store makes of some of it: a merge that
    fails is offered again by the core, the rest done by `Chores.tidy`.

    Raises:
      OSError, CorruptSnapshotError: the store failed in some of it.
      FencedError: another syncer leads.
    """
    actions = self.core.handle(event, self._clock())
    if actions:
      yield from self._do_all(actions)

  def _do_all(
    self, actions: Sequence[orders.Action]
  ) -> operations.Script[None]:
    failure: Exception | None = None
    for action in actions:
      self.check()
      self.acts(action)
      try:
        yield from self._do(action)
      except operations.FAILURES as error:
        failure = error
    if failure is not None:
      raise failure

  def _do(self, action: orders.Action) -> operations.Script[None]:
    match action:
      case orders.Open():
        yield operations.Write(keys.BOARD, self.board())
      case orders.Close():
        yield from self._go_on(self._close_round(action))
      case orders.Discard(contribution) | orders.Forget(contribution):
        yield from self.chores.delete(contribution.key)
      case orders.Quarantine():
        yield from self.chores.accuse(action)
      case orders.Remind(island):
        yield from self.chores.remind(island)
      case orders.Cut(number) if self.cuts is not None:
        self.heads.cut = number
        yield from self.cuts.take_part(number, self.heads.records)

  def merge(self) -> operations.Script[None]:
    """Merges what there is to merge, for ever; of a thread of its own."""
    while True:
      while self._asked is None:
        yield None
      asked, self._asked = self._asked, None
      yield from self.merging()
      try:
        self._merged = (yield asked), None
      except (*operations.FAILURES, protocol.RefusedError) as error:
        self._merged = None, error
      self.wake()

  def finish(self) -> operations.Script[None]:
    """Goes on with the round whose merge has ended, if one has."""
    if self._merged is None or self._aside is None:
      return
    (answer, error), self._merged = self._merged, None
    script, self._aside = self._aside, None
    yield from self._go_on(script, answer, error)

  def _go_on(
    self,
    script: operations.Script[None],
    answer: Any = None,
    error: Exception | None = None,
  ) -> operations.Script[None]:
    """Performs a round's script to its end, or puts it aside at its merge."""
    with contextlib.suppress(StopIteration):
      while True:
        operation = script.throw(error) if error else script.send(answer)
        if isinstance(operation, operations.Merge):
          self._aside, self._asked = script, operation
          self.wake_merger()
          return
        answer = error = None
        try:
          answer = yield operation
        except Exception as failed:
          error = failed

  def _close_round(self, close: orders.Close) -> operations.Script[None]:
    weights = [self._weight(chosen) for chosen in close.chosen]
    try:
      yield from self.heads.close_round(
        close, weights, lambda merged: self.content_of(close, weights, merged)
      )
    except operations.FAILURES as error:
      self.failed(error, close)
      yield from self.handle(orders.MergeFailed(close.fragment))
      return
    except protocol.RefusedError as refused:
      yield from self.handle(
        orders.MergeRefused(close.fragment, refused.reasons)
      )
      return
    self.committed(close)
    yield _BEFORE_TAPE
    self.told(close)
    later = self.core.handle(orders.Committed(close.fragment), self._clock())
    head = self.heads.held[close.fragment].head
    merged = [chosen.contribution.key for chosen in close.chosen]
    failure: OSError | None = None
    try:
      yield from self.chores.clear_up(head, self.board(), merged)
    except OSError as error:
      failure = error
    if later:
      yield from self._do_all(later)
    if failure is not None:
      raise failure

  def _weight(self, chosen: orders.Chosen) -> float:
    record = chosen.contribution
    return self._parts.weights.weight(
      record.c_tokens, record.c_steps, chosen.staleness
    )
