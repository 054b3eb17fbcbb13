"""All small schedules: every placement of up to two faults in a tiny run.

Random schedules find what is likely; this finds what is near. A tiny run has
few operations, so each of them can be the one that a process dies at, fails at
or is overtaken at, and each pair of them too, up to a bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from diloco.verification import faults, schedules

_KINDS = (
  faults.KILL_BEFORE,
  faults.KILL_AFTER,
  faults.KILL_LATE,
  faults.FAIL_BEFORE,
  faults.FAIL_AFTER,
  faults.SLOW,
  faults.DUPLICATE,
  faults.STOP,
)
_SECS = 2.5  # longer than the lease lives


def tiny(seed: int, islands: int = 2) -> schedules.Schedule:
  """A run of two islands, one fragment and a few rounds."""
  return schedules.Schedule(
    seed=seed,
    rounds=3,
    islands=islands,
    fragments=1,
    sync_every=2,
    adoption="carry",
  )


def placements(
  base: schedules.Schedule, operations: int
) -> Iterator[faults.Fault]:
  """Every kind of fault at each of a role's first operations."""
  for role in base.roles[:-1]:
    for kind in _KINDS:
      lasting = kind in (faults.KILL_LATE, faults.SLOW, faults.DUPLICATE)
      secs = _SECS if lasting or kind == faults.STOP else 0.0
      for number in range(1, operations + 1):
        yield faults.Fault(kind, role, float(number), secs)


def single(seed: int, operations: int) -> Iterator[schedules.Schedule]:
  """Tiny runs with each fault alone."""
  base = tiny(seed)
  for fault in placements(base, operations):
    yield _with(base, fault)


def pairs(
  seed: int, operations: int, every: int = 1
) -> Iterator[schedules.Schedule]:
  """Tiny runs with each pair of faults, or every n-th of them."""
  base = tiny(seed)
  found = itertools.combinations(placements(base, operations), 2)
  for first, second in itertools.islice(found, 0, None, every):
    yield _with(base, first, second)


def spoiled(
  seed: int, moments: Sequence[float], lasting: Sequence[float]
) -> Iterator[schedules.Schedule]:
  """Tiny runs with cuts in which a newest version is damaged or lost.

  Args:
    seed: of the runs.
    moments: when that happens, seconds.
    lasting: how long it lasts, until the run goes back to a cut.
  """
  base = tiny(seed).replace(rounds=40, fragments=2, cuts=1.5, set_back=True)
  targets = [f"fragment-{p}" for p in range(base.fragments)]
  for kind, target, at, secs in itertools.product(
    faults.SPOILING, targets, moments, lasting
  ):
    yield _with(base, faults.Fault(kind, target, at, secs))


def _with(base: schedules.Schedule, *found: faults.Fault) -> schedules.Schedule:
  return base.replace(faults=found)
