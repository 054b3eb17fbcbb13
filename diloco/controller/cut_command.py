"""`diloco cut`: asks a run's controller for a cut and waits for it."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

from diloco import errors, process
from diloco.controller import cutter
from diloco.report import liveness
from diloco.snapshots import cuts, keys, operations, store

_POLL_SECS = 0.1


def run(
  run_dir: pathlib.Path,
  patience_secs: float,
  told: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
  """Takes a cut of a run that is on.

  The store is asked again while it fails, for `patience_secs`; `told` hears how
  far the cut is.

  Returns:
    `cut` (its number, 0 for none), `status` ("complete" or "abandoned"),
    `reason` and `secs`.

  Raises:
    UserError: the run is not on, or the store does not tell of its cuts.
  """
  if not liveness.controller_alive(run_dir):
    raise errors.UserError(
      f"diloco cut {run_dir}",
      "no controller of this run is alive, so nothing is going on in it",
      "its state is in the store already; or go on with 'diloco resume'",
    )
  started = time.monotonic()
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  ask = functools.partial(_ask, run_dir, snapshots, patience_secs)
  before = max(ask(cuts.numbers), default=0)
  wish = cutter.wish_path(run_dir)
  wish.parent.mkdir(exist_ok=True)
  wish.touch()
  try:
    number, reason = _wait(ask, before, wish, run_dir, told)
  finally:
    wish.unlink(missing_ok=True)
  secs = time.monotonic() - started
  status = "abandoned" if reason else "complete"
  told(f"cut {number} {status}" + (f": {reason}" if reason else ""))
  return {"cut": number, "status": status, "reason": reason, "secs": secs}


def _ask(
  run_dir: pathlib.Path,
  snapshots: store.SnapshotStore,
  patience_secs: float,
  question: Callable[..., operations.Procedure[Any]],
  *on: int,
) -> Any:
  """What a procedure finds in a store that is asked again while it fails."""
  deadline = time.monotonic() + patience_secs
  while True:
    try:
      return snapshots.perform(question(*on))
    except operations.FAILURES as error:
      if time.monotonic() >= deadline:
        raise errors.UserError(
          f"diloco cut {run_dir}",
          f"for {patience_secs:.0f} s nothing could be learnt of its cuts:"
          f" {errors.of_store(error)}",
          "see to the store, then ask again; a cut that was begun may yet be"
          " completed",
        ) from error
    time.sleep(_POLL_SECS)


def _wait(
  ask: Callable[..., Any],
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
      newest = max(ask(cuts.numbers), default=0)
      if newest > before:
        number = newest
        told(f"cut {number} requested")
    if number:
      look: cuts.Look = ask(cuts.look, number)
      if look.is_complete:
        return number, ""
      if keys.ABANDONED in look.names:
        return number, ask(cuts.reason, number)
      if not look.is_open:  # two later ones were complete meanwhile
        line = cutter.end_line(run_dir, number)
        lost = {"reason": "no record of it was left"}
        return number, (lost if line is None else line).get("reason", "")
    if not alive:
      return number, "the run ended before it was complete"
    time.sleep(_POLL_SECS)
