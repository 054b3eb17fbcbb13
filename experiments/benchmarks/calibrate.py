"""Finds the unpublished times from the ten published single-job cells.

Five times are fitted by least squares on their logarithms, to the
goodput of one rigid and one elastic job at five sizes, in points. The fit
begins at round times, which nobody has fitted. All trials see the same
failures, so it is smooth enough to differentiate. The cell of 8 islands that is
printed beside them repeats the one of 150k chips: islands fail each for itself,
so that the two agree is no evidence for either.

Command: `diloco simulate --calibrate [--json]`. Two minutes on one core.

Reference: Decoupled DiLoCo, arXiv 2604.21428.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize, stats

from diloco import arguments
from diloco.planning.fleet import defaults, failures, jobs
from diloco.planning.fleet import fleet as fleet_lib

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
RIGID = (72, 57, 38, 27, 18)  # percent
ELASTIC = (88, 80, 69, 58, 40)
ISLANDS_8 = 88  # published for 8 islands of 150k chips
FITTED = (
  *("repair_scale_secs", "repair_power"),
  *("downscale_secs", "upscale_secs", "upscale_wait_secs"),
)
# A guess to begin at. From further away a fit may end in a worse minimum.
GUESS = dict.fromkeys(FITTED, 30.0) | {
  "repair_scale_secs": 60.0,
  "repair_power": 1.0,
}
# What the cells cannot tell: each is fixed, and all times are fitted again.
ALTERNATIVES: dict[str, dict[str, float]] = {
  "repair_shape 0.85": {"repair_shape": 0.85},
  "repair_shape 1": {"repair_shape": 1.0},
  "repair_shape 3": {"repair_shape": 3.0},
  "restore_secs 5": {"restore_secs": 5.0},
  "restore_secs 10": {"restore_secs": 10.0},
  "checkpoint_every_secs 5": {"checkpoint_every_secs": 5.0},
  "checkpoint_every_secs 10": {"checkpoint_every_secs": 10.0},
}
_FAILURES = 40_000  # in each trial of a cell
_STEP = 0.05  # of a logarithm, for derivatives
_SMALLEST_GAIN = 1e-3  # of the sum of squares, for which to go on


@dataclasses.dataclass(frozen=True)
class Fit:
  """What was found."""

  times: defaults.Times  # all times, the fitted ones among them
  residuals: np.ndarray  # [10] simulated minus published, points; rigid first
  # Standard error of each fitted time, as a share of it.
  relative_errors: Mapping[str, float]
  covariance: np.ndarray  # of the logarithms of the fitted times

  @property
  def mean_error(self) -> float:
    """Mean absolute residual, points."""
    return float(np.mean(np.abs(self.residuals)))

  @property
  def worst_error(self) -> float:
    """Largest absolute residual, points."""
    return float(np.max(np.abs(self.residuals)))

  @property
  def mean_repair_secs(self) -> float:
    """Of the fitted distribution."""
    of = self.times.repair
    mean = stats.exponweib.mean(of.power, of.shape, scale=of.scale_secs)
    return float(mean)


def goodput(
  times: defaults.Times,
  chips: int,
  *,
  elastic: bool,
  num_failures: int = _FAILURES,
  seed: int = 0,
) -> float:
  """Simulates a single job over about `num_failures` failures; percent."""
  fleet = fleet_lib.Fleet(chips=chips)
  horizon = num_failures * fleet_lib.SECS_PER_YEAR / chips
  rng = np.random.default_rng([seed, chips])
  model = failures.FailureModel()
  events = failures.sample(model, fleet, times.repair, horizon, rng)
  shape = jobs.Shape(fleet.num_slices)
  return 100 * jobs.run(shape, times, events, horizon, elastic=elastic).goodput


def cells(
  times: defaults.Times, *, num_failures: int = _FAILURES, seed: int = 0
) -> np.ndarray:
  """Returns the ten simulated cells in percent, rigid first."""
  return np.array(
    [
      goodput(
        times, chips, elastic=elastic, num_failures=num_failures, seed=seed
      )
      for elastic in (False, True)
      for chips in CHIPS
    ]
  )


def fit(
  start: defaults.Times | None = None,
  *,
  rounds: int = 16,
  num_failures: int = _FAILURES,
  seed: int = 0,
) -> Fit:
  """Fits the times of `FITTED`, all others as in `start`, or the defaults."""
  start = start or dataclasses.replace(defaults.Times(), **GUESS)
  target = np.array(RIGID + ELASTIC)

  def residuals_of(logs: np.ndarray) -> np.ndarray:
    times = _times(start, logs)
    found = cells(times, num_failures=num_failures, seed=seed)
    return found - target

  logs = np.log([getattr(start, name) for name in FITTED])
  found = optimize.least_squares(
    residuals_of,
    logs,
    jac=lambda x: _derive(residuals_of, x),
    ftol=_SMALLEST_GAIN,
    max_nfev=rounds,
  )
  spread = 2 * found.cost / (len(target) - len(FITTED))
  covariance = spread * np.linalg.pinv(found.jac.T @ found.jac)
  spreads = np.sqrt(np.diag(covariance)).tolist()
  return Fit(
    _times(start, found.x),
    found.fun,
    dict(zip(FITTED, spreads, strict=True)),
    covariance,
  )


def _times(start: defaults.Times, logs: np.ndarray) -> defaults.Times:
  values = dict(zip(FITTED, np.exp(logs).tolist(), strict=True))
  return dataclasses.replace(start, **values)


def _derive(
  function: Callable[[np.ndarray], np.ndarray], x: np.ndarray
) -> np.ndarray:
  columns = []
  for i in range(len(x)):
    step = np.zeros(len(x))
    step[i] = _STEP
    columns.append((function(x + step) - function(x - step)) / (2 * _STEP))
  return np.stack(columns, axis=1)


def predict(found: Fit) -> dict[str, float]:
  """Goodput of 8 islands of 150k chips; percent, with the fit's own error.

  Islands of a decoupled run fail and recover each for itself, so the goodput
  of the fleet is that of one island, which is among the fitted cells.
  """
  logs = np.log([getattr(found.times, name) for name in FITTED])

  def of(x: np.ndarray) -> np.ndarray:
    return np.array([goodput(_times(found.times, x), 150_000, elastic=True)])

  gradient = _derive(of, logs)[0]
  error = math.sqrt(float(gradient @ found.covariance @ gradient))
  mean = float(of(logs)[0])
  return {"mean": mean, "low": mean - 2 * error, "high": mean + 2 * error}


def report(found: Fit) -> dict[str, Any]:
  """Returns the fit as plain values."""
  simulated = found.residuals + np.array(RIGID + ELASTIC)
  rows = {}
  for i, (name, published) in enumerate(
    (("rigid", RIGID), ("elastic", ELASTIC))
  ):
    part = slice(i * len(CHIPS), (i + 1) * len(CHIPS))
    rows[name] = {
      str(chips): {"published": p, "simulated": s, "residual": r}
      for chips, p, s, r in zip(
        CHIPS,
        published,
        simulated[part].round(2).tolist(),
        found.residuals[part].round(2).tolist(),
        strict=True,
      )
    }
  return {
    "times": dataclasses.asdict(found.times),
    "relative_errors": dict(found.relative_errors),
    "repair_mean_secs": found.mean_repair_secs,
    "mean_error_points": found.mean_error,
    "worst_error_points": found.worst_error,
    "cells": rows,
    "predicted": {"islands 8, chips 1200000": predict(found)},
    "published": {"islands 8, chips 1200000": ISLANDS_8},
  }


def parser() -> arguments.Parser:
  """The arguments."""
  made = arguments.Parser(
    "diloco simulate --calibrate",
    "Fit the unpublished times.",
    ["diloco simulate --calibrate --failures=20000"],
  )
  made.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
  made.add_argument(
    "--seed",
    type=arguments.whole(0),
    default=0,
    help="of the drawn failures",
  )
  made.add_argument(
    "--failures",
    type=arguments.whole(1000),
    default=_FAILURES,
    help="in each trial of a cell",
  )
  made.add_argument(
    "--alternatives", action="store_true", help="fit with others fixed, too"
  )
  return made


def main(argv: Sequence[str]) -> int:
  """Fits, and prints what was found."""
  args = parser().parse_args(list(argv))
  found = fit(seed=args.seed, num_failures=args.failures)
  facts = report(found)
  if args.alternatives:
    facts["alternatives"] = {
      name: _alternative(found.times, change, args.failures, args.seed)
      for name, change in ALTERNATIVES.items()
    }
  if args.json:
    arguments.answer(args, facts)
  else:
    _print(facts)
  return 0


def _alternative(
  best: defaults.Times,
  change: Mapping[str, float],
  num_failures: int,
  seed: int,
) -> dict[str, Any]:
  start = dataclasses.replace(best, **change)
  found = fit(start, num_failures=num_failures, seed=seed)
  return {
    "mean_error_points": found.mean_error,
    "worst_error_points": found.worst_error,
    "repair_mean_secs": found.mean_repair_secs,
    "times": {name: getattr(found.times, name) for name in FITTED},
  }


def _print(facts: Mapping[str, Any]) -> None:
  for name in FITTED:
    share = facts["relative_errors"][name]
    print(f"{name:20} {facts['times'][name]:8.3g} +- {100 * share:.0f} %")
  print(f"mean repair delay    {facts['repair_mean_secs']:8.3g} s")
  for name, row in facts["cells"].items():
    for chips, cell in row.items():
      print(
        f"{name:8} {int(chips):9,} published {cell['published']:3}"
        f" simulated {cell['simulated']:5.1f} residual {cell['residual']:+5.1f}"
      )
  print(f"mean error {facts['mean_error_points']:.2f} points", end=", ")
  print(f"worst {facts['worst_error_points']:.2f}")
  for name, value in facts["predicted"].items():
    print(
      f"predicted, {name}: {value['mean']:.1f}"
      f" [{value['low']:.1f}, {value['high']:.1f}];"
      f" published {facts['published'][name]}"
    )
  for name, value in facts.get("alternatives", {}).items():
    print(
      f"with {name}: mean error {value['mean_error_points']:.2f},"
      f" worst {value['worst_error_points']:.2f}"
    )
