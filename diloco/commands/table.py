"""All commands, by what a user wants: behind usage, help and completion."""

from collections.abc import Sequence

from diloco import errors
from diloco.commands import entry, runs, tools

GROUPS = {
  "Train": runs.TRAIN,
  "Look at runs": runs.LOOK,
  "Take something away from a run": runs.AWAY,
  "Look ahead before renting anything": tools.AHEAD,
  "Check": tools.CHECK,
  "Measure": tools.MEASURE,
  "At the prompt": tools.SHELL,
}
TABLE = tuple(command for group in GROUPS.values() for command in group)


def find(argv: Sequence[str]) -> entry.Command:
  """The command, in the mode, that a command line asks for; refuses others."""
  fitting = [
    command
    for command in TABLE
    if command.name.split()[0] == argv[0]
    and set(command.name.split()[1:]) <= set(argv)
  ]
  if not fitting:
    names = dict.fromkeys(command.name.split()[0] for command in TABLE)
    raise errors.UserError(
      f"diloco {argv[0]}",
      "there is no such command",
      f"choose one of {', '.join(names)}",
    )
  return max(fitting, key=lambda command: len(command.name))


def usage() -> str:
  """All commands, by what a user wants."""
  lines = ["usage: diloco COMMAND [ARGS]"]
  for title, group in GROUPS.items():
    lines += ["", title]
    lines += [f"  {command.name:23} {command.what}" for command in group]
  lines += ["", "'diloco COMMAND --help' tells more, with examples."]
  return "\n".join(lines) + "\n"
