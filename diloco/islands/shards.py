"""One process's part of an array: shards in host memory, and on the devices.

A `HostTensor` is what this process holds of a tensor in host memory: each shard
once, with its box. Nothing here knows how a sharding came to be; an array's own
says it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from diloco.fragments import partition
from diloco.snapshots import arrays, keys, records, store
from diloco.snapshots import layout as layouts

Sharding: TypeAlias = jax.sharding.Sharding
Shardings: TypeAlias = Mapping[str, Sharding]  # by tensor name


@dataclasses.dataclass(frozen=True)
class HostTensor:
  """One tensor's shards on this host, each box once, all of one shape."""

  shape: tuple[int, ...]
  pieces: tuple[tuple[arrays.Index, np.ndarray], ...]

  def stored(self, name: str, *, described: bool = False) -> arrays.Tensor:
    """As the store takes it; see `arrays.Tensor`."""
    piece = self.pieces[0][1]
    layout = arrays.Layout.of(self.shape, piece.dtype, piece.shape)
    return arrays.Tensor(name, layout, self.pieces, described)

  def whole(self) -> np.ndarray:
    """The whole tensor, if this process holds all of it."""
    if len(self.pieces) == 1:
      return self.pieces[0][1]
    values = np.empty(self.shape, self.pieces[0][1].dtype)
    for box, piece in self.pieces:
      values[box] = piece
    return values


HostFragment = Mapping[str, HostTensor]


def in_host_memory(sharding: Sharding) -> Sharding:
  """The same division, in memory that costs the devices nothing.

  That is pinned memory of the host, where the devices have their own besides.
  """
  device = next(iter(sharding.device_set))
  kinds = [memory.kind for memory in device.addressable_memories()]
  if device.platform == "cpu" or "pinned_host" not in kinds:
    return sharding
  return sharding.with_memory_kind("pinned_host")


def along(sharding: Sharding, axis: int) -> Sharding:
  """That of a part along an axis: undivided there, as the whole elsewhere."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return sharding
  spec = list(sharding.spec)
  if axis < len(spec):
    spec[axis] = None
  return jax.sharding.NamedSharding(
    sharding.mesh,
    jax.sharding.PartitionSpec(*spec),
    memory_kind=sharding.memory_kind,
  )


def boxes(shape: Sequence[int], sharding: Sharding) -> list[arrays.Index]:
  """The distinct boxes of an array that this process holds."""
  found = sharding.addressable_devices_indices_map(tuple(shape))
  all_boxes = [_bounds(index, shape) for index in found.values()]
  by_start = {_start(box): box for box in all_boxes}
  return [by_start[start] for start in sorted(by_start)]


def put(tensor: HostTensor, sharding: Sharding) -> jax.Array:
  """Puts host shards where a sharding says.

  On a CPU a device may read the host's memory in place, whatever it is asked
  for. JAX writes over no memory of the host's, also when such an array is
  donated; who owns the host's copy must not either.
  """
  by_start = {_start(box): values for box, values in tensor.pieces}
  indices = sharding.addressable_devices_indices_map(tensor.shape)
  shards = [
    jax.device_put(
      by_start[_start(_bounds(index, tensor.shape))],
      jax.sharding.SingleDeviceSharding(
        device, memory_kind=sharding.memory_kind
      ),
    )
    for device, index in indices.items()
  ]
  return jax.make_array_from_single_device_arrays(
    tensor.shape, sharding, shards
  )


def hold(fragment: HostFragment, shardings: Shardings) -> dict[str, jax.Array]:
  """Makes arrays of a fragment, in host memory, divided for the devices."""
  return {
    name: put(held, in_host_memory(shardings[name]))
    for name, held in fragment.items()
  }


def to_host(array: jax.Array) -> HostTensor:
  """Copies the shards this process holds to host memory, each box once."""
  pieces = {}
  for shard in array.addressable_shards:
    box = _bounds(shard.index, array.shape)
    if _start(box) not in pieces:
      pieces[_start(box)] = (box, np.asarray(shard.data))
  return HostTensor(
    array.shape, tuple(pieces[start] for start in sorted(pieces))
  )


def fragment_to_host(fragment: Mapping[str, jax.Array]) -> HostFragment:
  """`to_host` of every tensor."""
  return {name: to_host(array) for name, array in fragment.items()}


def read_fragment(
  snapshots: store.SnapshotStore,
  head: records.Head,
  tensors: Sequence[partition.Tensor],
  shardings: Shardings,
) -> dict[str, HostTensor]:
  """Reads from a global version only the shards this process holds."""
  found: dict[str, HostTensor] = {}
  reads: list[Any] = []
  for tensor, chunk_shape in zip(tensors, head.chunks, strict=True):
    layout = layouts.of_record(head.codec, tensor.shape, chunk_shape)
    prefix = f"{head.payload}/{keys.PARAMS}"
    opened = snapshots.arrays.open(prefix, tensor.name, layout)
    held, begun = begin_read(opened, layout, shardings[tensor.name])
    found[tensor.name] = held
    reads += begun
  for read in reads:
    read.finish()
  return {name: _decoded(held) for name, held in found.items()}


def begin_read(
  opened: Any, layout: arrays.Layout, sharding: Sharding
) -> tuple[HostTensor, list[Any]]:
  """What this process holds of a stored tensor, once all reads are finished."""
  pieces, reads = [], []
  for box in boxes(layout.shape, sharding):
    values = np.empty([s.stop - s.start for s in box], layout.numpy_dtype)
    reads.append(opened.begin_read(values, box))
    pieces.append((box, values))
  return HostTensor(layout.shape, tuple(pieces)), reads


def _decoded(held: HostTensor) -> HostTensor:
  """As float32; what is float32 is not copied."""
  pieces = tuple(
    (box, values.astype(np.float32, copy=False)) for box, values in held.pieces
  )
  return dataclasses.replace(held, pieces=pieces)


def _bounds(index: arrays.Index, shape: Sequence[int]) -> arrays.Index:
  return tuple(
    slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True)
  )


def _start(box: arrays.Index) -> tuple[int, ...]:
  return tuple(s.start for s in box)
