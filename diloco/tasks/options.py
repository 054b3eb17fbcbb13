"""Checks of a task's options, which come from files and command lines."""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from diloco import errors


class Rule(NamedTuple):
  """What the numbers of some options must be.

  Attributes:
    names: of the options.
    holds: whether a value is allowed.
    words: what it must be, after "it must be".
  """

  names: tuple[str, ...]
  holds: Callable[[Any], bool]
  words: str


def at_least_one(*names: str) -> Rule:
  """At least 1, and finite."""
  return Rule(names, lambda x: 1 <= x < float("inf"), "at least 1")


def not_negative(*names: str) -> Rule:
  """At least 0, and finite."""
  return Rule(names, lambda x: 0 <= x < float("inf"), "at least 0")


def positive(*names: str) -> Rule:
  """Greater than 0, and finite."""
  return Rule(names, lambda x: 0 < x < float("inf"), "greater than 0")


def check_types(options: Any) -> None:
  """Compares a dataclass's values with the types of its defaults.

  Raises:
    UserError: one has another type.
  """
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    wanted = type(field.default)
    # JSON and command lines write 1.0 as 1.
    accepted = (int, float) if wanted is float else (wanted,)
    if isinstance(value, bool) or not isinstance(value, accepted):
      raise errors.UserError(
        f"{field.name}={value!r}",
        f"it is a {type(value).__name__}, not a {wanted.__name__}",
        f"give a {wanted.__name__}",
      )


def check_ranges(options: Any, rules: Iterable[Rule]) -> None:
  """Compares values with rules.

  Raises:
    UserError: one does not keep to its rule.
  """
  for rule in rules:
    for name in rule.names:
      value = getattr(options, name)
      if not rule.holds(value):
        raise errors.UserError(
          f"{name}={value}", f"it must be {rule.words}", f"change {name}"
        )


def check_choice(options: Any, name: str, choices: Collection[str]) -> None:
  """Looks an option's value up.

  Raises:
    UserError: it is not among the choices.
  """
  value = getattr(options, name)
  if value not in choices:
    raise errors.UserError(
      f"{name}={value!r}", "it is not known", f"use one of {', '.join(choices)}"
    )
