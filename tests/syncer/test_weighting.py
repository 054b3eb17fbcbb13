"""Weights of contributions: tokens times tokens per step, damped by age."""

import oracles
import pytest

from diloco.syncer import weighting


@pytest.mark.parametrize(
  ("decay", "tokens", "steps", "staleness", "expected"),
  [
    (1.0, 2048, 1, 0, 2048.0**2),
    (1.0, 100, 4, 0, 2500.0),
    # Twice the steps at the same batch: twice the weight.
    (1.0, 200, 8, 0, 5000.0),
    # The same tokens in half the steps: twice the weight.
    (1.0, 100, 2, 0, 5000.0),
    (0.5, 100, 4, 1, 1250.0),
    (0.5, 100, 4, 2, 625.0),
    (1.0, 100, 4, 2, 2500.0),
  ],
)
def test_weight(decay, tokens, steps, staleness, expected):
  policy = weighting.Weighting(decay=decay, max_staleness=2)
  assert policy.weight(tokens, steps, staleness) == expected


@pytest.mark.parametrize("kind", ["exponential", "hyperbolic", "none"])
@pytest.mark.parametrize("decay", [1e-3, 0.5, 0.7, 1.0])
def test_weights_decay_as_the_kind_says(kind, decay):
  policy = weighting.Weighting(decay, 4, kind)
  found = [policy.weight(300, 7, s) for s in range(5)]
  expected = [oracles.weight(300, 7, s, kind, decay) for s in range(5)]
  assert found == pytest.approx(expected, rel=1e-12)
  # One version costs the same, however it goes on.
  first = 1 if kind == "none" else decay
  assert found[1] / found[0] == pytest.approx(first)


def test_large_counts_do_not_overflow():
  policy = weighting.Weighting()
  tokens = 10**15
  assert policy.weight(tokens, 10**6, 0) == pytest.approx(1e24)
