"""The report of a run: one HTML file that needs nothing else.

It is made from tapes and metric logs alone, so it works for a run that is
still going, has crashed, or never began.
"""

import json
import os
import pathlib

from diloco.report import (
  charts,
  costs,
  figures,
  narrative,
  page,
  summary,
  tables,
)

FILE_NAME = "report.html"


def write_report(
  run_dir: str | os.PathLike[str], run: summary.Run | None = None
) -> pathlib.Path:
  """Writes `report.html` and returns its path, see `summary.path_for`."""
  run_dir = pathlib.Path(run_dir)
  run = run or summary.load(run_dir)
  path = summary.path_for(run_dir, FILE_NAME, run)
  summary.replace(path, render(run, run_dir.resolve().name))
  return path


def render(run: summary.Run, name: str) -> str:
  """Returns the report as a whole page of HTML."""
  view = run.view
  parts = [_head(run, name)]
  if not view.islands:
    parts.append(
      page.panel(
        "<p>No island of this run has started, so there is nothing to show."
        " The logs of its roles, under <code>logs/</code>, may say why.</p>",
        "Nothing was trained",
      )
    )
  else:
    story = f"<p>{page.text(' '.join(narrative.story(run)))}</p>"
    parts += [_cards(run), page.panel(story, "What happened")]
    parts += [*_pictures(run), *_tables(run)]
  parts += [_problems(run), _configuration(run), charts.script()]
  return page.page(f"{name} \N{MIDDLE DOT} diloco", filter(None, parts))


def _head(run: summary.Run, name: str) -> str:
  return (
    f"<h1>{page.text(name)}"
    f'<span class="tag">{page.text(run.view.status)}</span></h1>'
    '<p class="dim">Decoupled DiLoCo: islands that never wait for each other.'
    " Made from the tapes and metric logs of the run.</p>"
  )


def _cards(run: summary.Run) -> str:
  view, tokens = run.view, run.ledger.tokens()
  unit = view.token_unit
  bits = figures.bits(view.eval_loss)
  budget = view.total_tokens
  share = f"{unit}s"
  if budget:
    share = f"{figures.percent(tokens.trained / budget)} of the budget"
  speed = tokens.trained / view.wall_secs if view.wall_secs else None
  back = sum(incident.back_secs is not None for incident in run.incidents)
  survived = f"{back} of {len(run.incidents)}"
  gaps = [i.worst_gap for i in run.incidents if i.worst_gap is not None]
  worst = figures.times(max(gaps, default=None))
  mean = figures.number(view.merges.islands_mean)
  merged = f"{mean} of {view.num_islands} islands in each"
  return page.cards(
    [
      (f"Bits per {unit}", figures.number(bits, 4), "held out, global"),
      ("Trained", figures.count(tokens.trained), share),
      ("Speed", f"{figures.count(speed)}/s", f"{unit}s, whole run"),
      ("Goodput", figures.percent(run.goodput.ratio), "of allocated chip time"),
      ("Merges", f"{view.merges.count:,}", merged),
      ("Faults survived", survived, "target back at work"),
      ("Longest gap", worst, "of any survivor, over its median"),
    ]
  )


def _pictures(run: summary.Run) -> list[str]:
  view, drawn = run.view, charts.Charts(run.view)
  emulated = narrative.emulation_note(view)

  def panel(chart: charts.Chart, title: str, note: str = "") -> str:
    return page.panel(charts.html(chart, f"{title}, over the run"), title, note)

  parts = [
    page.pair(
      panel(drawn.loss_by_tokens(), "Loss against tokens"),
      panel(drawn.loss_by_time(), "Loss against time"),
    ),
    panel(drawn.timeline(run.incidents), "Timeline", emulated),
    "<h2>Over time</h2>",
    page.pair(
      panel(drawn.speed(), "Tokens per second, stacked", emulated),
      panel(drawn.traffic(), "Bytes per second"),
    ),
  ]
  if view.merges.count:
    parts.append(
      page.pair(
        panel(drawn.contributors(), "Contributors per merge"),
        panel(drawn.weights(), "Weights in merges, stacked"),
      )
    )
    panels = [
      panel(
        drawn.staleness(),
        "Staleness",
        "Global versions that came out between the one a contribution started"
        " from and the one it was merged into.",
      )
    ]
    if view.merges.series.column("paired").any():
      panels.append(
        panel(
          drawn.cosine(),
          "Cosine between outer gradients",
          "Of two contributions to one merge, the mean over pairs by weight and"
          " over tensors by size: 1 is one direction, 0 unrelated.",
        )
      )
    parts.append(page.pair(*panels))
  return parts


def _tables(run: summary.Run) -> list[str]:
  view = run.view
  parts = [
    "<h2>Islands</h2>",
    page.panel(
      tables.islands(run),
      note="Gap: time between the ends of two steps. Stall: gap time that"
      " neither compute nor pace explains. " + narrative.emulation_note(view),
    ),
    "<h2>Faults and deaths</h2>",
  ]
  if run.incidents:
    parts.append(
      page.panel(
        tables.incidents(run),
        note="Gaps of survivors: the longest between two steps, from one"
        " second before to ten seconds or ten median gaps after, over the"
        " island's own median gap. 1\N{MULTIPLICATION SIGN} is undisturbed.",
      )
    )
  else:
    parts.append(page.panel("<p>None.</p>"))
  parts += ["<h2>Where the tokens went</h2>", tables.ledger(run)]
  parts += [
    "<h2>Where the chip time went</h2>",
    page.panel(
      f"<p>{page.text(narrative.goodput_note(run.goodput))}</p>"
      + tables.goodput(run),
    ),
  ]
  if run.view.requests:
    read, write, *_ = costs.LIST_PRICES
    parts += [
      "<h2>What was asked of the store</h2>",
      page.panel(
        tables.requests(run),
        note="Of all lives. Tensors' chunks are requests too. In a bucket a"
        f" thousand reads are listed at ${read:g}, a thousand writes or"
        f" listings at ${write:g}; to delete is free.",
      ),
    ]
  return parts


def _problems(run: summary.Run) -> str:
  found = [*run.ledger.violations, *run.view.problems, *run.ledger.silent]
  if not found:
    return ""
  items = "".join(f"<li>{page.text(item)}</li>" for item in found)
  return '<h2 class="bad">What must not happen</h2>' + page.panel(
    f'<ul class="small">{items}</ul>',
    note="Broken rules of the ledger, and lines that could not be read.",
  )


def _configuration(run: summary.Run) -> str:
  config = run.view.config
  if not config:
    return ""
  whole = page.text(json.dumps(config, indent=2))
  around = narrative.environment(run.view)
  return "<h2>Configuration and environment</h2>" + page.panel(
    page.facts([*narrative.settings(run.view), *around])
    + "<details><summary class='dim small'>all of it</summary>"
    + f"<pre><code>{whole}</code></pre></details>"
  )
