"""A real run on a real Ray cluster and a real S3 server; nodes are lost.

Where a test may mount something, islands' nodes do not see the run directory.
"""

import signal

import pytest
from real_run import ENDLESS, Run

from experiments.benchmarks import ray_cluster

_SECS = 280  # nodes take long to start where others are busy
_NODE = {"num_cpus": 1, "resources": {"v6e": 1}}  # room for one island


class Story:
  """What was done to the run; what became of it is on its tape."""

  def __init__(self, run, cluster, node, temporary):
    self.run, self.cluster = run, cluster
    self.node, self.temporary = node, temporary

  def tell(self):
    run = self.run.start()
    run.wait_for(lambda: len(self.ready()) == 2 and run.events("merged"), _SECS)
    self.folders = self.folders_now()
    self.seen = len(run.alive())  # who lives in the run directory
    self.first_lost = self.lose("remove", node=1)
    run.process.send_signal(signal.SIGKILL)  # the controller
    run.finish()
    self.lives_before = run.events("island_started")
    run.start()
    run.wait_for(lambda: len(run.events("reattached")) == 4, _SECS)
    self.lives_after = run.events("island_started")
    self.second_lost = self.lose("abandon", node=2)
    merged = len(run.events("merged"))
    run.wait_for(lambda: len(run.events("merged")) > merged + 4, _SECS)
    run.process.send_signal(signal.SIGINT)
    self.end = run.finish(_SECS)
    return self

  def folders_now(self):
    """Of lives to which the run directory is none."""
    return list(self.temporary.glob("diloco-life-*/control/apart"))

  def ready(self):
    return self.run.events("island_ready")

  def lose(self, how, node):
    """Loses a node; gives the number of its island, which came back."""
    died = len(self.run.events("island_died"))
    ready = len(self.ready())
    self.cluster.do("add", **self.node)
    self.cluster.do(how, node=node)
    self.run.wait_for(lambda: len(self.run.events("island_died")) > died, _SECS)
    self.run.wait_for(lambda: len(self.ready()) > ready, _SECS)
    return self.run.events("island_died")[-1]["island"]


@pytest.fixture(scope="module")
def story(far_s3, tmp_path_factory):
  run = Run(
    tmp_path_factory.mktemp("ray"),
    engine="ray",
    store=far_s3.place("ray"),
    total_tokens=ENDLESS,
    fleet={"slices": [{"kind": "v6e"}] * 2, "pace_step_secs": 0.2},
    # A node that nobody hears of is waited for by a sixth of this.
    controller={"restart_base_secs": 0.1, "hang_secs": 36.0},
  )
  run.dir.mkdir()
  node, temporary = _NODE, tmp_path_factory.mktemp("nodes")
  if ray_cluster.can_hide():
    node = {**_NODE, "hidden": str(run.dir)}
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TMPDIR", str(temporary))
    with run, ray_cluster.running({"num_cpus": 2}, node, node) as cluster:
      yield Story(run, cluster, node, temporary).tell()


def test_run_on_ray_trains_on_while_nodes_are_lost(story):
  code, _, err = story.end
  assert code == 0, err
  assert {story.first_lost, story.second_lost} == {0, 1}
  causes = [died["cause"] for died in story.run.events("island_died")]
  assert causes == ["node lost"] * 2
  story.run.check_books()


def test_roles_on_ray_outlive_their_controller(story):
  assert len(story.lives_before) == 3
  assert story.lives_after == story.lives_before


@pytest.mark.parametrize("lost", ["first_lost", "second_lost"])
def test_one_life_of_an_island_publishes(story, lost):
  role = f"island-{getattr(story, lost)}"
  mine = [e for e in story.run.events("started") if e["role"] == role]
  assert [e["incarnation"] for e in mine] == [1, 2]
  begun = mine[1]["wall_secs"]
  for name in ("submitted", "published", "adopted", "checkpointed"):
    for told in story.run.events(name):
      if told["role"] == role:
        assert (told["wall_secs"] > begun) == (told["incarnation"] == 2)
  assert any(
    told["role"] == role and told["incarnation"] == 2
    for told in story.run.events("published")
  )


@pytest.mark.skipif(
  not ray_cluster.can_hide(), reason="nothing may be mounted here"
)
def test_islands_have_folders_of_their_own_and_their_logs_come_back(story):
  # Syncers are on any node, and the head sees the run directory.
  assert len(story.folders) >= 2
  assert story.seen == 4 - len(story.folders)
  # Only nodes that were lost could not delete what they had.
  assert len(story.folders_now()) <= 2
  for island in (0, 1):
    log = (story.run.dir / "metrics" / f"island-{island}.jsonl").read_text()
    lines = log.splitlines()
    assert lines and len(set(lines)) == len(lines)
  logs = [p.read_text() for p in (story.run.dir / "logs").glob("island-*.log")]
  assert "no_channel" in "".join(logs)  # while there was no controller
