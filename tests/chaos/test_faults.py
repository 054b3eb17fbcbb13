"""The plan of a campaign: seeded, complete, and shared out in order."""

import collections

import pytest

from diloco import crash, errors
from diloco.chaos import faults

ISLANDS = 3


def test_plan_is_a_function_of_its_seed():
  plan = faults.plan(7, 60, ISLANDS)
  assert plan == faults.plan(7, 60, ISLANDS)
  assert plan != faults.plan(8, 60, ISLANDS)
  assert [fault.serial for fault in plan] == list(range(60))


@pytest.mark.parametrize("trials", [len(crash.POINTS), 60, 200])
@pytest.mark.parametrize("seed", range(3))
def test_plan_that_is_long_enough_has_every_point(seed, trials):
  plan = faults.plan(seed, trials, ISLANDS)
  assert len(plan) == trials
  assert {fault.point for fault in plan} - {""} == set(crash.POINTS)


def test_long_plan_has_every_kind_and_every_role():
  plan = faults.plan(0, 400, ISLANDS)
  kinds = collections.Counter(fault.kind for fault in plan)
  assert set(kinds) == set(faults.KINDS)
  assert kinds["sigkill"] == max(kinds.values())
  killed = {fault.target for fault in plan if fault.kind == "sigkill"}
  assert killed == {
    "island-0",
    "island-1",
    "island-2",
    "leader",
    "standby",
    "controller",
  }


def test_plan_keeps_to_the_kinds_that_were_asked_for():
  plan = faults.plan(0, 50, ISLANDS, ("sigstop", "corrupt"))
  assert {fault.kind for fault in plan} == {"sigstop", "corrupt"}
  for fault in plan:
    if fault.kind == "corrupt":
      assert (fault.target, fault.damage) in faults.DAMAGES
    else:
      assert fault.hold_secs > 0


def test_unknown_kind_is_refused_and_the_known_ones_are_named():
  with pytest.raises(errors.UserError, match="choose of sigkill"):
    faults.plan(0, 5, ISLANDS, ("sigkil",))


def test_points_are_armed_for_the_roles_that_pass_them():
  for fault in faults.plan(1, 300, ISLANDS, ("crash_point",)):
    if crash.POINTS[fault.point] == "island":
      assert fault.target.startswith("island-")
    else:
      assert fault.target == crash.ANY_ROLE
    assert fault.occurrence >= 1


def test_coordinates_name_only_what_applies():
  (fault,) = faults.plan(0, 1, ISLANDS, ("everything",))
  assert set(fault.to_json()) == {
    "serial",
    "kind",
    "occurrence",
    "pause_secs",
  }


def _crash(serial, point):
  return faults.Fault(serial, "crash_point", point=point)


def test_run_gets_its_faults_in_order_and_one_at_most_that_ends_it():
  queue = [
    _crash(0, "controller_stopping"),
    _crash(1, "after_merge"),
    _crash(2, "controller_stopping"),
    _crash(3, "mid_adopt"),
    _crash(4, "mid_cut"),
  ]
  chosen, left = faults.share(queue, 3)
  assert [fault.serial for fault in chosen] == [1, 3, 0]
  assert [fault.serial for fault in left] == [2, 4]
  chosen, left = faults.share(left, 3)
  assert [fault.serial for fault in chosen] == [4, 2]
  assert left == []
