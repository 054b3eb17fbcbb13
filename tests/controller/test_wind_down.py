"""A session from its first turn to its last, in a fleet of fakes."""

import os

import fake_fleet
import pytest

from diloco import channel, errors, timing, workers
from diloco.controller import change, tenure
from diloco.report import liveness


def test_run_trains_its_budget_evaluates_and_stops(session, fleet):
  run = session()
  outcome = run.run()
  assert outcome.status == "finished"
  assert outcome.final_eval["loss"] == 1.0
  assert sum(fleet.steps.values()) * 10 >= 1000
  assert fleet.killed == [] and fleet.living == {} and fleet.closed
  (end,) = run.events("run_finished")
  assert end["status"] == "finished"


def test_interrupt_does_not_wait_for_train_windows(session, fleet):
  run = session(programs={"window_steps": 10_000}, total_tokens=10**6)
  run.open()
  run.turn_until(lambda: fleet.steps)
  before = fleet.now
  run.controller.interrupt()
  assert run.run().status == "stopped"
  assert fleet.now < before + 5.0


def test_island_that_still_starts_is_not_waited_for(session, fleet):
  fleet.start_secs["island-1"] = 5.0
  run = session()
  run.open()
  run.turn_until(lambda: fleet.now > 4.8)
  run.controller.interrupt()
  run.run()
  assert asked(run, "drain") == asked(run, "stop") == [0]
  assert fleet.killed == ["island-1"]
  assert run.events("island_died") == run.events("island_restart") == []


@pytest.mark.parametrize("sighted", [0, 1])
def test_last_evaluation_is_asked_for_again_until_an_island_can(
  session, fleet, sighted
):
  fleet.blind = {"island-0", "island-1"}

  def hook(role):
    if [m["name"] for _, m in fleet.sent].count("evaluate") > 2:
      fleet.blind = {f"island-{1 - sighted}"}

  fleet.hook = hook
  run = session()
  assert run.run().status == "finished"
  assert asked(run, "evaluate") == [0, 1, 0, 1][: 3 + sighted]


def test_run_without_an_island_that_is_ready_ends_at_once(session, fleet):
  """A syncer leads once there are versions, which an island would make."""
  for role in ("island-0", "island-1", "syncer", "standby"):
    fleet.start_secs[role] = 10.0**6
  run = session()
  run.open()
  run.turn_until(lambda: len(fleet.living) == 4)
  before = fleet.now
  run.controller.interrupt()
  assert run.run().status == "stopped"
  assert fleet.now < before + 5.0


def test_who_leads_merges_what_islands_left_that_are_all_dead(session, fleet):
  for role in ("island-0", "island-1"):
    fleet.start_secs[role] = 10.0**6
  run = session()
  run.open()
  run.turn_until(lambda: run.controller.core.fleet.is_ready("syncer"))
  run.controller.interrupt()
  assert run.run().status == "stopped"
  assert "drain" in [m["name"] for name, m in fleet.sent if name == "syncer"]


def alone(again_secs):
  """Settings of a syncer without a standby, started again so late."""
  return {
    "standbys": 0,
    "restart_base_secs": again_secs,
    "restart_max_secs": again_secs,
  }


def test_leader_that_cannot_come_is_not_waited_for(session, fleet):
  run = session(controller=alone(1000.0))
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 60)
  fleet.living["syncer"].die("SIGKILL")
  before = fleet.now
  run.controller.interrupt()
  assert run.run().status == "stopped"
  assert fleet.now < before + 5.0


def test_successor_that_damage_does_not_stop_is_waited_for(session, fleet):
  """Of one fragment's payload; the others' last contributions wait for it."""
  fleet.damaged, died, drained = [0], [], []

  def act(role):
    asked = bool(role.programs) and role.programs[0]["name"] == "drain"
    if role.name == "syncer" and asked:
      died.append(fleet.now)
      role.die("SIGKILL")
    elif role.name == "standby":
      drained.extend([role.name] * asked)
      if died and fleet.now > died[0] + 10.0:
        fleet.say("standby", type="hello", ready=True, token=2)

  run = session(controller={"restart_base_secs": 900.0})
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 60)
  fleet.hook = act
  run.controller.interrupt()
  assert run.run().status == "stopped"
  assert died and "standby" in drained


def test_leader_that_is_due_is_waited_for(session, fleet):
  run = session(controller=alone(20.0))
  run.open()
  run.turn_until(lambda: fleet.steps)
  fleet.living["syncer"].die("SIGKILL")
  run.controller.interrupt()
  assert run.run().status == "stopped"
  last = [m["name"] for name, m in fleet.sent if name == "syncer"]
  assert last[-2:] == ["drain", "stop"]


def test_second_interrupt_kills_everything(session, fleet):
  run = session()
  run.open()
  run.turn_until(lambda: fleet.steps)
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
  run = session()
  outcome = run.run()
  assert outcome.status == "finished" and outcome.final_eval
  assert fleet.killed == ["island-1"]
  assert asked(run, "drain") == [0, 1] and asked(run, "checkpoint") == [0]


def test_island_that_dies_in_the_drain_is_not_waited_for(session, fleet):
  died = []

  def leave(role):
    names = [p["name"] for p in role.programs]
    if role.name == "island-1" and "drain" in names:
      died.append(fleet.now)
      role.die("SIGKILL")

  fleet.hook = leave
  run = session()
  assert run.run().status == "finished"
  assert asked(run, "drain") == [0, 1] and asked(run, "checkpoint") == [0]
  times = timing.derive(fake_fleet.make_config().controller, 0.0)
  assert fleet.now - died[0] < times.drain_secs


def test_leader_that_dies_in_the_drain_leaves_it_to_the_next(session, fleet):
  def leave(role):
    if role.name == "syncer" and any(
      p["name"] == "drain" for p in role.programs
    ):
      role.die("SIGKILL")
      fleet.say("standby", type="ready", token=2)

  fleet.hook = leave
  assert session().run().status == "finished"


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
    assert set(fleet.living) == set(run.controller.core.fleet.names.all)
    assert fleet.killed == []
  assert fleet.closed
  assert run.events("run_finished") == []
  log = tmp_path / "logs" / "controller.log"
  assert "in surprise" in log.read_text() and str(log) in text


class Hold(tenure.Unopposed):
  """Of a controller that another has deposed once `lost` is set."""

  token = 3
  lost = False
  error = errors.FencedError("another controller took the run over")

  def check(self):
    if self.lost:
      raise self.error


def announced_by(run_dir, **facts):
  """What another controller says of itself."""
  pid = os.getppid()
  other = {"pid": pid, "started_ticks": liveness.start_ticks(pid)}
  return liveness.announcement(run_dir) | other | facts


@pytest.mark.parametrize("apart", [False, True])
def test_controller_whose_lease_nobody_renews_says_where_it_failed(
  session, fleet, tmp_path, apart
):
  fleet.apart, hold = apart, Hold()
  hold.error = workers.WorkerError("the tenure thread has ended: MemoryError: ")
  hold.lost = True
  run = session(hold=hold)
  with pytest.raises(errors.DetachedError, match="the tenure thread has ended"):
    run.run()
  assert fleet.closed and (tmp_path / "logs" / "controller.log").exists()


@pytest.mark.parametrize("where", [{}, {"machine": "another", "pid": 1}])
def test_controller_that_lost_its_run_before_it_began_is_not_announced(
  session, fleet, tmp_path, where
):
  hold = Hold()
  run = session(hold=hold)
  hold.lost = True
  fleet.announce(tmp_path, announced_by(tmp_path, **where))
  path = channel.address_path(tmp_path)
  before = path.read_bytes()
  with pytest.raises(errors.DetachedError, match="another controller took"):
    run.run()
  assert path.read_bytes() == before
  assert fleet.closed and not fleet.launches


@pytest.mark.parametrize(
  ("interrupts", "waits"), [(0, False), (0, True), (1, False), (2, False)]
)
def test_controller_that_lost_its_run_leaves_everything_as_it_is(
  session, fleet, tmp_path, interrupts, waits
):
  hold = Hold()
  run = session(hold=hold)
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 20)
  assert [e["token"] for e in run.events("run_started")] == [3]
  fleet.announce(tmp_path, announced_by(tmp_path))
  if not waits:
    fleet.living["island-1"].die("SIGKILL")  # is the other's to start again
    fleet.say("island-0", type="ready", step=1)
  change.wish_path(tmp_path).write_text("{}")

  def files():
    return {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

  before, starts = files(), len(fleet.launches)
  hold.lost = not waits

  def lose(role):  # while it waits for messages, of which there is one then
    hold.lost = True
    for program in role.programs:
      role._say("done", seq=program["seq"], result={"step": role.step})

  fleet.hook = lose
  for _ in range(interrupts):
    run.controller.interrupt()
  with pytest.raises(errors.DetachedError, match="another controller took"):
    run.run()
  assert files() == before
  assert fleet.killed == [] and len(fleet.launches) == starts
  assert fleet.closed


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


def asked(run, program):
  """Islands that were asked to do something, in order."""
  return [
    e["island"]
    for e in run.events("program_dispatched")
    if e["program"] == program
  ]


def on_program(fleet, name, act):
  """Calls `act(role)` for a role whose next program has this name."""

  def hook(role):
    if role.programs and role.programs[0]["name"] == name:
      act(role)

  fleet.hook = hook


@pytest.mark.parametrize("name", ["drain", "checkpoint", "stop"])
@pytest.mark.parametrize("back", [True, False])
def test_island_whose_channel_is_away_is_asked_once_it_is_back(
  session, fleet, name, back
):
  send, away = fleet.send, []

  def lossy(peer, message):
    if peer == "island-0" and (away or message["name"] == name):
      away.append(fleet.now)
      if len(away) == 1 or not back:
        return False
    return send(peer, message)

  def silent(role):
    if role.name == "island-0" and away and not back:
      role.beat_at = fleet.now + 1.0

  fleet.send, fleet.hook = lossy, silent
  run = session()
  assert run.run().status == "finished"
  assert fleet.killed == ([] if back else ["island-0"])
  done = [e["program"] for e in run.events("program_done") if e["island"] == 0]
  if back:
    assert [x for x in done if x in ("drain", "checkpoint", "stop")] == [
      *("drain", "checkpoint", "stop")
    ]


@pytest.mark.parametrize(
  ("dies", "status", "evaluators"),
  [
    (set(), "finished", [0]),
    ({"island-0"}, "finished", [0, 1]),
    ({"island-0", "island-1"}, "failed", [0, 1]),
  ],
)
def test_evaluation_goes_to_the_next_island_while_there_is_one(
  session, fleet, dies, status, evaluators
):
  on_program(
    fleet, "evaluate", lambda role: role.name in dies and role.die("SIGKILL")
  )
  run = session()
  outcome = run.run()
  assert (outcome.status, asked(run, "evaluate")) == (status, evaluators)
  assert bool(outcome.final_eval) == (status == "finished")


@pytest.mark.parametrize("answers", [False, True])
def test_drain_is_for_who_leads_now(session, fleet, answers):
  """The one asked first is stopped by a signal, or says it leads no more."""
  drained = []

  def act(role):
    if role.name == "syncer":
      program = role.programs.popleft()
      if answers:
        result = {"leads": False}
        fleet.say("syncer", type="done", seq=program["seq"], result=result)
      fleet.say("standby", type="ready", token=2)
    if role.name == "standby":
      drained.append(fleet.now)

  on_program(fleet, "drain", act)
  run = session()
  assert run.run().status == "finished"
  assert len(drained) == 1
  assert drained[0] < 20.0  # long before anybody's patience ends


def test_only_syncer_that_dies_in_the_drain_is_started_again(session, fleet):
  on_program(
    fleet,
    "drain",
    lambda role: role.name == "syncer" and role.pid == 101 and role.die("x"),
  )
  run = session(controller={"standbys": 0})
  assert run.run().status == "finished"
  assert [s.role for s in fleet.launches].count("syncer") == 2


def test_syncer_that_drains_for_this_session_is_left_to_it(session, fleet):
  on_program(
    fleet,
    "drain",
    lambda role: (
      role.name == "syncer"
      and fleet.say("syncer", type="hello", ready=True, token=1, draining=True)
    ),
  )
  assert session().run().status == "finished"
  assert fleet.killed == []


def test_standby_is_gone_before_the_leader_is_told_to_stop(session, fleet):
  gone = []

  def act(role):
    if role.name == "standby":
      role.programs.popleft()  # hears nothing
    elif role.name == "syncer":
      gone.append("standby" not in fleet.living)

  on_program(fleet, "stop", act)
  session().run()
  assert gone == [True]


def test_island_that_is_not_needed_any_more_may_still_arrive(session, fleet):
  fleet.steps = {"island-0": 60, "island-1": 60, "island-2": 5}
  fleet.start_secs["island-2"] = 9.0
  run = session(fleet={"slices": [{}] * 3})
  assert run.run().status == "finished"
  assert fleet.killed == [] and asked(run, "drain") == [0, 1, 2]


def test_leading_syncer_is_stopped_last_and_islands_first(session, fleet):
  stopped = []
  on_program(fleet, "stop", lambda role: stopped.append(role.name))
  session().run()
  assert stopped == ["island-0", "island-1", "standby", "syncer"]


@pytest.mark.parametrize("role", ["island-0", "standby", "syncer"])
def test_role_that_does_not_stop_is_killed(session, fleet, role):
  on_program(fleet, "stop", lambda r: r.name == role and r.programs.popleft())
  assert session().run().status == "finished"
  assert fleet.killed == [role]


def test_leader_that_merges_slowly_what_is_left_is_waited_for(session, fleet):
  begun, waiting = [], []

  def slow(role):
    if role.name != "syncer":
      return
    if role.programs and role.programs[0]["name"] == "drain":
      begun.append(fleet.now)
      waiting.append(role.programs.popleft())
    if waiting:
      fleet.merges["syncer"] = int((fleet.now - begun[0]) / 50.0)
      if fleet.merges["syncer"] == 5:
        role.programs.append(waiting.pop())

  fleet.hook = slow
  assert session().run().status == "finished"
  assert len(begun) == 1 and waiting == [] and fleet.killed == []


def test_leader_that_cannot_drain_holds_nobody_up_for_ever(session, fleet):
  on_program(
    fleet,
    "drain",
    lambda role: role.name == "syncer" and role.programs.popleft(),
  )
  assert session().run().status == "finished"
  assert fleet.killed == []


def test_nobody_starts_again_once_the_session_winds_down(session, fleet):
  on_program(
    fleet, "drain", lambda role: role.name == "island-1" and role.die("SIGSEGV")
  )
  run = session()
  assert run.run().status == "finished"
  assert [s.role for s in fleet.launches].count("island-1") == 1
