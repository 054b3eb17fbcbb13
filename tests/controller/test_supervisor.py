"""Supervision: restarts, back-off, hangs, and giving up."""

import pytest

from diloco.controller import supervisor

POLICY = supervisor.Policy(
  restart_base_secs=0.5,
  restart_max_secs=3.0,
  max_restarts=2,
  start_secs=10.0,
  hang_secs=5.0,
)


@pytest.fixture
def roles():
  return supervisor.Supervisor(POLICY, ["syncer", "island-0"])


def run(roles, role, now):
  """Starts a role and brings it to work."""
  roles.started(role, now)
  roles.ready(role, now)


def orders_of(roles, role, now):
  roles.heard(role, now)  # alive; whether it gets on is the question
  return [order for order in roles.orders(now) if order.role == role]


@pytest.mark.parametrize(
  ("deaths", "delay_secs"),
  [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (5, 3.0), (10**6, 3.0)],
)
def test_back_off_doubles_up_to_its_limit(deaths, delay_secs):
  assert POLICY.delay_secs(deaths) == delay_secs


def test_all_start_at_once(roles):
  starts = [supervisor.Start("syncer"), supervisor.Start("island-0")]
  assert roles.orders(0.0) == starts
  roles.started("syncer", 0.0)
  assert roles.orders(0.0) == starts[1:]


def test_role_starts_again_after_its_back_off_and_others_go_on(roles):
  run(roles, "syncer", 0.0)
  run(roles, "island-0", 0.0)
  assert roles.died("island-0", 100.0) == (1, 0.5)
  assert roles.state("island-0") == "waiting"
  assert roles.state("syncer") == "running"
  roles.heard("syncer", 100.4)
  assert roles.orders(100.4) == []
  assert roles.orders(100.5) == [supervisor.Start("island-0")]


def test_role_is_given_up_after_its_restarts(roles):
  for deaths in (1, 2):
    run(roles, "island-0", 0.0)
    assert roles.died("island-0", 0.0) == (deaths, POLICY.delay_secs(deaths))
  run(roles, "island-0", 0.0)
  assert roles.died("island-0", 0.0) is None
  assert roles.state("island-0") == "given_up"
  assert orders_of(roles, "island-0", 1e9) == []


def test_progress_forgets_earlier_deaths(roles):
  for _ in range(10):
    run(roles, "island-0", 0.0)
    roles.progressed("island-0", 0.0, busy=True)
    assert roles.died("island-0", 0.0) == (1, 0.5)


def test_idleness_is_no_progress(roles):
  run(roles, "island-0", 0.0)
  assert roles.died("island-0", 0.0) == (1, 0.5)
  run(roles, "island-0", 0.0)
  roles.progressed("island-0", 0.0, busy=False)
  assert roles.died("island-0", 0.0) == (2, 1.0)


def test_role_that_never_gets_ready_is_killed(roles):
  roles.started("island-0", 0.0)
  assert orders_of(roles, "island-0", 10.0) == []
  (order,) = orders_of(roles, "island-0", 11.0)
  assert order == supervisor.Kill("island-0", "not ready after 11 s")
  roles.ready("island-0", 11.0)
  assert orders_of(roles, "island-0", 100.0) == []


def test_role_without_progress_is_killed(roles):
  run(roles, "island-0", 0.0)
  roles.progressed("island-0", 1.0, busy=True)
  assert orders_of(roles, "island-0", 6.0) == []
  (order,) = orders_of(roles, "island-0", 6.5)
  assert order == supervisor.Kill("island-0", "no step for 6 s")
  roles.progressed("island-0", 6.5, busy=True)
  assert orders_of(roles, "island-0", 11.0) == []


def test_idle_role_may_be_silent(roles):
  run(roles, "island-0", 0.0)
  assert orders_of(roles, "island-0", 1e6) == []
  roles.progressed("island-0", 1e6, busy=True)
  roles.progressed("island-0", 1e6, busy=False)
  assert orders_of(roles, "island-0", 2e6) == []


def test_role_that_hangs_in_its_first_step_is_killed(roles):
  run(roles, "island-0", 0.0)
  for now in (100.0, 102.0, 104.0):  # it says that it works, and no more
    roles.working("island-0", now)
  assert orders_of(roles, "island-0", 105.0) == []
  assert len(orders_of(roles, "island-0", 105.5)) == 1


def test_hang_of_one_life_is_not_held_against_the_next(roles):
  run(roles, "island-0", 0.0)
  roles.progressed("island-0", 0.0, busy=True)
  roles.died("island-0", 100.0)
  run(roles, "island-0", 101.0)
  assert orders_of(roles, "island-0", 101.0) == []
  assert orders_of(roles, "island-0", 1e6) == []


def test_stop_is_no_death(roles):
  run(roles, "island-0", 0.0)
  roles.stopping("island-0")
  assert roles.died("island-0", 1.0) is None
  assert roles.state("island-0") == "stopped"
  assert orders_of(roles, "island-0", 1e6) == []


def test_ready_revives_nobody(roles):
  run(roles, "island-0", 0.0)
  roles.died("island-0", 0.0)
  roles.ready("island-0", 0.1)  # a message that was still on its way
  assert roles.state("island-0") == "waiting"
  roles.stopping("island-0")
  roles.ready("island-0", 0.2)
  assert roles.state("island-0") == "stopped"


def test_role_that_falls_silent_is_killed_even_when_idle():
  state = supervisor.Supervisor(POLICY_FOR_SILENCE, ["syncer"])
  state.started("syncer", 0.0)
  state.ready("syncer", 1.0)
  state.heard("syncer", 50.0)
  assert state.orders(59.0) == []
  (order,) = state.orders(61.0)
  assert isinstance(order, supervisor.Kill) and "sign of life" in order.cause


POLICY_FOR_SILENCE = supervisor.Policy(
  restart_base_secs=1.0,
  restart_max_secs=8.0,
  max_restarts=3,
  start_secs=20.0,
  hang_secs=10.0,
)


def test_deaths_before_a_role_did_its_work_are_forgotten(roles):
  for _ in range(3 * POLICY.max_restarts):
    run(roles, "syncer", 0.0)
    roles.settled("syncer")
    assert roles.died("syncer", 0.0) == (1, 0.5)
