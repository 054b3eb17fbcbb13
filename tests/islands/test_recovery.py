import json

import pytest

from diloco.fragments import partition
from diloco.islands import recovery
from diloco.snapshots import records, store
from diloco.tape import recorder

PLAN = partition.partition([partition.Tensor("w", (4,), "rda")], 1)
NAME = "0000.0003.0001.000000017"  # island 3 published its step 17


def _head(clock):
  return records.Head(0, 1, 1, "globals/x", [[4]], clock, {})


@pytest.fixture
def snapshots(tmp_path):
  return store.SnapshotStore((tmp_path / "snapshots").as_uri())


def test_new_island_starts_at_step_zero(tmp_path, snapshots):
  assert recovery.last_step(tmp_path, snapshots, PLAN, 3) == 0


def test_step_that_moves_from_record_to_head_meanwhile_is_not_missed(
  tmp_path, snapshots, monkeypatch
):
  snapshots.write(store.head_key(0), _head({}))
  snapshots.write(store.contribution_key(NAME), records.Lease("", 0, 0))
  names, read = snapshots.names, snapshots.read

  def merge():
    snapshots.write(store.head_key(0), _head({"3": 17}))
    snapshots.delete(store.contribution_key(NAME))

  def merged_after(look):
    def looked(*args):
      found = look(*args)
      merge()
      return found

    return looked

  # The syncer merges right after the first look, whichever that is.
  monkeypatch.setattr(snapshots, "names", merged_after(names))
  monkeypatch.setattr(snapshots, "read", merged_after(read))
  assert recovery.last_step(tmp_path, snapshots, PLAN, 3) == 17


@pytest.mark.parametrize("torn", [b"", b'{"step": 99'])
def test_tape_and_metric_log_may_know_more_than_the_store(
  tmp_path, snapshots, torn
):
  log = recorder.MetricLog(tmp_path, 3)
  log.record(step=20)
  log.close()
  tape = recorder.Recorder(tmp_path, "island-3", 2)
  tape.record("adopted", step=22)
  tape.close()
  with tape.path.open("ab") as file:
    file.write(torn)
  recorder.metrics_path(tmp_path, 4).write_text(json.dumps({"step": 50}) + "\n")
  assert recovery.last_step(tmp_path, snapshots, PLAN, 3) == 22
