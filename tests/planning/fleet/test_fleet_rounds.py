"""Rounds in virtual time: the production cores close them."""

import math

import numpy as np
import pytest

from diloco import config as config_lib
from diloco.islands import core as island_core
from diloco.planning.fleet import rounds, traffic
from diloco.syncer import core as syncer_core
from diloco.syncer import orders

M = 4


def world(*, tracks=None, links=None, seed=0, outages=(), **sync):
  tracks = tracks or [traffic.Track(1.0) for _ in range(M)]
  values = {"num_fragments": 4, "every": 8, **sync}
  config = config_lib.from_mapping(
    {"fleet": {"slices": ({},) * len(tracks)}, "sync": values}
  )
  return rounds.World(
    config,
    links or traffic.Links(),
    tracks,
    np.random.default_rng(seed),
    outages=outages,
  )


def test_rounds_are_closed_by_the_production_core(monkeypatch):
  seen = []
  handle = syncer_core.SyncerCore.handle

  def spy(self, event, now):
    actions = handle(self, event, now)
    seen.extend(a for a in actions if isinstance(a, orders.Close))
    return actions

  monkeypatch.setattr(syncer_core.SyncerCore, "handle", spy)
  tally = world().run(100)
  assert tally.merges > 20
  assert len(seen) - tally.merges in range(5)  # the last ones still commit
  assert tally.contributors.total() == tally.merges


def test_islands_publish_by_the_production_core(monkeypatch):
  def mute(self, event):
    return []

  monkeypatch.setattr(island_core.IslandCore, "handle", mute)
  assert world().run(100).merges == 0


def test_equal_islands_all_take_part():
  tally = world().run(200)
  assert traffic.mean(tally.contributors) > 0.95 * M
  assert traffic.mean(tally.staleness) < 0.1
  assert tally.steps.tolist() == pytest.approx([200] * M, abs=1.5)


def test_same_seed_same_rounds():
  links = traffic.Links(jitter=0.2)
  first = world(links=links, seed=3).run(100)
  again = world(links=links, seed=3).run(100)
  other = world(links=links, seed=4).run(100)
  assert first.contributors == again.contributors
  assert (first.steps == again.steps).all()
  assert (first.steps != other.steps).any()


def test_unequal_islands_need_grace_or_patience():
  tracks = [traffic.Track(1 / speed) for speed in (1, 0.94, 0.88, 0.82)]
  links = traffic.Links(jitter=0.1)
  lock = traffic.Links(jitter=0.1, lockstep=True)
  alone = world(tracks=tracks, links=links, grace="0").run(300)
  graced = world(tracks=tracks, links=links, quorum=1).run(300)
  everyone = world(
    tracks=tracks, links=lock, quorum=M, grace="0", follow=False
  ).run(300)
  assert (
    traffic.mean(alone.contributors) < 2 < traffic.mean(graced.contributors)
  )
  assert graced.waiting_secs.sum() == 0
  assert traffic.mean(everyone.contributors) == M
  assert everyone.waiting_secs.sum() > 0.03 * 300 * M


def test_island_that_stops_is_not_waited_for():
  tracks = [traffic.Track(1.0) for _ in range(M)]
  tracks[1] = traffic.Track(1.0, (traffic.Stop(50, 150),))
  tally = world(tracks=tracks).run(200)
  assert tally.steps[1] == pytest.approx(100, abs=3)
  assert tally.stopped_secs.tolist() == [0, 100, 0, 0]
  assert 3.2 < traffic.mean(tally.contributors) < 3.8
  assert tally.alive / tally.merges == pytest.approx(3.5, abs=0.15)


def test_killed_island_does_its_unsaved_steps_again():
  stop = traffic.Stop(50, 60, killed=True)
  tracks = [traffic.Track(1.0), traffic.Track(1.0, (stop,))]
  tally = world(tracks=tracks).run(100)
  lost = tally.steps[1] - tally.kept_steps[1]
  assert 0 < lost <= 8  # at most H
  assert tally.kept_steps[0] == tally.steps[0]


def test_saved_state_spares_steps():
  stop = traffic.Stop(50.5, 60, killed=True)
  saved = [traffic.Track(1.0), traffic.Track(1.0, (stop,), checkpoint_steps=1)]
  tally = world(tracks=saved).run(100)
  assert tally.steps[1] == tally.kept_steps[1]


def test_nothing_merges_while_the_syncer_is_out():
  whole = world().run(200)
  half = world(outages=[(50.0, 150.0)]).run(200)
  assert half.merges < 0.65 * whole.merges
  assert (half.steps == whole.steps).all()


def test_island_that_never_comes_back_ends_quietly():
  stop = traffic.Stop(10, math.inf)
  tally = world(tracks=[traffic.Track(1.0, (stop,))] * 2).run(100)
  assert tally.steps.max() <= 10 and tally.secs == 100


def test_run_ends_when_enough_is_done():
  tally = world().run(1e9, enough_steps=100)
  assert tally.steps.sum() == 100 and 20 < tally.secs < 30


def test_drained_run_leaves_nothing_on_its_way():
  one = world()
  tally = one.run(101)
  before = tally.merges
  one.drain(5)
  assert one.syncer.idle
  assert before < tally.merges <= before + 8  # once or twice a fragment


def test_island_counts_as_there_after_its_delay():
  tracks = [traffic.Track(1.0), traffic.Track(1.0, (traffic.Stop(0, 40),))]
  late = world(tracks=tracks, links=traffic.Links(join_secs=30)).run(200)
  soon = world(tracks=tracks).run(200)
  assert late.alive / late.merges < soon.alive / soon.merges
