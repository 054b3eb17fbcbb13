"""When an island publishes which fragment.

Offsets spread the P fragments over the H steps of `sync_every`, so that with
P = H one fragment leaves and one arrives each step.

Reference: Streaming DiLoCo, arXiv 2501.18512, section 2.3.
"""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The H / P / offset schedule, in local steps counted from 1."""

  sync_every: int  # H
  num_fragments: int  # P

  def offset(self, fragment: int) -> int:
    """Step within each H at which a fragment is due: floor(p H / P)."""
    return fragment * self.sync_every // self.num_fragments

  def on_grid(self, step: int) -> tuple[int, ...]:
    """Fragments with a grid point at `step`, due or not."""
    return _grid(self)[step % self.sync_every]

  def is_due(self, step: int, last_published: int) -> bool:
    """Whether H steps have passed since a fragment was last published.

    Asked at its grid points, and H steps after a publication that was off the
    grid. So an island that follows the rounds of a faster one, and publishes
    more often than that, is silent by itself until the faster one is gone; and
    then it goes on in the faster one's rhythm. Before the first publication the
    last one counts as H before that may be.
    """
    return step - last_published >= self.sync_every


@functools.cache
def _grid(when: Schedule) -> tuple[tuple[int, ...], ...]:
  """[H], fragments with a grid point at steps of that remainder."""
  offsets = [when.offset(p) for p in range(when.num_fragments)]
  return tuple(
    tuple(p for p, offset in enumerate(offsets) if offset == remainder)
    for remainder in range(when.sync_every)
  )
