"""The syncer's decisions: when a round closes and with whom.

A state machine without I/O, clock, threads or JAX: `handle(event, now)` takes
what was seen and returns what to do. The shell reads the store, merges and
commits. Time is the caller's monotonic clock in seconds.

A *round* of a fragment produces its next version. It opens with the first
fresh contribution (one that started from the current version), reaches quorum
with K islands, stays open for the grace window, and is ready early once every
live island is in. Stale contributions join a round but never open one:
otherwise rounds would follow the network instead of the schedule. Where islands
wait for their own answers (`stale_opens`) hardly any is fresh, and all open.
Merges run one after another, in the order in which rounds are ready; who comes
while a round waits for its turn still joins it.

What a contribution contains is judged by `diloco.syncer.gates`. Cuts follow Lai
and Yang (1987): a contribution stamped with a later cut than the syncer's makes
it take its own part first; what was sent before a cut and is not merged in its
heads is the state of the channel, and is kept until the cut has ended.

References: Decoupled DiLoCo, arXiv 2604.21428; Lai and Yang, On distributed
snapshots, Information Processing Letters 25, 1987.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from diloco.snapshots import records
from diloco.syncer import gates, grace, orders, quorum

# Refusals that are the island's own doing, not its store's.
_OFFENCES = ("not_finite", "norm_outlier", "norm_overflow")

# Holes remembered of each island and fragment. What is listed later than this
# many merges of its island cannot be told from what was merged.
_HOLES_KEPT = 16

_RETRY_DOUBLINGS = 5  # of the pause after a merge that failed


@dataclasses.dataclass(frozen=True)
class Settings:
  """Policies of the core, and its part of the run's shape."""

  num_fragments: int
  quorum: quorum.MinimumQuorum
  grace: grace.GracePolicy
  max_staleness: int
  retry_secs: float = 0.0  # pause after a merge that failed, the first time
  gate: gates.GateSettings = dataclasses.field(
    default_factory=gates.GateSettings
  )
  suspension: gates.Suspension = dataclasses.field(
    default_factory=gates.Suspension
  )
  stale_opens: bool = False  # whether any contribution opens a round


@dataclasses.dataclass(slots=True)
class _Fragment:
  version: int
  clock: dict[int, int]
  holes: dict[int, tuple[orders.Hole, ...]]
  gate: gates.NormGate
  waiting: dict[str, tuple[records.Contribution, float]] = dataclasses.field(
    default_factory=dict
  )
  opened_at: float | None = None
  quorum_at: float | None = None
  grace_secs: float = 0.0
  facts: grace.GraceFacts | None = None  # at quorum
  ready_at: float | None = None  # all are in, or the window has ended
  closing: orders.Close | None = None
  failures: int = 0  # of merges, in a row
  retry_at: float = -math.inf  # no merge before


class SyncerCore:
  """Rounds of all fragments of one syncer shard."""

  def __init__(
    self,
    settings: Settings,
    heads: Sequence[orders.Start | tuple[int, Mapping[int, int]]],
    *,
    epoch: int = 0,
    cut: int = 0,
  ):
    """Starts from the store's heads, [P].

    Contributions of another epoch are from before a roll-back; `cut` is the
    last one these heads have a part in.
    """
    assert len(heads) == settings.num_fragments
    self._settings = settings
    self._fragments = [
      _Fragment(
        start.version,
        dict(start.clock),
        dict(start.holes),
        gates.NormGate(settings.gate),
      )
      for start in (orders.Start(*head) for head in heads)
    ]
    self._epoch = epoch
    self._cut = cut
    self._channel: dict[str, records.Contribution] | None = None
    self._offenders = gates.Offenders(settings.suspension)
    self._step_secs: dict[int, float] = {}
    self._quorum_secs = grace.MovingAverage()
    self._sync_secs = grace.MovingAverage()
    self._draining = False
    self._merging = False

  @property
  def versions(self) -> list[int]:
    """[P], current version of each fragment."""
    return [f.version for f in self._fragments]

  @property
  def open_rounds(self) -> dict[int, list[int]]:
    """Fragments with an open round, and the islands already in it."""
    return {
      p: sorted(self._present(f))
      for p, f in enumerate(self._fragments)
      if f.opened_at is not None and f.closing is None
    }

  @property
  def cut(self) -> int:
    """The last cut taken part in; new heads are stamped with it."""
    return self._cut

  @property
  def channel(self) -> list[records.Contribution] | None:
    """Sent before the open cut and not in its heads; None without a cut."""
    return None if self._channel is None else list(self._channel.values())

  @property
  def idle(self) -> bool:
    """Whether no merge runs and nothing waits for one."""
    return not any(f.waiting for f in self._fragments)

  @property
  def quorate(self) -> set[int]:
    """Fragments whose rounds have their quorum."""
    return {p for p, f in enumerate(self._fragments) if f.quorum_at is not None}

  def next_deadline(self) -> float | None:
    """Earliest time at which a `Tick` can close a round, if any."""
    deadlines = []
    for state in self._fragments:
      if state.quorum_at is not None and not self._merging:
        deadline = state.quorum_at + state.grace_secs
        if state.ready_at is not None:
          deadline = state.ready_at
        deadlines.append(max(deadline, state.retry_at))
    return min(deadlines, default=None)

  def configure(self, settings: Settings) -> None:
    """Closes rounds by another quorum and grace from the next event on."""
    self._settings = dataclasses.replace(
      self._settings, quorum=settings.quorum, grace=settings.grace
    )

  def handle(self, event: orders.Event, now: float) -> list[orders.Action]:
    """Takes one event at `now` (monotonic seconds); returns what to do."""
    match event:
      case orders.Arrived(contributions):
        return self._arrived(contributions, now)
      case orders.Membership(step_secs):
        self._step_secs = dict(step_secs)
        return self._evaluate_all(now)
      case orders.Committed(fragment):
        return self._committed(fragment, now)
      case orders.MergeRefused(fragment, reasons):
        return self._refused(fragment, reasons, now)
      case orders.MergeFailed(fragment):
        return self._failed(fragment, now)
      case orders.Drain():
        self._draining = True
        return self._evaluate_all(now)
      case orders.Tick():
        return self._evaluate_all(now)
      case orders.CutRequested(number):
        return self._take_part(number)
      case orders.CutEnded(number):
        if number == self._cut:
          self._channel = None
        return []

  def _take_part(self, number: int) -> list[orders.Action]:
    if number <= self._cut:
      return []
    self._cut = number
    self._channel = {
      key: contribution
      for state in self._fragments
      for key, (contribution, _) in state.waiting.items()
    }
    return [orders.Cut(number)]

  def _arrived(
    self, contributions: Sequence[records.Contribution], now: float
  ) -> list[orders.Action]:
    # Before anything of it is taken in: what was sent after a cut must not be
    # in it.
    actions = self._take_part(max([c.cut for c in contributions], default=0))
    for new in contributions:
      actions += self._admit(new, now)
    for fragment in sorted({c.fragment for c in contributions}):
      actions += self._evaluate(fragment, now)
    return actions

  def _admit(
    self, new: records.Contribution, now: float
  ) -> list[orders.Action]:
    state = self._fragments[new.fragment]
    key = new.key
    if key in state.waiting:
      return []
    merged_step = state.clock.get(new.island, 0)
    if new.epoch < self._epoch:
      return [orders.Discard(new, "before_restore", now)]
    if new.step <= merged_step:
      if _is_passed_over(state, new):
        return [orders.Discard(new, "passed_over", now)]
      return [orders.Forget(new)]
    if new.epoch > self._epoch or new.base_version > state.version:
      # Somebody else committed what it started from: this syncer is deposed
      # and will learn it. The contribution is not its to discard.
      return []
    reason = ""
    if new.first_step < merged_step:
      reason = "overlaps_merged"
    elif state.version - new.base_version > self._settings.max_staleness:
      reason = "too_stale"
    elif self._offenders and self._offenders.is_suspended(new.island, now):
      reason = "suspended"
    if reason:
      return [orders.Discard(new, reason, now)]
    if reason := state.gate.judge(new):
      return [
        orders.Discard(new, reason, now),
        *self._offence(new, reason, now),
      ]
    state.waiting[key] = (new, now)
    if self._channel is not None and new.cut < self._cut:
      self._channel[key] = new
    return []

  def _offence(
    self, refused: records.Contribution, reason: str, now: float
  ) -> list[orders.Action]:
    offence = self._offenders.add(refused, now)
    if offence is None:
      return [orders.Remind(refused.island)]  # or it would go on for ever
    return [
      orders.Quarantine(
        refused.island,
        refused.incarnation,
        refused.fragment,
        reason,
        *offence,
      )
    ]

  def _supersede(self, state: _Fragment) -> list[orders.Action]:
    """Of overlapping publications of one island only the latest stays.

    One of an earlier life that lands late may hold steps that no other does.
    Which one stays does not depend on the order in which they were found: a
    deposed leader that found them otherwise must not delete the one that its
    successor keeps.
    """
    kept: dict[int, list[records.Contribution]] = {}
    dropped: list[tuple[records.Contribution, float]] = []
    for contribution, arrived_at in sorted(state.waiting.values(), key=_order):
      mine = kept.setdefault(contribution.island, [])
      if mine and contribution.step > mine[-1].first_step:
        dropped.append((contribution, arrived_at))
      else:
        mine.append(contribution)
    for contribution, _ in dropped:
      del state.waiting[contribution.key]
    return [
      orders.Discard(
        contribution,
        "superseded"
        if _contain(kept[contribution.island], contribution)
        else "overlapped",
        arrived_at,
      )
      for contribution, arrived_at in dropped
    ]

  def _committed(self, fragment: int, now: float) -> list[orders.Action]:
    state = self._fragments[fragment]
    assert state.closing is not None and state.ready_at is not None
    self._merging = False
    self._sync_secs = self._sync_secs.observe(now - state.ready_at)
    for chosen in state.closing.chosen:
      del state.waiting[chosen.contribution.key]
      state.gate.accepted(chosen.contribution)
      if self._offenders:
        self._offenders.forgive(chosen.contribution.island)
    state.version = state.closing.version
    state.clock = dict(state.closing.clock)
    state.holes = dict(state.closing.holes)
    state.opened_at = state.quorum_at = state.ready_at = None
    state.closing = None
    state.failures, state.retry_at = 0, -math.inf
    # What is left was meant for the round that just closed.
    actions: list[orders.Action] = []
    for key, (left, arrived_at) in list(state.waiting.items()):
      late = state.version - left.base_version > self._settings.max_staleness
      merged_step = state.clock.get(left.island, 0)
      if late or left.first_step < merged_step:
        del state.waiting[key]
        reason = "too_stale" if late else "overlaps_merged"
        if left.step <= merged_step and _is_passed_over(state, left):
          reason = "passed_over"
        actions.append(orders.Discard(left, reason, arrived_at))
    return actions + self._evaluate(fragment, now)

  def _failed(self, fragment: int, now: float) -> list[orders.Action]:
    state = self._fragments[fragment]
    doubled = 2 ** min(state.failures, _RETRY_DOUBLINGS)
    state.closing, self._merging = None, False
    state.failures += 1
    state.retry_at = now + self._settings.retry_secs * doubled
    state.ready_at = state.retry_at  # what failed says nothing of a merge
    return []

  def _refused(
    self, fragment: int, reasons: Mapping[str, str], now: float
  ) -> list[orders.Action]:
    state = self._fragments[fragment]
    state.closing, self._merging = None, False
    actions: list[orders.Action] = []
    for key, reason in reasons.items():
      contribution, arrived_at = state.waiting.pop(key)
      actions.append(orders.Discard(contribution, reason, arrived_at))
      if reason.startswith(_OFFENCES):
        actions += self._offence(contribution, reason, now)
    self._keep_open(state)
    return actions + self._evaluate(fragment, now)

  def _keep_open(self, state: _Fragment) -> None:
    """A round that has lost what opened it is open no more."""
    if self._opener(state) is None:
      state.opened_at = state.quorum_at = state.ready_at = None

  def _evaluate_all(self, now: float) -> list[orders.Action]:
    actions: list[orders.Action] = []
    for fragment in range(len(self._fragments)):
      actions += self._evaluate(fragment, now)
    return actions

  def _present(self, state: _Fragment) -> set[int]:
    return {c.island for c, _ in state.waiting.values()}

  def _evaluate(self, fragment: int, now: float) -> list[orders.Action]:
    state = self._fragments[fragment]
    if state.closing is not None or not state.waiting:
      return []
    actions: list[orders.Action] = []
    present = self._present(state)
    if len(present) < len(state.waiting):
      actions = self._supersede(state)
      self._keep_open(state)
    if state.opened_at is None:
      opener = self._opener(state)
      if opener is None:
        return actions
      state.opened_at = now
      actions.append(orders.Open(fragment, state.version + 1, opener.island))
    if not self._settings.quorum.reached(len(present)):
      state.quorum_at = state.ready_at = None
      return actions
    if state.quorum_at is None:
      state.quorum_at = now
      self._quorum_secs = self._quorum_secs.observe(now - state.opened_at)
      state.facts = self._facts()
      state.grace_secs = self._settings.grace.grace_secs(state.facts)
    absent = self._step_secs.keys() - present
    if self._offenders:
      suspended = self._offenders.is_suspended
      absent = {m for m in absent if not suspended(m, now)}
    # The same sum as in `next_deadline`, or a tick then could come too early.
    until = state.quorum_at + state.grace_secs
    if state.ready_at is None:
      if absent and now < until and not self._draining:
        return actions
      state.ready_at = min(now, until) if absent else now
    if self._merging or now < state.retry_at or self._is_behind(state, now):
      return actions
    state.closing = self._close(fragment, state, sorted(absent), now)
    self._merging = True
    return [*actions, state.closing]

  def _is_behind(self, state: _Fragment, now: float) -> bool:
    """Whether another round has been ready for longer."""
    assert state.ready_at is not None
    return any(
      other.ready_at is not None
      and other.ready_at < state.ready_at
      and other.retry_at <= now
      for other in self._fragments
    )

  def _opener(self, state: _Fragment) -> records.Contribution | None:
    """Whose contribution opens a round: the last fresh one."""
    version, last = state.version, None
    for contribution, _ in reversed(state.waiting.values()):
      if contribution.base_version == version:
        return contribution
      last = last or contribution
    return last if self._draining or self._settings.stale_opens else None

  def _close(
    self, fragment: int, state: _Fragment, absent: list[int], now: float
  ) -> orders.Close:
    version, opened_at = state.version, state.opened_at
    assert opened_at is not None and state.quorum_at is not None
    assert state.facts is not None and state.ready_at is not None
    ordered = sorted(
      state.waiting.values(), key=lambda w: (w[0].island, w[0].step)
    )
    clock, holes = dict(state.clock), dict(state.holes)
    for contribution, _ in ordered:
      island, step = contribution.island, contribution.step
      merged_step = clock.get(island, 0)
      if contribution.first_step > merged_step:
        hole = merged_step, contribution.first_step
        holes[island] = (*holes.get(island, ()), hole)[-_HOLES_KEPT:]
      clock[island] = step
    return orders.Close(
      fragment=fragment,
      version=version + 1,
      chosen=tuple(
        [
          orders.Chosen(c, version - c.base_version, at, at - opened_at)
          for c, at in ordered
        ]
      ),
      absent=tuple(absent),
      clock=clock,
      holes=holes,
      opened_at=opened_at,
      closed_at=now,
      quorum_secs=state.quorum_at - opened_at,
      grace_secs=state.grace_secs,
      grace_spent_secs=state.ready_at - state.quorum_at,
      queued_secs=now - state.ready_at,
      facts=state.facts,
    )

  def _facts(self) -> grace.GraceFacts:
    return grace.GraceFacts(
      step_secs=max(self._step_secs.values(), default=0.0),
      quorum_secs=self._quorum_secs.value or 0.0,
      sync_secs=self._sync_secs.value or 0.0,
    )


def _order(waiting: tuple[records.Contribution, float]) -> tuple[int, ...]:
  """By island, the latest first: by step, the most steps, the later life."""
  one, _ = waiting
  return one.island, -one.step, one.first_step, -one.incarnation


def _contain(
  kept: Sequence[records.Contribution], dropped: records.Contribution
) -> bool:
  """Whether disjoint contributions, newest first, have all steps of another."""
  step = dropped.step
  for one in kept:
    if one.first_step < step <= one.step:
      step = one.first_step
  return step <= dropped.first_step


def _is_passed_over(
  state: _Fragment, contribution: records.Contribution
) -> bool:
  """Whether a contribution behind the clock has steps that no version has."""
  holes = state.holes.get(contribution.island, ())
  if len(holes) == _HOLES_KEPT and contribution.first_step < holes[0][0]:
    return True  # as far as known; what was merged is no less so for it
  return any(
    first < contribution.step and contribution.first_step < last
    for first, last in holes
  )
