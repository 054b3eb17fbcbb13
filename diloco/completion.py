"""Shell completion, made from the table of commands."""

from collections.abc import Iterator

from diloco import config as config_lib
from diloco import process
from diloco.commands import entry, table

_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit\n"
_ZSH += "bashcompinit\n"
# What it does not know is a name of a file.
_SCRIPT = """\
_diloco() {{
  local words="" cur="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" = 1 ]; then
    words="{names}"
  else
    case "${{COMP_WORDS[1]}} $cur" in
{cases}
    esac
  fi
  COMPREPLY=( $(compgen -W "$words" -- "$cur") )
  case "${{COMPREPLY[*]}}" in
    *=) compopt -o nospace 2>/dev/null ;;
  esac
}}
complete -o default -F _diloco diloco
"""


def script(shell: str) -> str:
  """Returns what a shell must read to complete command lines of `diloco`.

  Args:
    shell: "bash" or "zsh".
  """
  names = dict.fromkeys(one.name.split()[0] for one in table.TABLE)
  cases = []
  for name in names:
    words = sorted(set(_words(name)))
    flags = [word for word in words if word.startswith("-")]
    others = [word for word in words if not word.startswith("-")]
    cases.append(f'      "{name} -"*) words="{" ".join(flags)}" ;;')
    if others:
      cases.append(f'      "{name} "*) words="{" ".join(others)}" ;;')
  body = _SCRIPT.format(names=" ".join(names), cases="\n".join(cases))
  return _ZSH + body if shell == "zsh" else body


def _words(name: str) -> Iterator[str]:
  """Flags of a command in all its modes, and what it may be told to do."""
  for command in table.TABLE:
    if command.name.split()[0] == name:
      yield from command.name.split()[1:]
      for action in command.make_parser()._actions:
        end = "" if action.nargs == 0 else "="
        if entry.CONFIG_FLAG in action.option_strings:
          fields = process.flat(config_lib.RunConfig().to_dict())
          yield from (f"--{field}=" for field, _ in fields)
        elif action.option_strings:
          yield from (f"{flag}{end}" for flag in action.option_strings)
        else:
          yield from map(str, action.choices or ())
