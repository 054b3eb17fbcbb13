"""Tables of a report: islands, incidents, ledger and goodput."""

from collections.abc import Sequence

from diloco.report import (
  charts,
  clock,
  costs,
  figures,
  narrative,
  page,
  summary,
)
from diloco.report import view as view_lib
from diloco.tape import ledger as ledger_lib

_MERGED_COLOUR = charts.PALETTE[2]
_PENDING_COLOUR = charts.PALETTE[5]
_LOST_COLOURS = (
  *(charts.PALETTE[1], charts.FAULT, charts.PALETTE[4]),
  *(charts.PALETTE[3], charts.PALETTE[6], charts.PALETTE[7]),
)


def islands(run: summary.Run) -> str:
  """Returns the table of islands."""
  view = run.view
  heads = ["island", "kind", "state", "steps", "tokens", "restarts"]
  heads.append(f"bits per {view.token_unit}")
  heads += ["step p50", "gap p50", "gap p99", "gap max", "stall", "staleness"]
  rows = []
  for number, island in view.islands.items():
    gaps = [island.percentile("gap_secs", q) for q in (50, 99)]
    gaps.append(island.longest_gap)
    spot = page.dot(charts.island_colour(number, view.num_islands))
    speed = figures.times(island.relative_speed)
    if island.paced:
      pace = figures.secs(island.paced_step_secs)
      speed += f", emulated at {pace} a step"
      if island.missed_pace is not None:
        speed += f", seen {figures.secs(island.missed_pace)}"
    rows.append(
      [
        f"{spot}{number}",
        f"{page.text(island.kind)} {page.text(island.topology)}"
        f' <span class="dim">{page.text(speed)}</span>',
        page.text(view.state(number)),
        f"{island.step:,}",
        figures.count(run.ledger.islands.get(number, 0)),
        str(island.restarts),
        figures.number(figures.bits(island.loss)),
        figures.secs(island.percentile("step_secs", 50)),
        *map(figures.secs, gaps),
        figures.secs(island.stall_secs),
        figures.number(island.staleness_mean, 2),
      ]
    )
  return page.table(heads, rows, words=3)


def requests(run: summary.Run) -> str:
  """Returns the table of what the roles have asked of the store."""
  heads = ["role", *view_lib.REQUESTS, "a second", "US$ an hour"]
  rows = [
    [
      page.text(role),
      *(f"{facts[kind]:,}" for kind in view_lib.REQUESTS),
      figures.number(facts["per_sec"], 2),
      figures.number(facts["usd_per_hour"], 4),
    ]
    for role, facts in costs.by_role(run.view).items()
  ]
  return page.table(heads, rows, words=1)


def incidents(run: summary.Run) -> str:
  """Returns the table of faults and deaths."""
  heads = ["at", "what", "target", "cause of death", "tokens trained"]
  heads += ["back after", "survivors' longest gap", "of"]
  rows, run_clock = [], clock.RunClock(run.view)
  for incident in run.incidents:
    gaps = incident.gap_over_median
    worst = max(gaps, key=lambda m: gaps[m]) if gaps else None
    kind = incident.kind + (" (injected)" if incident.injected else "")
    rows.append(
      [
        page.text(figures.secs(run_clock.secs_at(incident.wall_secs))),
        page.text(kind),
        page.text(incident.target),
        page.text(incident.cause or figures.DASH),
        figures.count(incident.at_tokens),
        page.text(figures.secs(incident.back_secs)),
        figures.times(incident.worst_gap),
        figures.DASH if worst is None else f"island {worst}",
      ]
    )
  return page.table(heads, rows, words=4)


def ledger(run: summary.Run) -> str:
  """Returns the balanced ledger: an equation, a bar, and the reasons."""
  tokens, exact = run.ledger.tokens(), run.ledger
  terms = [
    ("merged", tokens.merged, _MERGED_COLOUR),
    ("pending", tokens.pending, _PENDING_COLOUR),
  ]
  for place, (reason, lost) in enumerate(tokens.discarded.items()):
    colour = _LOST_COLOURS[place % len(_LOST_COLOURS)]
    terms.append((reason, lost, colour))
  if tokens.unaccounted or exact.unaccounted:
    terms.append(("unaccounted", tokens.unaccounted, charts.INK))
  verdict = (
    '<p class="good">The books balance: every trained token has one fate.</p>'
    if exact.balanced
    else '<p class="bad">The books do not balance; see below.</p>'
  )
  return page.panel(
    _equation(tokens.trained, terms)
    + _bar(terms)
    + verdict
    + _reasons(terms, "tokens"),
    note=f"A step belongs to all {exact.num_fragments} fragments, and each"
    " fragment of it has a fate of its own. Exactly, in fragment-tokens: "
    + _exact(exact),
  )


def _equation(trained: int, terms: list[tuple[str, int, str]]) -> str:
  def term(figure: str, label: str) -> str:
    return f"<div>{figure}<small>{label}</small></div>"

  sides = [
    term(f"{count:,}", page.text(label.replace("_", " ")))
    for label, count, _ in terms
  ]
  total, equals = term(f"{trained:,}", "trained"), term("=", "&nbsp;")
  inner = total + equals + term("+", "&nbsp;").join(sides)
  return f'<div class="equation">{inner}</div>'


def goodput(run: summary.Run) -> str:
  """Returns where allocated chip time went: a bar, and the causes."""
  terms: list[tuple[str, float, str]] = [
    ("useful", run.goodput.useful_chip_secs, _MERGED_COLOUR)
  ]
  for place, (cause, secs) in enumerate(run.goodput.lost_chip_secs.items()):
    colour = charts.STATES.get(cause, charts.PALETTE[place % 8])
    terms.append((cause, secs, colour))
  return _bar(terms) + _reasons(terms, "chip-seconds")


def _bar(terms: Sequence[tuple[str, float, str]]) -> str:
  whole = max(sum(count for _, count, _ in terms), 1e-9)
  cells = [
    f'<i title="{page.text(label)}" style="width:{100 * count / whole:.3f}%;'
    f'background:{colour}"></i>'
    for label, count, colour in terms
  ]
  return '<div class="bar">' + "".join(cells) + "</div>"


def _reasons(terms: Sequence[tuple[str, float, str]], unit: str) -> str:
  whole = max(sum(count for _, count, _ in terms), 1e-9)
  rows = [
    [
      page.dot(colour) + page.text(label.replace("_", " ")),
      page.text(narrative.explain(label)),
      f"{count:,}" if isinstance(count, int) else f"{count:,.1f}",
      figures.percent(count / whole),
    ]
    for label, count, colour in terms
  ]
  return page.table(["fate", "meaning", unit, "share"], rows, words=2)


def _exact(ledger: ledger_lib.Ledger) -> str:
  parts = [f"{ledger.merged:,} merged", f"{ledger.pending:,} pending"]
  parts += [
    f"{count:,} {reason.replace('_', ' ')}"
    for reason, count in ledger.discarded.items()
  ]
  parts.append(f"{ledger.unaccounted:,} unaccounted")
  return f"{ledger.trained:,} trained = " + " + ".join(parts) + "."
