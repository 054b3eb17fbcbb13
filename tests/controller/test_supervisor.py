"""Supervision: restarts, back-off, hangs, and giving up."""

import pytest

from diloco import config as config_lib
from diloco import timing
from diloco.controller import orders, supervisor

CHOSEN = config_lib.ControllerConfig(
  takeover_secs=1.5,
  restart_base_secs=0.5,
  restart_max_secs=3.0,
  max_restarts=2,
  start_secs=10.0,
  hang_secs=5.0,
)


@pytest.fixture
def roles():
  times = timing.derive(CHOSEN, 0.0)
  assert times.deposed_secs == 1.5
  return supervisor.Supervisor(CHOSEN, times, 8, ["syncer", "island-0"])


def run(roles, role, now):
  """Starts a role and brings it to work."""
  roles.started(role, now)
  roles.ready(role, now)


def orders_of(roles, role, now):
  roles.heard(role, now)  # alive; whether it gets on is the question
  return [order for order in roles.due(now) if order.role == role]


@pytest.mark.parametrize(
  ("deaths", "delay_secs"),
  [(1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (5, 3.0), (2000, 3.0)],
)
def test_back_off_doubles_up_to_its_limit(roles, deaths, delay_secs):
  for _ in range(deaths - 1):
    roles.refused("syncer", 0.0)
  assert roles.refused("syncer", 0.0) == delay_secs


def test_all_start_at_once(roles):
  starts = [orders.Start("syncer"), orders.Start("island-0")]
  assert roles.due(0.0) == starts
  roles.started("syncer", 0.0)
  assert roles.due(0.0) == starts[1:]


def test_role_starts_again_after_its_back_off_and_others_go_on(roles):
  run(roles, "syncer", 0.0)
  run(roles, "island-0", 0.0)
  assert roles.died("island-0", 100.0) == (1, 0.5)
  assert roles.state("island-0") == "waiting"
  assert roles.state("syncer") == "running"
  roles.heard("syncer", 100.4)
  assert roles.due(100.4) == []
  assert roles.due(100.5) == [orders.Start("island-0")]


def test_role_is_given_up_after_its_restarts(roles):
  for deaths in (1, 2):
    run(roles, "island-0", 0.0)
    assert roles.died("island-0", 0.0) == (deaths, 0.5 * deaths)
  run(roles, "island-0", 0.0)
  assert roles.died("island-0", 0.0) is None
  assert roles.state("island-0") == "given_up"
  assert orders_of(roles, "island-0", 1e9) == []


def test_refused_start_is_no_death_and_backs_off(roles):
  delays = [roles.refused("island-0", 10.0) for _ in range(5)]
  assert delays == [0.5, 1.0, 2.0, 3.0, 3.0]
  assert roles.due(12.9) == [orders.Start("syncer")]
  assert orders.Start("island-0") in roles.due(13.0)
  run(roles, "island-0", 13.0)
  assert roles.died("island-0", 14.0) == (1, 0.5)
  assert roles.refused("island-0", 14.0) == 0.5


def test_idleness_forgets_no_deaths(roles):
  run(roles, "island-0", 0.0)
  assert roles.died("island-0", 0.0) == (1, 0.5)
  run(roles, "island-0", 0.0)
  for count in range(10):
    roles.told("island-0", 0.0, count, 0.0)
  assert roles.died("island-0", 0.0) == (2, 1.0)


@pytest.mark.parametrize(
  ("steps", "attempts"),
  [
    # Where each life joins, and how far it gets; 8 steps settle.
    ([(0, 30), (25, 30), (25, 30)], [1, 2, None]),
    ([(0, 30), (25, 37), (25, 40)], [1, 2, None]),
    ([(0, 30), (25, 38), (25, 46)], [1, 1, 1]),
    ([(90, 90), (90, 91), (91, 92)], [1, 2, None]),
    ([None, (90, 97), (90, 97)], [1, 2, None]),  # died before it joined
    ([None, (90, 98), (90, 97)], [1, 1, 2]),
    ([(0, 500), (0, 400), (0, 300)], [1, 2, None]),
    ([(0, 500), (0, 508), (0, 300), (0, 301)], [1, 1, 2, None]),
  ],
)
def test_deaths_of_an_island_are_forgotten_well_past_all_of_them(
  roles, steps, attempts
):
  found = []
  for life in steps:
    run(roles, "island-0", 0.0)
    if life is not None:
      joined, reached = life
      roles.joined("island-0", joined)
      for step in range(joined + 1, reached + 1):
        roles.trained("island-0", step)
    died = roles.died("island-0", 0.0)
    found.append(died and died[0])
  assert found == attempts


def test_role_that_never_gets_ready_is_killed(roles):
  roles.started("island-0", 0.0)
  assert orders_of(roles, "island-0", 10.0) == []
  (order,) = orders_of(roles, "island-0", 11.0)
  assert order == orders.Kill("island-0", "not ready after 11 s")
  roles.ready("island-0", 11.0)
  assert orders_of(roles, "island-0", 100.0) == []


def beat(roles, role, until, count, extra_secs=0.0, since=0.0):
  """Tells the same count every second; returns when the role was killed."""
  now = since
  while now < until:
    roles.told(role, now, count, extra_secs)
    if orders_of(roles, role, now):
      return now
    now += 1.0
  return None


def test_role_without_progress_is_killed_whatever_its_beat(roles):
  run(roles, "island-0", 0.0)
  assert beat(roles, "island-0", 100.0, count=7) == 6.0
  (order,) = orders_of(roles, "island-0", 6.5)
  assert order == orders.Kill("island-0", "no progress for 6 s")
  roles.told("island-0", 6.5, 8, 0.0)
  assert orders_of(roles, "island-0", 11.0) == []


def test_any_progress_at_all_keeps_a_role_alive(roles):
  run(roles, "island-0", 0.0)
  for count in range(50):
    now = 4.0 * count
    assert beat(roles, "island-0", now + 4.0, count, since=now) is None


def test_role_that_told_no_progress_owes_none(roles):
  run(roles, "syncer", 0.0)
  for now in range(100):
    assert orders_of(roles, "syncer", float(now)) == []


def test_wait_with_an_end_is_no_hang_until_it_is_over(roles):
  run(roles, "island-0", 0.0)
  assert beat(roles, "island-0", 100.0, count=1, extra_secs=20.0) == 26.0
  roles.died("island-0", 26.0)
  run(roles, "island-0", 27.0)
  killed = beat(roles, "island-0", 60.0, 1, extra_secs=20.0, since=27.0)
  assert killed == 53.0
  roles.died("island-0", 53.0)
  run(roles, "island-0", 54.0)
  assert beat(roles, "island-0", 60.0, 1, extra_secs=20.0, since=54.0) is None
  assert beat(roles, "island-0", 99.0, count=2, since=60.0) == 66.0


def test_hang_of_one_life_is_not_held_against_the_next(roles):
  run(roles, "island-0", 0.0)
  assert beat(roles, "island-0", 100.0, count=3) == 6.0
  roles.died("island-0", 6.0)
  roles.started("island-0", 7.0)
  roles.told("island-0", 7.0, 3, 0.0)  # still on its way from the dead one
  for now in range(8, 16):
    assert orders_of(roles, "island-0", float(now)) == []
  roles.ready("island-0", 16.0)
  assert orders_of(roles, "island-0", 16.0) == []


def test_leader_that_was_replaced_and_is_silent_is_killed_at_once(roles):
  for role in ("syncer", "island-0"):
    run(roles, role, 0.0)
  roles.deposed("syncer", 0.0)
  assert roles.due(1.5) == []
  (order,) = roles.due(1.75)
  assert order.role == "syncer" and order.cause.startswith("deposed")
  roles.died("syncer", 2.0)
  run(roles, "syncer", 2.0)  # the new life leads nobody into error
  assert roles.due(3.75) == []


def test_leader_that_was_replaced_and_never_leaves_is_killed(roles):
  run(roles, "syncer", 0.0)
  for now in range(6):
    roles.deposed("syncer", float(now))  # as often as somebody says it leads
    assert orders_of(roles, "syncer", float(now)) == []
  (order,) = orders_of(roles, "syncer", 6.0)
  assert order.cause == "deposed 6 s ago, and has not ended"


@pytest.mark.parametrize("takeover_secs", [0.1, 1.5, 60.0])
def test_replaced_leader_has_time_to_notice_but_no_more(takeover_secs):
  chosen = config_lib.ControllerConfig(takeover_secs=takeover_secs)
  times = timing.derive(chosen, 0.0)
  renewal_secs = min(times.heartbeat_secs, times.lease_ttl_secs / 4)
  assert times.deposed_secs > times.lease_ttl_secs + renewal_secs
  assert times.deposed_secs < times.hang_secs / 10


def test_nobody_is_blamed_while_the_controller_itself_stood_still(roles):
  for role in ("syncer", "island-0"):
    run(roles, role, 0.0)
  roles.told("island-0", 0.0, 1, 0.0)
  assert roles.due(1.0) == []
  assert roles.due(1000.0) == []
  assert roles.due(1002.0) == []
  assert {order.role for order in roles.due(1004.5)} == {
    "syncer",
    "island-0",
  }


def test_start_takes_no_longer_for_a_controller_that_stood_still(roles):
  roles.started("island-0", 0.0)
  assert orders_of(roles, "island-0", 1.0) == []
  assert orders_of(roles, "island-0", 1000.0) == []
  killed = [
    now for now in range(1001, 1011) if orders_of(roles, "island-0", float(now))
  ]
  assert killed == [1010]


def test_stop_is_no_death(roles):
  run(roles, "island-0", 0.0)
  roles.stopping("island-0")
  assert roles.died("island-0", 1.0) is None
  assert roles.state("island-0") == "stopped"
  assert orders_of(roles, "island-0", 1e6) == []


def test_return_to_a_cut_starts_anew_who_was_stopped_for_it_alone(roles):
  run(roles, "syncer", 0.0)
  for _ in range(3):
    run(roles, "island-0", 0.0)
    roles.died("island-0", 0.0)
  assert roles.state("island-0") == "given_up"
  for role in ("syncer", "island-0"):
    roles.anew(role, 1.0)
  assert roles.state("island-0") == "given_up"
  assert roles.state("syncer") == "running"
  roles.stopping("syncer")
  roles.anew("syncer", 2.0)
  assert roles.due(2.0) == [orders.Start("syncer")]


def test_ready_revives_nobody(roles):
  run(roles, "island-0", 0.0)
  roles.died("island-0", 0.0)
  roles.ready("island-0", 0.1)  # a message that was still on its way
  assert roles.state("island-0") == "waiting"
  roles.stopping("island-0")
  roles.ready("island-0", 0.2)
  assert roles.state("island-0") == "stopped"


def test_role_that_falls_silent_is_killed_even_when_idle():
  chosen = config_lib.ControllerConfig(
    takeover_secs=3.0, start_secs=20.0, hang_secs=10.0
  )
  times = timing.derive(chosen, 0.0)
  state = supervisor.Supervisor(chosen, times, 8, ["syncer"])
  state.started("syncer", 0.0)
  state.ready("syncer", 1.0)
  state.heard("syncer", 50.0)
  assert state.due(59.0) == []
  (order,) = state.due(61.0)
  assert isinstance(order, orders.Kill) and "sign of life" in order.cause


def test_deaths_before_a_role_did_its_work_are_forgotten(roles):
  for _ in range(3 * CHOSEN.max_restarts):
    run(roles, "syncer", 0.0)
    roles.settled("syncer")
    assert roles.died("syncer", 0.0) == (1, 0.5)
