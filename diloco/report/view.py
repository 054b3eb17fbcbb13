"""A run as its tapes and metric logs show it, live, crashed or finished.

`RunView` takes lines as they come, so that a live view pays only for what is
new. Times are wall times of the machine that wrote the line: good enough for
pictures, and no decision rests on them.
"""

import bisect
import collections
import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from diloco import config as config_lib
from diloco import errors, typed
from diloco.report import figures, island_view, series
from diloco.report import sessions as sessions_lib
from diloco.tape import events, history, reader


class Eval(NamedTuple):
  """One evaluation of the global parameters on held-out data."""

  wall_secs: float
  island: int | None  # None: the evaluator did it
  loss: float  # nats per token
  tokens: int  # held out: how large the sample is


REQUESTS = ("reads", "writes", "lists", "deletes")  # to a store, by kind
MAX_CHECKPOINTS = 400  # that are kept; a picture shows no more
_MAX_EVALS = 4096
_RECENT = 50


class Merges:
  """New global versions: figures of all, and a series."""

  def __init__(self) -> None:
    self.count = 0
    self.sizes: collections.Counter[int] = collections.Counter()  # islands
    self.staleness = 0.0  # sum over merges of their means
    self.recent: collections.deque[int] = collections.deque(maxlen=_RECENT)
    self.series = series.Series(
      {
        "wall_secs": "last",
        "islands": "sum",
        "fewest": "min",
        "most": "max",
        "staleness": "sum",
        "cosine": "sum",
        "paired": "sum",
      }
    )

  def add(
    self,
    wall_secs: float,
    islands: int,
    staleness: float,
    cosine: float | None = None,
  ) -> None:
    """Takes a version: how many islands are in it, how stale, how alike."""
    self.count += 1
    self.sizes[islands] += 1
    self.staleness += staleness
    self.recent.append(islands)
    self.series.append(
      {
        "wall_secs": wall_secs,
        "islands": islands,
        "fewest": islands,
        "most": islands,
        "staleness": staleness,
        "cosine": cosine or 0.0,
        "paired": cosine is not None,
      }
    )

  @property
  def islands_mean(self) -> float | None:
    """Mean number of islands in a merge."""
    total = sum(size * times for size, times in self.sizes.items())
    return total / self.count if self.count else None


class RunView:
  """Everything a report or a live view shows, but the ledger."""

  def __init__(self) -> None:
    self.config: dict[str, Any] = {}  # the run's, as plain values
    self.method = ""
    self.sessions = sessions_lib.Sessions()
    self.initial_islands = 0  # those the run was started with
    self.islands: dict[int, island_view.IslandView] = {}
    self.merges = Merges()
    self.global_evals: list[Eval] = []  # in the order they were done
    self.evaluations = 0  # of them, in all
    self.faults: list[reader.Line] = []
    self.deaths: list[reader.Line] = []
    self.checkpoints: list[tuple[float, int]] = []  # wall_secs, island; first
    self.versions: dict[int, int] = {}  # newest version by fragment
    self.syncer_starts: list[float] = []
    self.syncer_deaths: list[float] = []  # of leaders
    self.standby_deaths: list[float] = []
    self.syncer_leads: list[float] = []  # when each leader began
    self.takeovers = 0  # from leaders that did not leave in order
    self._led = False  # a leader has not left in order
    self.cuts = 0  # complete
    self.last_cut: int | None = None
    self.last_cut_secs = 0.0  # wall time of the newest
    self.restores: dict[int, reader.Line] = {}  # by epoch, each return to a cut
    self.quarantines: collections.Counter[int] = collections.Counter()
    # By island, the life that was suspended last and until when.
    self._suspended: dict[int, tuple[int, float]] = {}
    self.resyncs: list[tuple[float, int]] = []  # wall_secs, island
    self.damaged: dict[int, str] = {}  # fragments that stand still, and why
    self.made_from: dict[str, int] = {}  # sound lines by file
    self._stood_still: list[str] = []
    self._broken: dict[pathlib.Path, str] = {}  # files, and what is wrong
    # By role and life: requests of each kind, and in how many seconds.
    self.requests: dict[str, list[float]] = {}
    self.changes: list[dict[str, Any]] = []  # of settings while it was on
    self.last_wall_secs = 0.0
    self._controller = 0  # its newest life
    self._begun = False  # a session, by a life whose start is not told yet
    self._total_tokens = 0

  def _handlers(self) -> Mapping[str, Callable[[reader.Line], object]]:
    return {
      events.RUN_STARTED: self._run_started,
      events.RUN_FINISHED: self._run_finished,
      events.ISLAND_STARTED: self._island_started,
      events.ISLAND_DIED: self._ended,
      events.ISLAND_RESTART: self._ended,
      events.STOPPED: self._ended,
      events.SYNCER_STARTED: self._syncer,
      events.SYNCER_DIED: self._syncer,
      events.LEASE_ACQUIRED: self._lease_acquired,
      events.REATTACHED: self._reattached,
      events.CONFIG_CHANGED: lambda e: self.changes.append(e["changes"]),
      events.FAULT_INJECTED: self.faults.append,
      events.STARTED: lambda e: self._of(e).started(e),
      events.PUBLISHED: self._published,
      events.ADOPTED: self._adopted,
      events.EVALUATED: self._evaluated,
      events.CHECKPOINTED: self._checkpointed,
      events.MERGED: self._merged,
      events.CUT_COMPLETED: self._cut_completed,
      events.GLOBAL_DAMAGED: self._global_damaged,
      events.HEAD_HEALED: lambda e: self.damaged.pop(e["fragment"], None),
      events.RESTORED: self._restored,
      events.NOT_RESTORED: self._not_restored,
      events.QUARANTINED: self._quarantined,
      events.RESYNCED: self._resynced,
      events.STORE_REQUESTS: self._store_requests,
    }

  def update(
    self, record: reader.Record, past: history.History | None = None
  ) -> None:
    """Takes the lines written since the last call, and so does `past`."""
    handlers = self._handlers()
    for line, island in reader.together(record):
      if past is not None:
        past.take(line, island)
      if line.get("role") == "controller":
        self._of_controller(line)
      if island is not None:
        self._island(island).log(line)
      elif handler := handlers.get(line["event"]):
        handler(line)
      self.last_wall_secs = max(self.last_wall_secs, line["wall_secs"])
      self.sessions.heard(line["wall_secs"])
    self.made_from |= record.sound
    for problem in record.problems:
      self._broken[problem.path] = str(problem)

  def _island(self, island: int) -> island_view.IslandView:
    if island not in self.islands:
      self.islands[island] = island_view.IslandView(island)
      self.islands = dict(sorted(self.islands.items()))
    return self.islands[island]

  def _of_controller(self, line: reader.Line) -> None:
    """A life of the controller is a session, be its first line broken."""
    if line["incarnation"] > self._controller:
      self._controller = line["incarnation"]
      self._begun = line["event"] != events.RUN_STARTED
      if self._begun:
        self.sessions.started(line["wall_secs"])

  def _run_started(self, line: reader.Line) -> None:
    if not self._begun:
      self.sessions.started(line["wall_secs"])
    self._begun = False
    self.method = line.get("method") or self.method
    self.initial_islands = line.get("islands") or self.initial_islands
    self._total_tokens = line.get("total_tokens") or self._total_tokens

  def _run_finished(self, line: reader.Line) -> None:
    self._led = False
    status = line.get("status") or "finished"
    reason = line.get("reason") or ""
    self.sessions.finished(line["wall_secs"], status, reason)

  def _island_started(self, line: reader.Line) -> None:
    view = self._island(line["island"])
    view.life(line["island_incarnation"]).launched = line["wall_secs"]

  def _of(self, line: reader.Line) -> island_view.IslandView:
    return self._island(history.island_of(line))

  def _ended(self, line: reader.Line) -> None:
    if line["event"] == events.ISLAND_DIED:
      self.deaths.append(line)
    self._of(line).ended(line)

  def _syncer(self, line: reader.Line) -> None:
    if line["event"] == events.SYNCER_DIED:
      led = line.get("led", True)
      deaths = self.syncer_deaths if led else self.standby_deaths
      deaths.append(line["wall_secs"])
      self.deaths.append(line)
    else:
      self.syncer_starts.append(line["wall_secs"])

  def _lease_acquired(self, line: reader.Line) -> None:
    self.syncer_leads.append(line["wall_secs"])
    self.takeovers += self._led
    self._led = True

  def _reattached(self, line: reader.Line) -> None:
    if not line["peer"].startswith(("island-", "evaluator")):
      self.syncer_leads.append(line["wall_secs"])  # in this session

  def _cut_completed(self, line: reader.Line) -> None:
    if self.last_cut is not None and line["cut"] <= self.last_cut:
      return  # told by two controllers, one of which stood still meanwhile
    self.cuts += 1
    self.last_cut = line["cut"]
    self.last_cut_secs = line["wall_secs"]

  def _global_damaged(self, line: reader.Line) -> None:
    fragment, version = line["fragment"], line["version"]
    text = (
      f"fragment {fragment} stands still: its version {version} cannot be read"
      f" ({line['reason']})"
    )
    self.damaged[fragment] = text
    self._stood_still.append(text)

  def _not_restored(self, line: reader.Line) -> None:
    for fragment in line["fragments"]:
      text = self.damaged.get(fragment, f"fragment {fragment} stands still")
      self.damaged[fragment] = f"{text}; {line['reason']}"

  def _restored(self, line: reader.Line) -> None:
    self.damaged.clear()
    # One that a second attempt finished may be told twice, with one epoch.
    self.restores[line.get("epoch", len(self.restores) + 1)] = line

  def _resynced(self, line: reader.Line) -> None:
    self.resyncs.append((line["wall_secs"], history.island_of(line)))

  def _store_requests(self, line: reader.Line) -> None:
    life = f"{line['role']}.{line['incarnation']}"
    fields = (*REQUESTS, "over_secs")  # once a deletion was a write
    self.requests[life] = [line.get(name, 0) for name in fields]

  def suspended_secs(self, island: int, now: float) -> float:
    """How long contributions of an island are still refused unseen, at `now`.

    A life's suspension ends with it.
    """
    life, until = self._suspended.get(island, (0, 0.0))
    newest = max(self.islands[island].lives, default=0)
    return max(until - now, 0.0) if life == newest else 0.0

  def _quarantined(self, line: reader.Line) -> None:
    island, life = line["island"], line["island_incarnation"]
    self.quarantines[island] += 1
    until = line["wall_secs"] + (line.get("suspended_secs") or 0.0)
    before = self._suspended.get(island, (life, until))
    if before[0] == life:
      until = max(until, before[1])
    self._suspended[island] = max(before, (life, until))

  def _published(self, line: reader.Line) -> None:
    self._of(line).published.add(line["wall_secs"], line.get("bytes") or 0)

  def _adopted(self, line: reader.Line) -> None:
    self._of(line).adopted.add(line["wall_secs"], line.get("bytes") or 0)

  def _evaluated(self, line: reader.Line) -> None:
    if line["target"] != "global":
      return
    loss = line["loss"]
    found = Eval(
      line["wall_secs"],
      history.island_of(line) if history.is_island(line) else None,
      math.nan if loss is None else loss,
      line.get("tokens") or 0,
    )
    self.evaluations += 1
    bisect.insort(self.global_evals, found, key=lambda e: e.wall_secs)
    if len(self.global_evals) > _MAX_EVALS:
      del self.global_evals[1::2]

  def _checkpointed(self, line: reader.Line) -> None:
    if len(self.checkpoints) < MAX_CHECKPOINTS:
      self.checkpoints.append((line["wall_secs"], history.island_of(line)))

  def _merged(self, line: reader.Line) -> None:
    fragment, version = line["fragment"], line["version"]
    if version <= self.versions.get(fragment, 0):
      return  # told again, by a syncer that took over
    self.versions[fragment] = version
    self.damaged.pop(fragment, None)
    contributions = line["contributions"]
    staleness = [c.get("staleness") or 0 for c in contributions]
    whole = sum(c.get("weight") or 0.0 for c in contributions) or 1.0
    for one, stale in zip(contributions, staleness, strict=True):
      island = self._island(one["island"])
      island.merged += 1
      island.staleness += stale
      share = (one.get("weight") or 0.0) / whole
      island.weights.add(line["wall_secs"], share)
    self.merges.add(
      line["wall_secs"],
      len({c["island"] for c in contributions}),
      float(np.mean(staleness)) if staleness else 0.0,
      line.get("cosine"),
    )

  @property
  def eval_loss(self) -> float | None:
    """Of the newest global parameters; None before the first evaluation."""
    return self.global_evals[-1].loss if self.global_evals else None

  @property
  def broken(self) -> list[str]:
    """What is wrong with its record, one line for each file."""
    return list(self._broken.values())

  @property
  def problems(self) -> list[str]:
    """What is wrong with the run's data or its record, one line each."""
    return [*self._stood_still, *self.broken]

  @property
  def bytes_published(self) -> int:
    """By all islands."""
    return int(sum(one.published.total for one in self.islands.values()))

  @property
  def bytes_adopted(self) -> int:
    """By all islands."""
    return int(sum(one.adopted.total for one in self.islands.values()))

  @property
  def status(self) -> str:
    """How the run ended; "running" without an end, "empty" without a start."""
    session = self.sessions.last
    if session is None:
      return "running" if self.islands else "empty"
    return session.status or "running"

  def state(self, island: int) -> island_view.State:
    """Returns the state of an island, seen with the state of the run."""
    state = self.islands[island].state
    if state == "dead":
      return state
    if self.status == "finished":
      return "done"
    if self.status == "stopped":
      return "stopped"
    if state != "stopped" and self.status == sessions_lib.CRASHED:
      return "dead"
    return state

  @property
  def start(self) -> float:
    """Wall time of the first thing known."""
    moments = [session.start for session in self.sessions.all[:1]] + [
      life.born
      for view in self.islands.values()
      for life in view.lives.values()
      if life.born is not None
    ]
    return min(moments, default=0.0)

  @property
  def wall_secs(self) -> float:
    """Time the run was on, over all its sessions."""
    if self.sessions.all:
      return self.sessions.secs_on()
    return max(self.last_wall_secs - self.start, 0.0)

  @property
  def num_islands(self) -> int:
    """Islands the run was started with, or more if more came."""
    return max(self.initial_islands, max(self.islands, default=-1) + 1)

  def _stated(self, group: str, name: str) -> Any:
    """A field of the configuration, whatever is in it; None if it is not."""
    fields = self.config.get(group)
    return fields.get(name) if isinstance(fields, dict) else None

  @property
  def num_fragments(self) -> int:
    """P, from the configuration or else from what was merged."""
    stated = self._stated("sync", "num_fragments")
    seen = max(self.versions, default=0) + 1
    return max(stated, seen) if isinstance(stated, int) else seen

  @property
  def every(self) -> int:
    """H, the largest the run has had; 0 if it is unknown."""
    stated = self._stated("sync", "every")
    had = [stated, *(h for c in self.changes for h in c.get("sync.every", ()))]
    return max((h for h in had if isinstance(h, int)), default=0)

  @property
  def job_slices(self) -> int:
    """Slices of one job that is on all of them; 1 of islands, each on one."""
    slices = self._stated("fleet", "slices")
    if not isinstance(slices, list):
      return 1
    return len(slices) if self.method.endswith("data_parallel") else 1

  @property
  def outer_gain(self) -> float | None:
    """G of the outer optimizer; None if it is unknown."""
    outer = self.config.get("outer")
    with contextlib.suppress(errors.UserError, ZeroDivisionError):
      if outer is not None:
        return typed.build(config_lib.OuterConfig, outer, "config.outer").gain
    return None

  @property
  def token_unit(self) -> str:
    """What a token is, for the tasks that are built in."""
    return figures.token_unit(str(self._stated("task", "name")))

  @property
  def total_tokens(self) -> int:
    """The token budget; 0 if it is unknown."""
    return self._total_tokens or self.config.get("total_tokens") or 0

  @property
  def tokens(self) -> int:
    """Tokens of all steps logged by all islands."""
    return sum(view.tokens for view in self.islands.values())

  def tokens_at(self, wall_secs: np.ndarray) -> np.ndarray:
    """Returns the tokens all islands had trained at given times."""
    total = np.zeros(len(wall_secs))
    for view in self.islands.values():
      moments = np.maximum.accumulate(view.steps.column("wall_secs"))
      tokens = np.nan_to_num(view.steps.column("tokens"))
      sums = np.concatenate(([0.0], np.cumsum(tokens)))
      total += sums[np.searchsorted(moments, wall_secs, side="right")]
    return total


def read_config(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns a run's configuration; empty if there is none to read."""
  content = None
  for name in ("snapshots/config", "config.json"):
    with contextlib.suppress(OSError, ValueError, RecursionError):
      content = json.loads((pathlib.Path(run_dir) / name).read_text())
  if isinstance(content, dict) and isinstance(content.get("config"), dict):
    return content["config"]
  return content if isinstance(content, dict) else {}
