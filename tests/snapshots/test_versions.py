"""What is read of a run's global versions, as the store has them."""

import dataclasses

import numpy as np
import pytest
from cut_builder import PLAN, CutRun, filled

from diloco import errors
from diloco.fragments import partition
from diloco.snapshots import cuts, digest, keys, versions


def made(tmp_path, newest=(3, 4)):
  run = CutRun(tmp_path)
  for fragment, last in enumerate(newest):
    for version in range(1, last + 1):
      run.commit(fragment, version, {}, value=float(version))
  return run


def leave_uncommitted(run, fragment, version, token=9):
  """What a leader wrote whose commit never took effect."""
  head = run.head(fragment)
  run.commit(fragment, version, {}, value=-1.0, token=token)
  run.store.write(keys.head_key(fragment), head)


def told(fragment, version):
  tensors = PLAN.fragments[fragment]
  named = ((t.name, filled(t, float(version))) for t in tensors)
  return digest.tensors(named)


@pytest.mark.parametrize(
  ("token", "taken"), [(0, "gmac:"), (9, "gmac:"), (9, "")]
)
def test_all_that_is_listed_was_committed_and_can_be_read(
  tmp_path, token, taken, monkeypatch
):
  monkeypatch.setattr(digest, "_NEWEST", taken)  # or as earlier versions did
  run = made(tmp_path)
  for fragment in (0, 1):  # one where a version is, one beyond the newest
    for version in (2, 5):
      leave_uncommitted(run, fragment, version, token)
  listed = {(p, v): told(p, v) for p in (0, 1) for v in range(6)}
  monkeypatch.undo()
  found = versions.Versions(run.store, lambda *which: listed[which])
  assert found.listed() == [0, 1, 2, 3]
  for version in found.listed():
    read = found.read(version)
    assert read.versions == [version, version]
    for values in read.params.values():
      np.testing.assert_array_equal(values, float(version))
  newest = found.read()
  assert newest.versions == [3, 4]
  assert {name: v[0] for name, v in newest.params.items()} in (
    {"a": 3.0, "b": 4.0},
    {"a": 4.0, "b": 3.0},
  )
  with pytest.raises(errors.UserError, match="versions 0, 1, 2, 3 and no cut"):
    found.read(4)


def test_cuts_that_are_listed_are_complete_and_can_be_read(tmp_path):
  run = made(tmp_path)
  found = versions.Versions(run.store, told)
  complete = run.take_cut()
  given_up = run.perform(cuts.request([0], 2)).cut
  run.perform(cuts.abandon(given_up, "for a test"))
  run.commit(0, 4, {}, value=4.0)
  still_open = run.perform(cuts.request([0], 2)).cut
  assert found.cuts() == [complete]
  assert found.read(cut=complete).versions == [3, 4]
  for other in (given_up, still_open):
    with pytest.raises(errors.UserError, match="and cuts 1; name"):
      found.read(cut=other)


def test_newest_version_after_a_return_to_a_cut_has_a_number(tmp_path):
  run = made(tmp_path)
  for fragment in (0, 1):
    back = dataclasses.replace(run.head(fragment), version=9)
    run.store.write(keys.head_key(fragment), back)
  found = versions.Versions(run.store, told)
  assert found.listed()[-1] == 9
  read = found.read(9)
  assert read.versions == [9, 9]
  assert sorted(v[0] for v in read.params.values()) == [3.0, 4.0]


def test_version_that_is_not_what_the_tape_tells_is_damaged(tmp_path):
  run = made(tmp_path)
  leave_uncommitted(run, 0, 2)
  run.store.delete_tree(keys.global_prefix(0, 2, "s1.2.0"))
  with pytest.raises(errors.CorruptSnapshotError, match="version 2"):
    versions.Versions(run.store, told).read(2)
  head = dataclasses.replace(run.head(1), digest="of something else")
  run.store.write(keys.head_key(1), head)
  with pytest.raises(errors.CorruptSnapshotError, match="digest differs"):
    versions.Versions(run.store, told).read()


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_leaf_are_put_together_by_where_they_begin(
  tmp_path, monkeypatch, axis
):
  leaf = np.arange(36.0).reshape(6, 6)
  parts = dict(zip((0, 2, 4), np.split(leaf, 3, axis), strict=True))
  values = {f"a[{start}]": parts[start] for start in (4, 0, 2)}
  tensors = [
    partition.Tensor(
      f"a[{n}]", part.shape, "mean", partition.Part("a", axis, n)
    )
    for n, part in parts.items()
  ]
  plan = partition.FragmentPlan(((tensors[2],), (tensors[0], tensors[1])))
  found = versions.Versions(CutRun(tmp_path).store, told)
  monkeypatch.setattr(found, "_plan", plan)
  [(name, whole)] = found._leaves([values]).items()
  assert name == "a"
  np.testing.assert_array_equal(whole, leaf)
