"""The summary of a run: one JSON object of figures, exact where they count."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import threading
from typing import Any

from diloco import config as config_lib
from diloco import errors, typed
from diloco.report import clock, costs, figures, liveness, totals, waste
from diloco.report import goodput as goodput_lib
from diloco.report import incidents as incidents_lib
from diloco.report import view as view_lib
from diloco.tape import ledger as ledger_lib

FILE_NAME = "summary.json"


@dataclasses.dataclass(frozen=True)
class Run:
  """Everything known of a run; what summary and report are made from."""

  view: view_lib.RunView
  ledger: ledger_lib.Ledger
  goodput: goodput_lib.Goodput
  incidents: list[incidents_lib.Incident]


def load(
  run_dir: str | os.PathLike[str], reading: totals.Reading | None = None
) -> Run:
  """Reads a run, from where it was read to, and balances its books."""
  reading = totals.catch_up(run_dir, reading)
  past = reading.whole_history()
  totals.keep(reading)
  view = reading.view
  if not liveness.controller_alive(run_dir):
    view.sessions.abandoned()
  ledger = ledger_lib.balance(past, view.num_fragments, view.every)
  goodput = goodput_lib.goodput(view, ledger.lost_spans, ledger.num_fragments)
  return Run(view, ledger, goodput, incidents_lib.find(view))


def summarise(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the summary of a run, live, crashed, finished or empty.

  Plain JSON values; a figure that is not known or not finite is None.

  Raises:
    UserError: there is no such directory.
  """
  return summary_of(load(run_dir))


def write_summary(
  run_dir: str | os.PathLike[str], run: Run | None = None
) -> dict[str, Any]:
  """Writes `summary.json` into the run directory and returns its content.

  If the one that is there was made from lines that are gone, it stays, and this
  one is written to the name `path_for` gives.
  """
  run = run or load(run_dir)
  facts = summary_of(run)
  text = json.dumps(facts, indent=2, allow_nan=False) + "\n"
  replace(path_for(run_dir, FILE_NAME, run), text)
  return facts


def path_for(
  run_dir: str | os.PathLike[str], name: str, run: Run
) -> pathlib.Path:
  """Returns where to write what is made of a run, such as "summary.json".

  It has "partial" in its name if lines are gone that the summary in the
  directory was made from.
  """
  path = pathlib.Path(run_dir) / name
  if lines_gone(run_dir, run):
    return path.with_suffix(f".partial{path.suffix}")
  return path


def lines_gone(run_dir: str | os.PathLike[str], run: Run) -> list[str]:
  """Returns files of which the run's summary knew more than there is now."""
  try:
    old = json.loads((pathlib.Path(run_dir) / FILE_NAME).read_text())
    before = {str(k): int(v) for k, v in old["made_from"].items()}
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return []
  now = run.view.made_from
  return [name for name, count in before.items() if now.get(name, 0) < count]


def set_aside(run_dir: str | os.PathLike[str], run: Run) -> None:
  """Keeps the summary and report of lines that are gone under another name.

  For the end of a session, whose own are the run's from then on.
  """
  if not lines_gone(run_dir, run):
    return
  for name in (FILE_NAME, "report.html"):
    path = pathlib.Path(run_dir) / name
    if path.exists():
      path.replace(path.with_suffix(f".earlier{path.suffix}"))


def replace(path: pathlib.Path, text: str) -> None:
  """Writes a file whole or not at all.

  Raises:
    OSError: it cannot be written; nothing is left of the attempt.
  """
  if path.is_dir():
    raise IsADirectoryError(
      errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path)
    )
  # Whoever writes the same file at this moment has one of its own.
  writer = f"{os.getpid()}-{threading.get_ident()}"
  temporary = path.with_name(f"{path.name}.{writer}.tmp")
  try:
    # Half a surrogate pair in a name is no reason to have no report.
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.replace(path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise


def summary_of(run: Run) -> dict[str, Any]:
  """Returns the summary of a run that was read before."""
  view, ledger = run.view, run.ledger
  session = view.sessions.last
  facts = {
    "status": view.status,
    "reason": session.reason if session else "",
    "method": view.method,
    "sessions": len(view.sessions.all),
    "wall_secs": view.wall_secs,
    "final_eval_loss": view.eval_loss,
    "final_eval_bits_per_token": figures.bits(view.eval_loss),
    "evaluations": view.evaluations,
    **_tokens(run),
    "goodput": run.goodput.ratio,
    "chip_secs": {
      "useful": run.goodput.useful_chip_secs,
      "allocated": run.goodput.allocated_chip_secs,
      "lost": dict(run.goodput.lost_chip_secs),
    },
    "global_versions": {
      "total": sum(view.versions.values()),
      "fragment_min": min(
        view.versions.get(p, 0) for p in range(ledger.num_fragments)
      ),
      "fragment_max": max(view.versions.values(), default=0),
    },
    "merges": _merges(view),
    "outer_gain": view.outer_gain,
    "bytes_published": view.bytes_published,
    "bytes_adopted": view.bytes_adopted,
    "islands": {str(m): _island(run, m) for m in view.islands},
    "syncer": {
      "deaths": len(view.syncer_deaths),
      "starts": len(view.syncer_starts),
      "takeovers": view.takeovers,
      "standby_deaths": len(view.standby_deaths),
    },
    "store": {
      "requests_by_role": costs.by_role(view),
      "requests_per_sec_per_island": costs.per_island(view),
      "usd_per_hour": costs.usd_per_hour(view),
    },
    "cuts": {"complete": view.cuts, "last": view.last_cut},
    "rollbacks": [
      {"cut": line.get("cut"), "epoch": epoch, "why": line.get("why", "")}
      for epoch, line in view.restores.items()
    ],
    "quarantines": view.quarantines.total(),
    "faults": [_incident(view, incident) for incident in run.incidents],
    "warnings": warnings(run),
    "violations": ledger.violations,
    "problems": [*view.problems, *ledger.silent],
    "made_from": view.made_from,
  }
  return typed.finite(facts)


def warnings(run: Run) -> list[str]:
  """Returns what its user should change, in words."""
  counts = run.ledger.tokens()
  found = [waste.warning(counts.trained, counts.discarded)]
  # It may be of another version, or damaged.
  with contextlib.suppress(errors.UserError, ZeroDivisionError):
    config = typed.build(config_lib.RunConfig, run.view.config, "config")
    found.append(waste.overshoot(config))
  if run.view.status == "finished":
    found.append(waste.left(counts.trained, counts.pending))
  return [text for text in found if text]


def _tokens(run: Run) -> dict[str, Any]:
  counts, ledger = run.ledger.tokens(), run.ledger
  secs = run.view.wall_secs
  return {
    "tokens_trained": counts.trained,
    "tokens_merged": counts.merged,
    "tokens_pending": counts.pending,
    "tokens_discarded": counts.discarded,
    "tokens_unaccounted": counts.unaccounted,
    "tokens_budget": run.view.total_tokens or None,
    "tokens_per_sec": counts.trained / secs if secs else None,
    "ledger": {
      "unit": "fragment_tokens",
      "num_fragments": ledger.num_fragments,
      "trained": ledger.trained,
      "merged": ledger.merged,
      "pending": ledger.pending,
      "discarded": ledger.discarded,
      "unaccounted": ledger.unaccounted,
      "rows_unmerged": ledger.unmerged_rows(),
      "balanced": ledger.balanced,
    },
  }


def _merges(view: view_lib.RunView) -> dict[str, Any]:
  sizes, count = view.merges.sizes, view.merges.count
  return {
    "count": count,
    "contributors": {str(n): sizes[n] for n in sorted(sizes)},
    "contributors_mean": view.merges.islands_mean,
    "staleness_mean": view.merges.staleness / count if count else None,
  }


def _island(run: Run, number: int) -> dict[str, Any]:
  island = run.view.islands[number]
  ratios = [
    incident.gap_over_median[number]
    for incident in run.incidents
    if number in incident.gap_over_median
  ]
  return {
    "kind": island.kind,
    "topology": island.topology,
    "devices": island.devices,
    "relative_speed": island.relative_speed,
    "paced": island.paced,
    "paced_step_secs": island.paced_step_secs,
    "state": run.view.state(number),
    "steps": island.step,
    "tokens": run.ledger.islands.get(number, 0),
    "restarts": island.restarts,
    "quarantines": run.view.quarantines[number],
    "loss": island.loss,
    "step_secs_p50": island.percentile("step_secs", 50),
    "gap_secs_p50": island.percentile("gap_secs", 50),
    "gap_secs_p99": island.percentile("gap_secs", 99),
    "gap_secs_max": island.longest_gap,
    "stall_secs": island.stall_secs,
    "staleness_mean": island.staleness_mean,
    "contributions_merged": island.merged,
    "bytes_published": int(island.published.total),
    "bytes_adopted": int(island.adopted.total),
    "fault_gap_over_median": max(ratios, default=None),
  }


def _incident(
  view: view_lib.RunView, incident: incidents_lib.Incident
) -> dict[str, Any]:
  return {
    "kind": incident.kind,
    "target": incident.target,
    "injected": incident.injected,
    "at_secs": clock.RunClock(view).secs_at(incident.wall_secs),
    "at_tokens": incident.at_tokens,
    "cause": incident.cause,
    "back_secs": incident.back_secs,
    "gap_over_median": {
      str(m): ratio for m, ratio in incident.gap_over_median.items()
    },
  }
