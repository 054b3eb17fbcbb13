"""What becomes of contributions, by their values.

Half of the checker: what was published, found, refused, merged and given up,
and whether each row an island has trained is accounted for. See `invariants`.
"""

from __future__ import annotations

import collections
from typing import Any

from diloco.snapshots import keys, operations, records
from diloco.syncer import protocol
from diloco.verification import (
  arithmetic,
  rare,
  refusals,
  row_ledger,
  values,
)
from diloco.verification import kernel as kernel_lib

Violation = kernel_lib.Violation


class Fates:
  """Contributions of one world, and the rows in them."""

  def __init__(self, world: Any):
    self._world = world
    self._schedule = world.schedule
    self._store = world.store
    self._kernel: kernel_lib.Kernel = world.kernel
    self.ledger = row_ledger.RowLedger(for_good=not self._schedule.cuts)
    # fragment -> contents of its versions, by number
    self.versions: list[list[values.Version]] = []
    self._epoch = 0  # of the head that was set back last
    self.sent: dict[str, values.Delta] = {}  # by name of its commit record
    self._handed: dict[tuple[int, int, int, int], values.Delta] = {}
    self._keepers: dict[Any, refusals.Keeper] = {}  # by life of a syncer
    self._refused: dict[str, str] = {}  # by the merge itself
    self._tried: set[str] = set()  # payloads of merges
    self._strays: set[str] = set()  # those that may come back once deleted
    self._spoken: dict[tuple[int, int], int] = {}  # last step handed over
    self.moment = 0  # grows with what is sent, committed or cut
    self.seen: dict[str, int] = collections.defaultdict(int)
    self._real = arithmetic.is_real(self._schedule.seed)

  def contribution_written(self, key: str, record: Any, life: Any) -> None:
    """A commit record is in the store; it must prove something."""
    name = key[14:]  # after "contributions/"
    if name not in self.sent:
      content = self._handed[
        record.island, record.incarnation, record.fragment, record.step
      ]
      self.sent[name] = content
      self.ledger.left(content)
      if (
        record.epoch == self._epoch  # else nobody merges it
        and record.payload not in self._store.payloads
        and record.step > self._merged(record.fragment, record.island)
      ):
        raise Violation(f"the record {name} was written without its payload")
    elif self.sent[name].fate != "merged":
      self._sent_again(self.sent[name])
    if record.epoch >= self._epoch:
      self.ledger.arrived(name, record)
    self._world.nudge_syncers()

  def _sent_again(self, content: values.Delta) -> None:
    """A record is there once more: it may be judged otherwise now."""
    if content.fate:
      self.seen["sent_again"] += 1
      content.judged, content.fate = (content.fate, content.fate_of), ""
      for span in content.spans:
        self.ledger.take_back(content.island, content.fragment, span)

  def contribution_deleted(self, name: str, record: Any, life: Any) -> None:
    """A commit record was deleted; it must have been merged, or given up."""
    self.ledger.gone(name, record)
    world = self._world
    if record.epoch < self._epoch or (
      life.role in world.restorers and not world.restored
    ):
      return
    content = self.sent[name]
    if content.fate and content.fate_of[0] == record.epoch:
      return
    island, fragment = record.island, record.fragment
    if content.judged and (
      not life.alive or content.judged[1][1] == life.shell.token
    ):
      # Now the deletion takes effect of whoever judged it first: it has died,
      # or could not delete all of it then.
      content.fate, content.fate_of = content.judged
      span = record.first_step, record.step
      return self.ledger.name(island, fragment, *span, content.fate)
    merged = self.versions[fragment][-1].rows.get(island, ())
    settled = values.union(self.ledger.settled(island, fragment, merged))
    if not any(f <= record.first_step and record.step <= e for f, e in settled):
      raise Violation(
        f"{life.role.name} deleted the record {name}, which was neither merged"
        " nor given up"
      )

  def record_lost(self, record: Any) -> None:
    """The store broke its promise; nobody in the run can know."""
    if type(record) is records.Contribution:
      self.ledger.gone(record.key, record)
      self._give_up(record, "lost_by_store", None)

  def _merged(self, fragment: int, island: int) -> int:
    spans = self.versions[fragment][-1].rows.get(island)
    return spans[-1][1] if spans else 0

  def merge(
    self, operation: operations.Merge, contents: list[Any], life: Any
  ) -> values.Version:
    """Merges values, as the arithmetic would; refuses what it would."""
    head = operation.head
    self._check_left(operation)
    parent = self._store.version_of(head)
    pairs = list(zip(operation.contributions, contents, strict=True))
    refused = {}
    for record, content in pairs:
      if type(content) is not values.Delta:
        refused[record.key] = f"corrupt: {content}"
      elif not content.finite:
        refused[record.key] = "not_finite"
    if refused:
      self._refused.update(refused)
      raise protocol.RefusedError(refused)
    keeper = self._keepers[life]
    rows = dict(parent.rows)
    staleness: list[int] = []
    for record, content in pairs:
      staleness.append(self._check_merged(record, content, parent, head.epoch))
      if reason := keeper.refusals.get(record.key):
        raise Violation(f"{record.key} is merged although it is {reason}")
      island = record.island
      try:
        rows[island] = values.append(rows.get(island, ()), content.spans)
      except ValueError as error:
        raise Violation(
          f"{error} of island {island} are merged twice into version"
          f" {head.version + 1} of fragment {head.fragment}"
        ) from None
    added = tuple([content for _, content in pairs])
    merge = arithmetic.really_merged if self._real else arithmetic.merged
    theta = merge(parent.theta, added, operation.weights, self._schedule.merge)
    version = values.Version(
      head.fragment,
      parent.number + 1,
      rows,
      parent,
      added,
      theta,
      tuple(staleness),
    )
    draining = self._world.draining or self._world.ending is not None
    any_opens = draining or self._schedule.own_answers
    if 0 not in staleness and not any_opens:
      raise Violation(
        f"version {version.number} of fragment {head.fragment} has no"
        " contribution that starts from the one before"
      )
    quorum = len({content.island for content in added})
    if quorum < self._schedule.quorum:
      raise Violation(
        f"version {version.number} of fragment {head.fragment} has"
        f" {quorum} islands, the quorum is {self._schedule.quorum}"
      )
    return version

  def _check_left(self, operation: operations.Merge) -> None:
    """What the same leader's tries before this one have left behind."""
    if operation.payload in self._tried:
      self._strays.add(operation.payload)  # its writes are delivered again
      return
    self._tried.add(operation.payload)
    folder, _, name = operation.payload.rpartition("/")
    writer = name.split(".")[1]
    for other in self._store.directories[folder]:
      left = self._store.payloads.get(f"{folder}/{other}")
      if left is None or left.committed or other.split(".")[1] != writer:
        continue
      if f"{folder}/{other}" not in self._strays:
        raise Violation(
          f"a merge of fragment {operation.head.fragment} failed and left"
          f" {other}, and its leader begins another"
        )

  def _check_merged(
    self,
    record: Any,
    content: values.Delta,
    parent: values.Version,
    epoch: int,
  ) -> int:
    """Checks what is merged; gives how many merges it is behind."""
    if content.spans != ((record.first_step, record.step),):
      raise Violation(
        f"{record.key} says steps ({record.first_step}, {record.step}], its"
        f" values hold {list(content.spans)}"
      )
    if record.epoch != epoch:
      raise Violation(
        f"{record.key} is of epoch {record.epoch} and merged in {epoch}"
      )
    staleness = parent.number - record.base_version
    if record.epoch != content.epoch:
      pass  # published before a roll-back, which renumbered its base
    elif content.base.number != record.base_version:
      raise Violation(
        f"{record.key} says version {record.base_version}, its values start"
        f" from {content.base.number}"
      )
    if not 0 <= staleness <= self._schedule.max_staleness:
      raise Violation(
        f"{record.key} is {staleness} versions behind, at most"
        f" {self._schedule.max_staleness} are allowed"
      )
    behind = parent.behind(content.base, self._schedule.max_staleness)
    if behind != staleness:
      raise Violation(
        f"{record.key} says it is {staleness} versions behind, it is {behind}"
      )
    if not content.base.committed:
      raise Violation(f"{record.key} starts from a version never committed")
    return behind

  def _check_values(self, new: records.Head, content: values.Version) -> None:
    """A version must be what its contributions make of the one before."""
    parent = content.parent
    assert parent is not None
    weights = arithmetic.expected_weights(
      content.added, content.staleness, self._schedule.seed
    )
    theta = arithmetic.merged(
      parent.theta, content.added, weights, self._schedule.merge
    )
    if not arithmetic.is_close(content.theta, theta, parent.theta, self._real):
      raise Violation(
        f"version {new.version} of fragment {new.fragment} is {content.theta},"
        f" its contributions make {theta}"
      )
    for sent in content.added:
      decided = (self._epoch, new.token)
      if sent.fate and sent.fate_of == decided:
        raise Violation(f"{sent} were merged after they were {sent.fate}")
      if sent.fate and sent.fate_of[0] == self._epoch:
        # By a leader before this one, who did not live to delete it.
        self.seen["merged_by_a_successor"] += 1
        for span in sent.spans:
          self.ledger.take_back(sent.island, sent.fragment, span)
      sent.fate, sent.fate_of = "merged", decided

  def arrived(self, syncer: Any, found: Any) -> None:
    """A leader has found commit records."""
    keeper, now = self._keepers[syncer.life], self._kernel.clock(syncer.life)
    for record in found:
      rare.look(self._world, "arrival", record)
      keeper.arrived(record, self.sent[record.key], now)
    if keeper.gave_in:
      keeper.gave_in = False
      self.seen["gate_gave_in"] += 1

  def rejected(self, syncer: Any, name: str) -> None:
    """A commit record cannot be read; only its name is known."""
    key = keys.contribution_key(name)
    if key not in self._store.ever_damaged:
      raise Violation(f"the record {name} was never damaged")
    self.seen["rejected"] += 1
    record = self._store.peek(key)
    if record is not None:  # or another leader has given it up, and deleted it
      self._give_up(record, "corrupt_record", syncer)

  def discarded(self, syncer: Any, record: Any, reason: str) -> None:
    """A leader says that a contribution will never be merged, and why."""
    kind = reason.partition(":")[0]
    self.seen[kind] += 1
    if self._kernel.trace is not None:
      self._kernel.log("", f"{record.key} is discarded: {reason}")
    if why := self._why_untrue(syncer, record, kind):
      raise Violation(f"{record.key} was discarded as {kind}, but {why}")
    self._keepers[syncer.life].discarded(record.key)
    self._give_up(record, kind, syncer)

  def _why_untrue(self, syncer: Any, record: Any, kind: str) -> str:
    """Why a discard's reason cannot be true; empty if it can."""
    key = record.key
    if kind == "before_restore":
      return "" if record.epoch < self._epoch else "it is of this epoch"
    if kind in ("suspended", "norm_outlier"):
      expected = self._keepers[syncer.life].refusals.get(key)
      return "" if expected == kind else "by its contents it is not"
    if kind == "corrupt":
      return "" if key in self._refused else "it could be read"
    return refusals.why_untrue(
      kind,
      record,
      self.sent[key],
      self.versions[record.fragment][-1],
      self._schedule.max_staleness,
      self.ledger,
    )

  def _give_up(self, record: Any, kind: str, syncer: Any) -> None:
    """Rows are given up, unless they have been merged meanwhile."""
    content = self.sent[record.key]
    content.discarded = True
    token = syncer.token if syncer else 0
    if content.fate == "merged" and content.fate_of[0] == self._epoch:
      keeper = self._keepers.get(syncer.life) if syncer else None
      if (
        keeper
        # The name of a damaged record does not tell its rows, and one of before
        # a restore is not the one that was put back and merged.
        and kind not in ("corrupt_record", "before_restore")
        and keeper.heads[record.fragment] is self.versions[record.fragment][-1]
      ):
        raise Violation(f"{record.key} is merged, and was discarded as {kind}")
      self.seen["discarded_after_its_merge"] += 1
      return  # by a leader that does not know of its own commit, or of another
    content.fate, content.fate_of = kind, (self._epoch, token)
    if kind != "superseded":  # its rows are in what supersedes it
      self.ledger.name(
        record.island, record.fragment, record.first_step, record.step, kind
      )

  def forgotten(self, syncer: Any, record: Any) -> None:
    """A record is left of what was merged already."""
    self.seen["forgotten"] += 1
    rows = self.versions[record.fragment][-1].rows.get(record.island, ())
    if not any(
      first <= record.first_step and record.step <= last for first, last in rows
    ):
      raise Violation(
        f"{record.key} is forgotten, and no version has its rows"
        f" ({record.first_step}, {record.step}]"
      )

  def publishing(self, island: Any, content: values.Delta) -> None:
    """An island is about to publish; its base must not have the rows yet."""
    first_step, step = content.spans[0]
    fragment = content.fragment
    rows = content.base.rows.get(island.index)
    if rows and rows[-1][1] > first_step:
      raise Violation(
        f"island {island.index} publishes rows from {first_step + 1}"
        f" of fragment {fragment}, its base has them up to {rows[-1][1]}"
      )
    self.moment = content.sent = self.moment + 1
    self._handed[content.island, content.incarnation, fragment, step] = content
    self._spoken[island.index, fragment] = step
    self.ledger.handed_over(content)

  def dropped(self, island: Any, action: Any, reason: str) -> None:
    """A publication never left its island; a newer one is to follow."""
    self.seen[f"dropped_{reason}"] += 1
    content = self._handed[
      island.index, island.life.incarnation, action.fragment, action.step
    ]
    newer = self.ledger.newer(content)
    if newer is None:
      raise Violation(
        f"{content} were dropped as {reason}, and nothing newer is to follow"
      )
    self.ledger.left(content)
    if newer.spans[0][0] > content.spans[0][0]:
      self.ledger.name(
        island.index, action.fragment, action.first_step, action.step, reason
      )
    self.balance(island, action.fragment)

  def adopted(
    self, island: Any, action: Any, fetched: Any, held: values.Fragment
  ) -> None:
    """An island is about to swap a version in."""
    fragment, content = action.fragment, fetched.content
    versions = self.versions[fragment]
    number = action.version
    where = f"island {island.index} adopted version {number} of {fragment}"
    if number >= len(versions) or versions[number] is not content:
      raise Violation(f"{where}, which was never committed")
    if number <= held.anchor.number and not action.resync:
      raise Violation(f"{where} after version {held.anchor.number}")
    if action.muted_until:
      self.seen["muted"] += 1
    rare.look(self._world, "adoption", (island, action, held))
    if self._kernel.trace is not None:
      self._kernel.log(island.life.role.name, f"{action}")
    spoken = self._spoken.pop((island.index, fragment), 0)
    if action.lost_from < action.lost_to:
      self._check_lost(island, action, content, held, spoken)
      self.ledger.name(
        island.index, fragment, action.lost_from, action.lost_to, "overwritten"
      )

  def _check_lost(
    self,
    island: Any,
    action: Any,
    content: values.Version,
    held: values.Fragment,
    spoken: int,
  ) -> None:
    """What is given up must have been there, and be nowhere else.

    That no more than this is lost is for `balance` to say.
    """
    index, fragment = island.index, action.fragment
    merged = content.rows.get(index, ())
    kept = held.held_from
    if merged and merged[-1][1] > kept:
      kept = merged[-1][1]  # what else was published overlaps that
    else:
      kept = max(kept, spoken)
    if action.lost_from < kept or action.lost_to > island.core.step:
      raise Violation(
        f"island {index} says that rows {action.lost_from + 1} to"
        f" {action.lost_to} of fragment {fragment} are overwritten; of what it"
        f" held up to {island.core.step} only rows after {kept} were in no"
        " publication"
      )

  def balance(self, island: Any, fragment: int) -> None:
    """Each row that a living island has trained must be accounted for."""
    held = island.fragments[fragment]
    step = island.core.step
    index = island.index
    merged = self.versions[fragment][-1].rows.get(index, ())
    lost = self.ledger.unaccounted(
      index, fragment, merged, (held.held_from, step), step
    )
    if lost is not None:
      raise Violation(
        f"rows {lost[0] + 1} to {lost[1]} of island {index} are in no version"
        f" of fragment {fragment}, and nobody says why"
      )
