"""The controller's loop, in a fleet of fakes."""

import errno
import json
import shutil

import fake_fleet
import pytest

from diloco import channel, process
from diloco.controller import change
from diloco.report import liveness

EAGAIN = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


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


def test_hung_role_is_killed_with_the_reason_and_started_again(session, fleet):
  run = session()
  run.open()
  run.turn_until(lambda: fleet.steps)

  def hang(role):
    if role.name == "island-0" and role.pid < 105:
      role.beat_at, role.programs = (
        fleet.now + 1,
        fake_fleet.collections.deque(),
      )

  fleet.hook = hang
  run.turn_until(lambda: len(fleet.launches) == 5)
  (died,) = run.events("island_died")
  assert died["cause"].startswith("SIGKILL: no progress for")
  fleet.hook = lambda role: None
  assert run.run().status == "finished"


def test_role_that_never_gets_ready_is_killed_and_given_up(session, fleet):
  fleet.start_secs["island-1"] = 1e9
  run = session(
    sync={"quorum": 1}, controller={"max_restarts": 1, "start_secs": 20.0}
  )
  run.open()
  state = run.controller.supervisor.state
  run.turn_until(lambda: state("island-1") == "given_up")
  assert fleet.killed == ["island-1"] * 2
  assert run.run().status == "finished"


def test_run_fails_with_fewer_islands_than_the_quorum(session, fleet, tmp_path):
  fail(fleet, ["island-1"], "SIGSEGV")
  outcome = session(
    sync={"quorum": 2}, controller={"max_restarts": 2, "gather_secs": 1e6}
  ).run()
  assert outcome.status == "failed"
  assert str(tmp_path / "logs" / "island-1.log") in outcome.reason
  assert fleet.living == {}


def test_next_controller_takes_the_fleet_up_and_trains_on(session, fleet):
  first = session()
  first.open()
  first.turn_until(lambda: sum(fleet.steps.values()) > 20)
  first.controller.leave()
  later = session(incarnation=2)
  later.open()
  for role in fleet.living.values():
    fleet.say(role.name, type="hello", ready=True, token=1, step=role.step)
  assert later.run().status == "finished"
  assert len(fleet.launches) == 4 and fleet.killed == []
  found = {e["peer"] for e in later.events("reattached")}
  assert found == set(later.controller.roles.names)


def test_role_that_was_taken_up_and_dies_is_started_like_any_other(
  session, fleet
):
  first = session()
  first.open()
  first.turn_until(lambda: sum(fleet.steps.values()) > 20)
  first.controller.leave()
  later = session(incarnation=2)
  later.open()
  for role in fleet.living.values():
    fleet.say(role.name, type="hello", ready=True, token=1, step=role.step)
  later.turn_until(lambda: len(later.events("reattached")) == 4)
  fleet.living["island-0"].die("SIGSEGV")
  assert later.run().status == "finished"
  told = later.events("island_started") + later.events("island_ready")
  lives = [(e["event"], e["island"], e["island_incarnation"]) for e in told]
  assert ("island_started", 0, 2) in lives and ("island_ready", 0, 2) in lives
  assert len(later.events("reattached")) == 4


def test_syncer_that_was_draining_is_ended_when_training_goes_on(
  session, fleet
):
  first = session()
  first.open()
  first.turn_until(lambda: fleet.steps)
  later = session(incarnation=2)
  later.open()
  fleet.say("syncer", type="hello", ready=True, token=1, draining=True)
  later.turn_until(lambda: len(fleet.launches) == 5)
  assert fleet.killed == ["syncer"]
  assert fleet.launches[-1].role == "syncer"


def test_process_nobody_remembers_is_ended_and_not_listened_to(session, fleet):
  strays = []
  fleet.kill_stray = strays.append
  run = session()
  run.open()
  run.turn_until(lambda: fleet.steps)
  fleet.say("island-0", type="hello", ready=True, step=10**9, pid=7)
  fleet.say("island-0", type="status", step=10**9, pid=7)
  run.controller.turn()
  assert strays == [7] and not run.controller.pilot.budget_spent


def test_training_waits_until_islands_are_gathered(session, fleet):
  fleet.start_secs["island-1"] = 50.0
  run = session(controller={"gather_secs": 20.0})
  run.open()
  run.turn_until(lambda: fleet.steps)
  assert 23.0 <= fleet.now < 24.0 and set(fleet.steps) == {"island-0"}


def test_fault_hits_its_role_once_when_due(session, fleet):
  fault = {"kind": "sigkill", "target": "island-1", "at_fraction": 0.5}
  run = session(faults=[fault])
  assert run.run().status == "finished"
  (hit,) = run.events("fault_injected")
  assert hit["at_tokens"] >= 500
  assert fleet.killed == ["island-1"]


def test_fault_waits_for_its_role_to_be_ready(session, fleet):
  fleet.start_secs["island-1"] = 30.0
  fault = {"kind": "sigkill", "target": "island-1", "at_fraction": 0.0}
  run = session(faults=[fault])
  run.open()
  run.turn_until(lambda: fleet.killed)
  assert fleet.now >= 30.0 and fleet.killed == ["island-1"]
  assert len(run.events("fault_injected")) == 1


@pytest.mark.parametrize("target", ["syncer", "standby"])
@pytest.mark.parametrize("leader", ["syncer", "standby"])
def test_syncers_are_hit_by_what_they_do_and_not_by_name(
  session, fleet, target, leader
):
  fault = {"kind": "sigkill", "target": target, "at_fraction": 0.5}
  run = session(faults=[fault])
  run.open()
  run.turn_until(lambda: len(fleet.steps) == 2)
  fleet.say(leader, type="ready", token=2)
  run.turn_until(lambda: fleet.killed)
  other = {"syncer": "standby", "standby": "syncer"}[leader]
  assert fleet.killed == [leader if target == "syncer" else other]


@pytest.mark.parametrize(
  ("merges", "survives"),
  [([5, 2, 1, 1], True), ([0, 0, 0, 0], False), ([5, 0, 0, 0], False)],
)
def test_deaths_of_syncers_are_forgiven_with_a_merge(
  session, fleet, merges, survives
):
  lives = []

  def hook(role):
    if role.name == "syncer" and role not in lives:
      lives.append(role)
      fleet.merges["syncer"] = merges[len(lives) - 1]
    at_work = fleet.now > role.ready_at + 2.0
    if role.name == "syncer" and at_work and len(lives) < 4:
      role.die("SIGSEGV")

  fleet.hook = hook
  run = session(
    controller={"max_restarts": 1, "standbys": 0}, total_tokens=10_000
  )
  assert run.run().status == ("finished" if survives else "failed")


def test_run_fails_without_any_syncer(session, fleet):
  fail(fleet, ["syncer", "standby"], "SIGSEGV")
  outcome = session(controller={"max_restarts": 2}).run()
  assert outcome.status == "failed" and ".log" in outcome.reason


def test_island_that_dies_where_it_begins_is_given_up(session, fleet):
  fleet.steps["island-0"] = 5000

  def hook(role):
    if role.name == "island-0" and (role.step == 5006 or role.pid == 103):
      fleet.steps["island-0"] = 5000
      role.die("SIGSEGV")

  fleet.hook = hook
  run = session(
    sync={"quorum": 1},
    controller={"max_restarts": 3},
    programs={"window_steps": 2},
    total_tokens=10**6,
  )
  run.open()
  state = run.controller.supervisor.state
  run.turn_until(lambda: state("island-0") == "given_up")
  assert [e["attempt"] for e in run.events("island_restart")] == [1, 2, 3]


def test_loss_of_a_channel_is_no_sign_of_life(session, fleet):
  run = session()
  run.open()
  run.turn_until(lambda: fleet.steps)

  def hook(role):
    if role.name == "standby" and role.pid == 102:
      role.beat_at = fleet.now + 1.0
      fleet.say("standby", type="lost")

  fleet.hook = hook
  run.turn_until(lambda: fleet.killed)
  assert fleet.killed == ["standby"]


def test_channel_that_is_found_again_is_no_new_beginning(session, fleet):
  run = session()
  run.open()
  run.turn_until(lambda: fleet.steps.get("island-0", 0) > 4)
  tokens = run.controller.pilot.tokens
  fleet.say("island-0", type="hello", ready=True, step=1)  # of before it broke
  run.controller.turn()
  assert run.controller.pilot.tokens >= tokens
  assert [e["island"] for e in run.events("island_ready")] == [0, 1]


def test_programs_lost_with_a_channel_are_sent_again(session, fleet):
  run = session(fleet={"slices": [{}]}, total_tokens=10_000)
  run.open()
  run.turn_until(lambda: fleet.steps)
  fleet.living["island-0"].programs.clear()
  fleet.say("island-0", type="lost")
  before = fleet.steps["island-0"]
  run.turn_until(lambda: fleet.steps["island-0"] > before + 20, secs=10.0)


def test_training_begins_as_soon_as_all_are_there(session, fleet):
  run = session()
  run.open()
  run.turn_until(lambda: len(fleet.steps) == 2)
  assert fleet.now < fake_fleet.START_SECS + 1.0


def test_programs_of_two_controllers_have_different_numbers(session, fleet):
  for incarnation in (1, 2):
    run = session(incarnation=incarnation)
    run.open()
    before = len(run.events("program_done"))
    run.turn_until(
      lambda run=run, n=before: len(run.events("program_done")) > n
    )
    run.controller.close()
  sent = run.events("program_dispatched")
  assert len({e["seq"] for e in sent}) == len(sent)


def wish(tmp_path, fleet_config, **changes):
  values = fleet_config.to_dict()
  for name, value in changes.items():
    group, _, field = name.partition("__")
    values[group][field] = value
  change.wish_path(tmp_path).write_text(json.dumps(values))


def configured(fleet):
  """What each role was told last of the settings."""
  return {
    name: message["args"]["settings"]
    for name, message in fleet.sent
    if message["name"] == "configure"
  }


def test_change_of_settings_reaches_every_role_and_those_that_start_later(
  session, fleet, tmp_path
):
  run = session(total_tokens=10_000)
  config = fake_fleet.make_config(total_tokens=10_000)
  process.write_config(config, tmp_path)
  fleet.start_secs["island-1"] = 60.0
  run.open()
  run.turn_until(lambda: fleet.steps.get("island-0", 0) > 8)
  wish(tmp_path, config, sync__every=4, outer__learning_rate=0.5)
  run.turn_until(lambda: not change.wish_path(tmp_path).exists(), secs=1.0)
  assert set(configured(fleet)) == {"syncer", "standby", "island-0"}
  run.turn_until(lambda: "island-1" in configured(fleet), secs=60.0)
  (told,) = {json.dumps(s, sort_keys=True) for s in configured(fleet).values()}
  assert json.loads(told)["sync.every"] == 4
  assert process.read_config(tmp_path).outer.learning_rate == 0.5
  (line,) = run.events("config_changed")
  assert line["changes"] == {
    "outer.learning_rate": [1.0, 0.5],
    "sync.every": [8, 4],
  }
  launched = len(fleet.launches)
  run.run()
  assert len(fleet.launches) == launched, "a change starts nobody anew"


def test_change_that_cannot_be_changes_nothing(session, fleet, tmp_path):
  run = session(total_tokens=10_000)
  config = fake_fleet.make_config(total_tokens=10_000)
  process.write_config(config, tmp_path)
  run.open()
  for changes in ({"sync__codec": "f32"}, {"sync__every": 1}):
    wish(tmp_path, config, **changes)
    run.turn_until(lambda: not change.wish_path(tmp_path).exists(), secs=1.0)
  change.wish_path(tmp_path).write_text("{")
  run.turn_until(lambda: not change.wish_path(tmp_path).exists(), secs=1.0)
  assert process.read_config(tmp_path) == config
  assert configured(fleet) == {} and run.events("config_changed") == []


def test_roles_taken_up_after_a_change_live_on_and_are_told_it(
  session, fleet, tmp_path
):
  first = session(total_tokens=10_000)
  first.open()
  first.turn_until(lambda: fleet.steps.get("island-1", 0) > 8)
  second = session(incarnation=2, total_tokens=10_000, sync={"every": 4})
  second.open()
  for role in fleet.living.values():
    fleet.say(role.name, type="hello", ready=True, token=1, step=role.step)
  second.turn_until(lambda: len(configured(fleet)) == 4, secs=30.0)
  assert fleet.killed == []
  assert {s["sync.every"] for s in configured(fleet).values()} == {4}


EVALUATING = {
  "window_steps": 8,
  "cut_every_secs": 0.0,
  "eval_every_tokens": 100,
  "evaluator": True,
}


def evaluations(fleet):
  return [name for name, sent in fleet.sent if sent["name"] == "evaluate"]


def test_evaluator_that_dies_is_started_again_and_islands_evaluate_at_the_end(
  session, fleet
):
  run = session(programs=EVALUATING)
  run.open()
  run.turn_until(lambda: evaluations(fleet))
  fleet.living["evaluator"].die("SIGKILL")
  before = len(evaluations(fleet))
  run.turn_until(lambda: len(evaluations(fleet)) > before)
  assert run.run().status == "finished"
  *between, last = evaluations(fleet)
  assert set(between) == {"evaluator"} and last == "island-0"
  (died,) = run.events("evaluator_died")
  assert died["cause"] == "SIGKILL"
  assert len(run.events("evaluator_started")) == 2
  assert run.events("syncer_died") == [] and fleet.killed == []


@pytest.mark.parametrize("cause", ["exit 1", "SIGKILL"])
def test_evaluator_that_always_dies_is_given_up_and_the_run_goes_on(
  session, fleet, cause
):
  def hook(role):
    if role.name == "evaluator":
      log = run.controller.roles.log(role.name)
      log.parent.mkdir(exist_ok=True)
      with log.open("a") as file:
        file.write("error: it has no memory\n")
      role.die(cause)

  fleet.hook = hook
  fleet.start_secs = {"island-0": 60.0, "island-1": 60.0}
  run = session(programs=EVALUATING, controller={"max_restarts": 3})
  run.open()
  state = run.controller.supervisor.state
  run.turn_until(lambda: state("evaluator") == "given_up")
  assert run.run().status == "finished"
  assert len(run.events("evaluator_died")) == 4


def test_evaluator_that_hangs_is_killed_and_started_again(session, fleet):
  def hook(role):
    if role.name == "evaluator" and role.launch.facts["incarnation"] == 1:
      role.beat_at = fleet.now + 1.0  # it says nothing
      role.programs.clear()

  fleet.hook = hook
  run = session(
    programs=EVALUATING, total_tokens=10**6, controller={"hang_secs": 5.0}
  )
  run.open()
  run.turn_until(
    lambda: [x.role for x in fleet.launches].count("evaluator") == 2
  )
  assert fleet.killed == ["evaluator"]
