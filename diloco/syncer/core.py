"""The syncer's decisions: when a round closes and with whom.

A state machine without I/O, clock, threads or JAX: `handle(event, now)` takes
what was seen and returns what to do. The shell reads the store, merges and
commits. Time is the caller's monotonic clock in seconds.

A *round* of a fragment produces its next version. It opens with the first
fresh contribution (one that started from the current version), reaches quorum
with K islands, stays open for the grace window, and closes early once every
live island is in. Stale contributions join a round but never open one:
otherwise rounds would follow the network instead of the schedule.

Reference: Decoupled DiLoCo, arXiv 2604.21428.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from diloco.syncer import grace, quorum


class Contribution(Protocol):
  """What the core needs to know of a commit record."""

  @property
  def key(self) -> str: ...  # noqa: D102
  @property
  def island(self) -> int: ...  # noqa: D102
  @property
  def incarnation(self) -> int: ...  # noqa: D102
  @property
  def fragment(self) -> int: ...  # noqa: D102
  @property
  def base_version(self) -> int: ...  # noqa: D102
  @property
  def first_step(self) -> int: ...  # noqa: D102
  @property
  def step(self) -> int: ...  # noqa: D102


# Events


@dataclasses.dataclass(frozen=True)
class Arrived:
  """Commit records became visible, together as far as one look can tell.

  A look after an outage finds several publications of one island; the latest
  contains the others, so all are taken in before any round closes.
  """

  contributions: Sequence[Contribution]


@dataclasses.dataclass(frozen=True)
class Membership:
  """Islands that are training now, with their seconds per step."""

  step_secs: Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class Committed:
  """The version asked for by `Close` is the fragment's head."""

  fragment: int
  sync_secs: float


@dataclasses.dataclass(frozen=True)
class MergeRefused:
  """The merge found contributions it must not use; nothing was committed."""

  fragment: int
  reasons: Mapping[str, str]  # contribution key -> reason


@dataclasses.dataclass(frozen=True)
class MergeFailed:
  """The store failed during a merge; the next `Tick` may try again."""

  fragment: int


@dataclasses.dataclass(frozen=True)
class Tick:
  """Time passed."""


@dataclasses.dataclass(frozen=True)
class Drain:
  """Close every round as soon as its quorum allows, without grace."""


Event = (
  Arrived | Membership | Committed | MergeRefused | MergeFailed | Tick | Drain
)


# Actions


@dataclasses.dataclass(frozen=True)
class Open:
  """A round opened; islands that would miss it may now follow."""

  fragment: int
  version: int
  island: int


@dataclasses.dataclass(frozen=True)
class Chosen:
  """One contribution in a closing round."""

  contribution: Contribution
  staleness: int
  waited_secs: float  # arrival after the round opened; negative: before


@dataclasses.dataclass(frozen=True)
class Close:
  """Merge these and commit the result as `version`."""

  fragment: int
  version: int
  chosen: tuple[Chosen, ...]
  absent: tuple[int, ...]  # live islands that are not in
  clock: Mapping[int, int]  # the vector clock of the new version
  quorum_secs: float
  grace_secs: float  # offered
  grace_spent_secs: float


@dataclasses.dataclass(frozen=True)
class Discard:
  """This contribution will never be merged."""

  contribution: Contribution
  reason: str


@dataclasses.dataclass(frozen=True)
class Forget:
  """This contribution was merged already; only its record is left over."""

  contribution: Contribution


Action = Open | Close | Discard | Forget


@dataclasses.dataclass(frozen=True)
class Settings:
  """Policies of the core, and its part of the run's shape."""

  num_fragments: int
  quorum: quorum.MinimumQuorum
  grace: grace.GracePolicy
  max_staleness: int


@dataclasses.dataclass
class _Fragment:
  version: int
  clock: dict[int, int]
  waiting: dict[str, tuple[Contribution, float]] = dataclasses.field(
    default_factory=dict
  )
  opened_at: float | None = None
  quorum_at: float | None = None
  grace_secs: float = 0.0
  closing: Close | None = None


class SyncerCore:
  """Rounds of all fragments of one syncer shard."""

  def __init__(
    self,
    settings: Settings,
    heads: Sequence[tuple[int, Mapping[int, int]]],
  ):
    """Starts from the store's heads.

    Args:
      settings: policies and shape.
      heads: [P] of (version, vector clock: island -> last merged step).
    """
    assert len(heads) == settings.num_fragments
    self._settings = settings
    self._fragments = [_Fragment(v, dict(clock)) for v, clock in heads]
    self._step_secs: dict[int, float] = {}
    self._quorum_secs = grace.MovingAverage()
    self._sync_secs = grace.MovingAverage()
    self._draining = False

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
  def idle(self) -> bool:
    """Whether no merge runs and nothing waits for one."""
    return not any(f.closing or f.waiting for f in self._fragments)

  def next_deadline(self) -> float | None:
    """Earliest time at which a `Tick` can close a round, if any."""
    times = [
      f.quorum_at + f.grace_secs
      for f in self._fragments
      if f.quorum_at is not None and f.closing is None
    ]
    return min(times, default=None)

  def handle(self, event: Event, now: float) -> list[Action]:
    """Takes one event at `now` (monotonic seconds); returns what to do."""
    match event:
      case Arrived(contributions):
        return self._arrived(contributions, now)
      case Membership(step_secs):
        self._step_secs = dict(step_secs)
        return self._evaluate_all(now)
      case Committed(fragment, sync_secs):
        return self._committed(fragment, sync_secs, now)
      case MergeRefused(fragment, reasons):
        return self._refused(fragment, reasons, now)
      case MergeFailed(fragment):
        self._fragments[fragment].closing = None
        return []
      case Drain():
        self._draining = True
        return self._evaluate_all(now)
      case Tick():
        return self._evaluate_all(now)

  def _arrived(
    self, contributions: Sequence[Contribution], now: float
  ) -> list[Action]:
    actions = [a for new in contributions for a in self._admit(new, now)]
    for fragment in sorted({c.fragment for c in contributions}):
      actions += self._evaluate(fragment, now)
    return actions

  def _admit(self, new: Contribution, now: float) -> list[Action]:
    state = self._fragments[new.fragment]
    if new.key in state.waiting:
      return []
    merged_step = state.clock.get(new.island, 0)
    if new.step <= merged_step:
      return [Forget(new)]
    if new.first_step < merged_step:
      return [Discard(new, "overlaps_merged")]
    if new.base_version > state.version:
      return [Discard(new, "unknown_base")]
    if state.version - new.base_version > self._settings.max_staleness:
      return [Discard(new, "too_stale")]
    state.waiting[new.key] = (new, now)
    return []

  def _supersede(self, state: _Fragment) -> list[Action]:
    """Of overlapping publications of one island only the latest stays."""
    actions: list[Action] = []
    latest: dict[int, Contribution] = {}
    newest_first = sorted(
      state.waiting.values(), key=lambda w: (w[0].island, -w[0].step)
    )
    for contribution, _ in newest_first:
      kept = latest.get(contribution.island)
      if kept is not None and contribution.step > kept.first_step:
        del state.waiting[contribution.key]
        actions.append(Discard(contribution, "superseded"))
      else:
        latest[contribution.island] = contribution
    return actions

  def _committed(
    self, fragment: int, sync_secs: float, now: float
  ) -> list[Action]:
    state = self._fragments[fragment]
    assert state.closing is not None
    for chosen in state.closing.chosen:
      del state.waiting[chosen.contribution.key]
    state.version = state.closing.version
    state.clock = dict(state.closing.clock)
    state.opened_at = state.quorum_at = state.closing = None
    self._sync_secs = self._sync_secs.observe(sync_secs)
    # What is left was meant for the round that just closed.
    actions: list[Action] = []
    for key, (left, _) in list(state.waiting.items()):
      late = state.version - left.base_version > self._settings.max_staleness
      if late or left.first_step < state.clock.get(left.island, 0):
        del state.waiting[key]
        reason = "too_stale" if late else "overlaps_merged"
        actions.append(Discard(left, reason))
    return actions + self._evaluate(fragment, now)

  def _refused(
    self, fragment: int, reasons: Mapping[str, str], now: float
  ) -> list[Action]:
    state = self._fragments[fragment]
    state.closing = None
    actions: list[Action] = []
    for key, reason in reasons.items():
      contribution, _ = state.waiting.pop(key)
      actions.append(Discard(contribution, reason))
    if not any(self._is_fresh(state, c) for c, _ in state.waiting.values()):
      state.opened_at = state.quorum_at = None
    return actions + self._evaluate(fragment, now)

  def _evaluate_all(self, now: float) -> list[Action]:
    actions: list[Action] = []
    for fragment in range(self._settings.num_fragments):
      actions += self._evaluate(fragment, now)
    return actions

  def _is_fresh(self, state: _Fragment, contribution: Contribution) -> bool:
    return contribution.base_version == state.version

  def _present(self, state: _Fragment) -> set[int]:
    return {c.island for c, _ in state.waiting.values()}

  def _evaluate(self, fragment: int, now: float) -> list[Action]:
    state = self._fragments[fragment]
    if state.closing is not None or not state.waiting:
      return []
    actions = self._supersede(state)
    if state.opened_at is None:
      fresh = [c for c, _ in state.waiting.values() if self._is_fresh(state, c)]
      if not fresh and not self._draining:
        return []
      state.opened_at = now
      opener = (fresh or [c for c, _ in state.waiting.values()])[-1]
      actions.append(Open(fragment, state.version + 1, opener.island))
    present = self._present(state)
    if not self._settings.quorum.reached(len(present)):
      state.quorum_at = None
      return actions
    if state.quorum_at is None:
      state.quorum_at = now
      self._quorum_secs = self._quorum_secs.observe(now - state.opened_at)
      state.grace_secs = self._settings.grace.grace_secs(self._facts())
    absent = set(self._step_secs) - present
    waited = now - state.quorum_at
    if absent and waited < state.grace_secs and not self._draining:
      return actions
    state.closing = self._close(fragment, state, sorted(absent), now)
    return [*actions, state.closing]

  def _close(
    self, fragment: int, state: _Fragment, absent: list[int], now: float
  ) -> Close:
    assert state.opened_at is not None and state.quorum_at is not None
    ordered = sorted(
      state.waiting.values(), key=lambda w: (w[0].island, w[0].step)
    )
    clock = dict(state.clock)
    for contribution, _ in ordered:
      island = contribution.island
      clock[island] = max(clock.get(island, 0), contribution.step)
    return Close(
      fragment=fragment,
      version=state.version + 1,
      chosen=tuple(
        Chosen(c, state.version - c.base_version, at - state.opened_at)
        for c, at in ordered
      ),
      absent=tuple(absent),
      clock=clock,
      quorum_secs=state.quorum_at - state.opened_at,
      grace_secs=state.grace_secs,
      grace_spent_secs=now - state.quorum_at,
    )

  def _facts(self) -> grace.GraceFacts:
    return grace.GraceFacts(
      step_secs=max(self._step_secs.values(), default=0.0),
      quorum_secs=self._quorum_secs.value or 0.0,
      sync_secs=self._sync_secs.value or 0.0,
    )
