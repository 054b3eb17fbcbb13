"""Publication in the background: encode, write, and only then commit.

The island's main thread hands over device copies and goes on; this thread
turns them into outer gradients, writes the payload, then the commit record. A
publication that the store would not take is retried until a newer one of the
same fragment, which contains it, takes its place: what waits is bounded by a
few publications per fragment.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from diloco.fragments import partition
from diloco.islands import core, encoding, placement, protocol
from diloco.snapshots import keys, operations, records, store
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)

_RETRY_SECS = (0.05, 2.0)  # first and longest pause after a failed write
_WAITING_EACH = 2  # publications of one fragment that wait at most


@dataclasses.dataclass(frozen=True)
class Publication:
  """What to publish, with the values it is made of."""

  action: core.Publish
  params: Mapping[str, jax.Array]  # copies nobody else donates
  anchor: placement.HostFragment

  def contains(self, other: "Publication") -> bool:
    """Whether all of the other's steps are in this one."""
    mine, its = self.action, other.action
    return (
      mine.fragment == its.fragment
      and mine.first_step <= its.first_step
      and mine.step >= its.step
    )


@dataclasses.dataclass(frozen=True)
class Identity:
  """Who publishes, and in which timeline."""

  island: int
  incarnation: int
  tokens_per_step: int
  epoch: int = 0


@dataclasses.dataclass
class _Entry:
  number: int  # the oldest submission it stands for
  publication: Publication


class Publisher:
  """A thread that publishes what the main thread submits."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    identity: Identity,
    codec: str,
    tape: recorder.Recorder,
  ):
    """Starts the thread."""
    self.identity = identity
    self._store = snapshots
    self._plan = plan
    self._codec = codec
    self._tape = tape
    self._submitted = 0
    self._waiting: list[_Entry] = []
    self._busy: _Entry | None = None
    self._lost: int | None = None  # first submission never to be committed
    self._errands: deque[Callable[[], None]] = deque()
    self._closing = False
    self._changed = threading.Condition()
    self._thread = threading.Thread(
      target=self._run, name="publisher", daemon=True
    )
    self._thread.start()

  @property
  def submitted(self) -> int:
    """Publications submitted so far."""
    return self._submitted

  def submit(self, publication: Publication) -> None:
    """Queues a publication; never blocks."""
    dropped = []
    with self._changed:
      entry = _Entry(self._submitted, publication)
      self._submitted += 1
      for old in list(self._waiting):
        if publication.contains(old.publication):
          entry.number = min(entry.number, old.number)
          self._waiting.remove(old)
          dropped.append((old, "superseded"))
      fragment = publication.action.fragment
      same = [
        e for e in self._waiting if e.publication.action.fragment == fragment
      ]
      if len(same) >= _WAITING_EACH:
        self._waiting.remove(same[0])
        self._lose(same[0])
        dropped.append((same[0], "store_unreachable"))
      self._waiting.append(entry)
      self._changed.notify_all()
    for old, reason in dropped:
      self._record_drop(old.publication, reason)

  def run_errand(self, errand: Callable[[], None]) -> None:
    """Queues something else to be done with the store; never blocks."""
    with self._changed:
      self._errands.append(errand)
      self._changed.notify_all()

  def flush(self, timeout_secs: float) -> bool:
    """Waits until everything submitted is committed; False on time-out."""
    with self._changed:
      return self._changed.wait_for(
        lambda: not self._waiting and not self._busy, timeout_secs
      )

  def wait_settled(self, submitted: int) -> bool:
    """Waits until the first `submitted` publications are committed.

    One that is contained in another counts as committed when that one is.
    Returns False once one of them never will be.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_settled(submitted) is not None or self._closing
      )
      return bool(self._is_settled(submitted))

  def _is_settled(self, submitted: int) -> bool | None:
    if self._lost is not None and self._lost < submitted:
      return False
    entries = [*self._waiting, *([self._busy] if self._busy else [])]
    return True if all(e.number >= submitted for e in entries) else None

  def _lose(self, entry: _Entry) -> None:
    if self._lost is None or entry.number < self._lost:
      self._lost = entry.number

  def close(self) -> None:
    """Ends the thread after the publication it is at; drops the others."""
    with self._changed:
      self._closing = True
      left, self._waiting = self._waiting, []
      for entry in left:
        self._lose(entry)
      self._changed.notify_all()
    self._thread.join()
    for entry in left:
      self._record_drop(entry.publication, "island_stopped")

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(
          lambda: self._waiting or self._errands or self._closing
        )
        if self._closing:
          return
        if self._waiting:
          self._busy = self._waiting.pop(0)
        errand = None if self._busy else self._errands.popleft()
      if errand is not None:
        self._do(errand)
      elif self._busy is not None:
        self._publish_or_drop(self._busy)
      with self._changed:
        self._busy = None
        self._changed.notify_all()

  def _do(self, errand: Callable[[], None]) -> None:
    try:
      errand()
    except (OSError, ValueError) as error:
      logger.warning("errand_failed error=%s", error)

  def _publish_or_drop(self, entry: _Entry) -> None:
    publication = entry.publication
    pause_secs, longest_secs = _RETRY_SECS
    while True:
      try:
        self._publish(publication)
        return
      except OSError as error:
        logger.warning(
          "publish_failed fragment=%d error=%s",
          publication.action.fragment,
          error,
        )
      with self._changed:
        self._changed.wait_for(
          lambda: self._closing or self._successor(publication) is not None,
          pause_secs,
        )
        successor = self._successor(publication)
        if successor is not None:
          successor.number = min(successor.number, entry.number)
          break
        if self._closing:
          self._lose(entry)
          break
      pause_secs = min(2 * pause_secs, longest_secs)
    reason = "store_unreachable" if successor else "island_stopped"
    self._record_drop(publication, reason)

  def _successor(self, publication: Publication) -> _Entry | None:
    for entry in self._waiting:
      if entry.publication.contains(publication):
        return entry
    return None

  def _publish(self, publication: Publication) -> None:
    started = time.monotonic()
    action, who = publication.action, self.identity
    encoded = encoding.encode(
      self._plan.fragments[action.fragment],
      publication.params,
      publication.anchor,
      self._codec,
    )
    record = records.Contribution(
      island=who.island,
      incarnation=who.incarnation,
      fragment=action.fragment,
      base_version=action.base_version,
      first_step=action.first_step,
      step=action.step,
      c_tokens=(action.step - action.first_step) * who.tokens_per_step,
      codec=self._codec,
      plan_hash=self._plan.hash,
      payload="",
      chunks=encoded.chunks,
      num_bytes=encoded.num_bytes,
      norms=encoded.norms,
      epoch=who.epoch,
      cut=action.cut,
    )
    record = dataclasses.replace(
      record, payload=keys.payload_prefix(record.key)
    )
    # What a replay must know of this contribution outlives this process.
    self._tape.flush()
    operations.perform(protocol.publish(record, encoded.tensors), self._execute)
    self._tape.record(
      events.PUBLISHED,
      fragment=action.fragment,
      base_version=action.base_version,
      first_step=action.first_step,
      step=action.step,
      c_tokens=record.c_tokens,
      bytes=record.num_bytes,
      codec=self._codec,
      trigger=action.trigger,
      key=record.key,
      secs=time.monotonic() - started,
    )

  def _execute(self, operation: operations.Operation) -> Any:
    if isinstance(operation, operations.WritePayload):
      return self._store.arrays.write(operation.prefix, operation.content)
    return self._store.execute(operation)

  def _record_drop(self, publication: Publication, reason: str) -> None:
    action = publication.action
    self._tape.record(
      events.PUBLISH_DROPPED,
      fragment=action.fragment,
      first_step=action.first_step,
      step=action.step,
      reason=reason,
    )
