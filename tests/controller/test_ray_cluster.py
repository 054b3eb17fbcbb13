"""The `ray` engine on a real cluster, with roles that only say they live."""

import signal
import time

import pytest

from diloco import config as config_lib
from diloco import errors
from diloco.controller.engines import base, cluster, ray
from tests import ray_cluster

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
    deadline = time.monotonic() + _SECS
    while str(life) not in self.lives():
      assert time.monotonic() < deadline
      time.sleep(0.05)


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
