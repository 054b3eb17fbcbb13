"""`diloco compare`: on a terminal, as JSON, as one page without a network."""

import argparse
import collections
import json
import sys

from rich import box, console, table, text

from diloco.report import figures
from diloco.workbench import compare, frozen, results

_MAX_FIELDS = 8  # columns
_MAX_FIGURES = 4  # columns on a terminal; the page has all


def run(args: argparse.Namespace) -> int:
  """Compares and prints; returns the exit code.

  Raises:
    UserError: the directories cannot be compared, or the page not written.
  """
  comparison = compare.compare(args.dirs)
  if args.html:
    # Imported here, for matplotlib takes its time.
    from diloco.workbench import compare_page

    compare_page.write(args.html, comparison)
  if args.json:
    json.dump(comparison.to_json(), sys.stdout, indent=2)
    print()
    return 0
  heads, rows = cells(comparison, _MAX_FIGURES)
  grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
  for head in heads:
    grid.add_column(head, overflow="fold")
  for row in rows:
    grid.add_row(*map(text.Text, row))
  console.Console().print(grid)
  for note in (TITLE, *comparison.notes):
    print(note)
  return 0


TITLE = "Means over seeds, with 95 % intervals by Student's t."


def cells(
  comparison: compare.Comparison, most: int | None = None
) -> tuple[list[str], list[list[str]]]:
  """Returns heads and rows of a table: a row for each group.

  First the fields in which groups differ, then how many runs, then figures, at
  `most` so many; of the dearest one the difference to the first group too, seed
  by seed.
  """
  shown = comparison.shown[:most]
  names = frozen.short_names(comparison.fields)
  fields = comparison.fields[:_MAX_FIELDS]
  heads = [*(names[field] for field in fields), "runs"]
  heads += [results.SHOWN[key][0] for key in shown]
  rows = []
  for group in comparison.groups:
    values = [group.fields[field] for field in fields]
    row = [figures.DASH if value is None else str(value) for value in values]
    row.append(_runs(group))
    for key in shown:
      row.append(_interval(group.results.get(key), key))
    rows.append(row)
  if len(rows) > 1 and shown:
    key, place = shown[0], len(fields) + 2
    column = [figures.DASH] + [
      "no seed in common" if found is None else _interval(found, key, "+")
      for found in comparison.differences(key)
    ]
    heads.insert(place, "against the first")
    for row, cell in zip(rows, column, strict=True):
      row.insert(place, cell)
  return heads, rows


def _runs(group: compare.Group) -> str:
  counts = collections.Counter(entry.status for entry in group.entries)
  others = [f"{n} {s}" for s, n in counts.items() if s != "finished"]
  return ", ".join([str(len(group.entries)), *others])


def _interval(found: compare.Interval | None, key: str, plus: str = "") -> str:
  def told(value: float) -> str:
    sign = "-" if value < 0 else plus
    return sign + results.SHOWN[key][1](abs(value))

  if found is None:
    return figures.DASH
  if found.low is None or found.high is None:
    return told(found.mean)
  return f"{told(found.mean)} [{told(found.low)}, {told(found.high)}]"
