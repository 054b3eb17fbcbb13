"""The `diloco` command; thin.

Exit codes: 0 done, 1 failed run, 2 bad input (one line on stderr).
"""

import argparse
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco import errors, process

_USAGE = """\
usage: diloco COMMAND [ARGS]

  train     train, or go on with the run in a directory
  resume    go on with the run in a directory, with its own configuration
  status    show a live or dead run
  cut       take a consistent checkpoint of a run while it goes on
  report    make a run's report again
  explain   tell why a round closed when it did
  replay    do a run again from its tape and compare every version
  bench     measure a part: island, store, merge, takeover, bookkeeping,
            fragments
  chaos     kill, stop and damage real runs, and check what is left
  simulate  what a fleet will deliver, or what the links between sites must
  simulate-protocol
            run the protocol under faults in a simulated world, many times
  plan      propose a configuration for a fleet, or say what does not fit

'diloco COMMAND --help' tells more.
"""


_TASK_HELP = "the task of a run from elsewhere, if you trust its module"


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit code."""
  args = list(sys.argv[1:] if argv is None else argv)
  logging.basicConfig(
    stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(message)s"
  )
  commands: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "resume": _resume,
    "status": _status,
    "cut": _cut,
    "report": _report,
    "explain": _explain,
    "replay": _replay,
    "bench": _bench,
    "chaos": _chaos,
    "simulate": _simulate,
    "simulate-protocol": _simulate_protocol,
    "plan": _plan,
  }
  if not args or args[0] in ("-h", "--help"):
    print(_USAGE, end="", file=sys.stdout if args else sys.stderr)
    return 0 if args else process.EXIT_USER_ERROR
  try:
    if args[0] not in commands:
      raise errors.UserError(
        f"diloco {args[0]}",
        "there is no such command",
        f"choose one of {', '.join(commands)}",
      )
    code = commands[args[0]](args[1:])
    sys.stdout.flush()  # a reader that has left is noticed here
    return code
  except errors.UserError as error:
    process.print_error(error)
    return process.EXIT_USER_ERROR
  except (errors.CorruptSnapshotError, errors.DetachedError) as error:
    process.print_error(error)
    return process.EXIT_FAILED
  except KeyboardInterrupt:
    return process.EXIT_FAILED
  except BrokenPipeError:
    # The reader has left; nothing may be flushed to it at exit either.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _train(argv: list[str]) -> int:
  # Imported here so that `status` and `report` start without JAX.
  from diloco import launch

  return launch.main(["diloco train", *argv])


def _resume(argv: list[str]) -> int:
  from diloco.controller import restorer

  parser = _parser("resume", "Go on with the run in a directory.")
  parser.add_argument("dir", type=pathlib.Path)
  parser.add_argument(
    "--cut", metavar="N", help="set the run back to cut N, or to the 'last' one"
  )
  parser.add_argument("--task", metavar="NAME", help=_TASK_HELP)
  args = parser.parse_args(argv)
  restorer.check_wanted(args.cut)
  config = process.read_config(args.dir)
  process.check_task(config, args.dir, args.task)
  from diloco import launch

  return launch.run(config.to_dict(), args.dir, as_json=args.json, cut=args.cut)


def _cut(argv: list[str]) -> int:
  from diloco.controller import cut_command

  parser = _parser("cut", "Take a consistent checkpoint of a run that is on.")
  parser.add_argument("dir", type=pathlib.Path)
  args = parser.parse_args(argv)
  process.read_config(args.dir)
  facts = cut_command.run(
    args.dir, told=lambda text: print(text, file=sys.stderr)
  )
  if args.json:
    _print_json(facts)
  return 0 if facts["status"] == "complete" else process.EXIT_FAILED


def _status(argv: list[str]) -> int:
  from diloco.report import live

  parser = _parser("status", "Show a live or dead run.")
  parser.add_argument("dir", type=pathlib.Path)
  parser.add_argument("--watch", action="store_true", help="until Ctrl-C")
  args = parser.parse_args(argv)
  process.read_config(args.dir)
  if args.watch:
    live.watch(args.dir)
  elif args.json:
    _print_json(live.status(args.dir))
  else:
    live.render_status(args.dir)
  return 0


@process.private_files()
def _report(argv: list[str]) -> int:
  from diloco.report import html, summary

  parser = _parser("report", "Make a run's summary.json and report.html again.")
  parser.add_argument("dir", type=pathlib.Path)
  args = parser.parse_args(argv)
  process.read_config(args.dir)
  run = summary.load(args.dir)
  facts = summary.write_summary(args.dir, run)
  path = html.write_report(args.dir, run)
  if gone := summary.lines_gone(args.dir, run):
    print(
      f"{args.dir / summary.FILE_NAME}: it was made from lines that are gone"
      f" ({gone[0]}, {len(gone)} files in all); it stays, and what is left is"
      f" summed up beside it, in files named .partial",
      file=sys.stderr,
    )
  if args.json:
    _print_json(facts)
  else:
    print(path)
  return 0


def _explain(argv: list[str]) -> int:
  from diloco.report import explain_text
  from diloco.tape import explain, reader

  parser = _parser("explain", "Tell why a round closed when it did.")
  parser.add_argument("dir", type=pathlib.Path)
  parser.add_argument("--fragment", type=int, required=True, metavar="P")
  parser.add_argument("--version", type=int, required=True, metavar="V")
  args = parser.parse_args(argv)
  config = process.read_config(args.dir)
  record = reader.read(args.dir, strict=True)
  facts = explain.explain(record, args.fragment, args.version)
  if args.json:
    _print_json(facts.to_json())
  else:
    print(explain_text.render(facts, config.sync))
  return 0


def _replay(argv: list[str]) -> int:
  # Imported here so that other commands start without JAX.
  from diloco.replay import command

  parser = _parser("replay", "Do a run again; compare every version by bits.")
  parser.add_argument("dir", type=pathlib.Path)
  parser.add_argument("--until_version", type=int, metavar="V")
  parser.add_argument("--task", metavar="NAME", help=_TASK_HELP)
  args = parser.parse_args(argv)
  outcome = command.run(
    args.dir,
    args.until_version,
    args.task,
    told=lambda text: print(text, file=sys.stderr),
  )
  if args.json:
    _print_json(outcome.to_json())
  else:
    print(command.describe(outcome))
  return process.EXIT_FAILED if outcome.difference else 0


def _bench(argv: list[str]) -> int:
  parser = _parser("bench", "Measure a part against its reference.")
  parts = (
    "island",
    "store",
    "merge",
    "takeover",
    "bookkeeping",
    "fragments",
  )
  parser.add_argument("part", choices=parts)
  args = parser.parse_args(argv)
  from experiments import benchmarks

  _print_json(benchmarks.run(args.part))
  return 0


def _chaos(argv: list[str]) -> int:
  parser = _parser("chaos", "Do faults to real runs, then check their books.")
  parser.add_argument("--workdir", type=pathlib.Path, required=True)
  parser.add_argument("--trials", type=int, default=40, help="faults in all")
  parser.add_argument("--seed", type=int, default=0, help="of the plan")
  parser.add_argument("--kinds", help="of faults, with commas; default: all")
  parser.add_argument("--faults_per_run", type=int, default=12)
  args = parser.parse_args(argv)
  from diloco.chaos import campaign, faults

  kinds = tuple(args.kinds.split(",") if args.kinds else faults.KINDS)
  result = campaign.Campaign(
    args.workdir, args.trials, args.seed, kinds, args.faults_per_run
  ).run()
  if args.json:
    _print_json(result)
  else:
    print(campaign.table(result))
  return 0 if result["passed"] else process.EXIT_FAILED


def _simulate(argv: list[str]) -> int:
  from diloco.planning import cli

  return cli.main(argv)


def _simulate_protocol(argv: list[str]) -> int:
  from diloco.verification import command

  parser = _parser(
    "simulate-protocol", "Run the protocol under faults in a simulated world."
  )
  command.add_arguments(parser)
  args = parser.parse_args(argv)
  code, facts = command.run(args)
  if args.json:
    _print_json(facts)
  return code


def _plan(argv: list[str]) -> int:
  from diloco.planning.planner import command

  return command.main(argv)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
  parser = _Parser(prog=f"diloco {command}", description=description)
  parser.add_argument(
    "--json", action="store_true", help="print one JSON object on stdout"
  )
  return parser


class _Parser(argparse.ArgumentParser):
  """Refuses in one line."""

  def error(self, message: str) -> Any:
    raise errors.UserError(self.prog, message, f"see '{self.prog} --help'")


def _print_json(facts: Mapping[str, Any]) -> None:
  json.dump(facts, sys.stdout, indent=2)
  print()


if __name__ == "__main__":
  sys.exit(main())
