"""The fleet simulator's arguments, and the scenario they describe."""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco import arguments, errors
from diloco import config as config_lib
from diloco.planning.fleet import defaults, failures, traces, traffic
from diloco.planning.fleet import fleet as fleet_lib
from diloco.planning.fleet import scenario as scenario_lib

_DESCRIPTION = """\
Simulate a fleet: what it delivers under failures. The defaults are the times
that 'diloco simulate --calibrate' found. --islands=1 is one synchronous job.
"""
_EXAMPLES = (
  "diloco simulate --chips=1200000 --islands=8 --mtbi_years=1 --days=30",
  "diloco simulate --islands=4 --quorum=2 --speeds=1,0.8 --timeline=fleet.png",
  "diloco simulate --sweep=experiments/sweeps/published.py --seeds=2",
  "diloco simulate --from_run=runs/quickstart --quorum=2",
  "diloco simulate --islands=4 --chips=4 --mtbi_years=1.4e-6 --days=0.01"
  " --repair_scale_secs=12.8 --draw=deaths.csv",
)
# Settings of the rounds that have a flag: field and word, by flag.
_SYNC = {
  "fragments": ("num_fragments", "P"),
  "every": ("every", "H, steps between two publications of a fragment"),
  "overlap_steps": ("overlap_steps", "tau, steps the grace window counts on"),
  "quorum": ("quorum", "K, fewest islands a round closes with"),
  "max_staleness": ("max_staleness", "versions a contribution may be behind"),
  "grace_gamma": ("grace_gamma", "share of the slack that grace may spend"),
}


def parser() -> arguments.Parser:
  """The arguments."""
  made = arguments.Parser("diloco simulate", _DESCRIPTION, _EXAMPLES)
  add = made.add_argument
  _add_fields(made, fleet_lib.Fleet)
  add("--speeds", type=_reals, default=(1.0,), metavar="A,B", help="of islands")
  add("--days", type=arguments.amount, default=30.0, help="simulated")
  add("--seeds", type=arguments.whole(1, 10**6), default=5, help="how many")
  add("--seed", type=arguments.whole(0), default=0, help="the first")
  _add_switch(made, "elastic", "jobs go on without slices that failed")
  add(
    "--min_share",
    type=arguments.amount,
    default=0.5,
    help="of slices, to train at all",
  )
  add(
    "--capacity",
    default="",
    metavar="SHARE:FROM-TO[:SPEED],...",
    help="extra, as a share of the fleet, between two days",
  )
  add("--trace", metavar="FILE.csv", help="failures instead of drawn ones")
  add(
    "--draw",
    metavar="FILE.csv",
    help="write what fails under the first seed as a trace, and simulate none",
  )
  add("--timeline", metavar="FILE.png", help="draw the first seed")
  add("--sweep", metavar="FILE.py", help="simulate each row of get_sweep()")
  add("--from_run", metavar="DIR", help="predict a run that was made")
  add("--measured_from", metavar="DIR", help="with the times of this other run")
  add("--grace", default="adaptive", help="adaptive, or seconds")
  _add_switch(made, "follow", "islands join rounds that would close without")
  _add_switch(made, "lockstep", "islands wait for their rounds", default=False)
  add(
    "--windows",
    type=arguments.whole(0, 10_000),
    default=6,
    help="in which rounds are followed; 0: no rounds",
  )
  add(
    "--window_steps",
    type=arguments.whole(1, 10**6),
    default=120,
    help="length of one",
  )
  sync = config_lib.SyncConfig()
  for flag, (field, word) in _SYNC.items():
    value = getattr(sync, field)
    kind = arguments.amount if isinstance(value, float) else arguments.whole(0)
    add(f"--{flag}", type=kind, default=value, help=word)
  for group in (defaults.Times, failures.FailureModel, traffic.Links):
    _add_fields(made, group)
  _add_fields(made, scenario_lib.Stragglers, "straggler_")
  return made


def _add_switch(
  made: arguments.Parser, name: str, word: str, *, default: bool = True
) -> None:
  made.add_argument(
    f"--{name}", action="store_true", default=default, help=word
  )
  made.add_argument(
    f"--no{name}", dest=name, action="store_false", help="they do not"
  )


def _add_fields(made: arguments.Parser, kind: Any, prefix: str = "") -> None:
  words = arguments.words(kind)
  for field in dataclasses.fields(kind):
    default: Any = field.default
    if type(default) in (int, float):
      made.add_argument(
        f"--{prefix}{field.name}",
        type=arguments.amount
        if isinstance(default, float)
        else arguments.whole(min(default, 1)),
        default=default,
        help=words[field.name],
      )


def _reals(text: str) -> tuple[float, ...]:
  # What range they must be in, the scenario says, by name.
  return tuple(arguments.amount(part) for part in text.split(","))


def _values(args: argparse.Namespace, kind: Any, prefix: str = "") -> dict:
  return {
    field.name: getattr(args, prefix + field.name)
    for field in dataclasses.fields(kind)
    if type(field.default) in (int, float)
  }


def scenario(args: argparse.Namespace) -> scenario_lib.Scenario:
  """What the arguments describe."""
  trace = None if args.trace is None else traces.read(args.trace)
  return scenario_lib.Scenario(
    fleet=fleet_lib.Fleet(
      **_values(args, fleet_lib.Fleet),
      speeds=args.speeds,
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
      **{field: getattr(args, flag) for flag, (field, _) in _SYNC.items()},
    ),
    links=traffic.Links(**_values(args, traffic.Links), lockstep=args.lockstep),
    elastic=args.elastic,
    **_values(args, scenario_lib.Scenario),
  )


def written(row: Mapping[str, Any]) -> list[str]:
  """Returns a row as command line flags."""
  found = []
  for name, value in row.items():
    if name == "name":  # of the point
      continue
    if value is True:
      found.append(f"--{name}")
    elif value is False:
      found.append(f"--no{name}")
    elif isinstance(value, list | tuple):
      found.append(f"--{name}={','.join(map(str, value))}")
    else:
      found.append(f"--{name}={value}")
  return found


def parse_capacity(text: str) -> tuple[fleet_lib.Extra, ...]:
  """Reads "SHARE:FROM-TO[:SPEED],..." with days."""
  found = []
  for part in text.split(",") if text else ():
    share, _, rest = part.partition(":")
    days, _, speed = rest.partition(":")
    start, _, end = days.partition("-")
    try:
      numbers = [arguments.amount(t) for t in (share, start, end, speed or "1")]
    except (ValueError, argparse.ArgumentTypeError) as error:
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
