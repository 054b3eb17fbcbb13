"""`diloco simulate`: the fleet simulator from the command line."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from diloco import arguments, errors, hyper
from diloco.planning.fleet import (
  flags,
  reality,
  simulator,
  traces,
)
from diloco.planning.fleet import scenario as scenario_lib

# What can be done besides simulating a fleet, by the flag that asks for it.
_TASKS = ("from_run", "sweep", "draw", "timeline")
# What --from_run takes.
_OF_REALITY = (
  *("quorum", "grace", "every", "seed", "seeds"),
  *("from_run", "measured_from", "json"),
)


def main(argv: Sequence[str]) -> int:
  """Simulates and prints; returns the exit code."""
  args = flags.parser().parse_args(list(argv))
  _check_task(args, argv)
  if args.from_run is not None:
    facts = reality.compare(
      args.from_run,
      seeds=_seeds(args),
      measured_from=args.measured_from,
      changes={
        name: getattr(args, name)
        for name in _OF_REALITY[:3]
        if name in _written(argv)
      },
    )
    told = reality.text(facts)
  elif args.sweep is not None:
    facts = _sweep(args, list(argv))
    told = _sweep_text(facts)
  elif args.draw is not None:
    scenario = flags.scenario(args)
    scenario_lib.check_length(scenario)
    drawn = simulator.trace(scenario, args.seed)
    traces.write(args.draw, drawn)
    facts = {"trace": args.draw, "seed": args.seed, "failures": len(drawn)}
    told = (
      f"{len(drawn)} failures of seed {args.seed} in {args.draw},"
      " for --trace or config.virtual.trace"
    )
  else:
    facts = _simulated(args)
    told = text(facts)
    if args.timeline is not None:
      # Imported here, for matplotlib takes its time.
      from diloco.planning.fleet import timeline

      timeline.draw(flags.scenario(args), args.seed, args.timeline)
      facts["timeline"] = args.timeline
  arguments.answer(args, facts, told)
  return 0


def simulate(given: Sequence[str]) -> dict[str, Any]:
  """Simulates the fleet that flags describe; see `simulator.simulate`."""
  return _simulated(_of_fleet(given))


def _of_fleet(given: Sequence[str]) -> argparse.Namespace:
  """Arguments of a single simulation; refuses those of any other task."""
  args = flags.parser().parse_args(list(given))
  for name in (*_TASKS, "measured_from"):
    errors.require(
      getattr(args, name) is None,
      f"{name} = {getattr(args, name)}",
      "it is no setting of a fleet, and would be ignored",
      f"leave it out, or run 'diloco simulate --{name}=...'",
    )
  return args


def _simulated(args: argparse.Namespace) -> dict[str, Any]:
  scenario = flags.scenario(args)
  scenario_lib.check_length(scenario)
  return simulator.simulate(scenario, _seeds(args))


def _seeds(args: argparse.Namespace) -> range:
  return range(args.seed, args.seed + args.seeds)


def _check_task(args: argparse.Namespace, argv: Sequence[str]) -> None:
  """Refuses flags that what is to be done would ignore."""
  tasks = [f"--{name}" for name in _TASKS if getattr(args, name) is not None]
  errors.require(
    len(tasks) < 2,
    " and ".join(tasks),
    "they are different things to do",
    "give one of them",
  )
  errors.require(
    args.measured_from is None or args.from_run is not None,
    f"--measured_from={args.measured_from}",
    "it says whose times predict the run of --from_run",
    "give --from_run too",
  )
  if args.from_run is not None:
    for name in _written(argv):
      errors.require(
        name in _OF_REALITY,
        f"--{name}",
        "the rest of the fleet is that of --from_run, so it would be ignored",
        f"ask about {', '.join(_OF_REALITY[:3])}, or leave it out",
      )


def _sweep(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
  rows = []
  given = [a for a in argv if not a.startswith("--sweep")]
  if "--sweep" in argv:  # written as two words
    given.remove(args.sweep)
  points, trains = hyper.load(args.sweep)
  if trains:
    raise errors.UserError(
      f"--sweep={args.sweep}",
      "it has get_config, so its points are to be trained",
      "use 'diloco sweep'",
    )
  for point in points:  # all are read before the first one takes its time
    flags.scenario(_of_fleet([*given, *flags.written(point)]))
  for point in points:
    result = simulate([*given, *flags.written(point)])
    rows.append({"given": point, "result": result})
  return {"sweep": args.sweep, "rows": rows}


def _written(argv: Sequence[str]) -> list[str]:
  """Names of the flags that were written."""
  return [a[2:].partition("=")[0] for a in argv if a.startswith("--")]


def _sweep_text(facts: Mapping[str, Any]) -> str:
  """Returns a table of a sweep's rows."""
  lines = ["goodput, % [lowest, highest]  uptime, %  islands a merge  given"]
  for row in facts["rows"]:
    found = row["result"]
    good = found["goodput"]
    merged = found["contributors_per_merge"]["mean"]
    given = " ".join(f"{name}={value}" for name, value in row["given"].items())
    lines.append(
      f"    {100 * good['mean']:6.2f} [{100 * good['low']:6.2f},"
      f" {100 * good['high']:6.2f}]     {100 * found['uptime']['mean']:6.2f}"
      f"  {'-' if merged is None else f'{merged:.2f}':>15}  {given}"
    )
  return "\n".join(lines)


def text(facts: Mapping[str, Any]) -> str:
  """Returns what `simulate` found, to be read."""
  lines = [
    f"{facts['days']:g} days, {facts['chips']:,} chips in {facts['slices']}"
    f" slices, {facts['islands']} islands; {len(facts['seeds'])} seeds: mean"
    " [lowest, highest]"
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
  for name in ("merged_share", "overwritten_share"):
    if facts[name]["mean"] is not None:
      lines.append(f"{name:26}{_spread(facts[name], 100)} % of steps")
  if facts["rounds"]["windows"]:
    found = facts["rounds"]
    lines.append(
      f"rounds: {found['merges']} merges in {found['windows']} windows,"
      f" {100 * found['covered']:.2g} % of the time"
    )
    if found["contributors_error"] is not None:
      lines[-1] += (
        f"; contributors_per_merge +- {found['contributors_error']:.2g}"
        " (95 %, from windows)"
      )
  return "\n".join(lines)


def _spread(value: Mapping[str, float], scale: float) -> str:
  mean, low, high = (scale * value[name] for name in ("mean", "low", "high"))
  if scale == 1 and high >= 1000:
    return f"{mean:9.0f} [{low:.0f}, {high:.0f}]"
  return f"{mean:9.2f} [{low:.2f}, {high:.2f}]"
