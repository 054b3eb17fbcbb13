"""An inner optimizer's state from a healthy peer, through the store.

The shell around `diloco.islands.peer_protocol`: what moves tensors.
A peer sends its optimizer state alone. Parameters always come from the global
versions: the peer's own hold progress that is not published yet, which would
count twice.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco import errors
from diloco.islands import peer_protocol, publisher, shards
from diloco.snapshots import arrays, digest, keys, operations, records, store


def _named(opt_state: Any) -> dict[str, jax.Array]:
  return {f"{i:06d}": x for i, x in enumerate(jax.tree.leaves(opt_state))}


def size_of(opt_state: Any) -> int:
  """Bytes of an optimizer state."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state))


def answer(
  snapshots: store.SnapshotStore,
  request: records.PeerRequest,
  who: publisher.Identity,
  step: int,
  versions: Sequence[int],
  opt_state: Any,
) -> None:
  """Writes an answer, unless its values are not finite.

  It is the state at one step, whose base versions are `versions`, [P], in
  memory nobody donates.

  Raises:
    OSError: the store did not take it.
    ValueError: the state holds what the store cannot.
  """
  scalars: dict[str, int] = {}
  all_held: dict[str, shards.HostTensor] = {}
  for name, leaf in _named(opt_state).items():
    if leaf.ndim == 0 and not jnp.issubdtype(leaf.dtype, jnp.inexact):
      scalars[name] = int(leaf)
      continue
    held = all_held[name] = shards.to_host(leaf)
    for _, piece in held.pieces:
      if not np.isfinite(piece.astype(np.float32, copy=False)).all():
        return  # it would make the caller as ill as this island is
  tensors = [held.stored(name) for name, held in all_held.items()]
  parties = request.island, request.incarnation, who.island, who.incarnation
  state = records.PeerState(
    *parties,
    step=step,
    versions=list(versions),
    payload=keys.peer_payload_prefix(*parties, step),
    scalars=scalars,
    chunks={t.name: list(t.layout.chunk_shape) for t in tensors},
    digest=digest.tensors((n, held.whole()) for n, held in all_held.items()),
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

  It comes in the shapes and shardings of `like`; the sender's may be others.

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

  if digest.tensors(tensors(), state.digest) != state.digest:
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
  held, reads = shards.begin_read(opened, layout, leaf.sharding)
  for read in reads:
    read.finish()
  return held
