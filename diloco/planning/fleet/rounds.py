"""Rounds of merging in virtual time, closed by the production cores.

Islands step, stop and go on as their jobs did; what they publish and adopt is
decided by `diloco.islands.core`, when a round closes and with whom by
`diloco.syncer.core` with the policies of the run's configuration. This module
only carries messages between them: it owns the clock.

By default an island never waits for a round, as in production. With `lockstep`
it does what a synchronous implementation must: after `overlap_steps` it waits
for the answer to what it published.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diloco import config as config_lib
from diloco.fragments import schedule
from diloco.islands import comeback
from diloco.islands import core as island_core
from diloco.planning.fleet import traffic
from diloco.snapshots import records
from diloco.syncer import core as syncer_core
from diloco.syncer import orders
from diloco.syncer import syncer as syncer_shell

_SMALLEST_STEP = 0.1  # of the mean; jitter goes no lower
_AFTER_SECS = 1e-6  # a tick at a deadline would be early by a rounding


class Player:
  """One island: production core, and what is on its way to it."""

  def __init__(self, number: int, track: traffic.Track):
    self.number = number
    self.track = track
    self.core: island_core.IslandCore | None = None
    self.incarnation = 0
    self.ready: dict[int, island_core.Ready] = {}
    self.published: dict[int, int] = {}  # fragment -> first unanswered step
    self.reached: list[int] = []  # [P], last step published, all lives
    self.saved: comeback.Saved | None = None
    self.step = 0
    self.next_stop = 0
    self.seen = -1  # the news it has looked at
    self.waits_since: float | None = None

  def finish(self, start: float, secs: float) -> tuple[float, bool]:
    """Returns when a step begun at `start` ends, and whether it was killed.

    A step that a stop interrupts is done again afterwards.
    """
    stops = self.track.stops
    while self.next_stop < len(stops):
      stop = stops[self.next_stop]
      if stop.end <= start:
        self.next_stop += 1
        continue
      if stop.start >= start + secs:
        break
      self.next_stop += 1
      start = max(start, stop.end)
      if stop.killed:
        return start, True
    return start + secs, False


class World:
  """One stretch of virtual time."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    links: traffic.Links,
    tracks: Sequence[traffic.Track],
    rng: np.random.Generator,
    *,
    outages: Sequence[tuple[float, float]] = (),
    start_secs: float = 0.0,
    count_from: float = 0.0,
  ):
    """Prepares M islands, one for each track.

    Args:
      config: the run's; its `sync` decides everything.
      links: delays.
      tracks: [M].
      rng: for jitter.
      outages: of the syncer or its store; (start, end), in order.
      start_secs: the clock's first value.
      count_from: what happens before is warm-up and not counted.
    """
    self._sync = config.sync
    self._links = links
    self._rng = rng
    self._jitters: list[float] = []
    self._when = schedule.Schedule(config.sync.every, config.sync.num_fragments)
    fragments = config.sync.num_fragments
    heads: list[tuple[int, dict[int, int]]] = [(0, {})] * fragments
    self.syncer = syncer_core.SyncerCore(syncer_shell.settings(config), heads)
    self._clocks: list[dict[int, int]] = [{} for _ in range(fragments)]
    self._outages = list(outages)
    self._outage_starts = [start for start, _ in self._outages]
    self._now = start_secs
    self._start, self._count_from = start_secs, count_from
    self._queue: list[tuple[float, int, Callable[..., None], tuple]] = []
    self._order = itertools.count()
    self._news = 0
    self._steps = 0
    self._members: dict[int, float] = {}
    self._tick_at = math.inf
    self._board = island_core.Board([0] * fragments, {})
    self._board_news = -1
    self._islands = [Player(m, track) for m, track in enumerate(tracks)]
    self._tally = traffic.Tally(*np.zeros((4, len(tracks))))
    self._begin()

  def _begin(self) -> None:
    fragments = self._sync.num_fragments
    for island in self._islands:
      island.core = self._new_core(
        island, 0, [island_core.Origin(0, 0)] * fragments
      )
      island.reached = [0] * fragments
      # Islands start out of phase, as any that have run for a while are.
      phase = self._rng.random() * island.track.step_secs
      self._start_step(island, self._now + phase)
      self._members[island.number] = island.track.step_secs
      for stop in island.track.stops:
        gone = stop.start + self._links.member_secs
        if stop.end > max(gone, self._now):
          self._at(max(gone, self._now), self._leaves, island)
          self._at(stop.end + self._links.join_secs, self._joins, island)
    self._tell_members()

  def _new_core(
    self,
    island: Player,
    step: int,
    origins: Sequence[island_core.Origin],
  ) -> island_core.IslandCore:
    return island_core.IslandCore(
      self._when,
      island.number,
      self._sync.adoption,
      follow=self._sync.follow,
      step=step,
      origins=origins,
    )

  def run(
    self, until: float, *, enough_steps: float = math.inf
  ) -> traffic.Tally:
    """Runs to a time, or until all islands have done so many steps."""
    tally = self._tally
    self._play(until, enough_steps)
    if self._steps < enough_steps:
      self._now = until
    begin = max(self._start, self._count_from)
    tally.secs = self._now - begin
    for m, island in enumerate(self._islands):
      if island.waits_since is not None:
        tally.waiting_secs[m] += self._waited(island)
      tally.stopped_secs[m] = sum(
        max(min(stop.end, self._now) - max(stop.start, begin), 0.0)
        for stop in island.track.stops
      )
    return tally

  def drain(self, secs: float) -> None:
    """Ends the run: what is not published yet is, and rounds close at once."""
    self._queue = [entry for entry in self._queue if entry[2] != self._stepped]
    heapq.heapify(self._queue)
    for island in self._islands:
      if island.number in self._members:
        assert island.core is not None
        for action in island.core.handle(island_core.Drain()):
          assert isinstance(action, island_core.Publish)
          self._publish(island, action)
    self._hand(orders.Drain())
    self._play(self._now + secs)

  def _play(self, until: float, enough_steps: float = math.inf) -> None:
    while (
      self._queue and self._queue[0][0] < until and self._steps < enough_steps
    ):
      self._now, _, act, args = heapq.heappop(self._queue)
      act(*args)

  def _at(self, when: float, action: Callable[..., None], *args: Any) -> None:
    if when < math.inf:
      heapq.heappush(self._queue, (when, next(self._order), action, args))

  @property
  def _counts(self) -> bool:
    return self._now >= self._count_from

  # The syncer's side.

  def _served(self, when: float) -> float:
    """When the syncer gets to what reaches it at `when`."""
    i = bisect.bisect_right(self._outage_starts, when) - 1
    return max(when, self._outages[i][1]) if i >= 0 else when

  def _hand(self, event: orders.Event) -> None:
    self._news += 1
    for action in self.syncer.handle(event, self._now):
      if isinstance(action, orders.Close):
        done = self._served(self._now + self._links.merge_secs)
        self._at(done, self._committed, action)
    deadline = self.syncer.next_deadline()
    if deadline is not None and deadline < self._tick_at:
      self._tick_at = deadline
      due = max(deadline, self._now) + _AFTER_SECS
      self._at(self._served(due), self._tick)

  def _tick(self) -> None:
    self._tick_at = math.inf
    self._hand(orders.Tick())

  def _arrived(self, contribution: records.Contribution) -> None:
    if (later := self._served(self._now)) > self._now:
      self._at(later, self._arrived, contribution)
      return
    self._hand(orders.Arrived([contribution]))

  def _committed(self, close: orders.Close) -> None:
    if self._counts:
      self._count_merge(close)
    self._clocks[close.fragment] = dict(close.clock)
    self._hand(orders.Committed(close.fragment))
    for island in self._islands:
      self._at(
        self._now + self._links.fetch_secs,
        self._fetched,
        island,
        close.fragment,
        close.version,
      )

  def _count_merge(self, close: orders.Close) -> None:
    tally = self._tally
    tally.merges += 1
    tally.contributors[len({c.contribution.island for c in close.chosen})] += 1
    tally.alive += len(self._members)
    for chosen in close.chosen:
      tally.staleness[chosen.staleness] += 1
      tally.merged_steps += chosen.contribution.c_steps

  def _tell_members(self) -> None:
    self._hand(orders.Membership(dict(self._members)))

  def _leaves(self, island: Player) -> None:
    self._members.pop(island.number, None)
    self._tell_members()

  def _joins(self, island: Player) -> None:
    self._members[island.number] = island.track.step_secs
    self._tell_members()

  # The islands' side.

  def _fetched(self, island: Player, fragment: int, version: int) -> None:
    merged = self._clocks[fragment].get(island.number, 0)
    island.ready[fragment] = island_core.Ready(fragment, version, merged)
    if island.waits_since is not None:
      self._decide(island, island.step)
      self._go_on(island)

  def _start_step(self, island: Player, start: float) -> None:
    secs = island.track.step_secs
    if self._links.jitter:
      secs *= max(1 + self._links.jitter * self._normal(), _SMALLEST_STEP)
    end, killed = island.finish(start, secs)
    self._at(end, self._restarted if killed else self._stepped, island)

  def _normal(self) -> float:
    if not self._jitters:
      self._jitters = self._rng.standard_normal(1024).tolist()
    return self._jitters.pop()

  def _stepped(self, island: Player) -> None:
    island.step += 1
    self._steps += 1
    if self._counts:
      self._tally.steps[island.number] += 1
      self._tally.kept_steps[island.number] += 1
    self._decide(island, island.step)
    every = island.track.checkpoint_steps
    if every and island.step % every == 0:
      assert island.core is not None
      positions = island.core.positions
      island.saved = comeback.Saved(
        island.step,
        [p.published for p in positions],
        [p.first_step for p in positions],
      )
    self._go_on(island)

  def _decide(self, island: Player, step: int) -> None:
    assert island.core is not None
    ready = tuple(island.ready.values())
    island.ready.clear()
    board = None
    if island.seen != self._news:
      island.seen = self._news
      board = self._look()
    for action in island.core.handle(island_core.Stepped(step, ready, board)):
      match action:
        case island_core.Publish():
          self._publish(island, action)
        case island_core.Adopt():
          island.published.pop(action.fragment, None)
          if self._counts:
            lost = action.lost_to - action.lost_from
            self._tally.overwritten_steps += lost

  def _look(self) -> island_core.Board:
    if self._board_news != self._news:
      self._board_news = self._news
      self._board = island_core.Board(
        self.syncer.versions, self.syncer.open_rounds
      )
    return self._board

  def _publish(self, island: Player, what: island_core.Publish) -> None:
    island.published.setdefault(what.fragment, what.step)
    island.reached[what.fragment] = what.step
    steps = what.step - what.first_step
    contribution = records.Contribution(
      island.number,
      island.incarnation,
      what.fragment,
      what.base_version,
      what.first_step,
      what.step,
      c_tokens=steps,
      codec="f32",
      plan_hash="",
      payload="",
      chunks=[],
      num_bytes=0,
      norms=[
        math.sqrt(steps)
      ],  # sound: steps have nothing to do with each other
    )
    self._at(self._now + self._links.publish_secs, self._arrived, contribution)

  def _go_on(self, island: Player) -> None:
    """Starts the next step, unless lockstep forbids it."""
    if self._links.lockstep and self._must_wait(island):
      if island.waits_since is None:
        island.waits_since = self._now
      return
    if island.waits_since is not None:
      if self._counts:
        self._tally.waiting_secs[island.number] += self._waited(island)
      island.waits_since = None
    self._start_step(island, self._now)

  def _waited(self, island: Player) -> float:
    """Seconds of its wait that count; stops in it count as stops."""
    assert island.waits_since is not None
    since = max(island.waits_since, self._start, self._count_from)
    stopped = sum(
      max(min(stop.end, self._now) - max(stop.start, since), 0.0)
      for stop in island.track.stops
    )
    return max(self._now - since - stopped, 0.0)

  def _must_wait(self, island: Player) -> bool:
    last = island.step - self._sync.overlap_steps
    return any(step <= last for step in island.published.values())

  def _restarted(self, island: Player) -> None:
    """A killed island is back: the production decision where to go on."""
    island.incarnation += 1
    known = comeback.Known(
      island.reached,
      self.syncer.versions,
      [clock.get(island.number, 0) for clock in self._clocks],
    )
    back = comeback.decide(island.saved, known, self._sync.every)
    lost = island.step - back.start
    if self._counts:
      self._tally.kept_steps[island.number] -= lost
    island.step = back.start
    island.core = self._new_core(island, back.start, back.origins)
    island.ready.clear()
    island.published.clear()
    self._start_step(island, self._now)
