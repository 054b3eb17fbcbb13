"""What must hold in the simulated world, checked as things happen.

The checker sees the store and the values in it, not the bookkeeping of the
cores. It raises `Violation` at the event that broke a rule.
"""

from __future__ import annotations

import collections
from typing import Any

from diloco import errors
from diloco.simulation.protocol import kernel as kernel_lib
from diloco.simulation.protocol import row_ledger, values
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
    self.rounds = 0
    self.wanted = 0  # rounds after which the kernel is to pause
    self.last_commit = 0.0
    # fragment -> contents of its versions, by number
    self.versions: list[list[values.Version]] = []
    self._shown: list[int] = []  # versions on the board
    self._epoch = 0  # of the head that was set back last
    self._leading = 0  # newest token whose owner has fenced all heads
    self._lease_moved = 0.0
    self._committers: dict[int, Any] = {}  # token -> life that acquired it
    self.recorded: set[str] = set()  # commit records ever written
    self._discarded: set[str] = set()  # keys of contributions
    self._proven: dict[int, int] = {}  # by island that comes back, last row
    self.seen: dict[str, int] = collections.defaultdict(int)
    self.ledger = row_ledger.RowLedger()
    # by life of a syncer: when, and the average time to commit from then on
    self._sync_secs: dict[Any, list[tuple[float, float]]] = {}
    self._spoiled: dict[int, records.Head] = {}  # heads as they were

  # The store

  def contribution_written(self, key: str, record: Any, life: Any) -> None:
    """A commit record is in the store; it must prove something."""
    name = key[14:]  # after "contributions/"
    if name not in self.recorded:
      self.recorded.add(name)
      if (
        record.epoch == self._epoch  # else nobody merges it
        and record.payload not in self._store.payloads
        and record.step > self._merged(record.fragment, record.island)
      ):
        raise Violation(f"the record {name} was written without its payload")
    self._world.nudge_syncers()

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
      self.discarded(None, record, "lost_by_store")

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
    if old is None or old.fragment != fragment:
      old = self._spoiled[fragment]  # the store has lost or swapped it
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
    content.committed = True
    versions.append(content)
    self.rounds += 1
    if self.rounds == self.wanted:
      self._kernel.done = True
    self._liveness()
    self.last_commit = self._kernel.now

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
    self._epoch = new.epoch
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
      if record.key not in self._discarded:
        if not self._world.damaging:
          raise Violation(f"nobody discarded {record.key} of a cut, and {why}")
        self.discarded(None, record, "corrupt")
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
    if prefix[9:] not in self.recorded:  # after "payloads/"
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
    parent = self._store.version_of(head)
    pairs = list(zip(operation.contributions, contents, strict=True))
    refused = {}
    for record, content in pairs:
      if type(content) is not values.Delta:
        refused[record.key] = f"corrupt: {content}"
      elif not content.finite:
        refused[record.key] = "not_finite"
    if refused:
      raise protocol.RefusedError(refused)
    rows = dict(parent.rows)
    added = []
    for record, content in pairs:
      self._check_merged(record, content, parent, head.epoch)
      island = record.island
      try:
        rows[island] = values.append(rows.get(island, ()), content.spans)
      except ValueError as error:
        raise Violation(
          f"{error} of island {island} are merged twice into version"
          f" {head.version + 1} of fragment {head.fragment}"
        ) from None
      added.append((island, content.spans))
    version = values.Version(
      head.fragment, parent.number + 1, rows, parent, tuple(added)
    )
    quorum = len({island for island, _ in added})
    if quorum < self._schedule.quorum:
      raise Violation(
        f"version {version.number} of fragment {head.fragment} has"
        f" {quorum} islands, the quorum is {self._schedule.quorum}"
      )
    return version

  def _check_merged(
    self,
    record: Any,
    content: values.Delta,
    parent: values.Version,
    epoch: int,
  ) -> None:
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
    if not content.base.committed:
      raise Violation(f"{record.key} starts from a version never committed")

  # Roles, in their own words

  def took_over(self, syncer: Any) -> None:
    """A syncer leads."""
    self.seen["takeovers"] += syncer.token > 1
    self._leading = max(self._leading, syncer.token)

  def closing(self, syncer: Any, close: Any) -> None:
    """A round closes; its grace must have been bought from slack."""
    if self._schedule.grace == "adaptive":
      self._check_grace(syncer, close)

  def _check_grace(self, syncer: Any, close: Any) -> None:
    shape = self._schedule
    secs = self._world.step_secs
    tau = shape.overlap_steps
    steps = min(tau * shape.sync_every / shape.fragments, tau)
    # The offer was made at quorum; averages may have moved since.
    offered_at = close.closed_at - close.grace_spent_secs
    sync_secs = 0.0
    for at, value in reversed(self._sync_secs.get(syncer.life, ())):
      if at <= offered_at - _EPSILON:
        sync_secs = min(sync_secs, value) if sync_secs else value
        break
      if at <= offered_at + _EPSILON:
        sync_secs = value  # at the same moment: before the offer, or after
    slack = steps * max(secs) - sync_secs
    if close.grace_secs > max(0.0, min(slack, max(secs))) + _EPSILON:
      raise Violation(
        f"the grace of version {close.version} of fragment {close.fragment} was"
        f" {close.grace_secs:.3f} s, the slack at most {slack:.3f} s"
      )

  def committed(self, syncer: Any, close: Any, sync_secs: float) -> None:
    """A syncer knows of its commit."""
    history = self._sync_secs.setdefault(syncer.life, [])
    value = history[-1][1] if history else sync_secs
    now = self._kernel.clock(syncer.life)
    history.append((now, 0.8 * value + 0.2 * sync_secs))

  def rejected(self, syncer: Any, name: str) -> None:
    """A commit record cannot be read; only its name is known."""
    fragment, island, _, step = map(int, name.split("."))
    self.seen["rejected"] += 1
    self.ledger.name(island, fragment, 0, step, "corrupt_record")

  def discarded(self, syncer: Any, record: Any, reason: str) -> None:
    """A contribution will never be merged."""
    if ":" in reason:
      reason = reason.partition(":")[0]
    self.seen[reason] += 1
    self._discarded.add(record.key)
    if self._kernel.trace is not None:
      self._kernel.log("", f"{record.key} is discarded: {reason}")
    self.ledger.name(
      record.island, record.fragment, record.first_step, record.step, reason
    )

  def forgotten(self, syncer: Any, record: Any) -> None:
    """A record is left of what was merged already."""
    self.seen["forgotten"] += 1

  def publishing(self, island: Any, content: values.Delta) -> None:
    """An island is about to publish; its base must not have the rows yet."""
    rows = content.base.rows.get(island.index)
    if rows and rows[-1][1] > content.spans[0][0]:
      raise Violation(
        f"island {island.index} publishes rows from {content.spans[0][0] + 1}"
        f" of fragment {content.fragment}, its base has them up to"
        f" {rows[-1][1]}"
      )

  def dropped(self, island: Any, action: Any, reason: str) -> None:
    """A publication never left its island."""
    self.seen[f"dropped_{reason}"] += 1
    self.ledger.name(
      island.index, action.fragment, action.first_step, action.step, reason
    )

  def adopted(
    self, island: Any, action: Any, fetched: Any, anchor: values.Version
  ) -> None:
    """An island swaps a version in."""
    fragment, content = action.fragment, fetched.content
    versions = self.versions[fragment]
    number = action.version
    where = f"island {island.index} adopted version {number} of {fragment}"
    if number >= len(versions) or versions[number] is not content:
      raise Violation(f"{where}, which was never committed")
    if number <= anchor.number and not action.resync:
      raise Violation(f"{where} after version {anchor.number}")
    if action.muted_until:
      self.seen["muted"] += 1
    if self._kernel.trace is not None:
      self._kernel.log(island.life.role.name, f"{action}")
    if action.lost_from < action.lost_to:
      self.ledger.name(
        island.index, fragment, action.lost_from, action.lost_to, "overwritten"
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
    self.seen["recoveries"] += 1
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
    if island.fragments:
      trained = self._world.trained
      trained[island.index] = max(trained[island.index], island.core.step)

  def finish(self) -> None:
    """Balances the rows of all islands and fragments."""
    waiting: dict[tuple[int, int], list[values.Span]] = {}
    for name in self._store.directories["contributions"]:
      record = self._store.peek(keys.contribution_key(name))
      waiting.setdefault((record.island, record.fragment), []).append(
        (record.first_step, record.step)
      )
    for role in self._world.islands:
      self.died(role.life.shell)
      for fragment in range(self._schedule.fragments):
        self._balance(role, fragment, waiting)

  def _balance(self, role: Any, fragment: int, waiting: Any) -> None:
    island, shell = role.index, role.life.shell
    accounted = list(self.versions[fragment][-1].rows.get(island, ()))
    accounted += waiting.get((island, fragment), [])
    held = shell.fragments[fragment]
    accounted.append((held.held_from, shell.core.step))
    # Rows of an earlier life beyond this step are read again when it goes on.
    trained = shell.core.step
    lost = self.ledger.unaccounted(island, fragment, trained, accounted)
    if lost is not None:
      raise Violation(
        f"rows {lost[0] + 1} to {lost[1]} of island {island} are in no version"
        f" of fragment {fragment}, and nobody says why"
      )
