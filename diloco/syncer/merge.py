"""The merge: outer gradients of several islands to one outer step, per tensor.

A pass reads all contributions once, block by block, into one accumulator and
measures what it reads. Only when every contribution was read to its end and
found sound does the outer step touch the parameters.

The result is the same to the bit however a contribution is stored and however
many threads share the work (`diloco.syncer.passes`).

References: Decoupled DiLoCo, arXiv 2604.21428 (radial-directional averaging);
DiLoCo, arXiv 2311.08105 (weighted mean).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from diloco.fragments import norms
from diloco.syncer import outer_optimizer, passes, sources

Method = Literal["rda", "mean"]

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
  """

  source: sources.Source
  weight: float
  norm: float | None = None


class Result(NamedTuple):
  """What a merge of one tensor did.

  Attributes:
    norm: L2 norm of the merged outer gradient.
    agreement: norm of the weighted mean over the weighted mean of norms, of
      the directions for "rda" and of the vectors for "mean"; 1 where all
      point the same way, about 1 / sqrt(M) where they are unrelated, 0 where
      they cancel.
    cancelled: "rda" found no common direction and took the weighted mean.
    measures: one per contribution.
    cosine: mean over the pairs of contributions of the cosine between them, by
      weight, for "mean" by weight and length; None for a single one. It costs
      nothing: with p the parts of the sum of weights, `agreement` squared is
      sum p_i p_j cos_ij over all i and j.
  """

  norm: float
  agreement: float
  cancelled: bool
  measures: tuple[passes.Measure, ...]
  cosine: float | None = None


class Merger:
  """Merges tensors one after the other; keeps its accumulator warm.

  Not safe to use from several threads at once.

  Attributes:
    outer: the outer optimizer.
  """

  def __init__(self, outer: outer_optimizer.OuterOptimizer, threads: int = 1):
    """Allocates nothing yet.

    Args:
      outer: the outer optimizer.
      threads: to divide each tensor among; changes no bit of the result. One
        is best for a store, which decodes in threads of its own.
    """
    self.outer = outer
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
    the weighted mean.

    Args:
      contributions: at least one, with a weight above 0 among them.
      method: "rda" or "mean".
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
    outcome, scale = self._combine(contributions, method)
    flat = [buffer.reshape(-1) for buffer in buffers]
    self._step(theta.reshape(-1), flat, np.float32(scale), arrival)
    return outcome

  def _combine(
    self, contributions: Sequence[Input], method: Method
  ) -> tuple[Result, float]:
    """Fills the accumulator up to a factor, and returns that too."""
    total_weight = sum(c.weight for c in contributions)
    shares = [c.weight / total_weight for c in contributions]
    agreement = None
    if method == "rda":
      lengths = self._norms(contributions)
      radius = _dot(shares, lengths)
      # Scaled by the radius so that small gradients stay in float32's range.
      directions = [
        share * (radius / norm) if norm > _SHORTEST else 0.0
        for share, norm in zip(shares, lengths, strict=True)
      ]
      length, measures = self._accumulate(contributions, directions)
      agreement = length / radius if radius > _SHORTEST else 1.0
      if agreement >= CANCELLATION:
        radius = _dot(shares, [m.norm for m in measures])
        scale = radius / length if length else 1.0
        result = Result(radius, agreement, False, measures)
        return _with_cosine(result, shares), scale
    length, measures = self._accumulate(contributions, shares)
    if agreement is None:
      radius = _dot(shares, [m.norm for m in measures])
      agreement = length / radius if radius > _SHORTEST else 1.0
    result = Result(length, agreement, method == "rda", measures)
    if method == "mean":
      shares = [s * m.norm for s, m in zip(shares, measures, strict=True)]
    return _with_cosine(result, shares), 1.0

  def _norms(self, contributions: Sequence[Input]) -> list[float]:
    """The recorded norms; if one is missing, all are measured."""
    recorded = [c.norm for c in contributions if c.norm is not None]
    if len(recorded) == len(contributions):
      return recorded
    found = passes.measure([c.source for c in contributions], self._threads)
    return [measure.norm for measure in found]

  def _accumulate(
    self, contributions: Sequence[Input], coefficients: Sequence[float]
  ) -> tuple[float, tuple[passes.Measure, ...]]:
    """One pass: the weighted sum into the accumulator, and all norms.

    Raises:
      ContributionError: damaged, not finite or not of the recorded norm.
    """
    tensors = [c.source for c in contributions]
    size, count = tensors[0].size, len(tensors)
    if self._workspace.size < size:
      self._workspace = np.empty(0, np.float32)  # freed before its successor
      self._workspace = np.empty(size, np.float32)
    total = self._workspace[:size]
    squares = np.zeros((passes.num_blocks(size), count + 1))

    def work(first: int, last: int) -> None:
      factors = np.asarray(coefficients, np.float32)
      scratch = np.empty(passes.BLOCK, np.float32)
      for n, blocks in passes.lockstep(tensors, first, last):
        target = total[n * passes.BLOCK : (n + 1) * passes.BLOCK]
        for i, block in enumerate(blocks):
          squares[n, i] = norms.square(block)
          term = scratch[: block.size] if i else target
          np.multiply(block, factors[i], out=term)
          if i:
            np.add(target, term, out=target)
        squares[n, count] = norms.square(target)

    passes.share(work, len(squares), self._threads)
    measures = tuple(passes.measured(squares[:, i]) for i in range(count))
    length = passes.measured(squares[:, count])
    _check_measures(contributions, measures, length)
    return length.norm, measures

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
