"""Planted bugs in judgement: wrong reasons, weights, gates, losses and stamps.

Each is caught by the checker's own account of what was published, merged and
held; none breaks the order of operations. See `plants`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import wrong_pieces

from diloco.islands import core as island_core
from diloco.islands import protocol as island_protocol
from diloco.snapshots import keys, operations, records
from diloco.syncer import core as syncer_core
from diloco.syncer import gates, heads, orders, weighting
from diloco.syncer import merge as merge_lib

_FAR = 10**6


def _staleness_ignored(right: Any) -> Any:
  def weight(self: Any, c_tokens: int, c_steps: int, staleness: int) -> Any:
    return right(self, c_tokens, c_steps, 0)

  return weight


def _quality_ignored(right: Any) -> Any:
  def weight(self: Any, c_tokens: int, c_steps: int, staleness: int) -> Any:
    return right(self, c_steps, c_steps, staleness)

  return weight


def _radius_ignored(right: Any) -> Any:
  def combine(self: Any, *args: Any) -> Any:
    outcome, _ = right(self, *args)
    return outcome, 1.0

  return combine


def _means_all(right: Any) -> Any:
  def combine(self: Any, contributions: Any, _: Any, *rest: Any) -> Any:
    return right(self, contributions, "mean", *rest)

  return combine


def _with_settings(**changes: Any) -> Callable[[Any], Any]:
  """Works by other settings than it was given."""

  def make(right: Any) -> Any:
    def method(self: Any, *args: Any) -> Any:
      before = self._settings
      self._settings = dataclasses.replace(before, **changes)
      try:
        return right(self, *args)
      finally:
        self._settings = before

    return method

  return make


def _limit_moved(by: int) -> Callable[[Any], Any]:
  """The staleness limit is another one."""

  def make(right: Any) -> Any:
    def admit(self: Any, new: Any, now: float) -> Any:
      before = self._settings
      limit = max(before.max_staleness + by, 0)
      self._settings = dataclasses.replace(before, max_staleness=limit)
      try:
        return right(self, new, now)
      finally:
        self._settings = before

    return admit

  return make


def _reason_swapped(was: str, now_is: str) -> Callable[[Any], Any]:
  """Some discards are given another reason."""

  def make(right: Any) -> Any:
    def method(self: Any, *args: Any) -> Any:
      return [
        dataclasses.replace(a, reason=now_is)
        if isinstance(a, orders.Discard) and a.reason == was
        else a
        for a in right(self, *args)
      ]

    return method

  return make


def _overlaps_forgotten(right: Any) -> Any:
  def admit(self: Any, new: Any, now: float) -> Any:
    return [
      orders.Forget(new)
      if isinstance(a, orders.Discard) and a.reason == "overlaps_merged"
      else a
      for a in right(self, new, now)
    ]

  return admit


def _merged_discarded(right: Any) -> Any:
  def committed(self: Any, fragment: int, *args: Any) -> Any:
    chosen = self._fragments[fragment].closing.chosen
    later = right(self, fragment, *args)
    if len(chosen) < 2:
      return later
    last = chosen[-1]
    gone = orders.Discard(last.contribution, "too_stale", last.arrived_at)
    return [*later, gone]

  return committed


def _always_in(right: Any) -> Any:
  def judge(self: Any, contribution: Any) -> str:
    reason = str(right(self, contribution))
    return "" if reason.startswith("norm_outlier") else reason

  return judge


def _without_root(right: Any) -> Any:
  def judge(self: Any, contribution: Any) -> str:
    stretched = dataclasses.replace(
      contribution,
      norms=[n / math.sqrt(contribution.c_steps) for n in contribution.norms],
    )
    return str(right(self, stretched))

  return judge


def _suspended_at_once(right: Any) -> Any:
  def secs(self: Any, offences: int) -> float:
    return max(float(right(self, offences)), 3.0)

  return secs


def _lost_shifted(by: int) -> Callable[[Any], Any]:
  """An island says that it gives up more steps than it does, or fewer."""

  def make(right: Any) -> Any:
    def adopt(self: Any, fragment: int, version: int, merged: int) -> Any:
      return [
        dataclasses.replace(a, lost_from=max(a.lost_from + by, 0))
        if isinstance(a, island_core.Adopt) and a.lost_from < a.lost_to
        else a
        for a in right(self, fragment, version, merged)
      ]

    return adopt

  return make


def _adopted_unstamped(right: Any) -> Any:
  def stepped(self: Any, event: Any) -> Any:
    ready = [r._replace(cut=0) for r in event.ready]
    return right(self, dataclasses.replace(event, ready=ready))

  return stepped


def _survey_race(right: Any) -> Any:
  def come_back(island: int, num_fragments: int) -> Any:
    standing = yield from right(island, num_fragments)
    known = yield from _survey_heads_first(island, num_fragments)
    return standing._replace(
      known=standing.known._replace(published=known.published)
    )

  return come_back


def _survey_heads_first(island: int, num_fragments: int) -> Any:
  """A survey that a merge can overtake: heads before records."""
  merged = []
  for fragment in range(num_fragments):
    head, _ = yield operations.read_head(fragment)
    merged.append(head.merged_step(island) if head else 0)
  known = yield from island_protocol.survey(island, num_fragments)
  published = list(merged)
  for name in (yield operations.Names("contributions")):
    p, owner, _, step = map(int, name.split("."))
    if owner == island:
      record, _ = yield operations.Read(
        keys.contribution_key(name), records.Contribution
      )
      if record is not None:
        published[p] = max(published[p], step)
  return known._replace(published=tuple(published))


def _one_prefix(right: Any) -> Any:
  def close_round(self: Any, *args: Any) -> Any:
    self._tries = 0
    return (yield from right(self, *args))

  return close_round


PLANTS: dict[str, wrong_pieces.Plant] = {
  "weight_without_staleness": wrong_pieces.Plant(
    "a stale contribution weighs as much as a fresh one",
    weighting.Weighting,
    "weight",
    _staleness_ignored,
  ),
  "weight_without_tokens": wrong_pieces.Plant(
    "a contribution weighs by its steps, whatever they were trained on",
    weighting.Weighting,
    "weight",
    _quality_ignored,
  ),
  "merge_without_radius": wrong_pieces.Plant(
    "the merged direction is not stretched to the mean length",
    merge_lib.Merger,
    "_combine",
    _radius_ignored,
  ),
  "merge_by_mean": wrong_pieces.Plant(
    "all tensors are averaged as embeddings are",
    merge_lib.Merger,
    "_combine",
    _means_all,
  ),
  "staleness_at_limit_refused": wrong_pieces.Plant(
    "what is just not too old is refused as too old",
    syncer_core.SyncerCore,
    "_admit",
    _limit_moved(-1),
  ),
  "staleness_off_by_one": wrong_pieces.Plant(
    "what is one version too old is let in",
    syncer_core.SyncerCore,
    "_admit",
    _limit_moved(1),
  ),
  "reason_swapped": wrong_pieces.Plant(
    "what shares rows with what was merged is said to be too old",
    syncer_core.SyncerCore,
    "_admit",
    _reason_swapped("overlaps_merged", "too_stale"),
  ),
  "overlaps_forgotten": wrong_pieces.Plant(
    "what shares rows with what was merged is deleted without a word",
    syncer_core.SyncerCore,
    "_admit",
    _overlaps_forgotten,
  ),
  "merged_and_discarded": wrong_pieces.Plant(
    "a contribution that was merged is discarded too",
    syncer_core.SyncerCore,
    "_committed",
    _merged_discarded,
  ),
  "round_stays_open": wrong_pieces.Plant(
    "a round whose fresh contributions were all refused stays open",
    syncer_core.SyncerCore,
    "_keep_open",
    wrong_pieces.constant(None),
  ),
  "gate_open": wrong_pieces.Plant(
    "the norm gate lets everything in",
    gates.NormGate,
    "judge",
    _always_in,
  ),
  "gate_without_root": wrong_pieces.Plant(
    "the norm gate divides by the steps and not by their root",
    gates.NormGate,
    "judge",
    _without_root,
  ),
  "gate_never_gives_in": wrong_pieces.Plant(
    "a norm gate that refuses everybody goes on for ever",
    gates.NormGate,
    "judge",
    _with_settings(patience=_FAR),
  ),
  "gate_remembers_all": wrong_pieces.Plant(
    "the norm gate's median is over all that was ever merged",
    gates.NormGate,
    "accepted",
    _with_settings(history=_FAR),
  ),
  "suspended_at_once": wrong_pieces.Plant(
    "an island is suspended at its first offence",
    gates.Suspension,
    "secs",
    _suspended_at_once,
  ),
  "lost_understated": wrong_pieces.Plant(
    "an island says that it gives up one step fewer than it does",
    island_core.IslandCore,
    "_adopt",
    _lost_shifted(1),
  ),
  "lost_overstated": wrong_pieces.Plant(
    "an island says that it gives up a step that it has published",
    island_core.IslandCore,
    "_adopt",
    _lost_shifted(-1),
  ),
  "adopted_unstamped": wrong_pieces.Plant(
    "an island ignores which cut a version's syncer has taken part in",
    island_core.IslandCore,
    "_stepped",
    _adopted_unstamped,
  ),
  "survey_race": wrong_pieces.Plant(
    "a restarted island reads heads before records, and a merge overtakes it",
    island_protocol,
    "come_back",
    _survey_race,
  ),
  "one_prefix": wrong_pieces.Plant(
    "every try to make a version writes to one prefix",
    heads.Heads,
    "close_round",
    _one_prefix,
  ),
}
