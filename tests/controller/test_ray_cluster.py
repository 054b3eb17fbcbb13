"""A real cluster, with roles that only say they live, and points of sweeps."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from observing import holder, until

from diloco import config as config_lib
from diloco import errors
from diloco.controller.engines import base, cluster, ray
from diloco.report import liveness
from diloco.workbench import executor, frozen, worker
from experiments.benchmarks import ray_cluster

_SECS = 200  # where others are busy, nodes and workers take long to start
_NODE = {"num_cpus": 1, "resources": {"v6e": 1}}  # room for one island
_ROLE = """
import os, sys, time
from diloco import process
process.setup_role((), sys.argv[1], "island-0")
code = int(sys.argv[2])
if code >= 0:
  print("my last words", flush=True)
  sys.exit(code)
with open(sys.argv[1] + "/daemon", "w") as file:
  file.write(os.environ["RAY_RAYLET_PID"])
with open(sys.argv[1] + "/lives", "a", buffering=1) as lives:
  while True:
    print(os.environ["DILOCO_LIFE"], file=lives)
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def nodes():
  with ray_cluster.running({"num_cpus": 2}, _NODE, _NODE) as found:
    yield found


class World:
  """A run directory, and engines of one controller after the other."""

  def __init__(self, run_dir, address):
    self.dir = run_dir
    self.config = config_lib.from_mapping(
      {
        "engine": "ray",
        "ray_address": address,
        "fleet": {"slices": [{"kind": "v6e"}]},
        "controller": {"hang_secs": 30.0},
      }
    )
    self.anew()

  def anew(self):
    """The next controller."""
    self.engine = ray.Engine(self.dir, self.config)

  def start(self, life, code=-1):
    facts = {"incarnation": life, "slice": 0, "cores": [], "config": "x"}
    args = [str(self.dir), str(code)]
    log = self.dir / "logs" / "island-0.log"
    return self.engine.start(
      base.Launch("island-0", "role_that_lives", args, log, facts=facts)
    )

  def lives(self):
    """Of those that said so, in that order; each once while it went on."""
    path = self.dir / "lives"
    told = path.read_text().split() if path.exists() else []
    return [b for a, b in zip(["", *told], told, strict=False) if a != b]

  def wait_for(self, life):
    until(lambda: str(life) in self.lives(), _SECS)


@pytest.fixture
def world(nodes, tmp_path, monkeypatch):
  (tmp_path / "modules").mkdir()
  (tmp_path / "modules" / "role_that_lives.py").write_text(_ROLE)
  monkeypatch.syspath_prepend(tmp_path / "modules")
  (tmp_path / "run").mkdir()
  world = World(tmp_path / "run", nodes.address)
  yield world
  world.engine.kill_leftovers()
  world.engine.close()


def test_role_ends_as_it_likes_and_its_log_is_in_the_run(world):
  for life, code in ((1, 0), (2, 3)):
    handle = world.start(life, code)
    assert handle.wait(_SECS)
    assert handle.cause_of_death() == f"exit {code}"
    assert handle.pid == life
  log = (world.dir / "logs" / "island-0.log").read_text()
  assert log.count("my last words") == 2
  assert not list((world.dir / "control" / "permits").iterdir())


def test_role_outlives_its_controller_and_is_taken_up(world):
  world.start(1)
  world.wait_for(1)
  world.engine.close()
  world.anew()
  found = world.engine.survivors()["island-0"]
  assert (found.facts["incarnation"], found.facts["slice"]) == (1, 0)
  assert found.handle.pid == 1 and found.handle.cause_of_death() is None
  found.handle.signal(signal.SIGKILL)
  assert found.handle.wait(_SECS)
  assert found.handle.cause_of_death() == "SIGKILL"


def test_leftovers_are_ended_and_named(world):
  handle = world.start(1)
  world.wait_for(1)
  assert world.engine.kill_leftovers() == ["island-0"]
  assert handle.wait(_SECS)
  assert world.engine.kill_leftovers() == []


def test_successor_deprives_a_life_that_nobody_killed(world):
  first = world.start(1)
  world.wait_for(1)
  world.start(2)
  world.wait_for(2)
  assert world.lives() == ["1", "2"]
  assert first.cause_of_death() == "SIGKILL"


@pytest.mark.parametrize("how", ["remove", "abandon"])
def test_lives_of_a_lost_node_do_not_overlap(world, nodes, how):
  """Not of one whose daemon is dead and not buried, which lives on a while."""
  first = world.start(1)
  world.wait_for(1)
  daemon = int((world.dir / "daemon").read_text())
  nodes.do("add", **_NODE)
  nodes.do(how, node=nodes.daemons.index(daemon))
  assert first.wait(_SECS)
  assert first.cause_of_death() == "node lost"
  world.start(2)
  world.wait_for(2)
  assert world.lives() == ["1", "2"]


def test_cluster_that_is_too_small_is_refused(world):
  values = world.config.to_dict() | {"fleet": {"slices": [{"kind": "v6e"}] * 9}}
  with pytest.raises(errors.UserError, match="v6e 9"):
    cluster.check_fits(config_lib.from_mapping(values))


SWEEP = """
def get_sweep():
  common = {"chips": 20_000, "windows": 0}
  return [
    *({**common, "name": str(days), "days": days} for days in (1, 2)),
    {**common, "name": "long", "days": 30, "seeds": 1_000_000},
  ]
"""


class Sweep:
  """A sweep of two short points and a long one, as often as it is given."""

  def __init__(self, folder, address):
    (folder / "sweep.py").write_text(SWEEP)
    self.dir, self.address = folder / "out", address

  @contextlib.contextmanager
  def given(self):
    command = [sys.executable, "-m", "diloco.cli", "sweep"]
    flags = [f"--sweep={self.dir.parent}/sweep.py", f"--workdir={self.dir}"]
    with subprocess.Popen(
      [*command, *flags, f"--ray={self.address}"],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    ) as process:
      yield process
      process.kill()

  def outcomes(self):
    return {
      path.stem: path.read_bytes() for path in self.dir.glob("points/*.json")
    }

  def long_pid(self):
    found = self.dir.exists() and holder(self.dir, "long")
    return found["pid"] if found else None


@pytest.fixture(scope="module")
def sweep(nodes, tmp_path_factory):
  return Sweep(tmp_path_factory.mktemp("sweep"), nodes.address)


def test_killed_sweep_on_ray_goes_on_and_does_no_point_twice(sweep):
  with sweep.given() as first:
    deadline = time.monotonic() + _SECS
    while len(sweep.outcomes()) < 2 or not sweep.long_pid():
      assert time.monotonic() < deadline and first.poll() is None
      time.sleep(0.05)
    first.kill()
  before, pid = sweep.outcomes(), sweep.long_pid()
  with sweep.given() as second:
    told = second.stderr.readline()
    assert "3 points, 2 done, 1 still running, 0 to begin" in told
    assert sweep.long_pid() == pid
    second.send_signal(signal.SIGINT)
    out, err = second.communicate(timeout=_SECS)
  assert second.returncode == 0, err
  assert "2 of 3 points done; the same command goes on" in err
  assert out == f"{sweep.dir}/table.csv\n"
  assert liveness.start_ticks(pid) is None
  assert sweep.outcomes() == before
  assert not list((sweep.dir / "control" / "permits").iterdir())


def test_point_of_a_lost_node_is_begun_again(nodes, tmp_path):
  workdir = tmp_path / "out"
  long = {"days": 30.0, "seeds": 1_000_000, "chips": 20_000, "windows": 0}
  points = tuple(frozen.Point(name, {}, long) for name in "abc")
  frozen.write(workdir, frozen.Sweep("simulate", "sweep.py", "0", points))
  made = executor.Ray(workdir, executor.on_ray(nodes.address))
  with contextlib.closing(made):
    assert all(made.start(name, 1) for name in "abc")
    until(lambda: all(holder(workdir, name) for name in "abc"), _SECS)
    # The head has room for two.
    pids = {name: holder(workdir, name)["pid"] for name in "abc"}
    places = {name: nodes.daemons.index(_daemon(pids[name])) for name in pids}
    name = max(pids, key=places.get)
    nodes.do("add", **_NODE)
    nodes.do("abandon", node=places[name])
    assert until(made.ended, _SECS) == {name: ""}
    assert made.start(name, 1)
    # It has no permit any more.
    until(lambda: not liveness.start_ticks(pids[name]), _SECS)
    made.stop()  # before that one has begun again
    told = {}
    while len(told) < 3:
      told |= until(made.ended, _SECS)
  begun = {name for name, cause in told.items() if "SIGTERM" in cause}
  assert begun == set("abc") - {name}
  assert "SIGKILL" in told[name]


def _daemon(pid):
  return int(psutil.Process(pid).environ()["RAY_RAYLET_PID"])


def test_cores_of_points_on_one_machine_are_not_shared(monkeypatch):
  cores = {os.getpid() * 10 + i for i in range(3)}  # nobody else has them
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
  claims = []
  monkeypatch.setattr(worker, "_claims", claims)
  first = worker._free_cores(2)
  with contextlib.closing(claims[1]):
    claims.pop()
    with contextlib.closing(claims.pop()):
      assert first == sorted(cores)[:2]
      assert worker._free_cores(2) == []  # there is only one
      assert not claims
    assert worker._free_cores(2) == [first[0], max(cores)]
  for claim in claims:
    claim.close()
