"""Calls for a peer's optimizer, and verdicts, one look at a time."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco import errors
from diloco.islands import (
  peer_protocol,
  peers,
  publisher,
  shards,
)
from diloco.snapshots import keys, operations, records, store

WAIT_SECS = 2.0
CALL = records.PeerRequest(island=1, incarnation=2, versions=[3, 4])


@pytest.fixture
def snapshots(tmp_path):
  return store.SnapshotStore(f"file://{tmp_path}/")


@pytest.fixture
def damage(tmp_path):
  def spoil(key):
    (tmp_path / key).write_bytes(b"{}")

  return spoil


def perform(snapshots, procedure, before=lambda operation: None):
  """Performs with numbers in place of tensors; `before` each operation."""

  def execute(operation):
    before(operation)
    match operation:
      case operations.WritePayload(prefix, content):
        payload = records.Epoch(epoch=content, cut=0)
        return snapshots.write(f"{prefix}/0", payload)
      case operations.ReadState(state):
        return snapshots.read(f"{state.payload}/0", records.Epoch).epoch
    return snapshots.execute(operation)

  return operations.perform(procedure, execute)


def member(island, *, present=True):
  return records.Member(
    f"island-{island}", 1, 1, "n", step_secs=0.5, present=present
  )


def state_of(versions, sender=0, step=9):
  payload = keys.peer_payload_prefix(CALL.island, 2, sender, 1, step)
  return records.PeerState(
    1, 2, sender, 1, step, versions, payload, scalars={}, chunks={}, digest=""
  )


def join(snapshots, *members):
  for one in members:
    snapshots.write(keys.member_key(one.role), one)


def test_call_that_is_damaged_before_the_answer_is_not_answered(
  snapshots, damage
):
  join(snapshots, member(0), member(1))
  perform(snapshots, peer_protocol.call(CALL))
  listener = peer_protocol.Listener(0, WAIT_SECS)
  assert perform(snapshots, listener.listen(lambda: 100.0)) == CALL
  damage(keys.peer_request_key(CALL.island))
  answer = peer_protocol.answer(CALL, state_of([3, 4]), 7)
  assert not perform(snapshots, answer)
  assert snapshots.keys(keys.PEER_STATES) == []


def test_peer_of_lowest_number_answers_first_and_the_next_if_it_does_not(
  snapshots,
):
  join(snapshots, member(0), member(1), member(2))
  perform(snapshots, peer_protocol.call(CALL))
  now = 100.0
  listeners = {m: peer_protocol.Listener(m, WAIT_SECS) for m in (0, 1, 2)}

  def who_answers():
    return [
      m
      for m, listener in listeners.items()
      if perform(snapshots, listener.listen(lambda: now)) == CALL
    ]

  assert who_answers() == [0]  # never the caller itself
  now += WAIT_SECS / 2
  assert who_answers() == [0]
  now += WAIT_SECS / 2
  assert who_answers() == [0, 2]
  assert perform(snapshots, peer_protocol.answer(CALL, state_of([3, 4]), 7))
  assert who_answers() == []


def test_answer_is_heard_with_its_payload_and_cleaned_up(snapshots):
  perform(snapshots, peer_protocol.call(CALL))
  assert perform(snapshots, peer_protocol.hear(CALL)) is None
  assert perform(snapshots, peer_protocol.answer(CALL, state_of([3, 5]), 7))
  heard = perform(snapshots, peer_protocol.hear(CALL))
  assert heard == peer_protocol.Heard(state_of([3, 5]), 7)
  perform(snapshots, peer_protocol.hang_up(CALL))
  perform(snapshots, peer_protocol.clean_up(CALL.island))
  assert snapshots.keys("peers") == []


@pytest.mark.parametrize("versions", [[3, 3], [2, 9], [3], [3, 4, 5]])
def test_answer_older_than_what_was_asked_for_is_not_taken(snapshots, versions):
  perform(snapshots, peer_protocol.call(CALL))
  perform(snapshots, peer_protocol.answer(CALL, state_of(versions), 7))
  assert perform(snapshots, peer_protocol.hear(CALL)) is None


def test_large_optimizer_state_is_waited_for_as_long_as_it_may_take():
  others = [member(0), dataclasses.replace(member(2), step_secs=0.1)]
  small = peer_protocol.patience_secs(others, 0.25, 1000)
  assert small == pytest.approx((6 + 2 * 2) * 0.25 + 4 * 0.5, abs=0.01)
  # Each of the two may have to write all of it, at 100 MB/s and less.
  large = peer_protocol.patience_secs(others, 0.25, 96_000_000_000)
  assert large > 2 * 960
  assert 2 * peer_protocol.turn_secs(0.25, 96_000_000_000) < large


def test_nothing_is_sent_to_who_calls_no_longer(snapshots):
  perform(snapshots, peer_protocol.call(CALL))
  perform(snapshots, peer_protocol.hang_up(CALL))
  sent = perform(snapshots, peer_protocol.answer(CALL, state_of([3, 4]), 7))
  assert not sent and snapshots.keys("peers") == []


class Before:
  """Does something before one operation of a procedure."""

  def __init__(self, number, act):
    self.number, self.act = number, act
    self.count = 0

  def __call__(self, operation):
    self.count += 1
    if self.count == self.number + 1:
      self.act()


@pytest.mark.parametrize("number", range(8))
def test_nothing_is_left_of_an_answer_to_who_gives_up_meanwhile(
  snapshots, number
):
  def give_up():
    perform(snapshots, peer_protocol.hang_up(CALL))
    perform(snapshots, peer_protocol.clean_up(CALL.island))

  perform(snapshots, peer_protocol.call(CALL))
  answer = peer_protocol.answer(CALL, state_of([3, 4]), 7)
  before = Before(number, give_up)
  sent = perform(snapshots, answer, before)
  if before.count <= number:
    assert sent
    give_up()
  assert snapshots.keys("peers") == []


@pytest.mark.parametrize("number", range(1, 5))
def test_nothing_is_left_of_an_answer_that_fails(snapshots, number):
  def fail():
    raise OSError("the store is full")

  perform(snapshots, peer_protocol.call(CALL))
  answer = peer_protocol.answer(CALL, state_of([3, 4]), 7)
  with pytest.raises(OSError, match="full"):
    perform(snapshots, answer, Before(number, fail))
  perform(snapshots, peer_protocol.hang_up(CALL))
  assert snapshots.keys("peers") == []


def test_answer_that_fails_leaves_anothers_alone(snapshots):
  perform(snapshots, peer_protocol.call(CALL))
  mine, other = state_of([3, 4], sender=2), state_of([3, 4], sender=0)

  def overtaken():
    perform(snapshots, peer_protocol.answer(CALL, other, 8))
    raise OSError("the store does not answer")

  with pytest.raises(OSError, match="does not answer"):
    perform(
      snapshots, peer_protocol.answer(CALL, mine, 7), Before(3, overtaken)
    )
  heard = perform(snapshots, peer_protocol.hear(CALL))
  assert heard == peer_protocol.Heard(other, 8)


def test_damaged_call_does_not_hide_another(snapshots, damage):
  for island in (1, 3):
    call = records.PeerRequest(island, 2, [3, 4])
    perform(snapshots, peer_protocol.call(call))
  damage(keys.peer_request_key(1))
  listener = peer_protocol.Listener(0, WAIT_SECS)
  heard = perform(snapshots, listener.listen(lambda: 0.0))
  assert heard.island == 3


def test_damaged_answer_is_an_error_to_who_asked(snapshots, damage):
  perform(snapshots, peer_protocol.call(CALL))
  perform(snapshots, peer_protocol.answer(CALL, state_of([3, 4]), 7))
  damage(keys.peer_state_key(CALL.island, CALL.incarnation))
  with pytest.raises(errors.CorruptSnapshotError):
    perform(snapshots, peer_protocol.hear(CALL))


def test_only_others_who_train_are_healthy(snapshots, damage):
  join(snapshots, member(0), member(1), member(2, present=False), member(3))
  damage(keys.member_key("island-3"))
  found = perform(snapshots, peer_protocol.healthy(1))
  assert [m.island for m in found] == [0]


class Caller:
  """Asks without waiting: a pause moves its clock, and lets others act."""

  def __init__(self, snapshots, meanwhile):
    self.now, self.passed_over = 0.0, []
    self._snapshots, self._meanwhile = snapshots, meanwhile

  def ask(self, patience_secs=lambda peers: 2.0 * len(peers)):
    def pause(operation):
      if isinstance(operation, float):
        self.now += operation
        self._meanwhile(self.now)
        return None
      return self._snapshots.execute(operation)

    script = peer_protocol.ask(
      CALL, patience_secs, lambda: self.now, 0.25, self.passed_over.append
    )
    return operations.perform(script, pause)


def test_damaged_answer_of_one_peer_makes_room_for_anothers(snapshots):
  join(snapshots, member(0), member(2))

  def send(now):
    if now == 0.25:
      perform(snapshots, peer_protocol.answer(CALL, state_of([3, 4]), 7))

  caller = Caller(snapshots, send)
  execute = snapshots.execute
  with pytest.MonkeyPatch.context() as patch:

    def read(operation):
      if not isinstance(operation, operations.ReadState):
        return execute(operation)
      raise errors.CorruptSnapshotError("a chunk is torn")

    patch.setattr(snapshots, "execute", read)
    assert caller.ask() is None
  assert caller.passed_over == [
    "a chunk is torn",
    "no peer sent its optimizer state in time",
  ]
  assert caller.now == 0.25 + 2 * 2.0  # both are waited for, from then on
  assert snapshots.names(keys.PEER_STATES) == []


def test_who_is_alone_asks_nobody(snapshots):
  join(snapshots, member(0, present=False), member(1))
  caller = Caller(snapshots, lambda now: None)
  assert caller.ask() is None and caller.now == 0.0
  assert snapshots.names(keys.PEER_REQUESTS) == []


# The tensors of an answer


def sent(state):
  """An optimizer's state on its way through a store, and what arrives."""
  snapshots = store.SnapshotStore("memory://")
  snapshots.perform(peer_protocol.call(CALL))
  who = publisher.Identity(0, 1, 10)
  peers.answer(snapshots, CALL, who, 8, CALL.versions, state)
  key = keys.peer_state_key(CALL.island, CALL.incarnation)
  answer = snapshots.read(key, records.PeerState)
  return peers.read(snapshots, answer, jax.tree.map(jnp.zeros_like, state))


def test_state_with_leaves_of_any_kind_arrives():
  # As of `optax.apply_if_finite`, which notes whether the last one was.
  state = {
    "count": jnp.int32(7),
    "last_finite": jnp.asarray(True),
    "mu": jnp.arange(6.0).reshape(2, 3),
    "rate": jnp.float32(0.5),
    # As `jax.random.key_data`, which a loop's own state may hold.
    "key": jnp.asarray([7, 2**32 - 1], jnp.uint32),
    "counts": jnp.asarray([-1, 2**31 - 1], jnp.int32),
    "places": jnp.asarray([-1, 2**15 - 1], jnp.int16),
    "steps": jnp.asarray([1, 2**16 - 1], jnp.uint16),
    "frozen": jnp.asarray([[True], [False]]),
    "nu": jnp.asarray([0.5, 65504.0], jnp.float16),
  }
  found = sent(state)
  assert found.keys() == state.keys()
  for name, value in state.items():
    assert found[name].dtype == value.dtype
    np.testing.assert_array_equal(found[name], value)


def test_of_divided_leaves_one_at_a_time_is_put_together(monkeypatch):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
  spec = jax.sharding.PartitionSpec("model")
  divided = jax.sharding.NamedSharding(mesh, spec)
  state = [jax.device_put(jnp.full(4, i, float), divided) for i in range(5)]
  whole, alive, most = shards.HostTensor.whole, [], []

  def counted(self):
    found = whole(self)
    alive.append(weakref.ref(found))
    most.append(sum(held() is not None for held in alive))
    return found

  monkeypatch.setattr(shards.HostTensor, "whole", counted)
  for was, found in zip(state, sent(state), strict=True):
    np.testing.assert_array_equal(found, was)
  assert max(most) <= 2  # one is made while the one before is still at hand
