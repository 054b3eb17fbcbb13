import collections

import pytest

from diloco.fragments import schedule


@pytest.mark.parametrize(
  ("sync_every", "num_fragments"), [(24, 24), (24, 8), (10, 3), (7, 7), (5, 1)]
)
def test_every_fragment_has_one_grid_point_in_every_h_steps(
  sync_every, num_fragments
):
  when = schedule.Schedule(sync_every, num_fragments)
  for start in (0, 1, sync_every - 1, 5 * sync_every):
    steps = range(start, start + sync_every)
    found = collections.Counter(p for s in steps for p in when.on_grid(s))
    assert found == collections.Counter(range(num_fragments))


@pytest.mark.parametrize(
  ("sync_every", "num_fragments"), [(24, 24), (24, 8), (10, 3)]
)
def test_load_is_spread_over_the_steps(sync_every, num_fragments):
  when = schedule.Schedule(sync_every, num_fragments)
  assert max(len(when.on_grid(step)) for step in range(sync_every)) == 1


def test_fragment_is_due_h_steps_after_its_last_publication():
  when = schedule.Schedule(8, 8)
  assert [when.is_due(step, 9) for step in (16, 17, 18)] == [False, True, True]


def test_offsets_follow_the_formula():
  when = schedule.Schedule(24, 5)
  assert [when.offset(p) for p in range(5)] == [0, 4, 9, 14, 19]
