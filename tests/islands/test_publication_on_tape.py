"""A contribution exists only once the tape can tell how it came to be."""

import errno
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from diloco.fragments import codec, partition
from diloco.islands import core, publisher
from diloco.snapshots import arrays, store

PLAN = partition.partition([partition.Tensor("w", (4,), "mean")], 1)
SWAP = types.SimpleNamespace(codec=codec.of("f32"), shardings={})
LEARNER = types.SimpleNamespace(plan=PLAN, swap=SWAP)


class Tape:
  """A recorder whose disk is full until there is room."""

  def __init__(self):
    self.refused = threading.Event()
    self.has_room = threading.Event()

  def record(self, event, **fields):
    pass

  def flush(self):
    if not self.has_room.is_set():
      self.refused.set()
      raise OSError(errno.ENOSPC, "no room")


@pytest.fixture
def tape():
  return Tape()


@pytest.fixture
def snapshots(tmp_path):
  return store.SnapshotStore(tmp_path.as_uri())


@pytest.fixture
def publish(snapshots, tape):
  thread = publisher.Publisher(
    quadratic.setting(
      identity=publisher.Identity(0, 1, 10),
      snapshots=snapshots,
      learner=LEARNER,
      tape=tape,
    )
  )
  values = jnp.ones(4)

  def submit():
    action = core.Publish(0, 0, 0, 8, "schedule")
    thread.submit(action, {"w": values})
    return thread

  yield submit
  thread.close()


def test_no_commit_record_is_written_before_the_tape_is_safe(
  publish, snapshots, tape
):
  thread = publish()
  assert tape.refused.wait(30)
  assert snapshots.names("contributions") == []
  tape.has_room.set()
  assert thread.flush(30)
  (name,) = snapshots.names("contributions")
  layout = arrays.Layout.of((4,), np.float32)
  found = snapshots.arrays.open(f"payloads/{name}", "w", layout).read()
  np.testing.assert_array_equal(found, np.ones(4))
