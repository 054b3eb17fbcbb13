"""Which roles a run has, as its store tells: in which life, where, since when.

Whoever reaches the store can ask, on any machine and without the run directory.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from diloco import errors, process
from diloco.report import figures, liveness
from diloco.snapshots import members, records, store

logger = logging.getLogger(__name__)

ALIVE = "alive"


def state(member: records.Member, now: float) -> str:
  """Whether a role is `ALIVE` at wall time `now`, "dead", "silent" or "left".

  That a process of this machine is dead is known. Any other role is silent once
  it has not been heard of for a minute: its process may be stopped, have ended
  elsewhere, or go on without it.
  """
  if member.left:
    return "left"
  if liveness.lives(member.nonce) is False:
    return "dead"
  unseen = abs(now - member.told_secs) >= liveness.UNSEEN_SECS
  return "silent" if unseen else ALIVE


def look(run_dir: str | os.PathLike[str]) -> dict[str, dict[str, Any]] | None:
  """The newest life of every role of a run, syncers first, as JSON.

  None if the store cannot be read, and a line in the log. A run in virtual time
  has none: its roles share a process, and its clock is not ours.

  Raises:
    UserError: roles of another run have signed in there.
  """
  run = process.run_name(run_dir)
  try:
    snapshots = store.SnapshotStore(process.store_url(run_dir))
    found = snapshots.perform(members.of_run(run, snapshots.each))
  except OSError as error:
    logger.warning("roles_unknown error=%s", errors.of_store(error))
    return None
  virtual = process.read_config(run_dir).engine == "virtual"
  return {} if virtual else of(found)


def of(found: Iterable[records.Member]) -> dict[str, dict[str, Any]]:
  """Members by role, syncers first, as JSON."""
  now = time.time()
  found = sorted(found, key=lambda one: (one.role == "evaluator", one.island))
  return {
    member.role: {
      "state": state(member, now),
      "life": member.incarnation,
      "host": member.host,
      "pid": member.pid,
      "age_secs": now - member.since_secs,
      "heard_secs": now - member.told_secs,
    }
    for member in found
  }


def show(found: Mapping[str, Mapping[str, Any]] | None) -> str:
  """Roles as text, one a line; empty if there are none or nobody can tell."""
  if not found:
    return ""
  heads = ("role", "life", "state", "on", "process", "since", "heard of")
  rows = [heads, *(_row(role, one) for role, one in found.items())]
  return figures.columns(rows, right=(1, 4, 5, 6))


def _row(role: str, one: Mapping[str, Any]) -> tuple[str, ...]:
  facts = (one["life"], one["state"], one["host"], one["pid"])
  ages = (max(one[name], 0.0) for name in ("age_secs", "heard_secs"))
  return (role, *map(str, facts), *(f"{figures.secs(age)} ago" for age in ages))
