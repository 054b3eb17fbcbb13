"""Pictures of a comparison: results, curves, and all axes at once."""

import base64
import html
import io
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import colors, figure, ticker

from diloco.report import charts, clock, figures, totals
from diloco.workbench import compare, frozen

AXES = {"tokens": "count", "seconds": ""}  # and their units

_INK = "#18202b"
_STYLE = {
  "svg.hashsalt": "diloco",
  "font.size": 9.5,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.axisbelow": True,
  "axes.grid": True,
  "grid.alpha": 0.13,
}
_LINE_POINTS = 160
_UNITS = np.array([[1], [math.log(2)]])  # nats to bits
_LABEL = 44  # letters
_MAX_AXES = 9
_SHADES = colors.LinearSegmentedColormap.from_list(
  "shades", [charts.PALETTE[i] for i in (0, 3, 1)]
)  # that can be told from light pages and from dark ones
_APART = 0.05  # of an axis, between two values that can be read
_TICKS = 6  # values that an axis shows one by one
_WIDE = 30.0  # highest over lowest, from which on an axis is logarithmic


def image(
  width: float,
  height: float,
  caption: str,
  draw: Callable[..., None],
  *args: Any,
) -> str:
  """Returns an HTML image of what a function draws on axes; sizes in inches.

  The caption says in words what is to be seen, for those who cannot see it.
  """
  with matplotlib.rc_context(_STYLE):
    made = figure.Figure(figsize=(width, height), layout="constrained")
    draw(made.add_subplot(), *args)
    file = io.BytesIO()
    made.savefig(file, format="svg", metadata={"Date": None})
  data = base64.b64encode(file.getvalue()).decode()
  label = html.escape(caption, quote=True)
  return (
    f'<img alt="{label}" style="width:100%;background:#fff" '
    f'src="data:image/svg+xml;base64,{data}">'
  )


def curves(place: pathlib.Path) -> dict[tuple[str, str], np.ndarray]:
  """Reads the loss of a run over its course.

  Returns:
    [2, n], where and how many bits per token, by what it is of ("heldout": the
    global parameters; "trained": the islands' own steps) and one of `AXES`.
  """
  view = totals.catch_up(place).view
  run_clock = clock.RunClock(view)
  steps = [island.steps for island in view.islands.values()]
  walls, losses = (
    np.concatenate([[], *(s.column(name) for s in steps)])
    for name in ("wall_secs", "loss")
  )
  order = np.argsort(walls, kind="stable")
  order = order[np.isfinite(losses[order])]
  walls, losses = walls[order], losses[order]
  evals = np.array(
    [(e.wall_secs, e.loss) for e in view.global_evals if math.isfinite(e.loss)]
  )
  evals = evals.reshape(-1, 2).T
  made = {}
  for axis, where in (
    ("tokens", view.tokens_at),
    ("seconds", lambda secs: run_clock.at(secs) * run_clock.unit_secs),
  ):
    trained = charts.averaged(where(walls), losses, _LINE_POINTS)
    made["trained", axis] = np.array(trained) / _UNITS
    heldout = charts.averaged(where(evals[0]), evals[1], _LINE_POINTS)
    made["heldout", axis] = np.array(heldout) / _UNITS
  return made


def short(label: str) -> str:
  """A label that leaves room for a picture."""
  return label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"


def draw_results(
  axes: axes_lib.Axes, comparison: compare.Comparison, key: str
) -> None:
  """Draws a figure of every group: its runs, their mean, its interval."""
  groups = comparison.groups
  for row, group in enumerate(groups):
    found = group.results.get(key)
    if found is None:
      continue
    colour = charts.island_colour(row, len(groups))
    values = [e.results[key] for e in group.entries if key in e.results]
    axes.plot(values, [row] * len(values), "o", color=colour, alpha=0.4, ms=4)
    if found.low is not None and found.high is not None:
      axes.plot([found.low, found.high], [row, row], color=colour, linewidth=2)
    axes.plot([found.mean], [row], "D", color=colour, ms=5)
  axes.set_yticks(range(len(groups)), [short(g.label) for g in groups])
  axes.set_ylim(len(groups) - 0.5, -0.5)
  label, show = compare.SHOWN[key]
  axes.set_xlabel(label)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
  axes.xaxis.set_major_formatter(
    ticker.FuncFormatter(lambda value, _: show(value))
  )


def draw_parallel(
  axes: axes_lib.Axes, comparison: compare.Comparison, keys: Sequence[str]
) -> None:
  """Draws a line for each run through all that differs and what it came to.

  The axes of the figures `keys` are at the right; the first colours the lines.
  """
  # One that diverged has no place on the axis of its loss.
  entries = [
    entry
    for group in comparison.groups
    for entry in group.entries
    if set(keys) <= set(entry.results)
  ]
  names = frozen.short_names(comparison.fields)
  columns: list[tuple[str, list[Any]]] = [
    (names[field], [e.fields.get(field) for e in entries])
    for field in comparison.fields[: _MAX_AXES - len(keys)]
  ]
  columns += [
    (compare.SHOWN[key][0], [e.results.get(key) for e in entries])
    for key in reversed(keys)
  ]
  heights = np.array([_heights(values) for _, values in columns])
  for line in heights.T:
    colour = colors.to_hex(_SHADES(line[-1]))
    axes.plot(line, color=colour, linewidth=1.4, alpha=0.8)
  for place, (_, values) in enumerate(columns):
    axes.axvline(place, color=_INK, linewidth=0.8)
    told = dict(zip(heights[place], values, strict=True))
    if len(told) > _TICKS and all(map(_is_number, values)):
      told = {height: told[height] for height in (min(told), max(told))}
    shown: list[float] = []
    for height in sorted(told, key=lambda at: (0 < at < 1, at)):  # ends first
      if any(abs(height - other) < _APART for other in shown):
        continue
      shown.append(height)
      value = told[height]
      text = short(
        figures.number(value, 4) if _is_number(value) else str(value)
      )
      axes.text(place + 0.03, height, text, fontsize=8, va="bottom")
  axes.set_xticks(range(len(columns)), [short(name) for name, _ in columns])
  axes.set_yticks([])
  axes.grid(visible=False)
  axes.spines[:].set_visible(False)
  axes.set_ylim(-0.05, 1.08)
  axes.set_xlim(-0.05, len(columns) - 0.7)


def _heights(values: Sequence[Any]) -> list[float]:
  """Where values are on an axis, 0 to 1: by size, or in order of appearance."""
  if all(_is_number(value) for value in values):
    low, high = min(values), max(values)
    if high == low:
      return [0.5] * len(values)
    if low > 0 and high / low > _WIDE:
      return [math.log(v / low) / math.log(high / low) for v in values]
    return [(value - low) / (high - low) for value in values]
  kinds = list(dict.fromkeys(map(str, values)))
  return [kinds.index(str(v)) / max(len(kinds) - 1, 1) for v in values]


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)
