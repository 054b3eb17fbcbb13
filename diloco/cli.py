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
  report    make a run's report again
  bench     measure a part: island, store or merge

'diloco COMMAND --help' tells more.
"""


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
    "report": _report,
    "bench": _bench,
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
  except errors.CorruptSnapshotError as error:
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
  parser = _parser("resume", "Go on with the run in a directory.")
  parser.add_argument("dir", type=pathlib.Path)
  args = parser.parse_args(argv)
  config = process.read_config(args.dir)
  from diloco import launch

  return launch.run(config.to_dict(), args.dir, as_json=args.json)


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


def _report(argv: list[str]) -> int:
  from diloco.report import html, summary

  parser = _parser("report", "Make a run's summary.json and report.html again.")
  parser.add_argument("dir", type=pathlib.Path)
  args = parser.parse_args(argv)
  process.read_config(args.dir)
  facts = summary.write_summary(args.dir)
  path = html.write_report(args.dir)
  if args.json:
    _print_json(facts)
  else:
    print(path)
  return 0


def _bench(argv: list[str]) -> int:
  parser = _parser("bench", "Measure a part against its reference.")
  parser.add_argument("part", choices=("island", "store", "merge"))
  args = parser.parse_args(argv)
  from experiments import benchmarks

  _print_json(benchmarks.run(args.part))
  return 0


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
