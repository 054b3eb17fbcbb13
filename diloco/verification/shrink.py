"""From a failing schedule to a small one that fails the same way.

Faults have coordinates of their own, so they can be taken out one by one; what
remains is made shorter and plainer as long as the same rule is broken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from diloco.verification import schedules, world

Fails = Callable[[schedules.Schedule], bool]


def signature(violation: str) -> str:
  """Which rule was broken: the reason without its numbers and names."""
  return re.sub(r"[0-9][0-9.]*|\b(syncer|standby|island-#)\b", "#", violation)


def fails_like(violation: str) -> Fails:
  """Whether a schedule breaks the same rule."""
  wanted = signature(violation)

  def fails(schedule: schedules.Schedule) -> bool:
    found = world.run(schedule).violation
    return bool(found) and signature(found) == wanted

  return fails


def shrink(
  schedule: schedules.Schedule, fails: Fails, attempts: int = 400
) -> schedules.Schedule:
  """Makes a failing schedule small.

  The result fails too, and no single part of it can be left out, unless the
  attempts ran out.
  """
  improved = True
  while improved:
    improved = False
    for smaller in _smaller(schedule):
      if attempts <= 0:
        return schedule
      attempts -= 1
      if fails(smaller):
        schedule, improved = smaller, True
        break
  return schedule


def _smaller(schedule: schedules.Schedule) -> Iterator[schedules.Schedule]:
  """Schedules one step plainer, the boldest steps first."""
  faults = schedule.faults
  for size in (len(faults) // 2, len(faults) // 4, 1):
    if size < 1 or (size > 1 and len(faults) < 4):
      continue
    for first in range(0, len(faults), size):
      rest = faults[:first] + faults[first + size :]
      yield schedule.replace(faults=rest)
  if schedule.islands > 1:
    fewer = schedule.islands - 1
    quorum = min(schedule.quorum, fewer)
    yield _changed(schedule, islands=fewer, quorum=quorum)
  if schedule.standby:
    yield _changed(schedule, standby=False)
  if schedule.resumers > 1:
    yield _changed(schedule, resumers=1)
  plainer: dict[str, list[Any]] = {
    "rounds": [r for r in (1, schedule.rounds // 2) if r > 0],
    "fine": [False],
    "cuts": [0.0],
    "ends": [False],
    "fragments": [1],
    "quorum": [1],
    "adoption": ["overwrite"],
    "follow": [True],
    "wait_secs": [0.0],
    "sync_every": [schedule.fragments],
    "max_staleness": [2],
    "overlap_steps": [2],
  }
  for name, choices in plainer.items():
    for value in choices:
      now = getattr(schedule, name)
      if now != value and (value or now):
        yield _changed(schedule, **{name: value})


def _changed(
  schedule: schedules.Schedule, **changes: Any
) -> schedules.Schedule:
  """Takes out faults of roles and fragments that are gone, too."""
  made = schedule.replace(**changes)
  left = [f for f in schedule.faults if f.role in made.targets]
  return made.replace(faults=tuple(left))
