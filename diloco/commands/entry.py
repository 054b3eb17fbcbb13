"""What an entry of the table of commands is, and the flags that many share."""

import argparse
import importlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco import arguments

Flag = tuple[str, dict[str, Any]]


def flag(name: str, what: str, **options: Any) -> Flag:
  """A flag or an argument, and what it is for.

  Args:
    name: "--flag=VALUE", "--switch", "argument" or "argument=SHOWN".
    what: its help.
    **options: what else `argparse.ArgumentParser.add_argument` is to know.
  """
  name, _, shown = name.partition("=")
  if shown:
    options["metavar"] = shown
  elif name.startswith("--") and not options:
    options["action"] = "store_true"
  return name, {"help": what, **options}


class Command(NamedTuple):
  """A command, or one of its modes, which a switch in the name chooses."""

  name: str  # what is typed, such as "status" or "simulate --bandwidth"
  what: str  # one sentence, for usage and help
  run: str  # "module:function", from the parsed flags to the exit code
  examples: tuple[str, ...] = ()  # whole command lines, which work when copied
  flags: tuple[Flag, ...] = ()  # its flags
  more: str = ""  # further help
  # "module:function" that makes the parser, where `flags` cannot know it.
  # Such a command parses for itself.
  parser: str = ""
  # It is given its arguments as they are, and parses for itself.
  raw: bool = False

  def make_parser(self) -> arguments.Parser:
    """Returns the parser of its flags."""
    if self.parser:
      made: arguments.Parser = named(self.parser)()
      return made
    description = f"{self.what[0].upper()}{self.what[1:]}.\n\n{self.more}"
    made = arguments.Parser(
      f"diloco {self.name}", description.strip(), self.examples
    )
    for name, options in self.flags:
      made.add_argument(name, **options)
    return made

  def call(self, argv: Sequence[str]) -> int:
    """Runs it; returns the exit code."""
    raw = self.raw or bool(self.parser)
    parsed = argparse.Namespace()
    if not raw or {"-h", "--help"} & set(argv):
      parser = self.make_parser()
      parsed, rest = parser.parse_known_args(list(argv))
      parsed.overrides = rest if FIELD in self.flags else []
      if len(parsed.overrides) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
      for name, value in vars(parsed).items():
        setattr(parsed, name, _followed(value))
    code: int = named(self.run)(list(argv) if raw else parsed)
    return code


def named(place: str) -> Callable[..., Any]:
  """The function that "module:function" names."""
  module, _, function = place.partition(":")
  found: Callable[..., Any] = getattr(importlib.import_module(module), function)
  return found


CONFIG_FLAG = "--config.FIELD"  # stands for every field's
FIELD = flag(
  f"{CONFIG_FLAG}=VALUE",
  "sets one field, whether the file does or not; docs/glossary.md lists them",
)


def here(text: str) -> pathlib.Path:
  """A directory of this machine, for what does not only look at a run."""
  if "://" in text:
    raise argparse.ArgumentTypeError(
      f"{text!r} is the URL of a store; only the directory will do where the"
      " run was begun"
    )
  return pathlib.Path(text)


def there(text: str) -> pathlib.Path | str:
  """The directory of a run, or a URL as it is."""
  return text if "://" in text else pathlib.Path(text)


class _Url(str):
  """Of a run's store, where a directory will do as well."""


def anywhere(text: str) -> pathlib.Path | _Url:
  """The directory of a run, or a URL that `Command.call` follows."""
  return _Url(text) if "://" in text else pathlib.Path(text)


def _followed(value: Any) -> Any:
  """What was given; in place of a run's URL a directory with its files."""
  if isinstance(value, list):
    return [_followed(one) for one in value]
  if not isinstance(value, _Url):
    return value
  from diloco import logbook  # and TensorStore with it

  return logbook.fetch(value)


DIR = flag("dir", "directory of a run", type=here)
RUN = flag(
  "dir=RUN", "directory of a run, or the URL of its config.store", type=anywhere
)
TASK = flag(
  "--task=NAME", "the task of a run from elsewhere, if you trust its module"
)

WHICH = (
  flag(
    "--version=V",
    "global version of every fragment; default: the newest of each",
    type=int,
  ),
  flag("--cut=N", "take those of cut N", type=int),
)
