"""What is compiled for a fragment, one program each way.

    extract   values of a fragment, and its outer gradient as encoded
    apply     leaves into which a global version is swapped
    own_step  leaves, set to a global version less an island's own outer step

Fragments whose tensors have the same shapes and shardings share their programs,
and so do all swaps of a process.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco.fragments import partition
from diloco.islands import compilation, core, packing


class Signature(NamedTuple):
  """All that a fragment's programs depend on."""

  leaves: tuple[jax.ShapeDtypeStruct, ...]  # that it has part of
  tensors: tuple[jax.ShapeDtypeStruct, ...]
  # Of each tensor, in which leaf it lies, and along which axis it is a part of
  # that; None for a whole one.
  spots: tuple[tuple[int, int | None], ...]

  def values(self, leaves: Any, starts: Any) -> list[Any]:
    """The tensors' values in these leaves."""
    found, remaining = [], iter(starts)
    for (leaf, axis), tensor in zip(self.spots, self.tensors, strict=True):
      value = leaves[leaf]
      if axis is not None:
        value = jax.lax.dynamic_slice_in_dim(
          value, next(remaining), tensor.shape[axis], axis
        )
        value = jax.lax.with_sharding_constraint(value, tensor.sharding)
      found.append(value)
    return found

  def changed(self, leaves: Any, starts: Any, values: Any) -> list[Any]:
    """The leaves with these values of the tensors."""
    found, remaining = list(leaves), iter(starts)
    for (leaf, axis), value in zip(self.spots, values, strict=True):
      if axis is not None:
        value = jax.lax.dynamic_update_slice_in_dim(
          found[leaf], value, next(remaining), axis
        )
      found[leaf] = value
    return found


class OwnStep(NamedTuple):
  """An outer step with an outer gradient g and a momentum b of its own.

  b <- decay b + taken g;  step = rate (plain g + ahead b)
  """

  rate: float
  decay: float = 0.0  # for no momentum
  taken: float = 1.0
  plain: float = 1.0
  ahead: float = 0.0


class Arrangement(NamedTuple):
  """A fragment in the order of its programs."""

  signature: Signature
  leaves: tuple[str, ...]  # names
  tensors: tuple[str, ...]  # names
  starts: tuple[np.int32, ...]  # of the parts, along their axes

  @classmethod
  def of(
    cls,
    fragment: Sequence[partition.Tensor],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Mapping[str, jax.ShapeDtypeStruct],
  ) -> "Arrangement":
    """Puts tensors of one kind in one place, whatever they are called."""

    def kind(tensor: partition.Tensor) -> Any:
      leaf = leaves[tensor.leaf]
      axis = tensor.part.axis if tensor.part else -1
      return leaf.shape, str(leaf.sharding), axis, tensor.leaf, tensor.shape

    ordered = sorted(fragment, key=kind)
    names = tuple(dict.fromkeys(t.leaf for t in ordered))
    signature = Signature(
      tuple(leaves[name] for name in names),
      tuple(tensors[t.name] for t in ordered),
      tuple(
        (names.index(t.leaf), t.part.axis if t.part else None) for t in ordered
      ),
    )
    starts = tuple(np.int32(t.part.start) for t in ordered if t.part)
    return cls(signature, names, tuple(t.name for t in ordered), starts)


@functools.cache
def extract(
  signature: Signature, encoding: packing.Encoding
) -> jax.stages.Compiled:
  """Compiles (leaves, starts, anchors, key, owed) to three lists.

  The values, the outer gradients and, with feedback, what encoding left out of
  these. The key, from `packing.key_data`, is None where rounding draws nothing;
  what is owed, by tensor, is empty without feedback.
  """

  def program(
    leaves: Any, starts: Any, anchors: Any, key: Any, owed: Any
  ) -> Any:
    values = signature.values(leaves, starts)
    encoded, left = [], []
    for i, tensor in enumerate(signature.tensors):
      own_key = None
      if key is not None:
        own_key = jax.random.fold_in(jax.random.wrap_key_data(key), i)
      part = tensor.sharding.shard_shape(tensor.shape)
      outer_grad = anchors[i] - values[i]
      if owed:
        outer_grad += owed[i]
      stored, decoded = packing.encode(encoding, outer_grad, part, own_key)
      encoded.append(stored)
      if owed:
        left.append(outer_grad - decoded)
    return values, encoded, left

  whole = [tensor.sharding for tensor in signature.tensors]
  rows = [packing.sharding(t, encoding.codec) for t in signature.tensors]
  to = whole, rows, whole if encoding.feedback else []
  key = packing.key_data() if encoding.stochastic else None
  owed = signature.tensors if encoding.feedback else ()
  return _compile(jax.jit(program, out_shardings=to), signature, key, owed)


@functools.cache
def apply(signature: Signature, way: core.Adoption) -> jax.stages.Compiled:
  """Compiles (leaves, starts, versions, ...) to leaves, which it donates.

  "blend" also takes alpha, "carry" the references.
  """

  def program(leaves: Any, starts: Any, versions: Any, *more: Any) -> Any:
    values = signature.values(leaves, starts)
    if way == "blend":
      (alpha,) = more
      pairs = zip(values, versions, strict=True)
      versions = [alpha * local + (1 - alpha) * new for local, new in pairs]
    elif way == "carry":
      triples = zip(values, versions, *more, strict=True)
      versions = [local + (new - held) for local, new, held in triples]
    return signature.changed(leaves, starts, versions)

  more: dict[str, list[Any]] = {
    "overwrite": [],
    "blend": [jax.ShapeDtypeStruct((), jnp.float32)],
    "carry": [signature.tensors],
  }
  to = [leaf.sharding for leaf in signature.leaves]
  jitted = jax.jit(program, out_shardings=to, donate_argnums=0)
  return _compile(jitted, signature, *more[way])


@functools.cache
def own_step(signature: Signature, how: OwnStep) -> jax.stages.Compiled:
  """Compiles (leaves, starts, versions, anchors, momenta) to four lists.

  The leaves, which it donates; by tensor the values that are in them then, a
  version less the step; the outer gradients, anchors minus what the leaves
  were; and the new momenta, which are empty where there are none.
  """

  def program(
    leaves: Any, starts: Any, versions: Any, anchors: Any, momenta: Any
  ) -> Any:
    pairs = zip(anchors, signature.values(leaves, starts), strict=True)
    grads = [anchor - local for anchor, local in pairs]
    steps, kept = [how.plain * grad for grad in grads], []
    if momenta:
      both = zip(momenta, grads, strict=True)
      kept = [how.decay * b + how.taken * grad for b, grad in both]
      steps = [s + how.ahead * b for s, b in zip(steps, kept, strict=True)]
    pairs = zip(versions, steps, strict=True)
    news = [version - how.rate * step for version, step in pairs]
    return signature.changed(leaves, starts, news), news, grads, kept

  tensors = signature.tensors
  momenta = tensors if how.decay else ()
  to = (
    [leaf.sharding for leaf in signature.leaves],
    [tensor.sharding for tensor in tensors],
    [tensor.sharding for tensor in tensors],
    [tensor.sharding for tensor in momenta],
  )
  jitted = jax.jit(program, out_shardings=to, donate_argnums=0)
  return _compile(jitted, signature, tensors, momenta)


def _compile(
  jitted: Any, signature: Signature, *more: Any
) -> jax.stages.Compiled:
  start = jax.ShapeDtypeStruct((), jnp.int32)
  starts = tuple(start for _, axis in signature.spots if axis is not None)
  args = signature.leaves, starts, signature.tensors, *more
  return compilation.compiled(jitted, *args)
