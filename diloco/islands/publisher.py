"""Publication in the background: measure, write, and only then commit.

The island's main thread hands over outer gradients that are being computed and
goes on; this thread writes them as the payload, then the commit record. A
publication that the store would not take is retried until a newer one of the
same fragment, which contains it, takes its place (`diloco.islands.outbox`).
"""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from diloco import config as config_lib
from diloco import heartbeat, timing, workers
from diloco.islands import core, encoding, outbox, protocol
from diloco.islands import learner as learner_lib
from diloco.snapshots import keys, locations, operations, records, store
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Identity:
  """Who publishes, and in which timeline."""

  island: int
  incarnation: int
  tokens_per_step: int
  epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Setting:
  """What one incarnation of an island works with."""

  run_dir: pathlib.Path
  identity: Identity
  config: config_lib.RunConfig
  snapshots: store.SnapshotStore
  learner: learner_lib.Learner
  tape: recorder.Recorder
  progress: heartbeat.Progress
  times: timing.Timing
  threads: workers.Threads


class Publisher:
  """A thread that publishes what the main thread submits."""

  def __init__(self, setting: Setting):
    """Starts the thread."""
    plan, swap = setting.learner.plan, setting.learner.swap
    self._who = setting.identity
    self._store = setting.snapshots
    self._plan_hash = plan.hash
    self._encoder = encoding.Encoder(plan, swap.codec, swap.shardings)
    self._tape = setting.tape
    self._clock = setting.threads.clock
    self._on_disk = locations.directory(self._store.url) is not None
    self._whole = ""  # payload that was written last
    self._outbox = outbox.Outbox()
    self._loop = setting.threads.loop(
      "publisher",
      self._outbox.send_all(
        self._publish, lambda given_up: self._record([given_up]), _log_failure
      ),
      self._execute,
    )
    self._changed = self._loop.changed
    self._loop.start()

  def submit(
    self, action: core.Publish, outer_grads: Mapping[str, jax.Array]
  ) -> None:
    """Queues what is as encoded, in host memory; never blocks."""
    with self._changed:
      dropped = self._outbox.submit(action, outer_grads)
    self._loop.wake()
    self._record(dropped)

  def ticket(self, positions: Sequence[core.Position]) -> outbox.Ticket:
    """What a state of these positions, copied now, takes for published."""
    with self._changed:
      return self._outbox.ticket(positions)

  def flush(self, timeout_secs: float) -> bool:
    """Waits until everything submitted is committed; False on time-out."""
    self.check()
    return self._loop.wait_for(
      lambda: not self._outbox.waiting and not self._outbox.busy, timeout_secs
    )

  def check(self) -> None:
    """Raises `WorkerError` if the thread has ended by an exception."""
    self._loop.check()

  def close(self) -> None:
    """Ends the thread after the publication it is at; drops the others."""
    with self._changed:
      self._outbox.stop()
    self._loop.close()
    with self._changed:
      dropped = self._outbox.close()
      self._changed.notify_all()
    self._record(dropped)

  def _publish(
    self, action: core.Publish, outer_grads: Mapping[str, jax.Array]
  ) -> operations.Procedure[None]:
    started = self._clock()
    who = self._who
    encoded: encoding.Encoded = yield operations.Compute(
      lambda: self._encoder.encode(action.fragment, outer_grads)
    )
    # What a replay must know of this contribution outlives this process.
    yield operations.Compute(self._tape.flush)
    record = records.Contribution(
      island=who.island,
      incarnation=who.incarnation,
      fragment=action.fragment,
      base_version=action.base_version,
      first_step=action.first_step,
      step=action.step,
      c_tokens=(action.step - action.first_step) * who.tokens_per_step,
      codec=str(self._encoder.codec),
      plan_hash=self._plan_hash,
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
    yield from protocol.publish(record, encoded.tensors)
    self._tape.record(
      events.PUBLISHED,
      fragment=action.fragment,
      base_version=action.base_version,
      first_step=action.first_step,
      step=action.step,
      c_tokens=record.c_tokens,
      bytes=record.num_bytes,
      codec=record.codec,
      trigger=action.trigger,
      key=record.key,
      secs=self._clock() - started,
    )

  def _execute(self, operation: operations.Operation) -> Any:
    if isinstance(operation, operations.WritePayload):
      return self._write(operation)
    return self._store.execute(operation)

  def _write(self, payload: operations.WritePayload) -> None:
    """Writes a payload; one that fails gives a full disk its room back.

    Not so if it was whole before: a record that seemed to fail may name it.
    """
    try:
      self._store.arrays.write(payload.prefix, payload.content)
    except OSError:
      if self._on_disk and payload.prefix != self._whole:
        self._store.delete_tree(payload.prefix)
      raise
    self._whole = payload.prefix

  def _record(self, dropped: Sequence[outbox.Dropped]) -> None:
    for action, reason in dropped:
      self._tape.record(
        events.PUBLISH_DROPPED,
        fragment=action.fragment,
        first_step=action.first_step,
        step=action.step,
        reason=reason,
      )


def _log_failure(action: core.Publish, error: Exception) -> None:
  logger.warning("publish_failed fragment=%d error=%r", action.fragment, error)
