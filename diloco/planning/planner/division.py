"""Dividing a fleet into islands.

An island stands at one site and has chips of one kind. Every group of equal
slices gets an island, the fastest groups first; what is left of the M islands
goes to the groups in proportion to their speed, by largest remainders, at most
one island a slice. Within a group the slices are spread evenly.
"""

import dataclasses

from diloco.planning.planner import model as model_lib
from diloco.planning.planner import resources


@dataclasses.dataclass(frozen=True)
class Island:
  """One island of a plan."""

  site: int  # its number in the fleet
  hardware: resources.Slices  # the group it is part of
  slices: int  # of that group, that are its own

  @property
  def chips(self) -> int:
    """Of all its slices."""
    return self.slices * self.hardware.slice_chips

  @property
  def flops(self) -> float:
    """A second, at the peak."""
    return self.hardware.flops * self.slices / self.hardware.count


def divide(fleet: resources.Fleet, islands: int) -> tuple[Island, ...]:
  """Makes M islands, or as many as there are slices."""
  groups = fleet.groups
  total = sum(slices.flops for _, slices in groups)
  wanted = [islands * slices.flops / total for _, slices in groups]
  counts = [0] * len(groups)
  # Sorting is stable: of equal groups those named first come first.
  for g in sorted(range(len(groups)), key=lambda g: -wanted[g])[:islands]:
    counts[g] = 1
  while sum(counts) < islands:
    free = [g for g, (_, s) in enumerate(groups) if counts[g] < s.count]
    if not free:
      break
    counts[max(free, key=lambda g: wanted[g] - counts[g])] += 1
  made = []
  for (site, hardware), count in zip(groups, counts, strict=True):
    for number in range(count):
      share = hardware.count * (number + 1) // count
      share -= hardware.count * number // count
      made.append(Island(site, hardware, share))
  return tuple(made)


def step_secs(
  island: Island, num_islands: int, model: model_lib.Model
) -> float:
  """Seconds of one inner step; every island's batch is an M-th of the whole."""
  batch = model.batch_tokens / num_islands
  return batch / model.tokens_per_sec(island.flops)
