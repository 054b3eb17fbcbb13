"""The controller's loop and the end of a session, in a fleet of fakes."""

import errno
import shutil

import fake_fleet
import pytest

from diloco import channel, errors
from diloco.report import liveness

EAGAIN = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.fixture
def fleet():
  return fake_fleet.Fleet()


@pytest.fixture
def session(tmp_path, fleet):
  def make(**values):
    return fake_fleet.Session(tmp_path, fleet, **values)

  return make


def slices_of(fleet, role):
  return [s.facts["slice"] for s in fleet.launches if s.role == role]


def fail(fleet, roles, cause="exit 1", line="", when=lambda role: True):
  """Lets every life of some roles die, with a last line in their logs."""

  def hook(role):
    if role.name in roles and when(role):
      role.launch.log.parent.mkdir(exist_ok=True)
      with role.launch.log.open("a") as log:
        log.write(line)
      role.die(cause)

  fleet.hook = hook


def test_run_trains_its_budget_evaluates_and_stops(session, fleet):
  run = session()
  outcome = run.run()
  assert outcome.status == "finished"
  assert outcome.final_eval["loss"] == 1.0
  assert sum(fleet.steps.values()) * 10 >= 1000
  assert fleet.killed == [] and fleet.living == {} and fleet.closed
  (end,) = run.events("run_finished")
  assert end["status"] == "finished"


@pytest.mark.parametrize(
  ("blind", "status", "reason"),
  [
    ({"island-0"}, "finished", "token budget trained"),
    ({"island-0", "island-1"}, "failed", "OSError: unreachable"),
  ],
)
def test_final_evaluation_is_done_by_whoever_can(
  session, fleet, blind, status, reason
):
  fleet.blind = blind
  outcome = session().run()
  assert outcome.status == status
  assert reason in outcome.reason


@pytest.mark.parametrize(
  "harm",
  [lambda path: shutil.rmtree(path.parent), lambda path: path.write_text("{")],
)
def test_what_others_need_to_read_is_put_back(session, fleet, tmp_path, harm):
  run = session()
  run.open()
  run.turn_until(lambda: fleet.steps)
  assert liveness.controller_alive(tmp_path)
  harm(channel.address_path(tmp_path))
  kept = fleet.records_kept
  run.turn_until(lambda: liveness.controller_alive(tmp_path), secs=2.0)
  assert fleet.records_kept > kept


def test_interrupted_run_drains_and_saves_and_does_not_evaluate(session, fleet):
  run = session()
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 20)
  run.controller.interrupt()
  outcome = run.run()
  assert (outcome.status, outcome.final_eval) == ("stopped", None)
  asked = [e["program"] for e in run.events("program_dispatched")]
  asked = [name for name in asked if name != "train"]
  assert asked == [n for n in ("drain", "checkpoint", "stop") for _ in "ab"]
  assert fleet.killed == []


def test_second_interrupt_kills_everything(session, fleet):
  run = session()
  run.controller.interrupt()
  run.controller.interrupt()
  assert run.run().status == "killed"
  assert fleet.living == {}


def test_island_that_does_not_answer_is_killed_and_the_run_finishes(
  session, fleet
):
  def mute(role):
    if role.name == "island-1":
      role.programs = [p for p in role.programs if p["name"] == "train"]
      role.programs = fake_fleet.collections.deque(role.programs)

  fleet.hook = mute
  outcome = session().run()
  assert outcome.status == "finished" and outcome.final_eval
  assert fleet.killed == ["island-1"]


def test_role_that_died_is_started_again_with_its_next_number(session, fleet):
  run = session()
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 20)
  fleet.living["island-0"].die("SIGSEGV")
  run.turn_until(lambda: "island-0" in fleet.living)
  (died,) = run.events("island_died")
  assert (died["island"], died["cause"]) == (0, "SIGSEGV")
  (again,) = run.events("island_restart")
  assert again["attempt"] == 1
  assert run.controller.roles.incarnation("island-0") == 2


def test_leader_that_dies_in_the_drain_leaves_it_to_the_next(session, fleet):
  def leave(role):
    if role.name == "syncer" and any(
      p["name"] == "drain" for p in role.programs
    ):
      role.die("SIGKILL")
      fleet.say("standby", type="ready", token=2)

  fleet.hook = leave
  assert session().run().status == "finished"


def test_two_islands_that_fail_twice_share_one_spare(session, fleet):
  run = session(fleet={"slices": [{}, {}, {}], "num_islands": 2})
  run.open()
  run.turn_until(lambda: len(fleet.living) == 4)
  for _ in range(2):
    for island in ("island-0", "island-1"):
      fleet.living[island].die("SIGKILL")
    run.turn_until(lambda: len(fleet.living) == 4)
  assert slices_of(fleet, "island-0") == [0, 0, 2]
  assert slices_of(fleet, "island-1") == [1, 1, 1]


def test_start_that_the_machine_refuses_is_tried_again(session, fleet):
  run = session(controller={"max_restarts": 1})
  fleet.refusals = [EAGAIN] * 20
  assert run.run().status == "finished"
  assert run.events("island_died") == []


def test_record_that_cannot_be_written_stops_nothing(
  session, fleet, monkeypatch
):
  run = session()
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 20)

  def broken(fd, data):
    raise OSError(errno.EIO, "broken disk")

  with monkeypatch.context() as patched:
    patched.setattr("diloco.tape.recorder.os.write", broken)
    fleet.living["island-0"].die("SIGKILL")
    run.turn_until(lambda: "island-0" in fleet.living)
    before = sum(fleet.steps.values())
    run.turn_until(lambda: sum(fleet.steps.values()) > before + 20)
    assert run.run().status == "finished"
  assert fleet.killed == []


@pytest.mark.parametrize("step", ["turn", "open", "close"])
def test_error_nobody_foresaw_leaves_the_fleet_running(
  session, fleet, monkeypatch, tmp_path, step
):
  run = session()
  run.open()
  run.turn_until(lambda: len(fleet.living) == 4)

  def surprise():
    raise LookupError("a\nsurprise")

  monkeypatch.setattr(run.controller, step, surprise)
  with pytest.raises(errors.DetachedError) as caught:
    run.run()
  text = str(caught.value)
  assert (
    "LookupError: a surprise" in text and f"diloco resume {tmp_path}" in text
  )
  if step != "close":
    assert set(fleet.living) == set(run.controller.roles.names)
    assert fleet.killed == []
  assert fleet.closed
  assert run.events("run_finished") == []
  log = tmp_path / "logs" / "controller.log"
  assert "in surprise" in log.read_text() and str(log) in text


@pytest.mark.parametrize("islands", [1, 2])
def test_resumed_run_that_has_its_budget_finishes_and_kills_nobody(
  session, fleet, islands
):
  fleet_of = {"slices": [{}] * islands}
  assert session(fleet=fleet_of).run().status == "finished"
  trained = dict(fleet.steps)
  fleet.start_secs["island-1"] = 2 * fake_fleet.START_SECS
  again = session(incarnation=2, fleet=fleet_of)
  outcome = again.run()
  assert outcome.status == "finished" and outcome.final_eval
  assert fleet.killed == [] and fleet.steps == trained


def test_island_that_dies_as_the_budget_ends_is_waited_for(session, fleet):
  def hook(role):
    if role.name == "island-0" and role.step == 100 and role.pid == 103:
      role._say("status", progress=1, extra_secs=0.0)
      role.die("SIGKILL")

  fleet.hook = hook
  run = session(fleet={"slices": [{}]})
  outcome = run.run()
  assert len(run.events("island_died")) == 1
  assert outcome.status == "finished" and outcome.final_eval


def test_island_that_dies_at_one_step_gets_the_spare_and_is_given_up(
  session, fleet
):
  def hook(role):
    if role.name == "island-0" and role.step == 30:
      fleet.steps["island-0"] = 25  # where its checkpoint is
      role.die("SIGSEGV")

  fleet.hook = hook
  run = session(
    fleet={"slices": [{}, {}, {}], "num_islands": 2},
    sync={"quorum": 1},
    controller={"max_restarts": 3},
    total_tokens=3000,
  )
  run.open()
  state = run.controller.supervisor.state
  run.turn_until(lambda: state("island-0") == "given_up")
  assert run.run().status == "finished"
  assert slices_of(fleet, "island-0") == [0, 0, 2, 2]
  assert [e["attempt"] for e in run.events("island_restart")] == [1, 2, 3]


def test_deaths_with_work_done_between_them_are_forgiven(session, fleet):
  died = set()

  def hook(role):
    at = role.step // 20
    if role.name == "island-0" and at and at not in died:
      died.add(at)
      fleet.steps["island-0"] = role.step - 5
      role.die("SIGSEGV")

  fleet.hook = hook
  run = session(controller={"max_restarts": 1}, total_tokens=3000)
  assert run.run().status == "finished"
  assert [e["attempt"] for e in run.events("island_restart")] == [1] * len(died)
  assert len(died) > 1
  assert set(slices_of(fleet, "island-0")) == {0}


@pytest.mark.parametrize(
  ("role", "cause", "line"),
  [
    ("island-0", "exit 1", "ValueError: shapes (3,) and (4,)"),
    ("island-0", "exit 2", "error: shapes (3,) and (4,)"),
    ("standby", "exit 2", "error: shapes (3,) and (4,)"),
  ],
)
@pytest.mark.parametrize("ready", [False, True])
def test_role_that_fails_twice_alike_before_any_step_ends_the_run(
  session, fleet, role, cause, line, ready, tmp_path
):
  def hook(r):
    if r.ready:
      r.programs = [p for p in r.programs if p["name"] != "train"]
      r.programs = fake_fleet.collections.deque(r.programs)

  text = f"{line}\n\n"
  fail(fleet, [role], cause, text, when=lambda r: r.ready or not ready)
  dies, fleet.hook = fleet.hook, lambda r: (hook(r), dies(r))
  run = session()
  outcome = run.run()
  assert outcome.status == "failed"
  assert "shapes (3,) and (4,)" in str(outcome.user_error)
  assert f"{tmp_path}/logs/{role}.log" in str(outcome.user_error)
  assert [s.role for s in fleet.launches].count(role) == 2
  assert fleet.living == {}


def test_one_early_failure_is_forgiven(session, fleet):
  fail(
    fleet,
    ["island-0", "syncer"],
    "exit 2",
    "error: config.json cannot be read\n",
    when=lambda role: role.pid < 105,
  )
  assert session().run().status == "finished"


@pytest.mark.parametrize(
  ("cause", "line"),
  [("SIGKILL", "the same\n"), ("exit 1", "{n}\n"), ("exit 1", "")],
)
def test_early_deaths_that_are_not_one_error_twice_go_on_as_deaths(
  session, fleet, cause, line
):
  lives = []

  def hook(role):
    if role.name == "island-0":
      lives.append(role)
      role.launch.log.parent.mkdir(exist_ok=True)
      with role.launch.log.open("a") as log:
        log.write(line.format(n=len(lives)))
      role.die(cause)

  fleet.hook = hook
  run = session(
    sync={"quorum": 1},
    controller={"max_restarts": 3, "gather_secs": 1000.0},
  )
  run.open()
  state = run.controller.supervisor.state
  run.turn_until(lambda: state("island-0") == "given_up")
  assert len(lives) == 4


@pytest.mark.parametrize("cause", ["exit 1", "exit 2"])
def test_failures_of_an_island_in_a_run_that_works_are_its_own(
  session, fleet, cause
):
  run = session(sync={"quorum": 1}, controller={"max_restarts": 3})
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 20)
  fail(fleet, ["island-0"], cause, "error: the same\n")
  assert run.run().status == "finished"
  assert len(run.events("island_died")) == 4
