"""What error feedback owes, whatever becomes of publications."""

import dataclasses
import random

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from diloco.fragments import codec as codec_lib
from diloco.fragments import partition
from diloco.islands import core, feedback, packing, swap

STALEST = 2


def add(one, other):
  return {"w": one["w"] + other["w"]}


def made():
  return feedback.Feedback(STALEST, add)


def value(found):
  return found["w"] if found else 0


def owed_by(state):
  """All that is owed or lent."""
  return value(state._owed) + sum(value(loan.lent) for loan in state._loans)


@dataclasses.dataclass
class Sent:
  """A contribution of whole numbers, of which the codec keeps the eighths."""

  base: int
  first_step: int
  step: int
  grad: int
  coded: int


class World:
  """One island, and a syncer that loses and delays what it likes."""

  def __init__(self, seed):
    self.random = random.Random(seed)
    self.feedback = made()
    self.step = self.first_step = self.base = self.version = 0
    self.published, self.waiting, self.merged = [], [], []
    self.clock, self.holes = 0, []

  def publish(self):
    self.step += self.random.randint(1, 3)
    grad = self.random.randint(-100, 100)
    lent = self.feedback.lend(self.base, self.first_step)
    coded = (grad + value(lent)) // 8 * 8
    self.feedback.published(self.step, {"w": grad + value(lent) - coded})
    self.published.append(self.step)
    sent = Sent(self.base, self.first_step, self.step, grad, coded)
    if self.random.random() < 0.7:
      self.waiting.append(sent)

  def merge(self):
    """A next version: of any of what waits, or of others' alone."""
    chosen = [s for s in self.waiting if self.random.random() < 0.6]
    for sent in sorted(chosen, key=lambda s: -s.step):
      later = [s for s in chosen if s.first_step < sent.step < s.step]
      if later:
        chosen.remove(sent)  # superseded
    for sent in sorted(chosen, key=lambda s: s.step):
      if sent.first_step < self.clock or self.version - sent.base > STALEST:
        continue
      if sent.first_step > self.clock:
        self.holes.append((self.clock, sent.first_step))
      self.clock = sent.step
      self.merged.append(sent)
    self.version += 1
    self.waiting = [s for s in self.waiting if s.step > self.clock]

  def adopt(self):
    if self.version == self.base:
      return
    self.feedback.settle(
      feedback.News(self.version, self.clock, list(self.holes))
    )
    self.feedback.rebased()
    kept = self.published[-1] if self.published else self.first_step
    if self.clock in self.published:
      kept = self.clock
    carries = self.random.random() < 0.5
    self.first_step = kept if carries else self.step
    self.base, self.published = self.version, []
    self.check()

  def check(self):
    coded = sum(sent.coded for sent in self.merged)
    assert coded + owed_by(self.feedback) == sum(s.grad for s in self.merged)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_residuals_telescope_whatever_is_dropped_or_late(seed):
  world = World(seed)
  for _ in range(60):
    # No more publications of a version than are kept.
    busy = len(world.published) >= core.PUBLICATIONS_KEPT
    ways = [world.merge, world.adopt] + [world.publish] * (0 if busy else 2)
    world.random.choice(ways)()
  for _ in range(STALEST + 2):
    world.merge()
  world.adopt()
  assert world.feedback._loans == []


LEFT, LENT, OWED = {"w": 5}, {"w": 3}, {"w": 1}
SAVED = feedback.Saved(OWED, LENT, LEFT, 4, 10)


@pytest.mark.parametrize(
  ("saved", "first_step", "news", "owed", "why"),
  [
    (SAVED, 10, (7, 10), 1 + 5, "it was merged"),
    (SAVED, 10, (7, 4), 1 + 3, "it waits to be merged"),
    (SAVED, 4, (7, 4), 1 + 3, "it came to nothing, and is done again"),
    (SAVED, 18, (7, 18), 0, "another one after it was merged"),
    (feedback.Saved(OWED), 10, (7, 10), 1, "nothing was published since"),
    (feedback.Saved(OWED), 13, (7, 13), 0, "what was, nobody knows"),
    (feedback.Saved(), 10, (7, 10), 0, "nothing was owed"),
  ],
)
def test_a_new_life_owes_what_its_state_can_know(
  saved, first_step, news, owed, why
):
  state = made()
  state.restore(saved, 12, first_step, feedback.News(*news))
  assert owed_by(state) == owed, why


def test_what_waits_over_a_restart_is_settled_when_it_is_merged():
  state = made()
  state.restore(SAVED, 12, 10, feedback.News(7, 4))
  assert state.lend(7, 10) == OWED
  state.published(14, {"w": 2})
  state.settle(feedback.News(8, 10))  # the one of the earlier life
  assert owed_by(state) == 1 + 5
  state.settle(feedback.News(9, 14))
  assert owed_by(state) == 2 + 5


def test_saved_state_holds_what_is_owed_and_the_newest_publication():
  state = made()
  state.restore(feedback.Saved(OWED), 4, 4, feedback.News(0, 4))
  state.lend(0, 4)
  state.published(8, {"w": 2})
  state.published(10, LEFT)
  assert state.saved() == feedback.Saved(None, OWED, LEFT, 4, 10)
  state.settle(feedback.News(1, 4))  # without it, but it may come
  state.rebased()
  assert state.saved() == feedback.Saved(OWED)
  assert owed_by(state) == 1


def test_steps_of_an_earlier_life_that_came_late_leave_nothing_owed():
  state = made()
  state.restore(SAVED, 12, 10, feedback.News(7, 4))
  state.settle(None)
  assert owed_by(state) == 0


PLAN = partition.partition([partition.Tensor("w", (40,), "mean")], 1)


@pytest.mark.parametrize(
  ("name", "stochastic"),
  [(n, s) for n in ("bf16", "int8", "int4") for s in (False, True)]
  + [("int2", False)],
)
def test_published_values_add_up_to_what_was_learned(name, stochastic):
  rng = np.random.default_rng(0)
  codec = codec_lib.of(name, 16)
  how = packing.Encoding(codec, stochastic, feedback=True)
  params = {"w": jnp.zeros(40)}
  swaps = swap.Swap(PLAN, params, "overwrite", 0.0, how, (1, 2), STALEST)
  learned, sent = np.zeros(40), np.zeros(40)
  for version in range(30):
    grad = rng.standard_normal(40).astype(np.float32)
    params["w"] = swaps.anchors[0]["w"] - grad
    origin = core.Origin(version, 4 * version)
    stored = swaps.publish(params, 0, 4 * version + 4, origin)["w"]
    if version % 3:  # else it is lost
      learned += grad
      coded = np.asarray(stored).reshape(-1)
      if codec.packed:
        found = np.empty(40, np.float32)
        codec.decode(coded, found)
        coded = found
      sent += coded.astype(np.float64)
    clock = 4 * version + 4 if version % 3 else 4 * version
    holes = [(12 * k, 12 * k + 4) for k in range(version // 3 + 1)]
    news = feedback.News(version + 1, clock, holes)
    swaps.settle(0, news)
    swaps.adopt(params, 0, dict(swaps.anchors[0]), 4 * version + 4)
  owed = swaps.residuals()[0].owed["w"]
  np.testing.assert_allclose(sent + np.asarray(owed), learned, atol=1e-4)
  # Without feedback the errors of twenty would add up.
  assert np.abs(sent - learned).max() < 2 * np.abs(grad).max()
