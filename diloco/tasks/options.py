"""Checks of a task's options, which come from files and command lines."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from diloco import errors


def check(
  options: Any,
  ranges: Mapping[str, Collection[str]],
  choices: Mapping[str, Collection[str]],
) -> None:
  """Checks the values of a dataclass of options.

  Args:
    options: its fields have defaults, whose types the values must have.
    ranges: from what numbers must be, as `errors.RULES` has it, to their names.
    choices: from the names of other options to what they may be.

  Raises:
    UserError: a value is of another type, out of range or unknown.
  """
  for field in dataclasses.fields(options):
    if field.default is not dataclasses.MISSING:
      _check_type(field.name, getattr(options, field.name), type(field.default))
  errors.check(options, ranges, equals="=")
  for name, known in choices.items():
    value = getattr(options, name)
    if value not in known:
      raise errors.UserError(
        f"{name}={value!r}", "it is not known", f"use one of {', '.join(known)}"
      )


def _check_type(name: str, value: Any, wanted: type) -> None:
  # JSON and command lines write 1.0 as 1.
  accepted = (int, float) if wanted is float else (wanted,)
  is_number = not isinstance(value, bool) or wanted is bool
  if not is_number or not isinstance(value, accepted):
    raise errors.UserError(
      f"{name}={value!r}",
      f"it is a {type(value).__name__}, not a {wanted.__name__}",
      f"give a {wanted.__name__}",
    )
