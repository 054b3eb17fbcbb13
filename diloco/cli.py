"""The `diloco` command; thin.

Exit codes: 0 done, 1 failed run, 2 bad input (one line on stderr).
"""

import argparse
import contextlib
import dataclasses
import errno
import json
import logging
import os
import sys
from collections.abc import Sequence

import diloco
from diloco import arguments, errors, process
from diloco.commands import table


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit code."""
  args = list(sys.argv[1:] if argv is None else argv)
  logging.basicConfig(
    stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(message)s"
  )
  if not args or args[0] in ("-h", "--help"):
    usage = table.usage()
    print(usage, end="", file=sys.stdout if args else sys.stderr)
    return 0 if args else process.EXIT_USER_ERROR
  if args[0] == "--version":
    print(f"diloco {diloco.__version__}")
    return 0
  try:
    command = table.find(args)
    code = command.call(args[1:])
    sys.stdout.flush()  # a reader that has left is noticed here
    return code
  except errors.UserError as error:
    process.print_error(error)
    return process.EXIT_USER_ERROR
  except errors.StoreError as error:
    why = errors.of_store(error)
    process.print_error(
      f"{why}; check that the store can be reached, and that"
      " endpoint, bucket and credentials are right"
    )
    return process.EXIT_FAILED
  except (errors.DetachedError, errors.PlainError) as error:
    process.print_error(error)
    return process.EXIT_FAILED
  except KeyboardInterrupt:
    return process.EXIT_FAILED
  except BrokenPipeError:
    # The reader has left; nothing may be flushed to it at exit either.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except OSError as error:
    place = error.filename if error.filename2 is None else error.filename2
    remedy = "see that it is there and may be read and written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      remedy = "make room on its disk; a run goes on with 'diloco resume'"
    process.print_error(
      f"{place or f'diloco {args[0]}'}: {error.strerror or error}; {remedy}"
    )
    return process.EXIT_USER_ERROR


def resume(args: argparse.Namespace) -> int:
  """Goes on with a run; returns the exit code."""
  from diloco.controller import restorer

  restorer.check_wanted(args.cut)
  if isinstance(args.dir, str):
    return _resume_at(args.dir, args)
  if args.workdir:
    raise errors.UserError(
      f"--workdir={args.workdir}",
      "only a run that is given by the URL of its store moves",
      "leave it out",
    )
  config = process.read_config(args.dir)
  process.check_task(config, args.dir, args.task)
  # Imported here so that other commands start without JAX.
  from diloco import launch

  values = launch.overridden(config, args.overrides)
  return launch.run(
    values, args.dir, as_json=args.json, quiet=args.quiet, cut=args.cut
  )


def _resume_at(url: str, args: argparse.Namespace) -> int:
  """Goes on with a run that its store knows, in a new directory."""
  from diloco import launch, moving

  if not args.workdir:
    raise errors.UserError(
      url,
      "it is the URL of a store, and a run goes on in a directory",
      "add --workdir=NEW, or name the directory where the run was begun",
    )
  found = moving.look(url, args.workdir, args.task)
  values = launch.overridden(found.config, args.overrides)
  cut = moving.bring(found, args.workdir, args.cut)
  return launch.run(
    values, args.workdir, as_json=args.json, quiet=args.quiet, cut=cut
  )


def change(args: argparse.Namespace) -> int:
  """Changes settings of a run that is on; returns the exit code."""
  from diloco import launch
  from diloco.controller import change as change_lib

  values = launch.overridden(process.read_config(args.dir), args.overrides)
  changes = change_lib.request(args.dir, values)
  arguments.answer(args, changes)
  for name, (before, after) in changes.items():
    print(f"config.{name}: {before} -> {after}", file=sys.stderr)
  if not changes:
    print("nothing changes: the run has these settings", file=sys.stderr)
  return 0


def cut(args: argparse.Namespace) -> int:
  """Takes a cut of a run that is on; returns the exit code."""
  from diloco.controller import cut_command

  patience_secs = process.read_config(args.dir).controller.patience_secs
  facts = cut_command.run(
    args.dir, patience_secs, lambda text: print(text, file=sys.stderr)
  )
  arguments.answer(args, facts)
  return 0 if facts["status"] == "complete" else process.EXIT_FAILED


def ls(args: argparse.Namespace) -> int:
  """Lists runs; returns the exit code."""
  from diloco.report import listing

  found = listing.runs(args.dir)
  if args.json or found:
    arguments.answer(args, {"runs": found}, listing.show(found))
  else:
    print(f"there is no run below {args.dir}", file=sys.stderr)
  return 0


def status(args: argparse.Namespace) -> int:
  """Shows a run; returns the exit code."""
  from diloco import logbook
  from diloco.report import live, roster
  from diloco.report import status as status_lib

  process.read_config(args.dir)
  if args.watch:
    live.watch(args.dir, logbook.refresher(args.dir))
    return 0
  roles = roster.look(args.dir)
  if args.json:
    arguments.answer(args, status_lib.status(args.dir) | {"roles": roles})
  else:
    live.render_status(args.dir)
    print(roster.show(roles))
  return 0


@process.private_files()
def report(args: argparse.Namespace) -> int:
  """Makes summary and report again; returns the exit code."""
  from diloco.report import html, summary

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
  arguments.answer(args, facts, str(path))
  return 0


def explain(args: argparse.Namespace) -> int:
  """Tells why a round closed; returns the exit code."""
  from diloco.report import explain_text, roster
  from diloco.tape import explain as explain_lib
  from diloco.tape import reader

  config = process.read_config(args.dir)
  record = reader.read(args.dir, strict=True)
  facts = explain_lib.explain(record, args.fragment, args.version)
  text = explain_text.render(facts, config.sync)
  roles = None
  with contextlib.suppress(errors.UserError):  # the store is another run's
    roles = roster.look(args.dir)
  told = dataclasses.asdict(facts) | {"roles": roles}
  arguments.answer(args, told, f"{text}\n\n{roster.show(roles)}".rstrip())
  return 0


def export(args: argparse.Namespace) -> int:
  """Writes a run's parameters; returns the exit code."""
  from diloco.workbench import export as export_lib
  from diloco.workbench import opened

  run = opened.Run(args.dir)
  facts = export_lib.export(run, args.format, args.out, args.version, args.cut)
  arguments.answer(args, facts, export_lib.describe(facts))
  return 0


def evaluate(args: argparse.Namespace) -> int:
  """Evaluates a run's parameters; returns the exit code."""
  from diloco.workbench import models, opened

  model = models.load(opened.Run(args.dir), args.version, args.cut, args.task)
  facts = models.evaluate(model, args.batches)
  arguments.answer(args, facts, models.describe(facts))
  return 0


def sample(args: argparse.Namespace) -> int:
  """Lets a run's parameters write; returns the exit code."""
  from diloco.workbench import models, opened

  model = models.load(opened.Run(args.dir), args.version, args.cut, args.task)
  told = models.sample(
    model, args.prompt, args.tokens, args.temperature, args.seed
  )
  given = models.shown(args.prompt.encode(errors="replace"))
  facts = {"versions": model.versions, "text": told}
  arguments.answer(args, facts, f"{given}{told}\n")
  return 0


def replay(args: argparse.Namespace) -> int:
  """Does a run again; returns the exit code."""
  # Imported here so that other commands start without JAX.
  from diloco.replay import replayer

  outcome = replayer.run(
    args.dir,
    args.until_version,
    args.task,
    told=lambda text: print(text, file=sys.stderr),
  )
  arguments.answer(args, outcome.to_json(), replayer.describe(outcome))
  return process.EXIT_FAILED if outcome.difference else 0


def bench(args: argparse.Namespace) -> int:
  """Measures a part; returns the exit code."""
  from experiments import benchmarks

  print(json.dumps(benchmarks.run(args.part), indent=2))
  return 0


def chaos(args: argparse.Namespace) -> int:
  """Does faults to real runs; returns the exit code."""
  from diloco.chaos import campaign, faults

  kinds = tuple(args.kinds.split(",") if args.kinds else faults.KINDS)
  result = campaign.Campaign(
    args.workdir,
    args.trials,
    args.seed,
    kinds,
    args.faults_per_run,
    args.engine,
  ).run()
  arguments.answer(args, result, campaign.table(result))
  return 0 if result["passed"] else process.EXIT_FAILED


def simulate_protocol(args: argparse.Namespace) -> int:
  """Runs simulated schedules; returns the exit code."""
  from diloco.verification import command

  code, facts = command.run(args)
  arguments.answer(args, facts)
  return code


def completion(args: argparse.Namespace) -> int:
  """Prints a shell's completion; returns the exit code."""
  from diloco import completion as completion_lib

  print(completion_lib.script(args.shell), end="")
  return 0


if __name__ == "__main__":
  sys.exit(main())
