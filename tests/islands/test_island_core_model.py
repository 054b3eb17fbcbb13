"""An island's core against a model that keeps every publication it made.

Random schedules, versions that come late or with another life's steps, cuts,
drains, refusals. The model says every action that must follow.
"""

import dataclasses
import random

import pytest

from diloco.fragments import schedule
from diloco.islands import core

_ISLAND = 1


@dataclasses.dataclass
class Progress:
  """What the model knows of a fragment."""

  base: int
  first: int  # after this step
  muted: bool
  asked_last: int  # when it was published last, as the schedule has it
  sent: list = dataclasses.field(default_factory=list)  # since `base`
  spoken: int = -1
  newest: int = 0

  @property
  def known(self):
    """Publications whose values are kept: the first two and the last."""
    return self.sent[:2] + self.sent[2:][-1:]

  @property
  def last(self):
    return self.sent[-1] if self.sent else self.first


class Model:
  """What an island is to do."""

  def __init__(self, when, adoption, step, origins, **settings):
    self.when, self.step = when, step
    self.keeps = adoption in ("carry", "eager")
    self.settings = settings
    self.fragments = [
      Progress(base, first, first > step, step - when.sync_every)
      for base, first in origins
    ]
    self.alarms = []  # (step, fragment): asked off the grid
    self.cut = 0
    self.resyncing = self.told = False
    self.until = -1.0

  def on_grid(self, fragment):
    every, count = self.when.sync_every, self.when.num_fragments
    return self.step % every == fragment * every // count

  def reschedule(self, when):
    self.when = when
    for p, one in enumerate(self.fragments):
      due = one.asked_last + when.sync_every
      self.alarms.append((max(due, self.step + 1), p))

  def has_news(self, one, draining=False):
    if self.resyncing or (one.sent and one.newest > one.base):
      return False
    patience = 0
    if self.keeps and not draining and len(one.sent) >= 2:
      patience = 4 * self.when.sync_every
    return self.step > one.spoken and self.step > one.last + patience

  def publish(self, fragment, trigger):
    one = self.fragments[fragment]
    one.sent.append(self.step)
    one.asked_last = one.spoken = self.step
    if not self.on_grid(fragment):
      self.alarms.append((self.step + self.when.sync_every, fragment))
    fields = one.base, one.first, self.step, trigger, self.cut
    return core.Publish(fragment, *fields)

  def drain(self):
    return [
      self.publish(p, "drain")
      for p, one in enumerate(self.fragments)
      if self.has_news(one, draining=True)
    ]

  def refused(self):
    if self.resyncing:
      return []
    self.resyncing = self.told = True
    return [core.Resync()]

  def complete(self, ready):
    """Whether a resync has all it needs."""
    if self.told:
      self.told = False
      return False
    good = {r.fragment for r in ready if r.version >= self.base(r)}
    return len(good) == len(self.fragments)

  def base(self, ready):
    return self.fragments[ready.fragment].base

  def is_answer(self, ready):
    one = self.fragments[ready.fragment]
    if not one.sent:
      return one.muted or ready.merged_step > one.first
    return (
      ready.merged_step >= one.last
      or ready.version - one.base > self.settings["passes_by"]
      or self.step > one.last + self.settings["wait_after"]
    )

  def adopt(self, ready):
    one = self.fragments[ready.fragment]
    if ready.version < one.base + (not self.resyncing):
      return []
    step, merged, known, last = (
      self.step,
      ready.merged_step,
      one.known,
      one.last,
    )
    was_muted = one.muted
    one.base, one.sent = ready.version, []
    one.newest = max(one.newest, one.base)
    fields = ready.fragment, ready.version
    if was_muted or merged > last:
      until = max(merged, one.first) if was_muted else merged
      one.first, one.muted = max(until, step), until > step
      lost = min(until, step), step
      return [core.Adopt(*fields, step, *lost, until, self.resyncing)]
    kept = merged if merged in known else last
    keeps = self.keeps and not self.resyncing
    one.first = kept if keeps else step
    lost = (step if keeps else kept), step
    return [core.Adopt(*fields, kept, *lost, resync=self.resyncing)]

  def stepped(self, event):
    moved, self.step = event.step > self.step, event.step
    actions, ready = [], list(event.ready)
    if self.resyncing and not self.complete(ready):
      ready = []
    cut = max([event.cut, *(r.cut for r in ready)])
    if cut > self.cut:
      self.cut = cut
      actions.append(core.Cut(cut, self.positions()))
    for p, one in enumerate(self.fragments):
      if moved and one.muted and self.step >= one.first:
        one.muted = False
        actions.append(core.Rebase(p, self.step, one.base))
    if self.settings["passes_by"] >= 0 and not self.resyncing:
      ready = [r for r in ready if self.is_answer(r)]
    for one in ready:
      actions += self.adopt(one)
    if ready:
      self.resyncing = False
    if event.board:
      for one, version in zip(
        self.fragments, event.board.versions, strict=True
      ):
        one.newest = max(one.newest, version)
    if moved:
      actions += self.due()
    if event.board and self.settings["follow"]:
      for p, islands in event.board.open_rounds.items():
        one = self.fragments[p]
        current = not one.sent and one.newest == one.base
        if _ISLAND not in islands and current and self.has_news(one):
          actions.append(self.publish(p, "follow"))
    spoke = any(isinstance(action, core.Publish) for action in actions)
    if self.settings["wait_secs"] and (moved or spoke):
      self.until = event.now + self.settings["wait_secs"]
    return actions

  def due(self):
    asked = [p for p in range(len(self.fragments)) if self.on_grid(p)]
    asked += [p for step, p in self.alarms if step == self.step]
    actions = []
    for p in asked:
      one = self.fragments[p]
      rested = self.step - one.asked_last >= self.when.sync_every
      if rested and self.has_news(one):
        actions.append(self.publish(p, "schedule"))
    return actions

  def positions(self):
    return tuple(
      core.Position(one.base, one.first, one.last) for one in self.fragments
    )

  @property
  def unanswered(self):
    at = self.step - self.settings["wait_after"]
    return any(one.sent and one.last == at for one in self.fragments)


def _ready(draw, model, fragment):
  one = model.fragments[fragment]
  version = max(0, one.base + draw.choice([-1, 0, 1, 1, 1, 2, 4]))
  merged = draw.choice(
    [
      *one.sent,
      one.last,
      one.last,
      one.first,
      0,
      model.step + draw.randint(0, 3),
    ]
  )
  return core.Ready(
    fragment, version, merged, draw.choice([0, 0, model.cut + 1])
  )


def _moment(draw, model, now):
  """What may happen between two steps, or while an island waits."""
  numbers = range(len(model.fragments))
  some = draw.choice([0.05, 0.3])
  if model.resyncing:
    some = draw.choice([0.3, 1.0])
  ready = [_ready(draw, model, p) for p in numbers if draw.random() < some]
  draw.shuffle(ready)
  board = None
  if draw.random() < 0.3:
    versions = [
      max(one.base, one.newest) + draw.choice([0, 0, 0, 0, 1])
      for one in model.fragments
    ]
    islands = [[0], [_ISLAND], [0, _ISLAND]]
    rounds = {p: draw.choice(islands) for p in numbers if draw.random() < 0.4}
    board = core.Board(versions, rounds)
  step = model.step + (draw.random() < 0.8)
  cut = model.cut + draw.choice([0] * 8 + [-1, 1])
  return core.Stepped(step, ready, board, cut, now)


@pytest.mark.parametrize("seed", range(80))
def test_core_does_what_its_publications_say(seed):
  draw = random.Random(seed)
  count = draw.randint(1, 3)
  when = schedule.Schedule(draw.randint(count, 5), count)
  adoption = draw.choice(["overwrite", "blend", "carry", "eager"])
  step = draw.choice([0, 7])
  origins = [
    core.Origin(draw.randint(0, 3), step + draw.choice([0, 0, 2]))
    for _ in range(count)
  ]
  settings = {
    "follow": draw.random() < 0.6,
    "wait_secs": draw.choice([0.0, 0.0, 2.0]),
    "wait_after": draw.choice([0, 1]),
    "passes_by": draw.choice([-1, -1, 0, 2]),
  }
  state = core.IslandCore(
    when, _ISLAND, adoption, step=step, origins=origins, **settings
  )
  model, now = Model(when, adoption, step, origins, **settings), 0.0
  deaf = 0.0  # until then nothing is answered
  for number in range(150):
    now += draw.choice([0.5, 1.0])
    kind = draw.random()
    if kind < 0.03:
      assert state.handle(core.Drain()) == model.drain()
    elif kind < 0.05:
      assert state.handle(core.Refused()) == model.refused()
    elif kind < 0.06:
      deaf = now + 3.0
      assert state.handle(core.Suspended(3.0, now)) == []
    elif kind < 0.07:
      when = schedule.Schedule(draw.randint(count, 5), count)
      state.reschedule(when)
      model.reschedule(when)
    else:
      event = _moment(draw, model, now)
      assert state.handle(event) == model.stepped(event), (number, event)
    assert state.positions == model.positions()
    assert (state.step, state.resyncing) == (model.step, model.resyncing)
    assert state.unanswered == model.unanswered
    for late in (0.0, 1.5, 2.0):
      holds = now + late < model.until and model.unanswered
      holds = holds and (now + late >= deaf or model.resyncing)
      assert state.holds(now + late) == holds
    sent = [p for p, one in enumerate(model.fragments) if one.sent]
    assert state.in_flight == sent
    overtaken = any(
      model.fragments[p].newest > model.fragments[p].base for p in sent
    )
    assert state.overtaken == overtaken
