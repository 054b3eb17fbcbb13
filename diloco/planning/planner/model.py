"""What is trained: its shape, its budget, and what that takes.

Where the user does not say, rules of thumb do:

    layers         24 (N / 1e9)^(1/3)   (1B: 24, 10B: 52, 100B: 111)
    width          sqrt(N / (12 layers))
    tokens         20 N                 Hoffmann et al., arXiv 2203.15556
    batch tokens   0.292 C^0.3271       DeepSeek LLM, arXiv 2401.02954
    floating point operations C = 6 N tokens
"""

import dataclasses
import math

from diloco.planning.planner import resources

SEQUENCE = 2048  # tokens; a batch is whole ones, a chip works on one
FLOPS_PER_PARAM = 6  # and token, forward and backward


@dataclasses.dataclass(frozen=True)
class Model:
  """A dense transformer and its training."""

  params: float  # N
  layers: int  # L
  tokens: float  # the budget
  batch_tokens: float  # of one inner step, all islands together
  mfu: float  # share of the peak that an island's steps reach

  @property
  def width(self) -> float:
    """Of the residual stream."""
    return math.sqrt(self.params / (12 * self.layers))

  def tokens_per_sec(self, flops: float) -> float:
    """Of chips with so many operations a second at their peak."""
    return flops * self.mfu / (FLOPS_PER_PARAM * self.params)


def make(
  params: float,
  *,
  layers: int | None = None,
  tokens: float | None = None,
  batch_tokens: float | None = None,
  mfu: float = 0.4,
) -> Model:
  """A model; what is None is filled in by the rules above."""
  tokens = 20 * params if tokens is None else tokens
  if batch_tokens is None:
    operations = FLOPS_PER_PARAM * params * tokens
    batch_tokens = min(tokens, 0.292 * operations**0.3271)
    batch_tokens = max(1, round(batch_tokens / SEQUENCE)) * SEQUENCE
  if layers is None:
    layers = max(1, round(24 * (params / 1e9) ** (1 / 3)))
  return Model(params, layers, tokens, batch_tokens, mfu)


def step_secs(
  island: resources.Island, num_islands: int, model: Model
) -> float:
  """Seconds of one inner step; every island's batch is an M-th of the whole."""
  batch = model.batch_tokens / num_islands
  return batch / model.tokens_per_sec(island.flops)
