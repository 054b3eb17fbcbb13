import contextlib
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from diloco import workers
from diloco.fragments import codec, partition
from diloco.islands import core, outbox, publisher
from diloco.snapshots import arrays, keys, records, store
from diloco.tape import events, reader, recorder

PLAN = partition.partition([partition.Tensor("w", (4,), "rda")], 1)
SWAP = types.SimpleNamespace(codec=codec.of("f32"), shardings={})
LEARNER = types.SimpleNamespace(plan=PLAN, swap=SWAP)


class _Gate:
  """A store that takes no record until it is opened."""

  def __init__(self, snapshots, monkeypatch):
    self.opened = False
    self.tried = threading.Event()
    write = snapshots.write

    def guarded(key, record):
      self.tried.set()
      if not self.opened:
        raise OSError("the store takes nothing")
      write(key, record)

    monkeypatch.setattr(snapshots, "write", guarded)


def _publication(first_step, step, base=0):
  outer_grads = {"w": jnp.arange(4.0) * step}
  action = core.Publish(0, base, first_step, step, "schedule")
  return action, outer_grads


@pytest.fixture
def world(tmp_path, monkeypatch):
  snapshots = store.SnapshotStore((tmp_path / "store").as_uri())
  tape = recorder.Recorder(tmp_path, "island-0", 1)
  gate = _Gate(snapshots, monkeypatch)
  made = publisher.Publisher(
    quadratic.setting(
      identity=publisher.Identity(0, 1, 8),
      snapshots=snapshots,
      learner=LEARNER,
      tape=tape,
    )
  )
  yield made, gate, snapshots
  made.close()
  tape.close()


def _published(snapshots):
  return [int(n.split(".")[3]) for n in snapshots.names("contributions")]


def test_nothing_is_tried_again_once_the_island_stops(world):
  made, gate, _ = world
  made._outbox._retry_secs = (1e6, 1e6)
  made.submit(*_publication(0, 4))
  assert gate.tried.wait(20)
  made.close()  # at once, whatever the pause between two attempts is


def test_nothing_that_waits_leaves_once_the_island_stops(world):
  made, gate, snapshots = world
  go_on, write = threading.Event(), snapshots.write
  gate.opened = True

  def slow(key, record):
    gate.tried.set()
    assert go_on.wait(20)
    write(key, record)

  snapshots.write = slow
  made.submit(*_publication(0, 4))
  made.submit(*_publication(4, 8, base=1))
  assert gate.tried.wait(20)
  closing = threading.Thread(target=made.close)
  closing.start()
  with made._changed:
    assert made._changed.wait_for(lambda: made._outbox._closed, 20)
  go_on.set()
  closing.join()
  assert _published(snapshots) == [4]


def test_payload_that_fails_leaves_its_room_to_others(world, monkeypatch):
  made, gate, snapshots = world
  write, found = snapshots.arrays.write, []
  full = iter([True, False, True])

  def fill(prefix, tensors):
    found.append(snapshots.names("payloads"))
    gate.opened = len(found) > 2  # until then no record is taken
    write(prefix, tensors)
    if next(full, False):
      raise OSError("no room for the rest")

  monkeypatch.setattr(snapshots.arrays, "write", fill)
  made.submit(*_publication(0, 4))
  assert made.flush(20)
  named = [keys.contribution_name(0, 0, 1, 4)]
  assert found == [[], [], named, named]  # a record may name it by then


def test_what_contains_another_takes_its_place_and_stands_for_it(world):
  made, gate, snapshots = world
  made.submit(*_publication(0, 4))
  ticket = made.ticket([core.Position(0, 0, 4)])
  assert gate.tried.wait(20)
  made.submit(*_publication(0, 8))
  made.submit(*_publication(0, 9))
  gate.opened = True
  assert made.flush(20)
  assert outbox.settled(ticket)
  assert _published(snapshots)[-1] == 9


def test_publication_dropped_at_the_end_is_never_settled(world, tmp_path):
  made, gate, snapshots = world
  made.submit(*_publication(0, 4))
  ticket = made.ticket([core.Position(0, 0, 4)])
  assert gate.tried.wait(20)
  made.close()
  assert outbox.settled(ticket) is False
  assert outbox.settled(made.ticket([core.Position(1, 4, 4)]))
  assert _published(snapshots) == []
  dropped = [
    e["reason"]
    for e in reader.read(tmp_path).events
    if e["event"] == "publish_dropped"
  ]
  assert dropped == ["island_stopped"]


def test_outer_gradient_is_stored_as_it_was_handed_over(world):
  made, gate, snapshots = world
  gate.opened = True
  made.submit(*_publication(0, 4))
  assert made.flush(20)
  values = np.arange(4.0, dtype=np.float32) * 4
  payload = "payloads/0000.0000.0001.000000004"
  assert snapshots.keys(payload) == ["w/c.0"]  # nothing the record says too
  layout = arrays.Layout.of(values.shape, values.dtype)
  stored = snapshots.arrays.open(payload, "w", layout).read()
  np.testing.assert_array_equal(stored, values)


def test_record_and_tape_say_of_a_publication_what_it_is(world, tmp_path):
  made, gate, snapshots = world
  gate.opened = True
  action = core.Publish(0, 3, 8, 12, "follow", cut=5)
  made.submit(action, _publication(8, 12)[1])
  assert made.flush(20)
  (name,) = snapshots.names("contributions")
  record = snapshots.read(keys.contribution_key(name), records.Contribution)
  expected = {
    **{"island": 0, "incarnation": 1, "fragment": 0, "base_version": 3},
    **{"first_step": 8, "step": 12, "c_tokens": 4 * 8, "codec": "f32"},
    **{"plan_hash": PLAN.hash, "num_bytes": 16, "epoch": 0, "cut": 5},
  }
  assert record.key == name
  assert {n: getattr(record, n) for n in expected} == expected
  assert record.norms == [pytest.approx(12 * (0 + 1 + 4 + 9) ** 0.5)]
  (line,) = reader.read(tmp_path).events
  told = {"key": name, "trigger": "follow", "bytes": 16}
  for field in ("fragment", "base_version", "first_step", "step", "c_tokens"):
    told[field] = expected[field]
  assert line["event"] == events.PUBLISHED
  assert {n: line[n] for n in told} == told


@pytest.mark.parametrize(
  "error",
  [
    RuntimeError("RESOURCE_EXHAUSTED: out of memory"),
    KeyError("of another fragment"),
  ],
)
@pytest.mark.parametrize("times", [3, 4])
def test_error_nobody_expected_passes_or_is_heard_of(
  world, monkeypatch, error, times
):
  made, gate, snapshots = world
  gate.opened = True
  made._outbox._retry_secs = (0.0, 0.0)
  encode, left = made._encoder.encode, [error] * times

  def failing(*args):
    if left:
      raise left.pop()
    return encode(*args)

  monkeypatch.setattr(made._encoder, "encode", failing)
  made.submit(*_publication(0, 4))
  if times < 4:
    assert made.flush(20)
    assert _published(snapshots) == [4]
  else:
    made._loop.join()
  heard = pytest.raises(workers.WorkerError, match="publisher thread has ended")
  with heard if times == 4 else contextlib.nullcontext():
    made.check()
