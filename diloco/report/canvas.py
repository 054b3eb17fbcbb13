"""How pictures of several runs look, and how they become inline SVG.

Text and axes are drawn in one stand-in colour that becomes the page's ink, so
that a picture reads on light and dark pages alike. Only matplotlib's objects
are used, never the state of pyplot.
"""

import functools
import html
import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import figure
from matplotlib.backends import backend_svg

INK = "#18202b"  # stands for the page's ink

_STYLE = {
  "svg.fonttype": "none",  # text stays text, in the page's font
  "svg.hashsalt": "diloco",
  "font.family": "sans-serif",
  "font.size": 9.5,
  "text.color": INK,
  "axes.edgecolor": INK,
  "axes.labelcolor": INK,
  "axes.facecolor": "none",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.linewidth": 0.7,
  "axes.grid": True,
  "axes.axisbelow": True,
  "xtick.color": INK,
  "ytick.color": INK,
  "xtick.major.size": 3,
  "ytick.major.size": 0,
  "grid.color": INK,
  "grid.alpha": 0.13,
  "grid.linewidth": 0.6,
  "legend.frameon": False,
  "legend.fontsize": 8.5,
  "legend.handlelength": 1.4,
}

Picture = Callable[..., str]


def picture(
  width: float, height: float, caption: str
) -> Callable[[Callable[..., Any]], Picture]:
  """Makes an SVG of a function that draws on given axes; sizes are in inches.

  The caption says in words what is to be seen, for those who cannot see it.
  """

  def decorate(draw: Callable[..., Any]) -> Picture:
    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> str:
      with matplotlib.rc_context(_STYLE):
        fig = figure.Figure(figsize=(width, height), layout="constrained")
        fig.patch.set_alpha(0)
        draw(fig.add_subplot(), *args, **kwargs)
        return _svg(fig, caption)

    return drawn

  return decorate


def _svg(fig: figure.Figure, caption: str) -> str:
  """Returns the figure as one `<svg>` element without links to anywhere."""
  buffer = io.StringIO()
  nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
  backend_svg.FigureCanvasSVG(fig).print_svg(buffer, metadata=nothing)
  text = buffer.getvalue()
  text = text[text.index("<svg") :]
  text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
  text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
  text = re.sub(r"xlink:href=", "href=", text)
  text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
  text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
  text = text.replace(INK, "var(--ink)")
  label = html.escape(caption, quote=True)
  return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def keep_in_sight(axes: axes_lib.Axes, values: np.ndarray) -> None:
  """Sets the y range so that the first steps do not flatten all others."""
  values = values[np.isfinite(values)]
  if len(values):
    low, high = values.min(), np.percentile(values, 96)
    margin = 0.05 * max(high - low, 0.02)
    axes.set_ylim(low - margin, high + margin)
