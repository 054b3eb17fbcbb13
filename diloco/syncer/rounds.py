"""What the core decides is done here: merges, refusals, verdicts, the board.

The part of the syncer's shell that changes the store. It decides nothing: the
order of operations is in `diloco.syncer.protocol` and `diloco.syncer.chores`,
whom to merge and whom to refuse in `diloco.syncer.core`.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from diloco import crash, errors
from diloco.snapshots import keys, records, store
from diloco.syncer import chores as chores_lib
from diloco.syncer import committer as committer_lib
from diloco.syncer import core, cutting, weighting
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)


class Rounds:
  """Does the core's actions for one leadership."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    decisions: core.SyncerCore,
    committer: committer_lib.Committer,
    weights: weighting.Weighting,
    cuts: cutting.CutKeeper,
    chores: chores_lib.Chores,
    tape: recorder.Recorder,
  ):
    """Does nothing yet.

    Args:
      snapshots: the store.
      decisions: the core whose actions are done.
      committer: holds the heads.
      weights: of contributions.
      cuts: takes this syncer's part in cuts.
      chores: what there is to tell and to delete.
      tape: where decisions go.
    """
    self._store = snapshots
    self._core = decisions
    self._committer = committer
    self._weighting = weights
    self._cuts = cuts
    self._chores = chores
    self._tape = tape
    self._told: dict[int, str] = {}  # of fragments that stand still, and why
    self.num_merges = 0

  def handle(
    self, event: core.Event, check: Callable[[], None] = lambda: None
  ) -> None:
    """Tells the core, and does what it answers.

    All of it is done, whatever the store makes of some of it: a merge that
    fails is offered again by the core, the rest done by `Chores.tidy`.

    Args:
      event: what was seen.
      check: called before each action and each commit; raises `FencedError`
        when another leads.

    Raises:
      OSError: the store failed in some of it.
    """
    self._do_all(self._core.handle(event, time.monotonic()), check)

  def _do_all(
    self, actions: Sequence[core.Action], check: Callable[[], None]
  ) -> None:
    failure: OSError | None = None
    for action in actions:
      try:
        self._do(action, check)
      except OSError as error:
        failure = error
    if failure is not None:
      raise failure

  def _do(self, action: core.Action, check: Callable[[], None]) -> None:
    check()
    match action:
      case core.Open():
        self._tape.record(events.ROUND_OPENED, **dataclasses.asdict(action))
        self.publish_board()
      case core.Close():
        self._close_round(action, check)
      case core.Discard():
        self._discard(action)
      case core.Quarantine():
        self._quarantine(action)
      case core.Remind(island):
        self._store.perform(self._chores.remind(island))
      case core.Cut(number):
        self._cuts.take_part(number, self._committer.heads)
      case core.Forget(contribution):
        self._store.perform(self._chores.delete(contribution.key))

  def _close_round(self, close: core.Close, check: Callable[[], None]) -> None:
    started = time.monotonic()
    weights = {
      chosen.contribution.key: self._weight(chosen) for chosen in close.chosen
    }

    def facts_of(merged: committer_lib.Merged) -> dict[str, Any]:
      secs = time.monotonic() - started
      # Heads keep the facts of one version: those of the last are on the tape.
      self._tape.flush()
      check()
      return _merged_event(close, weights, merged, secs, self._committer.token)

    try:
      facts = self._committer.close_round(close, weights, facts_of)
    except (OSError, errors.CorruptSnapshotError) as error:
      self._tell_standstills()
      logger.warning("merge_failed fragment=%d error=%s", close.fragment, error)
      self.handle(core.MergeFailed(close.fragment), check)
      return
    except committer_lib.RefusedError as refused:
      self.handle(core.MergeRefused(close.fragment, refused.reasons), check)
      return
    crash.point("before_tape")
    self._tape.record(events.MERGED, **facts)
    self.num_merges += 1
    later = self._core.handle(core.Committed(close.fragment), time.monotonic())
    try:
      self._clear_up(close)
    finally:
      self._do_all(later, check)

  @property
  def damaged(self) -> list[int]:
    """Fragments that stand still: their newest version cannot be read."""
    return sorted(self._committer.standing)

  def look_after_heads(self) -> None:
    """Puts heads back that the store has spoiled; says what it cannot mend.

    Raises:
      OSError: the store failed.
      FencedError: another syncer leads.
    """
    for head in self._committer.look_after_heads():
      self._tape.record(
        events.HEAD_HEALED, fragment=head.fragment, version=head.version
      )
    self._tell_standstills()

  def _tell_standstills(self) -> None:
    """Says once of each fragment that it stands still."""
    standing = self._committer.standing
    for fragment in standing.keys() - self._told.keys():
      self._tape.record(
        events.GLOBAL_DAMAGED,
        fragment=fragment,
        version=self._committer.heads[fragment].version,
        reason=standing[fragment],
      )
    self._told = dict(standing)

  def _clear_up(self, close: core.Close) -> None:
    head = self._committer.heads[close.fragment]
    merged = [chosen.contribution.key for chosen in close.chosen]
    self._store.perform(self._chores.clear_up(head, self._board(), merged))

  def _weight(self, chosen: core.Chosen) -> float:
    record = _record(chosen.contribution)
    return self._weighting.weight(
      record.c_tokens, record.c_steps, chosen.staleness
    )

  def _discard(self, action: core.Discard) -> None:
    record = _record(action.contribution)
    self._tape.record(
      events.DISCARDED,
      fragment=record.fragment,
      key=record.key,
      island=record.island,
      island_incarnation=record.incarnation,
      first_step=record.first_step,
      step=record.step,
      c_tokens=record.c_tokens,
      reason=action.reason,
      arrived_at=action.arrived_at,
    )
    self._store.perform(self._chores.delete(record.key))

  def _quarantine(self, action: core.Quarantine) -> None:
    self._tape.record(
      events.QUARANTINED,
      island=action.island,
      island_incarnation=action.incarnation,
      fragment=action.fragment,
      reason=action.reason,
      offences=action.offences,
      suspended_secs=action.suspended_secs,
    )
    self._store.perform(self._chores.accuse(action))

  def reject_record(self, name: str, why: str) -> None:
    """A record that cannot be trusted; its name still says whose it was."""
    logger.warning("record_rejected name=%s why=%s", name, why)
    fragment, island, incarnation, step = map(int, name.split("."))
    self._tape.record(
      events.DISCARDED,
      fragment=fragment,
      key=name,
      island=island,
      island_incarnation=incarnation,
      first_step=step,
      step=step,
      c_tokens=0,
      reason="corrupt_record",
    )
    self._store.perform(self._chores.delete(name))

  def publish_board(self) -> None:
    """Tells islands where things stand: a hint."""
    self._store.write(keys.BOARD, self._board())

  def _board(self) -> records.Board:
    rounds = {str(p): m for p, m in self._core.open_rounds.items()}
    return records.Board(self._core.versions, rounds)


def _record(contribution: core.Contribution) -> records.Contribution:
  assert isinstance(contribution, records.Contribution)
  return contribution


def _merged_event(
  close: core.Close,
  weights: dict[str, float],
  merged: committer_lib.Merged,
  merge_secs: float,
  token: int,
) -> dict[str, Any]:
  """What the tape says of a version."""
  return {
    "fragment": close.fragment,
    "version": close.version,
    "contributions": _contributions(close.chosen, weights),
    "token": token,
    "absent": list(close.absent),
    "opened_at": close.opened_at,
    "closed_at": close.closed_at,
    "quorum_secs": close.quorum_secs,
    "grace_secs": close.grace_secs,
    "grace_spent_secs": close.grace_spent_secs,
    "queued_secs": close.queued_secs,
    "grace_facts": dataclasses.asdict(close.facts),
    "merge_secs": merge_secs,
    "outer_grad_norm": merged.outer_grad_norm,
    "digest": merged.digest,
    "bytes": merged.num_bytes,
  }


def _contributions(
  chosen: Sequence[core.Chosen], weights: dict[str, float]
) -> list[dict[str, Any]]:
  found = []
  for one in chosen:
    record = _record(one.contribution)
    found.append(
      {
        "key": record.key,
        "island": record.island,
        "incarnation": record.incarnation,
        "first_step": record.first_step,
        "step": record.step,
        "c_tokens": record.c_tokens,
        "staleness": one.staleness,
        "weight": weights[record.key],
        "waited_secs": one.waited_secs,
        "arrived_at": one.arrived_at,
        "norm": math.hypot(*record.norms),
      }
    )
  return found
