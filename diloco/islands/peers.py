"""An inner optimizer's state from a healthy peer, through the store.

An island that comes back without a recent saved state asks; the living island
of the lowest number that has adopted all the versions asked for answers with
its optimizer state alone. Parameters always come from the global versions: the
peer's own hold progress that is not published yet, which would count twice.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco import errors
from diloco.islands import placement as placement_lib
from diloco.islands import protocol
from diloco.snapshots import arrays, digest, keys, records, store

_POLL_SECS = 0.05


class Offer(NamedTuple):
  """What a peer gives: its state at one step, in memory nobody donates."""

  island: int
  incarnation: int
  step: int
  versions: Sequence[int]  # [P], its base versions then
  opt_state: Any


def _named(opt_state: Any) -> dict[str, jax.Array]:
  return {f"{i:06d}": x for i, x in enumerate(jax.tree.leaves(opt_state))}


def answer(
  snapshots: store.SnapshotStore, request: records.PeerRequest, offer: Offer
) -> None:
  """Writes an answer: the tensors first, the record that names them last.

  Raises:
    OSError: the store did not take it.
    ValueError: the state holds what the store cannot.
  """
  asked = snapshots.read(
    keys.peer_request_key(request.island), records.PeerRequest
  )
  if asked != request:
    return  # answered by another meanwhile, or given up
  scalars: dict[str, int] = {}
  tensors = []
  for name, leaf in _named(offer.opt_state).items():
    if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer):
      scalars[name] = int(leaf)
      continue
    held = placement_lib.to_host(name, leaf)
    layout = arrays.Layout.of(leaf.shape, leaf.dtype, held.shard_shape)
    tensors.append((arrays.Tensor(name, layout, held.pieces), held.whole()))
  payload = keys.peer_payload_prefix(
    request.island,
    request.incarnation,
    offer.island,
    offer.incarnation,
    offer.step,
  )
  snapshots.arrays.write(payload, [tensor for tensor, _ in tensors])
  state = records.PeerState(
    island=request.island,
    incarnation=request.incarnation,
    from_island=offer.island,
    from_incarnation=offer.incarnation,
    step=offer.step,
    versions=list(offer.versions),
    payload=payload,
    scalars=scalars,
    chunks={t.name: list(t.layout.chunk_shape) for t, _ in tensors},
    digest=digest.tensors((t.name, whole) for t, whole in tensors),
  )
  key = keys.peer_state_key(request.island, request.incarnation)
  snapshots.write(key, state)


def ask(
  snapshots: store.SnapshotStore,
  request: records.PeerRequest,
  patience_secs: float,
  clock: Callable[[], float] = time.monotonic,
) -> records.PeerState | None:
  """Calls for a state and waits for an answer that will do.

  An answer that is older than the versions asked for is refused.

  Raises:
    OSError: the store could not be reached.
  """
  key = keys.peer_state_key(request.island, request.incarnation)
  snapshots.write(keys.peer_request_key(request.island), request)
  deadline = clock() + patience_secs
  try:
    while clock() < deadline:
      state = snapshots.read(key, records.PeerState)
      if state and protocol.can_serve(state.versions, request.versions):
        return state
      time.sleep(_POLL_SECS)
    return None
  finally:
    snapshots.delete(keys.peer_request_key(request.island))


def read(
  snapshots: store.SnapshotStore,
  state: records.PeerState,
  like: Any,
  placement: placement_lib.Placement,
) -> Any:
  """Reads the optimizer state an answer names.

  Args:
    snapshots: the store.
    state: the answer.
    like: an optimizer state of the shapes wanted.
    placement: where the shards go; the sender's may be another.

  Raises:
    CorruptSnapshotError: it is damaged, or of another optimizer.
  """
  leaves: dict[str, jax.Array] = {}
  wholes = []
  for name, leaf in _named(like).items():
    if name in state.scalars and leaf.ndim == 0:
      leaves[name] = jnp.asarray(state.scalars[name], leaf.dtype)
      continue
    held = _read_leaf(snapshots, state, name, leaf, placement)
    leaves[name] = placement.put(held)
    wholes.append((name, held.whole()))
  if digest.tensors(wholes) != state.digest:
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
  placement: placement_lib.Placement,
) -> placement_lib.HostTensor:
  chunk = state.chunks.get(name)
  if chunk is None or len(chunk) != leaf.ndim:
    raise errors.CorruptSnapshotError(
      f"the optimizer state of island {state.from_island} has no leaf {name}"
      f" of {leaf.ndim} axes"
    )
  layout = arrays.Layout(leaf.shape, leaf.dtype.name, tuple(chunk))
  opened = snapshots.arrays.open(state.payload, name, layout)
  pieces = []
  for box in placement.boxes(leaf.shape):
    values = np.empty([s.stop - s.start for s in box], leaf.dtype)
    opened.read(box, values)
    pieces.append((box, values))
  shard_shape = placement.param(leaf.shape).shard_shape(leaf.shape)
  return placement_lib.HostTensor(name, leaf.shape, shard_shape, tuple(pieces))


def clean_up(snapshots: store.SnapshotStore, island: int) -> None:
  """Deletes all answers to an island, also those to its earlier lives."""
  mine = f"{island:04d}."
  for prefix in (keys.PEER_STATES, keys.PEER_PAYLOADS):
    for name in snapshots.names(prefix):
      if name.startswith(mine):
        snapshots.delete_tree(f"{prefix}/{name}")
        snapshots.delete(f"{prefix}/{name}")
