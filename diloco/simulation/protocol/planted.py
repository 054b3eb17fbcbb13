"""Bugs planted on purpose: who checks the checker.

Each replaces one piece of the protocol by a wrong one, in this process, for as
long as the context lasts. Production code knows nothing of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from diloco import errors
from diloco.islands import comeback, peer_protocol
from diloco.islands import core as island_core
from diloco.islands import protocol as island_protocol
from diloco.simulation.protocol import (
  island_role,
  rollback,
  world,
)
from diloco.snapshots import cuts, keys, lease, operations, records
from diloco.syncer import chores, cutting, grace
from diloco.syncer import core as syncer_core
from diloco.syncer import protocol as syncer_protocol


class Plant(NamedTuple):
  """One planted bug.

  Attributes:
    what: in words.
    where: object whose attribute is replaced.
    name: of the attribute.
    make: gives the wrong piece from the right one.
  """

  what: str
  where: Any
  name: str
  make: Callable[[Any], Any]


@contextlib.contextmanager
def bug(name: str) -> Iterator[None]:
  """Plants a bug while the context lasts.

  Raises:
    UserError: there is no such bug.
  """
  plant = PLANTS.get(name)
  if plant is None:
    raise errors.UserError(
      f"--plant={name}",
      "there is no such planted bug",
      f"choose one of {', '.join(PLANTS)}",
    )
  with contextlib.ExitStack() as stack:
    for part in (plant, *_DEFENCES.get(name, ())):
      wrong = part.make(getattr(part.where, part.name))
      stack.enter_context(mock.patch.object(part.where, part.name, wrong))
    yield


def _commit_without_fence(right: Any) -> Any:
  def commit(held: Any, head: records.Head) -> Any:
    key = keys.head_key(head.fragment)
    _, generation = yield operations.Read(key, records.Head)
    yield operations.CompareAndSet(key, head, generation)
    _, generation = yield operations.Read(key, records.Head)
    return syncer_protocol.Held(head, generation)

  return commit


def _commit_ignores_result(right: Any) -> Any:
  def commit(held: Any, head: records.Head) -> Any:
    key = keys.head_key(head.fragment)
    yield operations.CompareAndSet(key, head, held.generation)
    _, generation = yield operations.Read(key, records.Head)
    return syncer_protocol.Held(head, generation)

  return commit


def _commit_tried_again(right: Any) -> Any:
  def commit(held: Any, head: records.Head) -> Any:
    try:
      return (yield from right(held, head))
    except OSError:
      key = keys.head_key(head.fragment)
      found, generation = yield operations.Read(key, records.Head)
      again = dataclasses.replace(head, version=found.version + 1)
      return (yield from right(syncer_protocol.Held(found, generation), again))

  return commit


def _fence_keeps_token(right: Any) -> Any:
  def fence(fragment: int, token: int) -> Any:
    key = keys.head_key(fragment)
    head, generation = yield operations.Read(key, records.Head)
    if head.token > token:
      raise errors.FencedError("taken over")
    return syncer_protocol.Held(head, generation)

  return fence


def _head_before_payload(right: Any) -> Any:
  def close_round(held: Any, merge: Any, head_of: Any) -> Any:
    done = yield from syncer_protocol.commit(held, head_of(None))
    yield merge
    return done

  return close_round


def _record_before_payload(right: Any) -> Any:
  def publish(record: records.Contribution, content: Any) -> Any:
    yield operations.Write(keys.contribution_key(record.key), record)
    yield operations.WritePayload(record.payload, content)

  return publish


def _abandoned_without_clock(right: Any) -> Any:
  def abandoned(heads: Any, pinned: Any = None) -> Any:
    payloads = yield operations.Names("payloads")
    names = yield operations.Names("contributions")
    for name in sorted(set(payloads) - set(names)):
      yield operations.DeleteTree(keys.payload_prefix(name))

  return abandoned


def _expired_by_foreign_clock(right: Any) -> Any:
  def expired(self: Any, held: records.Lease | None, now: float) -> bool:
    if held is None or not held.owner:
      return True
    # The beat as the time of the last renewal, on the owner's clock.
    return bool(now - held.beat * 0.5 >= self._ttl_secs)

  return expired


def _counters_kept(right: Any) -> Any:
  def adopt(self: Any, fragment: int, version: int, merged_step: int) -> Any:
    first_step = self._fragments[fragment].first_step
    actions = right(self, fragment, version, merged_step)
    self._fragments[fragment].first_step = first_step
    return actions

  return adopt


def _admit_without_clock(right: Any) -> Any:
  def admit(self: Any, new: Any, now: float) -> Any:
    state = self._fragments[new.fragment]
    clock, state.clock = state.clock, {}
    try:
      return right(self, new, now)
    finally:
      state.clock = clock

  return admit


def _unlimited_staleness(right: Any) -> Any:
  def settings(schedule: Any) -> Any:
    found = right(schedule)
    return dataclasses.replace(found, max_staleness=found.max_staleness + 1)

  return settings


def _not_muted(right: Any) -> Any:
  def decide(saved: Any, known: comeback.Known, sync_every: int) -> Any:
    back = right(saved, known, sync_every)
    origins = tuple(
      o._replace(first_step=min(o.first_step, back.start)) for o in back.origins
    )
    return back._replace(origins=origins)

  return decide


def _resume_from_furthest(right: Any) -> Any:
  def decide(saved: Any, known: comeback.Known, sync_every: int) -> Any:
    furthest = max(known.published)
    return right(
      saved,
      known._replace(published=(furthest,) * len(known.published)),
      sync_every,
    )

  return decide


def _resume_from_saved(right: Any) -> Any:
  def decide(saved: Any, known: comeback.Known, sync_every: int) -> Any:
    if saved is None:
      return right(saved, known, sync_every)
    behind = known._replace(published=tuple(saved.published))
    return right(saved, behind, sync_every)

  return decide


def _own_optimizer(right: Any) -> Any:
  def decide(*args: Any) -> Any:
    return right(*args)._replace(optimizer="own")

  return decide


def _any_epoch(right: Any) -> Any:
  def admit(self: Any, new: Any, now: float) -> Any:
    epoch, self._epoch = self._epoch, new.epoch
    try:
      return right(self, new, now)
    finally:
      self._epoch = epoch

  return admit


def _cut_after_admission(right: Any) -> Any:
  def arrived(self: Any, contributions: Any, now: float) -> Any:
    cut = self._cut
    newest = max((c.cut for c in contributions), default=0)
    self._cut = max(cut, newest)  # as if it had taken part
    actions = right(self, contributions, now)
    self._cut = cut
    return [*actions, *self._take_part(newest)]

  return arrived


def _lost_head_made_anew(right: Any) -> Any:
  def fence(fragment: int, token: int) -> Any:
    try:
      return (yield from right(fragment, token))
    except LookupError:
      key, payload = keys.head_key(fragment), f"globals/{fragment:04d}/"
      first = f"{payload}{0:09d}.i0.1"
      head = records.Head(fragment, 0, token, first, [[1]], {}, {})
      yield operations.CompareAndSet(key, head, 0)
      return (yield from right(fragment, token))

  return fence


def _expired_by_number(right: Any) -> Any:
  def expired(looks: Any, payloads: Any) -> Any:
    return right(looks, {})

  return expired


def _unstamped(right: Any) -> Any:
  def publish(self: Any, fragment: int, trigger: Any) -> Any:
    action = right(self, fragment, trigger)
    return dataclasses.replace(action, cut=0)

  return publish


def _superseded_lost(right: Any) -> Any:
  def evaluate(self: Any, fragment: int, now: float) -> Any:
    actions = right(self, fragment, now)
    only = all(
      isinstance(a, syncer_core.Discard) and a.reason == "superseded"
      for a in actions
    )
    return [] if only else actions

  return evaluate


def _survey_by_name(right: Any) -> Any:
  def survey(island: int, num_fragments: int) -> Any:
    names = yield operations.Names("contributions")
    known = yield from right(island, num_fragments)
    published = list(known.published)
    for name in names:
      fragment, owner, _, step = map(int, name.split("."))
      if owner == island:
        published[fragment] = max(published[fragment], step)
    return known._replace(published=tuple(published))

  return survey


def _timed_before_look(right: Any) -> Any:
  def acquire(key: str, owner: str, watch: Any, clock: Any) -> Any:
    now = clock()
    return right(key, owner, watch, lambda: now)

  return acquire


def _token_from_lease(right: Any) -> Any:
  def draw(key: str, above: int) -> Any:
    yield from ()
    return above + 1

  return draw


def _heads_without_tokens(right: Any) -> Any:
  def newest() -> Any:
    yield from ()
    return 0

  return newest


def _told_once(right: Any) -> Any:
  def tell(self: Any) -> Any:
    try:
      yield from right(self)
    except OSError:
      self.untold.clear()
      raise

  return tell


def _constant(value: Any) -> Callable[[Any], Any]:
  return lambda right: lambda *args, **kwargs: value


PLANTS: dict[str, Plant] = {
  "commit_without_fence": Plant(
    "a commit reads the head's generation anew before its compare-and-set",
    syncer_protocol,
    "commit",
    _commit_without_fence,
  ),
  "commit_result_ignored": Plant(
    "a compare-and-set that failed counts as a commit",
    syncer_protocol,
    "commit",
    _commit_ignores_result,
  ),
  "commit_tried_again": Plant(
    "a commit whose fate is unknown is made once more",
    syncer_protocol,
    "commit",
    _commit_tried_again,
  ),
  "token_not_raised": Plant(
    "a new leader does not raise the tokens of the heads",
    syncer_protocol,
    "fence",
    _fence_keeps_token,
  ),
  "head_before_payload": Plant(
    "the head moves before the payload it points to is written",
    syncer_protocol,
    "close_round",
    _head_before_payload,
  ),
  "record_before_payload": Plant(
    "the commit record is written before its payload",
    island_protocol,
    "publish",
    _record_before_payload,
  ),
  "live_payload_deleted": Plant(
    "a new leader deletes payloads whose publisher is still at work",
    syncer_protocol,
    "abandoned",
    _abandoned_without_clock,
  ),
  "base_deleted": Plant(
    "retention deletes versions that contributions still start from",
    chores,
    "versions_kept",
    _constant(0),
  ),
  "foreign_clock": Plant(
    "a lease is judged by the clock of the machine that renews it",
    lease.LeaseWatch,
    "expired",
    _expired_by_foreign_clock,
  ),
  "counters_kept": Plant(
    "an island's counters are not reset when it adopts a version",
    island_core.IslandCore,
    "_adopt",
    _counters_kept,
  ),
  "merged_twice": Plant(
    "the syncer does not check contributions against the vector clock",
    syncer_core.SyncerCore,
    "_admit",
    _admit_without_clock,
  ),
  "supersession_dropped": Plant(
    "overlapping contributions of one island are all merged",
    syncer_core.SyncerCore,
    "_supersede",
    _constant([]),
  ),
  "grace_over_slack": Plant(
    "the grace window is longer than the slack",
    grace.AdaptiveGrace,
    "grace_secs",
    lambda right: lambda self, facts: facts.step_secs,
  ),
  "staleness_off_by_one": Plant(
    "contributions one version beyond the staleness limit are merged",
    world,
    "core_settings",
    _unlimited_staleness,
  ),
  "quorum_of_contributions": Plant(
    "the quorum counts contributions in place of islands",
    syncer_core.SyncerCore,
    "_present",
    lambda right: lambda self, state: set(state.waiting),
  ),
  "muted_publishes": Plant(
    "a restarted island publishes rows again that it published before",
    comeback,
    "decide",
    _not_muted,
  ),
  "rows_skipped": Plant(
    "a restarted island goes on after the furthest row of any fragment",
    comeback,
    "decide",
    _resume_from_furthest,
  ),
  "older_than_clock": Plant(
    "a restarted island believes its saved state, not the vector clock",
    comeback,
    "decide",
    _resume_from_saved,
  ),
  "optimizer_stale": Plant(
    "an island takes its own saved optimizer, however old",
    comeback,
    "decide",
    _own_optimizer,
  ),
  "peer_behind": Plant(
    "an island takes the optimizer of a peer older than the vector clock",
    peer_protocol,
    "can_serve",
    _constant(True),
  ),
  "saved_too_early": Plant(
    "a saved state counts before what it takes for published is",
    island_role.Island,
    "flushed",
    _constant(True),
  ),
  "epoch_ignored": Plant(
    "a contribution from before a return to a cut is taken in",
    syncer_core.SyncerCore,
    "_admit",
    _any_epoch,
  ),
  "cut_taken_late": Plant(
    "the syncer takes its part after what made it aware of the cut",
    syncer_core.SyncerCore,
    "_arrived",
    _cut_after_admission,
  ),
  "cut_unstamped": Plant(
    "contributions do not say which cut their island has taken part in",
    island_core.IslandCore,
    "_publish",
    _unstamped,
  ),
  "cut_without_channel": Plant(
    "what was on its way is left out of a cut",
    cutting,
    "_is_of_the_channel",
    _constant(False),
  ),
  "cut_unpinned": Plant(
    "payloads that a cut points to are deleted once they are merged",
    cutting.CutKeeper,
    "is_pinned",
    _constant(False),
  ),
  "cut_unverified": Plant(
    "a restore does not read what the cut points to",
    rollback.Restorer,
    "_check",
    _constant(""),
  ),
  "cuts_all_damaged": Plant(
    "of old cuts none is kept that lacks a version the newest has",
    cuts,
    "expired",
    _expired_by_number,
  ),
  "lost_head_made_anew": Plant(
    "a new leader makes a fragment anew whose head is lost",
    syncer_protocol,
    "fence",
    _lost_head_made_anew,
  ),
  "superseded_lost": Plant(
    "what is superseded while no round is open is not deleted",
    syncer_core.SyncerCore,
    "_evaluate",
    _superseded_lost,
  ),
  "survey_by_name": Plant(
    "a restarted island counts records from before a return to a cut",
    island_protocol,
    "survey",
    _survey_by_name,
  ),
  "timed_before_look": Plant(
    "a lease is judged by the time before a look that took long",
    lease,
    "acquire",
    _timed_before_look,
  ),
  "token_unfenced": Plant(
    "a token that was given out and is in no head yet is given out again",
    lease,
    "draw",
    _token_from_lease,
  ),
  "token_restarts": Plant(
    "after a lost or damaged lease tokens start from 1 again",
    lease,
    "_newest_of_heads",
    _heads_without_tokens,
  ),
  "lease_stays_damaged": Plant(
    "nobody takes a lease that nobody can read",
    lease.LeaseWatch,
    "unreadable",
    _constant(False),
  ),
  "told_once": Plant(
    "a verdict that could not be written is not written again",
    chores.Chores,
    "tell",
    _told_once,
  ),
  "verdict_not_repeated": Plant(
    "an island does not hear of a verdict that the store lost",
    chores.Chores,
    "remind",
    _constant(()),
  ),
  "offence_not_told": Plant(
    "an island whose values are refused does not hear of it",
    syncer_core.SyncerCore,
    "_offence",
    _constant([]),
  ),
  "litter_forgotten": Plant(
    "a contribution that could not be deleted is never deleted",
    chores.Chores,
    "tidy",
    _constant(()),
  ),
}

# What would make a planted bug harmless, and has to be taken out with it.
_DEFENCES: dict[str, tuple[Plant, ...]] = {
  "told_once": (
    Plant("nobody is reminded", chores.Chores, "remind", _constant(())),
  ),
  "token_restarts": (
    Plant("nobody knows tokens drawn", lease, "draw", _token_from_lease),
  ),
  "saved_too_early": (
    Plant(
      "a hole before what was published goes unnoticed",
      comeback,
      "_has_hole",
      _constant(False),
    ),
  ),
}
