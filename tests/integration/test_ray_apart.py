"""A real run on nodes that share nothing but its store, a real S3 server."""

import signal

import pytest
from real_run import ENDLESS, Run

from experiments.benchmarks import ray_cluster

_SECS = 280  # nodes take long to start where others are busy
_NODE = {"num_cpus": 1, "resources": {"v6e": 1}}  # room for one island

pytestmark = pytest.mark.skipif(
  not ray_cluster.can_hide(), reason="nothing may be mounted here"
)


class Story:
  """What was done to the run; what became of it is on its tape."""

  def __init__(self, run, cluster, node, temporary):
    self.run, self.cluster, self.node = run, cluster, node
    self.temporary = temporary

  def tell(self):
    run = self.run.start()
    run.wait_for(lambda: len(self.ready()) == 2 and self.merged() > 8, _SECS)
    self.seen = run.alive()  # roles to which the run directory is one
    self.folders = self.folders_now()
    run.process.send_signal(signal.SIGKILL)  # the controller
    run.finish()
    self.lives = run.events("island_started")
    run.start()
    run.wait_for(lambda: len(run.events("reattached")) == 4, _SECS)
    self.same_lives = run.events("island_started")
    self.lose_a_node()
    merged = self.merged()
    run.wait_for(lambda: self.merged() > merged + 8, _SECS)
    run.process.send_signal(signal.SIGINT)
    self.end = run.finish(_SECS)
    return self

  def folders_now(self):
    """Of lives to which the run directory is none."""
    return list(self.temporary.glob("diloco-life-*/control/apart"))

  def ready(self):
    return self.run.events("island_ready")

  def merged(self):
    return len(self.run.events("merged"))

  def lose_a_node(self):
    """Loses one with an island, which comes back on another."""
    self.cluster.do("add", **self.node)
    self.cluster.do("abandon", node=1)
    died = self.run.events("island_died")
    self.run.wait_for(lambda: len(self.run.events("island_died")) > len(died))
    self.run.wait_for(lambda: len(self.ready()) == 3, _SECS)


@pytest.fixture(scope="module")
def story(far_s3, tmp_path_factory):
  run = Run(
    tmp_path_factory.mktemp("apart"),
    engine="ray",
    store=far_s3.place("apart"),
    total_tokens=ENDLESS,
    fleet={"slices": [{"kind": "v6e"}] * 2, "pace_step_secs": 0.2},
    controller={"restart_base_secs": 0.1, "hang_secs": 36.0},
  )
  run.dir.mkdir()
  node = {**_NODE, "hidden": str(run.dir)}
  temporary = tmp_path_factory.mktemp("nodes")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TMPDIR", str(temporary))
    with run, ray_cluster.running({"num_cpus": 2}, node, node) as cluster:
      yield Story(run, cluster, node, temporary).tell()


def test_run_on_nodes_without_its_directory_trains_and_ends(story):
  code, _, err = story.end
  assert code == 0, err
  (died,) = story.run.events("island_died")
  assert died["cause"] == "node lost"
  story.run.check_books()


def test_islands_have_folders_of_their_own_while_they_live(story):
  assert len(story.folders) >= 2
  assert len(story.seen) == 4 - len(story.folders)
  # Only a node that was lost could not delete what it had.
  assert len(story.folders_now()) <= 1


def test_roles_find_the_next_controller_and_its_tapes_have_their_lines(story):
  assert story.same_lives == story.lives
  lost = story.run.events("island_died")[0]["island"]
  role = f"island-{lost}"
  (begun,) = (
    e["wall_secs"]
    for e in story.run.events("started")
    if (e["role"], e["incarnation"]) == (role, 2)
  )
  told = [e for e in story.run.events("published") if e["role"] == role]
  assert {e["incarnation"] for e in told} == {1, 2}
  for one in told:  # one life of an island publishes
    assert (one["wall_secs"] > begun) == (one["incarnation"] == 2)
  stopped = {e["role"] for e in story.run.events("stopped")}
  assert {"island-0", "island-1"} <= stopped


def test_logs_and_metrics_are_in_the_run(story):
  for island in (0, 1):
    lines = (story.run.dir / "metrics" / f"island-{island}.jsonl").read_text()
    lines = lines.splitlines()
    assert lines and len(set(lines)) == len(lines)
  logs = [p.read_text() for p in (story.run.dir / "logs").glob("island-*.log")]
  assert "no_channel" in "".join(logs)  # while there was no controller
