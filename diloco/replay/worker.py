"""Process that lives islands' lives again: `python -m diloco.replay.worker`.

It holds what each island held, less its threads, and does what it is told on
its standard input, one JSON line a command, each answered by one line. Tensors
go through a scratch store. All its lives ran under the same settings.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
import pathlib
import sys
from typing import Any

from diloco import errors, process
from diloco.replay import script


def main(argv: list[str] | None = None) -> int:
  """Answers commands until there are none; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--run_dir", type=pathlib.Path, required=True)
  parser.add_argument("--scratch", type=pathlib.Path, required=True)
  parser.add_argument("--topology", required=True)
  parser.add_argument("--total_tokens", type=int, required=True)
  parser.add_argument("--present", type=json.loads, default=())
  args = parser.parse_args(argv)
  logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
  # What a library prints must not get among the answers.
  answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  # JAX reads its environment once, which is in place by now.
  from diloco.islands import compilation
  from diloco.replay import performer
  from diloco.snapshots import store

  compilation.use_cache(args.scratch / "compilation_cache")
  config = process.read_config(args.run_dir)
  config = dataclasses.replace(config, total_tokens=args.total_tokens)

  def begin(life: script.LifeId) -> performer.Performer:
    return performer.Performer(
      config,
      life,
      tuple(int(n) for n in args.topology.split("x")),
      args.scratch,
      store.SnapshotStore(process.store_url(args.run_dir)),
      args.present,
    )

  lives: dict[script.LifeId, performer.Performer] = {}
  for line in sys.stdin:
    command = json.loads(line)
    life = script.LifeId(*command.pop("life"))
    if life not in lives:
      lives[life] = begin(life)
    answers.write(json.dumps(_answer(lives[life], command)) + "\n")
    answers.flush()
    if command["do"] == "end":
      del lives[life]
  return 0


def _answer(life: Any, command: dict[str, Any]) -> dict[str, Any]:
  try:
    match command["do"]:
      case "initial":
        life.initial(command["fragment"])
      case "begin":
        life.begin(_beginning(command))
      case "advance":
        operations = [script.from_json(o) for o in command["operations"]]
        norms = life.advance(operations)
        return {"norms": {k: math.hypot(*n) for k, n in norms.items()}}
      case "end":
        life.close()
  except (errors.UserError, errors.CorruptSnapshotError) as error:
    return {"error": str(error)}
  return {}


def _beginning(command: dict[str, Any]) -> script.Beginning:
  def state(values: list[int] | None) -> script.StateId | None:
    return script.StateId(*values) if values else None

  return script.Beginning(
    step=command["step"],
    versions=tuple(command["versions"]),
    first_steps=tuple(command["first_steps"]),
    saved=state(command["saved"]),
    lent=state(command["lent"]),
    answers=tuple(command["answers"]),
  )


if __name__ == "__main__":
  sys.exit(main())
