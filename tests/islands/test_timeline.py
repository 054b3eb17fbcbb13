"""Which saved states an island may go on from after a return to a cut."""

import dataclasses
import types

import pytest
from cut_builder import CutRun

from diloco.islands import protocol, recovery
from diloco.snapshots import checkpoint, cuts, keys, records

BACK = records.Epoch(epoch=1, cut=1)


@pytest.fixture
def run(tmp_path):
  made = CutRun(tmp_path)
  for number in (1, 2):
    asked = made.perform(cuts.request([0, 1], 2))
    assert asked.cut == number
    for island in (0, 1):
      made.save(number, island, 10 * number, [[0, 0, 8], [0, 0, 8]])
  return made


def may_use(run, epoch, *, cut=1, change=None, island=0):
  folder = checkpoint.directory(run.dir, island)
  path = checkpoint.path_of(folder, 10 * cut, 1, cut)
  if change is not None:
    checkpoint.commit(path, change(checkpoint.read_marker(path)))
  made = recovery.Recovery(
    run.dir, run.store, types.SimpleNamespace(), island, 2, heartbeat_secs=2.0
  )
  number, part = 0, None
  if epoch is not None:
    key = keys.cut_part_key(epoch.cut, island)
    number, part = epoch.epoch, run.store.read(key, records.CutPart)
  standing = protocol.Standing(number, part, 0, None, [])
  marker = checkpoint.read_marker(path)
  return made.is_of_this_timeline(path, marker, standing)


def test_before_any_return_every_saved_state_will_do(run):
  assert may_use(run, None) and may_use(run, None, cut=2)


def test_after_a_return_only_the_cuts_own_is_older(run):
  assert may_use(run, BACK)
  assert not may_use(run, BACK, cut=2)
  assert may_use(run, records.Epoch(1, 2), cut=2)
  assert not may_use(run, records.Epoch(1, 2))


def test_what_was_saved_since_the_return_will_do(run):
  def saved_since(marker):
    return dataclasses.replace(marker, epoch=1)

  assert may_use(run, BACK, cut=2, change=saved_since)
  assert not may_use(run, records.Epoch(2, 1), cut=2)


def test_state_that_took_the_place_of_the_cuts_own_will_not_do(run):
  def other(marker):
    return dataclasses.replace(marker, step=marker.step + 1)

  assert not may_use(run, BACK, change=other)


def test_island_without_a_part_in_the_cut_has_none(run):
  run.store.delete(keys.cut_part_key(1, 0))
  assert not may_use(run, BACK)
  assert may_use(run, BACK, island=1)
