"""Where an island's arrays live: its mesh and how each array is divided.

An island trains on the devices of one slice. Parameters are divided along the
mesh's "model" axis, batches along "data".
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco import errors

# Below this many elements a tensor is replicated: its shards would cost more
# in messages than they save in memory.
_MIN_SHARDED_ELEMENTS = 2048


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
