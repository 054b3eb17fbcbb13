"""The resource manager: which slice and which cores an island runs on.

Islands ask for a slice when they start, not before; a slice that was lost is
not handed out again while another is free. On one machine the "hardware" of a
slice is a share of its processor cores.
"""

import os
from collections.abc import Sequence

from diloco import config as config_lib
from diloco import errors

_MAX_DEVICES_PER_CORE = 16


def available_cores() -> list[int]:
  """Cores this process may use."""
  return sorted(os.sched_getaffinity(0))


def divide_cores(
  speeds: Sequence[float], cores: Sequence[int]
) -> list[list[int]]:
  """Divides cores among islands.

  With a core or more for each island, every one has its own and the rest go
  where speed per core is highest. With fewer, islands share: each gets one
  core, fastest first onto the least loaded.

  Returns:
    [M] lists of core numbers, empty where no island is bound to any.
  """
  order = sorted(range(len(speeds)), key=lambda m: (-speeds[m], m))
  shares: list[list[int]] = [[] for _ in speeds]
  if not cores:
    return shares
  if len(cores) < len(speeds):
    load = dict.fromkeys(cores, 0.0)
    for m in order:
      core = min(cores, key=lambda c: (load[c], c))
      load[core] += speeds[m]
      shares[m] = [core]
    return shares
  counts = [1] * len(speeds)
  for _ in range(len(cores) - len(speeds)):
    counts[max(order, key=lambda m: speeds[m] / counts[m])] += 1
  left = list(cores)
  for m in range(len(speeds)):
    shares[m], left = left[: counts[m]], left[counts[m] :]
  return shares


def without_evaluator(
  config: config_lib.RunConfig, cores: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
  """Divides cores between the islands and the run's evaluator.

  It gets one if every island has one without it. Otherwise it is bound to none,
  and computes where and when nobody else does.
  """
  spare = len(cores) > config.fleet.islands and config.programs.evaluator
  return (cores[:-1], cores[-1:]) if spare else (cores, [])


def check_fits(config: config_lib.RunConfig, cores: Sequence[int]) -> None:
  """Raises `UserError` if this machine cannot hold the fleet."""
  islands, limit = config.fleet.islands, config.controller.max_islands_per_core
  if islands > limit * len(cores):
    raise errors.UserError(
      f"{islands} islands",
      f"this machine has {len(cores)} cores and"
      f" config.controller.max_islands_per_core = {limit}",
      f"use at most {limit * len(cores)} islands or raise that limit",
    )
  devices = _MAX_DEVICES_PER_CORE * len(cores)
  for i, hardware in enumerate(config.fleet.slices):
    if hardware.num_devices > devices:
      raise errors.UserError(
        f"config.fleet.slices[{i}].topology = {hardware.topology!r}",
        f"{hardware.num_devices} devices are more than {len(cores)} cores can"
        f" stand in for ({_MAX_DEVICES_PER_CORE} each)",
        f"choose a topology of at most {devices} devices",
      )


class ResourceManager:
  """Binds islands to slices, late.

  Attributes:
    left: slices that islands have left, the first one first, and none has now.
  """

  def __init__(self, config: config_lib.RunConfig, cores: Sequence[int]):
    """Knows the whole fleet; nothing is bound yet."""
    slices = config.fleet.slices
    self._bound: dict[int, int] = {}  # island -> slice
    self._free = list(range(len(slices)))
    self.left: list[int] = []
    self._num_islands = config.fleet.islands
    speeds = [s.relative_speed for s in slices[: config.fleet.islands]]
    self._cores = divide_cores(speeds, cores)

  def bind(self, island: int) -> tuple[int, list[int]]:
    """Gives an island a slice and cores; the same ones if it had any.

    Raises:
      LookupError: no slice is left.
    """
    if island not in self._bound:
      free = self._free or self.left
      if not free:
        raise LookupError(f"no slice is free for island {island}")
      preferred = island if island in free else free[0]
      free.remove(preferred)
      self._bound[island] = preferred
    return self._bound[island], self._cores[island]

  def rebind(
    self,
    island: int,
    slice_index: int,
    cores: Sequence[int],
    left: Sequence[int] = (),
  ) -> None:
    """Notes what an island that is alive already runs on.

    `left` are the slices that had been left when it started.

    Raises:
      LookupError: another island has that slice, or there is none.
    """
    free = self.left if slice_index in self.left else self._free
    if slice_index not in free:
      raise LookupError(f"slice {slice_index} is not free")
    self._cores[island] = list(cores)
    free.remove(slice_index)
    self._bound[island] = slice_index
    for each in left:
      if each in self._free:
        self._free.remove(each)
        self.left.append(each)

  def slice_lost(self, island: int) -> None:
    """Moves an island to a spare slice; without any it keeps its own.

    A slice that was left is used again once there is no other: it may have been
    left for deaths that were not its fault. One that an island not bound yet
    will need is no spare.
    """
    if island not in self._bound:
      return
    unbound = self._num_islands - len(self._bound)
    spares = self._free[unbound:]
    if not spares and not self.left:
      return
    mine = self._bound[island]
    self._bound[island] = spares.pop() if spares else self.left.pop(0)
    self._free = [*self._free[:unbound], *spares]
    self.left.append(mine)
