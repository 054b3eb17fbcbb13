"""A run on a Ray cluster and an object store, both of which fail.

Question: does training go on where a node is lost, where one is lost that
nobody takes note of, where the head's daemon dies, and where the store is cut
off for longer than every timeout; and what does each cost?

Command: `python -m experiments.benchmarks.cluster`, which serves S3 and starts
a cluster of three nodes on this machine. Five minutes on two cores. With
`--full` the quickstart's own model trains in place of its smoke variant's; with
`--apart` only the head sees the run directory; for the others it is hidden, as
root.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import diloco
from diloco import launch
from diloco.tape import reader
from experiments.benchmarks import ray_cluster, s3_server

_NODE = {"num_cpus": 2, "resources": {"v6e": 1}}  # room for one island
_PATIENCE_SECS = 300.0
_FOUND_DEAD_SECS = 5.0  # and more, that a node needs for that
_RELAYED_SECS = 10.0  # and more, that what nodes record needs to be here


class Watched:
  """A run, and what its tape has told so far."""

  def __init__(self, run: Any):
    self.run = run
    self._tape = reader.Follower(run.dir)
    self._events: list[dict[str, Any]] = []

  def told(self, name: str) -> list[dict[str, Any]]:
    """Its events of a name."""
    self._events += self._tape.poll().events
    return [e for e in self._events if e["event"] == name]

  def steps(self, begin: float, end: float) -> dict[str, int]:
    """Inner steps between two times by the wall's clock, by island."""
    time.sleep(_RELAYED_SECS)
    logs = sorted((self.run.dir / "metrics").glob("*.jsonl"))
    return {
      path.stem: sum(
        begin < json.loads(line)["wall_secs"] < end
        for line in path.read_text().splitlines()
      )
      for path in logs
    }

  def until(self, what: str, condition: Callable[[], object]) -> float:
    """Waits; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
      if self.run.state != "running":
        raise SystemExit(f"{what}: the run is {self.run.state}: {self.run.dir}")
      if time.monotonic() - began > _PATIENCE_SECS:
        raise SystemExit(f"{what}: not within {_PATIENCE_SECS:g} s")
      time.sleep(0.2)
    return time.monotonic() - began

  def merged_on(self, what: str, since: int, count: int = 8) -> float:
    """Waits until it has merged so often more."""
    return self.until(what, lambda: len(self.told("merged")) >= since + count)


def _deaths(run: Watched) -> list[str]:
  died = [*run.told("island_died"), *run.told("syncer_died")]
  died.sort(key=lambda e: e["wall_secs"])
  return [f"{e['event']}: {e['cause']}" for e in died]


def story(
  run: Watched,
  cluster: Any,
  server: s3_server.Server,
  outage_secs: float,
  node: dict[str, Any],
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Does one thing after another; yields what came of each."""
  secs = run.until("first merges", lambda: len(run.told("merged")) > 8)
  yield "begun", {"secs": secs}
  yield "node_lost", _lose_island(run, cluster, "remove", 1, node)
  yield "node_lost_unheard", _lose_island(run, cluster, "abandon", 2, node)
  before, began = _deaths(run), time.monotonic()
  cluster.do("abandon", node=0)
  time.sleep(_FOUND_DEAD_SECS)  # those who merge may have been elsewhere
  run.merged_on("head", len(run.told("merged")))
  facts: dict[str, Any] = {"eight_merges_secs": time.monotonic() - began}
  yield "head_daemon_killed", facts | {"died": _deaths(run)[len(before) :]}
  before, merged = _deaths(run), len(run.told("merged"))
  server.pause()
  begin = time.time()
  time.sleep(outage_secs)
  end = time.time()
  server.go_on()
  facts = {"secs": outage_secs}
  facts["eight_merges_secs"] = run.merged_on("outage", merged)
  facts["steps_meanwhile"] = run.steps(begin, end)
  yield "store_cut_off", facts | {"died": _deaths(run)[len(before) :]}


def _lose_island(
  run: Watched, cluster: Any, how: str, lost: int, node: dict[str, Any]
) -> dict[str, Any]:
  """A node goes, with its island; another is there for it."""
  before, ready = _deaths(run), len(run.told("island_ready"))
  merged = len(run.told("merged"))
  cluster.do("add", **node)
  cluster.do(how, node=lost)
  secs = run.until(how, lambda: len(run.told("island_ready")) > ready)
  run.merged_on(how, merged)
  return {"island_back_secs": secs, "died": _deaths(run)[len(before) :]}


def main() -> None:
  """Prints one JSON object."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--outage_secs", type=float, default=90.0)
  parser.add_argument("--workdir", default="")
  parser.add_argument("--full", action="store_true")
  parser.add_argument("--apart", action="store_true")
  args = parser.parse_args()
  variant = "" if args.full else ":smoke"
  config = launch.load_config(f"experiments/configs/quickstart.py{variant}")
  config.engine = "ray"
  config.faults = ()
  config.total_tokens = 1_000_000_000  # it is stopped
  config.fleet.slices = [{"kind": "v6e"}] * 2
  config.fleet.pace_step_secs = 0.2
  # A node that nobody hears of is waited for by a sixth of this.
  config.controller.hang_secs = 36.0
  with contextlib.ExitStack() as ending:
    folder = ending.enter_context(tempfile.TemporaryDirectory())
    place = pathlib.Path(args.workdir or folder) / "run"
    node: dict[str, Any] = dict(_NODE)
    if args.apart:
      place.mkdir(parents=True)
      node["hidden"] = str(place)
    server = ending.enter_context(s3_server.serving())
    cluster = ending.enter_context(
      ray_cluster.running({"num_cpus": 2}, node, node)
    )
    config.store = server.place("run")
    run = diloco.start(config, place)
    found: dict[str, Any] = {}
    try:
      told = story(Watched(run), cluster, server, args.outage_secs, node)
      for name, facts in told:
        print(name, facts, file=sys.stderr, flush=True)
        found[name] = facts
    finally:
      found["state"] = run.stop()
    summary = run.summary
    names = ("violations", "tokens_trained", "tokens_unaccounted")
    print(json.dumps(found | {n: summary[n] for n in names}, indent=2))


if __name__ == "__main__":
  main()
