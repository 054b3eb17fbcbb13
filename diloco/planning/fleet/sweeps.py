"""Grids of simulations, from a file.

The file has `get_sweep()`, which returns rows: mappings from flag to value.
`{"islands": 8, "elastic": False}` stands for `--islands=8 --noelastic`. What a
row does not name is as on the command line.
"""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

from diloco import errors


def load(path: str) -> list[dict[str, Any]]:
  """Loads the rows of a sweep.

  Raises:
    UserError: there is no such file, or it holds no sweep.
  """
  what = f"--sweep={path}"
  if not pathlib.Path(path).is_file():
    raise errors.UserError(what, "there is no such file", "check the path")
  spec = importlib.util.spec_from_file_location("diloco_sweep", path)
  if spec is None or spec.loader is None:
    raise errors.UserError(what, "it is no Python file", "name a .py file")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    rows = [dict(row) for row in module.get_sweep()]
  except Exception as error:  # whatever the user's file does wrong
    text = " ".join(str(error).split())
    raise errors.UserError(
      what, f"{type(error).__name__}: {text}", "correct the file"
    ) from error
  if not rows:
    raise errors.UserError(what, "it has no rows", "return at least one")
  return rows


def flags(row: Mapping[str, Any]) -> list[str]:
  """Returns a row as command line flags."""
  found = []
  for name, value in row.items():
    if value is True:
      found.append(f"--{name}")
    elif value is False:
      found.append(f"--no{name}")
    elif isinstance(value, list | tuple):
      found.append(f"--{name}={','.join(map(str, value))}")
    else:
      found.append(f"--{name}={value}")
  return found


def text(facts: Mapping[str, Any]) -> str:
  """Returns a table of a sweep's rows."""
  lines = ["goodput [low, high]       uptime  islands a merge  given"]
  for row in facts["rows"]:
    found = row["result"]
    good = found["goodput"]
    merged = found["contributors_per_merge"]["mean"]
    given = " ".join(f"{name}={value}" for name, value in row["given"].items())
    lines.append(
      f"{100 * good['mean']:6.2f} [{100 * good['low']:6.2f},"
      f" {100 * good['high']:6.2f}]  {100 * found['uptime']['mean']:6.2f}"
      f"  {'-' if merged is None else f'{merged:.2f}':>15}  {given}"
    )
  return "\n".join(lines)
