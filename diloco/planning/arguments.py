"""Command line arguments of the simulators, refused in one line."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from diloco import errors


class Parser(argparse.ArgumentParser):
  """Refuses in one line; takes no shortened names."""

  def __init__(self, prog: str, description: str):
    """Args: the command's name, and what it does."""
    super().__init__(prog=prog, description=description, allow_abbrev=False)
    self.add_argument(
      "--json", action="store_true", help="print one JSON object on stdout"
    )

  def error(self, message: str) -> Any:
    """Raises instead of printing usage and leaving."""
    raise errors.UserError(self.prog, message, f"see '{self.prog} --help'")


def number(low: float, *, above: bool = False) -> Any:
  """A finite number of at least (or above) `low`, for `add_argument(type=)`."""
  return _checked(float, low, above)


def whole(low: int) -> Any:
  """A whole number of at least `low`; 1e9 is one."""
  return _checked(_whole, low, False)


def numbers(low: float, *, above: bool = False) -> Any:
  """Several numbers, with commas between them."""
  one = number(low, above=above)

  def convert(text: str) -> tuple[float, ...]:
    return tuple(one(part) for part in text.split(","))

  return convert


def _whole(text: str) -> int:
  value = float(text)
  if not value.is_integer():
    raise ValueError(text)
  return int(value)


def _checked(kind: Callable[[str], float], low: float, above: bool) -> Any:
  what = "a whole number" if kind is _whole else "a number"

  def convert(text: str) -> float:
    try:
      value = kind(text)
    except (ValueError, OverflowError):
      value = math.nan
    good = low < value if above else low <= value
    if not good or not math.isfinite(value):
      rule = f"must be {what} {'above' if above else 'of at least'} {low:g}"
      raise argparse.ArgumentTypeError(f"{text!r} {rule}")
    return value

  return convert
