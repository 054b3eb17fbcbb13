"""The merge: outer gradients of several islands to one outer step, per tensor.

A pass reads all contributions once, block by block, into one accumulator and
measures what it reads. Only when every contribution was read to its end and
found sound does the outer step touch the parameters.

The result is the same to the bit however a contribution is stored and however
many threads share the work (`diloco.syncer.passes`).

References: Decoupled DiLoCo, arXiv 2604.21428 (radial-directional averaging);
DiLoCo, arXiv 2311.08105 (weighted mean). `averages` and `correction` have the
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np

from diloco import config
from diloco.fragments import norms
from diloco.syncer import (
  averages,
  correction,
  outer_optimizer,
  passes,
  sources,
)

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
  """One tensor of one island's contribution.

  Attributes:
    source: the outer gradient, anchor minus island parameters.
    weight: at least 0; only ratios matter.
    norm: its L2 norm as its commit record states it, which is checked; None
      lets the merge measure it, in a pass of its own.
    scale: it is shortened to this, from 0 to 1, before all else.
  """

  source: sources.Source
  weight: float
  norm: float | None = None
  scale: float = 1.0


class Rules(NamedTuple):
  """How to merge, beside the method; see `config.SyncConfig`."""

  embeddings: Method = "mean"
  clip: float = 0.0
  trim: float = 0.25
  align: bool = False


class Result(NamedTuple):
  """What a merge of one tensor did.

  Attributes:
    norm: L2 norm of the merged outer gradient.
    agreement: norm of the weighted mean over the weighted mean of norms, of
      the directions for "rda" and of the vectors for others; 1 where all
      point the same way, about 1 / sqrt(M) where they are unrelated, 0 where
      they cancel.
    cancelled: "rda" found no common direction and took the weighted mean.
    measures: one per contribution.
    cosine: mean over the pairs of contributions of the cosine between them, by
      weight, and but for "rda" by length; None for a single one. It costs
      nothing: with p the parts of the sum of weights, `agreement` squared is
      sum p_i p_j cos_ij over all i and j.
  """

  norm: float
  agreement: float
  cancelled: bool
  measures: tuple[passes.Measure, ...]
  cosine: float | None = None


NO_RULES = Rules()


class _Sums(NamedTuple):
  """What a pass leaves beside the accumulator."""

  length: float  # of the accumulator
  common: float  # of the weighted mean, or of the directions
  measures: tuple[passes.Measure, ...]  # of the contributions


class Merger:
  """Merges tensors one after the other; keeps its accumulator warm.

  Not safe to use from several threads at once.

  Attributes:
    outer: the outer optimizer.
    rules: how to merge.
  """

  def __init__(
    self,
    outer: outer_optimizer.OuterOptimizer,
    threads: int = 1,
    rules: Rules = NO_RULES,
  ):
    """Allocates nothing yet.

    Args:
      outer: the outer optimizer.
      threads: to divide each tensor among; changes no bit of the result. One
        is best for a store, which decodes in threads of its own.
      rules: how to trim and whether to correct; the rest is the caller's.
    """
    self.outer = outer
    self.rules = rules
    self._threads = threads
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
    the weighted mean. So is "iso", but of tensors with two axes.

    Args:
      contributions: at least one, with a weight above 0 among them.
      method: one of `config.MergeMethod`.
      theta: global parameters, C-contiguous float32 of any shape; updated.
      buffers: of the outer optimizer, as theta; updated.
      arrival: which merge this is, for the outer optimizer.

    Raises:
      ContributionError: some contributions are damaged, not finite, or not
        what their norms say; theta and buffers are as they were.
      OSError: the store could not be reached; as above.
      ValueError: sizes, weights or dtypes that do not fit.
    """
    _check(contributions, method, theta, buffers)
    flat = [buffer.reshape(-1) for buffer in buffers]
    towards = flat[0] if flat and self.rules.align else None
    outcome, scale = self._combine(contributions, method, towards)
    if method == "iso" and theta.ndim == 2 and min(theta.shape) > 1:
      matrix = self._workspace[: theta.size].reshape(theta.shape)
      outcome = outcome._replace(norm=averages.flatten(matrix))
    self._step(theta.reshape(-1), flat, np.float32(scale), arrival)
    return outcome

  def _combine(
    self,
    contributions: Sequence[Input],
    method: Method,
    towards: np.ndarray | None = None,
  ) -> tuple[Result, float]:
    """Fills the accumulator up to a factor, and returns that too."""
    total_weight = sum(c.weight for c in contributions)
    shares = [c.weight / total_weight for c in contributions]
    mix = self._mix(contributions, shares, towards)
    agreement = None
    if method == "rda":
      lengths = mix.lengths(self._norms(contributions))
      radius = _dot(shares, lengths)
      # Scaled by the radius so that small gradients stay in float32's range.
      directions = [
        share * (radius / norm) if norm > _SHORTEST else 0.0
        for share, norm in zip(shares, lengths, strict=True)
      ]
      sums = self._accumulate(contributions, mix, mix.linear(directions))
      agreement = sums.length / radius if radius > _SHORTEST else 1.0
      if agreement >= CANCELLATION:
        radius = _dot(shares, mix.lengths([m.norm for m in sums.measures]))
        scale = radius / sums.length if sums.length else 1.0
        result = Result(radius, agreement, False, sums.measures)
        return _with_cosine(result, shares), scale
    combine = mix.linear(shares)
    if method in ("median", "trimmed_mean"):
      combine = mix.trimmed(0.5 if method == "median" else self.rules.trim)
    sums = self._accumulate(contributions, mix, combine)
    lengths = mix.lengths([m.norm for m in sums.measures])
    if agreement is None:
      radius = _dot(shares, lengths)
      agreement = sums.common / radius if radius > _SHORTEST else 1.0
    result = Result(sums.length, agreement, method == "rda", sums.measures)
    if method != "rda":
      shares = [s * n for s, n in zip(shares, lengths, strict=True)]
    return _with_cosine(result, shares), 1.0

  def _mix(
    self,
    contributions: Sequence[Input],
    shares: Sequence[float],
    towards: np.ndarray | None,
  ) -> averages.Mix:
    """What contributions are made to first: shortened, or corrected too.

    A sum of outer gradients that fades by mu is 1 / (1 - mu) times their moving
    average, by which they are corrected.
    """
    tensors = [c.source for c in contributions]
    if towards is None:
      bends = [correction.Bend(c.scale) for c in contributions]
      return averages.Mix(shares, bends, tensors)
    mean = 1.0 if self.outer.optimizer == "ema" else 1 - self.outer.momentum
    tensors.append(sources.MemorySource(towards))
    *dots, square = passes.dots(tensors, self._threads)
    bends = [
      correction.correct(norm, mean * dot, mean**2 * square, c.scale)
      for c, norm, dot in zip(
        contributions, self._norms(contributions), dots, strict=True
      )
    ]
    return averages.Mix(shares, [b.of_sum(mean) for b in bends], tensors)

  def _norms(self, contributions: Sequence[Input]) -> list[float]:
    """The recorded norms; if one is missing, all are measured."""
    recorded = [c.norm for c in contributions if c.norm is not None]
    if len(recorded) == len(contributions):
      return recorded
    found = passes.measure([c.source for c in contributions], self._threads)
    return [measure.norm for measure in found]

  def _accumulate(
    self,
    contributions: Sequence[Input],
    mix: averages.Mix,
    combine: averages.Combine,
  ) -> _Sums:
    """One pass: what `combine` makes into the accumulator, and all norms.

    Raises:
      ContributionError: damaged, not finite or not of the recorded norm.
    """
    size, count = contributions[0].source.size, len(contributions)
    if self._workspace.size < size:
      self._workspace = np.empty(0, np.float32)  # freed before its successor
      self._workspace = np.empty(size, np.float32)
    total = self._workspace[:size]
    squares = np.zeros((passes.num_blocks(size), count + 2))

    def work(first: int, last: int) -> None:
      scratch = np.empty(passes.BLOCK, np.float32)
      for n, blocks in passes.lockstep(mix.tensors, first, last):
        target = total[n * passes.BLOCK : (n + 1) * passes.BLOCK]
        squares[n, :count] = [norms.square(b) for b in blocks[:count]]
        common = combine(blocks, target, scratch)
        squares[n, count:] = norms.square(target)
        if common is not target:
          squares[n, -1] = norms.square(common)

    passes.share(work, len(squares), self._threads)
    *measures, length, common = (passes.measured(c) for c in squares.T)
    _check_measures(contributions, measures, length)
    return _Sums(length.norm, common.norm, tuple(measures))

  def _step(
    self,
    theta: np.ndarray,
    buffers: Sequence[np.ndarray],
    scale: np.float32,
    arrival: int,
  ) -> None:
    """The outer step along the accumulator times `scale`."""
    total = self._workspace[: theta.size]

    def work(first: int, last: int) -> None:
      scratch = np.empty(min(passes.BLOCK, theta.size), np.float32)
      for n in range(first, last):
        part = slice(n * passes.BLOCK, (n + 1) * passes.BLOCK)
        outer_grad = total[part]
        if scale != 1:
          np.multiply(outer_grad, scale, out=outer_grad)
        self.outer.step(
          theta[part],
          [buffer[part] for buffer in buffers],
          outer_grad,
          scratch[: outer_grad.size],
          arrival=arrival,
        )

    passes.share(work, passes.num_blocks(theta.size), self._threads)


def _with_cosine(result: Result, parts: Sequence[float]) -> Result:
  """Adds the mean cosine, from what each contribution is of the sum."""
  known = [
    part if measure.norm > _SHORTEST else 0.0
    for part, measure in zip(parts, result.measures, strict=True)
  ]
  whole, alone = sum(parts) ** 2, sum(part**2 for part in known)
  pairs = sum(known) ** 2 - alone
  if pairs <= _FEWEST_PAIRS * whole:
    return result
  cosine = (result.agreement**2 * whole - alone) / pairs
  return result._replace(cosine=min(1.0, max(-1.0, cosine)))


def _dot(shares: Sequence[float], lengths: Sequence[float]) -> float:
  return sum(s * n for s, n in zip(shares, lengths, strict=True))


def _check(
  contributions: Sequence[Input],
  method: Method,
  theta: np.ndarray,
  buffers: Sequence[np.ndarray],
) -> None:
  """Raises ValueError for arguments that do not fit."""
  if method not in get_args(Method):
    raise ValueError(f"method {method!r} is none of {get_args(Method)}")
  weights = [c.weight for c in contributions]
  if not all(0 <= w < math.inf for w in weights) or not sum(weights) > 0:
    raise ValueError(
      f"weights {weights} must be finite, at least 0 and not all 0"
    )
  named = [("theta", theta), *(("buffer", buffer) for buffer in buffers)]
  for name, array in named:
    if array.dtype != np.float32 or not array.flags.carray:
      raise ValueError(
        f"{name} is {array.dtype}{array.shape}; it must be writable,"
        " C-contiguous float32"
      )
  sizes = [c.source.size for c in contributions]
  held = [array.size for _, array in named]
  if {*held, *sizes} != {theta.size}:
    raise ValueError(
      f"contributions of {sizes} elements do not fit theta and buffers of"
      f" {held}"
    )


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
    elif recorded is not None and not math.isclose(
      recorded, found.norm, rel_tol=NORM_TOLERANCE
    ):
      reasons[i] = (
        f"norm_mismatch: {found.norm:.6g}, its record says {recorded:.6g}"
      )
  if not reasons and not total.finite:
    largest = max(range(len(measures)), key=lambda i: measures[i].norm)
    reasons[largest] = f"norm_overflow: {measures[largest].norm:.6g}"
  if reasons:
    raise passes.ContributionError(reasons)
