"""Frozen dataclasses from untyped mappings, such as a `ConfigDict`.

Whatever comes in, either the dataclass comes out or a `UserError` that names
the field, its value and the rule.
"""

import contextlib
import dataclasses
import decimal
import difflib
import math
import reprlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from diloco import errors

T = TypeVar("T")

_MAX_INT = 2**63 - 1  # integers meet int64 in NumPy, JAX and TensorStore
_MAX_DEPTH = 16  # of nested task options
_KINDS = {
  bool: "True or False",
  int: "a whole number below 2^63, as 1500000, 1e6 or 2.4M",
  float: "a finite number",
  str: "a text",
}
_FLAT = reprlib.Repr()  # values in messages: short, whatever they hold
_FLAT.maxlevel, _FLAT.maxdict, _FLAT.maxtuple, _FLAT.maxlist = 3, 8, 8, 8
_FLAT.maxstring = _FLAT.maxother = _FLAT.maxlong = 80
_SCALES = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12}  # powers of ten
_DIGITS = 400  # longer integers cannot even be printed


def show(value: Any) -> str:
  """Any value at all, on one short line."""
  if type(value) is int and value.bit_length() > _DIGITS:
    return f"an integer of {value.bit_length()} bits"
  if is_config_dict(value):
    return show(_as_dict(value))
  try:
    return " ".join(_FLAT.repr(plain(value)).split())
  except (ValueError, TypeError, RecursionError):
    return f"a {type(value).__name__}"


def is_config_dict(value: Any) -> bool:
  """Whether it is one of ml_collections, which most processes do without."""
  found = sys.modules.get("ml_collections")
  kind = getattr(found, "ConfigDict", None)  # it may be half imported
  return kind is not None and isinstance(value, kind)


def _as_dict(values: Any) -> dict[str, Any]:
  return {name: values[name] for name in values}


def number(text: str) -> decimal.Decimal:
  """Reads a number as people write it: 1000, 1_000, 1e6, 2.4M, 7B.

  Raises:
    ValueError: it is none.
  """
  scale = _SCALES.get(text[-1:].upper(), 0)
  try:
    value = decimal.Decimal(text[:-1] if scale else text).scaleb(scale)
  except decimal.DecimalException as error:
    raise ValueError(text) from error
  if not value.is_finite() or abs(value.adjusted()) > _DIGITS:
    raise ValueError(text)
  return value


def whole(value: str | float) -> int:
  """Reads a whole number, exactly.

  Raises:
    ValueError: it is none.
  """
  found = number(str(value))
  if found != found.to_integral_value():
    raise ValueError(str(value))
  return int(found)


def build(kind: type[T], values: Any, where: str) -> T:
  """Builds a frozen dataclass, and those within it, from mappings.

  Args:
    kind: the dataclass; its fields are dataclasses, tuples of them, literals
      of text, free mappings, texts, numbers and truth values.
    values: nested mappings, or dataclasses.
    where: what `values` is called in messages.

  Raises:
    UserError: a field is unknown or missing, or its value has another type.
  """
  if is_config_dict(values):
    values = _as_dict(values)
  if isinstance(values, kind):
    # Whoever built it has not been through this module.
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = {name: getattr(values, name) for name in names}
  if not isinstance(values, Mapping):
    raise errors.UserError(
      f"{where} = {show(values)}",
      "it must be a group of fields",
      f"write {where} as a ConfigDict or dict",
    )
  hints = get_type_hints(kind)
  for name in values:
    if name not in hints:
      raise unknown_field(where, name, list(hints))
  required = {
    f.name
    for f in dataclasses.fields(kind)  # type: ignore[arg-type]
    if f.default is dataclasses.MISSING
    and f.default_factory is dataclasses.MISSING
  }
  for name in sorted(required - set(values)):
    raise errors.UserError(
      where, f"field {name} is missing", f"set {where}.{name}"
    )
  return kind(
    **{n: _convert(hints[n], v, f"{where}.{n}") for n, v in values.items()}
  )


def unknown_field(
  where: str, name: object, known: Sequence[str]
) -> errors.UserError:
  """The refusal of a field that does not exist; names the nearest."""
  near = difflib.get_close_matches(_label(name), known, n=1, cutoff=0.5)
  return errors.UserError(
    f"{where}.{_label(name)}",
    "there is no such field",
    f"did you mean {where}.{near[0]}?"
    if near
    else f"{where} has {', '.join(known)}",
  )


def _convert(hint: Any, value: Any, where: str) -> Any:
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    return build(hint, value, where)
  origin, args = get_origin(hint), get_args(hint)
  if origin is types.UnionType:  # `kind | None`
    return None if value is None else _convert(args[0], value, where)
  if origin is tuple:
    expected = "a list"
    if isinstance(value, list | tuple):
      items = enumerate(value)
      return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in items)
  elif origin is Literal:
    expected = f"one of {', '.join(args)}"
    if isinstance(value, str) and value in args:
      return value
  elif origin is Mapping:
    expected = "a group of options"
    if isinstance(value, Mapping) or is_config_dict(value):
      return _convert_json(value, where, depth=0)
  else:
    expected = _KINDS[hint]
    if hint is int and type(value) in (float, str):
      with contextlib.suppress(ValueError):
        value = whole(value)
    if _is_number(value) and hint in (float, type(value)):
      return hint(value)
    if hint in (bool, str) and type(value) is hint:
      return value
  raise errors.UserError(
    f"{where} = {show(value)}", f"it must be {expected}", _remedy(where, value)
  )


def _is_number(value: Any) -> bool:
  if type(value) is int:
    return abs(value) <= _MAX_INT
  return type(value) is float and math.isfinite(value)


def _remedy(where: str, value: Any) -> str:
  if hasattr(value, "tolist"):  # of NumPy or JAX, of which not all survives
    return "give Python's own, by .item() or .tolist()"
  return f"change {where}"


def _convert_json(value: Any, where: str, depth: int) -> Any:
  """Task options are free, but must survive config.json unchanged."""
  if is_config_dict(value):
    value = _as_dict(value)
  if isinstance(value, Mapping) and depth < _MAX_DEPTH:
    for name in value:
      if not isinstance(name, str):
        raise errors.UserError(
          f"{where}[{show(name)}]", "names are texts", "use a text as name"
        )
    return {
      n: _convert_json(v, f"{where}.{_label(n)}", depth + 1)
      for n, v in value.items()
    }
  if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
    items = enumerate(value)
    return [_convert_json(v, f"{where}[{i}]", depth + 1) for i, v in items]
  if value is None or type(value) in (bool, str) or _is_number(value):
    return value
  raise errors.UserError(
    f"{where} = {show(value)}",
    "options are finite numbers, texts, True, False, None, lists and groups",
    _remedy(where, value),
  )


def plain(value: Any) -> Any:
  """Dataclasses, mappings and tuples as plain JSON values."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return plain(dataclasses.asdict(value))
  if is_config_dict(value):
    return plain(_as_dict(value))
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [plain(v) for v in value]
  return value


def _label(name: object) -> str:
  """A field's name as it was written, unless that would break the line."""
  if isinstance(name, str) and name.isprintable() and len(name) <= 80:
    return name
  return show(name)


def finite(value: Any) -> Any:
  """Returns plain JSON values in which what is not finite is None."""
  if isinstance(value, dict):
    return {key: finite(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [finite(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
