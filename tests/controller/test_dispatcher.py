"""Dispatch: order, results to come, and losses."""

import pytest

from diloco.controller import dispatcher, program


class World:
  """A dispatcher between peers that only note what reaches them."""

  def __init__(self):
    self.connected = {"a", "b"}
    self.sent = []
    self.dispatched = []
    self.done = []
    self.dispatcher = dispatcher.Dispatcher(
      self._send,
      self.dispatched.append,
      lambda sent, result: self.done.append((sent.seq, result)),
    )

  def _send(self, peer, message):
    if peer in self.connected:
      self.sent.append((peer, message))
    return peer in self.connected


@pytest.fixture
def world():
  return World()


def test_message_says_everything(world):
  future = world.dispatcher.dispatch("a", "drain", preempt=True, timeout_secs=3)
  assert not future.done()
  assert world.sent == [
    (
      "a",
      {
        "type": "program",
        "seq": 1,
        "name": "drain",
        "args": {"timeout_secs": 3},
        "preempt": True,
      },
    )
  ]
  assert [sent.name for sent in world.dispatched] == ["drain"]


def test_programs_run_ahead_in_order(world):
  for peer in ("a", "b", "a", "a"):
    world.dispatcher.dispatch(peer, "train", num_steps=1)
  seqs = {p: [m["seq"] for q, m in world.sent if q == p] for p in ("a", "b")}
  assert seqs == {"a": [1, 3, 4], "b": [2]}
  assert world.dispatcher.queued("a", "train") == 3
  assert world.dispatcher.queued("a", "evaluate") == 0
  assert world.dispatcher.queued("c", "train") == 0


def test_result_resolves_its_own_future(world):
  first = world.dispatcher.dispatch("a", "train")
  second = world.dispatcher.dispatch("a", "evaluate")
  world.dispatcher.done("a", 2, {"loss": 1.0})
  assert second.result(timeout=0) == {"loss": 1.0}
  assert not first.done()
  assert world.dispatcher.queued("a", "train") == 1
  world.dispatcher.done("a", 1, {})
  assert first.result(timeout=0) == {}
  assert world.dispatcher.queued("a", "train") == 0
  assert world.done == [(2, {"loss": 1.0}), (1, {})]


def test_unknown_result_is_ignored(world):
  future = world.dispatcher.dispatch("a", "train")
  world.dispatcher.done("a", 7, {})
  world.dispatcher.done("b", 1, {})
  world.dispatcher.done("nobody", 1, {})
  assert not future.done()
  world.dispatcher.done("a", 1, {})
  world.dispatcher.done("a", 1, {"twice": True})
  assert future.result(timeout=0) == {}
  assert len(world.done) == 1


def test_loss_of_a_peer_fails_all_it_had_and_nothing_else(world):
  lost = [world.dispatcher.dispatch("a", "train") for _ in range(2)]
  kept = world.dispatcher.dispatch("b", "train")
  world.dispatcher.lost("a")
  for future in lost:
    with pytest.raises(program.ProgramLostError, match="a lost train"):
      future.result(timeout=0)
  assert not kept.done()
  assert world.dispatcher.queued("a", "train") == 0
  world.dispatcher.lost("a")  # a second time, nothing is left to lose
  world.dispatcher.done("a", 1, {})  # too late
  assert world.done == []


def test_dispatch_to_nobody_fails_at_once(world):
  before = world.dispatcher.dispatch("a", "train")
  world.connected.clear()
  future = world.dispatcher.dispatch("a", "train")
  for lost in (before, future):
    assert isinstance(lost.exception(timeout=0), program.ProgramLostError)
  world.connected.add("a")
  again = world.dispatcher.dispatch("a", "train")
  assert not again.done()
  assert world.sent[-1][1]["seq"] == 3  # numbers are never used twice


def test_what_was_sent_cannot_be_cancelled(world):
  future = world.dispatcher.dispatch("a", "train")
  assert not future.cancel()
  world.dispatcher.done("a", 1, {})
  assert future.result(timeout=0) == {}


def test_numbers_of_a_later_controller_collide_with_none_before():
  sent = []

  def send(peer, message):
    sent.append(message["seq"])
    return True

  done = []
  later = dispatcher.Dispatcher(
    send, lambda p: None, lambda p, r: done.append(p), first_seq=1001
  )
  future = later.dispatch("a", "train")
  later.dispatch("a", "train")
  assert sent == [1001, 1002]
  later.done("a", 1, {})  # of a program the dead controller had sent
  assert done == [] and not future.done()
  later.done("a", 1001, {})
  assert future.done()
