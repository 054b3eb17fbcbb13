"""A run watched while it goes on.

On a terminal a table is redrawn in place; elsewhere, in a log file or a
notebook, one line is printed every few seconds and on every event that
matters. Both go to stderr: stdout belongs to results.
"""

import contextlib
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import rich.console
import rich.live

from diloco import errors
from diloco.report import (
  dashboard,
  figures,
  liveness,
  openmetrics,
  summary,
  totals,
)
from diloco.report import status as status_lib
from diloco.report import view as view_lib
from diloco.tape import events, reader

logger = logging.getLogger(__name__)

_DRAW_SECS = 0.5  # between two draws
_DRAW_CPU_SECS = 0.00125  # that one may take for that, a 400th of a core
_LINE_SECS = 5.0
_WATCH_SECS = 0.25
_ELSEWHERE_SECS = 5.0  # between two looks into a store
_NOTABLE = {
  events.FAULT_INJECTED: ("kind", "target", "at_tokens"),
  events.ISLAND_DIED: ("island", "cause"),
  events.ISLAND_RESTART: ("island", "attempt", "delay_secs"),
  events.SYNCER_DIED: ("seat", "cause"),
  events.EVALUATOR_DIED: ("cause",),
  events.LEASE_ACQUIRED: ("role", "token"),
  events.QUARANTINED: ("island", "reason", "offences", "suspended_secs"),
  events.RESYNCED: ("role", "step"),
  events.RESTORED: ("cut", "epoch", "why"),
  events.REATTACHED: ("peer", "pid"),
  events.NOT_RESTORED: ("fragments", "reason"),
  events.GLOBAL_DAMAGED: ("fragment", "version", "reason"),
  events.HEAD_HEALED: ("fragment", "version"),
  events.CONFIG_CHANGED: ("changes",),
  events.CUT_COMPLETED: ("cut", "secs"),
  events.CUT_ABANDONED: ("cut", "reason"),
  events.EVALUATED: ("target", "bits_per_token", "tokens"),
  events.RUN_STOPPING: ("reason",),
  events.RUN_FINISHED: ("status", "reason"),
}


class LiveView:
  """Shows a run while it goes on; whoever runs it calls `tick()`."""

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    stream: TextIO | None = None,
    quiet: bool = False,
    exposed_secs: float = 0.0,
    hint: str = "",
  ):
    """Takes what there is, so that only news will be told.

    Args:
      run_dir: directory of the run; it need not exist yet.
      stream: where to show it; stderr if None.
      quiet: show nothing; only keep the run's totals.
      exposed_secs: write the run's state for a scraper so often; 0: never.
      hint: what the user can do, for a terminal.
    """
    self._run_dir = pathlib.Path(run_dir)
    self._stream = stream or sys.stderr
    self._reading = totals.begin(run_dir)
    self.shown = self._reading.view
    self._reading.read_on()
    self._due = self._line_due = self._exposed_due = 0.0
    self._exposed_secs = exposed_secs
    self._printed = self._failure = ""
    self._named: set[pathlib.Path] = set()  # files told to be broken
    self._quiet = quiet
    self._hint = hint
    self._screen: rich.live.Live | None = None
    self._keeper: threading.Thread | None = None  # of totals, the last one
    if self._stream.isatty() and not quiet:
      console = rich.console.Console(file=self._stream)
      self._screen = rich.live.Live(console=console, auto_refresh=False)

  def tick(self, alive: bool = True) -> None:
    """Takes what is new and shows it; cheap if called too often.

    `alive` tells whether the run's controller is.
    """
    now = time.monotonic()
    if now >= self._due:
      began = time.thread_time()
      self._show(now, alive)
      times = max(1.0, (time.thread_time() - began) / _DRAW_CPU_SECS)
      # A large fleet on a slow machine is drawn less often, but it is.
      self._due = now + min(_DRAW_SECS * times, _LINE_SECS)

  def close(self, alive: bool = True) -> None:
    """Shows the last state and leaves the terminal as it was."""
    self._line_due = self._exposed_due = 0.0  # whatever was a moment ago
    self._wait()
    self._show(time.monotonic(), alive)
    self._wait()
    if self._screen is not None:
      with contextlib.suppress(Exception):
        self._screen.stop()

  def _show(self, now: float, alive: bool) -> None:
    """Shows what there is; a picture that fails never ends its run."""
    if self._keeper is not None and self._keeper.is_alive():
      return  # what is being kept stands still
    try:
      self._refresh(now, alive)
      self._keep()
      self._failure = ""
    except Exception as error:
      failure = f"{type(error).__name__}: {error}"
      if failure != self._failure:  # said once, not twice a second
        logger.warning("not_shown error=%s", failure)
      self._failure = failure

  def _keep(self) -> None:
    """Has totals kept beside the ticks: of a large run it takes a while."""
    if self._reading.is_due:
      self._keeper = threading.Thread(target=self._kept, daemon=True)
      self._keeper.start()

  def _kept(self) -> None:
    try:
      totals.keep(self._reading)
    except Exception as error:  # they are kept another time
      logger.warning("totals_not_kept error=%s", errors.one_line(error))

  def _wait(self) -> None:
    if self._keeper is not None:
      self._keeper.join()

  def _refresh(self, now: float, alive: bool) -> None:
    if not self.shown.config:
      self.shown.config = view_lib.read_config(self._run_dir)
    record = self._reading.read_on(again=True)
    if self._exposed_secs and now >= self._exposed_due:
      self._exposed_due = now + self._exposed_secs
      facts = status_lib.status_of(self.shown, alive, time.time())
      told = openmetrics.text(facts, self._run_dir.name)
      summary.replace(self._run_dir / openmetrics.FILE_NAME, told)
    if self._quiet:
      return
    if self._screen is None:
      self._print_events(record)
      if now < self._line_due:
        return
      self._line_due = now + _LINE_SECS
    facts = status_lib.status_of(self.shown, alive, time.time())
    if self._screen is None:
      line = _line(facts)
      if line != self._printed:
        self._print(line)
      self._printed = line
    else:
      hint = self._hint if facts["status"] in ("running", "empty") else ""
      picture = dashboard.render(facts, self._run_dir.name, hint)
      # Only now, for it hides the cursor, and who ticks is sure to close.
      self._screen.start()
      self._screen.update(picture, refresh=True)

  def _print_events(self, record: reader.Record) -> None:
    for line in record.events:
      names = _NOTABLE.get(line["event"])
      if names is None or line.get("target") == "local":
        continue
      told = [f"{n}={_plain(line[n])}" for n in names if n in line]
      self._print(" ".join([line["event"], *told]))
    for problem in record.problems:
      if problem.path not in self._named:  # once a file, however many lines
        self._print(f"problem {problem}")
        self._named.add(problem.path)

  def _print(self, text: str) -> None:
    print(text, file=self._stream, flush=True)


def _line(facts: dict[str, Any]) -> str:
  """Returns a run's state as one line."""
  states = [island["state"] for island in facts["islands"].values()]
  waiting, word = states.count("starting"), dashboard.STATE_WORDS["starting"]
  parts = [
    facts["status"],
    f"{figures.count(facts['tokens'])} tokens",
    f"{states.count('training')} of {len(states)} islands training"
    + (f", {waiting} {word}" if waiting else ""),
    dashboard.describe(facts),
  ]
  if facts["progress"] is not None:
    parts[1] += f" ({figures.percent(facts['progress'])} of the budget)"
  return "  \N{MIDDLE DOT}  ".join(parts)


def _plain(value: object) -> str:
  return figures.number(value, 5) if isinstance(value, float) else str(value)


def render_status(run_dir: str | os.PathLike[str]) -> None:
  """Prints the state of a run once, to stdout; only a terminal folds lines."""
  name = pathlib.Path(run_dir).resolve().name
  picture = dashboard.render(status_lib.status(run_dir), name)
  out = rich.console.Console()
  if not out.is_terminal:
    out.width = dashboard.width(out, picture)
  out.print(picture)


def watch(
  run_dir: str | os.PathLike[str],
  refresh: Callable[[], object] | None = None,
) -> None:
  """Shows a run until it ends, dies, or the user has seen enough.

  `refresh` brings what is new of a run elsewhere.
  """
  status_lib.status(run_dir)  # refuses a directory that is not there
  view = LiveView(run_dir, hint="Ctrl-C ends this view, not the run")
  alive = True
  try:
    while alive:
      if refresh is not None:
        refresh()
      alive = liveness.controller_alive(run_dir)
      view.tick(alive)
      time.sleep(_ELSEWHERE_SECS if refresh else _WATCH_SECS)
  except KeyboardInterrupt:
    pass
  finally:
    view.close(liveness.controller_alive(run_dir))
