"""What error feedback owes, whatever becomes of publications."""

import copy
import dataclasses
import random

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from diloco.fragments import codec as codec_lib
from diloco.fragments import partition
from diloco.islands import (
  checkpoints,
  comeback,
  core,
  feedback,
  learner,
  packing,
  swap,
)

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
  left: int


@dataclasses.dataclass
class Store:
  """What the syncer keeps: it loses and delays what it likes."""

  version: int = 0
  clock: int = 0
  holes: list = dataclasses.field(default_factory=list)
  waiting: list = dataclasses.field(default_factory=list)
  merged: list = dataclasses.field(default_factory=list)

  def news(self):
    return feedback.News(self.version, self.clock, list(self.holes))

  def merge(self, random):
    """A next version: of any of what waits, or of others' alone."""
    chosen = [s for s in self.waiting if random.random() < 0.6]
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


@dataclasses.dataclass
class Life:
  """What an island has in memory of a fragment, and a saved state of it."""

  step: int = 0
  first_step: int = 0
  base: int = 0
  published: tuple = ()
  told: int = 0  # of what was merged
  dropped: int = 0  # left by what was merged, and not kept
  kept: dict = dataclasses.field(default_factory=dict)  # by first step

  @property
  def position(self):
    return self.published[-1] if self.published else self.first_step


class World:
  """One island that dies and goes back to cuts, and its syncer."""

  def __init__(self, seed):
    self.random = random.Random(seed)
    self.feedback = made()
    self.store, self.life = Store(), Life()
    self.save()

  def publish(self):
    life = self.life
    life.step += self.random.randint(1, 3)
    grad = self.random.randint(-100, 100)
    origin = life.base, life.first_step
    lent = value(self.feedback.lend(*origin))
    coded = (grad + lent) // 8 * 8
    left = grad + lent - coded
    self.feedback.published(life.step, {"w": left})
    kept = life.published[: core.PUBLICATIONS_KEPT - 1]
    life.published = life.kept[life.first_step] = (*kept, life.step)
    if self.random.random() < 0.7:
      sent = Sent(*origin, life.step, grad, coded, left)
      self.store.waiting.append(sent)

  def merge(self):
    self.store.merge(self.random)

  def adopt(self):
    life, store = self.life, self.store
    if store.version == life.base:
      return
    self.feedback.settle(store.news())
    self.feedback.rebased()
    kept = life.position
    if store.clock in life.published:
      kept = store.clock
    carries = self.random.random() < 0.5
    life.first_step = kept if carries else life.step
    life.base, life.published = store.version, ()
    self.check()

  def save(self):
    self.saved = self.feedback.saved(self.life.step)
    self.state = copy.deepcopy((self.life, self.store))

  def die(self):
    self.life = copy.deepcopy(self.state[0])
    self.come_back()

  def go_back(self):
    version = self.store.version + 1
    self.life, self.store = copy.deepcopy(self.state)
    self.store.version = version
    self.come_back()

  def come_back(self):
    life, store = self.life, self.store
    reached = max([store.clock, *(s.step for s in store.waiting)])
    saved = comeback.Saved(life.step, [life.position], [life.first_step])
    known = comeback.Known([reached], [store.version], [store.clock])
    plan = comeback.decide(saved, known, 100)
    (origin,) = plan.origins
    self.feedback = made()
    self.feedback.restore(self.saved, origin.first_step, store.news())
    life.step = max(plan.start, origin.first_step)  # muted until then
    life.base, life.first_step = origin
    life.published = ()
    if origin.first_step > self.saved.known:
      # What the state does not know of is counted no more.
      assert owed_by(self.feedback) == 0
      store.merged, life.told, life.dropped = [], 0, 0
      for sent in store.waiting:
        sent.grad = sent.coded = sent.left = 0
    self.check()
    self.save()

  def check(self):
    merged = self.store.merged
    for sent in merged[self.life.told :]:
      if sent.step not in self.life.kept.get(sent.first_step, ()):
        self.life.dropped += sent.left
    self.life.told = len(merged)
    coded = sum(sent.coded for sent in merged) + self.life.dropped
    assert coded + owed_by(self.feedback) == sum(s.grad for s in merged)


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_residuals_telescope_whatever_becomes_of_publications(seed):
  world = World(seed)
  ways = [world.merge] * 4 + [world.adopt] * 3 + [world.publish] * 6
  ways += [world.save] * 2 + [world.die, world.go_back]
  for _ in range(80):
    world.random.choice(ways)()
  for _ in range(STALEST + 2):
    world.merge()
  world.adopt()
  assert world.feedback._loans == []


LEFT, LENT, OWED = {"w": 5}, {"w": 3}, {"w": 1}


def saved(known, owed, *loans):
  return feedback.Saved(known, owed, [feedback.Loan(0, *x) for x in loans])


SAVED = saved(10, OWED, (4, 10, LENT, {7: {"w": 9}, 10: LEFT}))


@pytest.mark.parametrize(
  ("state", "first_step", "news", "owed", "why"),
  [
    (SAVED, 10, (7, 10), 1 + 5, "it was merged"),
    (SAVED, 10, (7, 4), 1 + 3, "it waits to be merged"),
    (SAVED, 4, (7, 4), 1 + 3, "it came to nothing, and is done again"),
    (SAVED, 7, (7, 7), 1 + 9, "a shorter one was merged, it was not"),
    (SAVED, 10, (7, 7), 1 + 9, "a shorter one was merged, and it still waits"),
    (SAVED, 10, (7, 8), 1, "of the one that was merged nothing was kept"),
    (SAVED, 18, (7, 18), 0, "another one after it was merged"),
    (saved(12, OWED), 10, (7, 10), 1, "nothing was published since"),
    (saved(12, OWED), 13, (7, 13), 0, "what was, nobody knows"),
    (saved(12, None), 10, (7, 10), 0, "nothing was owed"),
  ],
)
def test_a_new_life_owes_what_its_state_can_know(
  state, first_step, news, owed, why
):
  found = made()
  found.restore(state, first_step, feedback.News(*news))
  assert owed_by(found) == owed, why


def test_what_waits_over_a_restart_is_settled_when_it_is_merged():
  state = made()
  state.restore(SAVED, 10, feedback.News(7, 4))
  assert state.lend(7, 10) == OWED
  state.published(14, {"w": 2})
  state.settle(feedback.News(8, 10))  # the one of the earlier life
  assert owed_by(state) == 1 + 5
  state.settle(feedback.News(9, 14))
  assert owed_by(state) == 2 + 5


def test_publication_in_the_middle_settles_with_no_others_residual():
  state = made()
  for step in (24, 48, 72, 96):
    assert state.lend(0, 0) is None
    state.published(step, {"w": step})
  state.settle(feedback.News(1, 72))
  assert owed_by(state) == 0  # 72 left something that was not kept


def test_what_the_clock_has_passed_is_owed_again_at_once():
  state = made()
  state.restore(SAVED, 10, feedback.News(7, 4))
  state.settle(feedback.News(8, 20, [(4, 16)]))
  assert state._loans == [] and owed_by(state) == 1 + 3


def test_saved_state_comes_back_from_its_arrays():
  arrays = {"w": "one"}, {"w": "other"}
  loans = [
    feedback.Loan(0, 4, 9, None, {9: arrays[0]}),
    feedback.Loan(0, 12, 20, arrays[1], {20: arrays[0], 16: arrays[1]}),
  ]
  residuals = {
    0: feedback.Saved(21, arrays[0], loans),
    2: feedback.Saved(8, None, loans[:1]),
  }
  snapshot = learner.Snapshot(21, swap.Progress({}, {}, residuals), ())
  found = checkpoints._residuals_of(
    checkpoints.content_of(snapshot, PLAN, [core.Position(0, 0, 21)]), ["w"]
  )
  assert found.keys() == residuals.keys()
  for fragment, saved in residuals.items():
    assert found[fragment][:2] == saved[:2]
    for loan, other in zip(found[fragment].loans, saved.loans, strict=True):
      for field in ("first_step", "end", "lent", "left"):
        assert getattr(loan, field) == getattr(other, field)


def test_steps_of_an_earlier_life_that_came_late_leave_nothing_owed():
  state = made()
  state.restore(SAVED, 10, feedback.News(7, 4))
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
  owed = swaps.residuals(0)[0].owed["w"]
  np.testing.assert_allclose(sent + np.asarray(owed), learned, atol=1e-4)
  # Without feedback the errors of twenty would add up.
  assert np.abs(sent - learned).max() < 2 * np.abs(grad).max()
