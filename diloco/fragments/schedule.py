"""When an island publishes which fragment.

Offsets spread the P fragments over the H steps of `sync_every`, so that with
P = H one fragment leaves and one arrives each step.

Reference: Streaming DiLoCo, arXiv 2501.18512, section 2.3.
"""

import dataclasses
import functools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The H / P / offset schedule, in local steps counted from 1."""

  sync_every: int  # H
  num_fragments: int  # P

  def offset(self, fragment: int) -> int:
    """Step within each H at which a fragment is due: floor(p H / P)."""
    return fragment * self.sync_every // self.num_fragments

  def due(self, step: int, last_published: Sequence[int]) -> list[int]:
    """Returns the fragments to publish after `step`.

    A fragment is due on its grid point when H steps have passed since this
    island last published it. An island that follows the rounds of a faster one
    publishes more often than that, so its own grid stays silent until the
    faster one is gone.

    Args:
      step: inner steps done by this island.
      last_published: [P], step of the last publication of each fragment; for
        a fragment not yet published, the step this island joined at, less H
        when nobody has trained before.
    """
    return [
      p for p in self.on_grid(step) if self.is_due(step, last_published[p])
    ]

  def on_grid(self, step: int) -> tuple[int, ...]:
    """Fragments with a grid point at `step`, due or not."""
    every = self.sync_every
    return _grid(every, self.num_fragments)[step % every]

  def is_due(self, step: int, last_published: int) -> bool:
    """Whether a fragment with a grid point at `step` is due; see `due`."""
    return step - last_published >= self.sync_every


@functools.cache
def _grid(every: int, count: int) -> tuple[tuple[int, ...], ...]:
  """[H], fragments with a grid point at steps of that remainder."""
  offsets = [p * every // count for p in range(count)]
  return tuple(
    tuple(p for p, offset in enumerate(offsets) if offset == remainder)
    for remainder in range(every)
  )
