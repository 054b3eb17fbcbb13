"""Pictures of a run: loss, speed, merges and traffic."""

import itertools
import math
from collections.abc import Callable

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import ticker

from diloco.report import canvas, figures
from diloco.report import clock as clock_lib
from diloco.report import view as view_lib

_LINE_POINTS = 240
_TIME_POINTS = 80
_BIN_STEPS = 6
_LEGEND_ISLANDS = 8
_BITS_PER_NAT = 1 / math.log(2)

_COUNT_AXIS = ticker.FuncFormatter(lambda value, _: figures.count(value))
_BYTES_AXIS = ticker.FuncFormatter(lambda value, _: figures.num_bytes(value))


@canvas.picture(
  5.6, 3.5, "Loss of each island and of the global parameters against tokens"
)
def loss_by_tokens(axes: axes_lib.Axes, view: view_lib.RunView) -> None:
  """Draws loss against the tokens trained by all islands."""
  _loss(axes, view, view.tokens_at)
  axes.set_xlim(left=0)
  axes.set_xlabel("tokens trained by all islands together")
  axes.xaxis.set_major_formatter(_COUNT_AXIS)


@canvas.picture(
  5.6, 3.5, "Loss of each island and of the global parameters against time"
)
def loss_by_time(
  axes: axes_lib.Axes, view: view_lib.RunView, clock: clock_lib.RunClock
) -> None:
  """Draws loss against the time the run was on."""
  _loss(axes, view, clock.at)
  _time_axis(axes, clock)


def _loss(
  axes: axes_lib.Axes,
  view: view_lib.RunView,
  position: Callable[[np.ndarray], np.ndarray],
) -> None:
  shown = []
  unit = view.token_unit
  for number, island in view.islands.items():
    loss = island.steps.column("loss") * _BITS_PER_NAT
    where = position(island.steps.column("wall_secs"))
    good = np.isfinite(loss)
    x, y = canvas.averaged(where[good], loss[good], _LINE_POINTS)
    colour = canvas.island_colour(number, view.num_islands)
    label = f"island {number}" if _has_legend(view) else None
    axes.plot(x, y, color=colour, linewidth=1.0, alpha=0.75, label=label)
    shown.append(y)
  evals = [e for e in view.global_evals if math.isfinite(e.loss)]
  # Losses on samples of different sizes are no line: each has its own.
  for mark, tokens in zip(
    itertools.cycle(("o-", "D--", "s:")),
    sorted({e.tokens for e in evals}),
    strict=False,
  ):
    alike = [e for e in evals if e.tokens == tokens]
    y = np.array([e.loss for e in alike]) * _BITS_PER_NAT
    axes.plot(
      *(position(np.array([e.wall_secs for e in alike])), y, mark),
      color=canvas.INK,
      linewidth=1.5,
      markersize=3.2,
      label=f"global, {figures.count(tokens)} held-out {unit}s",
    )
    shown.append(y)
  canvas.keep_in_sight(axes, np.concatenate([np.array([]), *shown]))
  axes.set_ylabel(f"bits per {unit}")
  for line in axes.legend(loc="upper right").get_lines():
    line.set(linewidth=2, alpha=1)


def _has_legend(view: view_lib.RunView) -> bool:
  return view.num_islands <= _LEGEND_ISLANDS


def _time_axis(axes: axes_lib.Axes, clock: clock_lib.RunClock) -> None:
  axes.set_xlim(0, clock.length)
  axes.set_xlabel(clock.label)
  for seam in clock.seams:
    axes.axvline(seam, color=canvas.INK, linewidth=0.8, linestyle=":")


@canvas.picture(5.6, 2.5, "Tokens per second over time, islands stacked")
def speed(
  axes: axes_lib.Axes, view: view_lib.RunView, clock: clock_lib.RunClock
) -> None:
  """Draws tokens per second over time, the islands stacked."""
  edges = _bins(view, clock)
  floor = np.zeros(len(edges) - 1)
  for number, island in view.islands.items():
    where = clock.at(island.steps.column("wall_secs"))
    top = floor + _rate(where, island.steps.column("tokens"), edges, clock)
    colour = canvas.island_colour(number, view.num_islands)
    axes.stairs(top, edges, baseline=floor, fill=True, color=colour, alpha=0.8)
    floor = top
  axes.set_ylabel("tokens per second")
  axes.yaxis.set_major_formatter(_COUNT_AXIS)
  _time_axis(axes, clock)


@canvas.picture(5.6, 2.5, "Bytes per second over time, all islands together")
def traffic(
  axes: axes_lib.Axes, view: view_lib.RunView, clock: clock_lib.RunClock
) -> None:
  """Draws bytes published and adopted per second."""
  edges = _bins(view, clock)
  for name, moments, colour in (
    ("adopted", view.adopted, canvas.PALETTE[5]),
    ("published", view.published, canvas.PALETTE[1]),
  ):
    where = clock.at(moments.series.column("wall_secs"))
    sizes = moments.series.column("amount")
    rate = _rate(where, sizes, edges, clock)
    axes.stairs(rate, edges, color=colour, linewidth=1.4, label=name)
  axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
  axes.set_ylabel("bytes per second")
  axes.yaxis.set_major_formatter(_BYTES_AXIS)
  axes.legend(loc="upper right", ncols=2)
  _time_axis(axes, clock)


@canvas.picture(5.6, 2.5, "How many islands entered each merge, over time")
def contributors(
  axes: axes_lib.Axes, view: view_lib.RunView, clock: clock_lib.RunClock
) -> None:
  """Draws the islands in a merge over time: mean and range."""
  merges = view.merges.series
  moments = clock.at(merges.column("wall_secs"))
  sizes = merges.column("islands") / merges.column("count")
  x, y = canvas.averaged(moments, sizes, _TIME_POINTS)
  fewest, most = merges.column("fewest"), merges.column("most")
  low = canvas.averaged(moments, fewest, _TIME_POINTS, np.min)[1]
  high = canvas.averaged(moments, most, _TIME_POINTS, np.max)[1]
  colour = canvas.PALETTE[0]
  axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
  axes.plot(x, y, color=colour, linewidth=1.5)
  axes.axhline(
    view.num_islands, color=canvas.INK, linewidth=0.8, linestyle=(0, (4, 3))
  )
  axes.set_ylim(0, 1.12 * view.num_islands)
  axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
  axes.set_ylabel("islands in a merge")
  _time_axis(axes, clock)


@canvas.picture(5.6, 2.5, "Staleness of merged contributions over time")
def staleness(
  axes: axes_lib.Axes, view: view_lib.RunView, clock: clock_lib.RunClock
) -> None:
  """Draws the mean staleness of merged contributions over time."""
  merges = view.merges.series
  moments = clock.at(merges.column("wall_secs"))
  values = merges.column("staleness") / merges.column("count")
  x, y = canvas.averaged(moments, values, _TIME_POINTS)
  colour = canvas.PALETTE[3]
  axes.fill_between(x, y, color=colour, alpha=0.16, linewidth=0)
  axes.plot(x, y, color=colour, linewidth=1.5)
  axes.set_ylim(0, max(1.0, 1.15 * y.max(initial=0.0)))
  axes.set_ylabel("versions behind, mean")
  _time_axis(axes, clock)


def _bins(view: view_lib.RunView, clock: clock_lib.RunClock) -> np.ndarray:
  """Returns edges of equal stretches of time, each of several steps."""
  gaps = [island.percentile("gap_secs", 50) for island in view.islands.values()]
  slowest = max((gap for gap in gaps if gap is not None), default=1.0)
  steps = clock.length * clock.unit_secs / max(slowest, 1e-6)
  number = int(np.clip(steps / _BIN_STEPS, 4, _TIME_POINTS))
  return np.linspace(0, clock.length, number + 1)


def _rate(
  where: np.ndarray,
  amounts: np.ndarray,
  edges: np.ndarray,
  clock: clock_lib.RunClock,
) -> np.ndarray:
  sums, _ = np.histogram(where, edges, weights=np.nan_to_num(amounts))
  return sums / (np.diff(edges) * clock.unit_secs)
