"""Grids of settings: what `get_sweep()` of a sweep file returns.

A *point* is a mapping from a field to its value; a sweep is a list of points.
A file that has `get_config` too sweeps training: fields are those of the
configuration, as on the command line but without `config.`:
`"sync.quorum"`, `"fleet.slices[0].topology"`. Without it, points are flags of
`diloco simulate`: `{"islands": 8, "elastic": False}` is `--islands=8
--noelastic`. The field `name` of a point names it.
"""

import builtins
import itertools
import math
import random as random_lib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diloco import errors, own_file

Point = dict[str, Any]
Draw = Callable[[random_lib.Random], Any]


def sweep(field: str, values: Iterable[Any]) -> list[Point]:
  """Returns a point for each value of a field."""
  return [{field: value} for value in values]


def product(*sweeps: Iterable[Point]) -> list[Point]:
  """Returns every combination of points; the last sweep turns fastest."""
  return [_joined(points) for points in itertools.product(*sweeps)]


def zip(*sweeps: Iterable[Point]) -> list[Point]:
  """Returns the first points together, the second ones together, and so on.

  Raises:
    UserError: they are not equally many, or set one field twice.
  """
  listed = [list(points) for points in sweeps]
  lengths = [len(points) for points in listed]
  if len(set(lengths)) > 1:
    raise errors.UserError(
      f"hyper.zip of {', '.join(map(str, lengths))} points",
      "each needs its partners",
      "give sweeps of one length, or hyper.product",
    )
  return [_joined(points) for points in builtins.zip(*listed, strict=True)]


def chain(*sweeps: Iterable[Point]) -> list[Point]:
  """Returns the points of all sweeps, one sweep after the other."""
  return list(itertools.chain(*sweeps))


def random(
  number: int, fields: Mapping[str, Draw], *, seed: int = 0
) -> list[Point]:
  """Returns points drawn at random, the same ones for the same seed.

  Args:
    number: of points.
    fields: how to draw each, for instance by `uniform`.
    seed: of the draws.
  """
  source = random_lib.Random(seed)
  return [
    {field: draw(source) for field, draw in fields.items()}
    for _ in range(number)
  ]


def uniform(low: float, high: float) -> Draw:
  """Draws evenly from [low, high], to four digits."""
  return lambda source: float(f"{source.uniform(low, high):.4g}")


def log_uniform(low: float, high: float) -> Draw:
  """Draws evenly in the logarithm from [low, high], to four digits."""
  ends = math.log(low), math.log(high)
  return lambda source: float(f"{math.exp(source.uniform(*ends)):.4g}")


def choice(*values: Any) -> Draw:
  """Draws one of the values."""
  return lambda source: source.choice(values)


def _joined(points: Iterable[Point]) -> Point:
  joined: Point = {}
  for point in points:
    for field, value in point.items():
      if field in joined:
        raise errors.UserError(
          f"the field {field!r}",
          "two sweeps that are combined both set it",
          "sweep it in one of them, or use hyper.chain",
        )
      joined[field] = value
  return joined


def load(path: str) -> tuple[list[Point], bool]:
  """Loads a sweep file.

  Returns:
    Its points, and whether they are configurations to train.

  Raises:
    UserError: there is no such file, or it holds no sweep.
  """
  what = f"--sweep={path}"
  with own_file.execute(what, path) as module:
    points = [dict(point) for point in module.get_sweep()]
    if wrong := [f for p in points for f in p if not isinstance(f, str)]:
      raise TypeError(f"a field is a text, not {wrong[0]!r}")
  if not points:
    raise errors.UserError(what, "it has no points", "return at least one")
  return points, hasattr(module, "get_config")
