"""Records of roles that do not see the run directory, on their way to it."""

import json
import subprocess
import sys
import threading

import pytest

from diloco import config as config_lib
from diloco import errors, logbook, process, relay
from diloco.snapshots import store
from diloco.tape import recorder


class Failing(store.SnapshotStore):
  """Fails when it is told to, after or before it has done what was asked."""

  fails = ""

  def put(self, key, data):
    if self.fails != "before":
      super().put(key, data)
    if self.fails:
      raise OSError("no answer")


@pytest.fixture
def run_dir(tmp_path):
  (tmp_path / "run").mkdir()
  return tmp_path / "run"


@pytest.fixture
def snapshots(tmp_path):
  return Failing(f"file://{tmp_path}/store")


def hold(snapshots, permit, folder):
  """Gives a life what the engine gives it."""
  (folder / "control").mkdir(parents=True)
  (folder / relay.APART).write_text("word")
  snapshots.put(permit, b"word")


class Life:
  """One life of island 0, in a folder of its own."""

  def __init__(self, tmp_path, snapshots, number=1):
    self.folder = tmp_path / f"life-{number}"
    self.permit = relay.permit_key("island-0", number)
    hold(snapshots, self.permit, self.folder)
    self.relay = relay.Relay(self.folder, snapshots, "island-0", number)
    self.tape = recorder.Recorder(
      self.folder, "island-0", number, recorded=self.relay.flush
    )
    self.metrics = recorder.MetricLog(self.folder, 0)

  def says(self, number):
    self.tape.record("heard", number=number)
    self.metrics.record(step=number)


@pytest.fixture
def life(tmp_path, snapshots):
  return Life(tmp_path, snapshots)


def told(run_dir):
  """Numbers on the tape, and in the metric log."""
  found = []
  for path, field in (
    (recorder.tape_path(run_dir, "island-0", 1), "number"),
    (recorder.metrics_path(run_dir, 0), "step"),
  ):
    text = path.read_text() if path.exists() else ""
    assert not text or text.endswith("\n")
    found.append([json.loads(line)[field] for line in text.splitlines()])
  return found


def test_what_was_recorded_before_a_flush_is_in_the_run(
  run_dir, snapshots, life
):
  for number in range(3):
    life.says(number)
    life.tape.flush()
  assert len(relay.collect(run_dir, snapshots)) == 3
  assert told(run_dir) == [[0, 1, 2], []]
  life.says(3)  # and not flushed: it is lost with the role
  relay.collect(run_dir, snapshots)
  assert told(run_dir) == [[0, 1, 2], []]
  life.relay.push()
  relay.collect(run_dir, snapshots)
  assert told(run_dir) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("fails", ["before", "after"])
def test_lines_that_a_store_refused_come_later_and_once(
  run_dir, snapshots, life, fails
):
  life.says(0)
  life.tape.flush()  # so it is the metric log that fails
  snapshots.fails = fails
  with pytest.raises(OSError, match="no answer"):
    life.relay.push()
  taken = relay.collect(run_dir, snapshots)
  assert len(taken) == (2 if fails == "after" else 1)
  for key in taken:  # what took them forgets them, and they come once more
    snapshots.delete(key)
  life.says(1)
  snapshots.fails = ""
  life.relay.push()
  relay.collect(run_dir, snapshots)
  assert told(run_dir) == [[0, 1]] * 2


def test_what_was_taken_is_not_taken_twice(run_dir, snapshots, life):
  life.says(0)
  life.relay.push()
  first = relay.collect(run_dir, snapshots)
  assert relay.collect(run_dir, snapshots, first) == []
  assert relay.collect(run_dir, snapshots) == first  # by another controller
  assert told(run_dir) == [[0]] * 2


def test_line_that_was_torn_as_its_controller_died_is_mended(
  run_dir, snapshots, life
):
  life.says(0)
  life.relay.push()
  relay.collect(run_dir, snapshots)
  life.says(1)
  life.relay.push()
  for path in run_dir.glob("*/*.jsonl"):
    path.write_text(path.read_text() + '{"event": "hea')
  relay.collect(run_dir, snapshots)
  assert told(run_dir) == [[0, 1]] * 2


def test_piece_of_which_a_full_disk_took_a_part_comes_once(
  run_dir, snapshots, life
):
  whole = run_dir.parent / "whole"
  for number in range(3):
    life.says(number)
  life.relay.push()
  for key in relay.collect(whole, snapshots):
    name = "/".join(key.split("/")[2:4])
    first, second, _ = (whole / name).read_bytes().splitlines(keepends=True)
    (run_dir / name).parent.mkdir()
    (run_dir / name).write_bytes(first + second[:9])
  relay.collect(run_dir, snapshots)
  assert told(run_dir) == [[0, 1, 2]] * 2


def test_piece_that_comes_before_an_earlier_one_waits(run_dir, snapshots, life):
  for number in range(2):
    life.says(number)
    life.relay.push()
  tapes = [key for key in snapshots.keys("relay") if "/tape/" in key]
  first = f"relay/{tapes[0]}"
  held = snapshots.get(first)
  snapshots.delete(first)  # a listing that lacks it
  taken = relay.collect(run_dir, snapshots)
  assert f"relay/{tapes[1]}" not in taken
  snapshots.put(first, held)
  relay.collect(run_dir, snapshots)
  assert told(run_dir) == [[0, 1]] * 2


def test_lives_of_an_island_share_its_metrics(tmp_path, run_dir, snapshots):
  for number in (1, 2):
    life = Life(tmp_path, snapshots, number)
    life.says(number)
    life.relay.push()
  relay.collect(run_dir, snapshots)
  assert told(run_dir)[1] == [1, 2]
  assert recorder.tape_path(run_dir, "island-0", 2).exists()


def test_keys_that_name_other_files_are_left_alone(run_dir, snapshots):
  for key in (
    "island-0-0001/config.json/0",
    "island-0-0001/tape/more/x.jsonl/0",
    "island-0-0001/tape/x.jsonl/-1",
    "island-0-0001/tape/x.txt/0",
    "island-0-0001/tape/0",
    "stray",
  ):
    snapshots.put(f"relay/{key}", b"{}\n")
  assert relay.collect(run_dir, snapshots) == []
  assert not list(run_dir.iterdir())


def test_who_keeps_the_run_takes_keeps_and_forgets_what_was_relayed(
  run_dir, snapshots, life, tmp_path, monkeypatch
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  config = config_lib.from_mapping({"store": snapshots.url})
  process.write_config(config, run_dir)
  life.says(0)
  life.relay.push()
  keeper = logbook.Keeper(run_dir, snapshots, relayed=True)
  keeper.bring()
  assert told(run_dir) == [[0]] * 2
  assert snapshots.keys("relay") == []
  copy = logbook.fetch(snapshots.url)
  assert told(copy) == [[0]] * 2
  life.says(1)
  life.relay.push()
  snapshots.fails = "before"
  keeper.bring()  # which does not end who asks
  assert told(run_dir) == [[0, 1]] * 2
  assert len(snapshots.keys("relay")) == 2  # not kept elsewhere yet
  snapshots.fails = ""
  keeper.bring()
  assert told(run_dir) == told(logbook.fetch(snapshots.url)) == [[0, 1]] * 2
  assert snapshots.keys("relay") == []


def test_nothing_is_kept_that_follows_from_what_was_not_taken_yet(
  run_dir, snapshots, life, monkeypatch
):
  mine = recorder.Recorder(run_dir, "controller", 1)
  keys = snapshots.keys

  def and_then(prefix):
    found = keys(prefix)
    if prefix == "relay" and not found:
      life.says(7)
      life.tape.flush()
      mine.record("heard", number=8)  # which follows from it
    return found

  monkeypatch.setattr(snapshots, "keys", and_then)
  keeper = logbook.Keeper(run_dir, snapshots, relayed=True)
  keeper.push()
  assert not [k for k in keys("log/lines") if "tape/" in k]
  keeper.push()
  kept = [k.split("/")[1] for k in keys("log/lines")]
  assert kept == ["controller-0001.jsonl", "island-0-0001.jsonl"]


def test_role_in_the_run_directory_relays_nothing(run_dir):
  with relay.relayed(run_dir, "syncer", 1) as recorded:
    recorded()
  assert "relay" not in [t.name for t in threading.enumerate()]
  assert not list(run_dir.iterdir())


def test_role_that_leaves_has_its_last_lines_in_the_store(
  tmp_path, run_dir, snapshots, monkeypatch
):
  folder = tmp_path / "life"
  hold(snapshots, relay.permit_key("syncer", 2), folder)
  config = config_lib.from_mapping({"store": snapshots.url})
  process.write_config(config, folder)
  monkeypatch.setattr(relay, "_LOOK_SECS", 0.01)
  failures = iter(["before"] * 3)

  class Reached(Failing):
    def put(self, key, data):
      self.fails = next(failures, "")
      super().put(key, data)

  monkeypatch.setattr(store, "SnapshotStore", Reached)
  with relay.relayed(folder, "syncer", 2) as recorded:
    tape = recorder.Recorder(folder, "syncer", 2, recorded=recorded)
    tape.record("heard", number=1)
    tape.close()
  relay.collect(run_dir, snapshots)
  lines = recorder.tape_path(run_dir, "syncer", 2).read_text().splitlines()
  assert [json.loads(line)["number"] for line in lines] == [1]
  assert "relay" not in [t.name for t in threading.enumerate()]


@pytest.mark.parametrize("held", [b"of another life", None])
def test_life_without_permit_commits_nothing(snapshots, life, held):
  life.says(0)
  if held is None:
    snapshots.delete(life.permit)
  else:
    snapshots.put(life.permit, held)
  with pytest.raises(errors.FencedError, match="island-0-0001 was withdrawn"):
    life.tape.flush()


_ROLE = """
import pathlib, sys, time
from diloco import relay
from diloco.snapshots import store
get, left = store.SnapshotStore.get, [MemoryError("nobody expects it")]
def short_once(*args):
  if left:
    raise left.pop()
  return get(*args)
store.SnapshotStore.get = short_once
with relay.relayed(pathlib.Path(sys.argv[1]), "syncer", 3):
  print("up", flush=True)
  time.sleep(600)
"""


def test_role_ends_when_its_permit_is_withdrawn(tmp_path, snapshots):
  permit = relay.permit_key("syncer", 3)
  folder = tmp_path / "life"
  hold(snapshots, permit, folder)
  config = config_lib.from_mapping({"store": snapshots.url})
  process.write_config(config, folder)
  with subprocess.Popen(
    [sys.executable, "-c", _ROLE, str(folder)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as role:
    assert role.stdout.readline() == "up\n"
    snapshots.delete(permit)
    _, err = role.communicate(timeout=60)
  assert role.returncode == process.EXIT_FAILED
  assert "nobody expects it" in err
  assert "the permit of syncer-0003 was withdrawn" in err
