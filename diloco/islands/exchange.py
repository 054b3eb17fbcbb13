"""A learner's exchange with the store, as it is carried out on real arrays.

Everything here runs on the main thread and waits for nothing. It starts device
copies, swaps references and hands work to the threads around it: publisher,
adopter and saver. When to do what is in `diloco.islands.hands`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from diloco import crash, errors, workers
from diloco.fragments import schedule
from diloco.islands import (
  adopter,
  checkpoints,
  core,
  hands,
  peers,
  protocol,
  publisher,
  recovery,
  saver,
  saving,
)
from diloco.islands import learner as learner_lib
from diloco.snapshots import checkpoint, records
from diloco.tape import events

logger = logging.getLogger(__name__)


class Exchange(hands.Hands):
  """Core, publisher, adopter and saver of one life."""

  def __init__(
    self,
    setting: publisher.Setting,
    basis: protocol.Basis,
    poll_secs: Callable[[], float],
  ):
    """Starts the threads; `poll_secs` is as for `adopter.Adopter`."""
    sync, who = setting.config.sync, setting.identity
    self._setting = setting
    self._learner = setting.learner
    self._swap = setting.learner.swap
    self._tape = setting.tape
    self.core = core.IslandCore(
      schedule.Schedule(
        setting.config.sync_every(who.island), sync.num_fragments
      ),
      who.island,
      sync.adoption,
      follow=sync.follow,
      step=basis.plan.start,
      origins=basis.plan.origins,
      cut=basis.standing.cut,
      wait_secs=sync.wait_secs,
      wait_after=sync.wait_after,
      passes_by=sync.max_staleness if setting.config.own_answers else -1,
    )
    self._cut = basis.standing.cut  # the last one taken part in
    self._saves = 0
    self._last_save: tuple[int, Sequence[core.Position]] | None = None
    self._answerer: workers.Worker | None = None  # of a peer's call
    self._offences = 0  # what the last resync is for
    self.at_hand: dict[int, adopter.Placed] = {}
    self._publisher = publisher.Publisher(setting)
    self._saver = saver.Saver(setting)
    self._adopter = adopter.Adopter(setting, basis.standing.fetched, poll_secs)

  def reschedule(self, every: int) -> None:
    """Publishes every so many steps from now on."""
    fragments = self._setting.config.sync.num_fragments
    self.core.reschedule(schedule.Schedule(every, fragments))

  def between_steps(self) -> None:
    """Publishes, adopts and saves what is due, if all threads are well."""
    for thread in (self._publisher, self._saver, self._adopter):
      thread.check()
    news = self._adopter.take()
    self.at_hand |= {f.head.fragment: f for f in news.fetched}
    now = self._setting.threads.clock()
    self.act(self._learner.step, news.board, news.notices, now)

  def take_part(self, action: core.Cut) -> None:
    """See `Hands`."""
    self._cut = action.number
    self._save(action.positions, part=True)

  def rebase(self, action: core.Rebase) -> None:
    """See `Hands`."""
    fragment, step = action.fragment, action.step
    anchor = self._swap.anchors[fragment]
    self._swap.start_over(self._learner.params, fragment, anchor, step)
    self._tape.record(
      events.REBASED, fragment=fragment, step=step, version=action.version
    )

  def begin_anew(self, offences: int) -> None:
    """See `Hands`."""
    self._offences = offences
    self._adopter.fetch_all_anew()

  def publish(self, action: core.Publish) -> None:
    """See `Hands`."""
    origin = core.Origin(action.base_version, action.first_step)
    outer_grads = self._swap.publish(
      self._learner.params, action.fragment, action.step, origin
    )
    self._tape.record(
      events.SUBMITTED,
      fragment=action.fragment,
      base_version=action.base_version,
      first_step=action.first_step,
      step=action.step,
    )
    self._publisher.submit(action, outer_grads)

  def adopt(self, action: core.Adopt, fetched: adopter.Placed) -> None:
    """See `Hands`."""
    self._learner.adopt(
      action, fetched.anchor, recovery.news_of(fetched.head, self.core.island)
    )
    crash.point("mid_adopt")
    if action.resync:
      return  # one line tells of all fragments
    self._tape.record(
      events.ADOPTED,
      step=self.core.step,
      mode=self._setting.config.sync.adoption,
      bytes=fetched.num_bytes,
      secs=fetched.secs,
      kept_from_step=action.kept_from,
      **self._adopted(action, fetched),
    )

  def mend(self, actions: list[core.Action]) -> None:
    """See `Hands`."""
    source, replaced = None, 0
    if not self._learner.optimizer_is_finite():
      with self._setting.progress.may_take(self._setting.times.start_secs):
        healthy, source = self._saved_optimizer()
        replaced = self._learner.mend_optimizer(healthy)
    self._tape.record(
      events.RESYNCED,
      step=self.core.step,
      offences=self._offences,
      fragments=[
        self._adopted(a, self.at_hand[a.fragment])
        for a in actions
        if isinstance(a, core.Adopt) and a.resync
      ],
      replaced=replaced,
      checkpoint=source,
    )

  def _saved_optimizer(self) -> tuple[Any, dict[str, int] | None]:
    who = self._setting.identity
    folder = checkpoint.directory(self._setting.run_dir, who.island)
    for path in checkpoint.completed(folder):
      try:
        marker, saved = checkpoints.restore(path, self._learner)
      except errors.CorruptSnapshotError as error:
        logger.warning("passed_over reason=%s", error)
        continue
      if learner_lib.finite(saved.opt_state):  # it was saved before
        return saved.opt_state, recovery.identity_of(marker)
    return None, None

  def answer(self, request: records.PeerRequest, bases: Sequence[int]) -> None:
    """See `Hands`."""
    if self._answerer is not None and self._answerer.is_alive:
      return
    snapshots, who = self._setting.snapshots, self._setting.identity
    moment = self._learner.step, bases, self._learner.opt_state_copy()

    def send() -> None:
      try:
        peers.answer(snapshots, request, who, *moment)
      except Exception as error:  # Who called asks the next, or does without.
        logger.warning(
          "answer_failed island=%d error=%r", request.island, error
        )

    self._answerer = self._setting.threads.once("answerer", send)

  def save(self) -> int:
    """Starts saving the state as it is; returns which save it is.

    One of the same state that is complete, or under way, is not made again.
    """
    positions = self.core.positions
    same = self._last_save == (self._learner.step, positions)
    if not same or not self._saver.may_count(self._saves):
      self._save(positions, part=False)
    return self._saves

  def _save(self, positions: Sequence[core.Position], *, part: bool) -> None:
    self._saves += 1
    self._last_save = self._learner.step, positions
    # On the tape at the very moment of the copy, for a replay.
    self._tape.record(
      events.SAVING,
      step=self._learner.step,
      serial=self._saves,
      cut=self._cut if part else 0,
    )
    self._saver.save(
      saving.Job(
        self._saves,
        self._learner.snapshot(),
        positions,
        self._cut,
        self._publisher.ticket(positions),
        part,
      )
    )

  def wait_saved(self, serial: int, timeout_secs: float) -> bool:
    """Waits for a save, and who publishes for it; says whether it counts."""
    return self._saver.wait(serial, timeout_secs, self._publisher.check)

  def flush(self, timeout_secs: float) -> bool:
    """Waits for all publications to be committed; False on time-out."""
    return self._publisher.flush(timeout_secs)

  def _adopted(
    self, action: core.Adopt, fetched: adopter.Placed
  ) -> dict[str, Any]:
    """What the tape says of one adopted version."""
    facts = {
      "fragment": action.fragment,
      "version": action.version,
      "digest": fetched.head.digest,
      "lost_from_step": action.lost_from,
      "lost_to_step": action.lost_to,
    }
    if action.muted_until:
      facts["muted_until"] = action.muted_until
    if self._setting.config.sync.error_feedback:
      news = recovery.news_of(fetched.head, self.core.island)
      facts["answer"] = news[1:]
    return facts

  def close(self) -> None:
    """Ends all threads."""
    self._adopter.close()
    self._publisher.close()
    self._saver.close()
    if self._answerer is not None:
      self._answerer.join()
