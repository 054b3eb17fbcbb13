"""What a sweep leaves at its end: one table and one figure."""

import json
import pathlib
import sys
from typing import Any

from matplotlib import figure

from diloco import errors
from diloco.workbench import compare, frozen, pictures

_MAX_INCHES = 40.0


def check_extra() -> None:
  """Refuses if what tables are written with is not installed."""
  for name in ("pandas", "pyarrow"):
    errors.needed(name, "a sweep's table")


def write(workdir: pathlib.Path, sweep: frozen.Sweep) -> list[dict[str, Any]]:
  """Writes table.csv, table.parquet and figure.png, and returns the rows.

  They are name, status and reason of each point, the seconds its last process
  took, the fields given to it and the figures it came to.
  """
  import pandas

  rows = []
  for point in sweep.points:
    facts = frozen.outcome(workdir, point.name) or {}
    rows.append(
      {
        "name": point.name,
        "status": facts.get("status", "pending"),
        "reason": facts.get("reason", ""),
        "secs": facts.get("secs"),
        **{k: v for k, v in point.given.items() if k != "name"},
        **facts.get("result", {}),
      }
    )
  frame = pandas.DataFrame(rows)
  for column in frame:
    kinds = {type(value) for value in frame[column].dropna()}
    if not kinds <= {int, float} and not kinds < {bool, str}:
      # A column of a Parquet file has one type.
      frame[column] = frame[column].map(_text, na_action="ignore")
  for name, save in (
    ("table.csv", lambda path: frame.to_csv(path, index=False)),
    ("table.parquet", lambda path: frame.to_parquet(path, index=False)),
    ("figure.png", lambda path: _draw(path, workdir)),
  ):
    temporary = workdir / f"tmp-{name}"
    save(temporary)
    temporary.replace(workdir / name)
  return rows


def _text(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)


def _draw(path: pathlib.Path, workdir: pathlib.Path) -> None:
  """Draws the dearest figure of all groups of points, if it can be drawn."""
  try:
    comparison = compare.compare([workdir])
  except errors.UserError as error:  # such as points of different tasks
    print(f"figure.png is empty: {error}", file=sys.stderr)
    comparison = compare.Comparison((), (), (), ())
  inches = min(1.5 + 0.3 * len(comparison.groups), _MAX_INCHES)
  fig = figure.Figure(figsize=(8, inches), layout="constrained")
  if comparison.shown:
    pictures.draw_results(fig.add_subplot(), comparison, comparison.shown[0])
  fig.savefig(path, format="png", dpi=150)
