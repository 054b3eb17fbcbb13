"""A run on an object store that is far away, at default settings.

Question: is a store that takes 50 ms for every request good enough, are islands
disturbed by it, how soon is a dead syncer replaced, and what does it cost?

Command: `python -m experiments.benchmarks.far_store`, which serves S3 on this
machine (see `s3_server`); an island is killed in it, and the leading syncer.
Two minutes on two cores.
"""

import argparse
import json
import tempfile
from typing import Any

from diloco import config as config_lib
from diloco import launch, timing
from diloco import run as run_lib
from diloco.report import view as view_lib
from diloco.snapshots import store
from diloco.tape import reader
from experiments.benchmarks import s3_server


def measure(delay_secs: float, tokens: int, pace_secs: float) -> dict[str, Any]:
  """Trains the quickstart's smoke model; returns what came of it."""
  config = launch.load_config("experiments/configs/quickstart.py:smoke")
  config.task.options.num_layers = 2
  config.total_tokens = tokens
  config.fleet.pace_step_secs = pace_secs
  config.faults = (
    {"target": "island-1", "at_fraction": 0.2},
    {"target": "syncer", "at_fraction": 0.5},
  )
  with (
    s3_server.serving(delay_secs) as server,
    tempfile.TemporaryDirectory() as folder,
  ):
    config.store = server.place("run")
    result = run_lib.train(config.to_dict(), folder, quiet=True)
    typed = config_lib.from_mapping(config.to_dict())
    times = timing.read(store.SnapshotStore(config.store), typed.controller)
    view = view_lib.RunView()
    view.update(reader.read(folder))
  facts = result.summary
  died = view.syncer_deaths[0]
  return {
    "delay_secs": delay_secs,
    "round_trip_secs": times.round_trip_secs,
    "takeover_secs_derived": times.takeover_secs,
    "takeover_secs_seen": min(t for t in view.syncer_leads if t > died) - died,
    **{name: facts[name] for name in ("status", "wall_secs", "violations")},
    "tokens_unaccounted": facts["tokens_unaccounted"],
    "gap_over_pace": {
      number: {
        name: island[f"gap_secs_{name}"] / island["paced_step_secs"]
        for name in ("p50", "p99", "max")
      }
      for number, island in facts["islands"].items()
    },
    **facts["store"],
  }


def main() -> None:
  """Prints one JSON object."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--delay_secs", type=float, default=0.05)
  parser.add_argument("--tokens", type=int, default=60_000)
  parser.add_argument("--pace_secs", type=float, default=0.2)
  args = parser.parse_args()
  found = measure(args.delay_secs, args.tokens, args.pace_secs)
  print(json.dumps(found, indent=2))


if __name__ == "__main__":
  main()
