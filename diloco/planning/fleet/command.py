"""`diloco simulate`: the fleet simulator from the command line."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from diloco import config as config_lib
from diloco import errors
from diloco.planning import arguments
from diloco.planning.fleet import (
  calibrate,
  defaults,
  failures,
  reality,
  simulator,
  sweeps,
  timeline,
  traces,
  traffic,
)
from diloco.planning.fleet import fleet as fleet_lib
from diloco.planning.fleet import scenario as scenario_lib

_DESCRIPTION = """\
Simulate a fleet: what it delivers under failures. The defaults are the times
that 'diloco simulate --calibrate' found. --islands=1 is one synchronous job.
"""
# Settings of the rounds that have a flag, by flag.
_SYNC = {
  "fragments": "num_fragments",
  "every": "every",
  "overlap_steps": "overlap_steps",
  "quorum": "quorum",
  "max_staleness": "max_staleness",
  "grace_gamma": "grace_gamma",
}


def main(argv: Sequence[str]) -> int:
  """Simulates and prints; returns the exit code.

  Raises:
    UserError: what is asked for cannot be.
  """
  if "--calibrate" in argv:
    return calibrate.main([a for a in argv if a != "--calibrate"])
  args = _parser().parse_args(list(argv))
  if args.from_run is not None:
    facts = reality.compare(
      args.from_run,
      seeds=range(args.seeds),
      measured_from=args.measured_from,
      quorum=_given(argv, "quorum", args.quorum),
      grace=_given(argv, "grace", args.grace),
      every=_given(argv, "every", args.every),
    )
    _print(facts, as_json=args.json, text=reality.text)
    return 0
  if args.sweep is not None:
    _print(_sweep(args, list(argv)), as_json=args.json, text=sweeps.text)
    return 0
  facts = _simulate(args)
  if args.timeline is not None:
    timeline.draw(_scenario(args), args.seed, args.timeline)
    facts["timeline"] = args.timeline
  _print(facts, as_json=args.json, text=_text)
  return 0


def _simulate(args: argparse.Namespace) -> dict[str, Any]:
  scenario = _scenario(args)
  scenario_lib.check_length(scenario)
  return simulator.simulate(scenario, range(args.seed, args.seed + args.seeds))


def _sweep(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
  rows = []
  given = [a for a in argv if not a.startswith("--sweep")]
  if "--sweep" in argv:  # written as two words
    given.remove(args.sweep)
  points = sweeps.load(args.sweep)
  for point in points:  # all are read before the first one takes its time
    _scenario(_parser().parse_args([*given, *sweeps.flags(point)]))
  for point in points:
    row = _parser().parse_args([*given, *sweeps.flags(point)])
    rows.append({"given": point, "result": _simulate(row)})
  return {"sweep": args.sweep, "rows": rows}


def _given(argv: Sequence[str], flag: str, value: Any) -> Any:
  """The value of a flag that was written, else None."""
  written = any(a == f"--{flag}" or a.startswith(f"--{flag}=") for a in argv)
  return value if written else None


def _parser() -> arguments.Parser:
  parser = arguments.Parser("diloco simulate", _DESCRIPTION)
  add = parser.add_argument
  add("--chips", type=arguments.whole(1), default=1_200_000)
  add("--islands", type=arguments.whole(1), default=1, help="M")
  add("--slices", type=arguments.whole(0), default=0, help="0: 256 chips each")
  add("--days", type=_real, default=30.0)
  add("--seeds", type=arguments.whole(1), default=5, help="how many")
  add("--seed", type=arguments.whole(0), default=0, help="the first")
  add("--elastic", action="store_true", default=True)
  add("--noelastic", dest="elastic", action="store_false")
  add("--min_share", type=_real, default=0.5, help="of slices, to train at all")
  add("--speeds", type=_reals, default=(1.0,), metavar="A,B", help="of islands")
  add("--speed_spread", type=_real, default=0.0, help="of slices")
  add("--rack_slices", type=arguments.whole(1), default=4)
  add("--power_slices", type=arguments.whole(1), default=64)
  add(
    "--capacity",
    default="",
    metavar="SHARE:FROM-TO[:SPEED],...",
    help="extra, as a share of the fleet, between two days",
  )
  add("--trace", metavar="FILE.csv", help="failures instead of drawn ones")
  add("--timeline", metavar="FILE.png", help="draw the first seed")
  add("--sweep", metavar="FILE.py", help="simulate each row of get_sweep()")
  add("--from_run", metavar="DIR", help="predict a run that was made")
  add("--measured_from", metavar="DIR", help="with the times of this other run")
  add("--calibrate", action="store_true", help="fit the unpublished times")
  add("--grace", default="adaptive", help="adaptive, or seconds")
  add("--follow", action="store_true", default=True)
  add(
    "--nofollow",
    dest="follow",
    action="store_false",
    help="islands publish on their schedule only",
  )
  add("--lockstep", action="store_true", help="islands wait for their rounds")
  add("--windows", type=arguments.whole(0), default=6, help="0: no rounds")
  add("--window_steps", type=arguments.whole(1), default=120)
  sync = config_lib.SyncConfig()
  for flag, field in _SYNC.items():
    value = getattr(sync, field)
    kind = _real if isinstance(value, float) else arguments.whole(0)
    add(f"--{flag}", type=kind, default=value)
  for kind in (defaults.Times, failures.FailureModel, traffic.Links):
    _add_fields(parser, kind)
  _add_fields(parser, scenario_lib.Stragglers, "straggler_")
  return parser


def _add_fields(
  parser: argparse.ArgumentParser, kind: Any, prefix: str = ""
) -> None:
  for field in dataclasses.fields(kind):
    if isinstance(field.default, float):
      name = f"--{prefix}{field.name}"
      parser.add_argument(name, type=_real, default=field.default)


def _real(text: str) -> float:
  # What range it must be in, the scenario says, by name.
  return float(text)


def _reals(text: str) -> tuple[float, ...]:
  return tuple(float(part) for part in text.split(","))


def _values(args: argparse.Namespace, kind: Any, prefix: str = "") -> dict:
  return {
    field.name: getattr(args, prefix + field.name)
    for field in dataclasses.fields(kind)
    if isinstance(field.default, float)
  }


def _scenario(args: argparse.Namespace) -> scenario_lib.Scenario:
  trace = None if args.trace is None else traces.read(args.trace)
  return scenario_lib.Scenario(
    fleet=fleet_lib.Fleet(
      chips=args.chips,
      islands=args.islands,
      slices=args.slices,
      rack_slices=args.rack_slices,
      power_slices=args.power_slices,
      speeds=args.speeds,
      speed_spread=args.speed_spread,
      extras=parse_capacity(args.capacity),
    ),
    failures=failures.FailureModel(
      **_values(args, failures.FailureModel), trace=trace
    ),
    times=defaults.Times(**_values(args, defaults.Times)),
    stragglers=scenario_lib.Stragglers(
      **_values(args, scenario_lib.Stragglers, "straggler_")
    ),
    sync=dataclasses.replace(
      config_lib.SyncConfig(),
      grace=args.grace,
      follow=args.follow,
      **{field: getattr(args, flag) for flag, field in _SYNC.items()},
    ),
    links=traffic.Links(**_values(args, traffic.Links), lockstep=args.lockstep),
    elastic=args.elastic,
    min_share=args.min_share,
    days=args.days,
    windows=args.windows,
    window_steps=args.window_steps,
  )


def parse_capacity(text: str) -> tuple[fleet_lib.Extra, ...]:
  """Reads "SHARE:FROM-TO[:SPEED],..." with days.

  Raises:
    UserError: it is written otherwise.
  """
  found = []
  for part in text.split(",") if text else ():
    share, _, rest = part.partition(":")
    days, _, speed = rest.partition(":")
    start, _, end = days.partition("-")
    try:
      numbers = [float(t) for t in (share, start, end, speed or "1")]
    except ValueError as error:
      raise errors.UserError(
        f"capacity = {part!r}",
        "it is SHARE:FROM-TO or SHARE:FROM-TO:SPEED, with days",
        "write for instance 0.5:10-20",
      ) from error
    day = fleet_lib.SECS_PER_DAY
    found.append(
      fleet_lib.Extra(
        numbers[0], numbers[1] * day, numbers[2] * day, numbers[3]
      )
    )
  return tuple(found)


def _print(facts: Mapping[str, Any], *, as_json: bool, text: Any) -> None:
  if as_json:
    json.dump(facts, sys.stdout, indent=2)
    print()
  else:
    print(text(facts))


def _text(facts: Mapping[str, Any]) -> str:
  lines = [
    f"{facts['days']:g} days, {facts['slices']} slices,"
    f" {len(facts['seeds'])} seeds: mean [low, high]"
  ]
  for name in ("goodput", "uptime"):
    lines.append(f"{name:26}{_spread(facts[name], 100)} %")
  for name, value in facts["downtime"].items():
    if value["mean"]:
      lines.append(f"  {name:24}{_spread(value, 100)} %")
  for name in ("failures", "interruptions", "coalesced_failures"):
    lines.append(f"{name:26}{_spread(facts[name], 1)}")
  for name in ("contributors_per_merge", "staleness"):
    if facts[name]["mean"] is not None:
      lines.append(f"{name:26}{_spread(facts[name], 1)}")
  if facts["rounds"]["windows"]:
    found = facts["rounds"]
    lines.append(
      f"rounds: {found['merges']} merges in {found['windows']} windows,"
      f" {100 * found['covered']:.2g} % of the time"
    )
  return "\n".join(lines)


def _spread(value: Mapping[str, float], scale: float) -> str:
  mean, low, high = (scale * value[name] for name in ("mean", "low", "high"))
  if scale == 1 and high >= 1000:
    return f"{mean:9.0f} [{low:.0f}, {high:.0f}]"
  return f"{mean:9.2f} [{low:.2f}, {high:.2f}]"
