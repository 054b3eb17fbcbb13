"""Roles as threads of one process: what only they can do wrong."""

import json
import logging
import random
import threading
import time

import jax
import pytest

from diloco import channel, cli, errors, heartbeat, process, workers
from diloco import config as config_lib
from diloco import run as run_lib
from diloco.controller import controller as controller_lib
from diloco.controller.engines import base
from diloco.inline import engine
from diloco.islands import island, programs
from diloco.replay import replayer as replay
from diloco.report import roster
from diloco.snapshots import digest, operations
from diloco.syncer import main as syncer_main
from diloco.tape import reader
from tests.observing import events

FLEET = 16


def make_config(islands, **fields):
  return {
    "engine": "inline",
    "total_tokens": 300 * islands,
    "task": {"name": "tests.islands.quadratic:make"},
    "fleet": {"slices": [{}] * islands, "pace_step_secs": 0.05},
    "sync": {"num_fragments": 2, "every": 4, "codec": "f32"},
    "programs": {
      "window_steps": 4,
      "checkpoint_every_steps": 10,
      "final_eval_batches": 1,
      "cut_every_secs": 0.5,
    },
    "controller": {"restart_base_secs": 0.05},
  } | fields


def names():
  """Threads of roles that are alive."""
  return {t.name for t in threading.enumerate() if ":" in t.name}


def wait_for(condition):
  deadline = time.monotonic() + 240
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.05)


@pytest.mark.parametrize("seed", [0])
def test_many_kills_leave_sixteen_islands_with_balanced_books(tmp_path, seed):
  drawn = random.Random(seed)
  targets = [f"island-{m}" for m in range(FLEET)] * 2 + ["syncer"] * 6
  total = 10**7  # it ends when all are struck, however long that takes
  faults = [
    {"target": target, "at_fraction": drawn.uniform(240, 2900) / total}
    for target in drawn.sample([*targets, "standby", "standby"], 24)
  ]
  config = make_config(FLEET, faults=faults, seed=seed, total_tokens=total)

  def end_after_faults(controller):
    def watch():
      core = controller.core
      wait_for(lambda: not core._faults)
      struck_at = core.pilot.tokens
      wait_for(lambda: core.pilot.tokens > struck_at + 100 * FLEET)
      wait_for(lambda: len(core.fleet.ready_islands) == FLEET)
      controller.interrupt()

    threading.Thread(target=watch, daemon=True).start()

  result = run_lib.conduct(
    config, tmp_path / "run", quiet=True, begun=end_after_faults
  )
  facts = result.summary
  assert result.status == "stopped"
  assert all(fault["injected"] for fault in facts["faults"])
  # Two faults may hit one life, so not each is a death.
  lines = reader.read(tmp_path / "run", strict=True).events
  died = {line["island"] for line in lines if line["event"] == "island_died"}
  struck = {f["target"] for f in faults if f["target"].startswith("island")}
  assert {f"island-{m}" for m in died} == struck
  assert sum(i["restarts"] for i in facts["islands"].values()) > FLEET // 2
  assert facts["tokens_unaccounted"] == 0 and not facts["violations"]
  assert not names()


def test_session_that_cannot_begin_listens_no_more(tmp_path, monkeypatch):
  servers = []

  class Server(channel.Server):
    def __init__(self, *args):
      super().__init__(*args)
      servers.append(self)

  def refuse(*_, **__):
    raise ZeroDivisionError

  monkeypatch.setattr(channel, "Server", Server)
  monkeypatch.setattr(controller_lib, "Controller", refuse)
  before = set(threading.enumerate())
  with pytest.raises(ZeroDivisionError):
    run_lib.conduct(make_config(1), tmp_path / "run", quiet=True)
  assert len(servers) == 1
  with pytest.raises(OSError, match="Bad file descriptor"):
    servers[0]._listener.getsockname()
  left = {t.name for t in set(threading.enumerate()) - before}
  assert "channels" not in left


@pytest.fixture(scope="module")
def meshes(tmp_path_factory):
  """A run of islands of three meshes, of which cuts are taken, and its end."""
  folder = tmp_path_factory.mktemp("meshes") / "run"
  faults = [{"target": "island-1", "at_fraction": 1e-5}]
  config = make_config(3, faults=faults, total_tokens=10**7)
  config["fleet"]["slices"] = [{"topology": t} for t in ("2", "1x2", "2x2")]

  def end_after_cuts(controller):
    def watch():
      wait_for((folder / "tape" / "island-1-0002.jsonl").exists)
      wait_for(lambda: max(complete_cuts(folder), default=0) > 2)
      controller.interrupt()

    threading.Thread(target=watch, daemon=True).start()

  result = run_lib.conduct(config, folder, quiet=True, begun=end_after_cuts)
  return folder, result


def complete_cuts(folder):
  found = (folder / "snapshots" / "cuts").glob("*/complete")
  return sorted(int(path.parent.name) for path in found)


def test_islands_have_meshes_of_their_own(meshes):
  folder, result = meshes
  assert result.status == "stopped"
  assert result.summary["tokens_unaccounted"] == 0
  started = events(folder, "started")
  found = {(line["role"], line["devices"]) for line in started}
  assert found == {("island-0", 2), ("island-1", 2), ("island-2", 4)}


def test_cuts_are_taken_at_intervals_and_the_last_can_be_gone_back_to(meshes):
  folder, before = meshes
  cuts = [line["cut"] for line in events(folder, "cut_completed")]
  assert complete_cuts(folder) == cuts[-2:]
  merged = len(events(folder, "merged"))
  tokens = before.summary["tokens_trained"] + 500
  words = ("--cut=last", f"--config.total_tokens={tokens}")
  assert cli.main(["resume", str(folder), *words]) == 0
  (restored,) = events(folder, "restored")
  assert restored["cut"] == cuts[-1]
  assert len(events(folder, "merged")) > merged + 4
  facts = json.loads((folder / "summary.json").read_text())
  assert facts["status"] == "finished" and facts["violations"] == []
  assert facts["tokens_unaccounted"] == 0 and facts["ledger"]["balanced"]


def test_run_that_an_earlier_version_began_goes_on_and_replays(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(digest, "_NEWEST", "")  # BLAKE2b, as up to November 2026
  run_lib.train(make_config(1, total_tokens=150), tmp_path / "run", quiet=True)
  monkeypatch.undo()
  faults = [{"target": "island-0", "at_fraction": 0.8}]
  run_lib.train(make_config(1, faults=faults), tmp_path / "run", quiet=True)
  lines = reader.read(tmp_path / "run").events
  told = {line["digest"][:5] for line in lines if line["event"] == "merged"}
  assert "gmac:" in told and len(told) > 1
  replayed = replay.run(tmp_path / "run")
  assert replayed.lives == 3 and replayed.arrays_compared == 2
  assert replayed.difference is None


def test_role_that_hangs_counts_as_gone_and_does_nothing_more(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(engine, "_HANG_SECS", 0.0)
  hanging, go_on = threading.Event(), threading.Event()
  mortal, done, ended = engine.MortalThreads("run:island-0.1"), [], []

  def script():
    yield operations.Compute(lambda: hanging.set() or go_on.wait())
    yield operations.Names("a")

  def body():
    mortal.at_death(lambda: ended.append("released"))
    loop = mortal.loop("publisher", script(), done.append)
    loop.start()
    go_on.wait()
    while True:
      mortal.check()

  role = engine.Role(mortal, tmp_path / "log", body)
  assert hanging.wait(20)
  assert role.cause_of_death() is None and not role.wait(0.0)
  role.signal(9)
  while role.cause_of_death() is None:
    pass
  assert role.cause_of_death() == "SIGKILL" and not ended
  assert "run:island-0.1" in engine._LOGS.paths
  go_on.set()
  assert role.wait(20)
  assert done == [] and ended == ["released"]
  assert "run:island-0.1" not in engine._LOGS.paths


def test_killed_role_whose_threads_hang_takes_no_channel_from_the_next(
  tmp_path, monkeypatch
):
  found = {}

  def client(run_dir, peer, hello, killed):
    found[peer] = killed
    raise InterruptedError

  monkeypatch.setattr(channel, "Client", client)
  config = config_lib.from_mapping(make_config(1))
  process.write_config(config, tmp_path)
  spec = island.Spec(tmp_path, "memory://", 0, 1, config.fleet.slices[0])
  for name, live in {
    "island-0": lambda of: programs.live(spec, config, None, [], of),
    "syncer": lambda of: syncer_main.live(tmp_path, "syncer", 1, of),
  }.items():
    mortal = engine.MortalThreads(name)
    with pytest.raises(InterruptedError):
      live(mortal)
    assert not found[name]()
    mortal.kill()
    assert found[name]()


def test_dead_pulse_is_silent():
  mortal, beats = engine.MortalThreads("x"), []
  made = mortal.pulse(lambda: beats.append(1), 1000.0, "heartbeat")
  while not beats:
    pass
  mortal.kill()
  made.close()
  assert beats == [1]
  with pytest.raises(workers.Ended):
    mortal.check()


def test_role_that_was_killed_here_is_dead_at_once(tmp_path):
  """Its process lives on, and may begin the run's next session."""
  process.write_config(config_lib.RunConfig(), tmp_path)
  mortal = engine.MortalThreads("run:island-0.1")
  member = heartbeat.born(tmp_path, "island-0", 1, mortal)
  assert roster.state(member, member.told_secs) == roster.ALIVE
  mortal.end()
  assert roster.state(member, member.told_secs) == "dead"


@pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_whatever_ends_a_role_it_is_no_right_end(tmp_path):
  def body():
    raise SystemExit(0)

  role = engine.Role(engine.MortalThreads("x"), tmp_path / "log", body)
  assert role.wait(20) and role.cause_of_death() == "exit 1"


def test_runs_in_directories_of_one_name_keep_their_logs_apart(
  tmp_path, monkeypatch
):
  both = threading.Barrier(2)

  def live(run_dir, *_):
    both.wait(20)
    logging.getLogger("diloco.test").warning("in %s", run_dir.parent.name)
    both.wait(20)

  monkeypatch.setattr(syncer_main, "live", live)
  config = config_lib.from_mapping(make_config(1))
  logs, roles = [], []
  for place in ("one", "two"):
    run_dir = tmp_path / place / "run"
    logs.append(run_dir / "logs" / "syncer.log")
    facts = {"incarnation": 1}
    launch = base.Launch("syncer", "", (), logs[-1], facts=facts)
    roles.append(engine.Engine(run_dir, config, object()).start(launch))
  assert all(role.wait(20) for role in roles)
  assert [log.read_text().split()[-1] for log in logs] == ["one", "two"]


def test_controller_that_fails_takes_its_roles_along(tmp_path, monkeypatch):
  seen = []

  def fail(self):
    if self.core.pilot.tokens:
      seen.append(names())
      raise ZeroDivisionError("a mistake of ours")

  monkeypatch.setattr(controller_lib.Controller, "_keep_hints", fail)
  with pytest.raises(errors.DetachedError, match="roles ended with it"):
    run_lib.train(make_config(2), tmp_path / "run", quiet=True)
  assert seen[0] and not names()


def test_slices_of_several_devices_share_none(tmp_path):
  wide = f"{len(jax.devices())}"
  config = make_config(2)
  config["fleet"]["slices"] = [{"topology": wide}] * 2
  with pytest.raises(errors.UserError, match="only slices of one device can"):
    run_lib.train(config, tmp_path / "run", quiet=True)
  assert not (tmp_path / "run").exists()


def test_threads_cannot_be_stopped():
  faults = [{"target": "syncer", "at_fraction": 0.5, "kind": "sigstop"}]
  with pytest.raises(errors.UserError, match=r"faults\[0\].*threads"):
    config_lib.from_mapping(make_config(2, faults=faults))
