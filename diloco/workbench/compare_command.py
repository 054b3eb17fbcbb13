"""`diloco compare`: on a terminal, as JSON, as one page without a network."""

import argparse
import collections
import sys
from collections.abc import Callable

from rich import box, console, table, text

from diloco import arguments
from diloco.report import dashboard, figures
from diloco.workbench import compare, frozen

_MAX_FIELDS = 16  # columns
_MAX_FIGURES = 4  # columns on a terminal; the page has all


def run(args: argparse.Namespace) -> int:
  """Compares and prints; returns the exit code."""
  comparison = compare.compare(args.dirs)
  if args.html:
    # Imported here, for matplotlib takes its time.
    from diloco.workbench import compare_page

    compare_page.write(args.html, comparison)
    print(f"wrote {args.html}", file=sys.stderr)
  if args.json:
    arguments.answer(args, comparison.to_json())
    return 0
  heads, rows = cells(comparison, _MAX_FIGURES)
  _print(heads, rows)
  for note in (TITLE, *comparison.notes):
    print(note)
  if hidden := comparison.fields[_MAX_FIELDS:]:
    print(f"Differ too, and are not shown: {', '.join(hidden)}.")
  return 0


def _print(heads: list[str], rows: list[list[str]]) -> None:
  """As a table; row by row where a terminal is too narrow for one."""
  grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
  for head in heads:
    grid.add_column(head, no_wrap=True)
  for row in rows:
    grid.add_row(*map(text.Text, row))
  out = console.Console()
  width = dashboard.width(out, grid)
  if out.is_terminal and width > out.width:
    for row in rows:
      print(", ".join(f"{h} {v}" for h, v in zip(heads, row, strict=True)))
      print()
  else:
    out.width = width
    out.print(grid)


TITLE = "Means over seeds, with 95 % intervals by Student's t."


def cells(
  comparison: compare.Comparison, most: int | None = None
) -> tuple[list[str], list[list[str]]]:
  """Returns heads and rows of a table: a row for each group.

  First the fields in which groups differ, then how many runs, then figures, at
  `most` so many; of the dearest one the difference to the first group too, seed
  by seed: all as shares of the first, or all as they are where that has a 0.
  """
  shown = comparison.shown[:most]
  names = frozen.short_names(comparison.fields)
  fields = comparison.fields[:_MAX_FIELDS]
  heads = [*(names[field] for field in fields), "runs"]
  heads += [compare.SHOWN[key][0] for key in shown]
  rows = []
  for group in comparison.groups:
    values = [group.fields[field] for field in fields]
    row = [figures.DASH if value is None else str(value) for value in values]
    row.append(_runs(group))
    for key in shown:
      one = group.results.get(key)
      row.append(_told(one, compare.SHOWN[key][1]) if one else figures.DASH)
    rows.append(row)
  if len(rows) > 1 and shown:
    key, place = shown[0], len(fields) + 2
    relative = comparison.has_shares(key)
    show = _share if relative else compare.SHOWN[key][1]
    column = [figures.DASH] + [
      "no seed in common" if found is None else _told(found, show, "+")
      for found in comparison.differences(key, relative=relative)
    ]
    heads.insert(place, "against the first" if relative else "minus the first")
    for row, cell in zip(rows, column, strict=True):
      row.insert(place, cell)
  return heads, rows


def _runs(group: compare.Group) -> str:
  counts = collections.Counter(entry.status for entry in group.entries)
  others = [f"{n} {s}" for s, n in counts.items() if s != "finished"]
  return ", ".join([str(len(group.entries)), *others])


def _share(value: float) -> str:
  return f"{100 * value:.2f} %"


def _told(
  found: compare.Interval, show: Callable[[float], str], plus: str = ""
) -> str:
  sign = "-" if found.mean < 0 else plus
  told = sign + show(abs(found.mean))
  if found.low is None or found.high is None:
    return told
  return f"{told} ± {show((found.high - found.low) / 2)}"
