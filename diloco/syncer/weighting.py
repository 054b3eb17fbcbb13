"""How much a contribution counts in a merge.

    weight = (c_tokens^2 / c_steps) damping(s)

    exponential  damping(s) = decay^s
    hyperbolic   damping(s) = 1 / (1 + lambda s), lambda = 1 / decay - 1
    none         damping(s) = 1

Quantity (tokens) times quality (tokens per step, the batch), damped by the
number s of global versions the contribution is behind. The decay is what one
version costs, so that ways of damping compare.

Reference: Decoupled DiLoCo, arXiv 2604.21428; the staleness factor follows
Asynchronous Local-SGD, arXiv 2401.09135.
"""

from __future__ import annotations

import dataclasses

from diloco import config


@dataclasses.dataclass(frozen=True)
class Weighting:
  """Weights by tokens and staleness."""

  # Factor for the first version of staleness, in (0, 1]; 1 ignores it.
  decay: float = 1.0
  # Versions beyond which a contribution is refused, at least 0.
  max_staleness: int = 2
  kind: config.StalenessKind = "exponential"  # how it goes on from there

  @classmethod
  def of(cls, sync: config.SyncConfig) -> Weighting:
    """As a run's configuration says."""
    return cls(sync.staleness_decay, sync.max_staleness, sync.staleness_kind)

  def weight(self, c_tokens: int, c_steps: int, staleness: int) -> float:
    """The weight of one contribution; only ratios among islands matter."""
    return c_tokens * (c_tokens / c_steps) * self._damping(staleness)

  def _damping(self, staleness: int) -> float:
    match self.kind:
      case "exponential":
        return self.decay**staleness
      case "hyperbolic":
        return 1 / (1 + (1 / self.decay - 1) * staleness)
      case "none":
        return 1.0
