"""The syncer's core against a model that thinks in sets of steps.

Random publications, lives, failures and refusals. The model looks at all that
waits anew at every event, and says every action and deadline that must follow.
"""

import collections
import dataclasses
import math
import random

import pytest
from test_syncer_core import Contribution

from diloco.syncer import core, gates, grace, orders, quorum

_ISLANDS = 3
_FRAGMENTS = 2
_EPOCH = 1
_RETRY_SECS = 0.5
_SUSPENSION = gates.Suspension(after=2, base_secs=4.0, max_secs=6.0)


def _steps(contribution):
  return set(range(contribution.first_step + 1, contribution.step + 1))


@dataclasses.dataclass
class Round:
  """What is known of the next version of a fragment."""

  version: int = 0
  clock: dict = dataclasses.field(default_factory=dict)
  holes: dict = dataclasses.field(default_factory=dict)
  waiting: list = dataclasses.field(default_factory=list)  # with arrival
  opened: float | None = None
  quorate: float | None = None
  facts: grace.GraceFacts | None = None
  window: float = 0.0
  ready: float | None = None
  closing: orders.Close | None = None
  failures: int = 0
  retry: float = -math.inf

  def waits_for_nothing(self):
    self.opened = self.quorate = self.ready = None


class Model:
  """What the core is to do; `settings` are its own."""

  def __init__(self, settings):
    self.settings = settings
    self.rounds = [Round() for _ in range(_FRAGMENTS)]
    self.merged = collections.defaultdict(set)  # fragment, island -> steps
    self.accused = {}  # island -> life, step, offences, until
    self.step_secs = {}
    self.quorum_secs = self.sync_secs = grace.MovingAverage()
    self.draining = self.merging = False
    self.cut, self.channel = 0, None

  def suspended(self, island, now):
    return island in self.accused and now < self.accused[island][3]

  def accuse(self, bad, reason, now):
    life, step, offences, _ = self.accused.get(bad.island, (0, 0, 0, 0))
    if bad.incarnation <= life and bad.first_step < step:
      told = list(self.accused[bad.island])
      told[1] = max(step, bad.step)
      self.accused[bad.island] = tuple(told)
      return [orders.Remind(bad.island)]
    secs = _SUSPENSION.secs(offences + 1)
    self.accused[bad.island] = (
      *(bad.incarnation, bad.step, offences + 1, now + secs),
    )
    fields = bad.island, bad.incarnation, bad.fragment, reason
    return [orders.Quarantine(*fields, offences + 1, secs)]

  def behind(self, new):
    """What became of steps before the clock: in a version or in none."""
    return _steps(new) <= self.merged[new.fragment, new.island]

  def admit(self, new, now):
    state = self.rounds[new.fragment]
    clock = state.clock.get(new.island, 0)
    staleness = state.version - new.base_version
    if new.key in [one.key for one, _ in state.waiting]:
      return []
    if new.epoch < _EPOCH:
      reason = "before_restore"
    elif new.step <= clock:
      if self.behind(new):
        return [orders.Forget(new)]
      reason = "passed_over"
    elif new.epoch > _EPOCH or staleness < 0:
      return []
    elif new.first_step < clock:
      reason = "overlaps_merged"
    elif staleness > self.settings.max_staleness:
      reason = "too_stale"
    elif self.suspended(new.island, now):
      reason = "suspended"
    elif math.isnan(new.norms[0]):
      told = self.accuse(new, "not_finite", now)
      return [orders.Discard(new, "not_finite", now), *told]
    else:
      state.waiting.append((new, now))
      if self.channel is not None and new.cut < self.cut:
        self.channel[new.key] = new
      return []
    return [orders.Discard(new, reason, now)]

  def arrived(self, batch, now):
    actions = self.take_part(max([0, *(new.cut for new in batch)]))
    for new in batch:
      actions += self.admit(new, now)
    for fragment in sorted({new.fragment for new in batch}):
      actions += self.evaluate(fragment, now)
    return actions

  def take_part(self, number):
    if number <= self.cut:
      return []
    self.cut = number
    self.channel = {c.key: c for r in self.rounds for c, _ in r.waiting}
    return [orders.Cut(number)]

  def supersede(self, state):
    dropped = []
    for island in sorted({one.island for one, _ in state.waiting}):
      mine = [w for w in state.waiting if w[0].island == island]
      mine.sort(key=lambda w: (-w[0].step, w[0].first_step, -w[0].incarnation))
      kept, doubled = set(), []
      for one, at in mine:
        if _steps(one) & kept:
          doubled.append((one, at))
        else:
          kept |= _steps(one)
      for one, at in doubled:
        state.waiting.remove((one, at))
        why = "superseded" if _steps(one) <= kept else "overlapped"
        dropped.append(orders.Discard(one, why, at))
    return dropped

  def opener(self, state):
    any_opens = self.draining or self.settings.stale_opens
    fresh = [c for c, _ in state.waiting if c.base_version == state.version]
    some = fresh or [c for c, _ in state.waiting if any_opens]
    return some[-1] if some else None

  def evaluate(self, fragment, now):
    state = self.rounds[fragment]
    if state.closing or not state.waiting:
      return []
    actions = self.supersede(state)
    opener = self.opener(state)
    if opener is None:
      state.waits_for_nothing()
      return actions
    if state.opened is None:
      state.opened = now
      actions.append(orders.Open(fragment, state.version + 1, opener.island))
    present = {one.island for one, _ in state.waiting}
    if len(present) < self.settings.quorum.minimum:
      state.quorate = state.ready = None
      return actions
    if state.quorate is None:
      state.quorate = now
      self.quorum_secs = self.quorum_secs.observe(now - state.opened)
      state.facts = grace.GraceFacts(
        max(self.step_secs.values(), default=0.0),
        self.quorum_secs.value,
        self.sync_secs.value or 0.0,
      )
      state.window = self.settings.grace.grace_secs(state.facts)
    absent = sorted(
      m for m in set(self.step_secs) - present if not self.suspended(m, now)
    )
    end = state.quorate + state.window
    if state.ready is None:
      if absent and now < end and not self.draining:
        return actions
      state.ready = min(now, end) if absent else now
    earlier = [
      other
      for other in self.rounds
      if other.ready is not None
      and other.ready < state.ready
      and other.retry <= now
    ]
    if self.merging or now < state.retry or earlier:
      return actions
    self.merging = True
    state.closing = self.close(fragment, absent, now)
    return [*actions, state.closing]

  def close(self, fragment, absent, now):
    state = self.rounds[fragment]
    clock, holes = dict(state.clock), dict(state.holes)
    ordered = sorted(state.waiting, key=lambda w: (w[0].island, w[0].step))
    for one, _ in ordered:
      if one.first_step > clock.get(one.island, 0):
        gap = clock.get(one.island, 0), one.first_step
        holes[one.island] = (*holes.get(one.island, ()), gap)
      clock[one.island] = one.step
    chosen = [
      orders.Chosen(c, state.version - c.base_version, at, at - state.opened)
      for c, at in ordered
    ]
    return orders.Close(
      *(fragment, state.version + 1, tuple(chosen), tuple(absent)),
      *(clock, holes, state.opened, now, state.quorate - state.opened),
      *(state.window, state.ready - state.quorate, now - state.ready),
      state.facts,
    )

  def committed(self, fragment, now):
    state = self.rounds[fragment]
    self.merging = False
    self.sync_secs = self.sync_secs.observe(now - state.ready)
    close, state.closing = state.closing, None
    for chosen in close.chosen:
      one = chosen.contribution
      state.waiting.remove((one, chosen.arrived_at))
      self.merged[fragment, one.island] |= _steps(one)
      self.accused.pop(one.island, None)
    state.version, state.clock, state.holes = (
      *(close.version, close.clock, close.holes),
    )
    state.waits_for_nothing()
    state.failures, state.retry = 0, -math.inf
    actions = []
    for one, at in list(state.waiting):
      clock = state.clock.get(one.island, 0)
      late = state.version - one.base_version > self.settings.max_staleness
      if late or one.first_step < clock:
        state.waiting.remove((one, at))
        reason = "too_stale" if late else "overlaps_merged"
        if one.step <= clock and not self.behind(one):
          reason = "passed_over"
        actions.append(orders.Discard(one, reason, at))
    return actions + self.evaluate(fragment, now)

  def refused(self, fragment, reasons, now):
    state = self.rounds[fragment]
    state.closing, self.merging = None, False
    actions = []
    for key, reason in reasons.items():
      (found,) = [w for w in state.waiting if w[0].key == key]
      state.waiting.remove(found)
      actions.append(orders.Discard(found[0], reason, found[1]))
      if reason == "not_finite":
        actions += self.accuse(found[0], reason, now)
    if self.opener(state) is None:
      state.waits_for_nothing()
    return actions + self.evaluate(fragment, now)

  def failed(self, fragment, now):
    state = self.rounds[fragment]
    state.closing, self.merging = None, False
    pause = _RETRY_SECS * min(2**state.failures, 32)
    state.failures += 1
    state.retry = state.ready = now + pause
    return []

  def evaluate_all(self, now):
    return [a for p in range(_FRAGMENTS) for a in self.evaluate(p, now)]

  def deadline(self):
    due = [
      max(r.ready if r.ready is not None else r.quorate + r.window, r.retry)
      for r in self.rounds
      if r.quorate is not None
    ]
    return min(due) if due and not self.merging else None


def _publication(draw, model):
  """Something an island of any life may have sent, sensible or not."""
  fragment, island = draw.randrange(_FRAGMENTS), draw.randrange(_ISLANDS)
  state = model.rounds[fragment]
  first = max(0, state.clock.get(island, 0) + draw.choice([0] * 6 + [-2, 3]))
  base = state.version - draw.choice([0] * 5 + [1, 1, 2, 3, -1])
  return Contribution(
    *(island, first, first + draw.randint(1, 6), max(base, 0), fragment),
    incarnation=draw.randint(1, 2),
    norms=(draw.choice([1.0] * 4 + [math.nan]),),
    epoch=draw.choice([_EPOCH] * 12 + [0, 2]),
    cut=model.cut + draw.choice([0] * 12 + [-1, 1]),
  )


def _event(draw, model, now):
  """One event, and what the model makes of it."""
  merging = [p for p, r in enumerate(model.rounds) if r.closing]
  if merging and draw.random() < 0.4:
    (fragment,) = merging
    keys = [c.contribution.key for c in model.rounds[fragment].closing.chosen]
    kind = draw.choice(["committed"] * 4 + ["failed", "refused"])
    if kind == "committed":
      return orders.Committed(fragment), model.committed(fragment, now)
    if kind == "failed":
      return orders.MergeFailed(fragment), model.failed(fragment, now)
    reasons = {
      key: draw.choice(["corrupt", "not_finite"])
      for key in draw.sample(keys, draw.randint(1, len(keys)))
    }
    event = orders.MergeRefused(fragment, reasons)
    return event, model.refused(fragment, reasons, now)
  kind = draw.choice(["arrived"] * 9 + ["tick"] * 6 + ["present", "cut", "end"])
  if kind == "arrived":
    batch = [_publication(draw, model) for _ in range(draw.randint(0, 3))]
    return orders.Arrived(batch), model.arrived(batch, now)
  if kind == "present":
    model.step_secs = {
      m: draw.choice([0.25, 1.0])
      for m in range(_ISLANDS)
      if draw.random() < 0.8
    }
    event = orders.Membership(model.step_secs)
    return event, model.evaluate_all(now)
  if kind == "cut":
    number = model.cut + draw.randint(0, 1)
    return orders.CutRequested(number), model.take_part(number)
  if kind == "end":
    number = model.cut - draw.randint(0, 1)
    if number == model.cut:
      model.channel = None
    return orders.CutEnded(number), []
  return orders.Tick(), model.evaluate_all(now)


def _policies(draw):
  return (
    quorum.MinimumQuorum(draw.randint(1, 2)),
    draw.choice([grace.AdaptiveGrace(4, 0.5), grace.FixedGrace(0.0)]),
  )


@pytest.mark.parametrize("seed", range(60))
def test_core_does_what_sets_of_steps_say(seed):
  draw = random.Random(seed)
  settings = core.Settings(
    _FRAGMENTS,
    *_policies(draw),
    *(draw.randint(0, 2), _RETRY_SECS),
    suspension=_SUSPENSION,
    stale_opens=draw.random() < 0.3,
  )
  heads = [(0, {})] * _FRAGMENTS
  state, model = core.SyncerCore(settings, heads, epoch=_EPOCH), Model(settings)
  now, drain_at = 0.0, draw.choice([150, 10**9])
  for number in range(200):
    if draw.random() < 0.1:  # they may change while a run is on
      named = zip(("quorum", "grace"), _policies(draw), strict=True)
      model.settings = dataclasses.replace(model.settings, **dict(named))
      # Of others it takes no notice.
      state.configure(dataclasses.replace(model.settings, max_staleness=99))
    due = model.deadline()
    now += draw.choice([0.0, 0.25, 0.5])
    if due is not None and draw.random() < 0.5:
      now = max(now, due)
    if number == drain_at:
      model.draining = True
      event, expected = orders.Drain(), model.evaluate_all(now)
    else:
      event, expected = _event(draw, model, now)
    assert state.handle(event, now) == expected, (number, event)
    assert state.next_deadline() == model.deadline()
    assert state.versions == [r.version for r in model.rounds]
    sent = None if model.channel is None else list(model.channel.values())
    assert state.channel == sent and state.cut == model.cut
    assert state.idle == (not any(r.waiting for r in model.rounds))
    open_rounds = {
      p: sorted({c.island for c, _ in r.waiting})
      for p, r in enumerate(model.rounds)
      if r.opened is not None and not r.closing
    }
    assert state.open_rounds == open_rounds
    assert state.quorate == {
      p for p, r in enumerate(model.rounds) if r.quorate is not None
    }
