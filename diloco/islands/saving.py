"""When a saved state may count, and what is done around it.

The script of the thread that saves, the same live and simulated. A state is
written, waits until every publication made before it is committed, and only
then gets the marker that makes it count; a publication that is lost takes the
states with it that count on it. A store that lies elsewhere gets a copy then.
For a cut, the record in the store follows the marker and the copy.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from diloco import errors, workers
from diloco.islands import core, outbox
from diloco.snapshots import checkpoint, cuts, operations, records

logger = logging.getLogger(__name__)

_RETRY_SECS = (0.5, 0.5)  # first and longest pause after a failed write


@dataclasses.dataclass(frozen=True)
class Job:
  """What to save."""

  serial: int  # which save of this life, from 1
  snapshot: Any  # in memory nobody donates
  positions: Sequence[core.Position]  # [P], of the same moment
  cut: int  # the last one the island has taken part in
  ticket: outbox.Ticket
  part: bool = False  # whether this is the island's part of that cut


class LostError(RuntimeError):
  """A state counts on what was never published."""


class Saves(abc.ABC):
  """The saves of one life of an island. Not thread-safe."""

  poll_secs = 0.05  # between two looks whether all is published

  def __init__(self) -> None:
    """Nothing is to be saved yet."""
    self._jobs: list[Job] = []
    self._busy: Job | None = None
    self._stopped = False

  @abc.abstractmethod
  def write(self, job: Job) -> operations.Script[checkpoint.Checkpoint]:
    """Writes a state; gives the marker that would make it count."""

  @abc.abstractmethod
  def commit(
    self, job: Job, marker: checkpoint.Checkpoint
  ) -> operations.Procedure[tuple[str, int]]:
    """Makes a state count; gives what a cut's part calls it by: see there."""

  def keep(self, job: Job) -> operations.Procedure[None]:
    """Copies a state that counts to where other machines look, if it is not."""
    yield from ()

  @abc.abstractmethod
  def ended(
    self, job: Job, outcome: checkpoint.Checkpoint | Exception
  ) -> operations.Procedure[None]:
    """A state is complete, or is given up for a reason."""

  def submit(self, job: Job) -> None:
    """Queues a job; the script is to be woken.

    Of the plain ones only the newest waits, so that a slow disk costs memory
    for one state at most; parts of cuts all wait.
    """
    if not job.part:
      self._jobs = [j for j in self._jobs if j.part]
    self._jobs.append(job)

  def save_all(self) -> operations.Script[None]:
    """Saves whatever comes, one after the other, until it is stopped."""
    while self._jobs or not self._stopped:
      if not self._jobs:
        yield None
        continue
      job = self._busy = self._jobs.pop(0)
      outcome: checkpoint.Checkpoint | Exception
      try:
        outcome = yield from self._save(job)
      except Exception as error:  # Orbax raises many kinds; training goes on.
        outcome = error
      yield from self.ended(job, outcome)
      self._busy = None
      del job, outcome  # a state is large, and the next one may be far off

  def _save(self, job: Job) -> operations.Script[checkpoint.Checkpoint]:
    marker = yield from self.write(job)
    yield operations.Point("mid_checkpoint")
    while (settled := outbox.settled(job.ticket)) is None:
      yield self.poll_secs
    if not settled:
      raise LostError("a publication that it counts on was lost")
    name, checksum = yield from self.commit(job, marker)
    yield operations.Point("after_checkpoint")
    if job.part:
      told = (marker.island, marker.incarnation, marker.step, name, checksum)
      yield from self._add_part(
        job, records.CutPart(job.cut, marker.epoch, *told, marker.positions)
      )
      return marker
    try:
      yield from self.keep(job)
    except operations.FAILURES as error:  # the next one will be there
      logger.warning("state_not_copied step=%d error=%s", marker.step, error)
    return marker

  def _add_part(
    self, job: Job, part: records.CutPart
  ) -> operations.Script[None]:
    retry = workers.Retry(_RETRY_SECS)
    while not self._stopped:
      try:
        yield from self.keep(job)
        yield from cuts.add_part(part)
        return
      except errors.CorruptSnapshotError as error:
        # It stays so: the cut is given up, and the next ones wait for this.
        logger.warning("no_part cut=%d error=%s", part.cut, error)
        return
      except Exception as error:
        pause_secs = retry.failed(error)
      yield operations.Nap(pause_secs)
    raise RuntimeError("the island stopped before its part was written")
