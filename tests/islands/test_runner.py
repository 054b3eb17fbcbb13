"""What an island does with the programs it gets, in which order."""

import queue
import types

import pytest

from diloco.islands import runner
from diloco.snapshots import operations

STOP = {"type": "program", "seq": 99, "name": "stop", "args": {}}
STOP |= {"preempt": True}


def program(seq, name, *, preempt=False, anew=False, **args):
  args = args or {"num_steps": 2}
  return {
    **{"type": "program", "seq": seq, "name": name, "args": args},
    "preempt": preempt,
    "anew": anew,
  }


class Channel:
  """Says what is written down for it, None for a moment of silence."""

  def __init__(self, *said):
    self.said = [*said, STOP]
    self.sent = []
    self.alone = 0.0
    self.inbox = self

  def get(self, *, block, timeout):
    assert block == (timeout is not None)
    message = self.said.pop(0) if self.said else None
    if message is None:
      raise queue.Empty
    return message

  def send(self, message):
    assert message.pop("type") == "done"
    self.sent.append((message["seq"], message["result"]))

  def alone_secs(self):
    return self.alone


class Island:
  """Does nothing, and knows what it was told to do."""

  times = types.SimpleNamespace(orphan_secs=10.0, drain_secs=5.0)
  progress = types.SimpleNamespace(moved=lambda: None)

  def __init__(self):
    self.step = 0
    self.done = []
    self.read_after = 0  # looks at it
    self.given_up = []

  def begin_reading(self):
    return Reading(self)

  def training(self, num_steps, interrupted):
    begun = self.step
    yield 0.0
    for _ in range(num_steps):
      self.step += 1
      if interrupted():
        break
    self.done.append(f"train {self.step - begun}")
    return {"step": self.step}

  def idling(self):
    yield 0.0
    self.done.append("look")

  def draining(self, timeout_secs):
    yield 0.0
    self.done.append(f"drain {timeout_secs:g}")
    return {"flushed": True}

  def saving(self, *, wait):
    yield 0.0
    self.done.append(f"checkpoint {wait}")
    return {"durable": wait}

  def evaluate(self, target, num_batches, reading=None):
    assert (reading is not None) == (target == "global")
    self.done.append(f"evaluate {target} {num_batches}")
    return {"loss": 1.0}


class Reading:
  """Of a store that takes its time."""

  def __init__(self, island):
    self.island = island
    self.looks = 0

  @property
  def done(self):
    self.looks += 1
    return self.looks > self.island.read_after

  def give_up(self):
    self.island.given_up.append(self)


@pytest.fixture
def island():
  return Island()


def run(island, channel):
  programs = runner.ProgramRunner(island, channel)
  return operations.perform(programs.running(), lambda pause: None)


def test_last_window_is_repeated_until_something_else_is_asked(island):
  train, silence = program(1, "train"), [None] * 5
  drain = program(2, "drain", preempt=True, timeout_secs=3.0)
  channel = Channel(train, *silence, drain, None, None, None)
  assert run(island, channel) == "stopped"
  # After the drain it trains no more: nobody would publish that.
  assert island.done == ["train 2", "train 2", "drain 3", "look"]
  assert [seq for seq, _ in channel.sent] == [1, 2, 99]
  assert channel.sent[-1] == (99, {"step": 4})


def test_windows_that_are_sent_anew_take_the_place_of_those_that_are_queued(
  island,
):
  before = [
    program(1, "train", anew=True, num_steps=5),
    program(2, "train"),
    program(3, "checkpoint", wait=False),
  ]  # and the channel is lost, while the first is under way
  anew = [program(4, "train", anew=True), program(5, "train")]
  channel = Channel(*before, None, None, *anew, *[None] * 12)
  assert run(island, channel) == "stopped"
  assert island.done[:4] == [
    "train 5",
    "checkpoint False",
    "train 2",
    "train 2",
  ]
  assert channel.sent[:5] == [
    (2, {"steps": 0, "cancelled": True}),
    (1, {"step": 5}),
    (3, {"durable": False}),
    (4, {"step": 7}),
    (5, {"step": 9}),
  ]


def test_what_is_urgent_ends_windows_and_nothing_else(island):
  queued = [
    program(1, "train", num_steps=5),
    program(2, "evaluate", target="global", num_batches=3),
    program(3, "train", num_steps=5),
    program(4, "checkpoint", wait=False),
  ]
  channel = Channel(*queued, None, None)
  assert run(island, channel) == "stopped"
  assert island.done == ["train 2", "evaluate global 3", "checkpoint False"]
  assert channel.sent == [
    (3, {"steps": 0, "cancelled": True}),
    (1, {"step": 2}),
    (2, {"loss": 1.0}),
    (4, {"durable": False}),
    (99, {"step": 2}),
  ]


def test_island_trains_on_while_a_store_gives_nothing_to_evaluate(island):
  island.read_after = 2
  ask = program(2, "evaluate", target="global", num_batches=3)
  channel = Channel(ask, program(1, "train"), *[None] * 9)
  run(island, channel)
  assert island.done[:3] == ["train 2", "train 2", "evaluate global 3"]
  assert (2, {"loss": 1.0}) in channel.sent and not island.given_up


def test_who_asks_again_before_the_store_answered_gets_the_later_one(island):
  island.read_after = 3
  first, second = (
    program(seq, "evaluate", target="global", num_batches=seq) for seq in (1, 2)
  )
  channel = Channel(first, second, program(3, "train"), *[None] * 14)
  run(island, channel)
  (error,) = [result for seq, result in channel.sent if seq == 1]
  assert error["error"].startswith("another was asked for")
  assert island.done.count("evaluate global 2") == 1
  assert "evaluate global 1" not in island.done
  assert len(island.given_up) == 1


def test_run_that_is_stopped_waits_for_no_store(island):
  island.read_after = 1_000
  ask = program(1, "evaluate", target="global", num_batches=1)
  channel = Channel(ask)
  assert run(island, channel) == "stopped"
  assert [seq for seq, _ in channel.sent] == [1, 99]
  assert channel.sent[0][1]["error"].startswith("the run is stopped")
  assert len(island.given_up) == 1


def test_window_after_an_urgent_program_is_trained_to_its_end(island):
  save = program(1, "checkpoint", preempt=True, wait=True)
  channel = Channel(save, program(2, "train"), *[None] * 3)
  run(island, channel)
  assert island.done == ["checkpoint True", "train 2"]


def test_orphan_publishes_then_saves_then_leaves(island):
  channel = Channel(program(1, "train", num_steps=9), *[None] * 20)
  channel.alone = 9.0
  training = island.training

  def left_alone(num_steps, interrupted):
    channel.alone = 11.0
    return training(num_steps, interrupted)

  island.training = left_alone
  assert run(island, channel) == "no controller"
  # A state saved before would not know of what was published after it.
  assert island.done == ["train 1", "drain 5", "checkpoint True"]


def test_what_is_no_program_is_passed_over_or_named(island):
  channel = Channel({"type": "hello"}, {}, program(1, "dance"), None)
  run(island, channel)
  assert channel.sent[0] == (1, {"error": "there is no program 'dance'"})
  assert island.done == []


@pytest.mark.parametrize("error", [None, OSError("no store")])
def test_reading_ends_with_what_it_found_or_met_or_once_given_up(error):
  def newest(wanted):
    while wanted():
      yield 0.1
    if error:
      raise error
    return "versions"

  reading = runner.Reading(newest)
  script = reading.reading()
  for _ in range(3):
    assert script.send(None) == 0.1 and not reading.done
  reading.give_up()
  with pytest.raises(StopIteration):
    script.send(None)
  assert reading.done
  if error:
    with pytest.raises(OSError, match="no store"):
      reading.take()
  else:
    assert reading.take() == "versions"
