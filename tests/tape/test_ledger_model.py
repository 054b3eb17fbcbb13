"""The ledger against a model that follows every single step.

Random histories of islands, a syncer and a supervisor. The model keeps the
fate of each (island, fragment, step) in a dictionary and changes it the moment
something happens; the ledger sees only the lines.
"""

import collections
import itertools
import random

import hypothesis
import pytest
from hypothesis import strategies as st
from tape_builder import TOKENS_PER_STEP, Tapes

from diloco.tape import folding, ledger

_ISLANDS = 2
_FRAGMENTS = 3
# What the island itself made of steps is undone when it restores their state.
_RESTORABLE = ("lost_with_island", "overwritten", "publish_dropped")


class Model:
  """Roles that write lines and know what they mean.

  A step may be done by several lives. `owner` says which of them did it in the
  history an island stands on: the one its parameters come from.
  """

  def __init__(self):
    self.tapes = Tapes()
    self.fate = {}  # (island, fragment, life, step) -> fate
    self.step = [0] * _ISLANDS
    self.life = [1] * _ISLANDS
    self.alive = [True] * _ISLANDS
    self.owner = [{} for _ in range(_ISLANDS)]  # step -> life
    self.saved = [(0, [0] * _FRAGMENTS)] * _ISLANDS  # step, published until
    self.first = collections.defaultdict(int)  # (island, fragment) -> step
    self.sent = collections.defaultdict(int)  # the same -> last published
    self.waiting = {fragment: [] for fragment in range(_FRAGMENTS)}
    self.clock = collections.Counter()  # (island, fragment) -> last merged
    self.version = collections.Counter()
    self.merged_in = {}  # cell -> version
    self.cut_state = None
    self.restored = False
    for island in range(_ISLANDS):
      self.tapes.start(island)

  def _cells(self, island, fragment, first, last):
    """The steps (first, last] of a publication, or of what it is made of."""
    return [
      (island, fragment, self.owner[island][step], step)
      for step in range(first + 1, last + 1)
    ]

  def _set(self, cells, fate, over):
    """Gives `cells` a fate where they have one of those in `over`."""
    for cell in cells:
      if self.fate[cell] in over:
        self.fate[cell] = fate

  def _unpublished(self, island, fragment):
    first = self.first[island, fragment]
    return [
      cell
      for cell in self._cells(island, fragment, first, self.step[island])
      if self.fate[cell] == "unpublished"
    ]

  def train(self, island, fragment, number, flag):
    if not self.alive[island]:
      return
    first, last = self.step[island], self.step[island] + number
    self.tapes.train(first, last, island)
    self.step[island] = last
    for step in range(first + 1, last + 1):
      self.owner[island][step] = self.life[island]
      for each in range(_FRAGMENTS):
        muted = step <= self.first[island, each]
        cell = island, each, self.life[island], step
        self.fate[cell] = "repeated" if muted else "unpublished"

  def publish(self, island, fragment, number, flag):
    first, step = self.first[island, fragment], self.step[island]
    if not self.alive[island] or step <= first:
      return
    item = self.tapes.publish(first, step, island, fragment)
    item["cells"] = self._cells(island, fragment, first, step)
    self.sent[island, fragment] = step
    for cell in item["cells"]:
      if self.fate[cell] != "merged":
        self.fate[cell] = "waiting"
    for other in list(self.waiting[fragment]):
      if other["island"] == island and other["first_step"] == first:
        self.waiting[fragment].remove(other)
        if flag:  # the syncer may or may not say so
          self._tell(other, "superseded")
    self.waiting[fragment].append(item)

  def _tell(self, item, reason):
    told = {k: v for k, v in item.items() if k != "cells"}
    self.tapes.discard(told, reason)

  def merge(self, island, fragment, number, flag):
    """Merges what waits; what was merged in part before is refused."""
    chosen = []
    for item in list(self.waiting[fragment])[:number]:
      where = item["island"], fragment
      self.waiting[fragment].remove(item)
      if item["first_step"] < self.clock[where]:
        self._discard(item, "overlap")
        continue
      self._set(item["cells"], "merged", {"waiting"})
      for cell in item["cells"]:
        self.merged_in[cell] = self.version[fragment] + 1
      self.clock[where] = item["step"]
      chosen.append({k: v for k, v in item.items() if k != "cells"})
    if chosen:
      self.version[fragment] += 1
      self.tapes.merge(self.version[fragment], *chosen)
      if flag:  # a syncer that took over tells it again
        self.tapes.merge(self.version[fragment], *chosen)

  def _discard(self, item, reason):
    self._set(item["cells"], reason, {"waiting"})
    self._tell(item, reason)

  def refuse(self, island, fragment, number, flag):
    if self.waiting[fragment]:
      item = self.waiting[fragment].pop(number % len(self.waiting[fragment]))
      self._discard(item, "stale" if flag else "not_finite")

  def adopt(self, island, fragment, number, flag):
    """Overwrites; says the exact loss, or all since the last adoption."""
    if (
      not self.alive[island] or self.step[island] < self.first[island, fragment]
    ):
      return
    lost = self._unpublished(island, fragment)
    exact = lost[0][3] - 1 if lost else self.step[island]
    wide = self.first[island, fragment]
    start = exact if flag else wide
    self.tapes.adopt(start, self.step[island], island, fragment)
    self._set(lost, "overwritten", {"unpublished"})
    self.first[island, fragment] = self.step[island]

  def carry(self, island, fragment, number, flag):
    """Adopts without a loss: what was not published is published later."""
    lost = self._unpublished(island, fragment)
    if self.alive[island] and lost:
      self.first[island, fragment] = lost[0][3] - 1

  def drop(self, island, fragment, number, flag):
    if not self.alive[island] or not self._unpublished(island, fragment):
      return
    first, step = self.first[island, fragment], self.step[island]
    self.tapes.drop(first, step, island, fragment)
    lost = self._unpublished(island, fragment)
    self._set(lost, "publish_dropped", {"unpublished"})
    self.first[island, fragment] = step

  def save(self, island, fragment, number, flag):
    """Saves the state; what is not published yet is saved with it."""
    if self.alive[island]:
      self.saved[island] = self._state(island)

  def _state(self, island):
    """The step, and for each fragment the step that is published."""
    unsent = [self._unpublished(island, f) for f in range(_FRAGMENTS)]
    step = self.step[island]
    starts = [
      lost[0][3] - 1 if lost else max(step, self.first[island, each])
      for each, lost in enumerate(unsent)
    ]
    return step, starts

  def kill(self, island, fragment, number, flag):
    """Kills and restarts from what is saved, or from global versions."""
    if flag:
      self.tapes.die(island)
    for each in range(_FRAGMENTS):
      lost = self._unpublished(island, each)
      self._set(lost, "lost_with_island", {"unpublished"})
    sent = self._sent(island)
    saved_step, starts = self.saved[island]
    start = max(saved_step, min(sent))
    if start > saved_step:  # its rows are published, its progress is not here
      starts = [start] * _FRAGMENTS
    self._begin(island, start, [max(p) for p in zip(sent, starts, strict=True)])

  def _sent(self, island):
    """By fragment, the last step that is merged or waits to be."""
    return [
      max(
        [self.clock[island, each]]
        + [i["step"] for i in self.waiting[each] if i["island"] == island]
      )
      for each in range(_FRAGMENTS)
    ]

  def _begin(self, island, start, unsent, restorable=_RESTORABLE):
    """A life begins that has what was not published after `unsent`."""
    self.tapes.start(island, start, unsent_from_step=unsent)
    self.life[island] += 1
    self.step[island] = start
    for each, step in enumerate(unsent):
      self.first[island, each] = step
      for cell in self._cells(island, each, step, start):
        if self.fate[cell] in restorable:
          self.fate[cell] = "unpublished"

  def cut(self, island, fragment, number, flag):
    """Takes a cut through all islands, the heads and what waits."""
    if all(self.alive):
      self.cut_state = (
        [(*self._state(m), dict(self.owner[m])) for m in range(_ISLANDS)],
        collections.Counter(self.version),
        collections.Counter(self.clock),
        {each: list(items) for each, items in self.waiting.items()},
      )

  def restore(self, island, fragment, number, flag):
    """Sets everything back to the cut."""
    if self.cut_state is None or not all(self.alive):
      return
    self.restored = True
    islands, versions, clock, waiting = self.cut_state
    for each in range(_FRAGMENTS):
      for item in self.waiting[each]:
        if item not in waiting[each]:
          self._discard(item, "before_restore")
      for where in range(_ISLANDS):
        lost = self._unpublished(where, each)
        self._set(lost, "lost_with_island", {"unpublished"})
    for cell, version in self.merged_in.items():
      if self.fate[cell] == "merged" and version > versions[cell[1]]:
        self.fate[cell] = "rolled_back"
    self.waiting = {each: list(items) for each, items in waiting.items()}
    again = [item for items in waiting.values() for item in items]
    undone = set(self.fate.values()) - {"merged"}
    for item in again:
      self._set(item["cells"], "waiting", undone)
    before = [versions[each] for each in range(_FRAGMENTS)]
    for each in range(_FRAGMENTS):
      self.version[each] += 1
    after = [self.version[each] for each in range(_FRAGMENTS)]
    self.tapes.restore(before, after, [item["key"] for item in again])
    self.clock = collections.Counter(clock)
    for where, (step, starts, owner) in enumerate(islands):
      self.owner[where] = dict(owner)
      unsent = [max(p) for p in zip(self._sent(where), starts, strict=True)]
      self.saved[where] = step, unsent
      self._begin(where, step, unsent, undone)

  def kill_for_good(self, island, fragment, number, flag):
    if not self.alive[island]:
      return
    self.tapes.die(island)
    self.alive[island] = False
    for each in range(_FRAGMENTS):
      lost = self._unpublished(island, each)
      self._set(lost, "lost_with_island", {"unpublished"})

  def counts(self):
    """Returns fragment-tokens by fate."""
    names = {"unpublished": "pending", "waiting": "pending"}
    counts = collections.Counter(names.get(f, f) for f in self.fate.values())
    return {fate: n * TOKENS_PER_STEP for fate, n in counts.items()}

  def merged_rows(self, island, fragment):
    """Returns the rows that are in a version, in order."""
    return sorted(
      step
      for (i, f, _, step), fate in self.fate.items()
      if (i, f, fate) == (island, fragment, "merged")
    )


# Weighted by repetition towards the ordinary course of things.
_NAMES = (
  ["train"] * 4
  + ["publish"] * 4
  + ["merge"] * 3
  + ["adopt"] * 2
  + ["save", "save", "refuse", "carry", "drop", "kill", "kill"]
)
_ACTIONS = st.tuples(
  st.sampled_from([*_NAMES, "kill_for_good", "cut", "restore"]),
  st.integers(0, _ISLANDS - 1),
  st.integers(0, _FRAGMENTS - 1),
  st.integers(1, 5),
  st.booleans(),
)


def _played(actions):
  """Plays a history."""
  model = Model()
  for name, island, fragment, number, flag in actions:
    if name == "kill" and not model.alive[island]:
      continue
    getattr(model, name)(island, fragment, number, flag)
  return model


def _compare(model, result):
  """The ledger counts what the model knows."""
  found = {
    "merged": result.merged,
    "pending": result.pending,
    **result.discarded,
  }
  # What a return to a cut restores has been of one fate, and is to have
  # another; the ledger keeps the first until the second is there.
  if not model.restored:
    assert {k: v for k, v in found.items() if v} == model.counts()
    in_vain = sum(model.counts().get(fate, 0) for fate in folding.IN_VAIN)
    spans = itertools.chain.from_iterable(result.lost_spans.values())
    steps = sum(span.last - span.first for span in spans)
    assert steps * TOKENS_PER_STEP == in_vain
  trained = len({(i, life, step) for i, _, life, step in model.fate})
  tokens = result.tokens()
  assert tokens.trained == trained * TOKENS_PER_STEP
  parts = [tokens.merged, tokens.pending, *tokens.discarded.values()]
  assert sum(parts) + tokens.unaccounted == tokens.trained


def _rows(spans):
  return [row for first, last in spans for row in range(first + 1, last + 1)]


def _check(actions):
  """Plays a history; the ledger must find what the model knows."""
  model = _played(actions)
  result = ledger.compute(model.tapes.record(), _FRAGMENTS)
  assert result.balanced, result.violations
  _compare(model, result)
  for island, fragments in result.rows.items():
    for fragment, spans in enumerate(fragments):
      rows = _rows(spans.get("merged", ()))
      assert rows == model.merged_rows(island, fragment)
  return {*model.fate.values(), *result.discarded}


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(st.lists(_ACTIONS, max_size=60))
def test_ledger_equals_the_model(actions):
  _check(actions)


@pytest.mark.parametrize("more", [[], ["cut", "restore"]])
def test_ledger_that_folds_early_equals_the_model(more, monkeypatch):
  monkeypatch.setattr(folding, "LIMIT", 6)
  monkeypatch.setattr(folding, "_AGAIN", 1.0)
  folded = 0
  for seed in range(80):
    rng = random.Random(seed)
    actions = [
      (
        rng.choice([*_NAMES, *more]),
        rng.randrange(_ISLANDS),
        rng.randrange(_FRAGMENTS),
        rng.randint(1, 5),
        rng.random() < 0.5,
      )
      for _ in range(150)
    ]
    model = _played(actions)
    result = ledger.compute(model.tapes.record(), _FRAGMENTS)
    assert result.balanced, (seed, result.violations)
    _compare(model, result)
    rows = result.folded_rows.get("merged", 0)
    for island, fragments in result.rows.items():
      for fragment, spans in enumerate(fragments):
        known = set(model.merged_rows(island, fragment))
        found = _rows(spans.get("merged", ()))
        assert known.issuperset(found)
        rows += len(found) - len(known)
    assert rows == 0
    folded += result.folded_rows.get("merged", 0)
  assert folded > 300


@pytest.mark.parametrize("more", [[], ["cut", "restore"]])
def test_ledger_equals_the_model_in_long_histories(more):
  seen = set()
  for seed in range(400):
    rng = random.Random(seed)
    seen |= _check(
      [
        (
          rng.choice([*_NAMES, *more]),
          rng.randrange(_ISLANDS),
          rng.randrange(_FRAGMENTS),
          rng.randint(1, 5),
          rng.random() < 0.5,
        )
        for _ in range(60)
      ]
    )
  assert {"repeated", "lost_with_island", "overwritten", "merged"} <= seen
  assert ("rolled_back" in seen) == bool(more)
