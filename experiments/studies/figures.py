"""Pictures of the studies, of the tables that `docs/results.md` has of them.

Command: `python -m experiments.studies.figures` draws `docs/studies.svg` anew.
"""

import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import figure

from diloco.report import charts

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results.md"
PICTURE = RESULTS.with_name("studies.svg")

_PART = "## Studies of learning: "
_COST = re.compile(r"\*\*([+-][\d.]+) %\*\* \[([+-][\d.]+), ([+-][\d.]+)\]")
_GOAL = re.compile(r"\+[\d.]+ %")
_NUMBER = re.compile(r"[+-]?\d+\.\d+")
_PER_CENT = re.compile(r"([+-][\d.]+) %")
_STYLE = {"svg.hashsalt": "diloco", "svg.fonttype": "none", "font.size": 9}


class Cost(NamedTuple):
  """What an arm loses to what it is compared with, in per cent."""

  study: str
  arm: str
  mean: float
  low: float  # of the 95 % interval
  high: float
  goal: float | None


def tables(text: str, study: str) -> Iterator[list[list[str]]]:
  """The tables of one study's part, each as rows of cells, the head first."""
  _, _, after = text.partition(f"{_PART}{study}\n")
  part, _, _ = after.partition("\n## ")
  for found in re.findall(r"(?:^ *\|.*\|\n)+", part, re.MULTILINE):
    rows = [line.strip().strip("|").split("|") for line in found.splitlines()]
    yield [[c.strip() for c in row] for n, row in enumerate(rows) if n != 1]


def costs(text: str) -> list[Cost]:
  """All costs that are told with an interval, in the order of the page."""
  found = []
  for study in re.findall(f"^{_PART}(.*)$", text, re.MULTILINE):
    for head, *rows in tables(text, study):
      before = ""
      for row in rows:
        arm = row[0].replace("the same", before).replace("`", "")
        before = arm
        if told := next(filter(None, map(_COST.fullmatch, row)), None):
          last = row[-1] if head[-1] == "goal" else ""
          goal = float(last[:-2]) if _GOAL.fullmatch(last) else None
          mean, low, high = map(float, told.groups())
          found.append(Cost(study, arm, mean, low, high, goal))
  return found


def curves(text: str) -> dict[str, list[tuple[float, float]]]:
  """Loss by learning rate, of each M and merge."""
  head, *rows = next(tables(text, "merges as islands become many"))
  rates = [float(_of(cell)) for cell in head if _NUMBER.search(cell)]
  return {
    f"M = {row[0]}, {row[1]}": [
      (rate, float(_of(cell)))
      for rate, cell in zip(rates, row[2:], strict=True)
      if _NUMBER.search(cell)
    ]
    for row in rows
  }


def changes(text: str) -> list[tuple[str, float]]:
  """What is lost by one setting changed, in per cent."""
  head, *rows = next(tables(text, "what the defaults should be, one by one"))
  place = head.index("against the defaults")
  return [
    (row[0].replace("`", ""), float(_of(row[place])))
    for row in rows
    if _NUMBER.search(row[place])
  ]


def grid(text: str) -> tuple[list[str], list[str], list[list[float]]]:
  """Outer rates, momenta, and what each pair loses to the defaults, in %."""
  *_, found = tables(text, "what the defaults should be, one by one")
  head, *rows = found
  lost = [[_PER_CENT.search(cell) for cell in row[1:]] for row in rows]
  return (
    [row[0] for row in rows],
    head[1:],
    [[float(m[1]) if m else np.nan for m in line] for line in lost],
  )


def _of(cell: str) -> str:
  found = _NUMBER.search(cell)
  assert found is not None, cell
  return found.group()


def draw(text: str, path: pathlib.Path) -> None:
  """Draws all that the page tells."""
  with matplotlib.rc_context(_STYLE):
    made = figure.Figure(figsize=(8.2, 12.5), layout="constrained")
    above, middle, below, last = made.subplots(
      4, height_ratios=[1.4, 1, 1.1, 0.5]
    )
    _draw_costs(above, costs(text))
    _draw_curves(middle, curves(text))
    _draw_changes(below, changes(text))
    _draw_grid(last, *grid(text))
    made.savefig(path, metadata={"Date": None})


def _draw_costs(axes: axes_lib.Axes, found: Sequence[Cost]) -> None:
  for place, cost in enumerate(found):
    errors = [[cost.mean - cost.low], [cost.high - cost.mean]]
    axes.errorbar(
      cost.mean, place, xerr=errors, fmt="o", color=charts.PALETTE[0], capsize=3
    )
    if cost.goal is not None:
      axes.plot(cost.goal, place, "|", color=charts.PALETTE[1], markersize=14)
  axes.set_yticks(range(len(found)), [c.arm for c in found])
  axes.invert_yaxis()
  axes.axvline(0, color="#888", linewidth=0.8)
  axes.set_xlabel("held-out loss lost, % (95 % intervals; upright: the goal)")


def _draw_curves(
  axes: axes_lib.Axes, found: dict[str, list[tuple[float, float]]]
) -> None:
  for number, (name, points) in enumerate(found.items()):
    x, y = zip(*sorted(points), strict=True)
    style = "-" if name.endswith("mean") else "--"
    color = charts.PALETTE[number // 2]
    axes.plot(x, y, f"o{style}", color=color, label=name)
  axes.set_xscale("log", base=2)
  ticks = sorted({x for points in found.values() for x, _ in points})
  axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
  axes.set_xlabel("learning rate, one seed")
  axes.set_ylabel("held-out nats a byte")
  axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)


def _draw_changes(
  axes: axes_lib.Axes, found: Sequence[tuple[str, float]]
) -> None:
  names, values = zip(*found, strict=True)
  axes.barh(range(len(names)), values, color=charts.PALETTE[0])
  axes.set_yticks(range(len(names)), names)
  axes.invert_yaxis()
  axes.axvline(0, color="#888", linewidth=0.8)
  axes.set_xlabel("held-out loss lost against the defaults, %, one seed")


def _draw_grid(
  axes: axes_lib.Axes,
  rates: Sequence[str],
  momenta: Sequence[str],
  lost: Sequence[Sequence[float]],
) -> None:
  axes.imshow(
    np.clip(lost, -1, 10), cmap="YlOrBr", aspect="auto", vmin=-2, vmax=16
  )
  for row, line in enumerate(lost):
    for column, value in enumerate(line):
      told = "diverged" if np.isnan(value) else f"{value:+.1f} %"
      axes.text(column, row, told, ha="center", va="center")
  axes.set_xticks(range(len(momenta)), momenta)
  axes.set_yticks(range(len(rates)), rates)
  axes.set_xlabel("held-out loss lost by outer rate and momentum, one seed")


if __name__ == "__main__":
  draw(RESULTS.read_text(), PICTURE)
