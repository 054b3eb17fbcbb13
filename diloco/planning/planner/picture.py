"""The trade-off over M: goodput against sample efficiency, and the time."""

import pathlib
from collections.abc import Mapping
from typing import Any

from matplotlib import figure

from diloco import errors

FORMATS = ("png", "svg", "pdf")
_COLOURS = ("#2f6fde", "#e8833a", "#2ca47c")


def check(path: pathlib.Path) -> None:
  """Refuses a file that could not be written."""
  if path.suffix.lstrip(".") not in FORMATS:
    raise errors.UserError(
      f"--plot={path}",
      "the file's name tells its format",
      f"end it in one of .{', .'.join(FORMATS)}",
    )
  if not path.parent.is_dir():
    raise errors.UserError(
      f"--plot={path}", "there is no such folder", "make it first"
    )


def draw(facts: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes the picture."""
  rows = [row for row in facts["over_islands"] if row["fits"]]
  islands = [row["islands"] for row in rows]
  drawn = figure.Figure(figsize=(9, 3.6), layout="constrained")
  shares, times = drawn.subplots(1, 2)
  for colour, name, label in (
    (_COLOURS[0], "goodput", "goodput"),
    (_COLOURS[1], "sample_efficiency", "sample efficiency"),
  ):
    _band(shares, islands, [row[name] for row in rows], colour, label)
  products = [
    row["goodput"]["mean"] * row["sample_efficiency"]["mean"] for row in rows
  ]
  shares.plot(islands, products, "--", color=_COLOURS[2], label="product")
  shares.set_ylim(0, 1.02)
  shares.set_ylabel("share")
  shares.legend(frameon=False)
  days = [row["days_to_quality"] for row in rows]
  _band(times, islands, days, _COLOURS[2], "days to equal quality")
  times.set_ylim(bottom=0)
  times.set_ylabel("days to equal quality")
  best = facts["proposal"]["islands"]
  for axes in (shares, times):
    axes.axvline(best, color="#18202b", linewidth=0.7, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(islands, [str(m) for m in islands])
    axes.minorticks_off()
    axes.set_xlabel(f"islands M (proposed: {best})")
    axes.spines[["top", "right"]].set_visible(False)
  with errors.writing(f"--plot={path}"):
    drawn.savefig(path, dpi=150)


def _band(
  axes: Any,
  islands: list[int],
  values: list[Mapping[str, float]],
  colour: str,
  label: str,
) -> None:
  low = [value["low"] for value in values]
  high = [value["high"] for value in values]
  mean = [value["mean"] for value in values]
  axes.fill_between(islands, low, high, color=colour, alpha=0.15, linewidth=0)
  axes.plot(islands, mean, "o-", color=colour, markersize=4, label=label)
