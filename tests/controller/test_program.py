"""Programs under way: order, results to come, and losses."""

import pytest

from diloco.controller import program


@pytest.fixture
def queues():
  return program.Queues(1001)


def add(queues, peer, name="train", **args):
  return queues.add(peer, name, args, preempt=False)


def test_message_says_everything():
  sent = program.Queues(1).add("a", "drain", {"timeout_secs": 3}, preempt=True)
  assert sent.message() == {
    "type": "program",
    "seq": 1,
    "name": "drain",
    "args": {"timeout_secs": 3},
    "preempt": True,
    "anew": True,
  }


def test_programs_run_ahead_in_order_and_each_number_is_given_once(queues):
  sent = [add(queues, peer) for peer in ("a", "b", "a", "a")]
  assert [s.seq for s in sent] == [1001, 1002, 1003, 1004]
  add(queues, "a", "evaluate")
  assert queues.queued("a", "train") == 3
  assert queues.queued("a", "evaluate") == 1
  assert queues.queued("c", "train") == 0


def test_result_is_of_its_own_program(queues):
  first, second = add(queues, "a"), add(queues, "a", "evaluate")
  assert queues.done("a", second.seq, {"loss": 1.0}) is second
  assert (second.result, second.over) == ({"loss": 1.0}, True)
  assert not first.over and queues.queued("a", "train") == 1
  assert queues.done("a", second.seq, {"twice": True}) is None
  assert queues.done("a", first.seq, {}) is first and first.over
  assert queues.queued("a", "train") == 0


@pytest.mark.parametrize(
  ("peer", "seq"), [("a", 7), ("b", 1001), ("nobody", 1001)]
)
def test_result_of_what_nobody_here_has_sent_is_ignored(queues, peer, seq):
  sent = add(queues, "a")
  assert queues.done(peer, seq, {}) is None and not sent.over


def test_loss_of_a_peer_is_that_of_all_it_had_and_nothing_else(queues):
  lost = [add(queues, "a") for _ in range(2)]
  kept = add(queues, "b")
  queues.lost("a")
  assert [p.lost for p in (*lost, kept)] == [True, True, False]
  assert queues.queued("a", "train") == 0
  queues.lost("a")  # a second time, nothing is left to lose
  assert queues.done("a", lost[0].seq, {}) is None  # too late
  again = [add(queues, peer) for peer in ("a", "a", "b")]
  assert [p.anew for p in (*lost, *again)] == [True, False, True, False, False]
  assert lost[0].result is None
