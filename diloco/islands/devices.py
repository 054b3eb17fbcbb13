"""Which of a host's devices an island takes: those of its slice alone.

The fleet's slices divide a host's devices in the order of the configuration,
so that islands on one host share none. Knows nothing of JAX, which reads its
environment when it is imported.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from diloco import errors

T = TypeVar("T")

# JAX's own variables: a process that sees only its slice's devices takes no
# memory on those of others.
_VISIBLE = (
  "JAX_CUDA_VISIBLE_DEVICES",
  "JAX_ROCM_VISIBLE_DEVICES",
  "JAX_ONEAPI_VISIBLE_DEVICES",
)


def environ(indices: Sequence[int], told: Mapping[str, str]) -> dict[str, str]:
  """What an island's environment needs before JAX is imported there.

  Args:
    indices: of its slice's devices on this host.
    told: the environment as it is; what is chosen there stays.
  """
  flags = f"{told.get('XLA_FLAGS', '')} " + (
    f"--xla_force_host_platform_device_count={len(indices)}"
  )
  visible = ",".join(map(str, indices))
  chosen = {"JAX_PLATFORMS": "cpu", **dict.fromkeys(_VISIBLE, visible)}
  return {name: told.get(name, value) for name, value in chosen.items()} | {
    "XLA_FLAGS": flags
  }


def of_slice(indices: Sequence[int], devices: Sequence[T]) -> list[T]:
  """The devices of a slice, disjoint from those of every other.

  Args:
    indices: of the slice's devices on this host.
    devices: all that JAX sees. As many as the slice has are those of the slice:
      emulated ones, which every process has for itself, or the only visible.

  Raises:
    UserError: the host has too few.
  """
  if len(devices) == len(indices):
    return list(devices)
  if max(indices) >= len(devices):
    raise errors.UserError(
      f"devices {indices[0]} to {indices[-1]} for a slice",
      f"JAX sees {len(devices)} on this host",
      "name fewer slices or smaller topologies in config.fleet.slices",
    )
  return [devices[i] for i in indices]
