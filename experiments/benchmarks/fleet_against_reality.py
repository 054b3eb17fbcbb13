"""The fleet simulator against real runs with different kill rates.

Each run trains a small byte model on two islands of emulated speed while
islands are killed so many times, at times drawn from a seed. The simulator then
gets a run's configuration and kill trace, and the mean step times, restart time
and delays of *another* run, and says what its goodput and contributors per
merge should have been.

Command: `python -m experiments.benchmarks.fleet_against_reality`; `--kills=1,4`
and `--tokens=40000` make it shorter. Ten minutes on two cores. Expected: every
goodput within 3 points. A machine busy with other work prolongs single
restarts, which the mean hides.
"""

import argparse
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from diloco import run as run_lib
from diloco.chaos import campaign
from diloco.planning.fleet import reality

KILLS = (0, 1, 2, 4, 6, 8)
TOKENS = 120_000
_ISLANDS = 2


def run(
  kills: Sequence[int] = KILLS,
  *,
  tokens: int = TOKENS,
  folder: pathlib.Path | None = None,
) -> dict[str, Any]:
  """Makes one run for each number of kills, and predicts it.

  Args:
    kills: islands killed, by run; at least two runs.
    tokens: trained in each run.
    folder: keeps the runs; without, they are thrown away.

  Returns:
    Measured and predicted figures of each run, and the worst error.
  """
  if folder is None:
    with tempfile.TemporaryDirectory() as place:
      return run(kills, tokens=tokens, folder=pathlib.Path(place))
  made = []
  for seed, count in enumerate(kills):
    workdir = folder / f"kills-{count}-{seed}"
    result = run_lib.train(config(count, tokens, seed), workdir, quiet=True)
    made.append((count, workdir, result.status))
  rows = []
  for count, workdir, status in made:
    other = _another(workdir, made)
    facts = reality.compare(workdir, seeds=range(5), measured_from=other)
    facts["run"], facts["measured_from"] = workdir.name, other.name
    rows.append({"kills": count, "status": status, **facts})
  errors = [abs(row["goodput_error_points"]) for row in rows]
  return {
    "runs": rows,
    "goodput_error_points_worst": max(errors),
    "goodput_error_points_mean": sum(errors) / len(errors),
  }


def _another(
  workdir: pathlib.Path, made: Sequence[tuple[int, pathlib.Path, str]]
) -> pathlib.Path:
  """Returns the other run with the fewest kills, for there must be restarts."""
  others = [(count, path) for count, path, _ in made if path != workdir]
  with_kills = [one for one in others if one[0]]
  return min(with_kills or others)[1]


def config(kills: int, tokens: int, seed: int) -> dict[str, Any]:
  """Returns the configuration of one run."""
  rng = random.Random(seed)
  moments = sorted(rng.uniform(0.05, 0.9) for _ in range(kills))
  return {
    "name": "against_reality",
    "seed": seed,
    "total_tokens": tokens,
    "task": {"name": "language_model", "options": dict(campaign.MODEL)},
    "fleet": {
      "slices": (
        {"kind": "v6e", "relative_speed": 1.0},
        {"kind": "v5p", "relative_speed": 0.7},
      ),
      "pace_step_secs": 0.1,
    },
    "sync": {"num_fragments": 8, "every": 8},
    "outer": {"learning_rate": 1.0, "momentum": 0.0},
    "programs": {
      "window_steps": 8,
      "eval_batches": 1,
      "final_eval_batches": 4,
      "checkpoint_every_steps": 40,
    },
    "controller": {"restart_base_secs": 0.1},
    "faults": tuple(
      {
        "target": f"island-{rng.randrange(_ISLANDS)}",
        "at_fraction": moment,
        "kind": "sigkill",
      }
      for moment in moments
    ),
  }


def main() -> None:
  """Prints the comparison as one JSON object."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--kills", default=",".join(map(str, KILLS)))
  parser.add_argument("--tokens", type=int, default=TOKENS)
  parser.add_argument("--folder", type=pathlib.Path)
  args = parser.parse_args()
  kills = [int(part) for part in args.kills.split(",")]
  facts = run(kills, tokens=args.tokens, folder=args.folder)
  json.dump(facts, sys.stdout, indent=2)
  print()


if __name__ == "__main__":
  main()
