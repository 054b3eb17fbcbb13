"""Local parameters against global ones: what goes out, and what is swapped in.

A `Swap` knows named arrays, their shardings and the fragments they are divided
into; nothing of tasks, loops or optimizers. What an island learned on a
fragment while its publication was under way is in its parameters but not in the
new version. Four ways to treat it:

    overwrite   theta <- G
    blend       theta <- alpha theta + (1 - alpha) G
    carry       theta <- theta + (G - R)
    eager       theta <- G - u(D) / M, not now but at the next publication

Symbols: G the new global value; R the island's own value at the last step of
its that G contains or that is on its way, or the value it started from where
nothing was published since; D what is published then, u an outer step of the
island's own and M the islands (`diloco.islands.eager`).

Reference: overwrite, Decoupled DiLoCo, arXiv 2604.21428; blend, Streaming
DiLoCo, arXiv 2501.18512, equation 3; eager, arXiv
2502.12996.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from diloco.fragments import codec as codec_lib
from diloco.fragments import partition
from diloco.islands import core, eager, feedback, kernels, packing, shards

Params: TypeAlias = Mapping[str, jax.Array]
Live: TypeAlias = dict[str, jax.Array]  # an island's parameters as they are


@functools.partial(jax.jit, static_argnames=("axis", "sharding"))
def _join(
  parts: Sequence[jax.Array], axis: int, sharding: shards.Sharding
) -> jax.Array:
  return jax.lax.with_sharding_constraint(
    jnp.concatenate(parts, axis), sharding
  )


@jax.jit
def _sum(one: Any, other: Any) -> Any:
  return jax.tree.map(jnp.add, one, other)


@jax.jit
def _moved(one: Any, to: Any, of: Any) -> Any:
  return jax.tree.map(lambda x, y, z: x + (y - z), one, to, of)


def copy_to_host_memory(tree: Any) -> Any:
  """Starts copies of all arrays to memory that costs the devices nothing."""
  return jax.device_put(tree, _host_memory(tree), may_alias=False)


def _host_memory(tree: Any) -> Any:
  """Of all arrays, their division in the host's memory."""
  return jax.tree.map(lambda x: shards.in_host_memory(x.sharding), tree)


class Progress(NamedTuple):
  """What an island had learned at one step, as it was saved."""

  params: Params  # every leaf
  # Every tensor at its fragment's last publication, or the global version where
  # nothing was published since; what was learned after it,
  # `params - references`, has not left the island yet.
  references: Params
  residuals: Mapping[int, feedback.Saved] = {}  # by fragment


class Swap:
  """One model's end of the exchange, on its devices.

  Parameters are given by leaf, fragments by tensor, which is a leaf or a part
  of one. Its methods change the parameters they are given in place: leaves that
  a fragment has part of are replaced. Each is one compiled program and one
  transfer, and nothing waits for the devices but `start_over`.

  All that outlives a call is in host memory, divided as the tensors are:
  anchors, which are references too until something is published, and
  publications. Beside the parameters a fragment takes on the devices what its
  program reads and writes, a version and a reference or an anchor and a
  publication, until that has run.

  Attributes:
    anchors: [P], the global versions that the fragments started from.
    tensors: what each of the plan is on the devices.
  """

  def __init__(
    self,
    plan: partition.FragmentPlan,
    params: Params,
    adoption: core.Adoption,
    blend_alpha: float,
    encoding: packing.Encoding,
    seed: Sequence[int] = (),
    max_staleness: int = 0,
    own_step: kernels.OwnStep = kernels.OwnStep(1.0),
  ):
    """Starts from initial parameters, on their devices, which are version 0.

    Args:
      plan: how the tensors are divided into fragments.
      params: all leaves.
      adoption: the way of adoption.
      blend_alpha: alpha of "blend".
      encoding: of publications.
      seed: what stochastic rounding follows from besides fragment and step.
      max_staleness: see `feedback.Feedback`.
      own_step: u / M of "eager".
    """
    self.anchors: list[Params] = []
    self._leaves = {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
      for name, x in params.items()
    }
    self.tensors = {
      t.name: _like(self._leaves[t.leaf], t)
      for tensors in plan.fragments
      for t in tensors
    }
    self._plan = plan
    self._arranged = [
      kernels.Arrangement.of(tensors, self._leaves, self.tensors)
      for tensors in plan.fragments
    ]
    self._adoption = adoption
    self._alpha = np.float32(blend_alpha)
    self._encoding = encoding
    self._seed = seed
    self._feedback: dict[int, feedback.Feedback] = {}
    if encoding.feedback:
      for fragment in range(plan.num_fragments):
        add = functools.partial(self._compute, _sum, fragment)
        self._feedback[fragment] = feedback.Feedback(max_staleness, add)
    self._own_step = own_step
    self._ahead: dict[int, eager.Ahead] = {}  # of "eager"
    # R, where the way of adoption needs it: by step, in order.
    self._references: dict[int, dict[int, Params]] = {}
    self._published: dict[int, Params] = {}  # last since the anchor
    for fragment, arranged in enumerate(self._arranged):
      nothing = [np.zeros(t.shape, t.dtype) for t in arranged.signature.tensors]
      values = self._values(arranged, params, nothing)
      self.anchors.append(copy_to_host_memory(values))
      self._started(fragment, 0)

  @property
  def codec(self) -> codec_lib.Codec:
    """What publications are stored in."""
    return self._encoding.codec

  @property
  def shardings(self) -> dict[str, shards.Sharding]:
    """How each tensor is divided over the devices."""
    return {name: t.sharding for name, t in self.tensors.items()}

  def poison(self, params: Live, fragment: int) -> None:
    """Makes a fragment's values not finite."""
    bad = {
      name: np.full(self.tensors[name].shape, np.nan, np.float32)
      for name in self._arranged[fragment].tensors
    }
    self._put_in(params, fragment, "overwrite", bad)

  def assemble(self, tensors: Params) -> Live:
    """Gives the leaves of which these are all tensors, on the devices."""
    parts_of: dict[str, list[tuple[partition.Part, str]]] = {}
    placed = dict(zip(tensors, self._on_devices(tensors, tensors), strict=True))
    leaves = {}
    for fragment in self._plan.fragments:
      for tensor in fragment:
        if tensor.part is None:
          leaves[tensor.name] = placed[tensor.name]
        else:
          found = parts_of.setdefault(tensor.leaf, [])
          found.append((tensor.part, tensor.name))
    for leaf, found in parts_of.items():
      found.sort(key=lambda item: item[0].start)
      parts = [placed[name] for _, name in found]
      leaves[leaf] = _join(parts, found[0][0].axis, self._leaves[leaf].sharding)
    return leaves

  def rehearse(self) -> None:
    """Compiles what publications and adoptions will call."""
    for signature in {arranged.signature for arranged in self._arranged}:
      kernels.extract(signature, self._encoding)
      ways = {self._adoption, "overwrite"}
      if "eager" in ways:
        ways.remove("eager")
        kernels.own_step(signature, self._own_step)
      for way in ways:
        if not _is_replaced(signature, way):
          kernels.apply(signature, way)

  def publish(
    self,
    params: Live,
    fragment: int,
    step: int,
    origin: core.Origin = core.Origin(0, 0),
  ) -> Params:
    """Starts on a fragment's outer gradient: anchor less parameters, encoded.

    The parameters are those of `step`; "eager" changes them. Error feedback
    needs the origin.

    Returns:
      The fragment's tensors, as `packing.encode` stores them, in host memory.
    """
    arranged, anchor = self._arranged[fragment], self.anchors[fragment]
    if ahead := self._ahead.get(fragment):
      anchor = ahead.anchor(functools.partial(self._compute, _sum, fragment))
    owed = None
    if self._feedback:
      owed = self._feedback[fragment].lend(*origin)
    found = self._extract(
      arranged,
      params,
      self._on_devices(arranged.tensors, anchor),
      (fragment, step),
      owed,
    )
    # Not by the program: a transfer of its own passes beside the next step.
    values, encoded, left = jax.device_put(found, _host_memory(found))
    if self._feedback:
      by_name = dict(zip(arranged.tensors, left, strict=True))
      self._feedback[fragment].published(step, by_name)
    if ahead:
      self._step_ahead(params, fragment, step, anchor)
      return dict(zip(arranged.tensors, encoded, strict=True))
    copies = dict(zip(arranged.tensors, values, strict=True))
    self._published[fragment] = copies
    if self._adoption == "carry":
      first, *published = self._references[fragment].items()
      kept = published[: core.PUBLICATIONS_KEPT - 1]
      self._references[fragment] = dict([first, *kept, (step, copies)])
    return dict(zip(arranged.tensors, encoded, strict=True))

  def settle(self, fragment: int, news: feedback.News | None) -> None:
    """A version is about to be swapped in, which tells this of publications.

    See `feedback.Feedback.settle`; without error feedback nobody asks.
    """
    if self._feedback:
      self._feedback[fragment].settle(news)

  def adopt(
    self, params: Live, fragment: int, anchor: Params, kept_from: int
  ) -> None:
    """Swaps in a global version, in host memory; what was there is donated.

    The step of R is `kept_from`, of `core.Adopt`.
    """
    self._take(fragment, anchor)
    if ahead := self._ahead.get(fragment):
      move = functools.partial(self._compute, _moved, fragment)
      ahead.answered(kept_from, move)
      return
    reference = None
    if self._adoption == "carry":
      reference = self._references[fragment][kept_from]
      self._references[fragment] = {kept_from: anchor}
    self._put_in(params, fragment, self._adoption, anchor, reference)

  def start_over(
    self, params: Live, fragment: int, anchor: Params, first_step: int
  ) -> None:
    """Sets a fragment to a global version: what it learned is given up.

    It waits for the devices: of many fragments in a row, as an island does that
    comes back or is mended, only one is there twice.
    """
    self._take(fragment, anchor)
    self._started(fragment, first_step)
    self._put_in(params, fragment, "overwrite", anchor)
    jax.block_until_ready([params[n] for n in self._arranged[fragment].leaves])

  def restore(
    self,
    params: Live,
    anchors: Sequence[Params],
    first_steps: Sequence[int],
    saved: Progress | None = None,
    carried: Collection[int] = (),
    news: Sequence[feedback.News] = (),
  ) -> None:
    """Sets all fragments to global versions, before any step of this life.

    Args:
      params: the island's.
      anchors: [P], global versions to start from, in host memory.
      first_steps: [P], the step each fragment's progress counts from.
      saved: where progress that never left the island is taken from.
      carried: fragments with such progress: theta <- theta_s + (G - R_s).
      news: [P], what the versions tell of publications, for error feedback.
    """
    for fragment, anchor in enumerate(anchors):
      first_step = first_steps[fragment]
      self.start_over(params, fragment, anchor, first_step)
      if saved is not None and fragment in saved.residuals:
        self._feedback[fragment].restore(
          saved.residuals[fragment], first_step, news[fragment]
        )
      if fragment in carried:
        assert saved is not None
        arranged = self._arranged[fragment]
        leaves = {n: self._leaves[n].sharding for n in arranged.leaves}
        local = jax.device_put({n: saved.params[n] for n in leaves}, leaves)
        on_devices = self._on_devices(arranged.tensors, anchor)
        values = self._values(arranged, local, on_devices)
        self._put_in(params, fragment, "overwrite", values)
        self._put_in(params, fragment, "carry", anchor, saved.references)

  def references(self) -> Live:
    """As in `Progress`; nobody donates them."""
    found: Live = {}
    for fragment, anchor in enumerate(self.anchors):
      ahead = self._ahead.get(fragment)
      begun = ahead.begun if ahead else anchor
      found.update(self._published.get(fragment, begun))
    return found

  def residuals(self, step: int) -> dict[int, feedback.Saved]:
    """As in `Progress`, after `step`."""
    return {p: found.saved(step) for p, found in self._feedback.items()}

  def _take(self, fragment: int, anchor: Params) -> None:
    """A version is the fragment's anchor from now on."""
    self.anchors[fragment] = anchor
    self._published.pop(fragment, None)
    if self._feedback:
      self._feedback[fragment].rebased()

  def _started(self, fragment: int, step: int) -> None:
    """At `step` the island's fragment equals its anchor."""
    if self._adoption == "carry":
      self._references[fragment] = {step: self.anchors[fragment]}
    elif self._adoption == "eager":
      self._ahead[fragment] = eager.Ahead(self.anchors[fragment])

  def _step_ahead(
    self, params: Live, fragment: int, step: int, anchor: Params
  ) -> None:
    """Goes on from the newest version less a step of the island's own."""
    arranged, ahead = self._arranged[fragment], self._ahead[fragment]
    names = arranged.tensors
    momenta: tuple[jax.Array, ...] = ()
    if self._own_step.decay:
      momenta = self._on_devices(names, ahead.momenta or self._zeros(names))
    changed, *news = kernels.own_step(arranged.signature, self._own_step)(
      tuple(params[name] for name in arranged.leaves),
      arranged.starts,
      self._on_devices(names, self.anchors[fragment]),
      self._on_devices(names, anchor),
      momenta,
    )
    params.update(zip(arranged.leaves, changed, strict=True))
    kept = jax.device_put(news, _host_memory(news))
    # Without a momentum there are no momenta.
    ahead.stepped(step, *(dict(zip(names, v, strict=False)) for v in kept))

  def _put_in(
    self,
    params: Live,
    fragment: int,
    way: core.Adoption,
    version: Mapping[str, Any],
    reference: Params | None = None,
  ) -> None:
    """Changes a fragment's parameters by a version of it."""
    arranged = self._arranged[fragment]
    names, leaves = arranged.tensors, arranged.leaves
    if _is_replaced(arranged.signature, way):
      values = {name: version[name] for name in names}
      shardings = {name: self.tensors[name].sharding for name in names}
      params.update(jax.device_put(values, shardings, may_alias=False))
      return
    more: list[Any] = []
    if way == "blend":
      more = [self._alpha]
    elif reference is not None:
      more = [self._on_devices(names, reference)]
    changed = kernels.apply(arranged.signature, way)(
      tuple(params[name] for name in leaves),
      arranged.starts,
      self._on_devices(names, version),
      *more,
    )
    params.update(zip(leaves, changed, strict=True))

  def _extract(
    self,
    arranged: kernels.Arrangement,
    params: Params,
    anchors: Any,
    moment: tuple[int, ...] = (),
    owed: Params | None = None,
  ) -> tuple[list[jax.Array], ...]:
    program = kernels.extract(arranged.signature, self._encoding)
    leaves = tuple(params[name] for name in arranged.leaves)
    key, added = None, ()
    if self._encoding.stochastic:
      key = packing.key_data(*self._seed, *moment)
    if self._encoding.feedback:
      names = arranged.tensors
      added = self._on_devices(names, owed or self._zeros(names))
    found: tuple[list[jax.Array], ...]
    found = program(leaves, arranged.starts, tuple(anchors), key, added)
    return found

  def _zeros(self, names: Collection[str]) -> dict[str, np.ndarray]:
    shapes = {name: self.tensors[name].shape for name in names}
    return {name: np.zeros(s, np.float32) for name, s in shapes.items()}

  def _compute(self, program: Any, fragment: int, *operands: Params) -> Params:
    """What the devices make of a fragment's tensors, in host memory."""
    names = self._arranged[fragment].tensors
    placed = [self._on_devices(names, values) for values in operands]
    return copy_to_host_memory(dict(zip(names, program(*placed), strict=True)))

  def _values(
    self, arranged: kernels.Arrangement, params: Params, anchors: Any
  ) -> Params:
    """A fragment's tensors; of parts they are copies."""
    if not arranged.starts:
      return {name: params[name] for name in arranged.leaves}
    values, *_ = self._extract(arranged, params, anchors)
    return dict(zip(arranged.tensors, values, strict=True))

  def _on_devices(
    self, names: Collection[str], tensors: Mapping[str, Any]
  ) -> tuple[jax.Array, ...]:
    shardings = tuple(self.tensors[name].sharding for name in names)
    values = tuple(tensors[name] for name in names)
    placed: tuple[jax.Array, ...] = jax.device_put(values, shardings)
    return placed


def _like(
  leaf: jax.ShapeDtypeStruct, tensor: partition.Tensor
) -> jax.ShapeDtypeStruct:
  """What a tensor of this leaf is."""
  part, sharding = tensor.part, leaf.sharding
  if part is not None:
    sharding = shards.along(sharding, part.axis)
  return jax.ShapeDtypeStruct(tensor.shape, leaf.dtype, sharding=sharding)


def _is_replaced(signature: kernels.Signature, way: core.Adoption) -> bool:
  """Whether whole leaves take the place of others, and nothing is computed."""
  return way == "overwrite" and all(axis is None for _, axis in signature.spots)
