"""An island's decisions: what to publish, when, and what to adopt.

A state machine without I/O, clock, threads or JAX: `handle(event)` takes what
happened and returns what to do. Steps are local inner steps, and every step
lies, for every fragment, in exactly one publication or is given up by name, so
that the token ledger balances.

For each fragment an island remembers the version it started from (`base`), the
step its progress counts from (`first_step`) and what of that it has published.

Reference: Decoupled DiLoCo, arXiv 2604.21428; adoption by blending is from
Streaming DiLoCo, arXiv 2501.18512.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from diloco.fragments import schedule

Trigger = Literal["schedule", "follow", "drain"]
Adoption = Literal["overwrite", "blend", "carry"]


# An island may publish once more before it hears that its last publication was
# merged; of more than these its values are not kept.
PUBLICATIONS_KEPT = 2


# Events


@dataclasses.dataclass(frozen=True)
class Board:
  """The syncer's state as last seen: a hint, possibly old."""

  versions: Sequence[int]  # [P]
  open_rounds: Mapping[int, Sequence[int]]  # fragment -> islands in it


@dataclasses.dataclass(frozen=True)
class Stepped:
  """The moment between two steps.

  Attributes:
    step: inner steps done, over all incarnations.
    ready: (fragment, version, merged step) of what is on the device, ready to
      be swapped in; the last says how far the version has this island's steps.
    board: the syncer's state, if there is news.
  """

  step: int
  ready: Sequence[tuple[int, int, int]] = ()
  board: Board | None = None


@dataclasses.dataclass(frozen=True)
class Drain:
  """Training pauses: publish all progress that is not published yet."""


Event = Stepped | Drain


# Actions


@dataclasses.dataclass(frozen=True)
class Publish:
  """Publish the progress of steps (first_step, step] since `base_version`."""

  fragment: int
  base_version: int
  first_step: int
  step: int
  trigger: Trigger


@dataclasses.dataclass(frozen=True)
class Adopt:
  """Swap `version` in; steps (lost_from, lost_to] are given up by it.

  Progress of steps after `kept_from` is not in the version, nor on its way.
  """

  fragment: int
  version: int
  kept_from: int
  lost_from: int
  lost_to: int


Action = Publish | Adopt


@dataclasses.dataclass
class _Fragment:
  base: int
  first_step: int
  scheduled: int  # last publication, as the schedule counts it
  published: tuple[int, ...] = ()  # last publications with this base
  newest: int = 0  # newest version heard of


class IslandCore:
  """Publication and adoption of all fragments of one island."""

  def __init__(
    self,
    when: schedule.Schedule,
    island: int,
    adoption: Adoption,
    *,
    follow: bool,
    step: int,
    versions: Sequence[int],
  ):
    """Starts at `step` from the global `versions`.

    Args:
      when: the H / P / offset schedule.
      island: this island's number.
      adoption: what becomes of local progress when a version is adopted.
      follow: whether to join rounds that would close without this island.
      step: steps this island has done in earlier incarnations.
      versions: [P], global versions its parameters are equal to.
    """
    self._when = when
    self._island = island
    self._adoption = adoption
    self._follow = follow
    self._step = step
    # Nobody has trained before step 0, so the grid may start at once. A
    # restarted island first gives the running rounds a chance to lead it.
    joined = step if step else -when.sync_every
    self._fragments = [_Fragment(v, step, joined) for v in versions]

  @property
  def step(self) -> int:
    """Inner steps done, over all incarnations."""
    return self._step

  @property
  def in_flight(self) -> list[int]:
    """Fragments published and not yet answered by a newer version."""
    return [p for p, f in enumerate(self._fragments) if f.published]

  def base_version(self, fragment: int) -> int:
    """Global version an island's fragment started from."""
    return self._fragments[fragment].base

  def handle(self, event: Event) -> list[Action]:
    """Takes one event; returns what to do, in order."""
    match event:
      case Stepped(step, ready, board):
        assert self._step <= step <= self._step + 1
        stepped, self._step = step > self._step, step
        # Adoption first: what is published after it starts from the new base.
        actions = [a for args in ready for a in self._adopt(*args)]
        if board is not None:
          self._look_at(board)
        if stepped:
          actions += self._due()
        if board is not None and self._follow:
          actions += self._follow_rounds(board.open_rounds)
        return actions
      case Drain():
        return [
          self._publish(p, "drain")
          for p, f in enumerate(self._fragments)
          if self._has_news(f)
        ]

  def _look_at(self, board: Board) -> None:
    for state, version in zip(self._fragments, board.versions, strict=True):
      state.newest = max(state.newest, version)

  def _due(self) -> list[Action]:
    due = self._when.due(self._step, [f.scheduled for f in self._fragments])
    return [
      self._publish(p, "schedule")
      for p in due
      if self._has_news(self._fragments[p])
    ]

  def _has_news(self, state: _Fragment) -> bool:
    # Once a newer version exists, what was published for the old one may be
    # part of it; publishing those steps again would count them twice.
    if state.newest > state.base and state.published:
      return False
    return self._step > max(state.published, default=state.first_step)

  def _publish(self, fragment: int, trigger: Trigger) -> Publish:
    state = self._fragments[fragment]
    state.published = (*state.published, self._step)[-PUBLICATIONS_KEPT:]
    state.scheduled = self._step
    return Publish(fragment, state.base, state.first_step, self._step, trigger)

  def _follow_rounds(
    self, open_rounds: Mapping[int, Sequence[int]]
  ) -> list[Action]:
    actions: list[Action] = []
    for fragment, islands in open_rounds.items():
      state = self._fragments[fragment]
      if (
        self._island not in islands
        and not state.published
        and state.newest == state.base
        and self._step > state.first_step
      ):
        actions.append(self._publish(fragment, "follow"))
    return actions

  def _adopt(
    self, fragment: int, version: int, merged_step: int
  ) -> list[Action]:
    state = self._fragments[fragment]
    if version <= state.base:
      return []
    state.newest = max(state.newest, version)
    kept_from = state.first_step
    if merged_step in state.published:
      # A later publication would contain these steps again; it is refused.
      kept_from = merged_step
    elif state.published:
      kept_from = state.published[-1]  # late: it may join the next round
    state.base, state.published = version, ()
    carries = self._adoption == "carry"
    state.first_step = kept_from if carries else self._step
    lost_from = self._step if carries else kept_from
    return [Adopt(fragment, version, kept_from, lost_from, self._step)]
