"""Saving in the background: checkpoints, and an island's part of cuts.

The main thread starts copies and goes on; this thread writes them with what the
steps leave of the cores. When they count is in `diloco.islands.saving`.
"""

import functools
import logging
import pathlib
import shutil
from collections.abc import Callable

from diloco.islands import checkpoints, publisher, saving
from diloco.snapshots import checkpoint, cuts, operations, states
from diloco.tape import events

logger = logging.getLogger(__name__)

_KEPT = 2  # complete checkpoints, beside those of cuts


class Saver(saving.Saves):
  """A thread that writes what the main thread copied."""

  def __init__(self, setting: publisher.Setting):
    """Starts the thread."""
    super().__init__()
    threads = setting.threads
    self._who = setting.identity
    self._run_dir = setting.run_dir.absolute()
    self._folder = checkpoint.directory(setting.run_dir, self._who.island)
    self._copies = states.of_run(setting.run_dir, setting.snapshots)
    self._plan = setting.learner.plan
    self._tape = setting.tape
    self._threads = threads
    self._clock = threads.clock
    self._writer = checkpoints.checkpointer()
    threads.at_death(self._writer.close)
    self._saved: set[int] = set()  # serials of complete checkpoints
    self._started = 0.0
    execute = setting.snapshots.execute
    self._loop = threads.loop("saver", self.save_all(), execute)
    self._loop.start()

  def save_all(self) -> operations.Script[None]:
    """See `Saves`."""
    yield operations.Compute(self._threads.give_way)
    yield from super().save_all()

  def save(self, job: saving.Job) -> None:
    """Queues a job; never blocks."""
    with self._loop.changed:
      self.submit(job)
    self._loop.wake()

  def wait(
    self,
    serial: int,
    timeout_secs: float,
    check: Callable[[], None] = lambda: None,
  ) -> bool:
    """Waits until all jobs are done; says whether this one is complete.

    `check` raises once nobody publishes any more what a save waits for.
    """

    def done() -> bool:
      check()
      return not self._jobs and self._busy is None

    with self._loop.changed:
      self._loop.wait_for(done, timeout_secs)
      return serial in self._saved

  def may_count(self, serial: int) -> bool:
    """Whether a save is complete, or may still become so."""
    with self._loop.changed:
      under_way = [*self._jobs, *([self._busy] if self._busy else [])]
      return serial in self._saved or serial in [j.serial for j in under_way]

  def check(self) -> None:
    """Raises `WorkerError` if the thread has ended by an exception."""
    self._loop.check()

  def close(self) -> None:
    """Finishes the job under way, drops the others and ends the thread.

    The publisher must be closed before: it is what a job waits for.
    """
    with self._loop.changed:
      self._stopped = True
      self._jobs.clear()
    self._loop.wake()
    self._loop.join()
    self._writer.close()

  def write(
    self, job: saving.Job
  ) -> operations.Procedure[checkpoint.Checkpoint]:
    """See `Saves`."""
    self._started = self._clock()
    marker: checkpoint.Checkpoint = yield operations.Compute(
      lambda: checkpoints.write(
        self._writer,
        self._path(job),
        job.snapshot,
        self._plan,
        job.positions,
        island=self._who.island,
        incarnation=self._who.incarnation,
        serial=job.serial,
        epoch=self._who.epoch,
        cut=job.cut,
      )
    )
    return marker

  def _path(self, job: saving.Job) -> pathlib.Path:
    return checkpoint.path_of(
      self._folder, job.snapshot.step, self._who.incarnation, job.serial
    )

  def commit(
    self, job: saving.Job, marker: checkpoint.Checkpoint
  ) -> operations.Procedure[tuple[str, int]]:
    """See `Saves`."""
    path = self._path(job)

    def count() -> int:
      if job.part:
        checkpoint.pin(path, job.cut)
      self._tape.flush()  # a replay must know when it was copied
      checkpoint.commit(path, marker)
      return marker.crc32()

    checksum: int = yield operations.Compute(count)
    return str(path.relative_to(self._run_dir)), checksum

  def keep(self, job: saving.Job) -> operations.Procedure[None]:
    """See `Saves`."""
    copies = self._copies
    if copies is None:
      return
    path, cut = self._path(job), job.cut if job.part else 0
    try:
      yield operations.Compute(
        lambda: copies.keep(path, cut, lambda: self._stopped)
      )
    except OSError:
      if not job.part or (yield from cuts.look(cut)).is_open:
        raise
      logger.warning("state_not_copied cut=%d which has ended", cut)

  def ended(
    self, job: saving.Job, outcome: checkpoint.Checkpoint | Exception
  ) -> operations.Procedure[None]:
    """See `Saves`."""
    reason, num_bytes = "", 0
    if isinstance(outcome, checkpoint.Checkpoint):
      num_bytes = outcome.num_bytes
      self._saved.add(job.serial)
      yield from self._prune(job)
    else:
      reason = " ".join(f"{type(outcome).__name__}: {outcome}".split())[:300]
      logger.warning("save_failed step=%d error=%s", job.snapshot.step, outcome)
      path = self._path(job)
      if not (path / checkpoint.MARKER).exists():
        # On a full disk it would hold the room that everything waits for.
        rubbish = functools.partial(shutil.rmtree, path, ignore_errors=True)
        yield operations.Compute(rubbish)
    self._tape.record(
      events.CHECKPOINTED,
      step=job.snapshot.step,
      serial=job.serial,
      secs=self._clock() - self._started,
      durable=not reason,
      bytes=num_bytes,
      cut=job.cut if job.part else 0,
      reason=reason,
    )

  def _prune(self, job: saving.Job) -> operations.Procedure[None]:
    try:
      names = yield operations.Names("cuts")
      kept = [job.cut, *(int(n) for n in names if n.isdecimal())]
      yield operations.Compute(
        lambda: checkpoint.prune(self._folder, _KEPT, kept)
      )
      if copies := self._copies:
        life = self._who.incarnation
        yield operations.Compute(
          lambda: copies.prune(self._folder, _KEPT, kept, life)
        )
    except OSError as error:
      logger.warning("prune_failed error=%s", error)
