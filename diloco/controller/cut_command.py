"""`diloco cut`: asks a run's controller for a cut and waits for it."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from diloco import errors, process
from diloco.controller import cutter
from diloco.report import liveness
from diloco.snapshots import cuts, keys, operations, store

T = TypeVar("T")

_POLL_SECS = 0.1


def run(
  run_dir: pathlib.Path,
  patience_secs: float,
  told: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
  """Takes a cut of a run that is on.

  Args:
    run_dir: directory of the run.
    patience_secs: for so long the store is asked again while it fails.
    told: hears how far it is.

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
  asked = _Asked(run_dir, patience_secs)
  before = max(asked.of(cuts.numbers), default=0)
  wish = cutter.wish_path(run_dir)
  wish.parent.mkdir(exist_ok=True)
  wish.touch()
  try:
    number, reason = _wait(asked, before, wish, run_dir, told)
  finally:
    wish.unlink(missing_ok=True)
  secs = time.monotonic() - started
  status = "abandoned" if reason else "complete"
  told(f"cut {number} {status}" + (f": {reason}" if reason else ""))
  return {"cut": number, "status": status, "reason": reason, "secs": secs}


class _Asked:
  """The run's store, asked again while it fails."""

  def __init__(self, run_dir: pathlib.Path, patience_secs: float):
    """Args: whose, and for how long."""
    self._what = f"diloco cut {run_dir}"
    self._patience_secs = patience_secs
    self._store = store.SnapshotStore(process.store_url(run_dir))

  def of(self, question: Callable[..., operations.Procedure[T]], *on: int) -> T:
    """What a procedure finds, sooner or later.

    Raises:
      UserError: it has found nothing for `patience_secs`.
    """
    deadline = time.monotonic() + self._patience_secs
    while True:
      try:
        return self._store.perform(question(*on))
      except operations.FAILURES as error:
        if time.monotonic() >= deadline:
          raise errors.UserError(
            self._what,
            f"for {self._patience_secs:.0f} s nothing could be learnt of its"
            f" cuts: {errors.of_store(error)}",
            "see to the store, then ask again; a cut that was begun may yet"
            " be completed",
          ) from error
      time.sleep(_POLL_SECS)


def _wait(
  asked: _Asked,
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
      newest = max(asked.of(cuts.numbers), default=0)
      if newest > before:
        number = newest
        told(f"cut {number} requested")
    if number:
      look = asked.of(cuts.look, number)
      if look.is_complete:
        return number, ""
      if keys.ABANDONED in look.names:
        return number, asked.of(cuts.reason, number)
      if not look.is_open:  # two later ones were complete meanwhile
        line = cutter.end_line(run_dir, number)
        lost = {"reason": "no record of it was left"}
        return number, (lost if line is None else line).get("reason", "")
    if not alive:
      return number, "the run ended before it was complete"
    time.sleep(_POLL_SECS)
