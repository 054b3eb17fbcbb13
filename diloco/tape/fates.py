"""Fates of trained steps, painted over one fragment of one island.

A step is done by one *life*, and by another once more if a restarted island
does it again. Each time, its fragment has one fate. Fates are painted over all
that was done, the weakest evidence first, so that stronger evidence covers it:

  1. `unaccounted`: nothing is known; a correct run has none. What a life did
     after a cut that the run was set back to, since the ends of its tapes were
     lost, is `lost_with_island`.
  2. on the way to publication: `pending` while that incarnation lives or was
     the last, `lost_with_island` once it died or was replaced.
  3. `superseded`: the syncer replaced the contribution by a later one.
  4. life by life: trained and not yet on the way, as in 2; `repeated`: done
     again, and part of a publication of an earlier life; `publish_dropped`:
     the island dropped the publication; `overwritten`: it gave the steps up by
     adopting a version; `quarantined`: it did when told of an offence.
  5. discarded by the syncer, with its reason; the last reason counts.
  6. `rolled_back`: merged into a version that a return to a cut took back.
  7. `pending`: published, not resolved, not superseded.
  8. `merged`.

Progress a life restored and published was done by earlier lives, each step by
the last of them that did it.

The same paint without `repeated`, over the steps as *rows* of the island's
data, says of each row whether it is merged, and if not, why. A row that was
rolled back and read again has the fate that it had then.
"""

import collections
import itertools
from collections.abc import Iterable

from diloco.tape import evidence, painting

UNACCOUNTED = painting.UNPAINTED
MERGED = "merged"
PENDING = "pending"
LOST_WITH_ISLAND = "lost_with_island"
OVERWRITTEN = "overwritten"
PUBLISH_DROPPED = "publish_dropped"
SUPERSEDED = "superseded"
REPEATED = "repeated"
QUARANTINED = "quarantined"
ROLLED_BACK = "rolled_back"

_Item = evidence.Contribution | evidence.Loss


class Canvas:
  """The steps of one island and fragment, painted with their fates."""

  def __init__(
    self, lives: list[evidence.Life], facts: evidence.FragmentHistory
  ):
    self._lives = lives
    self._facts = facts
    coats = _coats(lives, facts)
    axis = painting.Axis(lives)
    self._axis = axis
    self._done = painting.Painting(
      [(fate, axis.place(spans)) for fate, spans in coats],
      [(axis.span(life), life.tokens_per_step) for life in lives],
    )
    self._rows = painting.Painting(
      [
        (fate, _final(spans, lives if fate == ROLLED_BACK else ()))
        for fate, spans in coats
        if fate != REPEATED
      ],
      [((life.start, life.end), life.tokens_per_step) for life in lives],
    )

  def counts(self) -> collections.Counter[str]:
    """Returns the fragment-tokens of every fate."""
    return self._done.counts()

  def spans(self, fate: str) -> list[painting.LifeSpan]:
    """Returns the step ranges with this fate, by the life that did them."""
    return self._axis.find(self._done.spans(fate))

  def rows(self) -> dict[str, list[painting.Span]]:
    """Returns by fate the ranges of rows that were read.

    What was lost or rolled back and lies ahead of the last life is not among
    them: that life has yet to read it.
    """
    found = {name: self._rows.spans(name) for name in self._rows.names}
    end = self._lives[-1].end if self._lives else 0
    for fate in (LOST_WITH_ISLAND, ROLLED_BACK):
      spans = [(first, min(last, end)) for first, last in found.get(fate, ())]
      found[fate] = [span for span in spans if span[0] < span[1]]
    return {name: spans for name, spans in found.items() if spans}

  def violations(self) -> Iterable[str]:
    """Yields what the painting shows to be wrong."""
    for _, first, last in self.spans(UNACCOUNTED):
      yield f"steps ({first}, {last}] have no fate"
    merged = [_span(merge.contribution) for merge in self._facts.merged]
    for first, last in self._rows.covered(merged, 2):
      versions = sorted(
        merge.version
        for merge in self._facts.merged
        if merge.contribution.first_step < last
        and merge.contribution.step > first
      )
      yield f"steps ({first}, {last}] merged twice, in versions {versions}"
    for first, last in self._rows.covered(merged, 1, trained=False):
      yield f"steps ({first}, {last}] merged, yet no incarnation trained them"
    for life in self._lives:
      for first, last in self._never_published(life):
        yield (
          f"steps ({first}, {last}] of incarnation {life.incarnation} are"
          " called repeated, yet no earlier one published them"
        )

  def _never_published(self, life: evidence.Life) -> list[painting.Span]:
    """Rows a life did again for a publication that does not exist."""
    repeated = _repeated(life, self._facts)
    if not repeated:
      return []
    settled = [
      _span(item)
      for item in (*_settled(self._facts), *self._facts.submitted)
      if item.incarnation <= life.incarnation
    ]
    return painting.difference(repeated, settled)


def _coats(
  lives: list[evidence.Life], facts: evidence.FragmentHistory
) -> list[tuple[str, list[painting.LifeSpan]]]:
  """Returns fates and their step ranges, the weakest evidence first."""
  # The record of a discarded contribution may be unreadable to the syncer; the
  # island knows what was in it.
  discarded = [
    (reason, _life_span(facts.published.get(item.key, item)))
    for reason, item in facts.discarded
  ]
  superseded = [span for reason, span in discarded if reason == SUPERSEDED]
  others = [item for item in discarded if item[0] != SUPERSEDED]
  untold = [
    painting.LifeSpan(life.incarnation, life.untold_from, life.end)
    for life in lives
    if life.untold_from is not None and life.untold_from < life.end
  ]
  coats = [
    (LOST_WITH_ISLAND, untold),
    *_submitted(lives, facts),
    (SUPERSEDED, superseded),
    *_unpublished(lives, facts),
  ]
  for reason, items in itertools.groupby(others, key=lambda item: item[0]):
    coats.append((reason, [span for _, span in items]))
  merged = [_life_span(merge.contribution) for merge in facts.merged]
  coats += [
    (ROLLED_BACK, [_life_span(item) for item in facts.rolled_back]),
    (PENDING, _waiting(facts)),
    (MERGED, merged),
  ]
  return [coat for coat in coats if coat[1]]


def _final(
  spans: Iterable[painting.LifeSpan], lives: Iterable[evidence.Life]
) -> list[painting.Span]:
  """Rows of what was done, but for those that later ones of `lives` read."""
  return [
    row
    for span in spans
    for row in painting.difference(
      [(span.first, span.last)],
      [(i.start, i.end) for i in lives if i.incarnation > span.incarnation],
    )
  ]


def _span(item: _Item) -> painting.Span:
  return item.first_step, max(item.first_step, item.step)


def _life_span(item: _Item) -> painting.LifeSpan:
  return painting.LifeSpan(item.incarnation, *_span(item))


def _repeated(
  life: evidence.Life, facts: evidence.FragmentHistory
) -> list[painting.Span]:
  """Returns what a life did again, of what it was to do again."""
  return [
    (loss.first_step, min(loss.step, life.end))
    for loss in facts.repeated
    if loss.incarnation == life.incarnation and loss.first_step < life.end
  ]


def _settled(facts: evidence.FragmentHistory) -> Iterable[_Item]:
  """Yields all that is told of, but for what is on its way."""
  yield from facts.published.values()
  yield from (merge.contribution for merge in facts.merged)
  yield from facts.rolled_back
  yield from (item for _, item in facts.discarded)
  yield from facts.dropped
  yield from facts.overwritten
  yield from facts.quarantined


def resolved(facts: evidence.FragmentHistory) -> set[object]:
  """Returns keys of publications that wait for no merge any more."""
  keys = {item.key for item in facts.rolled_back} - facts.reinjected
  keys.update(merge.contribution.key for merge in facts.merged)
  keys.update(item.key for _, item in facts.discarded)
  return keys


def never_told(
  lives: list[evidence.Life],
  facts: evidence.FragmentHistory,
  until: int | None = None,
) -> Iterable[str]:
  """Yields merged contributions that no tape says were published.

  A publication is committed before its line is written, so the last one of an
  incarnation that was killed, or that is running, may lack the line. With
  `until`, only those up to that row.
  """
  stopped = {life.incarnation: life.stopped for life in lives}
  for version, item in facts.merged:
    told = facts.published.get(item.key)
    if told == item or (until is not None and item.step > until):
      continue
    what = f"steps ({item.first_step}, {item.step}] merged in version {version}"
    if told is not None:
      yield (
        f"{what} with {item.c_tokens} tokens, but published as steps"
        f" ({told.first_step}, {told.step}] with {told.c_tokens}"
      )
    elif stopped.get(item.incarnation, True) or item.step <= facts.told.get(
      item.incarnation, 0
    ):
      yield f"{what} were never published"


def _waiting(facts: evidence.FragmentHistory) -> list[painting.LifeSpan]:
  """Returns publications that may still be merged."""
  over = resolved(facts)
  latest: dict[int, evidence.Contribution] = {}
  for item in facts.published.values():
    before = latest.get(item.first_step)
    if before is None or (item.incarnation, item.step) >= (
      before.incarnation,
      before.step,
    ):
      latest[item.first_step] = item
  return [_life_span(i) for i in latest.values() if i.key not in over]


def _unpublished_fate(life: evidence.Life, lives: list[evidence.Life]) -> str:
  replaced = life is not lives[-1] or (life.died and not life.stopped)
  return LOST_WITH_ISLAND if replaced else PENDING


def _submitted(
  lives: list[evidence.Life], facts: evidence.FragmentHistory
) -> list[tuple[str, list[painting.LifeSpan]]]:
  """Returns what each life handed to its publisher."""
  spans = collections.defaultdict[int, list[painting.LifeSpan]](list)
  items: list[_Item] = [*facts.submitted, *facts.published.values()]
  for item in items:
    spans[item.incarnation].append(_life_span(item))
  return [
    (_unpublished_fate(life, lives), spans[life.incarnation]) for life in lives
  ]


def _unpublished(
  lives: list[evidence.Life], facts: evidence.FragmentHistory
) -> list[tuple[str, list[painting.LifeSpan]]]:
  """Returns what each life did not publish, and why, one after another.

  A life that restored progress has it to publish, whatever became of it in
  the life that is over.
  """
  ends = told(lives, facts)
  losses = (
    (PUBLISH_DROPPED, facts.dropped),
    (OVERWRITTEN, facts.overwritten),
    (QUARANTINED, facts.quarantined),
  )
  coats = []
  for life in lives:
    fate = _unpublished_fate(life, lives)
    if life.end > ends[life.incarnation]:
      tail = painting.LifeSpan(
        life.incarnation, ends[life.incarnation], life.end
      )
      coats.append((fate, [tail]))
    repeated = [
      painting.LifeSpan(life.incarnation, *span)
      for span in _repeated(life, facts)
    ]
    coats.append((REPEATED, repeated))
    for fate, items in losses:
      spans = [
        _life_span(i) for i in items if i.incarnation == life.incarnation
      ]
      coats.append((fate, spans))
  return coats


def told(
  lives: list[evidence.Life], facts: evidence.FragmentHistory
) -> dict[int, int]:
  """By incarnation, the last step whose fate in that life is told of."""
  ends = {
    life.incarnation: facts.unsent.get(life.incarnation, life.start)
    for life in lives
  }
  for item in _settled(facts):
    if item.step > ends.get(item.incarnation, item.step):
      ends[item.incarnation] = item.step
  return ends
