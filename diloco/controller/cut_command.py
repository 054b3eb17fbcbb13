"""`diloco cut`: asks a run's controller for a cut and waits for it."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

from diloco import errors, process
from diloco.controller import cutter
from diloco.report import liveness
from diloco.snapshots import cuts, store

_POLL_SECS = 0.1


def run(
  run_dir: pathlib.Path, told: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
  """Takes a cut of a run that is on.

  Returns:
    `cut` (its number, 0 for none), `status` ("complete" or "abandoned"),
    `reason` and `secs`.

  Raises:
    UserError: the run is not on.
  """
  if not liveness.controller_alive(run_dir):
    raise errors.UserError(
      f"diloco cut {run_dir}",
      "no controller of this run is alive, so nothing is going on in it",
      "its state is in the store already; or go on with 'diloco resume'",
    )
  started = time.monotonic()
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  before = max(snapshots.perform(cuts.numbers()), default=0)
  wish = cutter.wish_path(run_dir)
  wish.parent.mkdir(exist_ok=True)
  wish.touch()
  try:
    number, reason = _wait(snapshots, before, wish, run_dir, told)
  finally:
    wish.unlink(missing_ok=True)
  secs = time.monotonic() - started
  status = "abandoned" if reason else "complete"
  told(f"cut {number} {status}" + (f": {reason}" if reason else ""))
  return {"cut": number, "status": status, "reason": reason, "secs": secs}


def _wait(
  snapshots: store.SnapshotStore,
  before: int,
  wish: pathlib.Path,
  run_dir: pathlib.Path,
  told: Callable[[str], None],
) -> tuple[int, str]:
  """Waits for the end of the cut; gives its number and why it was given up."""
  number = 0
  while True:
    alive = liveness.controller_alive(run_dir)
    if not number and not wish.exists():
      newest = max(snapshots.perform(cuts.numbers()), default=0)
      if newest > before:
        number = newest
        told(f"cut {number} requested")
    if number:
      look = snapshots.perform(cuts.look(number))
      if look.is_complete:
        return number, ""
      if not look.is_open:
        return number, snapshots.perform(cuts.reason(number))
    if not alive:
      return number, "the run ended before it was complete"
    time.sleep(_POLL_SECS)
