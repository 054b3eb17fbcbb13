"""The syncer's shell: store, clock and arithmetic around the decision core.

It reads commit records and members, tells the core, and does what the core
answers. Everything it knows is in the store, so that a standby or a restart
takes over from the store alone.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from diloco import channel as channel_lib
from diloco import config as config_lib
from diloco import config_changes, timing, workers
from diloco.fragments import partition
from diloco.snapshots import operations, records, store, verify
from diloco.syncer import (
  core,
  cutting,
  gates,
  grace,
  leader,
  leadership,
  quorum,
  round_merge,
  rounds,
  weighting,
)
from diloco.syncer import heads as heads_lib
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)


def settings(
  config: config_lib.RunConfig, retry_secs: float = 0.0
) -> core.Settings:
  """The core's policies, from the run's configuration."""
  sync = config.sync
  fixed_secs = sync.fixed_grace_secs
  policy: grace.GracePolicy
  if fixed_secs is not None:
    policy = grace.FixedGrace(fixed_secs)
  else:
    policy = grace.AdaptiveGrace(sync.overlap_steps, sync.grace_gamma)
  return core.Settings(
    num_fragments=sync.num_fragments,
    quorum=quorum.MinimumQuorum(sync.quorum),
    grace=policy,
    max_staleness=sync.max_staleness,
    stale_opens=config.own_answers,
    retry_secs=retry_secs,
    gate=gates.GateSettings(factor=sync.gate_factor),
    suspension=gates.Suspension(after=sync.suspend_after),
  )


class Syncer(leadership.Leadership):
  """One incarnation of the syncer, from taking the lease to losing it.

  Attributes:
    times: the run's timeouts.
    check_place: raises `FencedError` once a later life has its place.
  """

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    config: config_lib.RunConfig,
    tape: recorder.Recorder,
    owner: str,
    threads: workers.Threads = workers.Threads(),
    times: timing.Timing | None = None,
  ):
    """Knows its store; takes no lease yet. No other has the name of `owner`.

    It goes by these `times`, or those it can read now.
    """
    self._threads = threads
    self._config = config
    self._tape = tape
    self.times = times or timing.read(snapshots, config.controller)
    self.check_place: Callable[[], None] = lambda: None
    self._unwatched = snapshots
    self._store = snapshots.watched(self.gets_on)
    self.each = self._store.each
    super().__init__(
      owner,
      leadership.Terms(
        self.times,
        settings(config, self.times.retry_secs),
        weighting.Weighting.of(config.sync),
      ),
      cutting.CutKeeper(),
      threads.clock,
    )
    self._plan: partition.FragmentPlan | None = None
    self._stop = threading.Event()
    self._woken = threading.Event()
    self._drain = threading.Event()
    self._draining: int | None = None  # program to answer
    self._rounds: rounds.Rounds | None = None  # while it leads
    self._renewals: workers.Loop | None = None
    self._channel: channel_lib.Client | None = None
    self._standing: set[int] = set()  # fragments whose heads are unreadable

  def hold(self, renewing: operations.Script[None]) -> None:
    """See `Leadership`."""
    self._tape.record(events.LEASE_ACQUIRED, token=self.token)
    self._renewals = self._threads.loop(
      "lease", renewing, self._unwatched.execute
    )
    self._renewals.start()

  def read_plan(self) -> None:
    """Reads the fragment plan, if it is there yet; it will not change.

    Raises:
      OSError, CorruptSnapshotError: it cannot be read.
    """
    self._plan = self._store.read_plan()

  def num_fragments(self) -> operations.Procedure[int]:
    """See `Leadership`."""
    if self._plan is None:
      yield operations.Compute(self.read_plan)
    return self._plan.num_fragments if self._plan else 0

  def stands_still(self, found: heads_lib.Standstill) -> None:
    """See `Leadership`; says it once of each fragment."""
    if found.fragment not in self._standing:
      self._standing.add(found.fragment)
      self._tape.record(events.GLOBAL_DAMAGED, **found._asdict())

  def check(self, merging: bool = False) -> None:
    """See `Leadership`.

    Raises:
      WorkerError: nobody renews the lease any more.
    """
    if self._renewals is not None:
      self._renewals.check()
    super().check(merging)

  def take_over(self, wanted: Callable[[], bool] = lambda: True) -> bool:
    """Waits for the lease and the heads while `wanted`; says whether it leads.

    Raises:
      FencedError: somebody else took the lease, or its place, meanwhile.
    """
    parts = operations.perform(
      self.taking_over(lambda: wanted() and not self._stop.is_set()),
      self.execute,
    )
    if parts is None:
      return False
    self._begin(parts)
    return True

  def _begin(self, parts: leader.Parts) -> None:
    """Makes what surrounds the core."""
    assert self._plan is not None
    self._tell_again(parts.heads.records)
    parts.core.configure(settings(self._config))  # changed while it waited?
    merger = round_merge.RoundMerger.of(
      self._unwatched.watched(self.merge_gets_on), self._plan, self._config
    )
    self._rounds = rounds.Rounds(
      self._plan,
      merger,
      self._tape,
      rounds.Orders(self._drain.is_set, self._over, self.wake),
      parts,
      self._threads,
    )

  def _tell_again(self, heads: list[records.Head]) -> None:
    """Puts the newest merges on the tape once more.

    The predecessor may have committed one that it could not record. Reading
    all tapes to find out would take longer with every step of the run; a
    version that is told twice counts once.
    """
    for head in heads:
      if head.version and head.merged:
        self._tape.record(events.MERGED, **head.merged)

  @property
  def num_merges(self) -> int:
    """Merges by this incarnation."""
    return self._rounds.num_merges if self._rounds else 0

  @property
  def damaged(self) -> list[int]:
    """Fragments whose newest version cannot be read, as far as it knows."""
    return self._rounds.damaged if self._rounds else sorted(self._standing)

  def run(self, channel: channel_lib.Client | None = None) -> str:
    """Leads until told to stop; returns why it ended.

    Raises:
      FencedError: another syncer leads now.
    """
    self._channel = channel
    return operations.perform(self._leading(), self.execute)

  def _leading(self) -> operations.Script[str]:
    assert self._rounds is not None
    self._rounds.start()
    return (yield from self._rounds.lead())

  def serving(self) -> operations.Script[None]:
    """Waits for the lease and the heads, then leads until told to stop."""
    if (parts := (yield from self.taking_over(lambda: True))) is not None:
      self._begin(parts)
      yield from self._leading()

  def execute(self, operation: Any) -> Any:
    """Does one operation of a script of this syncer, or pauses."""
    self._threads.check()
    self.check_place()
    match operation:
      case operations.Nap(secs):
        self._woken.wait(secs)
        return self._woken.clear()
      case float(secs):
        return self._stop.wait(secs)
      case operations.Compute(work):
        return work()
      case operations.ReadPayload(head):
        assert self._plan is not None
        buffers = self._config.outer.buffers
        return verify.check_version(self._store, self._plan, buffers, head)
    return self._store.execute(operation)

  def _over(self) -> str:
    """Why this syncer is to lead no more; hears what the controller says."""
    if self._channel is not None:
      self._take_messages(self._channel)
      if self._channel.alone_secs() > self.times.orphan_secs:
        return "no controller"
    return "stopped" if self._stop.is_set() else ""

  def configure(self, live: Mapping[str, Any]) -> None:
    """Goes on by other settings, of `config_changes.LIVE`; leading or not."""
    self._config = config_changes.with_live(self._config, live)
    if self._rounds is not None:
      self._rounds.core.configure(settings(self._config))
      self._rounds.set_learning_rate(live["outer.learning_rate"])

  def drain(self) -> None:
    """From now on closes every round as soon as its quorum allows."""
    self._drain.set()

  @property
  def is_settled(self) -> bool:
    """Whether it leads and merges nothing; rounds too small may be open."""
    return self._rounds is not None and not self._rounds.is_merging

  def wake(self) -> None:
    """Ends the pause between two turns."""
    self._woken.set()

  def stop(self) -> None:
    """Makes `run` return."""
    self._stop.set()
    self.wake()

  def close(self) -> None:
    """Gives the lease up."""
    self.stop()
    if self._rounds is not None and not self.fenced:
      self._rounds.close()
    if self._renewals is not None:
      self._renewals.close()
    try:
      self._store.perform(self.releasing())
    except operations.FAILURES as error:
      logger.warning("lease_not_released error=%s", error)

  def _take_messages(self, channel: channel_lib.Client) -> None:
    mine = self._rounds
    assert mine is not None
    while True:
      try:
        message = channel.inbox.get_nowait()
      except queue.Empty:
        break
      if message.get("type") != "program":
        continue
      if message["name"] == "configure":
        self.configure(message["args"]["settings"])
        channel.send(_done(message["seq"], {}))
        continue
      if message["name"] == "drain":
        mine.drained = False
        self._draining = message["seq"]
        channel.set_hello(draining=True)
        self._drain.set()
        return  # answered after a whole turn
      self._stop.set()
      channel.send(_done(message["seq"], {}))
    if self._draining is not None and mine.drained:
      channel.send(_done(self._draining, {"idle": mine.core.idle}))
      self._draining = None


def _done(seq: int, result: dict[str, Any]) -> channel_lib.Message:
  return {"type": "done", "seq": seq, "result": result}
