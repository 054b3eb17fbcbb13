"""A leader that merges real tensors, and tells the tape of what it does."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from diloco import workers
from diloco.fragments import codec, partition
from diloco.snapshots import operations, records
from diloco.syncer import heads as heads_lib
from diloco.syncer import leader, round_merge
from diloco.syncer import orders as syncer_orders
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)


_POLL_SECS = (0.002, 0.05)  # of commit records; a twentieth of a step between


class Orders(NamedTuple):
  """Who a leader asks; see `Leader`."""

  draining: Callable[[], bool] = lambda: False
  over: Callable[[], str] = lambda: ""
  wake: Callable[[], None] = lambda: None


class Rounds(leader.Leader):
  """One leadership on a real store; see `Leader`."""

  def __init__(
    self,
    plan: partition.FragmentPlan,
    merger: round_merge.RoundMerger,
    tape: recorder.Recorder,
    orders: Orders,
    parts: leader.Parts,
    threads: workers.Threads = workers.Threads(),
  ):
    super().__init__(parts, threads.clock)
    self._plan = plan
    self._merger = merger
    self._tape = tape
    self._orders = orders
    self._merges = threads.loop("merger", self.merge(), self._merge)
    self._closing_since = 0.0
    self._present: set[int] = set()
    self._told: dict[int, str] = {}  # of fragments that stand still, and why
    self.num_merges = 0
    self.step_secs = 0.0  # of the fastest island

  def set_learning_rate(self, learning_rate: float) -> None:
    """Takes outer steps of another length from now on."""
    self._merger.set_learning_rate(learning_rate)

  def draining(self) -> bool:
    """See `Leader`."""
    return self._orders.draining()

  def over(self) -> str:
    """See `Leader`."""
    return self._orders.over()

  def pause_secs(self, now: float, deadline: float | None) -> float:
    """See `Leader`."""
    shortest, longest = _POLL_SECS
    pause_secs = min(max(self.step_secs / 20, shortest), longest)
    pause_secs = max(pause_secs, self._parts.least_pause_secs)
    if deadline is not None:
      pause_secs = min(pause_secs, max(deadline - now, shortest))
    return pause_secs

  def _merge(self, operation: operations.Operation) -> round_merge.Merged:
    assert isinstance(operation, operations.Merge)
    return self._merger.merge(operation)

  def wake_merger(self) -> None:
    """See `Leader`."""
    self._merges.wake()

  def wake(self) -> None:
    """See `Leader`."""
    self._orders.wake()

  def start(self) -> None:
    """Starts the thread that merges."""
    self._merges.start()

  def check(self) -> None:
    """See `Leader`.

    Raises:
      WorkerError: the thread that merges has ended.
    """
    self._merges.check()
    super().check()

  def close(self) -> None:
    """Ends the thread that merges, once the merge under way has ended."""
    self._merges.close()

  @property
  def damaged(self) -> list[int]:
    """Fragments that stand still: their newest version cannot be read."""
    return sorted(self.heads.standing)

  def content_of(
    self, close: syncer_orders.Close, weights: Sequence[float], merged: Any
  ) -> heads_lib.Content:
    """See `Leader`; the head keeps what the tape will say, for a successor."""
    secs = self._clock() - self._closing_since
    # Heads keep the facts of one version: those of the last are on the tape.
    self._tape.flush()
    self.check()
    return heads_lib.Content(
      self._merger.chunks(close.fragment),
      _merged_event(close, weights, merged, secs, self.heads.token),
      merged.digest,
      self._merger.params_codec,
      self._merger.delta_codec,
    )

  def refusal(self, record: records.Contribution) -> str:
    """See `Leader`."""
    return _refusal(record, self._plan)

  def rejected(self, name: str, why: str) -> None:
    """See `Leader`; the name still says whose it was."""
    logger.warning("record_rejected name=%s why=%s", name, why)
    self._tape.discarded(name, "corrupt_record")

  def acts(self, action: syncer_orders.Action) -> None:
    """See `Leader`."""
    match action:
      case syncer_orders.Open():
        self._tape.record(events.ROUND_OPENED, **dataclasses.asdict(action))
      case syncer_orders.Close():
        self._closing_since = self._clock()
      case syncer_orders.Discard():
        sent, at = action.contribution, action.arrived_at
        self._tape.discarded(sent.key, action.reason, sent, arrived_at=at)
      case syncer_orders.Quarantine():
        self._tape.record(
          events.QUARANTINED,
          island=action.island,
          island_incarnation=action.incarnation,
          fragment=action.fragment,
          reason=action.reason,
          offences=action.offences,
          suspended_secs=action.suspended_secs,
        )

  def told(self, close: syncer_orders.Close) -> None:
    """See `Leader`."""
    self._tape.record(
      events.MERGED, **self.heads.records[close.fragment].merged
    )
    self.num_merges += 1

  def failed(self, error: Exception, close: syncer_orders.Close | None) -> None:
    """See `Leader`."""
    if close is None:
      logger.warning("store_unreachable error=%s", error)
      return
    self._tell_standstills()
    logger.warning("merge_failed fragment=%d error=%s", close.fragment, error)

  def healed(self, healed: Sequence[records.Head]) -> None:
    """See `Leader`; says what could not be mended, too."""
    for head in healed:
      self._tape.record(
        events.HEAD_HEALED, fragment=head.fragment, version=head.version
      )
    self._tell_standstills()

  def _tell_standstills(self) -> None:
    """Says once of each fragment that it stands still."""
    standing = self.heads.standing
    for fragment in standing.keys() - self._told.keys():
      self._tape.record(
        events.GLOBAL_DAMAGED,
        fragment=fragment,
        version=self.heads.records[fragment].version,
        reason=standing[fragment],
      )
    self._told = dict(standing)

  def unreadable(self, name: str, why: str) -> None:
    """See `Leader`."""
    logger.warning("member_unreadable name=%s error=%s", name, why)

  def present(self, present: Mapping[int, float]) -> None:
    """See `Leader`."""
    known_secs = [secs for secs in present.values() if secs > 0]
    self.step_secs = min(known_secs, default=self.step_secs)
    before, now = self._present, set(present)
    for island in sorted(now - before):
      self._tape.record(events.MEMBER_JOINED, island=island)
    for island in sorted(before - now):
      self._tape.record(events.MEMBER_LOST, island=island)
    self._present = now


def _merged_event(
  close: syncer_orders.Close,
  weights: Sequence[float],
  merged: round_merge.Merged,
  merge_secs: float,
  token: int,
) -> dict[str, Any]:
  """What the tape says of a version."""
  return {
    "fragment": close.fragment,
    "version": close.version,
    "contributions": _contributions(close.chosen, weights),
    "token": token,
    "absent": list(close.absent),
    "opened_at": close.opened_at,
    "closed_at": close.closed_at,
    "quorum_secs": close.quorum_secs,
    "grace_secs": close.grace_secs,
    "grace_spent_secs": close.grace_spent_secs,
    "queued_secs": close.queued_secs,
    "grace_facts": dataclasses.asdict(close.facts),
    "merge_secs": merge_secs,
    "outer_grad_norm": merged.outer_grad_norm,
    "cosine": merged.cosine,
    "digest": merged.digest,
    "learning_rate": merged.learning_rate,
    "bytes": merged.num_bytes,
  }


def _contributions(
  chosen: Sequence[syncer_orders.Chosen], weights: Sequence[float]
) -> list[dict[str, Any]]:
  found = []
  for one, weight in zip(chosen, weights, strict=True):
    record = one.contribution
    found.append(
      {
        "key": record.key,
        "island": record.island,
        "incarnation": record.incarnation,
        "first_step": record.first_step,
        "step": record.step,
        "c_tokens": record.c_tokens,
        "staleness": one.staleness,
        "weight": weight,
        "waited_secs": one.waited_secs,
        "arrived_at": one.arrived_at,
        "norm": math.hypot(*record.norms),
      }
    )
  return found


def _refusal(record: records.Contribution, plan: partition.FragmentPlan) -> str:
  """Why a well-formed record cannot be true; empty if it can."""
  if record.plan_hash != plan.hash:
    return "written under another plan"
  if record.fragment >= plan.num_fragments:
    return f"fragment {record.fragment}"
  try:
    codec.parse(record.codec)
  except ValueError as error:
    return str(error)
  tensors = len(plan.fragments[record.fragment])
  if len(record.norms) != tensors or len(record.chunks) != tensors:
    return f"it does not describe {tensors} tensors"
  if not 0 <= record.first_step < record.step or record.c_tokens <= 0:
    return f"steps ({record.first_step}, {record.step}]"
  return ""
