"""Fates of trained steps, painted over one fragment of one island.

Each step of a fragment has one fate. Fates are painted over the trained
steps, the weakest evidence first, so that stronger evidence covers it:

  1. `unaccounted`: nothing is known; a correct run has none.
  2. on the way to publication: `pending` while that incarnation lives or was
     the last, `lost_with_island` once it died or was replaced.
  3. `superseded`: the syncer replaced the contribution by a later one.
     Trained and not yet on the way: as in 2.
  4. `publish_dropped`: the island dropped the publication.
  5. `overwritten`: the island gave the steps up by adopting a version.
  6. discarded by the syncer, with its reason; the last reason counts.
  7. `pending`: published, not resolved, not superseded.
  8. `merged`.
"""

import itertools
from collections.abc import Iterable

import numpy as np

from diloco.tape import history as history_lib

UNACCOUNTED = "unaccounted"
MERGED = "merged"
PENDING = "pending"
LOST_WITH_ISLAND = "lost_with_island"
OVERWRITTEN = "overwritten"
PUBLISH_DROPPED = "publish_dropped"
SUPERSEDED = "superseded"

Span = tuple[int, int]  # steps (first, last], open on the left


class Canvas:
  """The steps of one island and fragment, painted with their fates."""

  def __init__(
    self, lives: list[history_lib.Life], facts: history_lib.FragmentHistory
  ):
    self._facts = facts
    coats = [(fate, _array(spans)) for fate, spans in _coats(lives, facts)]
    trained = _array([(life.start, life.end) for life in lives])
    self._points = np.unique(
      np.concatenate([trained.ravel(), *(spans.ravel() for _, spans in coats)])
    )
    self._names = [UNACCOUNTED, *dict.fromkeys(fate for fate, _ in coats)]
    cells = max(len(self._points) - 1, 0)
    self._fates = np.zeros(cells, np.int64)  # indices into names
    for fate, spans in coats:
      self._fates[self._times(spans) > 0] = self._names.index(fate)
    self._tokens = np.zeros(cells, np.int64)  # per step; 0 is not trained
    for life, span in zip(lives, trained, strict=True):
      self._tokens[self._times(span[None]) > 0] = life.tokens_per_step

  def _times(self, spans: np.ndarray) -> np.ndarray:
    """Returns how often `spans` cover each cell between two points."""
    bounds = np.searchsorted(self._points, spans)
    size = len(self._points)
    opened = np.bincount(bounds[:, 0], minlength=size)
    closed = np.bincount(bounds[:, 1], minlength=size)
    return np.cumsum(opened - closed)[:-1]

  def count_into(self, counts: dict[str, int]) -> None:
    """Adds the fragment-tokens of every fate to `counts`."""
    weights = np.diff(self._points) * self._tokens
    for number, name in enumerate(self._names):
      if count := int(weights[self._fates == number].sum()):
        counts[name] = counts.get(name, 0) + count

  def spans(self, fate: str) -> list[Span]:
    """Returns the trained step ranges with this fate."""
    if fate not in self._names:
      return []
    mask = (self._fates == self._names.index(fate)) & (self._tokens > 0)
    return self._joined(mask)

  def violations(self) -> Iterable[str]:
    """Yields what the painting shows to be wrong."""
    for first, last in self.spans(UNACCOUNTED):
      yield f"steps ({first}, {last}] have no fate"
    merged = _array([_span(merge.contribution) for merge in self._facts.merged])
    times = self._times(merged)
    for first, last in self._joined(times > 1):
      versions = sorted(
        merge.version
        for merge in self._facts.merged
        if merge.contribution.first_step < last
        and merge.contribution.step > first
      )
      yield f"steps ({first}, {last}] merged twice, in versions {versions}"
    for first, last in self._joined((times > 0) & (self._tokens == 0)):
      yield f"steps ({first}, {last}] merged, yet no incarnation trained them"

  def _joined(self, mask: np.ndarray) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    bounds = self._points[edges].reshape(-1, 2).tolist()
    return [(first, last) for first, last in bounds]


def _coats(
  lives: list[history_lib.Life], facts: history_lib.FragmentHistory
) -> list[tuple[str, list[Span]]]:
  """Returns fates and their step ranges, the weakest evidence first."""
  # The record of a discarded contribution may be unreadable to the syncer; the
  # island knows what was in it.
  discarded = [
    (reason, _span(facts.published.get(item.key, item)))
    for reason, item in facts.discarded
  ]
  superseded = [span for reason, span in discarded if reason == SUPERSEDED]
  others = [item for item in discarded if item[0] != SUPERSEDED]
  coats = [
    *_submitted(lives, facts),
    (SUPERSEDED, superseded),
    *_unpublished_tails(lives, facts),
    (PUBLISH_DROPPED, [_span(loss) for loss in facts.dropped]),
    (OVERWRITTEN, [_span(loss) for loss in facts.overwritten]),
  ]
  for reason, items in itertools.groupby(others, key=lambda item: item[0]):
    coats.append((reason, [span for _, span in items]))
  coats.append((PENDING, _waiting(facts)))
  coats.append((MERGED, [_span(merge.contribution) for merge in facts.merged]))
  return [coat for coat in coats if coat[1]]


def _array(spans: list[Span]) -> np.ndarray:
  return np.array(spans, np.int64).reshape(-1, 2)


def _span(item: history_lib.Contribution | history_lib.Loss) -> Span:
  return item.first_step, max(item.first_step, item.step)


def _waiting(facts: history_lib.FragmentHistory) -> list[Span]:
  """Returns publications that may still be merged."""
  resolved = {merge.contribution.key for merge in facts.merged}
  resolved.update(item.key for _, item in facts.discarded)
  latest: dict[int, history_lib.Contribution] = {}
  for item in facts.published.values():
    before = latest.get(item.first_step)
    if before is None or item.step >= before.step:
      latest[item.first_step] = item
  return [_span(i) for i in latest.values() if i.key not in resolved]


def _unpublished_fate(
  life: history_lib.Life, lives: list[history_lib.Life]
) -> str:
  replaced = life is not lives[-1] or (life.died and not life.stopped)
  return LOST_WITH_ISLAND if replaced else PENDING


def _submitted(
  lives: list[history_lib.Life], facts: history_lib.FragmentHistory
) -> list[tuple[str, list[Span]]]:
  """Returns what each life handed to its publisher."""
  return [
    (
      _unpublished_fate(life, lives),
      [
        _span(item)
        for item in facts.submitted
        if item.incarnation == life.incarnation
      ],
    )
    for life in lives
  ]


def _unpublished_tails(
  lives: list[history_lib.Life], facts: history_lib.FragmentHistory
) -> list[tuple[str, list[Span]]]:
  """Returns what each life had trained, or taken over, and not yet told of.

  The latest life comes last: what it took over is no longer lost.
  """
  told = {
    life.incarnation: facts.unsent.get(life.incarnation, life.start)
    for life in lives
  }
  items: list[history_lib.Contribution | history_lib.Loss] = [
    *facts.published.values(),
    *(merge.contribution for merge in facts.merged),
    *(item for _, item in facts.discarded),
    *facts.overwritten,
    *facts.dropped,
  ]
  for item in items:
    if item.step > told.get(item.incarnation, item.step):
      told[item.incarnation] = item.step
  tails = []
  for life in lives:
    fate = _unpublished_fate(life, lives)
    if life.end > told[life.incarnation]:
      tails.append((fate, [(told[life.incarnation], life.end)]))
  return tails
