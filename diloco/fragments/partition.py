"""Fragments: disjoint sets of parameter leaves synchronised together.

A fragment plan divides the tensors of a model into P fragments of nearly equal
size. Every island and the syncer must hold the identical plan, so it carries a
hash, is stored with the run, and a mismatch is refused.

Reference: Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512, section 2.3 (there: strided blocks of layers; here: balanced
tensors, whose peak bandwidth is lower and whose quality is no different).
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from diloco import errors


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One parameter leaf: its '/'-joined path, shape and way to merge."""

  name: str
  shape: tuple[int, ...]
  merge: str  # "rda" or "mean"

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class FragmentPlan:
  """P fragments, each a tuple of tensors sorted by name."""

  fragments: tuple[tuple[Tensor, ...], ...]

  @property
  def num_fragments(self) -> int:
    """P."""
    return len(self.fragments)

  @property
  def num_params(self) -> int:
    """Elements over all fragments."""
    return sum(self.size(p) for p in range(self.num_fragments))

  def size(self, fragment: int) -> int:
    """Elements in one fragment."""
    return sum(tensor.size for tensor in self.fragments[fragment])

  def to_json(self) -> dict[str, Any]:
    """Returns the plan as plain lists, with its hash."""
    fragments = [
      [[t.name, list(t.shape), t.merge] for t in tensors]
      for tensors in self.fragments
    ]
    return {"fragments": fragments, "hash": self.hash}

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> "FragmentPlan":
    """Rebuilds a plan; a hash that does not match its content is refused."""
    plan = cls(
      tuple(
        tuple(Tensor(n, tuple(shape), merge) for n, shape, merge in tensors)
        for tensors in data["fragments"]
      )
    )
    if plan.hash != data["hash"]:
      raise errors.CorruptSnapshotError(
        f"fragment plan has hash {plan.hash}, its record says {data['hash']}"
      )
    return plan

  @property
  def hash(self) -> str:
    """Hex digest over names, shapes, merge kinds and their grouping."""
    content = [
      [(t.name, t.shape, t.merge) for t in tensors]
      for tensors in self.fragments
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def partition(tensors: Iterable[Tensor], num_fragments: int) -> FragmentPlan:
  """Divides tensors into balanced fragments.

  Longest processing time first: tensors by size descending, ties by name, each
  to the lightest fragment. The largest fragment is at most 4/3 of the best
  possible (Graham, 1969), where the best is never below the largest tensor.

  Args:
    tensors: all parameter leaves of the model, in any order.
    num_fragments: P, at least 1 and at most the number of tensors.

  Returns:
    The plan; equal for any order of `tensors`.

  Raises:
    UserError: P is out of range, or two tensors have one name.
  """
  ordered = sorted(tensors, key=lambda t: (-t.size, t.name))
  names = {t.name for t in ordered}
  if len(names) != len(ordered):
    raise errors.UserError(
      f"{len(ordered)} parameter tensors",
      f"only {len(names)} distinct names among them",
      "give every parameter leaf its own path",
    )
  if not 1 <= num_fragments <= len(ordered):
    raise errors.UserError(
      f"config.sync.num_fragments = {num_fragments}",
      f"the model has {len(ordered)} parameter tensors and every fragment"
      " needs one",
      f"set config.sync.num_fragments between 1 and {len(ordered)}",
    )
  bins: list[list[Tensor]] = [[] for _ in range(num_fragments)]
  sizes = [0] * num_fragments
  for tensor in ordered:
    lightest = min(range(num_fragments), key=lambda p: (sizes[p], p))
    bins[lightest].append(tensor)
    sizes[lightest] += tensor.size
  return FragmentPlan(
    tuple(tuple(sorted(b, key=lambda t: t.name)) for b in bins)
  )
