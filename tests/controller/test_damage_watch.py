"""When damage that stands makes a run go back to a cut."""

import pytest

from diloco.controller import damage

PATIENCE_SECS = 6.0


@pytest.mark.parametrize(
  ("told", "now", "due"),
  [
    ([], 100.0, []),
    ([(0.0, "syncer", [])], 100.0, []),
    ([(0.0, "syncer", [2])], 5.9, []),
    ([(0.0, "syncer", [2])], 6.0, [2]),
    # What was mended in time is forgotten.
    ([(0.0, "syncer", [2]), (3.0, "syncer", [])], 100.0, []),
    (
      [(0.0, "syncer", [2]), (3.0, "syncer", []), (4.0, "syncer", [2])],
      9.9,
      [],
    ),
    # Who waits knows nothing of it.
    ([(0.0, "syncer", [2]), (3.0, "standby", [])], 6.0, [2]),
    # A leader that dies of it hands it over.
    (
      [(0.0, "syncer", [2]), (3.0, "standby", [2]), (4.0, "syncer", [])],
      6.0,
      [2],
    ),
    # One goes back for the oldest, whatever else came later.
    ([(0.0, "syncer", [2]), (5.0, "syncer", [1, 2])], 6.0, [2]),
    ([(0.0, "syncer", [2]), (5.0, "syncer", [1, 2])], 11.0, [1, 2]),
  ],
)
def test_damage_counts_once_it_has_stood(told, now, due):
  watch = damage.DamageWatch(PATIENCE_SECS)
  for moment, seat, fragments in told:
    watch.told(seat, fragments, moment)
  assert watch.due(now) == due


def test_damage_without_a_way_back_is_acted_on_once():
  watch = damage.DamageWatch(PATIENCE_SECS)
  watch.told("syncer", [2], 0.0)
  watch.leave_alone(watch.due(6.0))
  assert watch.due(100.0) == []
  watch.told("syncer", [1, 2], 100.0)
  assert watch.due(105.0) == []
  assert watch.due(106.0) == [1, 2]


def test_damage_after_a_way_back_counts_from_then():
  watch = damage.DamageWatch(PATIENCE_SECS)
  watch.told("syncer", [2], 0.0)
  watch.leave_alone([2])
  watch.begin_anew()
  assert watch.due(100.0) == []
  watch.told("syncer", [2], 100.0)
  assert watch.due(106.0) == [2]
