"""`diloco plan`: arguments to request, plan to text, JSON and picture."""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from diloco import arguments, errors
from diloco.planning.planner import facts, model, plan, resources, text

_DESCRIPTION = "Propose a configuration for a fleet, or say what does not fit."
_EXAMPLES = (
  "diloco plan --fleet=experiments/fleets/four_regions.py --params=12e9"
  " --wan_gbps=3",
  "diloco plan --fleet=experiments/fleets/two_rooms.py --params=1e9"
  " --plot=plan.png",
  "diloco plan --fleet=experiments/fleets/four_regions.py"
  " --config=experiments/configs/shapes.py:12b --wan_gbps=3",
)


def parser() -> arguments.Parser:
  """The arguments."""
  made = arguments.Parser("diloco plan", _DESCRIPTION, _EXAMPLES)
  add, number, whole = made.add_argument, arguments.number, arguments.whole
  add("--fleet", required=True, metavar="FILE.py", help="has get_fleet()")
  add("--params", type=number(1), help="of the model; or give --config")
  add(
    "--config",
    metavar="FILE.py[:VARIANT]",
    help="of a run, whose parameters, layers and tokens are taken",
  )
  add("--layers", type=whole(1), help="default: 24 (params / 1e9)^(1/3)")
  add("--tokens", type=number(1), help="budget; default: 20 a parameter")
  add(
    "--batch_tokens",
    type=number(1),
    help="of one step of all islands; default: 0.292 C^0.3271",
  )
  add(
    "--mfu",
    type=number(0, above=True),
    default=0.4,
    help="share of peak that an island's steps reach",
  )
  add(
    "--wan_gbps",
    type=number(0, above=True),
    help="of each site's link, in place of the fleet file's",
  )
  add(
    "--cost_per_chip_hour",
    type=number(0),
    help="in place of the fleet file's prices",
  )
  add("--islands", type=whole(1), default=0, help="M; default: the best")
  add("--seeds", type=whole(2, 10_000), default=5, help="of the goodput")
  add("--plot", type=pathlib.Path, metavar="FILE.png", help="the trade-off")
  return made


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  args = parser().parse_args(list(argv))
  found = propose(args)
  arguments.answer(args, found, text.render(found))
  return 0


def propose(args: argparse.Namespace) -> dict[str, Any]:
  """Makes a plan, and its picture if one is asked for; see `facts.gather`."""
  request = _request(args)
  if args.plot:
    # Imported here: drawing takes longer to load than a plan to make.
    from diloco.planning.planner import picture

    picture.check(args.plot)
  weighed = plan.weigh(request)
  found = facts.gather(request, weighed, plan.best(request, weighed))
  if args.plot:
    picture.draw(found, args.plot)
  return found


def _request(args: argparse.Namespace) -> plan.Request:
  fleet = resources.load(args.fleet, args.wan_gbps)
  if args.mfu > 1:
    raise errors.UserError(
      f"--mfu={args.mfu:g}", "it is a share of the peak", "give at most 1"
    )
  made = _model(args)
  if made.batch_tokens > made.tokens:
    raise errors.UserError(
      f"--batch_tokens={made.batch_tokens:g}",
      f"the budget is --tokens={made.tokens:g}",
      "give a smaller batch",
    )
  return plan.Request(
    fleet=fleet,
    model=made,
    islands=args.islands,
    price_per_hour=args.cost_per_chip_hour,
    seeds=args.seeds,
  )


def _model(args: argparse.Namespace) -> model.Model:
  if (args.params is None) == (args.config is None):
    raise errors.UserError(
      "--params and --config",
      "there is neither" if args.config is None else "there are both",
      "give one of them: the number, or a config that has it",
    )
  params, layers, tokens = args.params, None, None
  if args.config is not None:
    params, layers, tokens = shape_of(args.config)
  return model.make(
    params,
    layers=args.layers or layers,
    tokens=args.tokens or tokens,
    batch_tokens=args.batch_tokens,
    mfu=args.mfu,
  )


def shape_of(place: str) -> tuple[int, int | None, int]:
  """Parameters, layers (None if it has no such option) and tokens of a run.

  Of "FILE.py" or "FILE.py:VARIANT". The task's `init` is traced; no array is
  made.

  Raises:
    UserError: the file, the configuration or the task will not do.
  """
  # Imported here: JAX takes seconds to load, which a number does not need.
  from diloco import config as config_lib
  from diloco import launch
  from diloco.islands import trial
  from diloco.tasks import registry

  config = config_lib.from_mapping(launch.load_config(place))
  options = config.task.options
  task = registry.make_task(config.task.name, options)
  tensors = trial.parameters(task, config).tensors()
  layers = options.get("num_layers")
  params = sum(tensor.size for tensor in tensors)
  return (
    params,
    layers if isinstance(layers, int) else None,
    config.total_tokens,
  )
