"""A real run in which processes were killed, and replays of it."""

import itertools
import json
import shutil

import jax
import numpy as np
import pytest
import real_run
from observing import events

from diloco import process
from diloco.islands import inner_step
from diloco.snapshots import keys, records, store
from diloco.tasks import registry
from diloco.workbench import session

OF_A_COPY = "--task=tests.integration.bowl:make"  # its code is executed
CHANGES = {"outer.learning_rate": (0.9, 0.8), "sync.every": (8, 6)}


def merged_from(run, island, life):
  return [
    e
    for e in run.events("merged")
    if any(
      (c["island"], c["incarnation"]) == (island, life)
      for c in e["contributions"]
    )
  ]


def gaps(run, island):
  """Steps between an island's publications, in its last life.

  They are H, or a multiple of it: none is due while a newer version is known
  and not yet adopted.
  """
  published = [
    e
    for e in run.events("published")
    if (e["role"], e["fragment"]) == (f"island-{island}", 0)
    and e["incarnation"] == island + 1
  ]
  return [
    b["step"] - a["step"]
    for a, b in itertools.pairwise(published)
    if b["trigger"] == "schedule"
  ]


def merged_after(run, token):
  return [e for e in run.events("merged") if e["token"] > token]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run whose island 1 and whose leading syncer were killed.

  It starts from parameters it was given, in a file that is gone afterwards.
  It ends once the next life and the next leader have merged, however long a
  busy machine needs for that.
  """
  folder = tmp_path_factory.mktemp("replay")
  given = folder / "given.npz"
  run = real_run.Run(
    folder,
    init_from=str(given),
    total_tokens=real_run.ENDLESS,
    sync={
      **{"num_fragments": 4, "every": 8, "split_tensors": True},
      **{"merge": "trimmed_mean", "merge_clip": 1.1},
      "staleness_kind": "hyperbolic",
      **{"codec": "int4", "codec_rounding": "stochastic"},
      **{"error_feedback": True, "down_codec": "int4"},
    },
    outer={
      **{"learning_rate": 0.9, "momentum": 0.5},
      **{"optimizer": "delayed_nesterov", "delay": 2, "delay_c": 0.25},
    },
    programs={
      "window_steps": 8,
      **{"eval_every_tokens": 8_000, "eval_batches": 1},
      "checkpoint_every_steps": 16,
    },
  )
  task = registry.make_task(**run.values["task"])
  tree = inner_step.ParamTree(task, seed=0)
  params = task.init(jax.random.key(77))
  np.savez(given, **tree.flatten(params))
  batch = next(task.batches("test", share=0, num_shares=1, seed=0))
  before = task.loss(params, batch)[0]

  def settled(island):
    return len(gaps(run, island)) >= 6

  try:
    live = session.start(run.values, run.dir)
    run.wait_for(lambda: len(merged_from(run, island=1, life=1)) > 4)
    assert live.change(sync__every=6, outer__learning_rate=0.8) == CHANGES
    live.kill("island-1")
    run.wait_for(lambda: merged_from(run, island=1, life=2))
    *_, leader = run.events("lease_acquired")
    live.kill(leader["role"])
    run.wait_for(lambda: merged_after(run, leader["token"]))
    run.wait_for(lambda: all(map(settled, (0, 1))))
    run.wait_for(lambda: min(run.losses(), default=9) < 0.75 * before)
    assert live.stop() == "stopped"
    given.unlink()
  finally:
    run.kill_everything()
  return run


@pytest.fixture(scope="module")
def run_dir(run):
  return run.dir


def test_run_survives_the_death_of_an_island_and_of_the_syncer(run):
  facts = run.summary()
  assert facts["status"] == "stopped"
  assert facts["islands"]["1"]["restarts"] == 1
  run.check_books()
  merged = run.events("merged")
  leaders = [(e["role"], e["token"]) for e in run.events("lease_acquired")]
  # A machine may be so busy that a leader loses its lease without dying, or the
  # lease to another after it has drawn a token.
  tokens = [token for _, token in leaders]
  assert tokens == sorted(set(tokens))
  assert {role for role, _ in leaders} == {"syncer", "standby"}
  assert {m["role"] for m in merged} == {"syncer", "standby"}
  assert facts["syncer"]["takeovers"] == len(leaders) - 1
  # One that has lost its lease ends in order, and is started again.
  assert facts["syncer"]["starts"] >= facts["syncer"]["deaths"] + 2
  for fragment in range(4):
    # A successor tells the newest merge again.
    versions = {m["version"] for m in merged if m["fragment"] == fragment}
    assert versions == set(range(1, len(versions) + 1))
  assert (run.dir / "report.html").stat().st_size > 10_000


def test_every_life_began_with_what_the_run_was_given(run):
  snapshots = store.SnapshotStore(process.store_url(run.dir))
  given = [
    snapshots.read(keys.initial_key(p), records.Initial).digest
    for p in range(4)
  ]
  first = next(iter(run.events("started")))
  assert first["base_versions"] == [0] * 4
  assert first["base_digests"] == given


def test_settings_changed_meanwhile_hold_for_islands_and_every_leader(run):
  (changed,) = run.events("config_changed")
  assert changed["changes"] == {n: list(pair) for n, pair in CHANGES.items()}
  merged = run.events("merged")
  first = min(m["token"] for m in merged)
  rates = {m["learning_rate"] for m in merged if m["token"] == first}
  assert rates <= {0.9, 0.8}
  assert {m["learning_rate"] for m in merged[-8:]} == {0.8}
  for island in (0, 1):
    assert min(gaps(run, island)[-5:]) == 6, gaps(run, island)
  # Who starts later begins with them, and who looks later finds them.
  assert session.Session(run.dir).settings.sync.every == 6


def test_run_with_kills_replays_to_the_same_bits(run_dir):
  died = {e["island_incarnation"] for e in events(run_dir, "island_died")}
  tokens = {e["token"] for e in events(run_dir, "merged")}
  assert died == {1} and len(tokens) >= 2, "nobody was killed"
  code, out, err = real_run.command("replay", run_dir, "--json")
  assert code == 0, err
  outcome = json.loads(out)
  merged = {(e["fragment"], e["version"]) for e in events(run_dir, "merged")}
  assert outcome["difference"] is None
  assert outcome["equal"] == outcome["compared"] == len(merged) + 4
  assert outcome["arrays_compared"] == 4
  # A life that began too late to be merged from need not be lived again.
  lives = {
    (c["island"], c["incarnation"])
    for e in events(run_dir, "merged")
    for c in e["contributions"]
  }
  assert len(lives) <= outcome["lives"] <= 3


@pytest.fixture
def tampered(run_dir, tmp_path):
  """A copy of the run's records, and how to change its merges."""
  copy = tmp_path / "run"
  shutil.copytree(run_dir, copy)

  def change(edit):
    for path in (copy / "tape").glob("s*.jsonl"):
      lines = [json.loads(x) for x in path.read_text().splitlines()]
      for line in lines:
        if line["event"] == "merged":
          edit(line)
      path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return copy

  return change


def test_changed_weight_is_caught_at_its_version(run_dir, tampered):
  victim = min(
    events(run_dir, "merged"),
    # A machine may be too busy for two islands to have been in one round.
    key=lambda e: (len(e["contributions"]) < 2, e["version"]),
  )
  where = victim["fragment"], victim["version"]

  def edit(line):
    if (line["fragment"], line["version"]) == where:
      line["contributions"][0]["weight"] *= 1.0001

  copy = tampered(edit)
  until = f"--until_version={victim['version']}"
  code, out, _ = real_run.command("replay", copy, "--json", until, OF_A_COPY)
  difference = json.loads(out)["difference"]
  assert code == 1
  assert (difference["fragment"], difference["version"]) == where
  # The replay weighs by itself: the values are those the run had.
  assert difference["expected"] == victim["digest"] == difference["found"]
  (wrong,) = difference["weights"]
  assert wrong.startswith(victim["contributions"][0]["key"] + ": weight")
  assert difference["contributions"] == []


def test_broken_middle_is_named_and_nothing_is_replayed(run_dir, tampered):
  copy = tampered(lambda line: None)
  path = copy / "tape" / "island-0-0001.jsonl"
  lines = path.read_text().splitlines()
  lines[4] = lines[4][:10]
  path.write_text("\n".join(lines) + "\n")
  for command in (
    ("replay", OF_A_COPY),
    ("explain", "--fragment=0", "--version=1"),
  ):
    code, out, err = real_run.command(*command, copy)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and f"{path}, line 5" in err


def test_rounds_of_a_real_run_are_explained(run_dir):
  line = events(run_dir, "merged")[3]
  words = f"--fragment={line['fragment']}", f"--version={line['version']}"
  code, out, err = real_run.command("explain", run_dir, *words, "--json")
  assert code == 0, err
  facts = json.loads(out)
  assert facts["digest"] == line["digest"]
  assert [p["key"] for p in facts["parts"]] == [
    c["key"] for c in line["contributions"]
  ]
  assert sum(p["share"] for p in facts["parts"]) == pytest.approx(1)
  code, out, _ = real_run.command("explain", run_dir, *words)
  assert code == 0 and "closed because" in out
