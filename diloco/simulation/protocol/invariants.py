"""What must hold in the simulated world, checked as things happen.

The checker sees the store and the values in it, not the bookkeeping of the
cores. It raises `Violation` at the event that broke a rule.
"""

from __future__ import annotations

import collections
from typing import Any

from diloco import errors
from diloco.simulation.protocol import (
  arithmetic,
  cut_judge,
  rare,
  refusals,
  rollback,
  row_ledger,
  values,
)
from diloco.simulation.protocol import kernel as kernel_lib
from diloco.snapshots import keys, operations, records
from diloco.syncer import protocol

Violation = kernel_lib.Violation
_EPSILON = 1e-6


class Checker:
  """Observer of one world."""

  def __init__(self, world: Any):
    self._world = world
    self._schedule = world.schedule
    self._store = world.store
    self._kernel: kernel_lib.Kernel = world.kernel
    self.ledger = row_ledger.RowLedger(for_good=not self._schedule.cuts)
    self.rounds = 0
    self.wanted = 0  # rounds after which the kernel is to pause
    self.last_commit = 0.0
    self.leading_keeper: refusals.Keeper | None = None
    # fragment -> contents of its versions, by number
    self.versions: list[list[values.Version]] = []
    self._shown: list[int] = []  # versions on the board
    self._epoch = 0  # of the head that was set back last
    self._leading = 0  # newest token whose owner has fenced all heads
    self._lease_moved = 0.0
    self._committers: dict[int, Any] = {}  # token -> life that acquired it
    self.sent: dict[str, values.Delta] = {}  # by name of its commit record
    self._handed: dict[tuple[int, int, int, int], values.Delta] = {}
    self._keepers: dict[Any, refusals.Keeper] = {}  # by life of a syncer
    self._refused: dict[str, str] = {}  # by the merge itself
    self._tried: set[str] = set()  # payloads of merges
    self._strays: set[str] = set()  # those that may come back once deleted
    self._spoken: dict[tuple[int, int], int] = {}  # last step handed over
    self.moment = 0  # grows with what is sent, committed or cut
    self.cuts = cut_judge.CutJudge(self.versions, self.ledger)
    self._proven: dict[int, int] = {}  # by island that comes back, last row
    self.seen: dict[str, int] = collections.defaultdict(int)
    self._real = arithmetic.is_real(self._schedule.seed)
    # by life of a syncer: when, and the average time to commit from then on
    self._sync_secs: dict[Any, list[tuple[float, float]]] = {}
    self._spoiled: dict[int, records.Head] = {}  # heads as they were

  # The store

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
      content.fate = ""
      for span in content.spans:
        self.ledger.take_back(content.island, content.fragment, span)

  def contribution_deleted(self, name: str, record: Any, life: Any) -> None:
    """A commit record was deleted; it must have been merged, or given up."""
    self.ledger.gone(name, record)
    if record.epoch < self._epoch or life.role.name == rollback.NAME:
      return
    content = self.sent[name]
    if content.fate and content.fate_of[0] == record.epoch:
      return
    island, fragment = record.island, record.fragment
    merged = self.versions[fragment][-1].rows.get(island, ())
    settled = values.union(self.ledger.settled(island, fragment, merged))
    if not any(f <= record.first_step and record.step <= e for f, e in settled):
      raise Violation(
        f"{life.role.name} deleted the record {name}, which was neither merged"
        " nor given up"
      )

  def board_written(self, record: records.Board) -> None:
    """The board is in the store; islands will find it."""
    if record.versions != self._shown:
      self._shown = record.versions
      self._world.nudge_islands(())
    elif self._schedule.follow and record.open_rounds:
      # Of open rounds only those who may follow one want to know.
      inside = set(range(self._schedule.islands))
      for islands in record.open_rounds.values():
        inside.intersection_update(islands)
      self._world.nudge_islands(inside)

  def record_lost(self, record: Any) -> None:
    """The store broke its promise; nobody in the run can know."""
    if type(record) is records.Contribution:
      self.ledger.gone(record.key, record)
      self._give_up(record, "lost_by_store", None)

  def _merged(self, fragment: int, island: int) -> int:
    spans = self.versions[fragment][-1].rows.get(island)
    return spans[-1][1] if spans else 0

  def lease_moved(self, new: records.Lease, life: Any) -> None:
    """Tokens grow with every owner; nobody takes what is being renewed."""
    if not new.owner and new.token not in self._committers:
      self._committers[new.token] = life  # a restore deposes whoever leads
    silent_secs = self._kernel.now - self._lease_moved
    self._lease_moved = self._kernel.now
    if new.owner:
      owner = self._committers.get(new.token)
      if owner is None:
        # The observer's clock may be fast by a few percent.
        ttl_secs = self._world.lease_ttl_secs
        old = self._store.peek(keys.SYNCER_LEASE)
        held = old is not None and old.owner not in ("", new.owner)
        if held and silent_secs < 0.9 * ttl_secs:
          raise Violation(
            f"{life.role.name} took the lease {silent_secs:.2f} s after it was"
            f" renewed, its time to live is {ttl_secs} s"
          )
        if self._committers and new.token <= max(self._committers):
          raise Violation(f"token {new.token} was given out again")
        rare.look(self._world, "lease", life)
        self._committers[new.token] = life
        self.seen["leaders"] += 1
      elif owner is not life:
        raise Violation(
          f"{life.role.name} took the lease under {owner.role.name}'s token"
        )

  def head_moved(self, old: Any, new: records.Head, life: Any) -> None:
    """A head is about to move; see the module."""
    fragment = new.fragment
    versions = self.versions[fragment]
    where = f"fragment {fragment}"
    spoiled = keys.head_key(fragment) in self._store.damaged
    if old is None or old.fragment != fragment:
      old = self._spoiled[fragment]  # the store has lost or swapped it
      spoiled = True
    if self._committers.get(new.token) is not life:
      raise Violation(
        f"{life.role.name}.{life.incarnation} moved the head of {where} under"
        f" token {new.token}, which is not its own"
      )
    if new.token < old.token:
      raise Violation(
        f"the head of {where} went from token {old.token} to {new.token}"
      )
    if new.token < self._leading:
      raise Violation(
        f"the head of {where} was moved under token {new.token} after the"
        f" leader of token {self._leading} had taken over"
      )
    if new.version == old.version:
      if new.payload != old.payload or new.clock != old.clock:
        raise Violation(f"version {new.version} of {where} changed")
      self.seen["healed"] += spoiled
      return
    if new.version != old.version + 1 and new.epoch == old.epoch:
      raise Violation(
        f"{where} went from version {old.version} to {new.version}"
      )
    if new.epoch != old.epoch:
      self._set_back(old, new)
      return
    content = self._store.payloads.get(new.payload)
    if content is None:
      raise Violation(
        f"the head of {where} points to {new.payload}, which is not there"
      )
    if content.parent is not versions[-1]:
      raise Violation(
        f"version {new.version} of {where} was not made from the one before it"
      )
    self._check_clock(new, content)
    self._check_values(new, content)
    content.committed = True
    self.moment = content.moment = self.moment + 1
    versions.append(content)
    rare.look(self._world, "commit", content)
    self.rounds += 1
    if self.rounds == self.wanted:
      self._kernel.done = True
    self._liveness()
    self.last_commit = self._kernel.now

  def _check_values(self, new: records.Head, content: values.Version) -> None:
    """A version must be what its contributions make of the one before."""
    parent = content.parent
    assert parent is not None
    weights = arithmetic.expected_weights(content.added, content.staleness)
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

  def _check_clock(self, new: records.Head, content: values.Version) -> None:
    clock = new.clock
    for island, spans in content.rows.items():
      if clock.get(str(island)) != spans[-1][1]:
        raise Violation(
          f"the clock of version {new.version} of fragment {new.fragment} has"
          f" island {island} at {new.clock.get(str(island))}, its values at"
          f" {spans[-1][1]}"
        )

  def _set_back(self, old: records.Head, new: records.Head) -> None:
    """A head begins another epoch with an older payload."""
    where = f"fragment {new.fragment}"
    if new.epoch < old.epoch or new.version <= old.version:
      raise Violation(
        f"{where} was set back from version {old.version} of epoch {old.epoch}"
        f" to version {new.version} of epoch {new.epoch}"
      )
    try:
      content = self._store.version_of(new)
    except errors.CorruptSnapshotError as error:
      raise Violation(f"{where} was set back to what is not: {error}") from None
    self._check_clock(new, content)
    if new.epoch != self._epoch:
      self._epoch = new.epoch
      self.ledger.set_back(new.epoch, self._schedule.islands)
    content.committed = True
    versions = self.versions[new.fragment]
    kept: Any = versions[-1]
    while kept is not None and kept is not self._store.content(new.payload):
      kept = kept.parent
    if kept is None:
      raise Violation(
        f"{where} was set back to {new.payload}, whose timeline was given up"
      )
    # Numbers that no version of this epoch has.
    versions += [versions[-1]] * (new.version - len(versions))
    versions.append(content)
    self.last_commit = self._kernel.now

  def passed_over(self, cuts_: Any, begun: Any) -> None:
    """Cuts were found and cannot be used."""
    rare.look(self._world, "restore", begun)
    spoiled = self._world.spoiled
    for cut, why in cuts_:
      unusable = "never completed" in why or "given up" in why
      if not unusable and spoiled and spoiled in why:
        self.seen["spoiled_cuts"] += 1
      elif not unusable and not self._world.damaging:
        raise Violation(f"cut {cut} is complete and cannot be used: {why}")
      if begun:
        raise Violation(f"the restore of cut {cut} cannot be finished: {why}")

  def left_out(self, sent: Any) -> None:
    """Contributions of the cut to go back to cannot be read."""
    for record, why in sent:
      if self.sent[record.key].fate in ("", "merged"):
        if not self._world.damaging:
          raise Violation(f"nobody discarded {record.key} of a cut, and {why}")
        self._give_up(record, "corrupt", None)
      self.seen["left_out"] += 1

  def refused(self, cuts_: Any) -> None:
    """A spoiled run cannot go back: there was a cut when that happened."""
    if not self._world.damaging:
      raise Violation(f"no cut can be restored: {list(cuts_)}")
    self.seen["refused"] += 1

  def spoiled(self, fragment: int) -> None:
    """The newest version of a fragment is about to be damaged or lost."""
    self._spoiled[fragment] = self._store.peek(keys.head_key(fragment))

  def restored(self, parts: Any, facts: Any) -> None:
    """The run is set back; rows after the cut are trained again."""
    self.seen["set_back"] += 1
    self._judge_cut(parts)
    self.seen["mended"] += bool(self._world.spoiled)
    self.seen["reinjected"] += len(facts.reinjected)
    for island, part in parts.islands.items():
      # A muted fragment says nothing of the rows up to its first step again,
      # nor of those that an earlier life published late.
      steps = [
        max(part.step, first_step, head.merged_step(island))
        for head, (_, first_step, _) in zip(
          parts.heads, part.positions, strict=True
        )
      ]
      self.ledger.forget_after(island, steps)
      self._name_unlisted(parts, island, steps)

  def _name_unlisted(self, parts: Any, island: int, steps: list[int]) -> None:
    """What no listing had when its cut was taken may be gone; a known gap."""
    channel = {record.key for record in parts.contributions}
    for key in self._store.unlisted:
      content = self.sent.get(key)
      if content is None or content.island != island or key in channel:
        continue
      first_step, step = content.spans[0]
      if step <= steps[content.fragment]:
        self.seen["lost_by_listing"] += 1
        self.ledger.name(
          island, content.fragment, first_step, step, "lost_by_listing"
        )

  def part_taken(self, island: Any, cut: int) -> None:
    """An island takes its part of a cut."""
    self.moment += 1
    self.cuts.take(cut, island, self.moment)

  def cut_completed(self, parts: Any) -> None:
    """From now on the run can go back to a cut."""
    self.seen["cuts"] += 1
    self._judge_cut(parts)
    rare.look(self._world, "cut", parts)

  def _judge_cut(self, parts: Any) -> None:
    if why := self.cuts.judge(parts, self.sent, self._store.unlisted):
      raise Violation(f"cut {parts.request.cut} is not one moment: {why}")

  def inconsistent(self, cut: int, why: str) -> None:
    """All parts of a cut are there, and do not fit each other."""
    if "two syncers" in why:
      self.seen["cuts_abandoned"] += 1  # one took over between two parts
      return
    raise Violation(f"cut {cut} is not consistent: {why}")

  def payload_deleted(self, prefix: str, content: Any) -> None:
    """A payload goes; nobody may need it any more."""
    if type(content) is values.Version:
      if not content.committed:
        return
      fragment = content.fragment
      newest = self.versions[fragment][-1].number
      kept = self._schedule.max_staleness
      if content.number >= newest - kept:
        raise Violation(
          f"version {content.number} of fragment {fragment} was deleted while"
          f" {newest} is current: contributions may still start from it"
        )
      return
    if type(content) is not values.Delta:
      return
    if prefix[9:] not in self.sent:  # after "payloads/"
      self._unrecorded_deleted(prefix[9:])

  def _unrecorded_deleted(self, name: str) -> None:
    fragment, island, incarnation, step = map(int, name.split("."))
    writer = self._world.islands[island].life
    alive = writer is not None and writer.incarnation == incarnation
    if alive and step > self._merged(fragment, island):
      raise Violation(
        f"the payload {name} was deleted before its record was written, while"
        " its publisher lives"
      )

  def merge(
    self, operation: operations.Merge, contents: list[Any], life: Any
  ) -> values.Version:
    """Merges values, as the arithmetic would; refuses what it would.

    Raises:
      RefusedError: a contribution is damaged or not finite.
      CorruptSnapshotError: the version before cannot be read.
    """
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
    if 0 not in staleness and not self._world.draining:
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
    if operation.payload in self._tried:
      self._strays.add(operation.payload)  # its writes are delivered again
    self._tried.add(operation.payload)

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

  # Roles, in their own words

  def took_over(self, syncer: Any) -> None:
    """A syncer leads."""
    self.seen["takeovers"] += syncer.token > 1
    self._leading = max(self._leading, syncer.token)
    heads = syncer.heads.records
    rare.look(self._world, "lead", syncer)
    self.leading_keeper = self._keepers[syncer.life] = refusals.Keeper(
      [self.versions[head.fragment][head.version] for head in heads],
      heads[0].epoch,
      self._schedule.max_staleness,
    )
    self._leader = syncer.life

  def leading_clock(self) -> float:
    """The clock of whoever took over last."""
    return self._kernel.clock(self._leader)

  def arrived(self, syncer: Any, found: Any) -> None:
    """A leader has found commit records."""
    keeper, now = self._keepers[syncer.life], self._kernel.clock(syncer.life)
    for record in found:
      rare.look(self._world, "arrival", record)
      keeper.arrived(record, self.sent[record.key], now)
    if keeper.gave_in:
      keeper.gave_in = False
      self.seen["gate_gave_in"] += 1

  def closing(self, syncer: Any, close: Any) -> None:
    """A round closes; its grace must have been bought from slack."""
    ready_at = close.closed_at - close.queued_secs
    self.seen["joined_in_line"] += any(
      [chosen.arrived_at > ready_at + _EPSILON for chosen in close.chosen]
    )
    if self._schedule.grace == "adaptive":
      self._check_grace(syncer, close)

  def _check_grace(self, syncer: Any, close: Any) -> None:
    shape = self._schedule
    secs = self._world.step_secs
    # The offer was made at quorum; averages may have moved since.
    offered_at = close.opened_at + close.quorum_secs
    sync_secs = 0.0
    for at, value in reversed(self._sync_secs.get(syncer.life, ())):
      if at <= offered_at - _EPSILON:
        sync_secs = min(sync_secs, value) if sync_secs else value
        break
      if at <= offered_at + _EPSILON:
        sync_secs = value  # at the same moment: before the offer, or after
    slack = shape.overlap_steps * max(secs) - sync_secs
    if close.grace_secs > max(0.0, min(slack, max(secs))) + _EPSILON:
      raise Violation(
        f"the grace of version {close.version} of fragment {close.fragment} was"
        f" {close.grace_secs:.3f} s, the slack at most {slack:.3f} s"
      )

  def committed(self, syncer: Any, close: Any, sync_secs: float) -> None:
    """A syncer knows of its commit."""
    self._keepers[syncer.life].committed(
      self.versions[close.fragment][close.version]
    )
    history = self._sync_secs.setdefault(syncer.life, [])
    value = history[-1][1] if history else sync_secs
    now = self._kernel.clock(syncer.life)
    history.append((now, 0.8 * value + 0.2 * sync_secs))

  def rejected(self, syncer: Any, name: str) -> None:
    """A commit record cannot be read; only its name is known."""
    key = keys.contribution_key(name)
    if key not in self._store.ever_damaged:
      raise Violation(f"the record {name} was never damaged")
    self.seen["rejected"] += 1
    self._give_up(self._store.peek(key), "corrupt_record", syncer)

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
    token = syncer.token if syncer else 0
    if content.fate == "merged" and content.fate_of[0] == self._epoch:
      keeper = self._keepers.get(syncer.life) if syncer else None
      if (
        keeper
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

  def rebased(self, island: Any, action: Any, held: Any) -> None:
    """A muted fragment speaks again."""
    self.seen["rebases"] += 1

  def surveyed(self, island: int) -> None:
    """An island that comes back has looked; later it may wait for a peer."""
    self._proven[island] = min(
      [self._merged(p, island) for p in range(self._schedule.fragments)]
    )

  def recovered(self, island: Any, saved: Any, known: Any, back: Any) -> None:
    """An island goes on after an earlier life."""
    index, start = island.index, back.start
    self._kernel.log(
      f"island-{index}", f"goes on: saved {saved}, {known}, {back}"
    )
    if island.life.incarnation == 1:
      return
    for fragment in range(self._schedule.fragments):
      self.balance(island, fragment)
    self.seen["recoveries"] += 1
    rare.look(self._world, "comeback", island)
    self.seen["muted"] += sum(o.first_step > start for o in back.origins)
    self.seen["carried"] += len(back.carried)
    self.seen["from_checkpoint"] += saved is not None
    trained = self._world.trained[index]
    if start > trained:
      raise Violation(
        f"island {index} goes on after row {start}, it has trained {trained}"
      )
    proven = self._proven.pop(index)
    if start < proven:
      raise Violation(
        f"island {index} goes back to row {start}, rows up to {proven} of all"
        " its fragments are published"
      )
    if saved is not None and back.optimizer == "own":
      behind = proven - saved.state.step
      if behind > self._schedule.sync_every:
        raise Violation(
          f"island {index} takes its own optimizer of step"
          f" {saved.state.step} without asking a peer, {behind} steps behind"
        )

  def served(self, island: Any, sent: values.Moments) -> None:
    """An island goes on with a peer's optimizer state."""
    self.seen["served_by_peers"] += 1
    rare.look(self._world, "served", island)
    for fragment, held in enumerate(island.fragments):
      if sent.versions[fragment] < held.anchor.number:
        raise Violation(
          f"island {island.index} starts from version {held.anchor.number} of"
          f" fragment {fragment} with an optimizer that island {sent.island}"
          f" had at version {sent.versions[fragment]}"
        )

  # Time

  def _liveness(self) -> None:
    world = self._world
    since = max(self.last_commit, world.calm_since)
    if self._kernel.now - since > world.liveness_secs:
      raise Violation(
        f"no version for {self._kernel.now - since:.1f} s although the store"
        f" was reachable and {self._schedule.quorum} islands lived"
      )

  def look(self) -> None:
    """Checks what shows only by nothing happening."""
    self._liveness()

  # The end

  def died(self, island: Any) -> None:
    """An island's process ended."""
    self.ledger.died(island.index)
    for fragment in range(self._schedule.fragments):
      self._spoken.pop((island.index, fragment), None)
    self._furthest(island)

  def _furthest(self, island: Any) -> None:
    if island.fragments:
      trained = self._world.trained
      trained[island.index] = max(trained[island.index], island.core.step)

  def finish(self) -> None:
    """Balances the rows of all islands and fragments."""
    for role in self._world.islands:
      # Rows of an earlier life beyond its step are read again when it goes on.
      for fragment in range(self._schedule.fragments):
        self.balance(role.life.shell, fragment)
