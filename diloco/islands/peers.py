"""An inner optimizer's state from a healthy peer, through the store.

The shell around `diloco.islands.peer_protocol`: what moves tensors.
A peer sends its optimizer state alone. Parameters always come from the global
versions: the peer's own hold progress that is not published yet, which would
count twice.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco import errors
from diloco.islands import peer_protocol, shards
from diloco.snapshots import arrays, digest, keys, operations, records, store


class Offer(NamedTuple):
  """What a peer gives: its state at one step, in memory nobody donates."""

  island: int
  incarnation: int
  step: int
  versions: Sequence[int]  # [P], its base versions then
  opt_state: Any


def _named(opt_state: Any) -> dict[str, jax.Array]:
  return {f"{i:06d}": x for i, x in enumerate(jax.tree.leaves(opt_state))}


def size_of(opt_state: Any) -> int:
  """Bytes of an optimizer state."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state))


def answer(
  snapshots: store.SnapshotStore, request: records.PeerRequest, offer: Offer
) -> None:
  """Writes an answer, unless its values are not finite.

  Raises:
    OSError: the store did not take it.
    ValueError: the state holds what the store cannot.
  """
  scalars: dict[str, int] = {}
  tensors: list[arrays.Tensor] = []
  all_held: list[shards.HostTensor] = []
  for name, leaf in _named(offer.opt_state).items():
    if leaf.ndim == 0 and not jnp.issubdtype(leaf.dtype, jnp.inexact):
      scalars[name] = int(leaf)
      continue
    held = shards.to_host(name, leaf)
    for _, piece in held.pieces:
      if not np.isfinite(piece.astype(np.float32, copy=False)).all():
        return  # it would make the caller as ill as this island is
    layout = arrays.Layout.of(leaf.shape, leaf.dtype, held.shard_shape)
    tensors.append(arrays.Tensor(name, layout, held.pieces, described=False))
    all_held.append(held)
  payload = keys.peer_payload_prefix(
    request.island,
    request.incarnation,
    offer.island,
    offer.incarnation,
    offer.step,
  )
  state = records.PeerState(
    island=request.island,
    incarnation=request.incarnation,
    from_island=offer.island,
    from_incarnation=offer.incarnation,
    step=offer.step,
    versions=list(offer.versions),
    payload=payload,
    scalars=scalars,
    chunks={t.name: list(t.layout.chunk_shape) for t in tensors},
    digest=digest.tensors((held.name, held.whole()) for held in all_held),
  )

  def execute(operation: operations.Operation) -> Any:
    if isinstance(operation, operations.WritePayload):
      return snapshots.arrays.write(operation.prefix, operation.content)
    return snapshots.execute(operation)

  operations.perform(peer_protocol.answer(request, state, tensors), execute)


def read(
  snapshots: store.SnapshotStore,
  state: records.PeerState,
  like: Any,
) -> Any:
  """Reads the optimizer state that an answer names.

  Args:
    snapshots: the store.
    state: the answer.
    like: an optimizer state of the shapes and shardings wanted; the sender's
      shardings may be others.

  Raises:
    CorruptSnapshotError: it is damaged, or of another optimizer.
  """
  leaves: dict[str, jax.Array] = {}

  def tensors() -> Iterator[tuple[str, np.ndarray]]:
    for name, leaf in _named(like).items():
      if name in state.scalars and leaf.ndim == 0:
        leaves[name] = jnp.asarray(state.scalars[name], leaf.dtype)
        continue
      held = _read_leaf(snapshots, state, name, leaf)
      leaves[name] = shards.put(held, shards.in_host_memory(leaf.sharding))
      yield name, held.whole()

  if digest.tensors(tensors()) != state.digest:
    raise errors.CorruptSnapshotError(
      f"the optimizer state of island {state.from_island} is not what it sent"
    )
  structure = jax.tree.structure(like)
  return jax.tree.unflatten(structure, [leaves[n] for n in sorted(leaves)])


def _read_leaf(
  snapshots: store.SnapshotStore,
  state: records.PeerState,
  name: str,
  leaf: jax.Array,
) -> shards.HostTensor:
  chunk = state.chunks.get(name)
  if chunk is None or len(chunk) != leaf.ndim:
    raise errors.CorruptSnapshotError(
      f"the optimizer state of island {state.from_island} has no leaf {name}"
      f" of {leaf.ndim} axes"
    )
  layout = arrays.Layout(leaf.shape, leaf.dtype.name, tuple(chunk))
  opened = snapshots.arrays.open(state.payload, name, layout)
  pieces = []
  for box in shards.boxes(leaf.shape, leaf.sharding):
    values = np.empty([s.stop - s.start for s in box], leaf.dtype)
    opened.read(box, values)
    pieces.append((box, values))
  shard_shape = leaf.sharding.shard_shape(leaf.shape)
  return shards.HostTensor(name, leaf.shape, shard_shape, tuple(pieces))
