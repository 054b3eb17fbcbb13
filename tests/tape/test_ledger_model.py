"""The ledger against a model that follows every single step.

Random histories of islands, a syncer and a supervisor. The model keeps the
fate of each (island, fragment, step) in a dictionary and changes it the moment
something happens; the ledger sees only the lines.
"""

import collections

import hypothesis
from hypothesis import strategies as st
from tape_builder import TOKENS_PER_STEP, Tapes

from diloco.tape import ledger

_ISLANDS = 2
_FRAGMENTS = 3


class Model:
  """Roles that write lines and know what they mean."""

  def __init__(self):
    self.tapes = Tapes()
    self.fate = {}  # (island, fragment, step) -> fate
    self.step = [0] * _ISLANDS
    self.alive = [True] * _ISLANDS
    self.first = collections.defaultdict(int)  # (island, fragment) -> step
    self.waiting = {fragment: [] for fragment in range(_FRAGMENTS)}
    self.version = collections.Counter()
    for island in range(_ISLANDS):
      self.tapes.start(island)

  def _set(self, island, fragment, steps, fate, over):
    """Gives `steps` a fate where they have one of those in `over`."""
    for step in steps:
      if self.fate[island, fragment, step] in over:
        self.fate[island, fragment, step] = fate

  def _unpublished(self, island, fragment):
    return [
      step
      for step in range(self.first[island, fragment] + 1, self.step[island] + 1)
      if self.fate[island, fragment, step] == "unpublished"
    ]

  def train(self, island, fragment, number, flag):
    if not self.alive[island]:
      return
    first, last = self.step[island], self.step[island] + number
    self.tapes.train(first, last, island)
    self.step[island] = last
    for step in range(first + 1, last + 1):
      for each in range(_FRAGMENTS):
        self.fate[island, each, step] = "unpublished"

  def publish(self, island, fragment, number, flag):
    first, step = self.first[island, fragment], self.step[island]
    if not self.alive[island] or step == first:
      return
    item = self.tapes.publish(first, step, island, fragment)
    for fate in range(first + 1, step + 1):
      if self.fate[island, fragment, fate] != "merged":
        self.fate[island, fragment, fate] = "waiting"
    for other in list(self.waiting[fragment]):
      if other["island"] == island and other["first_step"] == first:
        self.waiting[fragment].remove(other)
        if flag:  # the syncer may or may not say so
          self.tapes.discard(other, "superseded")
    self.waiting[fragment].append(item)

  def merge(self, island, fragment, number, flag):
    """Merges what waits; what was merged in part before is refused."""
    chosen = []
    for item in list(self.waiting[fragment])[:number]:
      steps = range(item["first_step"] + 1, item["step"] + 1)
      where = item["island"]
      self.waiting[fragment].remove(item)
      if any(self.fate[where, fragment, s] == "merged" for s in steps):
        self._discard(item, "overlap")
        continue
      self._set(where, fragment, steps, "merged", {"waiting"})
      chosen.append(item)
    if chosen:
      self.version[fragment] += 1
      self.tapes.merge(self.version[fragment], *chosen)
      if flag:  # a syncer that took over tells it again
        self.tapes.merge(self.version[fragment], *chosen)

  def _discard(self, item, reason):
    steps = range(item["first_step"] + 1, item["step"] + 1)
    self._set(item["island"], item["fragment"], steps, reason, {"waiting"})
    self.tapes.discard(item, reason)

  def refuse(self, island, fragment, number, flag):
    if self.waiting[fragment]:
      item = self.waiting[fragment].pop(number % len(self.waiting[fragment]))
      self._discard(item, "stale" if flag else "not_finite")

  def adopt(self, island, fragment, number, flag):
    """Overwrites; says the exact loss, or all since the last adoption."""
    if not self.alive[island]:
      return
    lost = self._unpublished(island, fragment)
    exact = lost[0] - 1 if lost else self.step[island]
    wide = self.first[island, fragment]
    start = exact if flag else wide
    self.tapes.adopt(start, self.step[island], island, fragment)
    self._set(island, fragment, lost, "overwritten", {"unpublished"})
    self.first[island, fragment] = self.step[island]

  def carry(self, island, fragment, number, flag):
    """Adopts without a loss: what was not published is published later."""
    lost = self._unpublished(island, fragment)
    if self.alive[island] and lost:
      self.first[island, fragment] = lost[0] - 1

  def drop(self, island, fragment, number, flag):
    if not self.alive[island] or not self._unpublished(island, fragment):
      return
    first, step = self.first[island, fragment], self.step[island]
    self.tapes.drop(first, step, island, fragment)
    lost = self._unpublished(island, fragment)
    self._set(island, fragment, lost, "publish_dropped", {"unpublished"})
    self.first[island, fragment] = step

  def kill(self, island, fragment, number, flag):
    """Kills and restarts; the new life may restore unsent progress."""
    step = self.step[island]
    if flag:
      self.tapes.die(island)
    unsent = {f: self._unpublished(island, f) for f in range(_FRAGMENTS)}
    starts = [lost[0] - 1 if lost else step for lost in unsent.values()]
    restores = number % 2 == 0
    fields = {"unsent_from_step": starts} if restores else {}
    self.tapes.start(island, step, **fields)
    for each, lost in unsent.items():
      self.first[island, each] = starts[each] if restores else step
      if not restores:
        self._set(island, each, lost, "lost_with_island", {"unpublished"})

  def kill_for_good(self, island, fragment, number, flag):
    if not self.alive[island]:
      return
    self.tapes.die(island)
    self.alive[island] = False
    for each in range(_FRAGMENTS):
      lost = self._unpublished(island, each)
      self._set(island, each, lost, "lost_with_island", {"unpublished"})

  def counts(self):
    """Returns fragment-tokens by fate."""
    names = {"unpublished": "pending", "waiting": "pending"}
    counts = collections.Counter(names.get(f, f) for f in self.fate.values())
    return {fate: n * TOKENS_PER_STEP for fate, n in counts.items()}


_ACTIONS = st.tuples(
  # Weighted by repetition towards the ordinary course of things.
  st.sampled_from(
    ["train"] * 4
    + ["publish"] * 4
    + ["merge"] * 3
    + ["adopt"] * 2
    + ["refuse", "carry", "drop", "kill", "kill", "kill_for_good"]
  ),
  st.integers(0, _ISLANDS - 1),
  st.integers(0, _FRAGMENTS - 1),
  st.integers(1, 5),
  st.booleans(),
)


@hypothesis.settings(max_examples=1000, deadline=None)
@hypothesis.given(st.lists(_ACTIONS, max_size=60))
def test_ledger_equals_the_model(actions):
  model = Model()
  for name, island, fragment, number, flag in actions:
    if name == "kill" and not model.alive[island]:
      continue
    getattr(model, name)(island, fragment, number, flag)
  result = ledger.compute(model.tapes.record(), _FRAGMENTS)
  assert result.balanced, result.violations
  found = {
    "merged": result.merged,
    "pending": result.pending,
    **result.discarded,
  }
  assert {k: v for k, v in found.items() if v} == model.counts()
  tokens = result.tokens()
  assert tokens.trained == sum(model.step) * TOKENS_PER_STEP
  parts = [tokens.merged, tokens.pending, *tokens.discarded.values()]
  assert sum(parts) + tokens.unaccounted == tokens.trained
