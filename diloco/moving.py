"""A run that goes on in another directory, from what its store has of it.

Its machine may be gone, and with it the last seconds of its tapes. What these
do not tell must not have happened: then the run is set back to the newest cut
that they tell of, of which they hold all (`logbook.Keeper.push`). That begins a
new epoch, in which nothing counts that an old role may still publish.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import time

from diloco import config as config_lib
from diloco import errors, logbook, process, timing
from diloco.controller import move as move_lib
from diloco.controller import restorer, roles, tenure
from diloco.fragments import partition
from diloco.report import liveness
from diloco.snapshots import operations, store
from diloco.tape import events, evidence, fates, history, reader, recorder

_CLAIM = ".moving"  # in a directory that a run is being brought to


@dataclasses.dataclass(frozen=True)
class Found:
  """A run in its store.

  Attributes:
    url: of the store.
    config: the run's, with that store.
    plan: of its fragments.
    run: what its members go by; see `process.run_name`.
  """

  url: str
  config: config_lib.RunConfig
  plan: partition.FragmentPlan
  run: str

  @property
  def what(self) -> str:
    """The run, for a user."""
    return f"the run at {self.url}"


def look(url: str, run_dir: pathlib.Path, task: str | None) -> Found:
  """Finds a run that can go on in a new directory; touches neither.

  Args:
    url: of its store.
    run_dir: the new directory.
    task: that the user trusts, if any; see `process.check_task`.

  Raises:
    UserError: there is no such run, or it cannot go on there.
  """
  if (run_dir / _CLAIM).exists():
    raise errors.UserError(
      f"--workdir={run_dir}",
      f"a run is being brought there, or that was ended in its midst: {_CLAIM}"
      " in it tells",
      "name another; or delete it, if nobody is at it any more",
    )
  if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
    raise errors.UserError(
      f"--workdir={run_dir}",
      "it is not empty, and a run from elsewhere goes on in a new directory",
      "name another; a run that is in it already goes on with 'diloco resume"
      f" {run_dir}'",
    )
  copy = logbook.fetch(url)
  config = process.read_config(copy)
  process.check_task(config, copy, task)
  found = Found(
    url,
    dataclasses.replace(config, store=url),
    _plan(url),
    process.run_name(copy),
  )
  if config.engine == "virtual":
    raise errors.UserError(
      found.what,
      "it was in virtual time, and such a run cannot go on",
      "train from its configuration: it is the same again",
    )
  return found


def _plan(url: str) -> partition.FragmentPlan:
  plan = store.SnapshotStore(url).read_plan()
  if plan is None:
    raise errors.UserError(
      f"the run at {url}",
      "its files are there, but no fragment plan: its state is lost",
      "put the store back, or start anew",
    )
  return plan


def bring(found: Found, run_dir: pathlib.Path, cut: str | None) -> str | None:
  """Makes the run one of this machine, in a directory of its own.

  Args:
    found: the run.
    run_dir: the directory, new or empty.
    cut: that the user wants to go back to, "last" or a number.

  Returns:
    The cut that is still to be gone back to, as `cut`.

  Raises:
    UserError: the run is alive, or cannot go on from what its store has.
  """
  snapshots = store.SnapshotStore(found.url)
  process.unwind_at_interrupts()
  with process.private_files(), contextlib.ExitStack() as stack:
    move = _Move(found, run_dir, cut, snapshots, stack)
    try:
      set_back = operations.perform(
        move.moving(), functools.partial(tenure.execute, snapshots)
      )
      process.write_config(found.config, run_dir, move.run_id, found.run)
      (run_dir / _CLAIM).unlink()
      move.settle()
    except BaseException:
      # It may be somebody else's, or by now the one place that the run is in.
      if move.claimed and not move.settled:
        shutil.rmtree(run_dir, ignore_errors=True)
      raise
  return None if set_back else cut


class _Move(move_lib.Move):
  """See base; to a directory of this machine."""

  def __init__(
    self,
    found: Found,
    run_dir: pathlib.Path,
    cut: str | None,
    snapshots: store.SnapshotStore,
    stack: contextlib.ExitStack,
  ):
    """The lease is held until `stack` is left."""
    self.what, self.run_name = found.what, found.run
    self.clock, self.say = time.monotonic, tenure.say
    self.each = snapshots.each
    self.times = timing.read(snapshots, found.config.controller)
    self.owner = liveness.name_process()
    self.watch = tenure.Watch(self.times.control_ttl_secs, self.check)
    self.before = ""
    self.claimed = False  # whether the directory is this move's own
    self.run_id = process.draw_run_id()
    self._found = found
    self._run_dir = run_dir
    self._cut = cut
    self._snapshots = snapshots
    self._stack = stack
    self._mine: tenure.Tenure | None = None
    self._restorer: restorer.Restorer | None = None

  def told_cuts(self) -> list[int] | None:
    """See base."""
    if not self.claimed:
      _claim(self._run_dir)
      self.claimed = True
    _copy_files(self._found.url, self._run_dir)
    if _is_whole(self._run_dir, logbook.seen(self._snapshots)[1]):
      return None
    told = {
      line["cut"]
      for line in reader.stream(self._run_dir, only_role="controller").events
      if line["event"] == events.CUT_COMPLETED
    }
    if self._cut not in (None, restorer.LAST):
      told &= {int(str(self._cut))}
    if not told:
      raise self.torn("they tell of no such cut")
    return sorted(told, reverse=True)

  def take(self) -> operations.Script[int]:
    """See base."""
    yield from ()
    mine = tenure.take(
      *(self._snapshots, self.run_id, self.times.control_ttl_secs),
      *(self.what, self.watch),
      owner=self.owner,
    )
    mine.home = self.before  # where it stays, however this fails
    self._mine = self._stack.enter_context(mine)
    return self._mine.token

  @property
  def settled(self) -> bool:
    """Whether the run is in its new directory."""
    return self._mine is not None and self._mine.home == self.run_id

  def settle(self) -> None:
    """The run is in its new directory from now on."""
    assert self._mine is not None
    self._mine.home = self.run_id

  def go_back(self, cut: int, token: int) -> operations.Script[str]:
    """See base."""
    yield from ()
    self._restorer = self._restorer or restorer.Restorer(
      self._run_dir,
      self._found.config,
      self._found.plan,
      list,  # no role of it can be one of this directory
      roles.draw_incarnation(self._run_dir, "controller"),
      known=_unresolved(self._run_dir),
      token=token,
    )
    try:
      self._restorer.prepare(str(cut))
    except errors.UserError as error:
      return error.why
    return ""

  def torn(self, why: str) -> errors.UserError:
    """See base."""
    return errors.UserError(
      self.what,
      "it did not end in order, so the last seconds of its tapes are lost with"
      f" its directory, and it cannot be set back to before that: {why}",
      "go on with it where it was begun, or start anew; 'diloco export' takes"
      " its parameters",
    )


def _claim(run_dir: pathlib.Path) -> None:
  """Makes a new or empty directory one's own, of all who want it."""
  run_dir.mkdir(parents=True, exist_ok=True)
  claim = run_dir / _CLAIM
  with contextlib.suppress(FileExistsError):
    claim.touch(exist_ok=False)
    if os.listdir(run_dir) == [_CLAIM]:
      return
    claim.unlink()
  raise errors.UserError(
    f"--workdir={run_dir}",
    "somebody else has brought a run there meanwhile",
    "name another directory",
  )


def _copy_files(url: str, run_dir: pathlib.Path) -> None:
  copy = logbook.fetch(url)  # with what its end has brought
  for folder in (recorder.TAPE_DIR, recorder.METRICS_DIR):
    (run_dir / folder).mkdir(parents=True, exist_ok=True)
    for path in (copy / folder).glob("*.jsonl"):
      shutil.copyfile(path, run_dir / folder / path.name)


def _is_whole(run_dir: pathlib.Path, unended: int) -> bool:
  """Whether the tapes hold all: the last session ended in order.

  One may have begun and died before it kept a line; see `logbook.seen`.
  """
  lives, ended = {0, unended}, set()
  for line in reader.stream(run_dir, only_role="controller").events:
    lives.add(line["incarnation"])
    if line["event"] == events.RUN_FINISHED:
      ended.add(line["incarnation"])
  return max(lives) in ended


def _unresolved(run_dir: pathlib.Path) -> dict[str, evidence.Contribution]:
  """What the tapes say was published, and not what became of it."""
  told = history.read(reader.stream(run_dir))
  return {
    str(item.key): item
    for facts in told.fragments.values()
    for item in facts.published.values()
    if item.key not in fates.resolved(facts)
  }
