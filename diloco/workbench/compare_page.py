"""A comparison as one HTML page, which needs no network."""

import pathlib

from diloco import errors
from diloco.report import charts, page, summary
from diloco.workbench import compare, compare_command, pictures

_AXES = 2  # figures that are axes of their own


def write(path: pathlib.Path, comparison: compare.Comparison) -> None:
  """Writes the page."""
  with errors.writing(f"--html={path}"):
    summary.replace(path, render(comparison))


def render(comparison: compare.Comparison) -> str:
  """Returns the page."""
  groups = comparison.groups
  runs = sum(len(group.entries) for group in groups)
  notes = page.text(" ".join(comparison.notes))
  places = [
    (group.label, ", ".join(str(entry.place) for entry in group.entries))
    for group in groups
  ]
  parts = [
    f"<h1>Comparison<span class='tag'>{runs} runs</span></h1>",
    "<p class='dim'>Runs that differ in the seed alone are one group. Made from"
    f" the tapes and summaries of the runs. {notes}</p>",
    page.panel(_table(comparison), "What came out", compare_command.TITLE),
    *_results(comparison),
    *_curves(comparison),
    *_parallel(comparison),
    page.panel(page.facts(places), "Directories"),
  ]
  return page.page("Comparison \N{MIDDLE DOT} diloco", parts)


def _table(comparison: compare.Comparison) -> str:
  heads, rows = compare_command.cells(comparison)
  cells = [[page.text(cell) for cell in row] for row in rows]
  for number, row in enumerate(cells):
    row[0] = page.dot(charts.island_colour(number, len(cells))) + row[0]
  return page.table(heads, cells, heads.index("runs"))


def _results(comparison: compare.Comparison) -> list[str]:
  height = 1.1 + 0.3 * len(comparison.groups)
  panels = [
    page.panel(
      pictures.image(
        *(5.6, height, f"{title} of each group"),
        *(pictures.draw_results, comparison, key),
      ),
      title,
      "Dots: runs. Diamond: their mean. Line: where it lies with 95 %.",
    )
    for key in comparison.shown[:_AXES]
    for title in [compare.SHOWN[key][0].capitalize()]
  ]
  return [page.pair(*panels)] if panels else []


def _curves(comparison: compare.Comparison) -> list[str]:
  groups = comparison.groups
  found = [
    (
      f"{group.label}, seed {entry.seed}",
      charts.island_colour(number, len(groups)),
      pictures.curves(entry.place),
    )
    for number, group in enumerate(groups)
    for entry in group.entries
    if entry.task != compare.SIMULATION
  ]
  if not found:
    return []
  parts = []
  for kind, title in (
    ("heldout", "Held-out loss of the global parameters"),
    ("trained", "Loss of the islands"),
  ):
    panels = []
    for against, unit in pictures.AXES.items():
      chart = {
        "x": {"label": against, "unit": unit},
        "y": {"label": "bits per token", "clip": 0.96},
        "lines": [
          charts.line(name, colour, *of[kind, against])
          for name, colour, of in found
        ],
        "seams": [],
      }
      told = f"{title}, against {against}"
      panels.append(page.panel(charts.html(chart, told), told))
    parts.append(page.pair(*panels))
  return [*parts, charts.script()]


def _parallel(comparison: compare.Comparison) -> list[str]:
  if not (comparison.fields and comparison.shown):
    return []
  image = pictures.image(
    *(11.4, 3.8, "A line for each run through all axes"),
    *(pictures.draw_parallel, comparison, comparison.shown[:_AXES]),
  )
  return [
    page.panel(
      f'<div class="scroll"><div style="min-width:720px">{image}</div></div>',
      "All at once",
      "A line for each run that came to a figure on the last axes, through what"
      " differs. Its colour is its height on the last axis.",
    )
  ]
