"""A campaign's directory: one campaign at a time, and nothing left in it.

A campaign that is told to end cleans up by itself. One that was killed leaves
the processes of its run and the small disk below its store, which would keep
anybody from deleting the directory; whoever names it next clears it.
"""

import contextlib
import logging
import pathlib
import signal
from collections.abc import Iterator

from diloco import errors, process
from diloco.chaos import fleet, store_faults

logger = logging.getLogger(__name__)

_LOCK = "campaign.lock"


@contextlib.contextmanager
def own(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps other campaigns out of a directory, and clears it in the end."""
  workdir.mkdir(parents=True, exist_ok=True)
  with _locked(workdir):
    try:
      yield
    finally:
      _clear(workdir)


def clear_dead(workdir: pathlib.Path) -> None:
  """Clears what a killed campaign left in its directory; its files stay.

  Does nothing to a directory that was never a campaign's.

  Raises:
    UserError: a campaign is at work there.
  """
  if (workdir / _LOCK).is_file():
    with _locked(workdir):
      _clear(workdir)


def _locked(workdir: pathlib.Path) -> contextlib.AbstractContextManager[None]:
  busy = errors.UserError(
    f"--workdir={workdir}",
    "a campaign is at work in it",
    "name another directory, or stop that campaign first",
  )
  return process.sole(workdir / _LOCK, busy)


def _clear(workdir: pathlib.Path) -> None:
  for run_dir in sorted(workdir.glob("run-*/run")):
    fleet.end_processes(run_dir)
  for path in store_faults.mounted_below(workdir):
    try:
      store_faults.keep_and_unmount(path)
    except OSError as error:
      logger.warning("disk_not_kept path=%s error=%s", path, error)


def interruptible() -> contextlib.AbstractContextManager[None]:
  """Makes the first signal to stop a KeyboardInterrupt, and ignores others.

  So what is cleaned up on the way out is cleaned up to the end.
  """
  told = False

  def stop(number: int) -> None:
    nonlocal told
    if told:
      return
    told = True
    logger.warning("stopping signal=%s", signal.Signals(number).name)
    raise KeyboardInterrupt

  return process.hearing(stop)
