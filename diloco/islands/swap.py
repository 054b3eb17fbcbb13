"""Local parameters against global ones: what goes out, and what is swapped in.

A `Swap` knows named arrays, their shardings and the fragments they are divided
into; nothing of tasks, loops or optimizers. What an island learned on a
fragment while its publication was under way is in its parameters but not in the
new version. Three ways to treat it:

    overwrite   theta <- G
    blend       theta <- alpha theta + (1 - alpha) G
    carry       theta <- theta + (G - R)

Symbols: G the new global value; R the island's own value at the last step of
its that G contains or that is on its way, or the value it started from where
nothing was published since.

Reference: overwrite, Decoupled DiLoCo, arXiv 2604.21428; blend, Streaming
DiLoCo, arXiv 2501.18512, equation 3.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from diloco.fragments import partition
from diloco.islands import core, shards

Params: TypeAlias = Mapping[str, jax.Array]
Live: TypeAlias = dict[str, jax.Array]  # an island's parameters as they are
Held: TypeAlias = jax.Array | shards.HostTensor

_copy = jax.jit(jnp.copy)


@functools.partial(jax.jit, donate_argnums=0)
def _blend(local: jax.Array, adopted: jax.Array, alpha: jax.Array) -> jax.Array:
  return alpha * local + (1 - alpha) * adopted


@functools.partial(jax.jit, donate_argnums=0)
def _carry(
  local: jax.Array, adopted: jax.Array, reference: jax.Array
) -> jax.Array:
  return local + (adopted - reference)


@jax.jit
def _carried(
  local: jax.Array, adopted: jax.Array, reference: jax.Array
) -> jax.Array:
  return local + (adopted - reference)


@functools.partial(jax.jit, static_argnames=("size", "axis", "sharding"))
def _cut(
  whole: jax.Array, start: Any, size: int, axis: int, sharding: shards.Sharding
) -> jax.Array:
  part = jax.lax.dynamic_slice_in_dim(whole, start, size, axis)
  return jax.lax.with_sharding_constraint(part, sharding)


@functools.partial(
  jax.jit, donate_argnums=0, static_argnames=("axis", "sharding")
)
def _insert(
  whole: jax.Array,
  part: jax.Array,
  start: Any,
  axis: int,
  sharding: shards.Sharding,
) -> jax.Array:
  new = jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis)
  return jax.lax.with_sharding_constraint(new, sharding)


@functools.partial(jax.jit, static_argnames=("axis", "sharding"))
def _join(
  parts: Sequence[jax.Array], axis: int, sharding: shards.Sharding
) -> jax.Array:
  return jax.lax.with_sharding_constraint(
    jnp.concatenate(parts, axis), sharding
  )


def copy_tree(tree: Any) -> Any:
  """Starts device copies of all arrays that nobody will donate."""
  return jax.tree.map(_copy, tree)


def copy_to_host_memory(tree: Any) -> Any:
  """Starts copies of all arrays to memory that costs the devices nothing."""
  return jax.tree.map(_to_host_memory, tree)


def _to_host_memory(value: jax.Array) -> jax.Array:
  if _is_host(value):
    return _copy(value)
  pinned = value.sharding.with_memory_kind("pinned_host")
  return jax.device_put(value, pinned)


def _is_host(value: jax.Array) -> bool:
  """Whether the array's devices are the host's own processor."""
  return next(iter(value.devices())).platform == "cpu"


class Progress(NamedTuple):
  """What an island had learned at one step, as it was saved.

  Attributes:
    params: every leaf's value.
    references: every tensor's value at its fragment's last publication, or
      the global version where nothing was published since; what was learned
      after it, `params - references`, has not left the island yet.
  """

  params: Params
  references: Mapping[str, Held]


class Swap:
  """One model's end of the exchange, on its devices.

  Parameters are given by leaf, fragments by tensor, which is a leaf or a part
  of one. Its methods change the parameters they are given in place: leaves that
  a fragment has part of are replaced. Nothing waits for the devices.

  Copies that outlive a call are in host memory: anchors, which are references
  too until something is published, and publications. What a fragment takes on
  the devices beside the parameters is a version that waits for its adoption,
  and for the moment of it a reference.

  Attributes:
    anchors: [P], the global versions that the fragments started from.
    shardings: of every tensor.
  """

  def __init__(
    self,
    plan: partition.FragmentPlan,
    params: Params,
    adoption: core.Adoption,
    blend_alpha: float,
  ):
    """Starts from initial parameters, which are version 0.

    Args:
      plan: how the tensors are divided into fragments.
      params: all leaves, on their devices.
      adoption: the way of adoption.
      blend_alpha: alpha of "blend".
    """
    self.anchors: list[shards.HostFragment] = []
    self._leaves = shards.shardings_of(params)
    self.shardings = {
      t.name: shards.along(self._leaves[t.leaf], t.part.axis)
      if t.part
      else self._leaves[t.name]
      for tensors in plan.fragments
      for t in tensors
    }
    self._plan = plan
    self._adoption = adoption
    self._alpha = jnp.float32(blend_alpha)
    # R, where the way of adoption needs it: by step, in order.
    self._references: dict[int, dict[int, Mapping[str, Held]]] = {}
    self._published: dict[int, Params] = {}  # last since the anchor
    for fragment in range(plan.num_fragments):
      values = self.values(params, fragment)
      held = {n: shards.to_host(n, value) for n, value in values.items()}
      # On a CPU the host copy is the device's memory, which is given away.
      self.anchors.append({n: t.owned() for n, t in held.items()})
      self._started(fragment, 0)

  @property
  def tensors(self) -> dict[str, jax.ShapeDtypeStruct]:
    """What each tensor of the plan is on these devices."""
    return {
      t.name: jax.ShapeDtypeStruct(
        t.shape, jnp.float32, sharding=self.shardings[t.name]
      )
      for tensors in self._plan.fragments
      for t in tensors
    }

  def values(self, params: Params, fragment: int) -> dict[str, jax.Array]:
    """Those of a fragment's tensors."""
    tensors = self._plan.fragments[fragment]
    return {t.name: self._value(params, t) for t in tensors}

  def _value(self, params: Params, tensor: partition.Tensor) -> jax.Array:
    whole, part = params[tensor.leaf], tensor.part
    if part is None:
      return whole
    size = tensor.shape[part.axis]
    sharding = self.shardings[tensor.name]
    return _cut(whole, part.start, size, part.axis, sharding)

  def _replace(
    self, params: Live, tensor: partition.Tensor, value: jax.Array
  ) -> None:
    part = tensor.part
    if part is not None:
      sharding = self._leaves[part.leaf]
      whole = params[part.leaf]
      value = _insert(whole, value, part.start, part.axis, sharding)
    params[tensor.leaf] = value

  def change(
    self, params: Live, fragment: int, make: Callable[[jax.Array], jax.Array]
  ) -> None:
    """Replaces each tensor of a fragment by what `make` gives for it."""
    for tensor in self._plan.fragments[fragment]:
      self._replace(params, tensor, make(self._value(params, tensor)))

  def assemble(self, tensors: Params) -> Live:
    """Gives the leaves of which these are all tensors."""
    parts_of: dict[str, list[tuple[partition.Part, str]]] = {}
    leaves = {}
    for fragment in self._plan.fragments:
      for tensor in fragment:
        if tensor.part is None:
          leaves[tensor.name] = tensors[tensor.name]
        else:
          found = parts_of.setdefault(tensor.leaf, [])
          found.append((tensor.part, tensor.name))
    for leaf, found in parts_of.items():
      found.sort(key=lambda item: item[0].start)
      parts = [tensors[name] for _, name in found]
      leaves[leaf] = _join(parts, found[0][0].axis, self._leaves[leaf])
    return leaves

  def put(self, anchor: shards.HostFragment) -> dict[str, jax.Array]:
    """Copies a fragment's values to the devices."""
    return shards.put_fragment(anchor, self.shardings)

  def rehearse(self, params: Params) -> None:
    """Compiles what publications and adoptions will call."""
    for tensors in self._plan.fragments:
      for tensor in tensors:
        value = self._value(params, tensor)
        copy = _copy(value)
        if self._adoption == "blend":
          _blend(copy, value, self._alpha)
        elif self._adoption == "carry":
          _carry(copy, value, value)
        if tensor.part is not None:
          spare = {tensor.leaf: _copy(params[tensor.leaf])}
          self._replace(spare, tensor, value)

  def publish(self, params: Params, fragment: int, step: int) -> Params:
    """Starts copies of a fragment's values of this step in host memory."""
    copies = {
      t.name: self._value(params, t)
      if t.part and _is_host(params[t.leaf])
      else _to_host_memory(self._value(params, t))  # a part is a copy already
      for t in self._plan.fragments[fragment]
    }
    self._published[fragment] = copies
    if self._adoption == "carry":
      first, *published = self._references[fragment].items()
      kept = published[: core.PUBLICATIONS_KEPT - 1]
      self._references[fragment] = dict([first, *kept, (step, copies)])
    return copies

  def adopt(
    self,
    params: Live,
    fragment: int,
    anchor: shards.HostFragment,
    kept_from: int,
    on_device: Params | None = None,
  ) -> None:
    """Swaps a global version in.

    Args:
      params: the island's; what the fragment's were is donated.
      fragment: which.
      anchor: the version's values.
      kept_from: step of R, from `core.Adopt`.
      on_device: the version's values on the devices, to be given away;
        otherwise they are put there now.
    """
    adopted = self._take(fragment, anchor, on_device)
    if self._adoption == "carry":
      reference = self._references[fragment][kept_from]
      self._references[fragment] = {kept_from: anchor}
    for tensor in self._plan.fragments[fragment]:
      value = adopted[tensor.name]
      if self._adoption == "blend":
        value = _blend(self._value(params, tensor), value, self._alpha)
      elif self._adoption == "carry":
        local = self._value(params, tensor)
        held = self._on_devices(tensor.name, reference[tensor.name])
        value = _carry(local, value, held)
      self._replace(params, tensor, value)

  def start_over(
    self,
    params: Live,
    fragment: int,
    anchor: shards.HostFragment,
    first_step: int,
    on_device: Params | None = None,
  ) -> None:
    """Sets a fragment to a global version: what it learned is given up.

    Args:
      params: as for `adopt`.
      fragment: as for `adopt`.
      anchor: as for `adopt`.
      first_step: the step its progress counts from.
      on_device: as for `adopt`.
    """
    values = self._take(fragment, anchor, on_device)
    self._started(fragment, first_step)
    for tensor in self._plan.fragments[fragment]:
      self._replace(params, tensor, values[tensor.name])

  def restore(
    self,
    params: Live,
    anchors: Sequence[shards.HostFragment],
    first_steps: Sequence[int],
    saved: Progress | None = None,
    carried: Collection[int] = (),
  ) -> None:
    """Sets all fragments to global versions, before any step of this life.

    Args:
      params: the island's.
      anchors: [P], global versions to start from.
      first_steps: [P], the step each fragment's progress counts from.
      saved: where progress that never left the island is taken from.
      carried: fragments with such progress: theta <- theta_s + (G - R_s).
    """
    for fragment, anchor in enumerate(anchors):
      self.start_over(params, fragment, anchor, first_steps[fragment])
      if fragment in carried:
        assert saved is not None
        for tensor in self._plan.fragments[fragment]:
          leaf = tensor.leaf
          whole = jax.device_put(saved.params[leaf], self._leaves[leaf])
          local = self._value({leaf: whole}, tensor)
          adopted = self._value(params, tensor)
          held = saved.references[tensor.name]
          reference = self._on_devices(tensor.name, held)
          value = _carried(local, adopted, reference)
          self._replace(params, tensor, value)

  def references(self) -> dict[str, Held]:
    """As in `Progress`; nobody donates them."""
    found: dict[str, Held] = {}
    for fragment, anchor in enumerate(self.anchors):
      found.update(self._published.get(fragment, anchor))
    return found

  def _take(
    self,
    fragment: int,
    anchor: shards.HostFragment,
    on_device: Params | None,
  ) -> Params:
    """A version is the fragment's anchor from now on; gives its values."""
    self.anchors[fragment] = anchor
    self._published.pop(fragment, None)
    return self.put(anchor) if on_device is None else on_device

  def _started(self, fragment: int, step: int) -> None:
    """At `step` the island's fragment equals its anchor."""
    if self._adoption == "carry":
      self._references[fragment] = {step: self.anchors[fragment]}

  def _on_devices(self, name: str, value: Held) -> jax.Array:
    if isinstance(value, shards.HostTensor):
      return shards.put(value, self.shardings[name])
    if _is_host(value):
      return value
    return jax.device_put(value, self.shardings[name])
