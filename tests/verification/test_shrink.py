import plants
import pytest

from diloco.verification import (
  faults,
  schedules,
  shrink,
  world,
)


def test_only_the_faults_that_matter_are_left():
  needed = faults.Fault(faults.KILL, "island-1", 3.0)
  others = [
    faults.Fault(faults.SLOW, "syncer", float(n), 0.1) for n in range(1, 8)
  ]
  schedule = schedules.Schedule(5, faults=(*others[:3], needed, *others[3:]))
  small = shrink.shrink(schedule, lambda s: needed in s.faults)
  assert small.faults == (needed,)
  assert small.islands == 2  # island-1 has to exist
  assert small.rounds == 1 and not small.standby


@pytest.mark.parametrize(("fragment", "left"), [(0, 1), (1, 3)])
def test_fragment_that_is_spoiled_has_to_exist(fragment, left):
  needed = faults.Fault(faults.HEAD_LOST, f"fragment-{fragment}", 5.0, 1.0)
  schedule = schedules.Schedule(
    5, fragments=3, cuts=2.0, set_back=True, faults=(needed,)
  )
  small = shrink.shrink(schedule, lambda s: needed in s.faults)
  assert (small.faults, small.fragments) == ((needed,), left)
  assert schedules.Schedule.from_json(small.to_json()) == small


def test_attempts_are_bounded():
  played = []

  def fails(schedule):
    played.append(schedule)
    return False

  shrink.shrink(schedules.draw(3), fails, attempts=5)
  assert len(played) == 5


def test_shrunk_schedule_of_a_planted_bug_still_fails_the_same_way():
  with plants.bug("muted_publishes"):
    seed, outcome = next(
      (seed, outcome)
      for seed in range(60)
      if (outcome := world.run(schedules.draw(seed))).violation
    )
    fails = shrink.fails_like(outcome.violation)
    small = shrink.shrink(schedules.draw(seed), fails)
    again = world.run(schedules.Schedule.from_json(small.to_json()))
  assert shrink.signature(again.violation) == shrink.signature(
    outcome.violation
  )
  assert len(small.faults) <= 2
  assert small.islands <= schedules.draw(seed).islands
  assert not world.run(small).violation


@pytest.mark.parametrize(
  ("left", "right", "same"),
  [
    ("rows 3 to 4 of island 1 are lost", "rows 7 to 9 of island 0 are lost", 1),
    ("rows 3 to 4 of island 1 are lost", "no version for 3.5 s", 0),
  ],
)
def test_signature_is_the_rule_and_not_its_numbers(left, right, same):
  assert (shrink.signature(left) == shrink.signature(right)) == bool(same)
