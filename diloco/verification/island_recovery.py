"""A simulated island's way back, and the help that peers give to it.

What `diloco.islands.recovery` does, on the same procedures and decision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from diloco import errors
from diloco.fragments import schedule
from diloco.islands import comeback, peer_protocol, protocol
from diloco.islands import core as core_lib
from diloco.snapshots import keys, operations, records
from diloco.verification import island_saver, values
from diloco.verification import kernel as kernel_lib

_RETRY_SECS = 0.2
_PATIENCE_SECS = (6.0, 2.0)  # for an answer, and more for each peer
_READ_ATTEMPTS = 2


def come_back(island: Any) -> kernel_lib.Script:
  """The process: recovers, then starts its threads."""
  world, life = island.world, island.life
  yield world.boot_secs * (0.5 + island.random())
  if life.incarnation == 1:
    saved = None
  else:
    saved = world.saved_state(island.index)
  while True:
    try:
      standing = yield from protocol.come_back(
        island.index, world.schedule.fragments
      )
      break
    except (*operations.FAILURES, LookupError):
      yield _RETRY_SECS
  _, island.cut, known, fetched = standing
  epoch = standing.epoch
  island.epoch = epoch.epoch if epoch else 0
  if saved is not None and saved.epoch != island.epoch:
    # After a roll-back only the cut's own saved state is older than it.
    saved = world.state_of_cut(epoch.cut, island.index) if epoch else None
  world.checker.surveyed(island.index)
  state = saved.state if saved else None
  back = comeback.decide(state, known, world.schedule.sync_every)
  sent = None
  if back.optimizer == "peer":
    sent = yield from _ask(island, known.versions)
  _resume(island, saved, known, fetched, back, sent)


def _ask(island: Any, versions: Sequence[int]) -> kernel_lib.Script:
  """Gets an optimizer state from a peer; None if there is none to be had."""
  request = records.PeerRequest(
    island.index, island.life.incarnation, list(versions)
  )
  heard: peer_protocol.Heard | None = None
  try:
    for _ in range(_READ_ATTEMPTS):
      peers = yield from peer_protocol.healthy(island.index)
      if not peers:
        return None
      first, each = _PATIENCE_SECS
      patience_secs = first + each * len(peers)
      # Where all are needed for a quorum, all wait with it.
      island.world.disturbed(patience_secs)
      yield from peer_protocol.call(request)
      try:
        heard = yield from _wait_for_answer(island, request, patience_secs)
        break
      except errors.CorruptSnapshotError:
        yield from peer_protocol.clean_up(island.index)
  except OSError:
    pass  # it costs only the moments
  island.cleaned_up = False
  with contextlib.suppress(OSError):
    yield from peer_protocol.hang_up(request)
    yield from peer_protocol.clean_up(island.index)
    island.cleaned_up = True
  return heard and heard.content


def _wait_for_answer(
  island: Any, request: records.PeerRequest, patience_secs: float
) -> kernel_lib.Script:
  until = island.kernel.clock(island.life) + patience_secs
  while island.kernel.clock(island.life) < until:
    yield 0.3
    heard = yield from peer_protocol.hear(request)
    if heard is not None:
      return heard
  return None


def _resume(
  island: Any,
  saved: island_saver.Saved | None,
  known: comeback.Known,
  fetched: list[Any],
  back: comeback.Comeback,
  sent: values.Moments | None,
) -> None:
  world, life = island.world, island.life
  shape = world.schedule
  for fragment, found in enumerate(fetched):
    first_step = back.origins[fragment].first_step
    held = values.Fragment(found.content, back.start)
    held.references = (first_step,)
    if fragment in back.carried:
      held.held_from = first_step
      held.finite = saved is not None and saved.healthy
    island.fragments.append(held)
  if sent is not None:
    world.checker.served(island, sent)
  elif saved is not None:
    island.moments_finite = saved.healthy
  island.core = core_lib.IslandCore(
    schedule.Schedule(shape.sync_every, shape.fragments),
    island.index,
    shape.adoption,
    follow=shape.follow,
    step=back.start,
    origins=back.origins,
    cut=island.cut,
  )
  world.checker.recovered(island, saved, known, back)
  kernel = island.kernel
  island.present = True
  island.started_at = back.start
  island.start_watch([found.head.version for found in fetched])
  kernel.start(life, island.steps())
  island.publisher = kernel.start(life, island.publish_all())
  island.adopter = kernel.start(life, island.adopt_all())
  island.saver = kernel.start(life, island_saver.save_all(island))
  kernel.start(life, island.beat())


def answer(island: Any, request: records.PeerRequest) -> None:
  """Sends the optimizer's state of this step to a peer, if it will do."""
  bases = [p.base for p in island.core.positions]
  if (
    island.answering
    or island.core.resyncing
    or not island.moments_finite
    or not peer_protocol.can_serve(bases, request.versions)
  ):
    return
  island.answering = True
  mine = (island.index, island.life.incarnation)
  state = records.PeerState(
    *(request.island, request.incarnation),
    *mine,
    island.core.step,
    bases,
    keys.peer_payload_prefix(
      request.island, request.incarnation, *mine, island.core.step
    ),
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
