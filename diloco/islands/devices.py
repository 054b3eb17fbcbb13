"""Which of a host's devices an island takes: those of its slice alone.

The fleet's slices divide a host's devices in the order of the configuration,
so that islands on one host share none. Knows nothing of JAX, which reads its
environment when it is imported.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from diloco import config as config_lib
from diloco import errors

T = TypeVar("T")

# JAX's own variables: a process that sees only its slice's devices takes no
# memory on those of others.
VISIBLE = (
  "JAX_CUDA_VISIBLE_DEVICES",
  "JAX_ROCM_VISIBLE_DEVICES",
  "JAX_ONEAPI_VISIBLE_DEVICES",
)


def environ(indices: Sequence[int], told: Mapping[str, str]) -> dict[str, str]:
  """What an island's environment needs before JAX is imported there.

  It is to see these devices of its host; what is `told`, the environment as it
  is, stays.
  """
  flags = f"{told.get('XLA_FLAGS', '')} " + (
    f"--xla_force_host_platform_device_count={len(indices)}"
  )
  visible = ",".join(map(str, indices))
  chosen = {"JAX_PLATFORMS": "cpu", **dict.fromkeys(VISIBLE, visible)}
  return {name: told.get(name, value) for name, value in chosen.items()} | {
    "XLA_FLAGS": flags
  }


def of_slice(indices: Sequence[int], devices: Sequence[T]) -> list[T]:
  """The devices of a slice, disjoint from those of every other.

  If JAX sees as many as the slice has, they are those of the slice: emulated
  ones, which every process has for itself, or the only visible.

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


def of_client(
  fleet: config_lib.FleetConfig, devices: Sequence[Any]
) -> list[list[Any]]:
  """The devices of each slice, where one client sees all.

  Devices that say which slice of hardware they are of (`slice_index`, as those
  of Pathways and of several TPU slices) make up one slice of the fleet each.
  Others are divided in order. Where there are too few, slices of one device
  share. Larger ones do not: devices that wait for each other within a program
  could each be in another one.

  Raises:
    UserError: there are too few.
  """
  sizes = [hardware.num_devices for hardware in fleet.slices]
  groups: dict[Any, list[Any]] = {}
  for device in devices:
    groups.setdefault(getattr(device, "slice_index", None), []).append(device)
  if len(groups) > 1:
    found = [groups[index] for index in sorted(groups)]
    for i, size in enumerate(sizes):
      have = len(found[i]) if i < len(found) else 0
      if size > have:
        raise _too_few(
          f"config.fleet.slices[{i}].topology = {fleet.slices[i].topology!r}",
          f"it needs {size} devices, and of the {len(found)} slices that this"
          f" process sees number {i} has {have}",
        )
    return [group[:size] for group, size in zip(found, sizes, strict=False)]
  if sum(sizes) <= len(devices):
    every = iter(devices)
    return [list(itertools.islice(every, size)) for size in sizes]
  if max(sizes) > 1:
    raise _too_few(
      f"config.fleet.slices with {sum(sizes)} devices",
      f"this process sees {len(devices)}, and only slices of one device can"
      " share",
      f"XLA_FLAGS=--xla_force_host_platform_device_count={sum(sizes)}",
    )
  return [[devices[i % len(devices)]] for i in range(len(sizes))]


def _too_few(what: str, why: str, flags: str = "") -> errors.UserError:
  remedy = "name fewer or smaller slices"
  return errors.UserError(
    what, why, f"{remedy}, or on a processor set {flags}" if flags else remedy
  )
