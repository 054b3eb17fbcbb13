"""Checks of a task's options, which come from files and command lines."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from diloco import errors

_INFINITE = float("inf")
_RANGES = {
  "at least 1": lambda x: 1 <= x < _INFINITE,
  "at least 0": lambda x: 0 <= x < _INFINITE,
  "greater than 0": lambda x: 0 < x < _INFINITE,
  "at least 0 and below 1": lambda x: 0 <= x < 1,
  "between 0 and 1": lambda x: 0 <= x <= 1,
  "between 0 and 1, exclusive": lambda x: 0 < x < 1,
}


def check(
  options: Any,
  ranges: Mapping[str, Collection[str]],
  choices: Mapping[str, Collection[str]],
) -> None:
  """Checks the values of a dataclass of options.

  Args:
    options: its fields have defaults, whose types the values must have.
    ranges: from what numbers must be, as `_RANGES` says it, to their names.
    choices: from the names of other options to what they may be.

  Raises:
    UserError: a value is of another type, out of range or unknown.
  """
  for field in dataclasses.fields(options):
    if field.default is not dataclasses.MISSING:
      _check_type(field.name, getattr(options, field.name), type(field.default))
  for words, names in ranges.items():
    for name in names:
      value = getattr(options, name)
      if not _RANGES[words](value):
        raise errors.UserError(
          f"{name}={value}", f"it must be {words}", f"change {name}"
        )
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
