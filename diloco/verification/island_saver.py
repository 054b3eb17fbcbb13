"""A simulated island's saved states, and its parts of cuts.

What `diloco.islands.saver` does, with marks in place of files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from diloco.islands import comeback, outbox
from diloco.islands import core as core_lib
from diloco.snapshots import cuts, operations, records
from diloco.verification import delays
from diloco.verification import kernel as kernel_lib

_RETRY_SECS = 0.2


class Saved(NamedTuple):
  """An island's saved state; `usable` is a marker beside it."""

  state: comeback.Saved
  healthy: bool  # finite, optimizer included
  epoch: int
  cut: int


def save(island: Any, step: int, part: core_lib.Cut | None = None) -> None:
  """Starts saving the state as it is now.

  Args:
    step: inner steps done.
    part: the cut whose part this is, if it is one.
  """
  positions = part.positions if part else island.core.positions
  if part is not None:
    island.world.checker.part_taken(island, part.number)
  saved = Saved(
    comeback.Saved(
      step,
      [p.published for p in positions],
      [p.first_step for p in positions],
    ),
    island.moments_finite and all(f.finite for f in island.fragments),
    island.epoch,
    part.number if part else 0,
  )
  # Of the plain ones only the newest waits; parts of cuts all do.
  if part is None:
    island.saving = [job for job in island.saving if job[0].cut]
  island.saving.append((saved, positions, island.outbox.ticket(positions)))
  island.kernel.nudge(island.saver, 0.0)


def save_all(island: Any) -> kernel_lib.Script:
  """The saver's thread: writes beside the store, then marks it usable."""
  world = island.world
  while True:
    if not island.saving:
      yield None
      continue
    saved, positions, ticket = island.saving.pop(0)
    yield 0.3 * island.random() ** 2
    yield operations.Point("mid_checkpoint")
    # Usable once all that it takes for published is.
    while (settled := outbox.settled(ticket)) is None:
      yield 0.4
    if not settled:
      delays.check_save_lost(
        island, saved.state.step, positions, island.dropped
      )
      continue
    if saved.cut:
      world.cut_states[saved.cut, island.index] = saved
    world.saved[island.index].append(saved)
    del world.saved[island.index][:-2]
    yield operations.Point("after_checkpoint")
    if saved.cut:
      yield from _add_part(island, saved, positions)


def _add_part(island: Any, saved: Saved, positions: Any) -> kernel_lib.Script:
  part = records.CutPart(
    cut=saved.cut,
    epoch=saved.epoch,
    island=island.index,
    incarnation=island.life.incarnation,
    step=saved.state.step,
    checkpoint=f"{saved.cut}",
    checksum=0,
    positions=[list(p) for p in positions],
  )
  while True:
    try:
      yield from cuts.add_part(part)
      return
    except OSError:
      yield _RETRY_SECS
