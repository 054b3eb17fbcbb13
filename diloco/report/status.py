"""The state of a run right now, as plain values."""

import os
import time
from typing import Any

from diloco import typed
from diloco.report import figures, liveness, sessions, totals
from diloco.report import view as view_lib

_RECENT_SECS = 10.0
_SILENT_SECS = 10.0
_SILENT_GAPS = 5.0


def status(
  run_dir: str | os.PathLike[str], reading: totals.Reading | None = None
) -> dict[str, Any]:
  """Returns the state of a run, live or dead.

  Args:
    run_dir: directory of the run.
    reading: an earlier look's, to read on from.

  Returns:
    Plain JSON values. `alive` tells whether its controller is; `status` is
    "crashed" if it is not and left no word of an end.

  Raises:
    UserError: there is no such directory.
  """
  alive = liveness.controller_alive(run_dir)
  return status_of(totals.catch_up(run_dir, reading).view, alive, time.time())


def status_of(
  view: view_lib.RunView, alive: bool, now: float
) -> dict[str, Any]:
  """As `status`, of a run that was read before, at wall time `now`.

  `alive` tells whether its controller is.
  """
  session = view.sessions.last
  if session is not None and view.config.get("engine") == "virtual":
    now = session.end  # virtual time is as late as its newest line
  state = view.status
  if state == "running" and not alive:
    state = sessions.CRASHED
  islands = {m: _island(view, m, state, now) for m in view.islands}
  budget = view.total_tokens
  speed = sum(one["tokens_per_sec"] for one in islands.values())
  # By steps, as the controller counts: what is done anew counts once.
  done = sum(
    one.step * one.tokens // one.num_steps
    for one in view.islands.values()
    if one.num_steps
  )
  left = max(budget - done, 0) / speed if budget and speed else None
  facts = {
    "status": state,
    "alive": alive,
    "method": view.method,
    "wall_secs": _wall_secs(view, state, now),
    "secs_left": left if state == "running" else None,
    "tokens": view.tokens,
    "tokens_budget": budget or None,
    "progress": done / budget if budget else None,
    "tokens_per_sec": speed,
    "merges": view.merges.count,
    "contributors_mean": _islands_a_merge(view, state),
    "global_versions": sum(view.versions.values()),
    "eval_loss": view.eval_loss,
    "eval_bits_per_token": figures.bits(view.eval_loss),
    "token_unit": view.token_unit,
    "bytes_per_sec": bytes_per_sec(view, now),
    "bytes_published": view.bytes_published,
    "bytes_adopted": view.bytes_adopted,
    "faults": len(view.faults),
    "deaths": len(view.deaths),
    "islands": {str(m): one for m, one in islands.items()},
    "takeovers": view.takeovers,
    "quarantines": view.quarantines.total(),
    "rollbacks": len(view.restores),
    "last_cut": view.last_cut,
    "last_cut_age_secs": now - view.last_cut_secs if view.cuts else None,
    "damaged": [view.damaged[p] for p in sorted(view.damaged)],
    "problems": view.problems,
  }
  return typed.finite(facts)


def _islands_a_merge(view: view_lib.RunView, state: str) -> float | None:
  """Of late while the run is on; the last merges of its end are smaller."""
  recent = view.merges.recent
  if state != "running" or not recent:
    return view.merges.islands_mean
  return sum(recent) / len(recent)


def _wall_secs(view: view_lib.RunView, state: str, now: float) -> float:
  """Time the run was on; goes on while it is, even if nothing is recorded."""
  session = view.sessions.last
  if state != "running" or session is None:
    return view.wall_secs
  return view.wall_secs + max(now - session.end, 0.0)


def _island(
  view: view_lib.RunView, number: int, run_state: str, now: float
) -> dict[str, Any]:
  island = view.islands[number]
  state: str = view.state(number)
  if run_state in (sessions.CRASHED, "failed", "killed"):
    state = island.state
    busy = state in ("starting", "training", "restarting")
    if busy and _silent(view, number, now):
      state = "dead"
  return {
    "state": state,
    "kind": island.kind,
    "relative_speed": island.relative_speed,
    "paced": island.paced,
    "step": island.step,
    "tokens": island.tokens,
    "tokens_per_sec": island.tokens_per_sec(now),
    "loss": island.loss,
    "metrics": island.metrics,
    "staleness_mean": island.staleness_mean,
    "restarts": island.restarts,
    "quarantines": view.quarantines[number],
    # One that has crashed may have left its syncer at work.
    "suspended_secs": view.suspended_secs(number, now)
    if run_state in ("running", "empty", sessions.CRASHED)
    else 0.0,
  }


def _silent(view: view_lib.RunView, number: int, now: float) -> bool:
  """Whether an island, which may outlive its controller, has stopped too."""
  island = view.islands[number]
  if not island.num_steps:
    return True
  median = island.percentile("gap_secs", 50) or 0.0
  silence = now - island.last_wall_secs
  return silence > max(_SILENT_SECS, _SILENT_GAPS * median)


def bytes_per_sec(view: view_lib.RunView, now: float) -> float:
  """Returns the bytes published and adopted lately, per second."""
  total = 0.0
  for island in view.islands.values():
    for moments in (island.published, island.adopted):
      for wall_secs, num_bytes in reversed(moments.recent):
        if wall_secs < now - _RECENT_SECS:
          break
        total += num_bytes
  return total / _RECENT_SECS
