"""The grace window: extra waiting after quorum, bought from slack only.

An island adopts a fragment `overlap_steps` after publishing it. Whatever of
that time the round does not need for reaching quorum and for merging is slack,
and waiting in it for slower islands costs nobody a step.

    slack = tau step_secs - (quorum_secs + sync_secs)
    grace = min(gamma slack, step_secs), never below 0

Symbols: tau `overlap_steps`, gamma < 1. `step_secs` is that of the slowest live
island; `quorum_secs` (round opened to quorum) and `sync_secs` (end of the
window to committed, waiting for other merges included) are moving averages. At
most one fragment is due at a step; the configuration sees to that.

Reference: Decoupled DiLoCo, arXiv 2604.21428.
"""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class GraceFacts:
  """What a grace policy may look at; all in seconds."""

  step_secs: float  # of the slowest live island
  quorum_secs: float
  sync_secs: float


class GracePolicy(Protocol):
  """Decides how long a round stays open after its quorum."""

  def grace_secs(self, facts: GraceFacts) -> float:
    """Returns the window to offer, in seconds, at least 0."""
    ...


@dataclasses.dataclass(frozen=True)
class AdaptiveGrace:
  """Spends a share of the slack, at most one step of the slowest island."""

  overlap_steps: int
  gamma: float

  def grace_secs(self, facts: GraceFacts) -> float:
    """Implements the formula of this module."""
    slack = self.overlap_steps * facts.step_secs
    slack -= facts.quorum_secs + facts.sync_secs
    return min(max(self.gamma * slack, 0.0), facts.step_secs)


@dataclasses.dataclass(frozen=True)
class FixedGrace:
  """The same window for every round; 0 for none."""

  secs: float

  def grace_secs(self, facts: GraceFacts) -> float:
    """Ignores the facts."""
    del facts
    return self.secs


@dataclasses.dataclass(frozen=True, slots=True)
class MovingAverage:
  """Exponential moving average; the first observation counts in full."""

  weight: float = 0.2
  value: float | None = None

  def observe(self, sample: float) -> "MovingAverage":
    """Returns the average with one more sample."""
    if self.value is None:
      return MovingAverage(self.weight, sample)
    mixed = (1 - self.weight) * self.value + self.weight * sample
    return MovingAverage(self.weight, mixed)
