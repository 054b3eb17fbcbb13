"""One real run of islands of different meshes, one of which is poisoned."""

import json
import math
import signal

import pytest
import real_run

from diloco.tape import reader


def contributed_again(run):
  """Steps merged of the island that was poisoned, after it was healed."""
  healed = max((e["step"] for e in run.events("resynced")), default=math.inf)
  parts = [c for e in run.events("merged") for c in e["contributions"]]
  return [c for c in parts if c["island"] == 1 and c["step"] > healed]


def adopted_by_both(run):
  """Digests that each of two islands had of a version it adopted."""
  digests = {}
  for event in run.events("adopted"):
    version = (event["fragment"], event["version"])
    digests.setdefault(version, {})[event["role"]] = event["digest"]
  return [list(d.values()) for d in digests.values() if len(d) == 2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """The run once all was seen; `told` is what its command gave."""
  folder = tmp_path_factory.mktemp("unequal")
  with real_run.Run(
    folder,
    task={"name": "tests.integration.bowl:make", "options": {"side": 64}},
    total_tokens=real_run.ENDLESS,
    fleet={
      "slices": (
        {"kind": "v5p", "topology": "2x2", "relative_speed": 1.0},
        {"kind": "v6e", "topology": "1", "relative_speed": 1.0},
      ),
      "pace_step_secs": 0.1,
    },
    sync={"num_fragments": 4, "every": 8, "split_tensors": True},
    programs={
      "window_steps": 8,
      "eval_every_tokens": 4_000,
      "eval_batches": 1,
      "checkpoint_every_steps": 0,
    },
    faults=({"target": "island-1", "at_fraction": 0.0005, "kind": "poison"},),
  ) as run:
    run.start("--quiet", "--json")
    run.wait_for(lambda: contributed_again(run))
    run.wait_for(lambda: len(adopted_by_both(run)) > 5)
    run.wait_for(lambda: len(run.losses()) > 2)
    run.process.send_signal(signal.SIGINT)
    run.told = run.finish()
    run.ended, run.left = run.summary(), run.alive()
    yield run


def test_islands_of_different_meshes_adopt_bit_equal_values(finished):
  code, out, err = finished.told
  assert code == 0, err
  assert json.loads(out) == finished.ended
  first = [e for e in finished.events("started") if e["incarnation"] == 1]
  started = {e["role"]: e["devices"] for e in first}
  assert started == {"island-0": 4, "island-1": 1}
  assert all(one == other for one, other in adopted_by_both(finished))


def test_interrupted_run_drains_and_saves(finished):
  assert finished.ended["status"] == "stopped"
  assert finished.left == []
  saved = {e["role"] for e in finished.events("checkpointed")}
  assert saved == {"island-0", "island-1"}


def test_poisoned_island_is_refused_told_and_trains_on(finished):
  reader.read(finished.dir, strict=True)
  facts, of = finished.ended, finished.events
  (poisoned,) = of("poisoned")
  assert poisoned["role"] == "island-1"
  refused = [e for e in of("discarded") if e["reason"] == "not_finite"]
  assert refused and {e["island"] for e in refused} == {1}
  assert {e["island"] for e in of("quarantined")} == {1}
  resynced = of("resynced")
  assert {e["role"] for e in resynced} == {"island-1"}
  losses = finished.losses()
  assert len(losses) > 2 and all(map(math.isfinite, losses))
  finished.check_books()
  assert facts["islands"]["1"]["restarts"] == 0
  assert facts["tokens_discarded"]["not_finite"] > 0
  assert facts["violations"] == [] and facts["tokens_unaccounted"] == 0
  assert facts["ledger"]["balanced"]
  (fault,) = facts["faults"]
  assert (fault["kind"], fault["target"]) == ("poison", "island-1")
  assert fault["back_secs"] > 0
