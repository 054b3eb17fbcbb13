"""The syncer's shell: store, clock and arithmetic around the decision core.

It reads commit records and members, tells the core, and does what the core
answers. Everything it knows is in the store, so that a standby or a restart
takes over from the store alone.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from diloco import channel as channel_lib
from diloco import config as config_lib
from diloco import errors
from diloco.fragments import codec, partition
from diloco.snapshots import lease, records, store
from diloco.syncer import (
  committer,
  core,
  grace,
  members,
  outer_optimizer,
  quorum,
  weighting,
)
from diloco.tape import events, reader, recorder

logger = logging.getLogger(__name__)

_POLL_SECS = (0.002, 0.05)  # of commit records; a twentieth of a step between
_LEASE_HEARTBEATS = 3  # time to live of the lease
_MEMBER_HEARTBEATS = 5  # time to live of a member
_RETRY_SECS = 0.2


def settings(config: config_lib.RunConfig) -> core.Settings:
  """The core's policies, from the run's configuration."""
  sync = config.sync
  fixed_secs = config_lib.fixed_grace_secs(sync.grace)
  policy: grace.GracePolicy
  if fixed_secs is not None:
    policy = grace.FixedGrace(fixed_secs)
  else:
    policy = grace.AdaptiveGrace(
      sync.overlap_steps, sync.every, sync.num_fragments, sync.grace_gamma
    )
  return core.Settings(
    num_fragments=sync.num_fragments,
    quorum=quorum.MinimumQuorum(sync.quorum),
    grace=policy,
    max_staleness=sync.max_staleness,
  )


class Syncer:
  """One incarnation of the syncer, from taking the lease to losing it."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    config: config_lib.RunConfig,
    tape: recorder.Recorder,
    owner: str,
    after_beat: Callable[[], None] = lambda: None,
  ):
    """Knows its store; takes no lease yet.

    Args:
      snapshots: the store.
      config: the run's configuration.
      tape: where decisions go.
      owner: a name no other process has.
      after_beat: called on a thread of its own with every renewal of the
        lease: a long merge is no reason to look dead.
    """
    self._store = snapshots
    self._after_beat = after_beat
    self._config = config
    self._tape = tape
    heartbeat_secs = config.controller.heartbeat_secs
    self._heartbeat_secs = heartbeat_secs
    self._lease = lease.LeaseHolder(snapshots, store.SYNCER_LEASE, owner)
    self._watch = lease.LeaseWatch(_LEASE_HEARTBEATS * heartbeat_secs)
    self._members = members.MemberWatch(_MEMBER_HEARTBEATS * heartbeat_secs)
    self._stop = threading.Event()
    self._fenced = threading.Event()
    self._known: set[str] = set()
    self._present: set[int] = set()
    self._drain = threading.Event()
    self._draining: int | None = None  # program to answer
    self._renewals: threading.Thread | None = None
    self._step_secs = 0.0
    sync = config.sync
    self._weighting = weighting.Weighting(
      sync.staleness_decay, sync.max_staleness
    )

  def take_over(self, wanted: Callable[[], bool] = lambda: True) -> bool:
    """Waits for the lease and the heads; afterwards this syncer leads.

    Args:
      wanted: asked now and then whether to go on waiting.

    Returns:
      Whether it leads; False when it was not wanted any more.

    Raises:
      FencedError: somebody else took the lease meanwhile.
    """
    while not self._lease.try_acquire(self._watch, time.monotonic()):
      if not wanted():
        return False
      time.sleep(self._heartbeat_secs / 10)
    self._tape.record(events.LEASE_ACQUIRED, token=self._lease.token)
    self._renewals = threading.Thread(
      target=self._renew, name="lease", daemon=True
    )
    self._renewals.start()
    while (fenced := self._fence_heads()) is None:
      if not wanted():
        return False
      self._check_lease()
      time.sleep(_POLL_SECS[1])
    self._committer = fenced
    fenced.delete_abandoned_payloads()
    heads = fenced.heads
    self._record_unrecorded(heads)
    clocks = [
      (h.version, {int(m): step for m, step in h.clock.items()}) for h in heads
    ]
    self._core = core.SyncerCore(settings(self._config), clocks)
    self._publish_board()
    return True

  def _fence_heads(self) -> committer.Committer | None:
    """Raises the token of all heads; None while islands still write them."""
    outer, sync = self._config.outer, self._config.sync
    plan = self._store.read_plan()
    if plan is None:
      return None
    self._plan: partition.FragmentPlan = plan
    try:
      return committer.Committer(
        self._store,
        plan,
        self._lease.token,
        sync.merge,
        outer_optimizer.OuterOptimizer(
          outer.learning_rate, outer.momentum, outer.nesterov
        ),
        keep_versions=max(sync.max_staleness, 1) + 2,
      )
    except LookupError:
      return None

  def _record_unrecorded(self, heads: list[records.Head]) -> None:
    """Puts on the tape what a predecessor committed and could not record."""
    recorded: dict[int, int] = {}
    run_dir = self._tape.path.parent.parent
    for event in reader.read(run_dir).events:
      if event["event"] == events.MERGED:
        p, version = event["fragment"], event["version"]
        recorded[p] = max(recorded.get(p, 0), version)
    for head in heads:
      if head.version > recorded.get(head.fragment, 0):
        self._tape.record(events.MERGED, **head.merged)

  def run(self, channel: channel_lib.Client | None = None) -> str:
    """Leads until told to stop; returns why it ended.

    Args:
      channel: link to the controller, if there is one.

    Raises:
      FencedError: another syncer leads now.
    """
    members_due = 0.0
    while not self._stop.is_set():
      self._check_lease()
      now = time.monotonic()
      try:
        if now >= members_due:
          members_due = now + self._heartbeat_secs
          self._look_at_members(now)
        draining = self._drain.is_set()
        self._scan(now)
        self._pass_time(draining=draining)
      except OSError as error:
        logger.warning("store_unreachable error=%s", error)
        time.sleep(_RETRY_SECS)
      if channel is not None:
        self._take_messages(channel)
        if channel.alone_secs() > self._config.controller.orphan_secs:
          return "no controller"
      self._stop.wait(self._pause_secs())
    return "stopped"

  def _pass_time(self, *, draining: bool) -> None:
    now = time.monotonic()
    deadline = self._core.next_deadline()
    if draining:
      self._do(self._core.handle(core.Drain(), now))
    elif deadline is not None and now >= deadline:
      self._do(self._core.handle(core.Tick(), now))

  def drain(self) -> None:
    """From now on closes every round as soon as its quorum allows."""
    self._drain.set()

  def stop(self) -> None:
    """Makes `run` return."""
    self._stop.set()

  def close(self) -> None:
    """Gives the lease up."""
    self._stop.set()
    if self._renewals is not None:
      self._renewals.join()
    if not self._fenced.is_set():
      self._lease.release()

  def _renew(self) -> None:
    while not self._stop.wait(self._heartbeat_secs):
      try:
        if not self._lease.renew():
          self._fenced.set()
          return
        self._after_beat()
      except (OSError, errors.CorruptSnapshotError) as error:
        logger.warning("renewal_failed error=%s", error)

  def _check_lease(self) -> None:
    if self._fenced.is_set():
      raise errors.FencedError(
        f"the lease of token {self._lease.token} was taken over"
      )

  def _pause_secs(self) -> float:
    shortest, longest = _POLL_SECS
    pause_secs = min(max(self._step_secs / 20, shortest), longest)
    deadline = self._core.next_deadline()
    if deadline is not None:
      left_secs = max(deadline - time.monotonic(), 0.0)
      pause_secs = min(pause_secs, max(left_secs, shortest))
    return pause_secs

  def _look_at_members(self, now: float) -> None:
    found = []
    for name in filter(store.is_member_name, self._store.names("members")):
      try:
        member = self._store.read(f"members/{name}", records.Member)
      except errors.CorruptSnapshotError as error:
        logger.warning("member_unreadable name=%s error=%s", name, error)
        continue
      if member is not None:
        found.append(member)
    present = {
      m: member.step_secs
      for m, member in self._members.live(found, now).items()
      if member.present
    }
    known_secs = [secs for secs in present.values() if secs > 0]
    self._step_secs = min(known_secs, default=self._step_secs)
    self._record_membership(set(present))
    self._do(self._core.handle(core.Membership(present), now))

  def _record_membership(self, present: set[int]) -> None:
    before = self._present
    for island in sorted(present - before):
      self._tape.record(events.MEMBER_JOINED, island=island)
    for island in sorted(before - present):
      self._tape.record(events.MEMBER_LOST, island=island)
    self._present = present

  def _scan(self, now: float) -> None:
    """Reads commit records that are new."""
    names = self._store.names("contributions")
    self._known &= set(names)
    found: list[records.Contribution] = []
    for name in names:
      if name in self._known or not store.is_contribution_name(name):
        continue
      try:
        record = self._store.read(
          store.contribution_key(name), records.Contribution
        )
      except errors.CorruptSnapshotError as error:
        self._reject_record(name, str(error))
        continue
      if record is None:
        continue
      refusal = _refusal(record, name, self._plan)
      if refusal:
        self._reject_record(name, refusal)
        continue
      found.append(record)
    self._known |= {record.key for record in found}
    if found:
      self._do(self._core.handle(core.Arrived(found), now))

  def _reject_record(self, name: str, why: str) -> None:
    """A record that cannot be trusted; its name still says whose it was."""
    logger.warning("record_rejected name=%s why=%s", name, why)
    fragment, island, incarnation, step = map(int, name.split("."))
    self._tape.record(
      events.DISCARDED,
      fragment=fragment,
      key=name,
      island=island,
      island_incarnation=incarnation,
      first_step=step,
      step=step,
      c_tokens=0,
      reason="corrupt_record",
    )
    self._delete(name)

  def _do(self, actions: list[core.Action]) -> None:
    """Does all of `actions`, whatever the store makes of some of them.

    A merge that fails is offered again by the core; a deletion that fails
    leaves a record that the next syncer forgets.
    """
    failure: OSError | None = None
    for action in actions:
      try:
        self._do_one(action)
      except OSError as error:
        failure = error
    if failure is not None:
      raise failure

  def _do_one(self, action: core.Action) -> None:
    match action:
      case core.Open():
        self._tape.record(events.ROUND_OPENED, **dataclasses.asdict(action))
        self._publish_board()
      case core.Discard(contribution, reason):
        self._discard(contribution, reason)
      case core.Forget(contribution):
        self._delete(contribution.key)
      case core.Close():
        self._close_round(action)

  def _close_round(self, close: core.Close) -> None:
    started = time.monotonic()
    by_key: dict[str, records.Contribution] = {}
    weights: dict[str, float] = {}
    for chosen in close.chosen:
      record = chosen.contribution
      assert isinstance(record, records.Contribution)
      by_key[record.key] = record
      weights[record.key] = self._weighting.weight(
        record.c_tokens, record.c_steps, chosen.staleness
      )
    try:
      merged, payload = self._committer.prepare(
        close.fragment, close.version, list(by_key.values()), weights
      )
      merge_secs = time.monotonic() - started
      facts = _merged_event(close, weights, merged, merge_secs)
      self._check_lease()
      self._committer.commit(close, payload, facts)
    except (OSError, errors.CorruptSnapshotError) as error:
      self._core.handle(core.MergeFailed(close.fragment), time.monotonic())
      raise OSError(f"merge of fragment {close.fragment}: {error}") from error
    except committer.RefusedError as refused:
      self._do(
        self._core.handle(
          core.MergeRefused(close.fragment, refused.reasons), time.monotonic()
        )
      )
      return
    self._tape.record(events.MERGED, **facts)
    sync_secs = time.monotonic() - started
    later = self._core.handle(
      core.Committed(close.fragment, sync_secs), time.monotonic()
    )
    try:
      self._publish_board()
      for key in by_key:
        self._delete(key)
      self._committer.retire(close.fragment)
    finally:
      self._do(later)

  def _discard(self, contribution: core.Contribution, reason: str) -> None:
    assert isinstance(contribution, records.Contribution)
    self._tape.record(
      events.DISCARDED,
      fragment=contribution.fragment,
      key=contribution.key,
      island=contribution.island,
      island_incarnation=contribution.incarnation,
      first_step=contribution.first_step,
      step=contribution.step,
      c_tokens=contribution.c_tokens,
      reason=reason,
    )
    self._delete(contribution.key)

  def _delete(self, name: str) -> None:
    # The record goes first: a record without payload would look corrupt.
    self._store.delete(store.contribution_key(name))
    self._store.delete_tree(store.payload_prefix(name))

  def _publish_board(self) -> None:
    rounds = {str(p): m for p, m in self._core.open_rounds.items()}
    board = records.Board(self._core.versions, rounds)
    self._store.write(store.BOARD, board)

  def _take_messages(self, channel: channel_lib.Client) -> None:
    while True:
      try:
        message = channel.inbox.get_nowait()
      except queue.Empty:
        break
      if message.get("type") != "program":
        continue
      if message["name"] == "drain":
        self._draining = message["seq"]
        self._drain.set()
        return  # answered after another scan
      self._stop.set()
      channel.send(_done(message["seq"], {}))
    if self._draining is not None:
      # A look at the store lies behind: what could be closed is closed.
      channel.send(_done(self._draining, {"idle": self._core.idle}))
      self._draining = None


def _refusal(
  record: records.Contribution, name: str, plan: partition.FragmentPlan
) -> str:
  """Why a well-formed record cannot be true; empty if it can."""
  if record.plan_hash != plan.hash or record.key != name:
    return "written under another plan or name"
  if record.fragment >= plan.num_fragments or record.codec not in codec.DTYPES:
    return f"fragment {record.fragment} in codec {record.codec!r}"
  tensors = len(plan.fragments[record.fragment])
  if len(record.norms) != tensors or len(record.chunks) != tensors:
    return f"it does not describe {tensors} tensors"
  if not 0 <= record.first_step < record.step or record.c_tokens <= 0:
    return f"steps ({record.first_step}, {record.step}]"
  return ""


def _done(seq: int, result: dict[str, Any]) -> channel_lib.Message:
  return {"type": "done", "seq": seq, "result": result}


def _merged_event(
  close: core.Close,
  weights: dict[str, float],
  merged: committer.Merged,
  merge_secs: float,
) -> dict[str, Any]:
  contributions = []
  for chosen in close.chosen:
    record = chosen.contribution
    assert isinstance(record, records.Contribution)
    contributions.append(
      {
        "key": record.key,
        "island": record.island,
        "incarnation": record.incarnation,
        "first_step": record.first_step,
        "step": record.step,
        "c_tokens": record.c_tokens,
        "staleness": chosen.staleness,
        "weight": weights[record.key],
        "waited_secs": chosen.waited_secs,
      }
    )
  return {
    "fragment": close.fragment,
    "version": close.version,
    "contributions": contributions,
    "absent": list(close.absent),
    "quorum_secs": close.quorum_secs,
    "grace_secs": close.grace_secs,
    "grace_spent_secs": close.grace_spent_secs,
    "merge_secs": merge_secs,
    "outer_grad_norm": merged.outer_grad_norm,
    "bytes": merged.num_bytes,
  }
