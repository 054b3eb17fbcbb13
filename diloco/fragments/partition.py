"""Fragments: disjoint sets of tensors synchronised together.

A fragment plan divides the tensors of a model into P fragments, of nearly equal
size unless it is told otherwise. A tensor is a parameter leaf or, where leaves
are split, a part of one along an axis: a model of a few stacked leaves, or with
one large embedding, still makes balanced fragments then. Every island and the
syncer must hold the identical plan, so it carries a hash, is stored with the
run, and a mismatch is refused.

Reference: Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512, section 2.3 (there: strided blocks of layers; here by default
balanced tensors, whose peak bandwidth is lower).
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from diloco import errors

Grouping = Literal["balanced", "layer", "tensor", "strided"]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """What is exchanged as one: a parameter leaf, or a part of one."""

  name: str  # the leaf's '/'-joined path; of a part, with its range behind it
  shape: tuple[int, ...]  # its own
  merge: str  # "rda" or "mean"
  part: "Part | None" = None  # None for a whole leaf

  @property
  def leaf(self) -> str:
    """Path of the parameter leaf it belongs to."""
    return self.part.leaf if self.part else self.name

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)


class Part(NamedTuple):
  """Where a part lies in its leaf: from `start`, as long as its shape says."""

  leaf: str
  axis: int
  start: int


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
    return {"fragments": self._content(), "hash": self.hash}

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> "FragmentPlan":
    """Rebuilds a plan; a hash that does not match its content is refused."""
    plan = cls(
      tuple(
        tuple(
          Tensor(name, tuple(shape), merge, Part(*part[0]) if part else None)
          for name, shape, merge, *part in tensors
        )
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
    """Hex digest over names, shapes, merge kinds, parts and grouping."""
    content = json.dumps(self._content())
    return hashlib.sha256(content.encode()).hexdigest()[:16]

  def _content(self) -> list[list[list[Any]]]:
    return [
      [
        [t.name, list(t.shape), t.merge, *([list(t.part)] if t.part else [])]
        for t in tensors
      ]
      for tensors in self.fragments
    ]


def partition(
  tensors: Iterable[Tensor],
  num_fragments: int,
  *,
  split: bool = False,
  by: Grouping = "balanced",
  apart: bool = False,
) -> FragmentPlan:
  """Divides tensors into fragments.

  Balanced is longest processing time first: tensors by size descending, ties by
  name, each to the lightest fragment. The largest fragment is at most 4/3 of
  the best possible (Graham, 1969), where the best is never below the largest
  tensor. The others go by names, in which numbers count as numbers. A layer is
  all that has its path in common up to the first part that ends in a number,
  as `layer_3` or `blocks/3`; what is in none makes one more, which comes first.

  Args:
    tensors: all parameter leaves of the model, in any order; the plan is equal.
    num_fragments: P, at least 1 and at most the number of tensors or layers.
    split: whether leaves larger than a third of a P-th of the model are cut
      into parts no larger than that, as far as one of their axes allows; the
      largest balanced fragment is then at most 4/3 of the mean. Parts of a leaf
      that is merged elementwise come to what the whole one would; a
      radial-directional merge sees each part as a vector of its own.
    by: "balanced"; "tensor", each in turn to the next fragment; "layer",
      fragments are runs of layers; "strided", each layer in turn to the next.
    apart: whether the last fragment is all embeddings and nothing else.

  Raises:
    UserError: P is out of range, two tensors have one name, or there are no
      embeddings to set apart, or nothing else.
  """
  ordered = sorted(tensors, key=lambda t: (-t.size, t.name))
  names = {t.name for t in ordered}
  if len(names) != len(ordered):
    raise errors.UserError(
      f"{len(ordered)} parameter tensors",
      f"only {len(names)} distinct names among them",
      "give every parameter leaf its own path",
    )
  if split and num_fragments > 1:
    # Longest processing time first is then off the mean by a third at most.
    limit = sum(tensor.size for tensor in ordered) / num_fragments / 3
    ordered = [part for tensor in ordered for part in _parts(tensor, limit)]
    ordered.sort(key=lambda t: (-t.size, t.name))
  others = [t for t in ordered if not (apart and t.merge == "mean")]
  if apart and not 0 < len(others) < len(ordered):
    raise errors.UserError(
      "config.sync.embeddings_apart = True",
      f"{'all' if not others else 'none'} of the model's parameters are"
      " embeddings",
      "set it to False, or see to the task's is_embedding",
    )
  units, count = _units(others, by), num_fragments - apart
  if not 1 <= count <= len(units):
    layers = by in ("layer", "strided")
    what = "layers" if layers else "parameter tensors"
    what = f"parts of {what}" if split and not layers else what
    raise errors.UserError(
      f"config.sync.num_fragments = {num_fragments}",
      f"the model has {len(units)} {what}{' beside embeddings' * apart} and"
      " every fragment needs one",
      "set config.sync.num_fragments between"
      f" {1 + apart} and {len(units) + apart}"
      + ("" if split or layers else ", or config.sync.split_tensors to True"),
    )
  if by == "balanced":
    bins = _balanced(others, count)
  else:
    bins = [[] for _ in range(count)]
    for i, unit in enumerate(units):
      bins[i * count // len(units) if by == "layer" else i % count] += unit
  if apart:
    bins.append([t for t in ordered if t.merge == "mean"])
  return FragmentPlan(
    tuple(tuple(sorted(b, key=lambda t: t.name)) for b in bins)
  )


def _balanced(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
  bins: list[list[Tensor]] = [[] for _ in range(count)]
  sizes = [0] * count
  for tensor in tensors:
    lightest = min(range(count), key=lambda p: (sizes[p], p))
    bins[lightest].append(tensor)
    sizes[lightest] += tensor.size
  return bins


def _units(tensors: Iterable[Tensor], by: Grouping) -> list[list[Tensor]]:
  """What goes into a fragment as one, in order: tensors or whole layers."""
  found: dict[str, list[Tensor]] = {}
  for tensor in tensors:
    layered = by in ("layer", "strided")
    name = _layer(tensor.leaf) if layered else tensor.name
    found.setdefault(name, []).append(tensor)
  return [found[name] for name in sorted(found, key=_natural)]


def _layer(leaf: str) -> str:
  """The layer of a leaf; empty if it is in none."""
  steps = leaf.split("/")
  numbered = (i for i, step in enumerate(steps, 1) if step[-1:].isdecimal())
  return "/".join(steps[: next(numbered, 0)])


def _natural(name: str) -> list[str | int]:
  """Sorts by numbers in a name, not by their digits."""
  parts = re.split(r"([0-9]+)", name)
  return [int(p) if i % 2 else p for i, p in enumerate(parts)]


def _parts(tensor: Tensor, limit: float) -> list[Tensor]:
  """Nearly equal parts of a leaf, none above `limit` elements if possible."""
  if tensor.size <= max(limit, 1):
    return [tensor]
  # The first axis that can be cut finely enough: stacked layers, or rows.
  thin = [
    axis for axis, n in enumerate(tensor.shape) if tensor.size / n <= limit
  ]
  axis = thin[0] if thin else tensor.shape.index(max(tensor.shape))
  rows = tensor.shape[axis]
  count = math.ceil(rows / max(1, int(limit * rows / tensor.size)))
  bounds = [rows * i // count for i in range(count + 1)]
  before = ":," * axis
  found = []
  for start, stop in itertools.pairwise(bounds):
    shape = list(tensor.shape)
    shape[axis] = stop - start
    name = f"{tensor.name}[{before}{start}:{stop}]"
    part = Part(tensor.name, axis, start)
    found.append(Tensor(name, tuple(shape), tensor.merge, part))
  return found if count > 1 else [tensor]
