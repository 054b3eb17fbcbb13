"""Version 0 is made where there was none, and nowhere else."""

import jax.numpy as jnp
import numpy as np
import pytest
import quadratic
from cut_builder import PLAN, run_with_a_cut, spoil

from diloco import errors
from diloco.fragments import partition
from diloco.islands import bootstrap
from diloco.snapshots import keys, records, store, versions


@pytest.fixture
def initial():
  return [
    {t.name: jnp.zeros(t.shape) for t in tensors} for tensors in PLAN.fragments
  ]


def publish(snapshots, initial, **facts):
  bootstrap.publish_initial(
    snapshots, PLAN, initial.__getitem__, "i0.1", first_fragment=1, **facts
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


def test_head_made_and_merged_into_since_the_first_look_is_left_alone(
  tmp_path, initial, monkeypatch
):
  run, _ = run_with_a_cut(tmp_path)
  theirs, names = run.head(0), run.store.names
  run.store.delete(keys.head_key(0))

  def meanwhile(prefix):
    run.store.write(keys.head_key(0), theirs)
    return names(prefix)

  monkeypatch.setattr(run.store, "names", meanwhile)
  publish(run.store, initial)
  assert run.head(0) == theirs


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


def test_given_parameters_become_version_0_bit_by_bit():
  trainer = quadratic.make_trainer()
  given = {
    "a": np.array([1.5, -2.0], np.float32),
    "b": np.arange(3, dtype=np.float32),
  }
  snapshots = store.SnapshotStore("memory://")
  snapshots.write_plan(trainer.plan)
  assert not bootstrap.has_given(snapshots, 2)
  bootstrap.keep_given(snapshots, trainer.plan, given)
  assert bootstrap.has_given(snapshots, 2)
  initial = bootstrap.initial_of(snapshots, trainer, given=True)
  bootstrap.publish_initial(
    snapshots, trainer.plan, initial, "i0.1", first_fragment=0
  )
  found = versions.Versions(snapshots).read()
  assert found.versions == [0, 0]
  for name, values in given.items():
    np.testing.assert_array_equal(found.params[name], values)
  of_the_seed = bootstrap.initial_of(snapshots, trainer, given=False)
  assert of_the_seed(0) is trainer.swap.anchors[0]
  snapshots.delete(keys.initial_key(1))
  assert not bootstrap.has_given(snapshots, 2)
  with pytest.raises(errors.CorruptSnapshotError, match="initial/0001 is lost"):
    initial(1)


def test_parts_of_a_leaf_are_given_their_own_values():
  tensors = [partition.Tensor("w", (2, 12), "rda")]
  plan = partition.partition(tensors, 3, split=True)
  given = {"w": np.arange(24, dtype=np.float32).reshape(2, 12)}
  snapshots = store.SnapshotStore("memory://")
  snapshots.write_plan(plan)
  bootstrap.keep_given(snapshots, plan, given)
  for fragment in range(3):
    kept = snapshots.read(keys.initial_key(fragment), records.Initial)
    snapshots.write(keys.head_key(fragment), records.Head(**kept.to_fields()))
  found = versions.Versions(snapshots).read()
  np.testing.assert_array_equal(found.params["w"], given["w"])


@pytest.mark.parametrize(
  ("version", "payload", "writer"),
  [
    (0, "globals/0001/0.i2.13", (2, 13)),
    (0, "globals/0001/0.s2.13", None),
    (3, "globals/0001/3.i2.13", None),
  ],
)
def test_initial_parameters_alone_are_known_by_who_made_them(
  version, payload, writer
):
  head = records.Head(1, version, 0, payload, [], {}, {})
  assert bootstrap.initial_writer(head) == writer
