"""The controller's loop, in a fleet of fakes."""

import errno
import functools
import json
import shutil

import fake_fleet
import pytest

from diloco import channel, config_changes, errors, process
from diloco import config as config_lib
from diloco.controller import change
from diloco.report import liveness

EAGAIN = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def slices_of(fleet, role):
  return [s.facts["slice"] for s in fleet.launches if s.role == role]


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
def test_what_others_need_to_read_is_put_back(
  session, fleet, tmp_path, monkeypatch, harm
):
  configs = set()
  monkeypatch.setattr("diloco.process.keep_config", configs.add)
  run = session()
  run.open()
  run.turn_until(lambda: fleet.steps)
  assert liveness.controller_alive(tmp_path)
  harm(channel.address_path(tmp_path))
  kept = fleet.addresses_told
  run.turn_until(lambda: liveness.controller_alive(tmp_path), secs=2.0)
  assert fleet.addresses_told > kept
  assert configs == {run.run_dir}


def test_change_is_told_once_it_is_written(tmp_path, monkeypatch):
  old = config_lib.from_mapping({"outer": {"learning_rate": 0.5}})
  new = config_lib.from_mapping({"outer": {"learning_rate": 0.25}})
  process.write_config(old, tmp_path)
  wish, told = change.wish_path(tmp_path), []
  wish.parent.mkdir()
  wish.write_text(json.dumps(new.to_dict()))

  def changed(config, changes):
    told.append((process.read_config(tmp_path), changes))

  write, written = process._write_whole, []

  def refuse(room, path, text):
    if len(written) == room:
      raise OSError("the disk is full")
    write(path, text)
    written.append(path)

  for room in (0, 1):  # for the configuration and its copy
    with monkeypatch.context() as full:
      full.setattr(process, "_write_whole", functools.partial(refuse, room))
      with pytest.raises(OSError, match="full"):
        change.take_up(tmp_path, config_changes.live(old), changed)
    assert not told and wish.exists()
  wanted = wish.read_text()
  wish.write_text(json.dumps(old.to_dict()))
  change.take_up(tmp_path, config_changes.live(old), changed)
  assert not told and process.read_config(tmp_path) == old
  wish.write_text(wanted)
  change.take_up(tmp_path, config_changes.live(old), changed)
  ((written, changes),) = told
  assert written == new and list(changes.values()) == [(0.5, 0.25)]
  assert not wish.exists()


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
  assert run.controller.core.fleet.lives["island-0"].number == 2


def test_two_islands_that_fail_twice_share_one_spare(session, fleet):
  run = session(fleet={"slices": [{}, {}, {}], "num_islands": 2})
  run.open()
  run.turn_until(lambda: len(fleet.living) == 4)
  for _ in range(2):
    for island in ("island-0", "island-1"):
      fleet.living[island].die("SIGKILL")
    run.turn_until(lambda: len(fleet.living) == 4)
  assert slices_of(fleet, "island-0") == [0, 0, 2]
  # And the other one what the first has left.
  assert slices_of(fleet, "island-1") == [1, 1, 0]


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
  assert found == set(later.controller.core.fleet.names.all)


@pytest.mark.parametrize("message", [{}, {"type": 3}, {"type": "x", "step": 1}])
def test_message_that_nobody_understands_is_passed_over(
  session, fleet, message
):
  run = session()
  run.open()
  run.turn_until(lambda: len(fleet.living) == 4)
  fleet.said.append(("island-0", message))
  assert run.run().status == "finished"


def test_process_nobody_remembers_is_ended_and_not_listened_to(session, fleet):
  strays = []
  fleet.kill_stray = strays.append
  run = session()
  run.open()
  run.turn_until(lambda: fleet.steps)
  fleet.say("island-0", type="hello", ready=True, step=10**9, pid=7)
  fleet.say("island-0", type="status", step=10**9, pid=7)
  run.controller.turn()
  assert strays == [7] and not run.controller.core.pilot.budget_spent


def test_fault_hits_its_role_once_when_due(session, fleet):
  fault = {"kind": "sigkill", "target": "island-1", "at_fraction": 0.5}
  run = session(faults=[fault])
  assert run.run().status == "finished"
  (hit,) = run.events("fault_injected")
  assert hit["at_tokens"] >= 500
  assert fleet.killed == ["island-1"]


def test_what_syncers_and_islands_say_reaches_the_core(session, fleet):
  run = session(total_tokens=10_000)
  run.open()
  run.turn_until(lambda: run.controller.core.pilot.tokens > 200)
  fleet.merges["syncer"], fleet.damaged = 3, [1]
  core = run.controller.core
  run.turn_until(lambda: core.fleet.lives["syncer"].merges == 3, secs=2.0)
  assert core.fleet.leader == "syncer"


def test_programs_lost_with_a_channel_are_sent_again(session, fleet):
  run = session(fleet={"slices": [{}]}, total_tokens=10_000)
  run.open()
  run.turn_until(lambda: fleet.steps)
  fleet.living["island-0"].programs.clear()
  fleet.say("island-0", type="lost")
  before = fleet.steps["island-0"]
  run.turn_until(lambda: fleet.steps["island-0"] > before + 20, secs=10.0)


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


def _dies(wish):
  return False


def _is_overtaken(wish):
  wish.unlink(missing_ok=True)
  return True


def _takes_it_up(wish):
  if wish.exists():
    config = config_lib.from_mapping(json.loads(wish.read_text()))
    process.write_config(config, wish.parent.parent)
    wish.unlink()
  return True


@pytest.mark.parametrize(
  ("meanwhile", "why"),
  [
    (_dies, "no controller of this run is alive"),
    (_is_overtaken, "another change came in between"),
    (_takes_it_up, ""),
  ],
)
def test_who_wants_a_change_hears_what_came_of_it_and_leaves_no_wish(
  tmp_path, monkeypatch, meanwhile, why
):
  old = fake_fleet.make_config()
  process.write_config(old, tmp_path)
  path = change.wish_path(tmp_path)
  path.parent.mkdir()
  monkeypatch.setattr(change, "_POLL_SECS", 0.0)
  looks = []

  def alive(run_dir):
    looks.append(run_dir)
    return len(looks) == 1 or meanwhile(path)

  monkeypatch.setattr(change.liveness, "controller_alive", alive)
  values = old.to_dict() | {"sync": old.to_dict()["sync"] | {"every": 4}}
  if why:
    with pytest.raises(errors.UserError, match=why):
      change.request(tmp_path, values)
  else:
    assert change.request(tmp_path, values) == {"sync.every": (8, 4)}
  assert list(path.parent.iterdir()) == []
  # What holds already needs nobody.
  assert change.request(tmp_path, process.read_config(tmp_path).to_dict()) == {}


def test_change_that_cannot_be_changes_nothing(session, fleet, tmp_path):
  run = session(total_tokens=10_000)
  config = fake_fleet.make_config(total_tokens=10_000)
  process.write_config(config, tmp_path)
  run.open()
  for changes in ({"sync__codec": "f32"}, {"sync__every": 1}):
    wish(tmp_path, config, **changes)
    run.turn_until(lambda: not change.wish_path(tmp_path).exists(), secs=1.0)
  for text in ("{", "[" * 100_000):
    change.wish_path(tmp_path).write_text(text)
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
  state = run.controller.core.fleet.supervisor.state
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
