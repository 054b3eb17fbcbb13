"""A merge's weights are made again, not believed."""

import pytest

from diloco.replay import script, weights
from diloco.snapshots import records
from diloco.syncer import weighting

V = script.VersionId
POLICY = weighting.Weighting(0.5, max_staleness=2)


def record(base=0, first=0, step=8, tokens=80):
  return records.Contribution(
    *(0, 1, 0, base, first, step, tokens),
    *("f32", "hash", "payload", [], 0, []),
  )


def merge(version, *shares):
  return script.Merge(V(0, version), tuple(shares), "d", 1.0)


def chain(*makings):
  return {making.id: making for making in makings}


PLAIN = chain(*(merge(v) for v in range(1, 6)))


@pytest.mark.parametrize(
  ("version", "base", "behind"),
  [(5, 4, 0), (5, 3, 1), (5, 2, 2), (1, 0, 0), (3, 7, None)],
)
def test_staleness_counts_the_merges_between(version, base, behind):
  assert weights.staleness(merge(version), base, PLAIN) == behind


def test_version_put_back_is_the_one_it_was_made_of():
  makings = chain(*PLAIN.values(), script.Return(V(0, 9), V(0, 2)), merge(10))
  assert weights.staleness(merge(10), 2, makings) == 0
  assert weights.staleness(merge(10), 1, makings) == 1
  assert weights.staleness(merge(11), 2, makings) == 1
  assert weights.staleness(merge(11), 4, makings) is None  # was rolled back


def test_true_weights_are_found_right():
  shares = [
    script.Share("a", 800.0, 1.0, 80, 0),
    script.Share("b", 400.0, 1.0, 80, 1),
  ]
  made = [record(4), record(3)]
  verdict = weights.check(merge(5, *shares), PLAIN, made, POLICY)
  assert verdict == weights.Verdict((800.0, 400.0), ())


@pytest.mark.parametrize(
  ("share", "base", "words"),
  [
    ((801.0, 1.0, 80, 0), 4, ["a: weight 801.0 on the tape, 800.0 by"]),
    ((800.0, 1.0, 90, 0), 4, ["a: c_tokens 90 on the tape, 80 by"]),
    (
      (800.0, 1.0, 80, 0),  # as if it were not behind
      3,
      ["a: weight 800.0", "a: staleness 0 on the tape, 1 by"],
    ),
    ((100.0, 1.0, 80, 3), 1, ["a: it started from 3 behind, and was merged"]),
    ((800.0, 1.0, 80, 0), 7, ["a: it started from no version on the way"]),
  ],
)
def test_what_the_tape_says_wrong_is_named(share, base, words):
  told = script.Share("a", *share)
  verdict = weights.check(merge(5, told), PLAIN, [record(base)], POLICY)
  assert len(verdict.wrong) == len(words)
  for text, start in zip(verdict.wrong, words, strict=True):
    assert text.startswith(start)
