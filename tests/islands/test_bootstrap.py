"""Version 0 is made where there was none, and nowhere else."""

import numpy as np
import pytest
from cut_builder import PLAN, run_with_a_cut, spoil

from diloco import errors
from diloco.islands import bootstrap
from diloco.snapshots import keys, records, store


class Part:
  """A tensor this host holds all of, as `shards.HostFragment` has it."""

  def __init__(self, values):
    self.shard_shape = values.shape
    self.pieces = [(None, values)]
    self._values = values

  def whole(self):
    return self._values


@pytest.fixture
def initial():
  return [
    {t.name: Part(np.zeros(t.shape, np.float32)) for t in tensors}
    for tensors in PLAN.fragments
  ]


def publish(snapshots, initial, **facts):
  bootstrap.publish_initial(
    snapshots, PLAN, initial, "i0.1", first_fragment=1, **facts
  )


def heads_of(snapshots):
  return [snapshots.read(keys.head_key(p), records.Head) for p in range(2)]


def test_fragment_without_versions_gets_its_first(initial):
  snapshots = store.SnapshotStore("memory://")
  snapshots.write_plan(PLAN)
  for _ in range(2):
    publish(snapshots, initial)
    heads = heads_of(snapshots)
    assert [head.version for head in heads] == [0, 0]
  # A payload that nobody committed is no version.
  snapshots.delete(keys.head_key(0))
  publish(snapshots, initial)
  assert heads_of(snapshots) == heads


def test_lost_head_of_a_trained_fragment_is_not_made_anew(tmp_path, initial):
  run, _ = run_with_a_cut(tmp_path)
  run.store.delete(keys.head_key(0))
  with pytest.raises(errors.CorruptSnapshotError, match="heads/0000 is lost"):
    publish(run.store, initial)
  assert run.head(0) is None


def test_island_with_a_saved_state_makes_no_head_anew_in_an_empty_store(
  initial,
):
  snapshots = store.SnapshotStore("memory://")
  snapshots.write_plan(PLAN)
  with pytest.raises(errors.CorruptSnapshotError, match="heads/0001 is lost"):
    publish(snapshots, initial, begun=True)
  assert snapshots.names("heads") == snapshots.names("globals") == []


def test_damaged_head_is_not_made_anew(tmp_path, initial):
  run, _ = run_with_a_cut(tmp_path)
  spoil(run, keys.head_key(1))
  with pytest.raises(errors.CorruptSnapshotError):
    publish(run.store, initial)
