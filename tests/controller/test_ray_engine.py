"""The parts of the `ray` engine that need no cluster."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from unittest import mock

import psutil
import pytest
from observing import until

from diloco import channel, errors
from diloco import config as config_lib
from diloco.controller.engines import cluster, keeper, ray
from diloco.report import liveness

LEASE_SECS = 0.4
LIVING = {"lease_secs": 10.0}  # this process may be held up for seconds


class Kept:
  """A keeper at work on a thread."""

  def __init__(self, tmp_path, module, args, held="word", **fields):
    run_dir = tmp_path / "run"
    self.permit = run_dir / "control" / "permits" / "island-0.1"
    self.permit.parent.mkdir(parents=True, exist_ok=True)
    if held is not None:
      self.permit.write_text(held)
    order = {
      **{"module": module, "args": args, "env": {}, "word": "word"},
      **{"log": str(tmp_path / "log"), "permit": str(self.permit)},
      **{"wait_secs": 0.0, "lease_secs": LEASE_SECS, "facts": {}},
      **{"run_dir": str(run_dir), "files": {}},
    }
    self.keeper = keeper.Keeper(keeper.Order(**(order | fields)))
    self._thread = threading.Thread(target=self._live)
    self._thread.start()

  def _live(self):
    self.found = self.keeper.live()

  def pid(self):
    while (process := self.keeper._process) is None:
      time.sleep(0.01)
    return process.pid

  def end(self):
    looking = [t for t in threading.enumerate() if t.name == "permit"]
    for thread in (self._thread, *looking):
      thread.join(30)
      assert not thread.is_alive()
    return self.found


@pytest.mark.parametrize(
  ("module", "args", "code"),
  [("this", [], 0), ("json.tool", ["--no"], 2), ("no_such_module", [], 1)],
)
def test_keeper_tells_how_its_role_ended(tmp_path, module, args, code):
  kept = Kept(tmp_path, module, args, **LIVING)
  assert kept.end() == kept.keeper.live() == keeper.End(code)
  assert (tmp_path / "log").read_text()


def test_what_a_role_leaves_behind_ends_with_it(tmp_path):
  (tmp_path / "leaving.py").write_text(
    "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)\n"
  )
  env = {"PYTHONPATH": str(tmp_path)}
  kept = Kept(tmp_path, "leaving", [], env=env, **LIVING)
  assert kept.end() == keeper.End(0)
  child = int((tmp_path / "log").read_text())
  until(lambda: liveness.start_ticks(child) is None)


def test_role_without_permit_is_killed(tmp_path):
  kept = Kept(tmp_path, "http.server", ["0"])
  pid = kept.pid()
  kept.permit.unlink()
  assert kept.end() == keeper.End(-signal.SIGKILL)
  assert not psutil.pid_exists(pid)


def test_role_is_killed_when_nobody_can_look_for_its_permit(tmp_path):
  kept = Kept(tmp_path, "http.server", ["0"])
  kept.pid()
  kept.permit.write_text("of somebody else")
  assert kept.end() == keeper.End(-signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "withdrawn"])
def test_role_that_waits_for_its_predecessor_may_never_start(tmp_path, how):
  kept = Kept(tmp_path, "http.server", ["0"], wait_secs=600.0)
  if how == "killed":
    kept.keeper.signal(signal.SIGKILL)
  else:
    kept.permit.unlink()
  assert kept.end() == keeper.End(-signal.SIGKILL)
  assert kept.keeper._process is None


def test_signal_reaches_the_role(tmp_path):
  kept = Kept(tmp_path, "http.server", ["0"], **LIVING)
  kept.pid()
  kept.keeper.signal(signal.SIGTERM)
  assert kept.end() == keeper.End(-signal.SIGTERM)
  kept.keeper.signal(signal.SIGTERM)  # nothing is there to be hit


def test_node_that_does_not_see_the_run_directory_says_so(tmp_path):
  code, why, _ = Kept(tmp_path, "this", [], held="another disk's").end()
  assert code == 2
  assert f"does not see the run directory {tmp_path / 'run'}" in why
  assert len(why.splitlines()) == 1
  nowhere = str(tmp_path / "elsewhere" / "control" / "permits" / "x.1")
  again = Kept(tmp_path / "again", "this", [], permit=nowhere)
  assert again.end()[0] == 2


SHOWN = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
print(folder, sorted(p.name for p in folder.rglob("*") if p.is_file()))
(folder / "tape").mkdir()
path = folder / "control" / "controller.json"
while json.loads(path.read_text()) != "the next":
  time.sleep(0.01)
print("found")
"""
FILES = {
  "config.json": b'{"id": "this run"}',
  "control/controller.json": b'"the first"',
}


@pytest.fixture
def shown(tmp_path, monkeypatch):
  """A module to keep, which says what it finds and ends when it is told to."""
  (tmp_path / "modules").mkdir()
  (tmp_path / "modules" / "shown.py").write_text(SHOWN)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
  return "shown"


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_life_that_does_not_see_the_run_has_a_folder_of_its_own(
  tmp_path, shown, there
):
  run_dir = tmp_path / "run"
  kept = Kept(tmp_path, shown, [str(run_dir)], files=FILES, held="old")
  if there == "another run":
    (run_dir / "config.json").write_text('{"id": "another"}')
  while kept.keeper._folder is None:
    time.sleep(0.01)
  (run_dir / "control" / "permits" / "island-0.1").unlink()
  kept.keeper.put("control/controller.json", b'"the next"')
  code, why, log = kept.end()
  assert (code, why) == (0, "")
  folder, *rest = log.decode().split(maxsplit=1)
  assert "found" in rest[0]
  assert "['config.json', 'controller.json', 'held', 'log']" in rest[0]
  assert folder != str(run_dir) and not os.path.exists(folder)
  assert not (tmp_path / "log").exists() and not (run_dir / "tape").exists()
  kept.keeper.put("control/controller.json", b"nobody is there")


def test_life_that_sees_the_run_has_no_other_folder(tmp_path, shown):
  run_dir = tmp_path / "run"
  run_dir.mkdir()
  (run_dir / "config.json").write_text('{"id": "this run", "more": 1}')
  (run_dir / "control" / "permits").mkdir(parents=True)
  (run_dir / "control" / "controller.json").write_text('"the next"')
  kept = Kept(tmp_path, shown, [str(run_dir)], files=FILES, **LIVING)
  assert kept.end() == keeper.End(0)
  assert (tmp_path / "log").read_text().startswith(str(run_dir))
  assert (run_dir / "tape").exists()


def test_life_is_told_of_an_address_before_it_has_a_folder(
  tmp_path, shown, monkeypatch
):
  own_folder, asked = keeper._own_folder, threading.Event()

  def late():
    asked.wait(60)
    return own_folder()

  monkeypatch.setattr(keeper, "_own_folder", late)
  kept = Kept(tmp_path, shown, [str(tmp_path / "run")], files=FILES)
  kept.keeper.put("control/controller.json", b'"the next"')
  asked.set()
  assert kept.end().code == 0


def test_life_can_be_killed_while_its_disk_hangs(tmp_path, shown):
  kept = Kept(tmp_path, shown, [], files=FILES, held=None, wait_secs=600.0)
  while kept.keeper._folder is None:
    time.sleep(0.01)
  killing = threading.Thread(target=kept.keeper.signal, args=(signal.SIGKILL,))
  with kept.keeper._writing:  # as `put` holds it meanwhile
    killing.start()
    killing.join(20)
    alive = killing.is_alive()
  assert not alive and kept.end() == keeper.End(-signal.SIGKILL)


def test_life_with_its_own_folder_can_be_killed_before_it_starts(
  tmp_path, shown
):
  kept = Kept(tmp_path, shown, [], files=FILES, held=None, wait_secs=600.0)
  kept.keeper.signal(signal.SIGKILL)
  assert kept.end() == keeper.End(-signal.SIGKILL)
  assert kept.keeper._process is None


def test_folder_of_a_killed_keeper_is_deleted_by_the_next(
  tmp_path, shown, monkeypatch
):
  temporary = tmp_path / "temporary"
  temporary.mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(temporary))
  left, held = keeper._own_folder()
  other, kept = keeper._own_folder()
  assert left.exists() and other.exists()
  os.close(held)
  mine, own = keeper._own_folder()
  assert sorted(temporary.iterdir()) == sorted([other, mine])
  os.close(kept)
  os.close(own)


def test_role_dies_with_its_keeper(tmp_path):
  role = (
    "from diloco import process; import sys, time;"
    f"process.setup_role((), {str(tmp_path)!r}, 'island-0');"
    "print('up', flush=True); time.sleep(600)"
  )
  parent = (
    "import os, subprocess, sys; os.environ['DILOCO_KEEPER'] ="
    f" str(os.getpid()); subprocess.run([sys.executable, '-c', {role!r}])"
  )
  started = subprocess.Popen(
    [sys.executable, "-c", parent], stdout=subprocess.PIPE
  )
  assert started.stdout.readline() == b"up\n"
  started.kill()
  started.wait()
  assert started.stdout.read() == b""  # once nobody has it open any more
  started.stdout.close()


def test_role_whose_keeper_has_died_before_does_not_begin(tmp_path):
  role = f"process.setup_role((), {str(tmp_path)!r}, 'island-0'); print('up')"
  done = subprocess.run(
    [sys.executable, "-c", f"from diloco import process; {role}"],
    env={**os.environ, "DILOCO_KEEPER": "1"},
    capture_output=True,
  )
  assert (done.returncode, done.stdout) == (1, b"")


def make_config(**fields):
  return config_lib.from_mapping({"engine": "ray", **fields})


def refused(call, *args):
  with pytest.raises(errors.UserError) as caught:
    call(*args)
  text = str(caught.value)
  assert len(text.splitlines()) == 1
  return text


@pytest.mark.parametrize(
  ("address", "why"),
  [
    ("127.0.0.1:1", "refused"),
    ("nowhere.invalid:6379", "nowhere.invalid"),
    ("host:port", "port"),
    ("ray://127.0.0.1:10001", "HOST:PORT"),
  ],
)
def test_cluster_out_of_reach_is_named(address, why):
  text = refused(cluster.check, make_config(ray_address=address))
  assert f"config.ray_address = {address!r}" in text and why in text
  assert "ray start" in text


def test_ray_that_is_not_installed_is_asked_for(monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  assert "pip install '.[ray]' in a clone" in refused(cluster.load)


TWO = [{"kind": "v6e", "topology": "2"}, {"kind": "v6e"}]


@pytest.mark.parametrize(
  ("slices", "nodes", "lacking"),
  [
    ([{}] * 3, [{"CPU": 3}], ""),
    ([{}] * 3, [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}], ""),
    ([{}] * 3, [{"CPU": 2}], "CPU 3"),
    ([{"topology": "2"}], [{"CPU": 1}] * 8, "island-0"),  # on no node
    (TWO, [{"CPU": 4}, {"CPU": 1, "v6e": 3}], "island-1"),  # it lacks a core
    (TWO, [{"CPU": 0}, {"CPU": 2, "v6e": 3, "memory": 9}], ""),
    (TWO, [{"CPU": 9, "v6e": 1}, {"CPU": 1, "v6e": 1}], "v6e 2"),
    (TWO, [{"CPU": 2}, {"CPU": 1}], ""),  # emulated, on a core each
    (TWO, [], "island-0"),
    # The largest are placed first, wherever they stand.
    ([{}, {"topology": "2"}], [{"CPU": 2}, {"CPU": 1}], ""),
  ],
)
def test_cluster_that_is_too_small_is_refused(
  monkeypatch, slices, nodes, lacking
):
  monkeypatch.setattr(cluster, "nodes", lambda: nodes)
  config = make_config(fleet={"slices": slices})
  if not lacking:
    cluster.check_fits(config)
    return
  assert lacking in refused(cluster.check_fits, config)


def test_kind_of_a_slice_is_no_resource_of_rays_own(monkeypatch):
  nodes = [{"CPU": 1, "GPU": 8, "v6e": 4}, {"memory": 1.0}]
  monkeypatch.setattr(cluster, "nodes", lambda: nodes)
  assert cluster.kinds() == {"v6e"}


def test_keeper_that_does_not_answer_holds_nothing_else_up(tmp_path):
  engine = object.__new__(ray.Engine)
  engine._run_dir, engine._store, engine._address = tmp_path, object(), b""
  engine._telling, asked = None, []
  engine._calls = mock.Mock()
  engine._calls.submit.side_effect = lambda *_: (
    asked.append(futures.Future()) or asked[-1]
  )
  path = channel.address_path(tmp_path)
  path.parent.mkdir()
  path.write_text("there")
  engine.tell_address()
  engine.tell_address()  # all that is asked of Ray waits its turn
  assert len(asked) == 1
  asked[0].set_result(None)  # and not all have heard
  engine.tell_address()
  assert len(asked) == 2


@pytest.mark.parametrize(
  ("answer", "again"), [(None, False), ("gone", False), ("full disk", True)]
)
def test_who_could_not_write_an_address_is_told_again(tmp_path, answer, again):
  class RayActorError(Exception):
    pass

  found = {"gone": RayActorError(), "full disk": OSError(28, "full")}
  engine = object.__new__(ray.Engine)
  engine._ray, engine._address = mock.Mock(), b"before"
  engine._ray.exceptions.RayActorError = RayActorError
  engine._ray.wait.side_effect = lambda told, **_: (told, [])
  engine._ray.get.side_effect = [found.get(answer)]
  engine._actors = lambda: [("island-0", mock.Mock())]
  with contextlib.suppress(OSError):
    engine._tell_address("control/controller.json", b"now")
  assert engine._address == (b"before" if again else b"now")
