"""An island of the simulated world: its threads around the production core.

Threads are those of `diloco.islands`: steps, publisher, adopter, heartbeat,
saver. The steps never wait for the store; a store operation in that thread is
a violation by itself. In place of tensors a fragment has a global version and
the rows trained on top of it (`protocol.values`), moved only by what the core's
actions do to real tensors, never by what they claim. What it saves and how it
comes back is in `island_recovery`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from diloco.islands import core as core_lib
from diloco.islands import hands, protocol, watching
from diloco.islands import outbox as outbox_lib
from diloco.snapshots import members, operations, records
from diloco.verification import (
  arithmetic,
  delays,
  island_recovery,
  session_end,
  values,
)
from diloco.verification import kernel as kernel_lib

_RETRY_SECS = (0.2, 0.2)  # first and longest pause after a failed write
_POLL_SECS = 2.0
_HEADS_EVERY_SECS = 3.0
_MISSED_SECS = 0.05  # until another look, after news during the last one
_ANSWER_POLL_SECS = 0.1
_NOTHING_SAID: tuple[Any, ...] = (-1, None, None, 0.0)
_TURN_SECS = 1.0  # a peer of a lower number has so long to answer a call


class Island(hands.Hands):
  """One incarnation of an island."""

  watch: watching.Watch

  def __init__(self, world: Any, life: kernel_lib.Life, index: int):
    self.world = world
    self.kernel: kernel_lib.Kernel = world.kernel
    self.life = life
    self.index = index
    self.random = life.role.random
    self.step_secs: float = world.step_secs[index]
    self.fragments: list[values.Fragment] = []
    self.outbox = outbox_lib.Outbox(_RETRY_SECS)
    self.at_hand: dict[int, protocol.Fetched] = {}
    self.saver = island_recovery.Saver(self)
    self.board: records.Board | None = None
    self.present = self.draining = self.poisoned = False
    self.notices = watching.Notices()
    self.answering = False
    self.answered = self.cleaned_up = True  # unless a fault kept it from that
    self.dropped: list[core_lib.Publish] = []  # not merely superseded
    self.started_at = 0
    self.spoken = _NOTHING_SAID
    self.moments_finite = True
    self.epoch = self.cut = 0
    self.inbox = session_end.Channel(world, life)
    self.adopter: kernel_lib.Thread | None = None
    self.publisher: kernel_lib.Thread | None = None
    self.saving: kernel_lib.Thread | None = None

  def forget(self) -> None:
    """Lets go of its threads, which hold it."""
    self.adopter = self.publisher = self.saving = None

  def run(self) -> kernel_lib.Script:
    """The process: recovers, then starts its threads."""
    return island_recovery.come_back(self)

  # Steps

  def steps(self) -> kernel_lib.Script:
    """The main thread."""
    world = self.world
    if world.schedule.ends:
      if (yield from session_end.obey(self)):
        return self.kernel.kill(self.life, session_end.LEFT)
    else:
      yield from self.training(math.inf, lambda: world.draining)
    yield from session_end.drain(self)
    while True:
      yield 2.0
      self.between_steps(self.core.step)

  def training(
    self, num_steps: float, interrupted: Callable[[], bool]
  ) -> kernel_lib.Script:
    """Trains for so many steps, or until it is interrupted."""
    random, state, between_steps = self.random, self.core, self.between_steps
    waits = self.world.schedule.wait_secs > 0
    shortest, spread = 0.9 * self.step_secs, 0.2 * self.step_secs
    last = state.step + num_steps
    while state.step < last:
      yield shortest + spread * random()
      if waits:
        delays.check_wait(self)
      between_steps(state.step + 1)
      if waits:
        yield from self.wait_for_answers(interrupted)
      if interrupted():
        break

  def wait_for_answers(
    self, interrupted: Callable[[], bool]
  ) -> kernel_lib.Script:
    """Waits, as a synchronous method does, until the next step may begin."""
    return self.wait(
      self.clock,
      lambda: self.between_steps(self.core.step),
      interrupted,
      _ANSWER_POLL_SECS,
    )

  def clock(self) -> float:
    """Its process's own clock."""
    return self.kernel.clock(self.life)

  def between_steps(self, step: int) -> None:
    """What the main thread does between two steps."""
    if self.poisoned:
      self._spread_poison(step)
    board, heard = self.board, self.notices._replace(cut=self.cut)
    self.board, self.notices = None, watching.Notices()
    self.act(step, board, heard, self.clock())
    every = self.world.save_every
    if step % every == self.index % every:
      self.saver.save(step)

  def _spread_poison(self, step: int) -> None:
    """One step with non-finite values makes everything non-finite."""
    if self.moments_finite and all(f.finite for f in self.fragments):
      self.poisoned = False
    elif step > self.core.step:
      self.moments_finite = False
      for held in self.fragments:
        held.finite = False

  def take_part(self, action: core_lib.Cut) -> None:
    """See `Hands`."""
    self.saver.save(self.core.step, action)

  def begin_anew(self, offences: int) -> None:
    """See `Hands`; the syncer refuses what this island publishes."""
    self.world.checker.seen["resyncs"] += 1
    self.watch.want_all()
    self.kernel.nudge(self.adopter, 0.0)

  def mend(self, actions: list[core_lib.Action]) -> None:
    """See `Hands`."""
    self.moments_finite = True

  def answer(self, request: records.PeerRequest, bases: Sequence[int]) -> None:
    """See `Hands`."""
    island_recovery.answer(self, request, bases)

  def poison(self) -> None:
    """A fault: the parameters become non-finite."""
    if self.fragments and not self.draining:
      self.poisoned = True
      self.fragments[0].finite = False

  def swell(self, factor: float) -> None:
    """A fault: the progress becomes so many times too long."""
    if not self.draining:
      for held in self.fragments:
        held.scale = factor

  def publish(self, action: Any) -> None:
    """Hands a publication over to the publisher."""
    held = self.fragments[action.fragment]
    step = action.step
    content = values.Delta(
      self.index,
      self.life.incarnation,
      action.fragment,
      held.anchor,
      ((held.held_from, step),),
      held.finite,
      self.epoch,
      self.norm_of(held, step),
    )
    self.world.checker.publishing(self, content)
    self.spoken = (step, held, held.anchor, self.clock())
    delays.check_publication(self, held, step)
    # The first, of an adoption, and the publications since.
    held.references = (
      *held.references[: core_lib.PUBLICATIONS_KEPT],
      step,
    )
    for dropped in self.outbox.submit(action, content):
      self._dropped(dropped)
    self.kernel.nudge(self.publisher, 0.0, 0.15)

  def norm_of(self, held: values.Fragment, step: int) -> float:
    """L2 norm of the progress of a fragment."""
    if not held.finite:
      return math.nan
    sound = arithmetic.length(self.index, held.held_from, step)
    return sound * held.scale * self.world.swell

  def adopt(self, action: core_lib.Adopt, found: protocol.Fetched) -> None:
    """See `Hands`."""
    self._swap_in(action, found)
    self.world.checker.balance(self, action.fragment)

  def _swap_in(self, action: core_lib.Adopt, fetched: protocol.Fetched) -> None:
    """As `swap.Swap` does."""
    held = self.fragments[action.fragment]
    step = self.core.step
    self.world.checker.adopted(self, action, fetched, held)
    delays.check_answer(self, action, fetched, held)
    held.anchor = fetched.content
    if action.resync:
      self.spoken = _NOTHING_SAID  # a refusal is an answer too
    if self.world.schedule.adoption != "carry" or (
      action.muted_until or action.resync
    ):
      held.finite, held.scale = True, 1.0
      held.held_from = step
      held.references = (max(action.muted_until, step),)
      return
    if action.kept_from not in held.references:
      raise kernel_lib.Violation(
        f"island {self.index} kept no values of step {action.kept_from}"
      )
    held.held_from = max(action.kept_from, held.held_from)
    held.references = (action.kept_from,)

  def rebase(self, action: core_lib.Rebase) -> None:
    """Sets a muted fragment to its anchor."""
    held = self.fragments[action.fragment]
    self.world.checker.seen["rebases"] += 1
    held.held_from = action.step
    held.references = (action.step,)
    held.finite, held.scale = True, 1.0
    self.world.checker.balance(self, action.fragment)

  # Publisher

  def send_all(self) -> kernel_lib.Script:
    """The publisher's thread."""

    def publish(
      action: core_lib.Publish, content: values.Delta
    ) -> operations.Procedure[None]:
      return protocol.publish(self.record_of(action, content), content)

    return self.outbox.send_all(publish, self._dropped)

  def _dropped(self, dropped: outbox_lib.Dropped) -> None:
    action, reason = dropped
    self.world.checker.dropped(self, action, reason)
    if reason != "superseded":
      self.dropped.append(action)

  def record_of(
    self, action: core_lib.Publish, content: values.Delta
  ) -> records.Contribution:
    """The commit record of a publication."""
    fragment, step, island = action.fragment, action.step, self.index
    incarnation = self.life.incarnation
    name = f"{fragment:04d}.{island:04d}.{incarnation:04d}.{step:09d}"
    c_steps = step - action.first_step
    return values.quick(
      records.Contribution,
      island=island,
      incarnation=incarnation,
      fragment=fragment,
      base_version=action.base_version,
      first_step=action.first_step,
      step=step,
      c_tokens=c_steps * arithmetic.tokens_per_step(island),
      codec="f32",
      plan_hash="plan",
      payload="payloads/" + name,
      chunks=[[1]],
      num_bytes=4,
      norms=[content.norm],
      epoch=self.epoch,
      cut=action.cut,
      key=name,
    )

  # Adopter

  def adopt_all(self) -> kernel_lib.Script:
    """The adopter's thread."""
    return self.watch.watch(self._see, self._pause_secs)

  def _see(self, seen: watching.Seen) -> None:
    if seen.board is not None:
      self.board = seen.board
    if seen.notices is not None:
      self._hear(seen.notices)

  def _pause_secs(self) -> float:
    thread = self.adopter
    assert thread is not None
    pause = self.watch.pause_secs(_POLL_SECS)
    if thread.missed:
      pause = min(pause, _MISSED_SECS)
    return pause

  def start_watch(self, versions: Sequence[int]) -> None:
    """Prepares what the adopter looks at."""
    life, world, clock = self.life, self.world, self.clock
    self.watch = watching.Watch(
      versions,
      watching.NoticeBoard(self.index, life.incarnation, _TURN_SECS, clock),
      self._take_in,
      clock,
      heads_every_secs=_HEADS_EVERY_SECS,
      notices_every_secs=world.heartbeat_secs * (2 - bool(world.schedule.cuts)),
    )

  def _take_in(
    self, found: protocol.Fetched, newer_than: int
  ) -> kernel_lib.Script:
    if not self.world.schedule.fine and self.random() < 0.2:
      yield 0.3 * self.random()
    head = found.head
    if self.watch.got(head.fragment, head.version, newer_than):
      self.at_hand[head.fragment] = found

  def _hear(self, heard: watching.Notices) -> None:
    """What others want this island to know."""
    self.cut = max(self.cut, heard.cut)
    self.notices = heard.after(self.notices)

  # Saver and heartbeat

  def taking_place(self) -> kernel_lib.Script:
    """Has the place of its earlier lives before it reads what they left."""
    while True:
      try:
        return (yield from members.take_place(self._member(0, 0)))
      except operations.FAILURES:
        yield self.world.times.retry_secs

  def beat(self) -> kernel_lib.Script:
    """The heartbeat's thread."""
    for beat in itertools.count(1):
      with contextlib.suppress(Exception):  # as a `workers.Pulse` does
        yield from members.beat(self._member(beat, self.core.step))
      yield self.world.heartbeat_secs

  def _member(self, beat: int, step: int) -> records.Member:
    return values.quick(
      records.Member,
      role=self.life.role.name,
      incarnation=self.life.incarnation,
      beat=beat,
      nonce=self.life.incarnation,
      step=step,
      step_secs=self.step_secs,
      present=beat > 0 and not self.draining,
      island=self.index,
    )
