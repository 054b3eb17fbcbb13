"""A simulated island's saved states, its way back, and the help peers give.

When a state counts, and what an island goes on from, is production code:
`saving.Saves` and `protocol.Search`. Marks are in place of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.fragments import schedule
from diloco.islands import core as core_lib
from diloco.islands import peer_protocol, protocol, saving
from diloco.snapshots import checkpoint, keys, operations, records
from diloco.verification import delays, values
from diloco.verification import kernel as kernel_lib

_PATIENCE_SECS = (6.0, 2.0)  # for an answer, and more for each peer


class Saved(NamedTuple):
  """An island's saved state."""

  marker: checkpoint.Checkpoint
  healthy: bool  # finite, optimizer included


class Saver(saving.Saves):
  """The saves of one incarnation; the checker hears of those given up."""

  poll_secs = 0.4

  def __init__(self, island: Any):
    super().__init__()
    self._island = island

  def save(self, step: int, part: core_lib.Cut | None = None) -> None:
    """Starts saving the state as it is now."""
    island = self._island
    cut, positions = 0, island.core.positions
    if part is not None:
      cut, positions = part.number, part.positions
      island.world.checker.part_taken(island, cut)
    kept = [list(p) for p in positions]
    marker = checkpoint.Checkpoint(
      *(island.index, island.life.incarnation, 0),
      *(step, island.epoch, cut),
      kept,
      {},
      {},
      0,
    )
    healthy = island.moments_finite and all(f.finite for f in island.fragments)
    ticket = island.outbox.ticket(positions)
    saved = Saved(marker, healthy)
    parts = [waiting for waiting in self._jobs if waiting.part]
    self.submit(saving.Job(0, saved, positions, cut, ticket, cut > 0))
    if any(waiting not in self._jobs for waiting in parts):
      raise kernel_lib.Violation(
        f"a part of island {island.index} in a cut is not saved"
      )
    island.kernel.nudge(island.saving, 0.0)

  def write(self, job: saving.Job) -> kernel_lib.Script:
    """See `Saves`."""
    yield 0.3 * self._island.random() ** 2
    return job.snapshot.marker

  def commit(
    self, job: saving.Job, marker: checkpoint.Checkpoint
  ) -> operations.Procedure[tuple[str, int]]:
    """See `Saves`."""
    yield from ()
    world, index = self._island.world, self._island.index
    if job.part:
      world.cut_states[job.cut, index] = job.snapshot
    world.saved[index].append(job.snapshot)
    del world.saved[index][:-2]
    return f"{job.cut}", 0

  def ended(
    self, job: saving.Job, outcome: checkpoint.Checkpoint | Exception
  ) -> operations.Procedure[None]:
    """See `Saves`."""
    yield from ()
    if isinstance(outcome, saving.LostError):
      island, step = self._island, job.snapshot.marker.step
      delays.check_save_lost(island, step, job.positions, island.dropped)


class _Search(protocol.Search):
  """Its saved states are objects of the world, and the checker hears of it."""

  poll_secs = 0.3

  def __init__(self, island: Any):
    kernel, life = island.kernel, island.life
    super().__init__(island.index, life.incarnation, lambda: kernel.clock(life))
    self._of = island

  def saved_states(self) -> Sequence[Saved]:
    island, world = self._of, self._of.world
    island.cleaned_up = True
    of_cuts = [s for (_, m), s in world.cut_states.items() if m == island.index]
    return [*reversed(world.saved[island.index]), *of_cuts]

  def marker_of(self, saved: Saved) -> checkpoint.Checkpoint:
    return saved.marker

  def is_part(self, saved: Saved, part: records.CutPart) -> bool:
    states = self._of.world.cut_states
    return states.get((part.cut, self._of.index)) is saved

  def restore(self, saved: Saved) -> Saved:
    island = self._of
    if island.kernel.now < island.world.unreadable[island.index]:
      raise errors.CorruptSnapshotError("it cannot be read for now")
    return saved

  def patience_secs(self, peers: Sequence[records.Member]) -> float:
    first, each = _PATIENCE_SECS
    patience_secs = first + each * len(peers)
    # Where all are needed for a quorum, all wait with it.
    self._of.world.disturbed(patience_secs)
    return patience_secs

  def failed(self, error: Exception) -> None:
    self._of.cleaned_up = False


def come_back(island: Any) -> kernel_lib.Script:
  """The process: recovers, then starts its threads."""
  shape = island.world.schedule
  yield island.world.boot_secs * (0.5 + island.random())
  yield from island.taking_place()
  found = yield from _Search(island).find(shape.fragments, shape.sync_every)
  _resume(island, found)


def _resume(island: Any, basis: protocol.Basis) -> None:
  back, standing, saved = basis.plan, basis.standing, basis.state
  world, life = island.world, island.life
  shape = world.schedule
  island.epoch, island.cut = standing.epoch, standing.cut
  for fragment, found in enumerate(standing.fetched):
    first_step = back.origins[fragment].first_step
    held = values.Fragment(found.content, back.start)
    held.references = (first_step,)
    if fragment in back.carried:
      held.held_from = first_step
      held.finite = saved is not None and saved.healthy
    island.fragments.append(held)
  if basis.heard is not None:
    world.checker.served(island, basis.heard.content)
  elif saved is not None:
    island.moments_finite = saved.healthy
  island.core = core_lib.IslandCore(
    schedule.Schedule(shape.sync_every, shape.fragments),
    island.index,
    shape.adoption,
    follow=shape.follow,
    step=back.start,
    origins=back.origins,
    cut=standing.cut,
    wait_secs=shape.wait_secs,
    passes_by=shape.max_staleness if shape.own_answers else -1,
  )
  world.checker.recovered(island, saved, standing.known, back)
  kernel = island.kernel
  island.present = True
  island.started_at = back.start
  island.start_watch([found.head.version for found in standing.fetched])
  kernel.start(life, island.steps())
  island.publisher = kernel.start(life, island.send_all())
  island.adopter = kernel.start(life, island.adopt_all())
  island.saving = kernel.start(life, island.saver.save_all())
  kernel.start(life, island.beat())


def answer(
  island: Any, request: records.PeerRequest, bases: Sequence[int]
) -> None:
  """Sends the optimizer's state of this step to a peer, if it is sound."""
  if island.answering or not island.moments_finite:
    return
  island.answering = True
  call = (request.island, request.incarnation)
  mine = (island.index, island.life.incarnation, island.core.step)
  state = records.PeerState(
    *call,
    *mine,
    list(bases),
    keys.peer_payload_prefix(*call, *mine),
    scalars={},
    chunks={},
    digest="",
  )
  anchors = tuple(held.anchor.number for held in island.fragments)
  moments = values.Moments(island.index, anchors)
  island.kernel.start(island.life, _send(island, request, state, moments))


def _send(
  island: Any,
  request: records.PeerRequest,
  state: records.PeerState,
  moments: values.Moments,
) -> kernel_lib.Script:
  yield 0.2 * island.random()
  try:
    yield from peer_protocol.answer(request, state, moments)
  except Exception:
    island.answered = False
  island.answering = False
