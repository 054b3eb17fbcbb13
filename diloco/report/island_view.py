"""One island as its record shows it, kept up to date line by line.

A *life* is one incarnation. Lines of different roles arrive in no agreed
order, so the state follows from which incarnation did what, never from which
line was read last.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from diloco.report import series
from diloco.tape import events, reader

State = Literal["starting", "training", "dead", "restarting", "stopped", "done"]

_COLUMNS: Mapping[str, series.Join] = {
  **dict.fromkeys(("step", "loss", "step_secs", "gap_secs"), "last"),
  "wall_secs": "last",
  "tokens": "sum",
  "longest_gap": "max",
}
_RECENT_STEPS = 20
_RECENT_SECS = 30.0
_LOSS_WINDOW = 50
_PACE_MISSED = 1.1  # times the set pace; timers are as exact as that
_METRICS = ("grad_norm", "update_norm", "learning_rate")


class Span(NamedTuple):
  """A stretch of wall time an island spent in one state."""

  state: State
  start: float
  end: float


@dataclasses.dataclass
class Life:
  """Moments of one incarnation, in wall time; None: not seen."""

  incarnation: int
  launched: float | None = None
  started: float | None = None
  first_step: float | None = None  # ended
  first_secs: float = 0.0  # that it took
  last_step: float | None = None
  died: float | None = None
  restart: float | None = None
  stopped: float | None = None
  paced_step_secs: float = 0.0
  steps: int = 0  # logged
  newest_step: int = 0  # its number
  busy_secs: float = 0.0  # of all of them
  share: float = 1.0  # of its slices that were there

  @property
  def born(self) -> float | None:
    """When it was first heard of."""
    moments = (self.launched, self.started, self.first_step)
    return next((m for m in moments if m is not None), None)


class RecentStep(NamedTuple):
  """One of the last steps."""

  wall_secs: float
  tokens: int
  loss: float
  incarnation: int


class IslandView:
  """State and figures of one island."""

  def __init__(self, island: int):
    self.island = island
    self.kind = "?"
    self.topology = ""
    self.devices = 1
    self.relative_speed = 1.0
    self.paced_step_secs = 0.0
    self.steps = series.Series(_COLUMNS)
    self.num_steps = 0  # logged
    self.last_step = 0
    self.last_wall_secs = 0.0
    self.lives: dict[int, Life] = {}
    self.merged = 0  # contributions
    self.staleness = 0  # sum over them
    self.published = series.Amounts()  # bytes
    self.adopted = series.Amounts()
    self.weights = series.Amounts()  # shares of merges
    self.software: dict[str, str] = {}  # that its last life ran under
    self.environ: dict[str, str] = {}
    self.cores: list[int] = []
    self.started_step = 0
    self.tokens = 0  # of all steps logged
    self.metrics: dict[str, float] = {}  # of the last step
    self.waited_secs = 0.0  # for answers
    self._beyond_secs = 0.0  # between steps, without compute or pace
    self._recent: collections.deque[RecentStep] = collections.deque(
      maxlen=_LOSS_WINDOW
    )

  def life(self, incarnation: int) -> Life:
    """Returns the life of an incarnation, a new one if need be."""
    if incarnation not in self.lives:
      in_order = incarnation > next(reversed(self.lives), 0)
      self.lives[incarnation] = Life(incarnation)
      if not in_order:
        self.lives = dict(sorted(self.lives.items()))
    return self.lives[incarnation]

  def started(self, line: reader.Line) -> None:
    """Takes what an island says of itself when it starts."""
    self.kind = line.get("kind") or self.kind
    self.topology = line.get("topology") or self.topology
    self.devices = line.get("devices") or self.devices
    self.relative_speed = line.get("relative_speed") or self.relative_speed
    self.paced_step_secs = line.get("paced_step_secs") or 0.0
    self.software = line.get("software") or self.software
    self.environ = line.get("environ") or self.environ
    self.cores = line.get("cores") or self.cores
    self.started_step = max(self.started_step, line["step"])
    life = self.life(line["incarnation"])
    life.started = line["wall_secs"]
    life.paced_step_secs = self.paced_step_secs
    if present := line.get("present"):
      life.share = len(present) / max(len(present), line.get("replicas") or 0)

  def ended(self, line: reader.Line) -> None:
    """Takes a death, a coming restart or an orderly stop."""
    wall = line["wall_secs"]
    if line["event"] == events.ISLAND_DIED:
      self.life(line["island_incarnation"]).died = wall
    elif line["event"] == events.STOPPED:
      self.life(line["incarnation"]).stopped = wall
    elif self.lives:
      dead = [life for life in self.lives.values() if life.died is not None]
      (dead or list(self.lives.values()))[-1].restart = wall

  def log(self, line: reader.Line) -> None:
    """Takes one step."""
    life = self.life(line["incarnation"])
    wall, tokens = line["wall_secs"], line.get("tokens") or 0
    names = ("loss", "step_secs", "gap_secs")
    loss, step_secs, gap = (_number(line, name) for name in names)
    # Its compute, or its pace.
    busy = float(np.fmax(step_secs, life.paced_step_secs))
    self.steps.append(
      {
        "step": line["step"],
        "loss": loss,
        "tokens": tokens,
        "step_secs": step_secs,
        "gap_secs": gap,
        "longest_gap": gap,
        "wall_secs": wall,
      }
    )
    told = {**(line.get("task") or {}), **{n: line.get(n) for n in _METRICS}}
    self.metrics = {
      name: value
      for name, value in told.items()
      if isinstance(value, int | float)
    }
    self._recent.append(RecentStep(wall, tokens, loss, life.incarnation))
    self.num_steps += 1
    life.steps += 1
    life.newest_step = line["step"]
    life.busy_secs += busy
    self.last_step, self.last_wall_secs = line["step"], wall
    self.tokens += tokens
    self.waited_secs += line.get("waited_secs") or 0.0
    if math.isfinite(gap):  # drawn below its pace, it makes up for another
      self._beyond_secs += gap - busy
    if life.first_step is None:
      life.first_step = wall
      life.first_secs = busy
    life.last_step = wall

  @property
  def paced(self) -> bool:
    """Whether its speed is emulated."""
    return self.paced_step_secs > 0

  @property
  def stall_secs(self) -> float:
    """Time between steps beyond compute and pace, in sum."""
    return max(self._beyond_secs, 0.0)

  @property
  def missed_pace(self) -> float | None:
    """Median seconds between steps, if the set pace was not kept."""
    seen = self.percentile("gap_secs", 50)
    if not self.paced or seen is None:
      return None
    return seen if seen > _PACE_MISSED * self.paced_step_secs else None

  @property
  def state(self) -> State:
    """What it is doing; "done" is for the run to say."""
    life = next(reversed(self.lives.values()), None)
    if life is None:
      return "starting"
    if life.stopped is not None:
      return "stopped"
    if life.died is not None:
      return "dead" if life.restart is None else "restarting"
    if life.first_step is not None:
      return "training"
    return "restarting" if self.restarts_of(life) else "starting"

  def restarts_of(self, life: Life) -> bool:
    """Whether this life follows a death."""
    before = self.lives.get(life.incarnation - 1)
    return before is not None and before.died is not None

  @property
  def restarts(self) -> int:
    """How often it came back after it died."""
    return sum(map(self.restarts_of, self.lives.values()))

  @property
  def step(self) -> int:
    """Last step logged."""
    return self.last_step if self.num_steps else self.started_step

  @property
  def loss(self) -> float | None:
    """Mean training loss of the last steps, nats per token."""
    losses = [s.loss for s in self._recent if math.isfinite(s.loss)]
    return float(np.mean(losses)) if losses else None

  def tokens_per_sec(self, now: float) -> float:
    """Speed over the last steps of its life; 0 if there was none lately."""
    recent = list(self._recent)[-_RECENT_STEPS:]
    # Before a life there may have been a pause between two sessions.
    recent = [s for s in recent if s.incarnation == recent[-1].incarnation]
    if self.state != "training" or len(recent) < 2:
      return 0.0
    secs = recent[-1].wall_secs - recent[0].wall_secs
    silent = now - recent[-1].wall_secs
    if secs <= 0 or silent > max(_RECENT_SECS, 3 * secs):
      return 0.0
    return sum(step.tokens for step in recent[1:]) / secs

  @property
  def staleness_mean(self) -> float | None:
    """Mean of current version minus base version over its contributions."""
    return self.staleness / self.merged if self.merged else None

  @property
  def longest_gap(self) -> float | None:
    """Longest time between two steps, seconds."""
    gaps = self.steps.column("longest_gap")
    gaps = gaps[np.isfinite(gaps)]
    return float(gaps.max()) if len(gaps) else None

  def percentile(self, column: str, percent: float) -> float | None:
    """Returns a percentile of a metric column, None without values.

    Of a long run it is that of every so many steps.
    """
    values = self.steps.column(column)
    values = values[np.isfinite(values)]
    return float(np.percentile(values, percent)) if len(values) else None

  def spans(self, end: float) -> list[Span]:
    """Returns the states it went through, up to wall time `end`."""
    spans: list[Span] = []
    lives = list(self.lives.values())
    for life, after in zip(lives, [*lives[1:], None], strict=False):
      spans += self._spans_of(life, after, end)
    return [span for span in spans if span.end > span.start]

  def _spans_of(self, life: Life, after: Life | None, end: float) -> list[Span]:
    born = life.born
    if born is None:
      return []
    gone = [m for m in (life.stopped, life.died) if m is not None]
    last = life.last_step if after else end
    over = min(gone) if gone else (last or born)
    first = over
    if life.first_step is not None:
      first = max(life.first_step - life.first_secs, born)
    opening: State = "restarting" if self.restarts_of(life) else "starting"
    spans = [
      Span(opening, born, min(first, over)),
      Span("training", first, over),
    ]
    if life.died is None:
      return spans
    silent = life.last_step if life.last_step is not None else life.died
    spans[1] = Span("training", first, max(min(silent, life.died), first))
    back = after.born if after and after.born is not None else end
    again = life.restart if life.restart is not None else back
    spans.append(Span("dead", spans[1].end, min(again, back)))
    spans.append(Span("restarting", min(again, back), back))
    return spans


def _number(line: reader.Line, name: str) -> float:
  value = line.get(name)
  return math.nan if value is None else value
