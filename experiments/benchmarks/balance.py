"""Models of few large leaves: how even their fragments, how equal a merge.

Question: does splitting tensors balance the fragments of a scan-stacked
transformer and of a model that is mostly one embedding, and does an elementwise
merge of parts give the bits of the whole leaves' merge? Values are synthetic:
two contributions of unequal weight, outer momentum 0.9.

Expected: a part is at most a third of the mean fragment, so the largest is at
most 4/3 of the mean, which no division can beat; no element differs, because a
mean and the outer step go element by element.

Command: `diloco bench balance`; cost: 12 s of processor time, 2.8 GB of memory.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from diloco.fragments import norms, partition
from diloco.syncer import merge, outer_optimizer, sources

_WEIGHTS = (1.0, 0.3)


def stacked(layers: int, width: int, rows: int) -> list[partition.Tensor]:
  """A transformer whose layers are one scan: few leaves, a layer each row."""
  shapes = {
    "embedding": (rows, width),
    "blocks/attention/qkv": (layers, width, 3 * width),
    "blocks/attention/out": (layers, width, width),
    "blocks/mlp/gate": (layers, width, 4 * width),
    "blocks/mlp/up": (layers, width, 4 * width),
    "blocks/mlp/down": (layers, 4 * width, width),
    "blocks/norm/attention": (layers, width),
    "blocks/norm/mlp": (layers, width),
    "norm": (width,),
    "head": (width, rows),
  }
  return [partition.Tensor(name, s, "mean") for name, s in shapes.items()]


def run(scale: int = 64, num_fragments: int = 24) -> dict[str, Any]:
  """Divides and merges both models.

  Args:
    scale: of their widths; with 64 the large embedding has 100 M elements.
    num_fragments: P.

  Returns:
    By model: `largest_over_mean` with and without splitting, and how many of
    the `elements` are `unequal` after a merge of parts.
  """
  models = {
    "stacked": stacked(12, 8 * scale, 128 * scale),
    "embedding": stacked(2, 6 * scale, 4096 * scale)[:-1],
  }
  return {
    name: {
      "leaves": len(leaves),
      "elements": sum(leaf.size for leaf in leaves),
      "largest_leaf": max(leaf.size for leaf in leaves),
      "fragments": num_fragments,
      **_balance(leaves, num_fragments),
    }
    for name, leaves in models.items()
  }


def _balance(
  leaves: Sequence[partition.Tensor], num_fragments: int
) -> dict[str, Any]:
  plan = partition.partition(leaves, num_fragments, split=True)
  # As many fragments as there may be without: one for each leaf at most.
  whole = partition.partition(leaves, min(num_fragments, len(leaves)))
  tensors = [tensor for tensors in plan.fragments for tensor in tensors]
  return {
    "tensors": len(tensors),
    "largest_over_mean": _largest_over_mean(plan),
    "unsplit_fragments": whole.num_fragments,
    "unsplit_largest_over_mean": _largest_over_mean(whole),
    "unequal": sum(
      _unequal(leaf, [t for t in tensors if t.leaf == leaf.name])
      for leaf in leaves
    ),
  }


def _largest_over_mean(plan: partition.FragmentPlan) -> float:
  sizes = [plan.size(p) for p in range(plan.num_fragments)]
  return max(sizes) * len(sizes) / sum(sizes)


def _unequal(
  leaf: partition.Tensor, tensors: Sequence[partition.Tensor]
) -> int:
  """Elements of a leaf that a merge of its parts makes otherwise."""
  rng = np.random.default_rng(leaf.size)
  drawn = [
    rng.random(leaf.shape, np.float32) - np.float32(0.5)
    for _ in range(2 + len(_WEIGHTS))
  ]
  expected = _merged(drawn)
  found = 0
  for tensor in tensors:
    box = [slice(None)] * len(leaf.shape)
    if tensor.part is not None:
      axis, start = tensor.part.axis, tensor.part.start
      box[axis] = slice(start, start + tensor.shape[axis])
    part = _merged([values[tuple(box)] for values in drawn])
    for one, other in zip(part, expected, strict=True):
      bits = np.ascontiguousarray(other[tuple(box)]).view(np.uint32)
      found += int(np.count_nonzero(one.view(np.uint32) != bits))
  return found


def _merged(drawn: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Parameters and momentum after a round of these values."""
  theta, momentum = (np.array(x, order="C") for x in drawn[:2])
  inputs = [
    merge.Input(
      sources.MemorySource(np.ascontiguousarray(grad)),
      weight,
      math.sqrt(norms.sum_of_squares(grad)),
    )
    for grad, weight in zip(drawn[2:], _WEIGHTS, strict=True)
  ]
  outer = outer_optimizer.OuterOptimizer(0.7, 0.9)
  merge.Merger(outer).apply(inputs, "mean", theta, [momentum])
  return theta, momentum
