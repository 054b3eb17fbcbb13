"""An island's decisions: what to publish, when, and what to adopt.

A state machine without I/O, clock, threads or JAX: `handle(event)` takes what
happened and returns what to do. Steps are local inner steps, and every step
lies, for every fragment, in exactly one publication or is given up by name, so
that the token ledger balances.

For each fragment an island remembers the version it started from (`base`), the
step its progress counts from (`first_step`) and what of that it has published.
After a restart an island may do steps again that a fragment has published
already (`diloco.islands.comeback`): until `first_step` that fragment is
*muted*, it trains along and publishes nothing; then it is set to its anchor.

Cuts follow Lai and Yang (1987): whoever meets something stamped with a later
cut than its own takes its part of that cut first.

Reference: Decoupled DiLoCo, arXiv 2604.21428; adoption by blending is from
Streaming DiLoCo, arXiv 2501.18512.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from diloco.fragments import schedule

Trigger = Literal["schedule", "follow", "drain"]
Adoption = Literal["overwrite", "blend", "carry", "eager"]


# Of so many publications that no version has answered yet an island keeps the
# values: the first ones, for one of them may have been merged unheard, and the
# newest, which a syncer that finds them all takes.
PUBLICATIONS_KEPT = 3

# With all but one place taken, what comes next waits for so many schedules: a
# publication in the middle, merged unheard, would cost the steps since.
_PATIENCE = 4


class Origin(NamedTuple):
  """Where a fragment's progress counts from."""

  base: int  # the global version its anchor is equal to
  first_step: int  # after this step; if it lies ahead, the fragment is muted


class Position(NamedTuple):
  """How far a fragment is: what a saved state must say of it."""

  base: int  # the global version its anchor is equal to
  first_step: int  # the step its progress counts from
  published: int  # its last publication, or `first_step`


class Ready(NamedTuple):
  """A version on the device, ready to be swapped in."""

  fragment: int
  version: int
  merged_step: int  # how far it has this island's steps
  cut: int = 0  # the last one its syncer had taken part in


# Events


@dataclasses.dataclass(frozen=True, slots=True)
class Board:
  """The syncer's state as last seen: a hint, possibly old."""

  versions: Sequence[int]  # [P]
  open_rounds: Mapping[int, Sequence[int]]  # fragment -> islands in it


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
  """The moment between two steps."""

  step: int  # inner steps done, over all incarnations
  ready: Sequence[Ready] = ()
  board: Board | None = None  # if there is news
  cut: int = 0  # the newest one asked for, as far as known
  now: float = 0.0  # monotonic seconds, for an island that waits


@dataclasses.dataclass(frozen=True)
class Drain:
  """Training pauses: publish all progress that is not published yet."""


@dataclasses.dataclass(frozen=True)
class Refused:
  """The syncer refuses what this island publishes."""


@dataclasses.dataclass(frozen=True)
class Suspended:
  """For so long the syncer looks at nothing that it publishes."""

  secs: float
  now: float  # monotonic seconds


Event = Stepped | Drain | Refused | Suspended


# Actions


@dataclasses.dataclass(frozen=True)
class Cut:
  """Save the state as it is now: this island's part of a cut."""

  number: int
  positions: tuple[Position, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
  """Publish the progress of steps (first_step, step] since `base_version`."""

  fragment: int
  base_version: int
  first_step: int
  step: int
  trigger: Trigger
  cut: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Adopt:
  """Swap `version` in; steps (lost_from, lost_to] are given up by it."""

  fragment: int
  version: int
  # Progress of later steps is not in the version, nor on its way; only that may
  # be kept.
  kept_from: int
  lost_from: int
  lost_to: int
  # Unless 0, steps up to this one are in the version, or on their way to one,
  # from an earlier life of this island; nothing local is kept.
  muted_until: int = 0
  resync: bool = False  # the island was refused; nothing local is kept


@dataclasses.dataclass(frozen=True)
class Rebase:
  """Set a fragment that was muted until now to its anchor."""

  fragment: int
  step: int
  version: int


@dataclasses.dataclass(frozen=True)
class Resync:
  """Fetch every fragment anew, and mend the inner optimizer once they are in.

  What was fetched before does not count. Until one `Stepped` brings all of the
  fragments none is adopted: in the next step one that is not finite would spoil
  those that are new.
  """


Action = Cut | Publish | Adopt | Rebase | Resync


@dataclasses.dataclass(slots=True)
class _Fragment:
  base: int
  first_step: int
  scheduled: int  # last publication, as the schedule counts it
  muted: bool  # until `first_step`
  published: tuple[int, ...] = ()  # last publications with this base
  spoken: int = -1  # step of the last publication in this life
  newest: int = 0  # newest version heard of


class IslandCore:
  """Publication and adoption of all fragments of one island.

  Attributes:
    island: its number.
    step: inner steps done, over all incarnations.
    resyncing: whether it waits for every fragment to be fetched anew.
  """

  def __init__(
    self,
    when: schedule.Schedule,
    island: int,
    adoption: Adoption,
    *,
    follow: bool,
    step: int,
    origins: Sequence[Origin],
    cut: int = 0,
    wait_secs: float = 0.0,
    wait_after: int = 0,
    passes_by: int = -1,
  ):
    """Starts after `step`, of earlier incarnations, which took part in `cut`.

    Args:
      when: the H / P / offset schedule.
      island: this island's number.
      adoption: what becomes of local progress when a version is adopted.
      follow: whether to join rounds that would close without this island.
      step: see above.
      origins: [P].
      cut: see above.
      wait_secs: how long an answer to what a step has published is waited for
        before the next step, at most: one that is lost stops nobody.
      wait_after: steps that may be done before that.
      passes_by: others' versions that are not adopted while an answer may come,
        at most: as many as a contribution may be behind; -1 adopts any.
    """
    self._when = when
    self.island = island
    self._keeps = adoption in ("carry", "eager")  # what is not published
    self._follow = follow
    self.step = step
    self._fragments = [
      # Due at its first grid point, so at most H steps from now.
      _Fragment(base, first, step - when.sync_every, muted=first > step)
      for base, first in origins
    ]
    self._off_grid: dict[int, list[int]] = {}  # step -> fragments due then
    self._cut = cut
    self._wait_secs = wait_secs
    self._wait_after = wait_after
    self._passes_by = passes_by
    self._held_until = self._suspended_until = -math.inf
    self.resyncing = False
    self._just_told = False  # what is ready was fetched before
    self._some_muted = any(state.muted for state in self._fragments)

  def reschedule(self, when: schedule.Schedule) -> None:
    """Publishes by another schedule from now on.

    The first grid point of it may be further off than what was trained by the
    old one may wait, so every fragment is due H steps after its last, too.
    """
    self._when = when
    for fragment, state in enumerate(self._fragments):
      due = max(state.scheduled + when.sync_every, self.step + 1)
      self._off_grid.setdefault(due, []).append(fragment)

  @property
  def in_flight(self) -> list[int]:
    """Fragments published and not yet answered by a newer version."""
    return [p for p, f in enumerate(self._fragments) if f.published]

  @property
  def overtaken(self) -> bool:
    """Whether an answer is known of that is not there yet."""
    return any(f.published and f.newest > f.base for f in self._fragments)

  @property
  def unanswered(self) -> bool:
    """Whether what was published `wait_after` steps ago has no answer yet."""
    step = self.step - self._wait_after
    return any(f.published and f.published[-1] == step for f in self._fragments)

  def holds(self, now: float) -> bool:
    """Whether the next step is to wait for an answer."""
    answers = self.resyncing or now >= self._suspended_until
    return answers and now < self._held_until and self.unanswered

  @property
  def positions(self) -> tuple[Position, ...]:
    """[P], how far each fragment is."""
    return tuple(
      Position(
        f.base, f.first_step, f.published[-1] if f.published else f.first_step
      )
      for f in self._fragments
    )

  def handle(self, event: Event) -> list[Action]:
    """Takes one event; returns what to do, in order."""
    match event:
      case Stepped():
        return self._stepped(event)
      case Drain():
        return [
          self._publish(p, "drain")
          for p, f in enumerate(self._fragments)
          if self._has_news(f, draining=True)
        ]
      case Suspended(secs, now):
        self._suspended_until = now + secs
        return []
      case Refused() if self.resyncing:
        return []  # of what it published before
      case Refused():
        self.resyncing = self._just_told = True
        return [Resync()]

  def _stepped(self, event: Stepped) -> list[Action]:
    step, board = event.step, event.board
    assert self.step <= step <= self.step + 1
    stepped, self.step = step > self.step, step
    actions: list[Action] = []
    cut, found = event.cut, event.ready
    if self.resyncing:
      found = self._all_or_nothing(found)
    for ready in found:
      if ready.cut > cut:
        cut = ready.cut
    if cut > self._cut:
      self._cut = cut
      actions.append(Cut(cut, self.positions))
    if stepped and self._some_muted:
      actions += self._unmute()
    if self._passes_by >= 0 and not self.resyncing:
      found = [ready for ready in found if self._is_answer(ready)]
    # Adoption first: what is published after it starts from the new base.
    for ready in found:
      actions += self._adopt(ready.fragment, ready.version, ready.merged_step)
    if found:
      self.resyncing = False
    if board is not None:
      self._look_at(board)
    if stepped:
      due = self._when.on_grid(step)
      if self._off_grid:
        due += tuple(self._off_grid.pop(step, ()))
      if due:
        actions += self._due(due)
    if board is not None and board.open_rounds and self._follow:
      actions += self._follow_rounds(board.open_rounds)
    if self._wait_secs and (
      stepped or any(type(action) is Publish for action in actions)
    ):
      self._held_until = event.now + self._wait_secs
    return actions

  def _is_answer(self, ready: Ready) -> bool:
    """Whether a version has what was published, or what an earlier life did."""
    state = self._fragments[ready.fragment]
    if not state.published:
      return state.muted or ready.merged_step > state.first_step
    last = state.published[-1]
    hopeless = ready.version - state.base > self._passes_by
    gone_on = self.step > last + self._wait_after
    return ready.merged_step >= last or hopeless or gone_on

  def _all_or_nothing(self, found: Sequence[Ready]) -> Sequence[Ready]:
    """What a resync may adopt: all fragments, fetched anew, or none."""
    if self._just_told:
      self._just_told = False
      return ()
    new = {
      ready.fragment
      for ready in found
      if ready.version >= self._fragments[ready.fragment].base
    }
    return found if len(new) == len(self._fragments) else ()

  def _unmute(self) -> list[Action]:
    actions: list[Action] = []
    for fragment, state in enumerate(self._fragments):
      if state.muted and self.step >= state.first_step:
        state.muted = False
        actions.append(Rebase(fragment, self.step, state.base))
    self._some_muted = any(state.muted for state in self._fragments)
    return actions

  def _look_at(self, board: Board) -> None:
    fragments = self._fragments
    for state, version in zip(fragments, board.versions, strict=True):
      if version > state.newest:
        state.newest = version

  def _due(self, fragments: Sequence[int]) -> list[Action]:
    actions: list[Action] = []
    for fragment in fragments:
      state = self._fragments[fragment]
      due = self._when.is_due(self.step, state.scheduled)
      if due and self._has_news(state):
        actions.append(self._publish(fragment, "schedule"))
    return actions

  def _has_news(self, state: _Fragment, *, draining: bool = False) -> bool:
    # Once a newer version exists, what was published for the old one may be
    # part of it; publishing those steps again would count them twice.
    if (state.newest > state.base and state.published) or self.resyncing:
      return False
    # A contribution is named after its step: of one step there is only one.
    step = self.step
    if step <= state.spoken:
      return False
    last = state.published[-1] if state.published else state.first_step
    if self._keeps and not draining:
      unanswered = len(state.published) >= PUBLICATIONS_KEPT - 1
      last += unanswered * _PATIENCE * self._when.sync_every
    return step > last

  def _publish(self, fragment: int, trigger: Trigger) -> Publish:
    state = self._fragments[fragment]
    step = self.step
    if state.published:
      state.published = (*state.published[: PUBLICATIONS_KEPT - 1], step)
    else:
      state.published = (step,)
    state.scheduled = state.spoken = step
    if fragment not in self._when.on_grid(step):
      due = step + self._when.sync_every
      self._off_grid.setdefault(due, []).append(fragment)
    return Publish(
      fragment, state.base, state.first_step, step, trigger, self._cut
    )

  def _follow_rounds(
    self, open_rounds: Mapping[int, Sequence[int]]
  ) -> list[Action]:
    actions: list[Action] = []
    for fragment, islands in open_rounds.items():
      state = self._fragments[fragment]
      if (
        self.island not in islands
        and not state.published
        and state.newest == state.base
        and self._has_news(state)
      ):
        actions.append(self._publish(fragment, "follow"))
    return actions

  def _adopt(
    self, fragment: int, version: int, merged_step: int
  ) -> list[Action]:
    state = self._fragments[fragment]
    resync = self.resyncing
    if version < state.base or (version == state.base and not resync):
      return []
    state.newest = max(state.newest, version)
    step, published = self.step, state.published
    kept_from = published[-1] if published else state.first_step
    state.base, state.published = version, ()
    if merged_step > kept_from or state.muted:
      # Steps up to `merged_step` came late from an earlier life, and this
      # life's progress cannot be told from them.
      until = max(merged_step, state.first_step if state.muted else 0)
      state.first_step, state.muted = max(until, step), until > step
      self._some_muted = self._some_muted or state.muted
      lost_from = min(until, step)
      return [Adopt(fragment, version, step, lost_from, step, until, resync)]
    if merged_step in published:
      # A later publication would contain these steps again; it is refused.
      kept_from = merged_step
    carries = self._keeps and not resync
    state.first_step = kept_from if carries else step
    lost_from = step if carries else kept_from
    return [Adopt(fragment, version, kept_from, lost_from, step, resync=resync)]
