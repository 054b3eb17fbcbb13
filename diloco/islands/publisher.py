"""Publication in the background: encode, write, and only then commit.

The island's main thread hands over device copies and goes on; this thread
turns them into outer gradients, writes the payload, then the commit record. A
publication that the store would not take is retried until a newer one of the
same fragment, which contains it, takes its place: what waits is bounded by one
publication per fragment.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping

import jax
import numpy as np

from diloco.fragments import codec as codec_lib
from diloco.fragments import partition
from diloco.islands import core, placement
from diloco.snapshots import arrays, records, store
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)

_RETRY_SECS = (0.05, 2.0)  # first and longest pause after a failed write


@dataclasses.dataclass(frozen=True)
class Publication:
  """What to publish, with the values it is made of."""

  action: core.Publish
  params: Mapping[str, jax.Array]  # copies nobody else donates
  anchor: placement.HostFragment


@dataclasses.dataclass(frozen=True)
class Identity:
  """Who publishes."""

  island: int
  incarnation: int
  tokens_per_step: int


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
    self._store = snapshots
    self._plan = plan
    self._identity = identity
    self._codec = codec
    self._tape = tape
    self._waiting: dict[int, Publication] = {}
    self._busy = False
    self._closing = False
    self._changed = threading.Condition()
    self._thread = threading.Thread(
      target=self._run, name="publisher", daemon=True
    )
    self._thread.start()

  def submit(self, publication: Publication) -> None:
    """Queues a publication; never blocks."""
    fragment = publication.action.fragment
    with self._changed:
      old = self._waiting.pop(fragment, None)
      self._waiting[fragment] = publication
      self._changed.notify_all()
    if old is not None:
      self._record_drop(old, "superseded")

  def flush(self, timeout_secs: float) -> bool:
    """Waits until everything submitted is committed; False on time-out."""
    with self._changed:
      return self._changed.wait_for(
        lambda: not self._waiting and not self._busy, timeout_secs
      )

  def close(self) -> None:
    """Ends the thread after the publication it is at; drops the others."""
    with self._changed:
      self._closing = True
      left = list(self._waiting.values())
      self._waiting.clear()
      self._changed.notify_all()
    self._thread.join()
    for publication in left:
      self._record_drop(publication, "island_stopped")

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting or self._closing)
        if self._closing:
          return
        fragment = next(iter(self._waiting))
        publication = self._waiting.pop(fragment)
        self._busy = True
      self._publish_or_drop(publication)
      with self._changed:
        self._busy = False
        self._changed.notify_all()

  def _publish_or_drop(self, publication: Publication) -> None:
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
          lambda: self._closing or self._is_superseded(publication), pause_secs
        )
        if self._closing or self._is_superseded(publication):
          break
      pause_secs = min(2 * pause_secs, longest_secs)
    reason = "island_stopped" if self._closing else "store_unreachable"
    self._record_drop(publication, reason)

  def _is_superseded(self, publication: Publication) -> bool:
    return publication.action.fragment in self._waiting

  def _publish(self, publication: Publication) -> None:
    started = time.monotonic()
    action, who = publication.action, self._identity
    tensors, norms = self._encode(publication)
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
      chunks=[list(t.layout.chunk_shape) for t in tensors],
      num_bytes=sum(v.nbytes for t in tensors for _, v in t.pieces),
      norms=norms,
    )
    record = dataclasses.replace(
      record, payload=store.payload_prefix(record.key)
    )
    self._store.arrays.write(record.payload, tensors)
    self._store.write(store.contribution_key(record.key), record)
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

  def _encode(
    self, publication: Publication
  ) -> tuple[list[arrays.Tensor], list[float]]:
    """Outer gradient of each tensor: anchor minus island parameters."""
    tensors, norms = [], []
    for spec in self._plan.fragments[publication.action.fragment]:
      held = placement.to_host(spec.name, publication.params[spec.name])
      anchor = publication.anchor[spec.name]
      pieces, square = [], 0.0
      for (box, values), (_, base) in zip(
        held.pieces, anchor.pieces, strict=True
      ):
        outer_grad = np.subtract(base, values)
        square += float(np.vdot(outer_grad, outer_grad))
        pieces.append((box, codec_lib.encode(outer_grad, self._codec)))
      layout = arrays.Layout.of(
        spec.shape, codec_lib.DTYPES[self._codec], held.shard_shape
      )
      tensors.append(arrays.Tensor(spec.name, layout, pieces))
      norms.append(square**0.5)
    return tensors, norms

  def _record_drop(self, publication: Publication, reason: str) -> None:
    action = publication.action
    self._tape.record(
      events.PUBLISH_DROPPED,
      fragment=action.fragment,
      first_step=action.first_step,
      step=action.step,
      reason=reason,
    )
