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
from typing import NamedTuple

from diloco.snapshots import records
from diloco.syncer import gates, grace, quorum

# Refusals that are the island's own doing, not its store's.
_OFFENCES = ("not_finite", "norm_outlier", "norm_overflow")

# Holes remembered of each island and fragment. What is listed later than this
# many merges of its island cannot be told from what was merged.
_HOLES_KEPT = 16

_RETRY_DOUBLINGS = 5  # of the pause after a merge that failed

Hole = tuple[int, int]  # steps (first, last]


class Start(NamedTuple):
  """A fragment as its head has it."""

  version: int  # the newest
  clock: Mapping[int, int]  # a vector clock, island -> last merged step
  # Island -> steps before that which no version has: another life or base
  # skipped them, or they were not to be seen when later ones were merged. They
  # never will be: what was trained since stands on what the island made of
  # them.
  holes: Mapping[int, tuple[Hole, ...]] = {}


# Events


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
  """Commit records became visible, together as far as one look can tell.

  A look after an outage finds several publications of one island; the latest
  contains the others, so all are taken in before any round closes.
  """

  contributions: Sequence[records.Contribution]


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
  """Islands that are training now, with their seconds per step."""

  step_secs: Mapping[int, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
  """The version asked for by `Close` is the fragment's head."""

  fragment: int


@dataclasses.dataclass(frozen=True)
class MergeRefused:
  """The merge found contributions it must not use; nothing was committed."""

  fragment: int
  reasons: Mapping[str, str]  # contribution key -> reason


@dataclasses.dataclass(frozen=True)
class MergeFailed:
  """The store failed during a merge; a later `Tick` may try again.

  Each failure in a row doubles the pause of that fragment, and of no other.
  """

  fragment: int


@dataclasses.dataclass(frozen=True)
class Tick:
  """Time passed."""


@dataclasses.dataclass(frozen=True)
class Drain:
  """Close every round as soon as its quorum allows, without grace."""


@dataclasses.dataclass(frozen=True)
class CutRequested:
  """A cut was asked for."""

  number: int


@dataclasses.dataclass(frozen=True)
class CutEnded:
  """The cut is complete or given up: its channel need not be kept."""

  number: int


Event = (
  Arrived
  | Membership
  | Committed
  | MergeRefused
  | MergeFailed
  | Tick
  | Drain
  | CutRequested
  | CutEnded
)


# Actions


@dataclasses.dataclass(frozen=True, slots=True)
class Open:
  """A round opened; islands that would miss it may now follow."""

  fragment: int
  version: int
  island: int


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
  """One contribution in a closing round."""

  contribution: records.Contribution
  staleness: int
  arrived_at: float
  waited_secs: float  # arrival after the round opened; negative: before


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
  """Merge these and commit the result as `version`."""

  fragment: int
  version: int
  chosen: tuple[Chosen, ...]
  absent: tuple[int, ...]  # live islands that are not in
  clock: Mapping[int, int]  # the vector clock of the new version
  holes: Mapping[int, tuple[Hole, ...]]  # what it passes over; see `Start`
  opened_at: float
  closed_at: float
  quorum_secs: float
  grace_secs: float  # offered
  grace_spent_secs: float
  queued_secs: float  # from the end of the window to `closed_at`
  facts: grace.GraceFacts  # what the offer was made from


@dataclasses.dataclass(frozen=True, slots=True)
class Discard:
  """This contribution will never be merged."""

  contribution: records.Contribution
  reason: str
  arrived_at: float


@dataclasses.dataclass(frozen=True)
class Quarantine:
  """Tell an island that what it publishes is refused, and start it anew."""

  island: int
  incarnation: int
  fragment: int
  reason: str
  offences: int  # in a row
  suspended_secs: float  # from now, refused unseen; 0 for not


@dataclasses.dataclass(frozen=True)
class Remind:
  """See that an island can still read what it was told last."""

  island: int


@dataclasses.dataclass(frozen=True)
class Cut:
  """Write down the heads as they are now: the syncer's part of a cut."""

  number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
  """This contribution was merged already; only its record is left over."""

  contribution: records.Contribution


Action = Open | Close | Discard | Quarantine | Remind | Cut | Forget


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


@dataclasses.dataclass
class _Offender:
  """An island that was refused, and not merged since."""

  incarnation: int = 0
  step: int = 0  # last one refused; what counts from it on is a new offence
  offences: int = 0
  until: float = 0.0  # suspended, on the core's clock


@dataclasses.dataclass(slots=True)
class _Fragment:
  version: int
  clock: dict[int, int]
  holes: dict[int, tuple[Hole, ...]]
  gate: gates.NormGate
  waiting: dict[str, tuple[records.Contribution, float]] = dataclasses.field(
    default_factory=dict
  )
  opened_at: float | None = None
  quorum_at: float | None = None
  grace_secs: float = 0.0
  facts: grace.GraceFacts | None = None  # at quorum
  ready_at: float | None = None  # all are in, or the window has ended
  closing: Close | None = None
  failures: int = 0  # of merges, in a row
  retry_at: float = -math.inf  # no merge before


class SyncerCore:
  """Rounds of all fragments of one syncer shard."""

  def __init__(
    self,
    settings: Settings,
    heads: Sequence[Start | tuple[int, Mapping[int, int]]],
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
      for start in (Start(*head) for head in heads)
    ]
    self._epoch = epoch
    self._cut = cut
    self._channel: dict[str, records.Contribution] | None = None
    self._offenders: dict[int, _Offender] = {}
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

  def handle(self, event: Event, now: float) -> list[Action]:
    """Takes one event at `now` (monotonic seconds); returns what to do."""
    match event:
      case Arrived(contributions):
        return self._arrived(contributions, now)
      case Membership(step_secs):
        self._step_secs = dict(step_secs)
        return self._evaluate_all(now)
      case Committed(fragment):
        return self._committed(fragment, now)
      case MergeRefused(fragment, reasons):
        return self._refused(fragment, reasons, now)
      case MergeFailed(fragment):
        return self._failed(fragment, now)
      case Drain():
        self._draining = True
        return self._evaluate_all(now)
      case Tick():
        return self._evaluate_all(now)
      case CutRequested(number):
        return self._take_part(number)
      case CutEnded(number):
        if number == self._cut:
          self._channel = None
        return []

  def _take_part(self, number: int) -> list[Action]:
    if number <= self._cut:
      return []
    self._cut = number
    self._channel = {
      key: contribution
      for state in self._fragments
      for key, (contribution, _) in state.waiting.items()
    }
    return [Cut(number)]

  def _arrived(
    self, contributions: Sequence[records.Contribution], now: float
  ) -> list[Action]:
    # Before anything of it is taken in: what was sent after a cut must not be
    # in it.
    actions = self._take_part(max([c.cut for c in contributions], default=0))
    for new in contributions:
      actions += self._admit(new, now)
    for fragment in sorted({c.fragment for c in contributions}):
      actions += self._evaluate(fragment, now)
    return actions

  def _admit(self, new: records.Contribution, now: float) -> list[Action]:
    state = self._fragments[new.fragment]
    key = new.key
    if key in state.waiting:
      return []
    merged_step = state.clock.get(new.island, 0)
    if new.epoch < self._epoch:
      return [Discard(new, "before_restore", now)]
    if new.step <= merged_step:
      if _is_passed_over(state, new):
        return [Discard(new, "passed_over", now)]
      return [Forget(new)]
    if new.epoch > self._epoch or new.base_version > state.version:
      # Somebody else committed what it started from: this syncer is deposed
      # and will learn it. The contribution is not its to discard.
      return []
    reason = ""
    if new.first_step < merged_step:
      reason = "overlaps_merged"
    elif state.version - new.base_version > self._settings.max_staleness:
      reason = "too_stale"
    elif self._offenders and self._is_suspended(new.island, now):
      reason = "suspended"
    if reason:
      return [Discard(new, reason, now)]
    if reason := state.gate.judge(new):
      return [Discard(new, reason, now), *self._offence(new, reason, now)]
    state.waiting[key] = (new, now)
    if self._channel is not None and new.cut < self._cut:
      self._channel[key] = new
    return []

  def _is_suspended(self, island: int, now: float) -> bool:
    offender = self._offenders.get(island)
    return offender is not None and now < offender.until

  def _offence(
    self, refused: records.Contribution, reason: str, now: float
  ) -> list[Action]:
    """Counts an offence, unless the island could not know of the last one."""
    offender = self._offenders.get(refused.island)
    if offender is None:
      offender = self._offenders[refused.island] = _Offender()
    elif (
      refused.incarnation <= offender.incarnation
      and refused.first_step < offender.step
    ):
      offender.step = max(offender.step, refused.step)
      return [Remind(refused.island)]  # or it would go on for ever
    offender.incarnation = refused.incarnation
    offender.step = refused.step
    offender.offences += 1
    secs = self._settings.suspension.secs(offender.offences)
    offender.until = now + secs
    return [
      Quarantine(
        refused.island,
        refused.incarnation,
        refused.fragment,
        reason,
        offender.offences,
        secs,
      )
    ]

  def _supersede(self, state: _Fragment) -> list[Action]:
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
      Discard(
        contribution,
        "superseded"
        if _contain(kept[contribution.island], contribution)
        else "overlapped",
        arrived_at,
      )
      for contribution, arrived_at in dropped
    ]

  def _committed(self, fragment: int, now: float) -> list[Action]:
    state = self._fragments[fragment]
    assert state.closing is not None and state.ready_at is not None
    self._merging = False
    self._sync_secs = self._sync_secs.observe(now - state.ready_at)
    for chosen in state.closing.chosen:
      del state.waiting[chosen.contribution.key]
      state.gate.accepted(chosen.contribution)
      if self._offenders:
        self._offenders.pop(chosen.contribution.island, None)
    state.version = state.closing.version
    state.clock = dict(state.closing.clock)
    state.holes = dict(state.closing.holes)
    state.opened_at = state.quorum_at = state.ready_at = None
    state.closing = None
    state.failures, state.retry_at = 0, -math.inf
    # What is left was meant for the round that just closed.
    actions: list[Action] = []
    for key, (left, arrived_at) in list(state.waiting.items()):
      late = state.version - left.base_version > self._settings.max_staleness
      merged_step = state.clock.get(left.island, 0)
      if late or left.first_step < merged_step:
        del state.waiting[key]
        reason = "too_stale" if late else "overlaps_merged"
        if left.step <= merged_step and _is_passed_over(state, left):
          reason = "passed_over"
        actions.append(Discard(left, reason, arrived_at))
    return actions + self._evaluate(fragment, now)

  def _failed(self, fragment: int, now: float) -> list[Action]:
    state = self._fragments[fragment]
    doubled = 2 ** min(state.failures, _RETRY_DOUBLINGS)
    state.closing, self._merging = None, False
    state.failures += 1
    state.retry_at = now + self._settings.retry_secs * doubled
    state.ready_at = state.retry_at  # what failed says nothing of a merge
    return []

  def _refused(
    self, fragment: int, reasons: Mapping[str, str], now: float
  ) -> list[Action]:
    state = self._fragments[fragment]
    state.closing, self._merging = None, False
    actions: list[Action] = []
    for key, reason in reasons.items():
      contribution, arrived_at = state.waiting.pop(key)
      actions.append(Discard(contribution, reason, arrived_at))
      if reason.startswith(_OFFENCES):
        actions += self._offence(contribution, reason, now)
    self._keep_open(state)
    return actions + self._evaluate(fragment, now)

  def _keep_open(self, state: _Fragment) -> None:
    """A round that has lost what opened it is open no more."""
    if self._opener(state) is None:
      state.opened_at = state.quorum_at = state.ready_at = None

  def _evaluate_all(self, now: float) -> list[Action]:
    actions: list[Action] = []
    for fragment in range(len(self._fragments)):
      actions += self._evaluate(fragment, now)
    return actions

  def _present(self, state: _Fragment) -> set[int]:
    return {c.island for c, _ in state.waiting.values()}

  def _evaluate(self, fragment: int, now: float) -> list[Action]:
    state = self._fragments[fragment]
    if state.closing is not None or not state.waiting:
      return []
    actions: list[Action] = []
    present = self._present(state)
    if len(present) < len(state.waiting):
      actions = self._supersede(state)
      self._keep_open(state)
    if state.opened_at is None:
      opener = self._opener(state)
      if opener is None:
        return actions
      state.opened_at = now
      actions.append(Open(fragment, state.version + 1, opener.island))
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
      absent = {m for m in absent if not self._is_suspended(m, now)}
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
  ) -> Close:
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
    return Close(
      fragment=fragment,
      version=version + 1,
      chosen=tuple(
        [
          Chosen(c, version - c.base_version, at, at - opened_at)
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
