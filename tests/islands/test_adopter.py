"""The thread that watches for new versions, on a store with damage."""

import time

import jax
import numpy as np
import pytest
from cut_builder import PLAN, CutRun, filled, spoil

from diloco.islands import adopter, notices, placement
from diloco.snapshots import keys, records

_PATIENCE_SECS = 20.0


@pytest.fixture
def run(tmp_path):
  return CutRun(tmp_path)


@pytest.fixture
def make(run):
  made = []

  def start(versions):
    made.append(
      adopter.Adopter(
        run.store,
        PLAN,
        placement.Placement((1,), jax.devices()[:1]),
        island=0,
        versions=versions,
        poll_secs=lambda: 0.005,
        board=notices.NoticeBoard(run.store, 0, 1, wait_secs=1.0),
        notices_every_secs=0.01,
      )
    )
    return made[-1]

  yield start
  for one in made:
    one.close()


def _take(thread, count):
  """Waits until that many versions have come."""
  deadline = time.monotonic() + _PATIENCE_SECS
  found = []
  while len(found) < count and time.monotonic() < deadline:
    found += thread.take().fetched
    time.sleep(0.005)
  return sorted(found, key=lambda f: f.fragment)


def test_newer_versions_are_fetched_from_what_the_board_says(run, make):
  run.commit(0, 1, {0: 8}, value=3.0)
  run.store.write(keys.BOARD, records.Board([1, 0], {}))
  (fetched,) = _take(make([0, 0]), 1)
  assert (fetched.fragment, fetched.version) == (0, 1)
  assert fetched.merged_step == 8
  for tensor in PLAN.fragments[0]:
    np.testing.assert_array_equal(
      fetched.params[tensor.name], filled(tensor, 3.0)
    )


def test_damaged_board_does_not_hide_the_heads(run, make):
  run.store.write(keys.BOARD, records.Board([0, 0], {}))
  spoil(run, keys.BOARD)
  run.commit(0, 1, {0: 8}, value=1.0)
  run.commit(1, 4, {0: 8}, value=2.0)
  found = _take(make([0, 0]), 2)
  assert [(f.fragment, f.version) for f in found] == [(0, 1), (1, 4)]


def test_damaged_version_is_waited_out(run, make):
  good = run.commit(0, 1, {0: 8}, value=1.0)
  run.store.delete_tree(good.payload)
  thread = make([0, 0])
  assert not thread.take().fetched
  run.commit(0, 2, {0: 8}, value=2.0)
  (fetched,) = _take(thread, 1)
  assert fetched.version == 2
