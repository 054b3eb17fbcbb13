"""Grids of simulations: points of a sweep as command lines, and their table.

What a point does not name is as on the command line.
"""

from collections.abc import Mapping
from typing import Any


def flags(row: Mapping[str, Any]) -> list[str]:
  """Returns a row as command line flags."""
  found = []
  for name, value in row.items():
    if name == "name":  # of the point
      continue
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
