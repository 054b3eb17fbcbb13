import collections
import itertools

import pytest

from diloco.fragments import schedule


def _published(sync_every, num_fragments, steps):
  """Steps at which each fragment is published by a lone island."""
  when = schedule.Schedule(sync_every, num_fragments)
  last = [-sync_every] * num_fragments
  published = collections.defaultdict(list)
  for step in range(1, steps + 1):
    for fragment in when.due(step, last):
      published[fragment].append(step)
      last[fragment] = step
  return published


@pytest.mark.parametrize(
  ("sync_every", "num_fragments"), [(24, 24), (24, 8), (10, 3), (7, 7), (5, 1)]
)
def test_every_fragment_leaves_once_in_every_h_steps(sync_every, num_fragments):
  published = _published(sync_every, num_fragments, 5 * sync_every)
  assert sorted(published) == list(range(num_fragments))
  for steps in published.values():
    assert steps[0] <= sync_every
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert gaps and set(gaps) == {sync_every}


@pytest.mark.parametrize(
  ("sync_every", "num_fragments"), [(24, 24), (24, 8), (10, 3)]
)
def test_load_is_spread_over_the_steps(sync_every, num_fragments):
  published = _published(sync_every, num_fragments, sync_every)
  per_step = collections.Counter(
    s for steps in published.values() for s in steps
  )
  assert max(per_step.values()) == 1


def test_fragment_published_off_its_grid_waits_for_a_whole_h():
  when = schedule.Schedule(8, 8)
  last = [0] * 8
  last[3] = 9  # followed somebody's round at step 9
  due = [step for step in range(10, 30) if 3 in when.due(step, last)]
  assert due[0] == 19  # the grid points 11 is too early; 19 is 10 steps later


def test_offsets_follow_the_formula():
  when = schedule.Schedule(24, 5)
  assert [when.offset(p) for p in range(5)] == [0, 4, 9, 14, 19]
