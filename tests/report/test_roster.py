"""Which roles live, as `diloco status`, `ls` and `explain` tell anywhere."""

import contextlib
import dataclasses
import json
import subprocess
import time

import pytest
import run_builder

from diloco import cli, config, heartbeat, logbook, process
from diloco.report import liveness, roster
from diloco.snapshots import keys, store
from diloco.tape import recorder
from tests.tape import test_explain

_OWN = {"event", "role", "incarnation", "wall_secs"}  # what a recorder adds


class Signed:
  """A run that is on, in whose store roles have signed in."""

  def __init__(self, tmp_path):
    self.dir = tmp_path / "run"
    self.url = (tmp_path / "far").as_uri()
    plan = run_builder.Plan(secs=6.0, finish=False)
    run_builder.simulate(self.dir, plan)
    fields = {"name": "signed", "store": self.url}
    process.write_config(config.from_mapping(fields), self.dir)
    self.store = store.SnapshotStore(self.url)
    syncer = recorder.Recorder(self.dir, "syncer", 9)
    tape = test_explain.Tape()
    tape.merge(1, fragment=9)  # as the simulated ones cannot be explained
    *_, line = tape.lines
    fields = {name: line[name] for name in line.keys() - _OWN}
    syncer.record(line["event"], **fields)
    syncer.close()
    logbook.Keeper(self.dir, self.store).push()

  def sign(self, role, life, **fields):
    member = heartbeat.born(self.dir, role, life)
    member = dataclasses.replace(member, **fields)
    self.store.write(keys.member_key(role), member)


@contextlib.contextmanager
def living():
  """The name of a process that lives so long."""
  child = subprocess.Popen(["sleep", "600"])
  pid = child.pid
  yield json.dumps([liveness.machine(), pid, liveness.start_ticks(pid), ""])
  child.kill()
  child.wait()


def name_of_the_dead():
  with living() as name:
    return name


STATES = {
  "standby": "left",
  "syncer": "alive",
  "island-0": "alive",
  "island-2": "dead",
  "island-10": "silent",
  "evaluator": "alive",
}


@pytest.fixture
def signed(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  made, now = Signed(tmp_path), time.time()
  made.sign("evaluator", 1)
  made.sign("island-10", 3, nonce="far", told_secs=now - 100.0)
  made.sign("island-2", 2, nonce=name_of_the_dead())
  made.sign("island-0", 7, nonce="far", host="far", pid=17)
  made.sign("standby", 1, left=True)
  made.sign("syncer", 4, since_secs=now - 7200.0)
  return made


@pytest.mark.parametrize(
  ("unheard_secs", "state"), [(5, "alive"), (90, "silent")]
)
def test_role_whose_process_goes_on_without_it_falls_silent(
  tmp_path, unheard_secs, state
):
  """As one that an inline run has killed, or a process that is stopped."""
  member, now = heartbeat.born(tmp_path, "island-0", 1), time.time()
  with living() as name:
    member = dataclasses.replace(
      member, nonce=name, told_secs=now - unheard_secs
    )
    assert roster.state(member, now) == state


def places(signed):
  return [str(signed.dir), signed.url]


@pytest.mark.parametrize("place", [0, 1])
def test_status_tells_roles_lives_and_hosts(signed, place, capsys):
  argv = ["status", places(signed)[place]]
  assert cli.main([*argv, "--json"]) == 0
  found = json.loads(capsys.readouterr().out)["roles"]
  assert list(found) == list(STATES)
  assert {role: one["state"] for role, one in found.items()} == STATES
  one = found["island-0"]
  assert (one["life"], one["host"], one["pid"]) == (7, "far", 17)
  assert 7200 <= found["syncer"]["age_secs"] < 7800
  assert 100 <= found["island-10"]["heard_secs"] < 700
  assert cli.main(argv) == 0
  lines = capsys.readouterr().out.splitlines()
  (line,) = (line for line in lines if line.startswith("syncer"))
  assert "alive" in line and "2 h 00 min ago" in line


def test_ages_in_virtual_time_are_not_measured_by_our_clock(signed, capsys):
  paced = {"pace_step_secs": 1.0}
  fields = {"engine": "virtual", "store": signed.url, "fleet": paced}
  process.write_config(config.from_mapping(fields), signed.dir)
  assert cli.main(["status", str(signed.dir)]) == 0
  assert " ago" not in capsys.readouterr().out
  assert roster.look(signed.dir) == {}


@pytest.mark.parametrize("place", [0, 1])
def test_list_tells_how_many_are_alive(signed, place, capsys):
  assert cli.main(["ls", places(signed)[place], "--json"]) == 0
  (found,) = json.loads(capsys.readouterr().out)["runs"]
  assert found["roles"] == STATES
  assert cli.main(["ls", places(signed)[place]]) == 0
  assert "3 of 6" in capsys.readouterr().out


def test_explanation_of_a_round_tells_who_is_there_now(signed, capsys):
  argv = ["explain", signed.url, "--fragment=9", "--version=1"]
  assert cli.main([*argv, "--json"]) == 0
  assert set(json.loads(capsys.readouterr().out)["roles"]) == set(STATES)
  assert cli.main(argv) == 0
  assert "heard of" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "ls"])
def test_store_out_of_reach_hides_roles_alone(
  signed, command, monkeypatch, capsys
):
  def refuse(*_):
    raise OSError("the store is out of reach")

  monkeypatch.setattr(store.SnapshotStore, "names", refuse)
  assert cli.main([command, str(signed.dir), "--json"]) == 0
  out = json.loads(capsys.readouterr().out)
  assert (out["runs"][0] if command == "ls" else out)["roles"] is None
  assert cli.main([command, str(signed.dir)]) == 0
  assert "heard of" not in capsys.readouterr().out


def test_member_of_another_run_is_refused_in_one_line(signed, capsys):
  signed.sign("island-1", 2, run="another")
  assert cli.main(["status", signed.url]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "island-1, life 2 on" in line and "(run another," in line
  # Of many runs the others are listed, and this one without its roles.
  assert cli.main(["ls", str(signed.dir), "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["runs"][0]["roles"] is None


def test_run_without_a_store_has_no_roles(tmp_path):
  process.write_config(config.from_mapping({}), tmp_path)
  assert roster.look(tmp_path) == {} and roster.show({}) == ""
