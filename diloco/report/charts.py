"""Pictures of a run as plain values, which `charts.js` draws in the page.

A *chart* has lines over an axis, or bars and marks in rows. The script lets a
reader hover, zoom and hide lines, needs no network, and draws for the width
and the colours of the page; so values go into it, thinned, and no drawing.
"""

import colorsys
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from diloco.report import clock as clock_lib
from diloco.report import figures, page, series
from diloco.report import incidents as incidents_lib
from diloco.report import view as view_lib

PALETTE = (
  *("#2f6fde", "#e8833a", "#2ca47c", "#b0519b"),
  *("#c9a227", "#4aa8c9", "#8a6d5b", "#7d7ff0"),
)
FAULT = "#d6404e"
INK = "var(--ink)"
STATES = {"starting": "#aab4c1", "dead": FAULT, "restarting": "#f0b73f"}

Chart = dict[str, Any]

_SYNCER_COLOUR = "#7c8896"
_POINTS = 16_000  # of all lines of a chart together
_BIN_STEPS, _MOST_BINS = 6, 100
_NAMED = 8  # islands that have lines of their own everywhere


def html(chart: Chart, caption: str) -> str:
  """Returns the element in which the script draws a chart.

  The caption says in words what is to be seen, for those who cannot see it.
  """
  text = json.dumps(chart, separators=(",", ":"), allow_nan=False)
  return (
    f'<figure class="chart" role="img" aria-label="{page.text(caption)}">'
    '<script type="application/json">'
    # What ends a script in HTML must not stand in one.
    + text.replace("<", "\\u003c")
    + "</script></figure>"
  )


@functools.cache
def script() -> str:
  """Returns the script that draws all charts of a page."""
  code = pathlib.Path(__file__).with_suffix(".js").read_text()
  return (
    "<noscript><p>The pictures need JavaScript; nothing is loaded.</p>"
    f"</noscript><script>{code}</script>"
  )


def island_colour(island: int, num_islands: int) -> str:
  """Returns the colour an island has in every picture."""
  if num_islands <= len(PALETTE):
    return PALETTE[island % len(PALETTE)]
  hue = 0.85 * island / max(num_islands - 1, 1)
  red, green, blue = colorsys.hls_to_rgb(hue, 0.5, 0.5)
  return "#" + "".join(f"{round(255 * c):02x}" for c in (red, green, blue))


def averaged(
  x: np.ndarray,
  y: np.ndarray,
  points: int,
  reduce: Callable[[np.ndarray], Any] = np.mean,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a line of at most `points` points; x does not decrease.

  Neighbours are put together until there are so few, their values by `reduce`.
  """
  if len(x) <= points:
    return x, y
  groups = np.array_split(np.arange(len(x)), points)
  return (
    np.array([x[group].mean() for group in groups]),
    np.array([reduce(y[group]) for group in groups]),
  )


def line(name: str, colour: str, x: Any, y: Any, **more: Any) -> Chart:
  """Returns a line of a chart; what is not finite is left out."""
  return {"name": name, "colour": colour, "x": _short(x), "y": _short(y)} | more


def _short(values: Iterable[float]) -> list[float | None]:
  return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]


class Charts:
  """All charts of one run."""

  def __init__(self, view: view_lib.RunView):
    self._view = view
    self._clock = clock_lib.RunClock(view)
    self._colours = {
      number: island_colour(number, view.num_islands) for number in view.islands
    }
    gaps = [one.percentile("gap_secs", 50) for one in view.islands.values()]
    slowest = max((gap for gap in gaps if gap is not None), default=1.0)
    steps = self._clock.length * self._clock.unit_secs / max(slowest, 1e-6)
    bins = int(np.clip(steps / _BIN_STEPS, 4, _MOST_BINS))
    self._edges = np.linspace(0, self._clock.length, bins + 1)

  def _time(self, label: str, lines: Sequence[Chart], **y: Any) -> Chart:
    axis = {"label": self._clock.label, "max": self._clock.length, "time": True}
    chart = {"x": axis, "y": {"label": label, **y}, "lines": lines}
    return chart | {"seams": self._clock.seams}

  def loss_by_tokens(self) -> Chart:
    """Loss against the tokens trained by all islands."""
    label = "tokens trained by all islands together"
    return self._losses(self._view.tokens_at) | {
      "x": {"label": label, "unit": "count"},
      "seams": [],
    }

  def loss_by_time(self) -> Chart:
    """Loss against the time the run was on."""
    return self._losses(self._clock.at)

  def _losses(self, position: Callable[[np.ndarray], np.ndarray]) -> Chart:
    view, lines = self._view, []
    points = int(np.clip(_POINTS / max(len(view.islands), 1), 60, 1200))
    for number, island in view.islands.items():
      loss = island.steps.column("loss") / math.log(2)
      where = position(island.steps.column("wall_secs"))
      good = np.isfinite(loss)
      thin = averaged(where[good], loss[good], points)
      lines.append(line(f"island {number}", self._colours[number], *thin))
    evals = [e for e in view.global_evals if math.isfinite(e.loss)]
    # Losses on samples of different sizes are no line: each has its own.
    for dash, tokens in zip(
      itertools.cycle(("", "6 3", "2 3")),
      sorted({e.tokens for e in evals}),
      strict=False,
    ):
      alike = [e for e in evals if e.tokens == tokens]
      where = position(np.array([e.wall_secs for e in alike]))
      bits = np.array([e.loss for e in alike]) / math.log(2)
      name = f"global, {figures.count(tokens)} held-out {view.token_unit}s"
      lines.append(line(name, INK, where, bits, dots=True, dash=dash))
    return self._time(f"bits per {view.token_unit}", lines, clip=0.96)

  def speed(self) -> Chart:
    """Tokens per second over time, the islands stacked."""
    lines = [
      self._rates(f"island {m}", self._colours[m], island.steps, "tokens")
      for m, island in self._view.islands.items()
    ]
    return self._time(
      "tokens per second", lines, unit="count", min=0, stack=True
    )

  def _rates(
    self, name: str, colour: str, found: series.Series, column: str, **more: Any
  ) -> Chart:
    """Amounts a second, in equal stretches of time."""
    rate = self._sums(found, column) / (
      np.diff(self._edges) * self._clock.unit_secs
    )
    return line(name, colour, self._edges, rate, **more)

  def _sums(self, found: series.Series, column: str) -> np.ndarray:
    where = self._clock.at(found.column("wall_secs"))
    amounts = np.nan_to_num(found.column(column))
    return np.histogram(where, self._edges, weights=amounts)[0]

  def traffic(self) -> Chart:
    """Bytes per second of each island and direction."""
    lines = []
    for m, island in self._view.islands.items():
      for word, dash, moments in (
        ("sends", "", island.published),
        ("fetches", "4 3", island.adopted),
      ):
        name = f"island {m} {word}"
        found = moments.series, "amount"
        lines.append(self._rates(name, self._colours[m], *found, dash=dash))
    if len(self._view.islands) > _NAMED:
      lines = [
        line(
          f"all {word}",
          PALETTE[place],
          self._edges,
          np.sum([line["y"] for line in lines[place::2]], axis=0),
        )
        for place, word in enumerate(("send", "fetch"))
      ]
    return self._time("bytes per second", lines, unit="bytes", min=0)

  def contributors(self) -> Chart:
    """Islands in a merge over time: mean and range."""
    merges = self._view.merges.series
    where = self._clock.at(merges.column("wall_secs"))
    sizes = merges.column("islands") / merges.column("count")
    low, high = (
      averaged(where, merges.column(name), _MOST_BINS, reduce)[1]
      for name, reduce in (("fewest", np.min), ("most", np.max))
    )
    mean = averaged(where, sizes, _MOST_BINS)
    band = {"low": _short(low), "high": _short(high)}
    all_of_them = self._view.num_islands
    lines = [
      line("mean and range", PALETTE[0], *mean, **band),
      line(
        *("all islands", INK, [0, self._clock.length], [all_of_them] * 2),
        dash="4 3",
      ),
    ]
    return self._time("islands in a merge", lines, min=0)

  def staleness(self) -> Chart:
    """Mean staleness of merged contributions over time."""
    line = self._of_merges("versions behind", PALETTE[3], "staleness", "count")
    return self._time("versions behind, mean", [line], min=0)

  def cosine(self) -> Chart:
    """Cosine between the outer gradients that went into a merge."""
    line = self._of_merges("mean over pairs", PALETTE[2], "cosine", "paired")
    return self._time("cosine", [line], max=1)

  def _of_merges(self, name: str, colour: str, what: str, per: str) -> Chart:
    merges = self._view.merges.series
    where = self._clock.at(merges.column("wall_secs"))
    amounts, counts = merges.column(what), merges.column(per)
    good = counts > 0
    values = amounts[good] / counts[good]
    return line(name, colour, *averaged(where[good], values, _MOST_BINS))

  def weights(self) -> Chart:
    """Each island's share of the weights of merges, stacked."""
    total = self._sums(self._view.merges.series, "count")
    lines = []
    for m, island in self._view.islands.items():
      sums = self._sums(island.weights.series, "amount")
      share = sums / np.maximum(total, 1)
      lines.append(line(f"island {m}", self._colours[m], self._edges, share))
    return self._time("share of a merge", lines, min=0, max=1, stack=True)

  def timeline(self, incidents: Sequence[incidents_lib.Incident]) -> Chart:
    """What each role did when, with its incidents."""
    view = self._view
    rows = {number: row for row, number in enumerate(view.islands)}
    last = len(rows)
    bars = [
      self._bar(
        *(row, span.start, span.end),
        STATES.get(span.state, self._colours[number]),
        span.state,
      )
      for number, row in rows.items()
      for span in view.islands[number].spans(view.last_wall_secs)
    ]
    bars += self._syncer(last)
    moments = [
      *(("evaluation", e.wall_secs, e.island) for e in view.global_evals),
      *(("checkpoint", wall, m) for wall, m in view.checkpoints),
      *(
        (
          "injected fault" if i.injected else "other death",
          i.wall_secs,
          i.island,
        )
        for i in incidents
      ),
    ]
    marks = [
      [last if m is None else rows.get(m, last), *self._at(wall), name]
      for name, wall, m in moments
    ]
    apart = any(e.island is None for e in view.global_evals)
    rest = "syncer, evaluator" if apart else "syncer"
    names = [*(island_label(view, number) for number in rows), rest]
    return self._time("", []) | {"rows": names, "bars": bars, "marks": marks}

  def _at(self, *walls: float) -> list[float | None]:
    return _short(self._clock.at(np.array(walls)))

  def _bar(
    self, row: int, start: float, end: float, colour: str, name: str
  ) -> list[Any]:
    return [row, *self._at(start, end), colour, name]

  def _syncer(self, row: int) -> list[list[Any]]:
    """Whether anybody led; standbys come and go unseen."""
    view, bars = self._view, []
    starts = sorted(view.syncer_leads)
    deaths = sorted(view.syncer_deaths)
    ends = [session.end for session in view.sessions.all]
    for start in starts:
      after = [m for m in (*deaths, *ends) if m > start]
      end = min(after, default=view.last_wall_secs)
      bars.append(self._bar(row, start, end, _SYNCER_COLOUR, "leading"))
    for death in deaths:
      back = min([m for m in (*starts, *ends) if m > death], default=death)
      bars.append(self._bar(row, death, back, FAULT, "nobody leads"))
    return bars


def island_label(view: view_lib.RunView, number: int) -> str:
  """Returns number, kind and speed of an island; says if it is emulated."""
  island = view.islands[number]
  label = f"island {number}  {island.kind}"
  if island.relative_speed != 1.0 or island.paced:
    label += f" \N{MULTIPLICATION SIGN}{island.relative_speed:.2g}"
  return label + (", emulated" if island.paced else "")
