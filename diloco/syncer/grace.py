"""The grace window: extra waiting after quorum, bought from slack only.

An island adopts a fragment `overlap_steps` after publishing it. Whatever of
that time the round does not need for reaching quorum and for merging is slack,
and waiting in it for slower islands costs nobody a step.

    slack = min(tau H / P, tau) step_secs - (quorum_secs + sync_secs)
    grace = min(gamma slack, step_secs), never below 0

Symbols: tau `overlap_steps`, H `sync_every`, P `num_fragments`, gamma < 1.
`step_secs` is that of the slowest live island; `quorum_secs` (round opened to
quorum) and `sync_secs` (closed to committed) are moving averages.

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
  sync_every: int
  num_fragments: int
  gamma: float

  def grace_secs(self, facts: GraceFacts) -> float:
    """Implements the formula of this module."""
    tau = self.overlap_steps
    steps = min(tau * self.sync_every / self.num_fragments, tau)
    slack = steps * facts.step_secs - (facts.quorum_secs + facts.sync_secs)
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
