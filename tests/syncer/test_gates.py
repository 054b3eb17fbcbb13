"""Whom the gate refuses, and when it gives in; numbers by hand."""

import dataclasses
import math
import random

import pytest

from diloco.syncer import gates

SETTINGS = gates.GateSettings(factor=10.0, history=4, warmup=3, patience=4)


@dataclasses.dataclass(frozen=True)
class Sent:
  norms: tuple[float, ...]
  island: int = 0
  c_steps: int = 1


def sent(norm, island=0, c_steps=1):
  return Sent((norm,), island, c_steps)


def gate_of(*norms, **changes):
  gate = gates.NormGate(dataclasses.replace(SETTINGS, **changes))
  for norm in norms:
    gate.accepted(sent(norm))
  return gate


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_what_is_not_finite_is_refused_from_the_first_on(bad):
  for gate in (gate_of(), gate_of(factor=0.0), gate_of(1, 1, 1)):
    assert gate.judge(Sent((1.0, bad, 1.0))) == "not_finite"
    assert gate.judge(Sent((1.0, 1.0))) == ""


@pytest.mark.parametrize(
  ("accepted", "refused"), [(0, False), (2, False), (3, True), (4, True)]
)
def test_nothing_is_an_outlier_before_there_is_a_measure(accepted, refused):
  verdict = gate_of(*[1.0] * accepted).judge(sent(11.0))
  assert verdict.startswith("norm_outlier") == refused


# Accepted norms, and the longest that is let in: ten times their median.
LIMITS = {
  "the same": ([2, 2, 2], 20),
  "unsorted": ([5, 1, 3], 30),
  "an even number": ([4, 1, 3, 2], 30),  # the upper one of the two
  "one of them long": ([1, 100, 1], 10),
  "the last four": ([9, 9, 1, 1, 1, 1], 10),
}


@pytest.mark.parametrize("case", LIMITS)
def test_outlier_is_more_than_factor_times_the_median(case):
  norms, limit = LIMITS[case]
  assert gate_of(*norms).judge(sent(limit)) == ""
  assert gate_of(*norms).judge(sent(limit + 1)).startswith("norm_outlier")


def test_norms_of_all_tensors_count_together():
  gate = gate_of(1, 1, 1)
  assert gate.judge(Sent((6.0, 8.0))) == ""  # 10
  assert gate.judge(Sent((6.0, 8.1))).startswith("norm_outlier")
  measured = gates.NormGate(SETTINGS)
  for _ in range(3):
    measured.accepted(Sent((3.0, 4.0)))
  assert measured.judge(sent(50.0)) == ""
  assert measured.judge(sent(51.0)).startswith("norm_outlier")


def test_length_is_counted_per_root_of_a_step():
  gate = gate_of(1, 1, 1)
  assert gate.judge(sent(40.0, c_steps=16)) == ""
  assert gate.judge(sent(40.0, c_steps=15)).startswith("norm_outlier")
  measured = gates.NormGate(SETTINGS)
  for _ in range(3):
    measured.accepted(sent(4.0, c_steps=16))
  assert measured.judge(sent(10.0)) == ""
  assert measured.judge(sent(10.1)).startswith("norm_outlier")


def test_oldest_norm_is_forgotten_and_not_the_smallest():
  gate = gate_of(8, 1, 1, 1)
  for _ in range(2):
    gate.accepted(sent(8.0))  # forgets the first 8, then a 1
  # Left are 1, 1, 8, 8.
  assert gate.judge(sent(80.0)) == ""
  gate = gate_of(8, 8, 1, 1)
  gate.accepted(sent(1.0))
  gate.accepted(sent(1.0))  # left are four of 1
  assert gate.judge(sent(11.0)).startswith("norm_outlier")


def test_median_is_that_of_the_last_norms_accepted():
  draw = random.Random(0)
  gate, accepted = gates.NormGate(SETTINGS), []
  for _ in range(200):
    median = sorted(accepted[-4:])[min(len(accepted), 4) // 2 :][:1]
    limit = 10 * median[0] if len(accepted) >= 3 else math.inf
    for norm in (limit, limit + 1):
      refused = gate.judge(sent(min(norm, 1e9))) != ""
      assert refused == (norm > limit)
    accepted.append(draw.choice([1, 1, 2, 3, 8]))
    gate.accepted(sent(accepted[-1]))


def test_factor_zero_lets_in_all_that_is_finite():
  assert gate_of(1, 1, 1, factor=0.0).judge(sent(1e30)) == ""


def test_median_of_zero_refuses_nobody():
  assert gate_of(0, 0, 0).judge(sent(5.0)) == ""


def test_gate_gives_in_when_patience_ends_with_two_islands_refused():
  gate = gate_of(1, 1, 1)
  verdicts = [gate.judge(sent(50.0, island)) for island in (0, 1, 0, 1)]
  assert [v == "" for v in verdicts] == [False, False, False, True]
  # What was the measure is none any more.
  assert gate.judge(sent(1e6)) == ""
  for _ in range(3):
    gate.accepted(sent(50.0))
  assert gate.judge(sent(500.0)) == ""
  assert gate.judge(sent(501.0)).startswith("norm_outlier")


def test_gate_never_gives_in_to_one_island():
  gate = gate_of(1, 1, 1)
  for _ in range(20):
    assert gate.judge(sent(50.0)).startswith("norm_outlier")
  assert gate.judge(sent(50.0, island=1)) == ""


def test_what_is_accepted_ends_the_row_of_refusals():
  gate = gate_of(1, 1, 1)
  for _ in range(5):
    for island in (0, 1, 0):
      assert gate.judge(sent(50.0, island)).startswith("norm_outlier")
    gate.accepted(sent(1.0))


def test_verdict_says_both_lengths():
  assert gate_of(2, 2, 2).judge(sent(84.0, c_steps=4)) == (
    "norm_outlier: 42 per root of a step, median 2"
  )


@pytest.mark.parametrize(
  ("offences", "secs"),
  [(0, 0), (2, 0), (3, 10), (4, 20), (5, 40), (6, 45), (9, 45), (5000, 45)],
)
def test_suspension_begins_with_the_third_offence_and_doubles(offences, secs):
  policy = gates.Suspension(after=3, base_secs=10.0, max_secs=45.0)
  assert policy.secs(offences) == secs


def test_gate_that_gives_in_measures_by_what_comes_from_then_on():
  gate = gate_of(1, 1, 1, 1, warmup=2, patience=2)
  assert gate.judge(sent(50.0, island=0)).startswith("norm_outlier")
  assert gate.judge(sent(50.0, island=1)) == ""
  # There is no measure before it has two again.
  for norm in (700.0, 50.0):
    assert gate.judge(sent(norm)) == ""
    gate.accepted(sent(50.0))
  assert gate.judge(sent(500.0)) == ""
  assert gate.judge(sent(501.0)).startswith("norm_outlier")
