"""A picture of a simulated fleet: what each island did, and how many trained.

Pixels are bins of time: each shows what the island spent most of the bin on.
"""

from collections.abc import Sequence

import matplotlib.colors
import matplotlib.figure
import matplotlib.patches
import numpy as np

from diloco import errors
from diloco.planning.fleet import fleet as fleet_lib
from diloco.planning.fleet import jobs, outcome, simulator
from diloco.planning.fleet import scenario as scenario_lib

_BINS = 800
_STATES = ("training", *jobs.LOSSES[:4], "away")
_COLORS = ("#4c9f70", "#e07a3f", "#e8c547", "#c8423b", "#5b2333", "#e6e6e6")


def shares(
  history: jobs.History, start: float, end: float, bins: int
) -> np.ndarray:
  """Returns how a job spent its time from `start` to `end`, in seconds.

  [6, bins]: training, the four kinds of pause, not there; columns add up to 1.
  """
  edges = np.linspace(start, end, bins + 1)
  width = (end - start) / bins
  found = np.zeros((len(_STATES), bins))
  there = _covered([(history.start_secs, history.end_secs)], edges)
  for cause in range(4):
    spans = [(a, b) for a, b, kind in history.pauses if kind == cause]
    found[1 + cause] = _covered(spans, edges) / width
  found[-1] = 1 - there / width
  found[0] = np.maximum(1 - found[1:].sum(axis=0), 0.0)
  return found


def _covered(
  spans: Sequence[tuple[float, float]], edges: np.ndarray
) -> np.ndarray:
  """Seconds of each bin that lie in the spans, which are in order."""
  if not spans:
    return np.zeros(len(edges) - 1)
  starts, ends = np.array(spans).T
  before = np.concatenate(([0.0], np.cumsum(ends - starts)))
  i = np.searchsorted(starts, edges, side="right")
  last = np.maximum(i - 1, 0)
  inside = np.clip(edges - starts[last], 0.0, ends[last] - starts[last])
  until = np.where(i > 0, before[last] + inside, 0.0)
  return np.diff(until)


def draw(scenario: scenario_lib.Scenario, seed: int, path: str) -> None:
  """Simulates one seed and writes its picture."""
  figure = _figure(simulator.simulate_seed(scenario, seed))
  with errors.writing(f"--timeline={path}"):
    figure.savefig(path, format="png")


def _figure(result: outcome.Outcome) -> matplotlib.figure.Figure:
  count, horizon = len(result.jobs), result.horizon_secs
  # Short enough to see single pauses, of which a month has too many.
  zoom = min(horizon, 3600.0)
  figure = matplotlib.figure.Figure(
    figsize=(10, 3.5 + 0.3 * count), layout="constrained"
  )
  top, middle, bottom = figure.subplots(
    3, 1, gridspec_kw={"height_ratios": [2, 2, 1 + count / 4]}
  )
  whole = np.stack([shares(j.history, 0, horizon, _BINS) for j in result.jobs])
  days = np.linspace(0, horizon / fleet_lib.SECS_PER_DAY, _BINS)
  mean = whole.mean(axis=0)
  top.stackplot(days, mean, colors=_COLORS, labels=_STATES)
  top.set(ylim=(0, 1), ylabel="share of islands", xlabel="days")
  top.margins(x=0)
  first = np.stack([shares(j.history, 0, zoom, _BINS) for j in result.jobs])
  minutes = np.linspace(0, zoom / 60, _BINS)
  middle.plot(minutes, first[:, 0].sum(axis=0), color=_COLORS[0], lw=0.8)
  middle.set(ylabel="islands training", ylim=(0, count * 1.05))
  middle.margins(x=0)
  bottom.imshow(
    first.argmax(axis=1),
    aspect="auto",
    interpolation="nearest",
    cmap=matplotlib.colors.ListedColormap(_COLORS),
    vmin=-0.5,
    vmax=len(_STATES) - 0.5,
    extent=(0, zoom / 60, count - 0.5, -0.5),
  )
  bottom.set(ylabel="island", xlabel="minutes, from the start")
  figure.legend(
    handles=[
      matplotlib.patches.Patch(color=color, label=state)
      for color, state in zip(_COLORS, _STATES, strict=True)
    ],
    loc="outside lower center",
    ncols=len(_STATES),
    frameon=False,
  )
  top.set_title(
    f"goodput {100 * result.goodput:.1f} %, uptime {100 * result.uptime:.2f} %,"
    f" {result.failures:,} failures",
    fontsize=10,
  )
  return figure
