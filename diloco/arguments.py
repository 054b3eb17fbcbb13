"""Command line arguments, refused in one line."""

import argparse
import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from diloco import errors, typed

_MOST_IN_USAGE = 16  # flags
_MOST = 10**18  # of whole numbers, which are int64 somewhere


class _Formatter(
  argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
  """Keeps the lines of descriptions, and tells defaults worth telling."""

  def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
    return "N" if action.type else action.dest.upper()

  def _get_help_string(self, action: argparse.Action) -> str | None:
    if isinstance(action.default, bool) or action.default in (None, ""):
      return action.help
    return super()._get_help_string(action)

  def add_usage(self, usage: Any, actions: Any, *rest: Any) -> None:
    """Adds a line with all flags, unless these would fill a screen."""
    if len(actions := list(actions)) > _MOST_IN_USAGE:
      usage = "%(prog)s [--FLAG=VALUE ...]"
    super().add_usage(usage, actions, *rest)


class Parser(argparse.ArgumentParser):
  """Refuses in one line; takes no shortened names; shows examples."""

  def __init__(self, prog: str, description: str, examples: Sequence[str] = ()):
    """Examples are whole command lines."""
    self.examples = tuple(examples)
    super().__init__(
      prog=prog,
      description=description,
      epilog="\n  ".join(("examples:", *examples)) if examples else None,
      formatter_class=_Formatter,
      allow_abbrev=False,
    )
    self.add_argument(
      "--json", action="store_true", help="print one JSON object on stdout"
    )

  def error(self, message: str) -> Any:
    """Raises instead of printing usage and leaving."""
    remedy = f"see '{self.prog} --help'"
    what, _, words = message.partition("unrecognized arguments: ")
    if words and not what:
      near = difflib.get_close_matches(
        words.split()[0].partition("=")[0], self._option_string_actions, n=1
      )
      remedy = f"did you mean {near[0]}?" if near else remedy
    raise errors.UserError(self.prog, message, remedy)


def answer(
  args: argparse.Namespace, facts: Any, text: str | None = None
) -> None:
  """Prints facts as one JSON object if that is asked for, else any text.

  JSON has no NaN and no infinity; such a number is null.
  """
  if args.json:
    text = json.dumps(typed.finite(facts), indent=2, allow_nan=False)
  if text is not None:
    print(text.removesuffix("\n"))


def words(kind: type) -> dict[str, str]:
  """What a dataclass says of its fields under `Attributes:`, by name."""
  text = inspect.getdoc(kind) or ""
  found = re.findall(
    r"^  (\w+): (.*(?:\n    .*)*)", text.partition("Attributes:")[2], re.M
  )
  return {name: " ".join(told.split()).rstrip(".") for name, told in found}


def amount(text: str) -> float:
  """A number whose range whoever takes it tells, and whose size is one."""
  try:
    value = float(text)
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None
  if math.isfinite(value) and not errors.is_amount(value):
    raise argparse.ArgumentTypeError(f"{text!r}: {errors.NO_AMOUNT}")
  return value


def number(low: float, *, above: bool = False) -> Any:
  """A finite number of at least (or above) `low`, for `add_argument(type=)`."""
  return _checked(lambda text: amount(f"{typed.number(text)}"), low, above)


def whole(low: int, high: int = _MOST) -> Any:
  """A whole number of at least `low`, at most `high`; 1e9 and 7B are."""
  return _checked(typed.whole, low, False, high)


def numbers(low: float, *, above: bool = False) -> Any:
  """Several numbers, with commas between them."""
  one = number(low, above=above)

  def convert(text: str) -> tuple[float, ...]:
    return tuple(one(part) for part in text.split(","))

  return convert


def _checked(
  kind: Callable[[str], float],
  low: float,
  above: bool,
  high: float = math.inf,
) -> Any:
  what = "a whole number" if kind is typed.whole else "a number"

  def convert(text: str) -> float:
    try:
      value = kind(text)
    except (ValueError, OverflowError):
      value = math.nan
    good = low < value if above else low <= value <= high
    if not good or not math.isfinite(value):
      rule = f"must be {what} {'above' if above else 'of at least'} {low:g}"
      told = high < _MOST or value > high
      rule += f" and at most {high}" if told else ""
      raise argparse.ArgumentTypeError(f"{text!r} {rule}")
    return value

  return convert
