"""Spans against one step at a time."""

import random

import pytest

from diloco.tape import evidence, painting

_END = 12


def _span(rng):
  first, last = sorted(rng.sample(range(_END + 1), 2))
  return first, last


def _steps(spans):
  return [step for first, last in spans for step in range(first + 1, last + 1)]


@pytest.fixture(params=range(50))
def rng(request):
  return random.Random(request.param)


def test_step_is_of_the_last_life_that_did_it_by_then(rng):
  """Also where the life that told of it has left no tape."""
  numbers = sorted(rng.sample(range(1, 7), rng.randint(1, 4)))
  lives = []
  for number in numbers:
    start, end = _span(rng)
    lives.append(evidence.Life(number, start, 10, end))
  axis = painting.Axis(lives)
  for told_by in range(1, 8):
    spans = [painting.LifeSpan(told_by, *_span(rng)) for _ in range(2)]
    for span in spans:
      done = set()
      for step in range(span.first + 1, span.last + 1):
        by = [
          life.incarnation
          for life in lives
          if life.incarnation <= told_by and life.start < step <= life.end
        ]
        done |= {(max(by), step)} if by else set()
      found = axis.find(axis.place([span]))
      assert done == {
        (life, step)
        for life, first, last in found
        for step in range(first + 1, last + 1)
      }


def test_last_coat_shows_and_how_often_one_covers_is_counted(rng):
  coats = [
    (fate, [_span(rng) for _ in range(rng.randint(0, 2))]) for fate in "abca"
  ]
  trained = [(_span(rng), 10)]
  found = painting.Painting(coats, trained)
  shown = dict.fromkeys(_steps([trained[0][0]]), painting.UNPAINTED)
  for fate, spans in coats:
    shown |= {step: fate for step in _steps(spans) if step in shown}
  counts = found.counts()
  for fate in (painting.UNPAINTED, *"abc"):
    steps = [step for step in sorted(shown) if shown[step] == fate]
    assert _steps(found.spans(fate)) == steps
    assert counts.get(fate, 0) == 10 * len(steps)
  spans = [*coats[0][1], *coats[1][1], *coats[2][1]]
  covered = _steps(spans)
  for times in (1, 2, 3):
    often = {step for step in covered if covered.count(step) >= times}
    for wanted in (None, True, False):
      some = [s for s in sorted(often) if wanted in (None, s in shown)]
      assert _steps(found.covered(spans, times, trained=wanted)) == some
