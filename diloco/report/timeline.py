"""The timeline of a run: what each role did when, with its incidents."""

from collections.abc import Sequence

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import lines, patches

from diloco.report import canvas
from diloco.report import clock as clock_lib
from diloco.report import incidents as incidents_lib
from diloco.report import view as view_lib

_STATE_COLOURS = {
  "starting": "#aab4c1",
  "dead": canvas.FAULT,
  "restarting": "#f0b73f",
}
_SYNCER_COLOUR = "#7c8896"
_BAR = 0.56  # of a row


def draw(
  view: view_lib.RunView,
  clock: clock_lib.RunClock,
  incidents: Sequence[incidents_lib.Incident],
) -> str:
  """Returns the timeline as SVG, as high as the fleet is large."""
  rows = len(view.islands) + 1
  height = 1.15 + min(0.34 * rows, 9.0)
  picture = canvas.picture(11.4, height, "What each island did when")
  return picture(_draw)(view, clock, incidents)


def island_label(view: view_lib.RunView, number: int) -> str:
  """Returns number, kind and speed of an island; says if it is emulated."""
  island = view.islands[number]
  label = f"island {number}  {island.kind}"
  if island.relative_speed != 1.0 or island.paced:
    label += f" \N{MULTIPLICATION SIGN}{island.relative_speed:.2g}"
  return label + (", emulated" if island.paced else "")


def _draw(
  axes: axes_lib.Axes,
  view: view_lib.RunView,
  clock: clock_lib.RunClock,
  incidents: Sequence[incidents_lib.Incident],
) -> None:
  rows = {number: row for row, number in enumerate(view.islands)}
  for number, row in rows.items():
    _island_row(axes, view, clock, number, row)
  last = len(rows)
  _syncer_row(axes, view, clock, last)
  evals = [(e.wall_secs, rows.get(e.island, last)) for e in view.global_evals]
  _marks(axes, clock, "o", -0.40, 3.0, evals)
  saved = [(w, rows.get(i, last)) for w, i in view.checkpoints]
  _marks(axes, clock, "|", 0.40, 4.0, saved)
  for incident in incidents:
    island = incident.island
    row = last if island is None else rows.get(island, last)
    moment = [(incident.wall_secs, row)]
    _marks(axes, clock, "X" if incident.injected else "v", 0, 8, moment)
  axes.set_yticks(
    range(last + 1), [*(island_label(view, n) for n in rows), "syncer"]
  )
  axes.set_ylim(last + 0.6, -0.7)
  axes.set_xlim(0, clock.length)
  axes.set_xlabel(clock.label)
  axes.grid(False, axis="y")
  axes.spines["left"].set_visible(False)
  for seam in clock.seams:
    axes.axvline(seam, color=canvas.INK, linewidth=0.8, linestyle=":")
  axes.legend(
    handles=_legend(),
    loc="lower left",
    bbox_to_anchor=(0, 1.0),
    ncols=8,
    columnspacing=1.3,
    borderpad=0,
  )


def _island_row(
  axes: axes_lib.Axes,
  view: view_lib.RunView,
  clock: clock_lib.RunClock,
  number: int,
  row: int,
) -> None:
  for span in view.islands[number].spans(view.last_wall_secs):
    colour = _STATE_COLOURS.get(
      span.state, canvas.island_colour(number, view.num_islands)
    )
    _bar(axes, clock, span.start, span.end, row, colour)


def _syncer_row(
  axes: axes_lib.Axes,
  view: view_lib.RunView,
  clock: clock_lib.RunClock,
  row: int,
) -> None:
  # The row shows whether anybody led; standbys come and go unseen.
  starts = sorted(view.syncer_leads or view.syncer_starts)
  deaths = sorted(view.syncer_deaths)
  ends = [session.end for session in view.sessions.all]
  first = view.merges.first_secs
  for start in starts or ([] if first is None else [first]):
    after = [m for m in (*deaths, *ends) if m > start]
    end = min(after, default=view.last_wall_secs)
    _bar(axes, clock, start, end, row, _SYNCER_COLOUR)
  for death in deaths:
    back = min([m for m in (*starts, *ends) if m > death], default=death)
    _bar(axes, clock, death, back, row, canvas.FAULT)


def _bar(
  axes: axes_lib.Axes,
  clock: clock_lib.RunClock,
  start: float,
  end: float,
  row: int,
  colour: str,
) -> None:
  left, right = clock.at(np.array([start, end]))
  axes.barh(
    row, right - left, left=left, height=_BAR, color=colour, linewidth=0
  )


def _marks(
  axes: axes_lib.Axes,
  clock: clock_lib.RunClock,
  marker: str,
  shift: float,
  size: float,
  moments: Sequence[tuple[float, int]],
) -> None:
  """Puts marks on rows at (wall time, row); `shift` is down, in rows."""
  axes.plot(
    clock.at(np.array([wall for wall, _ in moments])),
    np.array([row for _, row in moments]) + shift,
    marker,
    color=canvas.INK,
    markerfacecolor="white" if size > 5 else canvas.INK,
    markersize=size,
  )


def _legend() -> list[patches.Patch | lines.Line2D]:
  bars = [
    patches.Patch(color=colour, label=state)
    for state, colour in _STATE_COLOURS.items()
  ]
  marks = [
    ("X", "injected fault", 7, "white"),
    ("v", "other death", 7, "white"),
    ("o", "evaluation", 3.4, canvas.INK),
    ("|", "checkpoint", 5, canvas.INK),
  ]
  return [
    patches.Patch(color=canvas.PALETTE[0], label="training (island's colour)"),
    *bars,
    *(
      lines.Line2D(
        [],
        [],
        linestyle="",
        marker=marker,
        label=label,
        markersize=size,
        color=canvas.INK,
        markerfacecolor=face,
      )
      for marker, label, size, face in marks
    ),
  ]
