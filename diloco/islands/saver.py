"""Saving in the background: checkpoints, and an island's part of cuts.

The main thread starts copies and goes on. This thread writes them, waits until
every publication made before the copies is committed, and only then writes the
marker that makes the checkpoint count; a publication that is lost takes the
checkpoints with it that count on it. For a cut, the record in the store follows
the marker.
"""

import dataclasses
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Sequence

import orbax.checkpoint as ocp

from diloco import crash, errors, workers
from diloco.fragments import partition
from diloco.islands import checkpoints, core, outbox, publisher
from diloco.islands import learner as learner_lib
from diloco.snapshots import checkpoint, cuts, records, store
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)

_KEPT = 2  # complete checkpoints, beside those of cuts
_RETRY_SECS = 0.5


@dataclasses.dataclass(frozen=True)
class Job:
  """What to save.

  Attributes:
    serial: which save of this life, from 1.
    snapshot: the state, in memory nobody donates.
    positions: [P], of the same moment.
    cut: the last cut the island has taken part in.
    ticket: the publications it takes for published.
    part: whether this is the island's part of that cut.
  """

  serial: int
  snapshot: learner_lib.Snapshot
  positions: Sequence[core.Position]
  cut: int
  ticket: outbox.Ticket
  part: bool = False


class Saver:
  """A thread that writes what the main thread copied."""

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    published: publisher.Publisher,
    tape: recorder.Recorder,
  ):
    """Starts the thread; `published` tells who saves, and what is committed."""
    self._who = published.identity
    self._run_dir = pathlib.Path(run_dir).absolute()
    self._folder = checkpoint.directory(run_dir, self._who.island)
    self._store = snapshots
    self._plan = plan
    self._publisher = published
    self._tape = tape
    self._writer = ocp.StandardCheckpointer()
    self._jobs: list[Job] = []
    self._busy: Job | None = None
    self._saved: set[int] = set()  # serials of complete checkpoints
    self._closing = False
    self._changed = threading.Condition()
    self._worker = workers.Worker("saver", self._run)

  def save(self, job: Job) -> None:
    """Queues a job; never blocks.

    Of the plain ones only the newest waits, so that a slow disk costs memory
    for one state at most; parts of cuts all wait.
    """
    with self._changed:
      if not job.part:
        self._jobs = [j for j in self._jobs if j.part]
      self._jobs.append(job)
      self._changed.notify_all()

  def wait(self, serial: int, timeout_secs: float) -> bool:
    """Waits until all jobs are done; says whether this one is complete."""
    with self._changed:
      self._changed.wait_for(
        lambda: not self._jobs and self._busy is None, timeout_secs
      )
      return serial in self._saved

  def may_count(self, serial: int) -> bool:
    """Whether a save is complete, or may still become so."""
    with self._changed:
      under_way = [*self._jobs, *([self._busy] if self._busy else [])]
      return serial in self._saved or serial in [j.serial for j in under_way]

  def check(self) -> None:
    """Raises `WorkerError` if the thread has ended by an exception."""
    self._worker.check()

  def close(self) -> None:
    """Finishes the job under way, drops the others and ends the thread.

    The publisher must be closed before: it is what a job waits for.
    """
    with self._changed:
      self._closing = True
      self._jobs.clear()
      self._changed.notify_all()
    self._worker.join()
    self._writer.close()

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._jobs or self._closing)
        if not self._jobs:
          return
        self._busy = self._jobs.pop(0)
        job = self._busy
      started = time.monotonic()
      failure, num_bytes = "", 0
      try:
        num_bytes = self._save(job)
      except Exception as error:  # Orbax raises many kinds; training goes on.
        failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        logger.warning("save_failed step=%d error=%s", job.snapshot.step, error)
      self._tape.record(
        events.CHECKPOINTED,
        step=job.snapshot.step,
        serial=job.serial,
        secs=time.monotonic() - started,
        durable=not failure,
        bytes=num_bytes,
        cut=job.cut if job.part else 0,
        reason=failure,
      )
      with self._changed:
        if not failure:
          self._saved.add(job.serial)
        self._busy = None
        self._changed.notify_all()

  def _save(self, job: Job) -> int:
    """Makes one checkpoint complete; returns its bytes."""
    path = checkpoint.path_of(
      self._folder, job.snapshot.step, self._who.incarnation, job.serial
    )
    marker = self._write(path, job)
    crash.point("mid_checkpoint")
    if not self._publisher.wait_settled(job.ticket):
      shutil.rmtree(path, ignore_errors=True)
      raise RuntimeError("a publication that it counts on was lost")
    if job.part:
      checkpoint.pin(path, job.cut)
    self._tape.flush()  # a replay must know when it was copied
    checkpoint.commit(path, marker)
    crash.point("after_checkpoint")
    if job.part:
      self._write_part(path, marker, job.cut)
    checkpoint.prune(self._folder, _KEPT, [*self._cuts(), job.cut])
    return marker.num_bytes

  def _write(self, path: pathlib.Path, job: Job) -> checkpoint.Checkpoint:
    arrays = checkpoints.to_host(job.snapshot, self._plan, job.positions)
    checkpoints.write(self._writer, path, arrays)
    return checkpoint.Checkpoint(
      island=self._who.island,
      incarnation=self._who.incarnation,
      serial=job.serial,
      step=job.snapshot.step,
      epoch=self._who.epoch,
      cut=job.cut,
      positions=[list(p) for p in job.positions],
      leaves=checkpoints.checksums(arrays),
      files=checkpoint.file_checksums(path),
      num_bytes=sum(a.nbytes for a in arrays.values()),
    )

  def _write_part(
    self, path: pathlib.Path, marker: checkpoint.Checkpoint, cut: int
  ) -> None:
    part = records.CutPart(
      cut=cut,
      epoch=marker.epoch,
      island=marker.island,
      incarnation=marker.incarnation,
      step=marker.step,
      checkpoint=str(path.relative_to(self._run_dir)),
      checksum=checkpoint.checksum(path),
      positions=marker.positions,
    )
    while True:
      try:
        if not self._store.perform(cuts.add_part(part)):
          logger.warning("cut_part_refused cut=%d", cut)
        return
      except (OSError, errors.CorruptSnapshotError) as error:
        logger.warning("cut_part_failed cut=%d error=%s", cut, error)
      with self._changed:
        if self._changed.wait_for(lambda: self._closing, _RETRY_SECS):
          raise RuntimeError("the island stopped before its part was written")

  def _cuts(self) -> list[int]:
    return [int(n) for n in self._store.names("cuts") if n.isdecimal()]
