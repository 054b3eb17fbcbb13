"""The simulator against a real run: measure it, predict it, ask "what if".

Of a run's tape are taken its mean step times, how long an island takes to
start and to come back, when which island died, and the delays of its rounds;
not when each step, publication or merge happened. Fed with figures of the run
itself the comparison shows only that they add up; to predict a run, they are
taken from another one, and of the run only what is known before it is made. The
same virtual time, cores and policies as for a simulated fleet then say what the
run should have delivered, and what another quorum, grace or H would have.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco import config as config_lib
from diloco.planning.fleet import measured, outcome, rounds, traffic

_PATIENCE = 10  # times the run's length, until a prediction is given up


def compare(
  run_dir: str | os.PathLike[str],
  *,
  seeds: Sequence[int],
  measured_from: str | os.PathLike[str] | None = None,
  changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Predicts a run next to what it was, and what changes would have made of it.

  Args:
    run_dir: of a run that has ended.
    seeds: of the predictions.
    measured_from: another run on the same machine and fleet, whose times and
      delays are taken; without, the run's own.
    changes: fields of `config.sync` to ask about, such as another quorum.

  Raises:
    UserError: there is no such run, it trained nothing, or the changed
      settings cannot be.
  """
  run = measured.measure(run_dir)
  if measured_from is not None:
    run = measured.as_on(run, measured.measure(measured_from))
  facts: dict[str, Any] = {
    "run": os.fspath(run_dir),
    "measured_from": os.fspath(measured_from or run_dir),
    "is_prediction": measured_from is not None,
    "parameters": _parameters(run),
    "measured": {
      "goodput": run.goodput,
      "contributors_per_merge": run.contributors,
      "staleness": run.staleness,
      "wall_secs": run.wall_secs,
    },
    "predicted": predict(run, run.config, seeds),
  }
  mean = facts["predicted"]["goodput"]["mean"]
  facts["goodput_error_points"] = 100 * (mean - run.goodput)
  merged = facts["predicted"]["contributors_per_merge"]["mean"]
  if merged is not None and run.contributors is not None:
    facts["contributors_error"] = merged - run.contributors
  if changes:
    values = run.config.to_dict()
    values["sync"] |= changes
    values["faults"] = ()
    config = config_lib.from_mapping(values)
    facts["what_if"] = {
      "given": dict(changes),
      "predicted": predict(run, config, seeds),
    }
  return facts


def predict(
  run: measured.Run, config: config_lib.RunConfig, seeds: Sequence[int]
) -> dict[str, Any]:
  """Predicts goodput and rounds of a run under `config`."""
  rows = [_predict(run, config, seed) for seed in seeds]
  return {
    name: outcome.interval([row[name] for row in rows]) for name in rows[0]
  }


def _predict(
  run: measured.Run, config: config_lib.RunConfig, seed: int
) -> dict[str, float]:
  every = config.programs.checkpoint_every_steps
  tracks = [
    traffic.Track(island.step_secs, _stops(run, island), every)
    for island in run.islands
  ]
  jitter = float(np.mean([island.jitter for island in run.islands]))
  world = rounds.World(
    config,
    dataclasses.replace(run.links, jitter=jitter),
    tracks,
    np.random.default_rng(seed),
    outages=run.outages,
  )
  tally = world.run(_PATIENCE * run.wall_secs, enough_steps=run.steps)
  wall = tally.secs + run.tail_secs
  world.drain(run.tail_secs)  # its merges are in the tally
  useful = sum(
    kept * island.useful_secs * island.devices
    for kept, island in zip(tally.kept_steps, run.islands, strict=True)
  )
  chips = sum(island.devices for island in run.islands)
  return {
    "goodput": float(useful / (chips * wall)),
    "wall_secs": wall,
    "contributors_per_merge": traffic.mean(tally.contributors),
    "staleness": traffic.mean(tally.staleness),
    "merges": float(tally.merges),
  }


def _stops(
  run: measured.Run, island: measured.Island
) -> tuple[traffic.Stop, ...]:
  gone = {island.deaths[-1]} if island.gone else set()
  spans = [
    (death, math.inf if death in gone else death + run.restart_secs)
    for death in island.deaths
  ]
  stops = [traffic.Stop(0.0, island.start_secs)]
  for start, end in sorted([*spans, *island.breaks]):
    if start < stops[-1].end:  # died while it came back
      stops[-1] = stops[-1]._replace(end=max(stops[-1].end, end))
    else:
      stops.append(traffic.Stop(start, end, killed=True))
  return tuple(stops)


def _parameters(run: measured.Run) -> dict[str, Any]:
  return {
    "step_secs": [island.step_secs for island in run.islands],
    "useful_secs": [island.useful_secs for island in run.islands],
    "start_secs": [island.start_secs for island in run.islands],
    "kills": sum(len(island.deaths) for island in run.islands),
    "restart_secs": run.restart_secs,
    "tail_secs": run.tail_secs,
    "steps": run.steps,
    "links": dataclasses.asdict(run.links),
    "syncer_outages": len(run.outages),
  }


def text(facts: Mapping[str, Any]) -> str:
  """Returns the comparison as a table."""
  lines = [f"{'':26}{'measured':>10}{'predicted':>11}"]
  columns = [facts["predicted"]]
  if "what_if" in facts:
    given = facts["what_if"]["given"].items()
    lines[0] += "  what if " + " ".join(f"{k}={v}" for k, v in given)
    columns.append(facts["what_if"]["predicted"])
  for name in ("goodput", "contributors_per_merge", "staleness", "wall_secs"):
    values = [facts["measured"][name], *(c[name]["mean"] for c in columns)]
    shown = ["-" if v is None else f"{v:.3f}" for v in values]
    lines.append(f"{name:26}" + "".join(f"{s:>11}" for s in shown)[1:])
  if not facts["is_prediction"]:
    lines.append(
      "from the run's own times and delays: that they add up, no more;"
      " --measured_from=DIR predicts it from another run's"
    )
  return "\n".join(lines)
