"""Step rate of an island beside an evaluator, over its rate without one.

Question: does an evaluator of its own slow an island, and what do evaluations
cost an island that does them itself? One unpaced island and many evaluations.
With the evaluator, steps while it measures are compared with those as long
before and after, in one run, so that a drift of the machine's speed cancels;
without it, the share of the run's time that the island did not evaluate.

Expected: at least 0.98 with the evaluator, which takes a tenth of a core while
it evaluates, but shares caches and memory from a core of its own too; without
it 1 - t / (t + T), for evaluations of t seconds every T seconds of steps.

Command: `diloco bench evaluator`; cost: 2 minutes of processor time.
"""

import os
import statistics
import tempfile
from typing import Any

from diloco import run as run_lib
from diloco.tape import events, reader

_TOKENS_PER_STEP = 4 * 128
_MODEL = {
  "d_model": 128,
  "num_layers": 4,
  "num_heads": 4,
  "seq_len": 128,
  "batch_size": 4,
}


def run(
  steps: int = 1200, every: int = 150, batches: int = 16
) -> dict[str, Any]:
  """Measures both ways.

  Args:
    steps: of the island, in each run.
    every: steps between two evaluations.
    batches: of an evaluation.

  Returns:
    `step_rate_ratio` by who evaluates, and what it was measured from.
  """
  programs = {
    "window_steps": 8,
    "eval_every_tokens": every * _TOKENS_PER_STEP,
    "eval_batches": batches,
    "final_eval_batches": 1,
    "checkpoint_every_steps": 0,
    "cut_every_secs": 0.0,
  }
  values = {
    "name": "bench_evaluator",
    "total_tokens": steps * _TOKENS_PER_STEP,
    "task": {"name": "language_model", "options": _MODEL},
    "programs": programs,
  }
  return {
    "evaluator": _beside(values | {"programs": programs | {"evaluator": True}}),
    "island": _between(values),
    "steps": steps,
    "cores": len(os.sched_getaffinity(0)),
  }


def _record(values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
  """Steps that had one before them, and evaluations but the last one."""
  with tempfile.TemporaryDirectory(prefix="diloco-bench-") as directory:
    run_lib.train(values, directory, quiet=True)
    record = reader.read(directory)
  steps = [line for line in record.metrics[0] if line["gap_secs"] is not None]
  done = [line for line in record.events if line["event"] == events.EVALUATED]
  return steps[len(steps) // 10 :], sorted(done, key=lambda e: e["wall_secs"])


def _beside(values: dict[str, Any]) -> dict[str, Any]:
  steps, done = _record(values)
  ratios, secs = [], []
  for line in done[:-1]:
    end, length = line["wall_secs"], line["secs"]
    beside = _mean_gap(steps, end - length, end)
    alone = [
      _mean_gap(steps, end - 2 * length, end - length),
      _mean_gap(steps, end, end + length),
    ]
    if beside and all(alone):
      ratios.append(sum(alone) / 2 / beside)
      secs.append(length)
  return {
    "step_rate_ratio": statistics.median(ratios),
    "step_rate_ratio_spread": [min(ratios), max(ratios)],
    "step_secs": statistics.median(line["gap_secs"] for line in steps),
    "evaluations": len(ratios),
    "evaluation_secs": statistics.median(secs),
    "skipped": sum(line.get("skipped", 0) for line in done),
  }


def _mean_gap(steps: list[Any], began: float, ended: float) -> float:
  """Seconds of a step among those wholly in between; 0 if there is none."""
  found = [
    line["gap_secs"]
    for line in steps
    if began <= line["wall_secs"] - line["gap_secs"]
    and line["wall_secs"] <= ended
  ]
  return statistics.fmean(found) if found else 0.0


def _between(values: dict[str, Any]) -> dict[str, Any]:
  steps, done = _record(values)
  began, ended = steps[0]["wall_secs"], steps[-1]["wall_secs"]
  secs = [e["secs"] for e in done if began < e["wall_secs"] < ended]
  return {
    "step_rate_ratio": 1 - sum(secs) / (ended - began),
    "step_secs": statistics.median(line["gap_secs"] for line in steps),
    "evaluations": len(secs),
    "evaluation_secs": statistics.median(secs),
  }
