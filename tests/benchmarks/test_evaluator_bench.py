"""How the evaluator's benchmark reads a run."""

import pytest

from experiments.benchmarks import evaluator


def _steps(gaps):
  """Steps one after another."""
  lines, wall = [], 0.0
  for gap in gaps:
    wall += gap
    lines.append({"gap_secs": gap, "wall_secs": wall})
  return lines


def _evaluated(wall, secs, **fields):
  return {"wall_secs": wall, "secs": secs, **fields}


def test_steps_beside_an_evaluation_are_held_against_those_around_it(
  monkeypatch,
):
  # From second 12 to 20 steps take twice as long.
  steps = _steps([1.0] * 12 + [2.0] * 4 + [1.0] * 12)
  done = [
    _evaluated(0.5, 0.5, skipped=0),  # before all steps
    _evaluated(20.0, 8.0, skipped=2),
    _evaluated(40.0, 1.0),  # the last one of a run
  ]
  monkeypatch.setattr(evaluator, "_record", lambda values: (steps, done))
  found = evaluator._beside({})
  assert found["step_rate_ratio"] == pytest.approx(0.5)
  assert (found["evaluations"], found["skipped"]) == (1, 2)
  assert found["evaluation_secs"] == 8.0


def test_time_of_an_islands_own_evaluations_is_lost_to_it(monkeypatch):
  steps = _steps([1.0] * 21)
  done = [_evaluated(5.0, 1.0), _evaluated(9.0, 3.0), _evaluated(30.0, 9.0)]
  monkeypatch.setattr(evaluator, "_record", lambda values: (steps, done))
  found = evaluator._between({})
  assert found["step_rate_ratio"] == pytest.approx(1 - 4.0 / 20.0)
  assert found["evaluations"] == 2
