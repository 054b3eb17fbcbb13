"""The controller's decisions: events in, orders out, and nothing else."""

import itertools
import random

import fake_fleet
import pytest

from diloco import timing
from diloco.controller import core as core_lib
from diloco.controller import orders, pilot

ROLES = ("syncer", "standby", "island-0", "island-1")
TIMES = timing.derive(fake_fleet.make_config().controller, 0.0)


class Run:
  """A session's core, and a hand that does at once what it orders."""

  def __init__(self, **values):
    self.config = fake_fleet.make_config(**values)
    self.core = core_lib.ControllerCore(self.config, TIMES, 10)
    self.fleet = self.core.fleet
    self.now = 0.0
    self.lives = {}  # role -> number of its life
    self.made = []  # all orders
    self.damaged = ()  # as the syncer says

  def tell(self, *events):
    """What is ordered then."""
    made = [o for e in events for o in self.core.handle(e, self.now)]
    self.made += made
    return made

  def tick(self, secs=0.1):
    self.now += secs
    return self.tell(orders.Tick())

  def begin(self, role, ready=True, step=0, token=0):
    """The role starts and gets ready."""
    life = self.lives[role] = self.lives.get(role, 0) + 1
    made = self.tell(orders.Begun(role, life, self.pid(role)))
    if ready:
      made += self.ready(role, step=step, token=token)
    return made

  def pid(self, role):
    return 1000 * self.lives[role] + self.fleet.names.all.index(role)

  def ready(self, role, **said):
    return self.tell(orders.Hello(role, None, ready=True, **said))

  def begin_all(self):
    assert starts(self.tick()) == list(ROLES)
    for role in ROLES:
      self.begin(role, token=int(role == "syncer"))
    return self.tick()

  def die(self, role, cause="SIGKILL", error=""):
    life = self.lives[role]
    return self.tell(orders.Died(role, life, cause, error, f"{role}.log"))

  def beat(self, but=()):
    """Everybody says something; islands also that they get on."""
    for role in set(self.fleet.lives) - set(but):
      damaged = self.damaged if role == "syncer" else ()
      progress = int(self.now * 10)
      self.tell(orders.Status(role, progress=progress, damaged=damaged))

  def wait(self, secs, but=()):
    """Time passes in which all is well but for some roles."""
    made = []
    for _ in range(int(secs)):
      self.beat(but)
      made += self.tick(1.0)
    return made

  def state(self, role):
    return self.fleet.supervisor.state(role)


def of(made, kind):
  return [order for order in made if isinstance(order, kind)]


def starts(made):
  return [order.role for order in of(made, orders.Start)]


def sent(made):
  return [(o.program.peer, o.program.name) for o in of(made, orders.Send)]


def lines(made, event):
  return [dict(o.fields) for o in of(made, orders.Record) if o.event == event]


def outcome(made):
  (end,) = of(made, orders.End)
  assert made[-1] is end
  return end.outcome


def test_all_are_started_once_and_trained_once_all_are_there():
  run = Run()
  assert starts(run.tick()) == list(ROLES)
  assert starts(run.tick()) == []  # what was ordered is not ordered again
  for role in ROLES[:-1]:
    run.begin(role)
  assert sent(run.tick()) == []
  run.begin("island-1")
  assert (
    sent(run.tick())
    == [("island-0", "train")] * 2 + [("island-1", "train")] * 2
  )


def test_program_is_on_the_tape_before_it_is_sent():
  run = Run()
  made = run.begin_all()
  i = next(i for i, o in enumerate(made) if isinstance(o, orders.Send))
  record, point, send = made[i - 2 : i + 1]
  assert (record.event, point) == (
    "program_dispatched",
    orders.Point("controller_dispatch"),
  )
  assert record.fields["seq"] == send.program.seq


def test_island_that_does_not_come_is_waited_for_so_long():
  run = Run(controller={"gather_secs": 20.0, "start_secs": 1e3})
  run.tick()
  for role in ROLES[:-1]:
    run.begin(role)
  run.begin("island-1", ready=False)
  run.tick()
  assert sent(run.wait(19, but=["island-1"])) == []
  assert sent(run.wait(2)) != []


def test_death_is_told_once_and_a_start_follows_after_a_pause():
  run = Run()
  run.begin_all()
  made = run.die("island-0", "SIGSEGV")
  assert lines(made, "island_died") == [
    {"island": 0, "island_incarnation": 1, "cause": "SIGSEGV"}
  ]
  (again,) = lines(made, "island_restart")
  assert (again["island"], again["attempt"]) == (0, 1)
  assert run.die("island-0") == []
  assert starts(run.tick()) == []
  assert starts(run.tick(again["delay_secs"])) == ["island-0"]
  run.begin("island-0")
  assert run.tell(orders.Died("island-0", 1, "SIGKILL")) == []  # of before


def test_second_death_in_a_row_makes_its_slice_suspect():
  run = Run()
  run.begin_all()
  assert of(run.die("island-0"), orders.MoveSlice) == []
  run.wait(5)
  run.begin("island-0")
  assert of(run.die("island-0"), orders.MoveSlice) == [
    orders.MoveSlice("island-0")
  ]
  assert of(run.die("syncer"), orders.MoveSlice) == []


def test_start_that_the_machine_refuses_is_no_death_and_tried_again():
  run = Run(controller={"max_restarts": 1})
  run.tick()
  for _ in range(20):
    made = run.tell(orders.Failed(orders.Start("island-0"), "EAGAIN"))
    assert [o.text.split()[0] for o in of(made, orders.Say)] == ["no_start"]
    assert starts(run.tick()) == []
    assert "island-0" in starts(run.tick(1e3))


@pytest.mark.parametrize(
  ("first", "second", "ends"),
  [
    (("exit 1", "ValueError: a"), ("exit 1", "ValueError: a"), True),
    (("exit 2", "a"), ("exit 1", "a"), True),
    (("exit 1", "a"), ("exit 1", "b"), False),
    (("exit 1", ""), ("exit 1", ""), False),
    (("SIGKILL", "a"), ("SIGKILL", "a"), False),
    (("exit 0", "a"), ("exit 0", "a"), False),
  ],
)
@pytest.mark.parametrize("role", ["island-0", "standby", "syncer"])
@pytest.mark.parametrize("ready", [False, True])
def test_role_that_fails_twice_alike_before_any_step_ends_the_run(
  role, ready, first, second, ends
):
  run = Run()
  run.tick()
  for death in (first, second):
    run.begin(role, ready=ready)
    made = run.die(role, *death)
  assert bool(of(made, orders.End)) == ends
  if ends:
    told = outcome(made)
    assert told.status == "failed" and first[1] in str(told.user_error)
    assert f"{role}.log" in str(told.user_error)
    assert lines(made, "island_restart") == []


@pytest.mark.parametrize("works", ["a step", "another role"])
def test_failures_in_a_run_that_works_are_a_roles_own(works):
  run = Run(sync={"quorum": 1}, controller={"max_restarts": 3})
  run.begin_all()
  if works == "a step":
    run.tell(orders.Status("island-1", progress=1, step=1))
  for n in range(2):
    role = "island-0" if works == "a step" else f"island-{n}"
    made = run.die(role, "exit 1", "error: the same")
    run.begin(role)
  assert of(made, orders.End) == []


MISTAKE, NO_DATA = "exit 3", "exit 4"


@pytest.mark.parametrize(
  ("deaths", "ends"),
  [
    ([(MISTAKE, "batch 7")] * 3, True),
    ([(NO_DATA, "they ended")], True),
    (
      [(MISTAKE, "batch 7"), ("SIGKILL", ""), *[(MISTAKE, "batch 7")] * 2],
      True,
    ),
    ([(MISTAKE, "batch 7")] * 2, False),
    ([(MISTAKE, "batch 7"), (MISTAKE, "batch 8")] * 3, False),
    ([(MISTAKE, "")] * 4, False),
    ([("exit 1", "batch 7")] * 4, False),
    ([("exit 2", "batch 7")] * 4, False),
    ([("SIGKILL", "batch 7")] * 4, False),
  ],
)
def test_mistake_that_comes_again_at_its_step_ends_the_run(deaths, ends):
  run = Run(sync={"quorum": 1}, controller={"max_restarts": 9})
  run.begin_all()
  run.tell(orders.Status("island-0", progress=1, step=9))
  for i, death in enumerate(deaths):
    assert of(run.made, orders.End) == []
    if i:
      run.begin("island-0")
    made = run.die("island-0", *death)
  assert bool(of(made, orders.End)) == ends
  if ends:
    told = outcome(made)
    assert told.status == "failed" and death[1] in str(told.user_error)
    assert "island-0.log" in str(told.user_error)


def test_mistake_of_two_islands_is_counted_for_each():
  run = Run(sync={"quorum": 1}, controller={"max_restarts": 9})
  run.begin_all()
  run.tell(orders.Status("island-0", progress=1, step=9))
  for role in ["island-0", "island-1"] * 2:
    run.die(role, MISTAKE, "batch 7")
    run.begin(role)
  assert of(run.made, orders.End) == []


@pytest.mark.parametrize(
  ("quorum", "die", "fails"),
  [
    (1, ["island-0"], False),
    (2, ["island-0"], True),
    (1, ["island-0", "island-1"], True),
    (1, ["syncer"], False),
    (1, ["syncer", "standby"], True),
  ],
)
def test_run_fails_once_too_few_are_left(quorum, die, fails):
  run = Run(sync={"quorum": quorum}, controller={"max_restarts": 2})
  run.tick()
  for role in die:
    for _ in range(3):
      run.begin(role)
      made = run.die(role, "SIGSEGV")
    assert run.state(role) == "given_up"
    assert starts(run.wait(60)).count(role) == 0
  if fails:
    ended = outcome(made)
    assert (ended.status, f"{die[-1]}.log" in ended.reason) == ("failed", True)
  else:
    assert of(made, orders.End) == []


def test_island_that_always_dies_at_one_step_is_given_up():
  run = Run(sync={"quorum": 1}, controller={"max_restarts": 3})
  run.begin_all()
  for _ in range(4):
    run.tell(orders.Status("island-0", progress=1, step=30))
    run.die("island-0")
    run.begin("island-0", step=25)
  assert run.state("island-0") == "given_up"


def test_deaths_with_work_done_between_them_are_forgiven():
  run = Run(controller={"max_restarts": 1}, total_tokens=10**6)
  run.begin_all()
  for step in range(20, 200, 20):
    run.tell(orders.Status("island-0", progress=step, step=step))
    (again,) = lines(run.die("island-0"), "island_restart")
    assert again["attempt"] == 1
    assert starts(run.wait(5)) == ["island-0"]
    run.begin("island-0", step=step - 5)


@pytest.mark.parametrize(
  ("merges", "survives"), [([5, 2, 1], True), ([0] * 3, False), ([5, 0, 0], 0)]
)
def test_deaths_of_syncers_are_forgiven_with_a_merge(merges, survives):
  run = Run(controller={"max_restarts": 1, "standbys": 0})
  run.tick()
  for told in merges:
    run.begin("syncer", token=1)
    run.tell(orders.Status("syncer", merges=told))
    run.die("syncer")
  assert bool(of(run.made, orders.End)) != survives


def test_merge_forgives_the_seats_that_did_not_make_it_too():
  run = Run(controller={"max_restarts": 1})
  run.begin_all()
  for merges in (1, 2, 3):
    run.die("standby")
    run.begin("standby")
    run.tell(orders.Status("syncer", merges=merges))
  assert run.state("standby") == "running"


@pytest.mark.parametrize(
  ("silent", "why"),
  [("island-0", "no sign of life"), ("standby", "no sign of life")],
)
def test_role_that_falls_silent_is_killed_and_started_again(silent, why):
  run = Run(total_tokens=10**6)
  run.begin_all()
  made = run.wait(TIMES.hang_secs - 2, but=[silent])
  assert of(made, orders.Kill) == []
  run.tell(orders.Lost(silent))  # which is no sign of life
  made = run.wait(3, but=[silent])
  kill = of(made, orders.Kill)[0]
  assert kill.role == silent and kill.cause.startswith(why)
  (said,) = [o for o in run.die(silent) if isinstance(o, orders.Say)]
  assert why in said.text
  assert silent in starts(run.wait(5))


def test_who_leads_is_who_has_the_newest_token_and_lives():
  run = Run()
  run.begin_all()
  assert run.fleet.leader == "syncer"
  run.ready("standby", token=2)  # the other was stopped by a signal
  assert run.fleet.leader == "standby"
  (line,) = lines(run.die("standby"), "syncer_died")
  assert line == {"cause": "SIGKILL", "seat": "standby", "led": True}
  run.die("syncer")
  assert run.fleet.leader is None
  run.begin("standby", ready=False)  # a new life leads nothing yet
  assert run.fleet.leader is None


def test_old_token_told_late_deposes_nobody_but_its_owner():
  run = Run(total_tokens=10**6)
  run.begin_all()
  run.ready("standby", token=3)
  run.ready("syncer", token=2)  # a later one than was known of it
  assert run.fleet.leader == "standby"
  run.die("syncer")
  run.begin("syncer", token=2)  # taken up: it says so before it is told
  made = run.wait(TIMES.deposed_secs + 2, but=["syncer"])
  kills = {(k.role, k.cause.split(",")[0]) for k in of(made, orders.Kill)}
  assert kills == {("syncer", "deposed")}


def test_second_process_of_a_role_that_lives_is_none():
  run = Run()
  run.begin_all()
  pid = run.fleet.lives["island-0"].pid
  run.tell(orders.Begun("island-0", 9, 99_999))
  assert run.fleet.lives["island-0"].pid == pid
  assert run.state("island-0") == "running"


def test_without_a_leader_nobody_is_the_one_that_waits():
  run = Run()
  run.begin_all()
  assert run.fleet.hit("standby") == "standby"
  run.die("syncer")
  assert run.fleet.hit("standby") is None and run.fleet.hit("syncer") is None


def test_who_led_under_an_older_token_and_is_silent_is_killed_soon():
  run = Run(total_tokens=10**6)
  run.begin_all()
  run.ready("standby", token=2)
  made = run.wait(TIMES.deposed_secs + 2, but=["syncer", "island-0"])
  assert {(k.role, k.cause.split(",")[0]) for k in of(made, orders.Kill)} == {
    ("syncer", "deposed")
  }
  (line,) = lines(run.die("syncer"), "syncer_died")
  assert line["led"] is False and "deposed" in line["cause"]
  run.begin("syncer")  # which leads nothing, and is not deposed
  assert of(run.wait(20), orders.Kill) == []


@pytest.mark.parametrize(
  ("target", "leader", "hit"),
  [
    ("syncer", "syncer", "syncer"),
    ("syncer", "standby", "standby"),
    ("standby", "syncer", "standby"),
    ("standby", "standby", "syncer"),
    ("island-1", "syncer", "island-1"),
  ],
)
def test_fault_hits_who_does_what_it_is_meant_for_once_when_due(
  target, leader, hit
):
  fault = {"kind": "sigkill", "target": target, "at_fraction": 0.5}
  run = Run(faults=[fault])
  run.begin_all()
  run.ready(leader, token=2)
  run.tell(orders.Status("island-0", progress=1, step=49))
  assert of(run.tick(), orders.Signal) == []
  run.tell(orders.Status("island-0", progress=1, step=50))
  made = run.tick()
  assert of(made, orders.Signal) == [orders.Signal(hit, "sigkill")]
  (line,) = lines(made, "fault_injected")
  assert (line["target"], line["at_tokens"]) == (target, 500)
  assert of(run.tick(), orders.Signal) == []


def test_fault_waits_for_its_role_to_be_ready():
  fault = {"kind": "poison", "target": "island-1", "at_fraction": 0.0}
  run = Run(faults=[fault])
  run.tick()
  for role in ROLES[:-1]:
    run.begin(role)
  assert lines(run.tick(), "fault_injected") == []
  run.begin("island-1")
  made = run.tick()
  assert sent(made)[0] == ("island-1", "poison")
  assert lines(run.tick(), "fault_injected") == []


def test_process_nobody_remembers_is_ended_and_not_listened_to():
  run = Run()
  run.begin_all()
  hello = orders.Hello("island-0", 7, ready=True, step=10**9)
  assert of(run.tell(hello), orders.KillStray) == [
    orders.KillStray("island-0", 7)
  ]
  assert run.tell(orders.Status("island-0", 1, step=10**9, pid=7)) == []
  assert run.tell(orders.Hello("nobody", 7, ready=True)) == []
  assert not run.core.pilot.budget_spent


def test_channel_that_is_found_again_is_no_new_beginning():
  run = Run()
  run.begin_all()
  run.tell(orders.Status("island-0", progress=1, step=9))
  pid = run.pid("island-0")
  assert run.tell(orders.Hello("island-0", pid, ready=True, step=1)) == []
  assert run.core.pilot.tokens == 90


def test_programs_lost_with_a_channel_are_sent_again_once_there_is_one():
  run = Run()
  run.begin_all()
  assert sent(run.tick()) == []
  run.tell(orders.Lost("island-0", pid=7))  # an older one
  assert sent(run.tick()) == [] and run.fleet.lives["island-0"].connected
  assert run.fleet.programs.queued("island-0", "train") == 2
  pid = run.pid("island-0")
  run.tell(orders.Lost("island-0", pid))
  assert sent(run.tick()) == sent(run.tick()) == []
  run.tell(orders.Hello("island-0", pid, ready=True))
  assert sent(run.tick()) == [("island-0", "train")] * 2


@pytest.mark.parametrize("taken_up", [False, True])
def test_change_that_went_with_a_channel_is_told_with_the_next_one(taken_up):
  run = Run(total_tokens=10**6)
  if taken_up:
    run.tell(orders.Begun("standby", 1, 7, taken_up=True))
    run.ready("standby")
  else:
    run.begin_all()
    run.tell(orders.Configured(run.config, {}))
  pid = run.fleet.lives["standby"].pid
  run.tell(orders.Lost("standby", pid))
  made = run.tell(orders.Hello("standby", pid, ready=True))
  assert sent(made) == [("standby", "configure")]
  assert lines(made, "reattached") == []


def test_change_is_told_to_all_who_can_be_asked_and_to_others_once_they_can():
  run = Run(programs={"evaluator": True, "eval_every_tokens": 80})
  run.tick()
  for role in (*ROLES, "evaluator"):
    run.begin(role, ready=role != "island-1")
  made = run.tell(orders.Configured(run.config, {"sync.quorum": (1, 2)}))
  (line,) = lines(made, "config_changed")
  assert line == {"changes": {"sync.quorum": (1, 2)}}
  told = ["syncer", "standby", "island-0", "evaluator"]
  assert sent(made) == [(role, "configure") for role in told]
  made = run.ready("island-1")
  assert sent(made) == [("island-1", "configure")]


def test_evaluator_is_asked_again_unless_it_has_evaluated():
  run = Run(programs={"evaluator": True, "eval_every_tokens": 80})
  for role in (*ROLES, "evaluator"):
    run.begin(role)

  def asked(made):
    return [
      o.program for o in of(made, orders.Send) if o.program.peer == "evaluator"
    ]

  def answer(made, name, result):
    (program,) = (p for p in asked(made) if p.name == name)
    return run.tell(orders.Done("evaluator", program.seq, result))

  made = run.tick()
  change = run.tell(orders.Configured(run.config, {}))
  answer(change, "configure", {})
  assert asked(run.tick()) == []  # it is at the first still
  answer(made, "evaluate", {"loss": 1.5})
  assert asked(run.tick()) == []
  run.tell(orders.Status("island-0", step=8, progress=1))
  made = run.tick()
  change = run.tell(orders.Configured(run.config, {}))
  answer(change, "configure", {})  # and with the next under way, too
  run.die("evaluator")
  run.begin("evaluator")
  (again,) = asked(run.tick())
  assert again.args == asked(made)[0].args


def test_roles_taken_up_are_told_the_settings_and_on_the_tape():
  run = Run()
  for n, role in enumerate(ROLES):
    run.tell(orders.Begun(role, 5, n, taken_up=True))
  assert lines(run.tell(orders.Opened(3, {})), "run_started")[0]["token"] == 3
  assert starts(run.tick()) == []
  made = run.tell(orders.Hello("island-0", 2, ready=True, step=8))
  assert sent(made) == [("island-0", "configure")]
  (line,) = lines(made, "reattached")
  assert (line["peer_incarnation"], line["step"]) == (5, 8)
  assert lines(made, "island_ready") == []
  # Its next life is like any other.
  run.lives["island-0"] = 5
  run.die("island-0")
  made = run.begin("island-0")
  assert sent(made) == [] and len(lines(made, "island_ready")) == 1


@pytest.mark.parametrize("training", [True, False])
def test_syncer_that_an_earlier_session_drains_is_ended_to_train_on(training):
  run = Run()
  run.begin_all()
  if not training:
    run.tell(orders.Interrupted())
  hello = orders.Hello("syncer", None, ready=True, token=1, draining=True)
  killed = {o.role for o in of(run.tell(hello), orders.Kill)}
  assert killed == ({"syncer"} if training else set())


def test_damage_that_stands_is_gone_back_for_and_all_start_anew():
  run = Run(total_tokens=10**6)
  run.begin_all()
  run.wait(3)
  run.damaged = [1]
  made = run.wait(4 * TIMES.takeover_secs + 2)
  assert len(of(made, orders.GoBack)) == 1  # one at a time
  assert of(run.tick(), orders.GoBack) == []
  run.tell(orders.Failed(orders.GoBack(), "EIO"))
  assert of(run.tick(), orders.GoBack) == [orders.GoBack()]
  run.tell(orders.Ending())
  for role in ROLES[:-1]:
    assert run.die(role) == []  # nobody's death
  assert starts(run.tick()) == []
  run.tell(orders.SetBack(done=True))
  # Who cannot be killed is not started a second time.
  assert starts(run.tick()) == list(ROLES[:-1])
  assert lines(run.die("island-1"), "island_died") == []
  assert starts(run.tick()) == ["island-1"]
  run.begin("island-0")
  assert sent(run.tick()) == []  # islands gather again


def test_return_to_a_cut_goes_before_the_end_of_a_trained_run():
  run = Run()
  run.begin_all()
  run.damaged = [1]
  run.beat()
  due = run.now + 4 * TIMES.takeover_secs
  while run.now < due - 1.0:
    run.beat()
    run.tick(0.5)
  for m in range(2):
    run.tell(orders.Status(f"island-{m}", progress=-1, step=50))
  made = run.tick(due - run.now)
  assert run.core.pilot.budget_spent
  assert orders.GoBack() in made and lines(made, "run_stopping") == []
  run.tell(orders.Failed(orders.GoBack(), "EIO"))
  run.damaged = []
  run.beat()
  assert lines(run.tick(), "run_stopping") != []


def test_steps_that_were_given_up_do_not_count_for_who_is_not_back():
  run = Run(total_tokens=1000)
  run.begin_all()
  for m in range(2):
    run.tell(orders.Status(f"island-{m}", progress=1, step=47))
  run.tell(orders.Ending())
  for role in ROLES:
    run.die(role)
  run.tell(orders.SetBack(done=True))
  run.tick()
  run.begin("island-0", step=10)
  run.tick()  # from now on the other is waited for
  run.now += run.config.controller.gather_secs
  run.tell(orders.Status("island-0", progress=2, step=60))
  assert lines(run.tick(), "run_stopping") == []
  run.begin("island-1", step=10)
  run.tell(orders.Status("island-0", progress=3, step=90))
  assert lines(run.tick(), "run_stopping") != []


@pytest.mark.parametrize("emptied", [False, True])
def test_return_without_a_cut_is_given_up_unless_it_was_begun(emptied):
  run = Run(total_tokens=10**6)
  run.begin_all()
  run.damaged = [1]
  run.wait(4 * TIMES.takeover_secs + 1)
  if emptied:
    run.tell(orders.Ending())
  made = run.tell(orders.SetBack(False, "no cut can be restored"))
  if emptied:
    assert "no cut" in outcome(made).reason
  else:
    (line,) = lines(made, "not_restored")
    assert line["fragments"] == [1]
    assert of(run.wait(60), orders.GoBack) == []


def test_interrupt_drains_saves_and_stops_in_order():
  run = Run()
  run.begin_all()
  made = run.tell(orders.Interrupted())
  assert lines(made, "run_stopping") == [{"reason": "interrupted"}]
  assert orders.CloseCuts() in made
  asked = []
  for _ in range(100):
    for order in of(made, orders.Send):
      asked.append((order.program.name, order.program.peer))
      done = orders.Done(order.program.peer, order.program.seq, {"step": 1})
      run.tell(done)
      if order.program.name == "stop":
        run.die(order.program.peer, "exit 0")
    if of(made := run.tick(), orders.End):
      break
  islands = ["island-0", "island-1"]
  assert asked == [
    *(("drain", m) for m in islands),
    ("drain", "syncer"),
    *(("checkpoint", m) for m in islands),
    *(("stop", m) for m in [*islands, "standby", "syncer"]),
  ]
  assert outcome(made).status == "stopped"
  assert of(run.made, orders.Kill) == []
  assert lines(run.made, "island_died") == []


def test_second_interrupt_ends_everything_at_once():
  run = Run()
  run.begin_all()
  run.tell(orders.Interrupted())
  assert outcome(run.tell(orders.Interrupted())).status == "killed"
  assert run.tick() == run.die("island-0") == []


def any_event(run, rng):
  """Whatever may be told, most of it out of order."""
  fleet = run.core.fleet
  role = rng.choice([*ROLES, "nobody"])
  life = fleet.lives.get(role)
  right = life is not None and rng.random() < 0.8
  number = life.number if right else rng.randrange(4)
  pid = life.pid if right else rng.choice([None, rng.randrange(4)])
  step = rng.randrange(60)
  programs = [o.program for o in of(run.made[-60:], orders.Send)]
  sent = rng.choice(programs) if programs else None
  result = rng.choice(
    [
      {},
      {"step": step},
      {"leads": False},
      {"error": "e"},
      {"loss": 1.0, "newest_version": 1, "step": step},
    ]
  )
  order = rng.choice([orders.Start(role), orders.GoBack(), orders.CloseCuts()])
  cause = rng.choice(["SIGKILL", "exit 1", "exit 0"])
  damaged = rng.choice([(), (), (1,)])
  return rng.choice(
    [
      orders.Tick(),
      orders.Begun(role, number, 0, taken_up=True) if not fleet.lives else None,
      orders.Failed(order, "EIO"),
      orders.Hello(role, pid, rng.random() < 0.9, rng.randrange(3), step=step),
      orders.Status(role, step, 0.0, step, step, damaged, pid),
      orders.Done(sent.peer, sent.seq, result) if sent else None,
      orders.Done(role, rng.randrange(99), result, pid),
      orders.Lost(role, pid),
      orders.Died(role, number, cause, rng.choice(["", "a", "b"])),
      orders.Configured(run.config, {}),
      orders.Opened(1, {}),
      rng.choice(
        [orders.Ending(), orders.SetBack(True), orders.SetBack(False, "n")]
      ),
      orders.Interrupted() if rng.random() < 0.02 else None,
      "time",
    ]
  )


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_told_in_whatever_order_is_borne_and_an_interrupt_ends_it(
  seed,
):
  rng = random.Random(seed)
  run = Run(
    total_tokens=rng.choice([500, 10**6]),
    sync={"quorum": rng.choice([1, 2])},
    controller={"max_restarts": rng.choice([1, 50])},
    faults=[{"kind": "sigkill", "target": "standby", "at_fraction": 0.1}],
  )
  core, now, lives = run.core, 0.0, itertools.count(10)
  ordered = set()  # starts under way
  alive = {}  # as the machine knows, role -> life

  def tell(event):
    made = core.handle(event, now)
    run.made.extend(made)
    if isinstance(event, orders.Died) and alive.get(event.role) == event.life:
      del alive[event.role]
    for order in made:
      match order:
        case orders.Start(role):
          # Never two lives of a role, nor two orders for one.
          assert role not in ordered and role not in alive
          ordered.add(role)
        case orders.Kill(role) | orders.Signal(role):
          assert role in alive
        case orders.Send(program):
          assert program.peer in alive
        case orders.End():
          assert order is made[-1]

  for _ in range(400):
    if ordered and rng.random() < 0.4:
      role = rng.choice(sorted(ordered))
      ordered.remove(role)
      if rng.random() < 0.2:
        tell(orders.Failed(orders.Start(role), "EAGAIN"))
      else:
        alive[role] = next(lives)
        tell(orders.Begun(role, alive[role], alive[role]))
    event = any_event(run, rng)
    if event == "time":
      now += rng.choice([0.1, 1.0, 10.0, 100.0])
    elif isinstance(event, orders.Failed):
      role = getattr(event.order, "role", None)
      if role is None or role in ordered:
        ordered.discard(role)
        tell(event)
    elif isinstance(event, orders.Begun):
      if event.role not in ordered and event.role in ROLES:
        alive[event.role] = event.life
        tell(event)
    elif event is not None:
      tell(event)
  tell(orders.Interrupted())
  ticks = itertools.count()
  while core.outcome is None:
    assert next(ticks) < 20_000, "it does not end"
    now += 0.1
    tell(orders.Tick())
  assert core.outcome.status in ("stopped", "finished", "failed", "killed")


def test_windows_are_what_the_pilot_wants():
  """The core sends the pilot's words as they are."""
  run = Run(programs={"window_steps": 8, "checkpoint_every_steps": 3})
  run.begin_all()
  wanted = pilot.Wanted(0, "checkpoint", {"wait": False})
  run.tell(orders.Status("island-0", progress=1, step=3))
  for program in [o.program for o in of(run.made, orders.Send)]:
    run.tell(orders.Done(program.peer, program.seq, {"step": 3}))
  programs = [o.program for o in of(run.tick(), orders.Send)]
  assert (programs[0].name, programs[0].args) == (wanted.name, wanted.args)
