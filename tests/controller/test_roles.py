"""Roles of a session, on an engine that only remembers."""

import dataclasses
import json

import pytest

from diloco import config as config_lib
from diloco import errors, heartbeat, process
from diloco.controller import orders
from diloco.controller import roles as roles_lib
from diloco.controller.engines import base
from diloco.snapshots import keys, store
from diloco.tape import reader, recorder


class Handle:
  def __init__(self, pid):
    self.pid = pid
    self.cause = None
    self.signals = []

  def cause_of_death(self):
    return self.cause

  def signal(self, number):
    self.signals.append(number)
    if number == 9:
      self.cause = "SIGKILL"

  def wait(self, timeout_secs):
    return self.cause is not None


class Engine:
  """Processes that exist only here; they outlive their controller."""

  apart = binds = True

  def __init__(self):
    self.living = {}
    self.launches = []
    self.strays = []

  def start(self, launch):
    self.launches.append(launch)
    handle = Handle(100 + len(self.launches))
    facts = json.loads(json.dumps(launch.facts))
    self.living[launch.role] = base.Survivor(handle, facts)
    return handle

  def survivors(self):
    return dict(self.living)

  def kill_leftovers(self):
    killed = list(self.living)
    for found in self.living.values():
      found.handle.signal(9)
    self.living = {}
    return killed

  def tell_address(self):
    pass

  def kill_stray(self, pid):
    self.strays.append(pid)


def _config(**changes):
  values = {"fleet": {"slices": [{}, {}, {}], "num_islands": 2}}
  values["controller"] = {"max_islands_per_core": 64}
  return config_lib.from_mapping(values | changes)


@pytest.fixture
def engine():
  return Engine()


@pytest.fixture
def make(tmp_path, engine):
  tapes = []

  def roles(config=None, controller=1):
    tapes.append(recorder.Recorder(tmp_path, "controller", controller))
    return roles_lib.Roles(config or _config(), tmp_path, engine, tapes[-1])

  yield roles
  for tape in tapes:
    tape.close()


NAMES = ("syncer", "standby", "island-0", "island-1")


def _start_all(roles):
  return [roles.start(role) for role in NAMES]


def test_all_roles_keep_the_memory_that_they_take_again_and_again(make, engine):
  _start_all(make())
  for launch in engine.launches:
    assert launch.env.items() >= process.MALLOC_ENV.items()


def test_next_controller_takes_up_all_roles_and_what_they_run_on(make, engine):
  first = make()
  started = {s.role: (s.life, s.pid) for s in _start_all(first)}
  first.slice_lost("island-0")
  again = first.start("island-0")  # now on the spare
  started["island-0"] = (again.life, again.pid)
  later = make(controller=2)
  assert {t.role: (t.life, t.pid) for t in later.attach()} == started
  assert later.start("island-0").life == again.life + 1 == 3
  launches = {}
  for launch in engine.launches:
    launches.setdefault(launch.role, []).append(launch)
  before, after = launches["island-0"][-2:]
  assert before.facts["slice"] == after.facts["slice"] == 2
  assert before.cores == after.cores


@pytest.mark.parametrize(
  ("changes", "kept"),
  [
    ({}, True),
    ({"programs": {"window_steps": 7}}, True),
    ({"faults": [{"target": "syncer", "at_fraction": 0.5}]}, True),
    ({"outer": {"learning_rate": 0.25}}, True),  # of what they are told live
    ({"sync": {"every": 30, "quorum": 2, "grace": "0"}}, True),
    ({"total_tokens": 5}, False),
    ({"controller": {"max_islands_per_core": 64, "standbys": 0}}, False),
  ],
)
def test_roles_live_on_unless_they_read_what_has_changed(
  make, engine, changes, kept
):
  first = make()
  _start_all(first)
  attached = make(_config(**changes), controller=2).attach()
  assert {t.role for t in attached} == (set(NAMES) if kept else set())
  assert bool(engine.living) == kept


@pytest.mark.parametrize("version", [None, 7])
def test_roles_of_another_version_are_ended_and_it_is_said(
  make, engine, caplog, version
):
  _start_all(make())
  found = engine.living["island-1"]
  facts = {k: v for k, v in found.facts.items() if k != "version"}
  facts |= {"version": version} if version else {}
  engine.living["island-1"] = dataclasses.replace(found, facts=facts)
  later = make(controller=2)
  assert later.attach() == [] and engine.living == {}
  (told,) = [m for m in caplog.messages if "roles_ended" in m]
  assert told == f"version_changed roles_ended={','.join(NAMES)}"
  assert later.start("island-1").life == 2


@pytest.mark.parametrize(
  "facts",
  [
    {"incarnation": None},
    {"slice": 99},
    {"slice": None},
    {"cores": None},
  ],
)
def test_role_with_a_damaged_record_is_ended(make, engine, facts):
  _start_all(make())
  found = engine.living["island-1"]
  engine.living["island-1"] = dataclasses.replace(
    found, facts={**found.facts, **facts}
  )
  later = make(controller=2)
  assert "island-1" not in [t.role for t in later.attach()]
  assert found.handle.cause == "SIGKILL"
  assert later.start("island-1").life == 2


@pytest.mark.parametrize(
  ("log", "error"),
  [
    (None, ""),
    ("", ""),
    ("INFO begin\nTraceback\n  f(x)\nValueError: bad\n\n", "ValueError: bad"),
    ("error: first\nerror: a = 1: too small\nbye\n", "a = 1: too small"),
    ("x" * 100_000 + "\nlast\n", "last"),
  ],
)
def test_error_of_a_role_is_the_line_of_its_last_life(make, engine, log, error):
  roles = make()
  path = roles.log("island-0")
  path.parent.mkdir()
  path.write_text("error: of the life before\n")
  roles.start("island-0")
  with path.open("a") as file:
    file.write(log or "")
  if log is None:
    path.unlink()
  engine.living["island-0"].handle.cause = "exit 1"
  (died,) = roles.deaths()
  assert died == orders.Died("island-0", 1, "exit 1", error, str(path))
  assert roles.deaths() == []


def test_role_that_was_killed_gives_no_error(make, engine):
  roles = make()
  roles.start("island-0")
  roles.log("island-0").parent.mkdir()
  roles.log("island-0").write_text("error: not what killed it")
  roles.kill("island-0")
  (died,) = roles.deaths()
  assert (died.cause, died.error) == ("SIGKILL", "")


def test_nothing_is_left_alive_at_the_end(make, engine):
  _start_all(make())
  later = make(controller=2)
  later.attach()
  later.end_all()
  assert engine.living == {}


def test_incarnation_is_drawn_once_though_two_look_at_the_same_tapes(
  tmp_path, monkeypatch
):
  recorder.Recorder(tmp_path, "island-1", 4).close()
  assert roles_lib.draw_incarnation(tmp_path, "island-1") == 5
  assert roles_lib.draw_incarnation(tmp_path, "island-10") == 1
  assert roles_lib.draw_incarnation(tmp_path, "island-1", last=8) == 9
  # What another has drawn since is not in this one's listing.
  monkeypatch.setattr(type(tmp_path), "glob", lambda *_: iter(()))
  assert roles_lib.draw_incarnation(tmp_path, "island-1", last=3) == 6


def test_no_life_is_given_out_by_two_directories(tmp_path):
  lives = []
  for name in ("first", "copy", "first"):
    run_dir = tmp_path / name
    tape = recorder.Recorder(run_dir, "controller", 1)
    config = _config(store=(tmp_path / "far").as_uri())
    made = roles_lib.Roles(config, run_dir, Engine(), tape)
    lives.append((made.start("island-0").life, made.start("syncer").life))
    tape.close()
  assert lives == [(1, 1), (2, 2), (3, 3)]


def test_roles_are_taken_up_though_nobody_can_tell_who_lives_elsewhere(
  make, tmp_path, monkeypatch
):
  process.write_config(_config(), tmp_path)
  _start_all(make())

  def refuse(*_):
    raise OSError("the store is out of reach")

  later = make(controller=2)
  monkeypatch.setattr(store.SnapshotStore, "names", refuse)
  assert {t.role for t in later.attach()} == set(NAMES)


def test_roles_that_live_elsewhere_are_told_and_get_next_lives(
  make, tmp_path, caplog
):
  process.write_config(_config(), tmp_path)
  first = make()
  _start_all(first)
  snapshots = store.SnapshotStore(process.store_url(tmp_path))

  def sign(role, incarnation, **fields):
    member = dataclasses.replace(
      heartbeat.born(tmp_path, role, incarnation), nonce="far", **fields
    )
    snapshots.write(keys.member_key(role), member)

  sign("island-0", 1)  # in reach
  sign("standby2", 4, host="far")
  sign("evaluator", 5, left=True)
  sign("island-1", 9, told_secs=0.0)  # silent for long
  later = make(controller=2)
  assert {t.role for t in later.attach()} == set(NAMES)
  told = [m for m in caplog.messages if "out_of_reach" in m]
  assert len(told) == 1 and "role=standby2 life=4 host=far" in told[0]
  assert later.start("island-1").life == 10
  sign("syncer", 1, run="another")
  with pytest.raises(
    errors.UserError, match=r"syncer, life 1 .*\(run another,"
  ):
    make(controller=3).attach()


def test_each_role_is_started_as_what_it_is_and_on_the_tape(
  make, engine, tmp_path, monkeypatch
):
  monkeypatch.setattr(
    roles_lib.resources, "available_cores", lambda: [0, 1, 2, 3]
  )
  programs = {"evaluator": True, "eval_every_tokens": 8}
  roles = make(_config(programs=programs))
  order = ("island-1", "island-0", "syncer", "standby", "evaluator")
  begun = [roles.start(role) for role in order]
  assert begun == [
    orders.Begun(role, 1, 101 + n) for n, role in enumerate(order)
  ]
  told = ["--run_dir", str(tmp_path), "--incarnation", "1"]
  launched = {x.role: x for x in engine.launches}
  for role, module, more, cores in [
    ("syncer", "syncer.main", ["--role", "syncer"], []),
    ("standby", "syncer.main", ["--role", "standby"], []),
    (
      *("island-0", "islands.main"),
      ["--island", "0", "--slice", "0", "--cores", "0", "1"],
      [0, 1],
    ),
    (
      *("island-1", "islands.main"),
      ["--island", "1", "--slice", "1", "--cores", "2"],
      [2],
    ),
    ("evaluator", "islands.evaluator", ["--cores", "3"], [3]),
  ]:
    launch = launched[role]
    assert launch.module == f"diloco.{module}"
    assert launch.args == [*told, *more]
    assert list(launch.cores) == cores
    assert launch.log == tmp_path / "logs" / f"{role}.log"
    assert launch.facts["incarnation"] == 1
    if role.startswith("island"):
      index = int(role[-1])
      assert launch.facts["slice"] == index and launch.facts["cores"] == cores
  lines = [
    {
      k: v
      for k, v in e.items()
      if k not in ("role", "incarnation", "wall_secs")
    }
    for e in reader.read(tmp_path).events
    if e["role"] == "controller"
  ]
  assert lines == [
    *(
      {
        "event": "island_started",
        "island": m,
        "island_incarnation": 1,
        "pid": pid,
        "cores": cores,
      }
      for m, pid, cores in ((1, 101, [2]), (0, 102, [0, 1]))
    ),
    {"event": "syncer_started", "pid": 103, "seat": "syncer"},
    {"event": "syncer_started", "pid": 104, "seat": "standby"},
    {"event": "evaluator_started", "pid": 105, "cores": [3]},
  ]


def test_roles_that_were_taken_up_are_so_called_signalled_and_missed(
  make, engine
):
  _start_all(make())
  later = make(controller=2)
  attached = later.attach()
  assert [t.taken_up for t in attached] == [True] * len(NAMES)
  later.signal("island-1", 18)
  assert engine.living["island-1"].handle.signals == [18]
  engine.living["standby"].handle.cause = "unknown"
  assert [(d.role, d.life, d.cause) for d in later.deaths()] == [
    ("standby", 1, "unknown")
  ]


def test_who_has_lost_the_run_touches_no_role(tmp_path, engine, make):
  _start_all(make())

  def check():
    raise errors.FencedError("another controller has the run")

  tape = recorder.Recorder(tmp_path, "controller", 2)
  roles = roles_lib.Roles(_config(), tmp_path, engine, tape, check)
  for call in (
    roles.attach,
    lambda: roles.start("island-0"),
    lambda: roles.signal("island-0", 9),
    lambda: roles.kill("island-0"),
    lambda: roles.kill_stray(101),
    roles.end_all,
  ):
    with pytest.raises(errors.FencedError):
      call()
  tape.close()
  assert len(engine.launches) == len(NAMES) and engine.strays == []
  handles = [found.handle for found in engine.living.values()]
  assert [handle.signals for handle in handles] == [[]] * len(NAMES)


@pytest.mark.parametrize("hangs", ["", "standby"])
def test_all_are_killed_and_who_cannot_be_is_named(
  make, engine, monkeypatch, caplog, hangs
):
  roles = make()
  _start_all(roles)
  handles = {role: found.handle for role, found in engine.living.items()}
  if hangs:
    monkeypatch.setattr(handles[hangs], "wait", lambda timeout_secs: False)
  engine.living = {"island-7": engine.living["syncer"]}  # of nobody here
  assert roles.end_all() == sorted([*NAMES, "island-7"])
  assert all(handle.signals[0] == 9 for handle in handles.values())
  told = [m for m in caplog.messages if "unkillable" in m]
  assert [hangs in m for m in told] == [True] * bool(hangs)


@pytest.mark.parametrize("binds", [True, False])
def test_only_who_is_bound_to_cores_must_fit_on_them(
  make, engine, monkeypatch, binds
):
  engine.binds = binds
  monkeypatch.setattr(roles_lib.resources, "available_cores", lambda: [0])
  config = _config(controller={"max_islands_per_core": 1})
  if binds:
    with pytest.raises(errors.UserError, match="max_islands_per_core"):
      make(config)
    return
  make(config).start("island-1")
  assert list(engine.launches[0].cores) == []
