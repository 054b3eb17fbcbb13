"""The merge: outer gradients of several islands to one outer step, per tensor.

A pass reads all contributions once, block by block, into one accumulator and
measures what it reads. Only when every contribution was read to its end and
found sound does the outer step touch the parameters.

The result is the same to the bit however a contribution is stored
(`diloco.syncer.passes`).

References: Decoupled DiLoCo, arXiv 2604.21428 (radial-directional averaging);
DiLoCo, arXiv 2311.08105 (weighted mean). `averages` has the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diloco import config
from diloco.fragments import norms
from diloco.syncer import averages, outer_optimizer, passes, sources

Method = config.MergeMethod

# Below this norm of the mean direction, directions cancel: what is left is
# rounding and chance, and scaling it up to full length would be a step into
# nowhere. M unrelated directions have a norm of about 1 / sqrt(M).
CANCELLATION = 1e-3

# A recorded norm is of the very values that are read, and measured by the same
# lines (`fragments.norms`), perhaps cut into other blocks by another processor.
NORM_TOLERANCE = 1e-4

# Of the sum of weights, squared: below it one contribution is all there is.
_FEWEST_PAIRS = 1e-6

# Shorter vectors have no direction that float32 could hold.
_SHORTEST = 1e-30


class Input(NamedTuple):
  """One tensor of one island's contribution."""

  source: sources.Source  # the outer gradient, anchor minus island parameters
  weight: float  # at least 0; only ratios matter
  norm: float  # its L2 norm as its commit record states it, which is checked
  scale: float = 1.0  # it is shortened to this, from 0 to 1, before all else


class Rules(NamedTuple):
  """How to merge, beside the method; see `config.SyncConfig`."""

  embeddings: Method = "mean"
  clip: float = 0.0
  trim: float = 0.25
  one_by_one: bool = False  # each contribution is a merge, in their order


class Result(NamedTuple):
  """What a merge of one tensor did.

  Attributes:
    norm: L2 norm of the merged outer gradient.
    agreement: norm of the weighted mean over the weighted mean of norms, of
      the directions for "rda" and of the vectors for others; 1 where all
      point the same way, about 1 / sqrt(M) where they are unrelated, 0 where
      they cancel.
    cosine: mean over the pairs of contributions of the cosine between them, by
      weight, and but for "rda" by length; None for a single one. It costs
      nothing: with p the parts of the sum of weights, `agreement` squared is
      sum p_i p_j cos_ij over all i and j.
  """

  norm: float
  agreement: float
  cosine: float | None


class _Sums(NamedTuple):
  """Norms that a pass finds."""

  length: float  # of the accumulator
  common: float  # of the weighted mean, or of the directions
  norms: list[float]  # of the contributions


class Merger:
  """Merges tensors one after the other; keeps its accumulator warm.

  Not safe to use from several threads at once.
  """

  def __init__(
    self,
    outer: outer_optimizer.OuterOptimizer,
    rules: Rules = Rules(),
  ):
    self.outer = outer
    self.rules = rules
    self._workspace = np.empty(0, np.float32)

  def apply(
    self,
    contributions: Sequence[Input],
    method: Method,
    theta: np.ndarray,
    buffers: Sequence[np.ndarray],
    arrival: int = 1,
  ) -> Result:
    """Merges the contributions and takes the outer step in place.

        mean = sum w v / sum w
        rda  = (sum w ||v|| / sum w) phi(sum w phi(v) / sum w)

    Symbols: v is an outer gradient, w its weight, phi(x) = x / ||x|| and
    phi(0) = 0. If the directions cancel (see `CANCELLATION`), "rda" becomes
    the weighted mean. One by one there are as many steps as contributions, and
    the norm is that of them all.

    Args:
      contributions: at least one.
      method: one of `config.MergeMethod`.
      theta: global parameters, C-contiguous float32 of any shape; updated.
      buffers: of the outer optimizer, as theta; updated.
      arrival: which merge this is, for the outer optimizer; or the first is.

    Raises:
      ContributionError: some contributions are damaged, not finite, or not
        what their norms say, or none has a weight above 0; theta and buffers
        are as they were, or one by one as those before have left them.
      OSError: the store could not be reached; as above.
    """
    if not self.rules.one_by_one:
      return self._apply(contributions, method, theta, buffers, arrival)
    norms_ = []
    for i, one in enumerate(contributions):
      try:
        outcome = self._apply([one], method, theta, buffers, arrival + i)
      except passes.ContributionError as error:
        raise passes.ContributionError({i: error.reasons[0]}) from error
      norms_.append(outcome.norm)
    return Result(math.hypot(*norms_), 1.0, None)

  # Overflow and nan are measured, not warned about.
  @np.errstate(all="ignore")
  def _apply(
    self,
    contributions: Sequence[Input],
    method: Method,
    theta: np.ndarray,
    buffers: Sequence[np.ndarray],
    arrival: int,
  ) -> Result:
    flat = [buffer.reshape(-1) for buffer in buffers]
    outcome, scale = self._combine(contributions, method)
    self._step(theta.reshape(-1), flat, np.float32(scale), arrival)
    return outcome

  def _combine(
    self, contributions: Sequence[Input], method: Method
  ) -> tuple[Result, float]:
    """Fills the accumulator up to a factor, and returns that too."""
    total_weight = sum(c.weight for c in contributions)
    if not total_weight:
      reasons = dict.fromkeys(range(len(contributions)), "no_weight")
      raise passes.ContributionError(reasons)
    shares = [c.weight / total_weight for c in contributions]
    mix = averages.Mix(shares, [c.scale for c in contributions])
    agreement = None
    if method == "rda":
      lengths = mix.lengths([c.norm for c in contributions])
      radius = _dot(shares, lengths)
      # Scaled by the radius so that small gradients stay in float32's range.
      directions = [
        share * (radius / norm) if norm > _SHORTEST else 0.0
        for share, norm in zip(shares, lengths, strict=True)
      ]
      sums = self._accumulate(contributions, mix.linear(directions))
      agreement = sums.length / radius if radius > _SHORTEST else 1.0
      if agreement >= CANCELLATION:
        radius = _dot(shares, mix.lengths(sums.norms))
        scale = radius / sums.length if sums.length else 1.0
        cosine = _cosine(agreement, sums.norms, shares)
        return Result(radius, agreement, cosine), scale
    combine = mix.linear(shares)
    if method in ("median", "trimmed_mean"):
      combine = mix.trimmed(0.5 if method == "median" else self.rules.trim)
    sums = self._accumulate(contributions, combine)
    lengths = mix.lengths(sums.norms)
    if agreement is None:
      radius = _dot(shares, lengths)
      agreement = sums.common / radius if radius > _SHORTEST else 1.0
    if method != "rda":
      shares = [s * n for s, n in zip(shares, lengths, strict=True)]
    cosine = _cosine(agreement, sums.norms, shares)
    return Result(sums.length, agreement, cosine), 1.0

  def _accumulate(
    self,
    contributions: Sequence[Input],
    combine: averages.Combine,
  ) -> _Sums:
    """One pass: what `combine` makes into the accumulator, and all norms."""
    size, count = contributions[0].source.size, len(contributions)
    if self._workspace.size < size:
      self._workspace = np.empty(0, np.float32)  # freed before its successor
      self._workspace = np.empty(size, np.float32)
    total = self._workspace[:size]
    squares = np.zeros((-(-size // passes.BLOCK), count + 2))
    scratch = np.empty(passes.BLOCK, np.float32)
    tensors = [c.source for c in contributions]
    for n, blocks in enumerate(passes.lockstep(tensors)):
      target = total[n * passes.BLOCK : (n + 1) * passes.BLOCK]
      squares[n, :count] = [norms.square(b) for b in blocks]
      common = combine(blocks, target, scratch)
      squares[n, count:] = norms.square(target)
      if common is not target:
        squares[n, -1] = norms.square(common)
    *measures, length, mean = (passes.measured(c) for c in squares.T)
    _check_measures(contributions, measures, length)
    return _Sums(length.norm, mean.norm, [m.norm for m in measures])

  def _step(
    self,
    theta: np.ndarray,
    buffers: Sequence[np.ndarray],
    scale: np.float32,
    arrival: int,
  ) -> None:
    """The outer step along the accumulator times `scale`."""
    total = self._workspace[: theta.size]
    scratch = np.empty(min(passes.BLOCK, theta.size), np.float32)
    for start in range(0, theta.size, passes.BLOCK):
      part = slice(start, start + passes.BLOCK)
      outer_grad = total[part]
      if scale != 1:
        np.multiply(outer_grad, scale, out=outer_grad)
      self.outer.step(
        theta[part],
        [buffer[part] for buffer in buffers],
        outer_grad,
        scratch[: outer_grad.size],
        arrival,
      )


def _cosine(
  agreement: float, norms_: Sequence[float], parts: Sequence[float]
) -> float | None:
  """The mean cosine, from what each contribution is of the sum."""
  known = [
    part if norm > _SHORTEST else 0.0
    for part, norm in zip(parts, norms_, strict=True)
  ]
  whole, alone = sum(parts) ** 2, sum(part**2 for part in known)
  pairs = sum(known) ** 2 - alone
  if pairs <= _FEWEST_PAIRS * whole:
    return None
  return min(1.0, max(-1.0, (agreement**2 * whole - alone) / pairs))


def _dot(shares: Sequence[float], lengths: Sequence[float]) -> float:
  return sum(s * n for s, n in zip(shares, lengths, strict=True))


def _check_measures(
  contributions: Sequence[Input],
  measures: Sequence[passes.Measure],
  total: passes.Measure,
) -> None:
  """Raises ContributionError unless all is finite and as recorded."""
  reasons = {}
  for i, (contribution, found) in enumerate(
    zip(contributions, measures, strict=True)
  ):
    recorded = contribution.norm
    if not found.finite:
      reasons[i] = "not_finite"
    elif not math.isclose(recorded, found.norm, rel_tol=NORM_TOLERANCE):
      reasons[i] = (
        f"norm_mismatch: {found.norm:.6g}, its record says {recorded:.6g}"
      )
  if not reasons and not total.finite:
    largest = max(range(len(measures)), key=lambda i: measures[i].norm)
    reasons[largest] = f"norm_overflow: {measures[largest].norm:.6g}"
  if reasons:
    raise passes.ContributionError(reasons)
