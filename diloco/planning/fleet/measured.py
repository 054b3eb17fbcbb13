"""What is measured of a real run, to predict it from."""

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from diloco import config as config_lib
from diloco import errors
from diloco.planning.fleet import traffic
from diloco.report import clock as clock_lib
from diloco.report import incidents as incidents_lib
from diloco.report import island_view, summary
from diloco.report import view as view_lib
from diloco.tape import events, reader

_POLL_SECS = 0.02  # how late islands and syncer notice what is in the store
_MEMBER_SECS = 1.0  # until an island counts as gone, if nobody has said


@dataclasses.dataclass(frozen=True)
class Island:
  """What is measured of an island."""

  step_secs: float  # mean wall time of a step while it trained
  useful_secs: float  # of it, what the step needs
  jitter: float  # standard deviation of a step's time, as a share
  start_secs: float  # from the start of the run to its first step
  # Seconds into the run at which it last stepped before it died.
  deaths: tuple[float, ...]
  gone: bool  # whether it did not come back from the last death
  # (start, end) without steps because the run ended and went on.
  breaks: tuple[tuple[float, float], ...]
  devices: int  # its chips


@dataclasses.dataclass(frozen=True)
class Run:
  """What is measured of a run.

  Attributes:
    config: its configuration.
    islands: [M].
    restart_secs: mean, from an island's last step to its next life's first.
    tail_secs: from the last step of all to the end of the run.
    steps: done by all islands.
    links: delays of rounds.
    outages: (start, end) without a syncer, seconds into the run.
    wall_secs: length of the run.
    goodput: measured.
    contributors: islands in a merge, measured mean; None without merges.
    staleness: of a contribution, measured mean; None without merges.
  """

  config: config_lib.RunConfig
  islands: tuple[Island, ...]
  restart_secs: float
  tail_secs: float
  steps: int
  links: traffic.Links
  outages: tuple[tuple[float, float], ...]
  wall_secs: float
  goodput: float
  contributors: float | None
  staleness: float | None


def measure(run_dir: str | os.PathLike[str]) -> Run:
  """Reads the parameters of a run from its tape and metric log."""
  if not pathlib.Path(run_dir).is_dir():
    raise errors.UserError(
      f"--from_run={run_dir}", "there is no such directory", "check the path"
    )
  run = summary.load(run_dir)
  view, record = run.view, reader.stream(run_dir)
  islands = [view.islands.get(m) for m in range(view.num_islands)]
  if not islands or not any(i is not None and i.num_steps for i in islands):
    raise errors.UserError(
      f"--from_run={run_dir}", "no island has trained in it", "name a run"
    )
  config = config_lib.of_run(view.config)
  clock = clock_lib.RunClock(view)
  found = [_island(i, clock) for i in islands if i is not None and i.num_steps]
  known = [i for i in islands if i is not None]
  last = max(i.last_wall_secs for i in known if i.num_steps)
  wall = view.wall_secs
  facts = summary.summary_of(run)
  return Run(
    config=config,
    islands=tuple(found),
    restart_secs=_mean(_restarts(known, clock), 0.0),
    tail_secs=max(wall - clock.secs_at(last), 0.0),
    steps=sum(i.num_steps for i in known),
    links=_links(view, record, config),
    outages=_outages(view, clock),
    wall_secs=wall,
    goodput=run.goodput.ratio or 0.0,
    contributors=facts["merges"]["contributors_mean"],
    staleness=facts["merges"]["staleness_mean"],
  )


def as_on(run: Run, other: Run) -> Run:
  """Returns what is known of a run before it is made, and the rest of another.

  Known are its configuration, its steps and when which island was killed or
  the run interrupted. How long steps, starts, restarts and delays take is the
  other's, and so is what nobody ordered. What the run was is kept, to compare.

  Raises:
    UserError: the other had another fleet.
  """
  if run.config.fleet != other.config.fleet or (
    len(run.islands) != len(other.islands)
  ):
    raise errors.UserError(
      f"--measured_from: a run of {len(other.islands)} islands",
      f"its fleet is not that of the run of {len(run.islands)} islands that is"
      " to be predicted",
      "name a run with the same config.fleet",
    )
  islands = tuple(
    dataclasses.replace(
      theirs, deaths=mine.deaths, gone=mine.gone, breaks=mine.breaks
    )
    for mine, theirs in zip(run.islands, other.islands, strict=True)
  )
  return dataclasses.replace(
    run,
    islands=islands,
    restart_secs=other.restart_secs,
    tail_secs=other.tail_secs,
    links=other.links,
  )


def _mean(values: Sequence[float], default: float) -> float:
  known = [value for value in values if math.isfinite(value)]
  return float(np.mean(known)) if known else default


def _island(
  island: island_view.IslandView, clock: clock_lib.RunClock
) -> Island:
  lives = [life for life in island.lives.values() if life.steps]
  moments = [_span(life, clock) for life in lives]
  spans = sum(end - start for start, end in moments)
  steps = island.num_steps - len(lives)
  useful = sum(life.busy_secs for life in lives) / island.num_steps
  gaps = island.steps.column("gap_secs")
  gaps = gaps[np.isfinite(gaps)]
  jitter = 0.0
  if len(gaps) > 10:
    low, high = np.percentile(gaps, (10, 90))
    jitter = min(float((high - low) / 2.56 / gaps.mean()), 0.5)
  ordered = list(island.lives.values())
  deaths = [
    clock.secs_at(life.last_step)
    for life in ordered
    if life.died is not None and life.last_step is not None
  ]
  breaks = [
    (clock.secs_at(before), clock.secs_at(after))
    for died, before, after in _comebacks(island)
    if not died
  ]
  return Island(
    step_secs=max(spans / steps if steps else useful, 1e-6),
    useful_secs=useful,
    jitter=jitter,
    start_secs=moments[0][0],
    deaths=tuple(deaths),
    gone=bool(deaths) and ordered[-1].died is not None,
    breaks=tuple(breaks),
    devices=island.devices,
  )


def _span(
  life: island_view.Life, clock: clock_lib.RunClock
) -> tuple[float, float]:
  """When its first and last steps ended, seconds into the run."""
  assert life.first_step is not None and life.last_step is not None
  return clock.secs_at(life.first_step), clock.secs_at(life.last_step)


def _comebacks(
  island: island_view.IslandView,
) -> Iterator[tuple[bool, float, float]]:
  """Yields (whether the life died, its last step, the next life's first)."""
  trained = [life for life in island.lives.values() if life.first_step]
  for before, after in itertools.pairwise(trained):
    assert before.last_step is not None and after.first_step is not None
    yield before.died is not None, before.last_step, after.first_step


def _restarts(
  islands: Sequence[island_view.IslandView], clock: clock_lib.RunClock
) -> list[float]:
  """Times from a death's last step to the next life's first."""
  return [
    clock.secs_at(after) - clock.secs_at(before)
    for island in islands
    for died, before, after in _comebacks(island)
    if died
  ]


def _links(
  view: view_lib.RunView, record: reader.Record, config: config_lib.RunConfig
) -> traffic.Links:
  sent: dict[tuple, float] = {}
  delays: dict[str, list[float]] = {"publish": [], "merge": [], "fetch": []}
  for line in record.events:
    key = (line["role"], line.get("fragment"), line.get("step"))
    match line["event"]:
      case events.SUBMITTED:
        sent[key] = line["wall_secs"]
      case events.PUBLISHED if key in sent:
        delays["publish"].append(line["wall_secs"] - sent[key])
      case events.MERGED:
        # Without its waiting for other merges: the rounds played wait too.
        delays["merge"].append(line.get("merge_secs") or math.nan)
      case events.ADOPTED:
        delays["fetch"].append(line.get("secs") or math.nan)
  beat = config.controller.heartbeat_secs
  joins, losses = _member_delays(view, record)
  return traffic.Links(
    publish_secs=_mean(delays["publish"], 0.0) + _POLL_SECS,
    merge_secs=_mean(delays["merge"], _POLL_SECS),
    fetch_secs=_mean(delays["fetch"], 0.0) + _POLL_SECS,
    member_secs=_mean(losses, 5 * beat if beat else _MEMBER_SECS),
    join_secs=_mean(joins, 0.0),
  )


def _member_delays(
  view: view_lib.RunView, record: reader.Record
) -> tuple[list[float], list[float]]:
  """Delays until the syncer counts an island as there, and as gone."""
  seen: dict[tuple[str, int], list[float]] = {}
  for line in record.events:
    if line["event"] in (events.MEMBER_JOINED, events.MEMBER_LOST):
      key = (line["event"], line["island"])
      seen.setdefault(key, []).append(line["wall_secs"])
  joins, losses = [], []
  for number, island in view.islands.items():
    for life in island.lives.values():
      if life.first_step is None or life.last_step is None:
        continue
      told = seen.get((events.MEMBER_JOINED, number), [])
      joins += [
        w - life.first_step
        for w in sorted(told)
        if life.first_step - 1 <= w <= life.last_step
      ][:1]
      if life.died is None:
        continue
      told = seen.get((events.MEMBER_LOST, number), [])
      losses += [
        w - life.last_step for w in sorted(told) if w >= life.last_step
      ][:1]
  return [max(secs, 0.0) for secs in joins], losses


def _outages(
  view: view_lib.RunView, clock: clock_lib.RunClock
) -> tuple[tuple[float, float], ...]:
  found = []
  for incident in incidents_lib.find(view):
    if incident.target == "syncer" and incident.back_secs:
      start = clock.secs_at(incident.wall_secs)
      found.append((start, start + incident.back_secs))
  return tuple(sorted(found))
