"""A run's files in its store, and brought back from there."""

import json

import pytest

from diloco import cli, errors, logbook, process, relay
from diloco import config as config_lib
from diloco.report import status
from diloco.snapshots import store
from diloco.tape import events, recorder

PIECE = logbook._PIECE_BYTES


class Counting(store.SnapshotStore):
  """Tells what is written and read, and fails when it is told to."""

  def __init__(self, url):
    super().__init__(url)
    self.put_keys, self.got_keys, self.fails = [], [], False

  def put(self, key, data):
    if self.fails:
      raise OSError("no answer")
    self.put_keys.append(key)
    super().put(key, data)

  def get(self, key):
    self.got_keys.append(key)
    return super().get(key)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run_dir(tmp_path):
  """Of a run that has begun; its store is elsewhere."""
  path = tmp_path / "here" / "run"
  url = (tmp_path / "there").as_uri()
  process.write_config(config_lib.from_mapping({"store": url}), path)
  tape = recorder.Recorder(path, "controller", 1)
  tape.record(events.RUN_STARTED, method="decoupled", islands=1)
  tape.close()
  return path


@pytest.fixture
def snapshots(run_dir):
  return Counting(process.store_url(run_dir))


def lines(path, count, first=0):
  path.parent.mkdir(exist_ok=True)
  with path.open("a") as file:
    for number in range(first, first + count):
      file.write(json.dumps({"step": number, "pad": "x" * 1000}) + "\n")


def same(run_dir, copy):
  names = [*run_dir.glob("tape/*"), *run_dir.glob("metrics/*")]
  return names and all(
    path.read_bytes() == (copy / path.relative_to(run_dir)).read_bytes()
    for path in [*names, run_dir / "config.json"]
  )


def test_copy_is_equal_and_grows_with_the_run(run_dir, snapshots):
  log = recorder.metrics_path(run_dir, 0)
  keeper = logbook.Keeper(run_dir, snapshots)
  for first, count in ((0, 3), (3, 400), (403, 1), (404, 300)):
    lines(log, count, first)
    keeper.push()
    assert same(run_dir, logbook.fetch(snapshots.url))
  starts = [k for k in snapshots.keys("log/lines/metrics") if k]
  assert len(starts) > 4


def test_what_is_in_the_store_is_neither_written_nor_read_again(
  run_dir, snapshots, monkeypatch
):
  log = recorder.metrics_path(run_dir, 0)
  lines(log, 400)
  keeper = logbook.Keeper(run_dir, snapshots)
  keeper.push()
  logbook.fetch(snapshots.url)
  snapshots.put_keys.clear()
  keeper.push()
  assert not snapshots.put_keys
  lines(log, 1, 400)
  keeper.push()
  assert len(snapshots.put_keys) == 1
  monkeypatch.setattr(store, "SnapshotStore", lambda url: snapshots)
  copy = logbook.fetch(snapshots.url)
  read = [key for key in snapshots.got_keys if "/metrics/" in key]
  assert read == snapshots.put_keys  # the last piece alone
  assert same(run_dir, copy)


def test_next_keeper_goes_on_where_the_last_one_ended(run_dir, snapshots):
  log = recorder.metrics_path(run_dir, 0)
  lines(log, 400)
  logbook.Keeper(run_dir, snapshots).push()
  sealed = snapshots.keys("log/lines/metrics/island-0.jsonl")[:-1]
  assert sealed
  snapshots.put_keys.clear()
  lines(log, 5, 400)
  logbook.Keeper(run_dir, snapshots).push()
  put = [key for key in snapshots.put_keys if "/metrics/" in key]
  assert len(put) == 1 and put[0].rpartition("/")[2] not in sealed
  assert same(run_dir, logbook.fetch(snapshots.url))


def test_line_that_is_being_written_waits_for_its_end(run_dir, snapshots):
  log = recorder.metrics_path(run_dir, 0)
  lines(log, 2)
  whole = log.read_bytes()
  log.write_bytes(whole + b'{"step": 2, "lo')
  keeper = logbook.Keeper(run_dir, snapshots)
  keeper.push()
  copy = logbook.fetch(snapshots.url)
  assert recorder.metrics_path(copy, 0).read_bytes() == whole
  log.write_bytes(whole)  # its island died, and the next life cuts it off
  lines(log, 1, 2)
  keeper.push()
  logbook.fetch(snapshots.url)
  assert same(run_dir, copy)


def test_line_longer_than_a_piece_is_kept(run_dir, snapshots):
  log = recorder.metrics_path(run_dir, 0)
  lines(log, 1)
  with log.open("a") as file:
    file.write(json.dumps({"pad": "y" * 3 * PIECE}) + "\n")
  lines(log, 2, 1)
  logbook.Keeper(run_dir, snapshots).push()
  assert same(run_dir, logbook.fetch(snapshots.url))


def test_what_a_store_refused_is_there_with_the_next_turn(run_dir, snapshots):
  keeper = logbook.Keeper(run_dir, snapshots)
  lines(recorder.metrics_path(run_dir, 0), 400)
  snapshots.fails = True
  with pytest.raises(OSError, match="no answer"):
    keeper.push()
  snapshots.fails = False
  keeper.push()
  assert same(run_dir, logbook.fetch(snapshots.url))


def test_tapes_are_kept_on_after_what_nobody_expects(
  run_dir, snapshots, monkeypatch
):
  monkeypatch.setattr(logbook, "PUSH_SECS", 0.0)
  put, left = snapshots.put, [MemoryError("short")] * 9

  def fails(key, data):
    if "lines" in key and left:
      raise left.pop()
    put(key, data)

  monkeypatch.setattr(snapshots, "put", fails)
  with logbook.Keeper(run_dir, snapshots) as keeper:
    while not snapshots.keys("log/lines"):
      assert keeper._worker.is_alive


def test_no_tape_in_the_store_is_ahead_of_what_it_follows_from(
  run_dir, snapshots, monkeypatch
):
  log = recorder.metrics_path(run_dir, 0)
  roles = ("island-0", "standby", "syncer", "controller")
  tapes = [recorder.tape_path(run_dir, role, 1) for role in roles]
  put = snapshots.put

  def and_then(key, data):
    put(key, data)
    for path in (log, *tapes):  # all go on meanwhile
      lines(path, 1)

  lines(log, 1)
  for path in tapes:
    lines(path, 1)
  sizes = [path.stat().st_size for path in (log, *tapes)]
  monkeypatch.setattr(snapshots, "put", and_then)
  logbook.Keeper(run_dir, snapshots).push()
  files = [path.relative_to(run_dir) for path in (log, *tapes)]
  names = [f"log/lines/{file}/{0:016d}" for file in files]
  assert [k for k in snapshots.put_keys if k in names] == names
  kept = [len(snapshots.get(name)) for name in names]
  assert kept[0] == sizes[0] and kept[1] > sizes[1]
  assert kept[2:] == sizes[2:]  # as they were when this began


def test_session_whose_run_another_has_writes_nothing_more(run_dir, snapshots):
  lines(recorder.metrics_path(run_dir, 0), 3)
  asked = []

  def check():
    asked.append(None)
    if len(asked) > 3:  # in the middle of the first push
      raise errors.FencedError("another controller took the run over")

  with logbook.Keeper(run_dir, snapshots, check) as keeper:
    keeper._worker.join()
  (told, _) = snapshots.put_keys
  assert told == "log/seen"


def test_run_outlives_a_store_that_is_gone_at_its_end(run_dir, snapshots):
  with logbook.Keeper(run_dir, snapshots):
    snapshots.fails = True


def test_run_is_alive_elsewhere_while_it_is_kept(run_dir, snapshots):
  with logbook.Keeper(run_dir, snapshots) as keeper:
    while not snapshots.get("log/whole/config.json"):
      keeper._worker.check()
    there = status.status(logbook.fetch(snapshots.url))
    assert (there["status"], there["alive"]) == ("running", True)
  there = status.status(logbook.fetch(snapshots.url))
  assert (there["status"], there["alive"]) == ("crashed", False)


def test_another_run_at_the_same_place_takes_the_place_of_the_copy(
  run_dir, snapshots, tmp_path
):
  lines(recorder.metrics_path(run_dir, 0), 3)
  logbook.Keeper(run_dir, snapshots).push()
  copy = logbook.fetch(snapshots.url)
  snapshots.delete_tree("log")
  other = tmp_path / "other" / "run"
  process.write_config(config_lib.from_mapping({"store": snapshots.url}), other)
  lines(recorder.metrics_path(other, 1), 1)
  logbook.Keeper(other, snapshots).push()
  assert logbook.fetch(snapshots.url) == copy
  assert [path.name for path in copy.glob("metrics/*")] == ["island-1.jsonl"]


def test_keys_that_name_other_files_are_left_alone(run_dir, snapshots):
  logbook.Keeper(run_dir, snapshots).push()
  above = "lines/tape/../../../evil.jsonl/0000000000000000"
  assert not list(relay.pieces([above]))  # in a bucket it may be a key
  for name in ("tape/more/x.jsonl", "logs/x.jsonl", "tape/x.py"):
    snapshots.put(f"log/lines/{name}/{0:016d}", b"evil\n")
  snapshots.put("log/whole/task.py", b"evil\n")
  snapshots.put("log/seen", b"no json")
  copy = logbook.fetch(snapshots.url)
  found = {str(path.relative_to(copy)) for path in copy.rglob("*.*")}
  assert found == {
    *("config.json", "control/origin.json", "tape/controller-0001.jsonl")
  }


def test_store_without_a_run_is_refused(tmp_path):
  with pytest.raises(errors.UserError, match="no run has kept its files"):
    logbook.fetch((tmp_path / "empty").as_uri())


@pytest.mark.parametrize(
  "argv", [["resume", "URL"], ["change", "URL"], ["cut", "URL"]]
)
def test_what_acts_on_a_run_wants_its_directory(argv, capsys):
  argv = [word.replace("URL", "s3://bucket/run") for word in argv]
  assert cli.main(argv) == 2
  assert "where the run was begun" in capsys.readouterr().err


def test_copy_is_not_gone_on_with(run_dir, snapshots, capsys):
  logbook.Keeper(run_dir, snapshots).push()
  copy = logbook.fetch(snapshots.url)
  assert cli.main(["resume", str(copy)]) == 2
  assert "is a copy of the run at" in capsys.readouterr().err
