"""A role's signs of life, from threads of their own.

A long step, a compilation or a checkpoint must not read as death, so beats
do not depend on the main thread. Whether an island's gets on is told by its
*progress*, which the controller hears with every beat.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator

from diloco import errors, process, workers
from diloco.report import liveness
from diloco.snapshots import members, records, store


def born(
  run_dir: pathlib.Path,
  role: str,
  incarnation: int,
  threads: workers.Threads = workers.Threads(),
) -> records.Member:
  """What a life signs in with: who it is, and where."""
  now = threads.wall()
  nonce = liveness.name_process()
  threads.at_death(lambda: liveness.is_over(nonce))
  return records.Member(
    role,
    incarnation,
    beat=0,
    nonce=nonce,
    run=process.run_name(run_dir),
    host=os.uname().nodename,
    pid=os.getpid(),
    since_secs=now,
    told_secs=now,
  )


class Progress:
  """How far an island's main thread is, whatever it does.

  The main thread alone changes it, any thread may read it.
  """

  def __init__(self, check: Callable[[], None] = lambda: None) -> None:
    """Nothing is done yet; `check` is called with every move."""
    self._check = check
    # One object: a count told with the extra time of another is a hang.
    self._standing = 0, 0.0

  @property
  def standing(self) -> tuple[int, float]:
    """A count that moves with every step, batch, poll and program.

    And the seconds for which it may now stand still, beyond those for which it
    always may.
    """
    return self._standing

  def moved(self) -> None:
    """The main thread did something."""
    self._check()
    count, extra_secs = self._standing
    self._standing = count + 1, extra_secs

  @contextlib.contextmanager
  def may_take(self, secs: float) -> Iterator[None]:
    """Surrounds what may take so long: to compile, or to wait with an end."""
    self._standing = self._standing[0] + 1, secs
    try:
      yield
    finally:
      self._standing = self._standing[0] + 1, 0.0


class Heartbeat:
  """Writes a `Member` record every so often, and tells the controller.

  Each has a thread of its own: a store that blocks silences a role in the
  store, where nobody could hear it, and nowhere else.
  """

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    describe: Callable[[], records.Member],
    every_secs: float,
    report: Callable[[records.Member], None] | None = None,
    threads: workers.Threads = workers.Threads(),
  ):
    """Starts beating with what `describe` gives, but for beat and time."""
    self._store = snapshots
    self._describe = describe
    self._wall = threads.wall
    self._beat = 0
    self._left = False
    self._fenced: errors.FencedError | None = None
    self._pulses = [threads.pulse(self._write, every_secs, "heartbeat")]
    if report is not None:
      self._pulses.append(
        threads.pulse(lambda: report(describe()), every_secs, "report")
      )

  def nudge(self) -> None:
    """Beats now: something that others wait for has changed."""
    for pulse in self._pulses:
      pulse.nudge()

  def check(self) -> None:
    """Raises `FencedError` once another process has the role's place."""
    if self._fenced is not None:
      raise self._fenced

  def close(self) -> None:
    """Beats a last time, which says that it leaves, and ends its threads."""
    self._left = True
    for pulse in self._pulses:
      pulse.close()

  def _write(self) -> None:
    if self._fenced is not None:
      return
    self._beat += 1
    member = dataclasses.replace(
      self._describe(),
      beat=self._beat,
      told_secs=self._wall(),
      left=self._left,
    )
    try:
      self._store.perform(members.beat(member))
    except errors.FencedError as error:
      self._fenced = error
