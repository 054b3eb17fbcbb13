"""Takeover, rejoin and gaps, on a record written by hand."""

import pytest

from diloco.chaos import measures
from diloco.tape import reader


def _lease(wall_secs, role):
  return {"event": "lease_acquired", "role": role, "wall_secs": wall_secs}


def _steps(walls, incarnation=1, gap_secs=1.0):
  return [
    {"incarnation": incarnation, "wall_secs": wall, "gap_secs": gap_secs}
    for wall in walls
  ]


def _fault(kind, roles, wall_secs=10.0, recovered_secs=14.0, **fields):
  return {
    "serial": 3,
    "kind": kind,
    "roles": roles,
    "outcome": "done",
    "wall_secs": wall_secs,
    "recovered_secs": recovered_secs,
    **fields,
  }


def _measure(fault, events=(), **islands):
  metrics = {int(name[1:]): lines for name, lines in islands.items()}
  return measures.measure(reader.Record(list(events), metrics, []), [fault])


LEASES = [_lease(1.0, "syncer"), _lease(11.25, "standby")]


@pytest.mark.parametrize(
  ("fault", "expected"),
  [
    (_fault("sigkill", ["syncer"]), [1.25]),
    (_fault("sigkill", ["standby"]), []),  # it did not lead
    (_fault("sigstop", ["syncer"]), []),
    (_fault("everything", ["controller", "syncer"]), []),
    (_fault("sigkill", ["syncer"], wall_secs=12.0), []),  # nobody followed
    (_fault("sigkill", ["syncer"], outcome="no leader"), []),
  ],
)
def test_takeover_is_from_the_leaders_death_to_the_next_lease(fault, expected):
  assert _measure(fault, LEASES).takeover_secs == expected


def test_merging_is_to_the_first_version_after_the_takeover():
  merges = [
    {"event": "merged", "wall_secs": wall} for wall in (9.0, 10.5, 11.5, 12.0)
  ]
  found = _measure(_fault("sigkill", ["syncer"]), [*LEASES, *merges])
  assert found.merging_secs == [1.5]
  assert _measure(_fault("sigkill", ["syncer"]), LEASES).merging_secs == []


def test_rejoin_is_from_an_islands_death_to_its_next_step():
  lines = _steps([8.0, 9.0]) + _steps([13.0, 14.0], incarnation=2)
  found = _measure(_fault("sigkill", ["island-0"]), i0=lines)
  assert found.rejoin_secs == [3.0]
  assert found.survivor_gaps == found.collateral == []


def test_gap_of_a_survivor_is_the_longest_one_that_touches_the_outage():
  lines = _steps([8.0, 9.0])
  lines += _steps([12.0], gap_secs=3.0)
  lines += _steps([13.0, 14.0])
  lines += _steps([19.0], gap_secs=5.0)  # after the recovery
  found = _measure(_fault("sigkill", ["island-1"]), i0=lines)
  assert found.survivor_gaps == [measures.Gap(3.0, 0, 3, "sigkill")]


def test_gap_that_is_open_when_the_run_has_recovered_counts():
  lines = _steps([8.0, 9.0, 10.0, 11.0]) + _steps([20.0], gap_secs=9.0)
  found = _measure(_fault("sigkill", ["island-1"]), i0=lines)
  assert [gap.ratio for gap in found.survivor_gaps] == [9.0]


def test_calm_gap_is_of_as_long_a_time_before_without_another_fault():
  lines = _steps([5.0]) + _steps([8.0], gap_secs=3.0)  # begins in it
  lines += _steps([9.0, 10.0, 11.0, 12.0])
  lines += _steps([15.0], gap_secs=2.0)
  fault = _fault("sigkill", ["island-1"])
  found = _measure(fault, i0=lines)
  assert found.calm_gaps == [3.0]
  assert [gap.ratio for gap in found.survivor_gaps] == [2.0]

  late = _steps([6.5, 8.0, 9.0, 12.0, 15.0])  # no step before the calm time
  assert _measure(fault, i0=late).calm_gaps == []
  other_life = _steps([5.0]) + _steps(range(7, 16), incarnation=2)
  assert _measure(fault, i0=other_life).calm_gaps == []

  record = reader.Record([], {0: lines}, [])
  for before in (
    _fault("sigkill", ["island-1"], 4.0, 6.5),
    _fault("sigkill", ["island-1"], 4.0, None),  # nobody knows until when
    _fault("read_only", [], 7.0, None, outcome="it could not be shut"),
    _fault("crash_point", ["syncer"], 4.0, 6.5, outcome="not passed"),
  ):
    found = measures.measure(record, [before, fault])
    assert found.calm_gaps == []
  early = _fault("sigkill", ["island-1"], 4.0, 5.5)
  assert measures.measure(record, [early, fault]).calm_gaps == [3.0]


def test_island_that_is_still_starting_is_neither_dead_nor_a_survivor():
  lines = _steps([8.0, 9.0]) + _steps([13.0, 14.0], incarnation=2)
  begins = {"event": "island_started", "wall_secs": 9.5}
  begins |= {"island": 0, "island_incarnation": 2}
  found = _measure(_fault("sigkill", ["controller"]), [begins], i0=lines)
  assert found.collateral == found.survivor_gaps == []


def test_island_that_died_without_being_hit_is_named():
  lines = _steps([8.0, 9.0]) + _steps([13.0], incarnation=2)
  found = _measure(_fault("sigkill", ["controller"]), i0=lines)
  assert found.collateral == ["island-0 in fault 3"]
  assert found.survivor_gaps == []


def test_island_that_had_not_begun_is_no_survivor():
  found = _measure(_fault("sigkill", ["island-1"]), i0=_steps([12.0, 13.0]))
  assert found == measures.Samples.none()


def test_spread_takes_values_that_occurred():
  assert measures.spread([]) == {
    "count": 0,
    "p50": None,
    "p99": None,
    "max": None,
  }
  hundred = [float(n) for n in range(100, 0, -1)]
  assert measures.spread(hundred) == {
    "count": 100,
    "p50": 50.0,
    "p99": 99.0,
    "max": 100.0,
  }
  assert measures.spread([2.0, 1.0])["p50"] == 1.0
