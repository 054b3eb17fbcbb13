"""Where an island's arrays live: its mesh and the shards of each tensor.

An island trains on the devices of one slice. Parameters are divided along the
mesh's "model" axis, batches along "data". A `HostTensor` is what this process
holds of a tensor in host memory: each shard once, with its box.
"""

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco import errors
from diloco.fragments import partition
from diloco.snapshots import arrays, records, store

# Below this many elements a tensor is replicated: its shards would cost more
# in messages than they save in memory.
_MIN_SHARDED_ELEMENTS = 2048


@dataclasses.dataclass(frozen=True)
class HostTensor:
  """One tensor's shards on this host, each box once."""

  name: str
  shape: tuple[int, ...]
  shard_shape: tuple[int, ...]
  pieces: tuple[tuple[arrays.Index, np.ndarray], ...]

  def owned(self) -> "HostTensor":
    """The same values in memory of their own."""
    pieces = tuple((box, np.array(values)) for box, values in self.pieces)
    return dataclasses.replace(self, pieces=pieces)

  def whole(self) -> np.ndarray:
    """The whole tensor, if this process holds all of it."""
    if len(self.pieces) == 1:
      return self.pieces[0][1]
    values = np.empty(self.shape, self.pieces[0][1].dtype)
    for box, piece in self.pieces:
      values[box] = piece
    return values


HostFragment = Mapping[str, HostTensor]


class Placement:
  """A mesh of devices and the sharding of every tensor on it."""

  def __init__(self, topology: Sequence[int], devices: Sequence[jax.Device]):
    """Builds the mesh.

    Args:
      topology: devices along ("data",) or ("data", "model").
      devices: as many as the topology holds, in its order.

    Raises:
      UserError: there are fewer devices than the topology needs.
    """
    shape = (*topology, 1)[:2]
    if len(devices) < shape[0] * shape[1]:
      raise errors.UserError(
        f"topology {'x'.join(map(str, topology))}",
        f"it needs {shape[0] * shape[1]} devices and JAX sees {len(devices)}",
        "choose a smaller topology or give the island more devices",
      )
    grid = np.array(devices[: shape[0] * shape[1]], dtype=object)
    self.mesh = Mesh(grid.reshape(shape), ("data", "model"))
    self._model = shape[1]

  @property
  def num_devices(self) -> int:
    """Devices of the mesh."""
    return self.mesh.size

  def param(self, shape: Sequence[int]) -> NamedSharding:
    """Sharding of a parameter: its largest divisible axis over "model"."""
    spec: list[str | None] = [None] * len(shape)
    divisible = [
      axis
      for axis, size in enumerate(shape)
      if self._model > 1 and size % self._model == 0
    ]
    if divisible and np.prod(shape) >= _MIN_SHARDED_ELEMENTS:
      largest = max(divisible, key=lambda axis: (shape[axis], axis))
      spec[largest] = "model"
    return NamedSharding(self.mesh, PartitionSpec(*spec))

  def batch(self) -> NamedSharding:
    """Sharding of a batch: its leading axis over "data"."""
    return NamedSharding(self.mesh, PartitionSpec("data"))

  def replicated(self) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(self.mesh, PartitionSpec())

  def put_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Puts a batch on the mesh."""
    sharding = self.batch()
    return {k: jax.device_put(v, sharding) for k, v in batch.items()}

  def boxes(self, shape: Sequence[int]) -> list[arrays.Index]:
    """The distinct boxes of a parameter that this process holds."""
    found = self.param(shape).addressable_devices_indices_map(tuple(shape))
    boxes = [_bounds(index, shape) for index in found.values()]
    by_start = {_start(box): box for box in boxes}
    return [by_start[start] for start in sorted(by_start)]

  def put(self, tensor: HostTensor) -> jax.Array:
    """Puts host shards on the devices that hold them.

    On a CPU a device may read the host's memory in place, whatever it is asked
    for. JAX writes over no memory of the host's, also when such an array is
    donated; who owns the host's copy must not either.
    """
    by_start = {_start(box): values for box, values in tensor.pieces}
    sharding = self.param(tensor.shape)
    indices = sharding.addressable_devices_indices_map(tensor.shape)
    shards = [
      jax.device_put(by_start[_start(_bounds(index, tensor.shape))], device)
      for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(
      tensor.shape, sharding, shards
    )


def to_host(name: str, array: jax.Array) -> HostTensor:
  """Copies the shards this process holds to host memory, each box once."""
  pieces = {}
  for shard in array.addressable_shards:
    box = _bounds(shard.index, array.shape)
    if _start(box) not in pieces:
      pieces[_start(box)] = (box, np.asarray(shard.data))
  return HostTensor(
    name,
    array.shape,
    array.sharding.shard_shape(array.shape),
    tuple(pieces[start] for start in sorted(pieces)),
  )


def read_fragment(
  snapshots: store.SnapshotStore,
  head: records.Head,
  tensors: Sequence[partition.Tensor],
  placement: Placement,
) -> dict[str, HostTensor]:
  """Reads from a global version only the shards this process holds."""
  found, reads = {}, []
  for tensor, chunk_shape in zip(tensors, head.chunks, strict=True):
    layout = arrays.Layout(tensor.shape, "float32", tuple(chunk_shape))
    opened = snapshots.arrays.open(
      f"{head.payload}/params", tensor.name, layout
    )
    pieces = []
    for box in placement.boxes(tensor.shape):
      values = np.empty([s.stop - s.start for s in box], np.float32)
      reads.append(opened.begin_read(values, box))
      pieces.append((box, values))
    found[tensor.name] = HostTensor(
      tensor.name,
      tensor.shape,
      placement.param(tensor.shape).shard_shape(tensor.shape),
      tuple(pieces),
    )
  for read in reads:
    read.finish()
  return found


def digest(tensors: Iterable[HostTensor]) -> int:
  """CRC-32 over whole tensors: equal values give equal digests on any mesh.

  Args:
    tensors: each held whole by this process, in an order all agree on.
  """
  crc = 0
  for tensor in tensors:
    crc = zlib.crc32(np.ascontiguousarray(tensor.whole()).data, crc)
  return crc


def _bounds(index: arrays.Index, shape: Sequence[int]) -> arrays.Index:
  return tuple(
    slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True)
  )


def _start(box: arrays.Index) -> tuple[int, ...]:
  return tuple(s.start for s in box)
