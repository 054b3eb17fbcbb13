"""Slices and cores for islands."""

import hypothesis
import pytest
from hypothesis import strategies as st

from diloco import config as config_lib
from diloco import errors
from diloco.controller import resources


def fleet(num_slices, num_islands=0, topology="1", per_core=4):
  return config_lib.from_mapping(
    {
      "fleet": {
        "slices": [{"topology": topology}] * num_slices,
        "num_islands": num_islands,
      },
      "controller": {"max_islands_per_core": per_core},
    }
  )


def _second(topology):
  slices = [{"topology": "1"}, {"topology": topology}]
  return config_lib.from_mapping({"fleet": {"slices": slices}})


@pytest.mark.parametrize(
  ("speeds", "cores", "expected"),
  [
    ([1.0], [3], [[3]]),
    ([1.0], [0, 1, 2], [[0, 1, 2]]),
    ([1.0, 1.0], [0, 1], [[0], [1]]),
    ([1.0, 0.5], [0, 1, 2], [[0, 1], [2]]),
    ([0.5, 1.0], [0, 1, 2], [[0], [1, 2]]),
    ([1.0, 1.0], [0, 1, 2], [[0, 1], [2]]),
    ([1.0, 0.25], [4, 5, 6, 7, 8], [[4, 5, 6, 7], [8]]),
    ([1.0, 0.5], [0, 1, 2, 3, 4, 5], [[0, 1, 2, 3], [4, 5]]),
    # Fewer cores than islands: fastest first onto the least loaded.
    ([1.0, 0.6, 0.4], [0, 1], [[0], [1], [1]]),
    ([0.4, 0.6, 1.0], [0, 1], [[1], [1], [0]]),
    ([1.0, 1.0, 1.0], [7], [[7], [7], [7]]),
    ([0.5, 1.0], [], [[], []]),  # bound to none
  ],
)
def test_cores_follow_speed(speeds, cores, expected):
  assert resources.divide_cores(speeds, cores) == expected


@hypothesis.settings(deadline=None)
@hypothesis.given(
  st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9),
  st.sets(st.integers(0, 99), min_size=1, max_size=20),
)
def test_every_island_has_cores_and_none_is_idle_or_shared_needlessly(
  speeds, cores
):
  shares = resources.divide_cores(speeds, sorted(cores))
  assert len(shares) == len(speeds)
  assert all(share and set(share) <= cores for share in shares)
  given = [core for share in shares for core in share]
  if len(cores) >= len(speeds):
    assert sorted(given) == sorted(cores)
  else:
    assert set(given) == cores


def test_this_machine_has_cores():
  cores = resources.available_cores()
  assert cores
  assert cores == sorted(set(cores))


@pytest.mark.parametrize(
  ("config", "num_cores", "what", "remedy"),
  [
    (fleet(5, per_core=2), 2, "5 islands", "at most 4 islands"),
    (fleet(1, topology="33"), 2, "slices[0].topology = '33'", "at most 32"),
    (fleet(1, topology="5x7"), 2, "slices[0].topology = '5x7'", "at most 32"),
    (fleet(2, 1, topology="17"), 1, "slices[0].topology = '17'", "at most 16"),
    (_second("33"), 2, "slices[1].topology = '33'", "at most 32"),
  ],
)
def test_fleet_beyond_the_machine_is_refused(config, num_cores, what, remedy):
  with pytest.raises(errors.UserError) as caught:
    resources.check_fits(config, range(num_cores))
  assert what in caught.value.what
  assert f"{num_cores} cores" in caught.value.why
  assert remedy in caught.value.remedy


@pytest.mark.parametrize(
  ("config", "num_cores"),
  [
    (fleet(4, per_core=2), 2),
    (fleet(9, num_islands=4, per_core=2), 2),  # spares need no core
    (fleet(1, topology="4x8"), 2),
  ],
)
def test_fleet_that_just_fits_is_taken(config, num_cores):
  resources.check_fits(config, range(num_cores))


def test_island_keeps_its_slice_and_cores():
  manager = resources.ResourceManager(fleet(3), [0, 1, 2])
  assert manager.bind(1) == (1, [1])
  assert manager.bind(0) == (0, [0])
  assert manager.bind(1) == (1, [1])


def test_lost_slice_is_replaced_by_a_spare():
  manager = resources.ResourceManager(fleet(3, num_islands=2), [0, 1])
  assert [manager.bind(m)[0] for m in range(2)] == [0, 1]
  manager.slice_lost(0)
  assert manager.bind(0) == (2, [0])
  assert manager.bind(1) == (1, [1])


def test_lost_slice_is_used_again_when_there_is_no_spare():
  manager = resources.ResourceManager(fleet(2), [0, 1])
  for m in range(2):
    manager.bind(m)
  manager.slice_lost(1)
  assert manager.bind(1)[0] == 1


def test_slice_of_an_unbound_island_cannot_be_lost():
  manager = resources.ResourceManager(fleet(2, num_islands=1), [0])
  manager.slice_lost(0)
  assert manager.bind(0)[0] == 0


@pytest.mark.parametrize(
  ("lost", "expected"),
  [
    ([0], [3, 1, 2]),
    ([2, 0], [2, 1, 3]),  # one spare, and the first who asks has it
    ([1, 1], [0, 1, 2]),  # the spare was no better
    ([0, 1, 2], [3, 0, 1]),
    ([0, 1, 0, 0], [3, 0, 2]),
  ],
)
def test_spare_goes_to_one_island_and_others_try_what_was_left(lost, expected):
  manager = resources.ResourceManager(fleet(4, num_islands=3), [0, 1, 2])
  for m in range(3):
    manager.bind(m)
  for m in lost:
    manager.slice_lost(m)
  assert [manager.bind(m)[0] for m in range(3)] == expected


@hypothesis.settings(deadline=None)
@hypothesis.given(
  st.integers(1, 4),
  st.integers(0, 3),
  st.lists(
    st.tuples(st.sampled_from(["bind", "lose", "take up"]), st.integers(0, 15)),
    max_size=16,
  ),
)
@hypothesis.example(  # a slice of one that is dead, which another has now
  4,
  1,
  [
    *(("bind", 0), ("bind", 3), ("lose", 0), ("lose", 3), ("bind", 3)),
    ("take up", 9),
  ],
)
def test_every_island_has_a_slice_of_its_own_whatever_is_lost(
  islands, spares, steps
):
  config = fleet(islands + spares, islands)
  manager, started = resources.ResourceManager(config, [0]), {}
  for step, number in steps:
    m = number % islands
    if step == "bind":
      place = manager.bind(m)
      started[m] = (*place, list(manager.left))
    elif step == "lose":  # with its process
      started.pop(m, None)
      before, left = dict(manager._bound), set(manager.left)
      manager.slice_lost(m)
      unbound = islands - len(before)
      new = islands + spares - len(before) - len(left) - unbound
      if m in before and new > 0:  # slices that nobody has had, or will need
        assert manager.bind(m)[0] not in left
    else:  # by another controller; of some islands that live
      manager = resources.ResourceManager(config, [0])
      started = {m: p for m, p in started.items() if number >> m & 1}
      for island, place in started.items():
        manager.rebind(island, *place)
  bound = [manager.bind(m)[0] for m in range(islands)]
  assert len(set(bound)) == islands


def test_slice_that_was_left_is_no_spare_for_the_next_controller():
  first = resources.ResourceManager(fleet(5, num_islands=2), [0, 1])
  first.bind(0), first.bind(1)
  first.slice_lost(0)
  first.slice_lost(0)
  place = (*first.bind(0), first.left)
  assert place == (3, [0], [0, 4])
  later = resources.ResourceManager(fleet(5, num_islands=2), [0, 1])
  later.rebind(0, *place)
  later.bind(1)
  later.slice_lost(1)
  assert later.bind(1)[0] == 2
  assert later.left == [0, 4, 1]


def test_island_beyond_the_fleet_is_an_error():
  manager = resources.ResourceManager(fleet(1), [0])
  manager.bind(0)
  with pytest.raises(LookupError, match="island 1"):
    manager.bind(1)


def test_island_that_lives_keeps_its_slice_and_cores():
  manager = resources.ResourceManager(fleet(3, num_islands=2), [0, 1])
  manager.rebind(1, 2, [5])
  assert manager.bind(1) == (2, [5])
  assert manager.bind(0)[0] == 0
  with pytest.raises(LookupError):
    manager.rebind(0, 2, [0])


@pytest.mark.parametrize(
  ("evaluator", "cores", "left"),
  [
    (False, [0, 1, 2], [0, 1, 2]),
    (True, [0, 1, 2], [0, 1]),
    (True, [0, 1], [0, 1]),
    (True, [], []),
  ],
)
def test_evaluator_gets_a_core_that_islands_can_spare(evaluator, cores, left):
  programs = {"evaluator": evaluator, "eval_every_tokens": 1}
  config = config_lib.from_mapping(
    {"fleet": {"slices": [{}, {}]}, "programs": programs}
  )
  own = [c for c in cores if c not in left]
  assert resources.without_evaluator(config, cores) == (left, own)
