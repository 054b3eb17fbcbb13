"""Where an island's arrays live: its mesh and how each array is divided.

An island trains on the devices of one slice. The mesh's axes, and how
parameters and batches are divided along them, come with the task. Without a
word of it there are two axes: batches are divided along "data", each
parameter's largest divisible axis along "model".
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco import errors
from diloco.tasks import task as task_lib

# Below this many elements a tensor is replicated: its shards would cost more
# in messages than they save in memory.
_MIN_SHARDED_ELEMENTS = 2048


class Rules(NamedTuple):
  """How a task divides its arrays over a mesh; see `task.Task`."""

  axes: tuple[str, ...] = ("data", "model")  # names, as a topology's numbers
  batch: tuple[str, ...] = ("data",)  # a batch's leading axis is divided among
  # Gives a leaf's `PartitionSpec` from its path and shape; None for the
  # module's own rule.
  param: Callable[[str, tuple[int, ...]], Any] | None = None

  @classmethod
  def of(cls, task: task_lib.Task) -> "Rules":
    """Those of a task."""
    axes = tuple(getattr(task, "mesh_axes", cls().axes))
    batch = tuple(getattr(task, "batch_axes", axes[:1]))
    _require_known("batch_axes", batch, axes)
    return cls(axes, batch, getattr(task, "sharding", None))

  def sizes(self, topology: Sequence[int]) -> dict[str, int]:
    """Devices along each axis; 1 where a topology says nothing.

    Raises:
      UserError: the topology has more numbers than there are axes.
    """
    if len(topology) > len(self.axes):
      raise errors.UserError(
        f"topology {'x'.join(map(str, topology))}",
        f"the task's mesh has no more axes than {', '.join(self.axes)}",
        f"give at most {len(self.axes)} numbers, or the task other mesh_axes",
      )
    padded = [*topology, *[1] * (len(self.axes) - len(topology))]
    return dict(zip(self.axes, padded, strict=True))

  def batch_devices(self, sizes: Mapping[str, int]) -> int:
    """How many parts a batch is divided into."""
    return math.prod(sizes[axis] for axis in self.batch)

  def spec(
    self, sizes: Mapping[str, int], name: str, shape: Sequence[int]
  ) -> PartitionSpec:
    """How a parameter is divided.

    Raises:
      UserError: the task's rule does not fit the mesh or the shape.
    """
    if self.param is None:
      return self._largest_axis(sizes, shape)
    given = self.param(name, tuple(shape))
    spec = PartitionSpec() if given is None else PartitionSpec(*given)
    used: list[str] = []
    for axis, part in enumerate(spec):
      names = () if part is None else (part,) if isinstance(part, str) else part
      _require_known(f"sharding of {name!r}", names, self.axes)
      used += names
      if len(used) > len(set(used)):
        raise errors.UserError(
          f"the task's sharding of {name!r}",
          f"it names a mesh axis twice: {', '.join(used)}",
          "name each once",
        )
      count = math.prod(sizes[n] for n in names)
      if names and (axis >= len(shape) or shape[axis] % count):
        size = f"{shape[axis]} long" if axis < len(shape) else "which it lacks"
        raise errors.UserError(
          f"the task's sharding of {name!r}",
          f"axis {axis}, {size}, cannot be divided among {count} devices",
          "divide another axis, or choose another topology",
        )
    return PartitionSpec(*spec[: len(shape)])

  def _largest_axis(
    self, sizes: Mapping[str, int], shape: Sequence[int]
  ) -> PartitionSpec:
    others = [axis for axis in self.axes if axis not in self.batch]
    if not others or sizes[others[-1]] == 1:
      return PartitionSpec()
    along = others[-1]
    spec: list[str | None] = [None] * len(shape)
    divisible = [a for a, size in enumerate(shape) if not size % sizes[along]]
    if divisible and math.prod(shape) >= _MIN_SHARDED_ELEMENTS:
      spec[max(divisible, key=lambda axis: (shape[axis], axis))] = along
    return PartitionSpec(*spec)


def _require_known(
  what: str, names: Iterable[str], axes: Sequence[str]
) -> None:
  unknown = [repr(name) for name in names if name not in axes]
  if unknown:
    raise errors.UserError(
      f"the task's {what}",
      f"it names {', '.join(unknown)}, and the mesh has {', '.join(axes)}",
      "name axes of mesh_axes",
    )


class Placement:
  """A mesh of devices and the sharding of every array on it."""

  def __init__(
    self,
    topology: Sequence[int],
    devices: Sequence[jax.Device],
    rules: Rules | None = None,
  ):
    """Builds the mesh; along axes that the topology leaves out it has one.

    Raises:
      UserError: there are fewer devices than the topology needs.
    """
    self._rules = rules or Rules()
    self._sizes = self._rules.sizes(topology)
    count = math.prod(topology)
    if len(devices) < count:
      raise errors.UserError(
        f"topology {'x'.join(map(str, topology))}",
        f"it needs {count} devices and JAX sees {len(devices)}",
        "choose a smaller topology or give the island more devices",
      )
    grid = np.array(devices[:count], dtype=object)
    self.mesh = Mesh(grid.reshape(*self._sizes.values()), self._rules.axes)

  def param(self, name: str, shape: Sequence[int]) -> NamedSharding:
    """Sharding of a parameter, as `Rules.spec` has it."""
    spec = self._rules.spec(self._sizes, name, shape)
    return NamedSharding(self.mesh, spec)

  def batch(self) -> NamedSharding:
    """Sharding of a batch: its leading axis among those of the rules."""
    return NamedSharding(self.mesh, PartitionSpec(self._rules.batch))

  def replicated(self) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(self.mesh, PartitionSpec())

  def put_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Puts a batch on the mesh."""
    sharding = self.batch()
    return {k: jax.device_put(v, sharding) for k, v in batch.items()}

  def put_rest(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """As `put_batch`; whole on every device if it cannot be divided."""
    count = self._rules.batch_devices(self._sizes)
    if any(len(rows) % count for rows in batch.values()):
      return dict(jax.device_put(dict(batch), self.replicated()))
    return self.put_batch(batch)
