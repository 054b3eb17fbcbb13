"""What must hold in the simulated world, checked as things happen.

The checker sees the store and the values in it, not the bookkeeping of the
cores. It raises `Violation` at the event that broke a rule.
"""

from __future__ import annotations

from typing import Any

from diloco import errors
from diloco.snapshots import keys, records, restore
from diloco.verification import (
  cut_judge,
  deaths,
  fates,
  rare,
  refusals,
  values,
)
from diloco.verification import kernel as kernel_lib

Violation = kernel_lib.Violation
_EPSILON = 1e-6


class Checker(fates.Fates):
  """Observer of one world."""

  def __init__(self, world: Any):
    super().__init__(world)
    self.rounds = 0
    self.wanted = 0  # rounds after which the kernel is to pause
    self.last_commit = 0.0
    self.leading_keeper: refusals.Keeper | None = None
    self._shown: list[int] = []  # versions on the board
    self._leading = 0  # newest token whose owner has fenced all heads
    self._lease_moved = 0.0
    self._committers: dict[int, Any] = {}  # token -> life that acquired it
    self._lost_tokens: set[int] = set()  # of leases that the store lost
    self.cuts = cut_judge.CutJudge(self.versions, self.ledger)
    self._proven: dict[int, int] = {}  # by island that comes back, last row
    # by life of a syncer: when, and the average time to commit from then on
    self._sync_secs: dict[Any, list[tuple[float, float]]] = {}
    self._spoiled: dict[int, records.Head] = {}  # heads as they were
    self.deaths = deaths.Deaths(world)
    self.moved_at: dict[int, float] = {}  # by fragment, when its head last was

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
    super().record_lost(record)
    if type(record) is records.Lease:
      self._lost_tokens.add(record.token)

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
        # What was on its way when a lease was lost may still be written; the
        # heads have the later token, and keep its owner out.
        lasting = self._committers.keys() - self._lost_tokens
        if new.token <= max(lasting, default=0):
          raise Violation(f"token {new.token} was given out again")
        rare.look(self._world, "lease", life)
        self._committers[new.token] = life
        self.seen["leaders"] += 1
      elif owner is not life:
        raise Violation(
          f"{life.role.name} took the lease under {owner.role.name}'s token"
        )

  def epoch_moved(self, old: Any, new: records.Epoch, life: Any) -> None:
    """One controller decides, while no role lives."""
    who = f"{life.role.name}.{life.incarnation}"
    if old is not None and new.token < old.token:
      raise Violation(
        f"{who} sets the run back under token {new.token}, and a controller"
        f" with token {old.token} has it"
      )
    roles = (*self._world.islands, *self._world.seats)
    living = [role.name for role in roles if role.life is not None]
    if new.epoch > (old.epoch if old else 0) and living:
      raise Violation(f"{who} sets the run back while {living} live")

  def head_moved(self, old: Any, new: records.Head, life: Any) -> None:
    """A head is about to move; see the module."""
    fragment = new.fragment
    self.moved_at[fragment] = self._kernel.now
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
    self.look()
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
      unusable = any(
        text in why
        for text in ("never completed", "given up", restore.NOT_THERE)
      )
      if not unusable and spoiled and spoiled in why:
        self.seen["spoiled_cuts"] += 1
      elif not unusable and not self._world.damaging:
        raise Violation(f"cut {cut} is complete and cannot be used: {why}")
      if begun:
        raise Violation(f"the restore of cut {cut} cannot be finished: {why}")

  def left_out(self, sent: Any) -> None:
    """Contributions of the cut to go back to cannot be read."""
    for record, why in sent:
      content = self.sent[record.key]
      if content.fate in ("", "merged"):
        # A leader that is deposed may discard what its successor has merged.
        if not self._world.damaging and not content.discarded:
          raise Violation(f"nobody discarded {record.key} of a cut, and {why}")
        content.fate = ""
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
    if parts.request.epoch < self._epoch:
      return  # given up, which a stale listing hid; its losses are undone
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

  def took_over(self, syncer: Any) -> None:
    """A syncer leads."""
    if self._world.ending and self._world.ending.is_quiet:
      raise Violation("another syncer leads while the session ends in order")
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
    known = []  # by then; what came at the same moment came before it, or after
    for at, value in reversed(self._sync_secs.get(syncer.life, ())):
      if at <= offered_at + _EPSILON:
        known.append(value)
      if at <= offered_at - _EPSILON:
        break
    else:
      known.append(0.0)  # nothing yet
    slack = shape.overlap_steps * max(secs) - min(known)
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

  def looks(self, island: int) -> None:
    """An island that comes back goes on to read the newest versions."""
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
      behind = proven - saved.marker.step
      if behind > self._schedule.sync_every:
        raise Violation(
          f"island {index} takes its own optimizer of step"
          f" {saved.marker.step} without asking a peer, {behind} steps behind"
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

  def look(self) -> None:
    """Checks what shows only by nothing happening."""
    world = self._world
    since = max(self.last_commit, world.calm_since)
    if self._kernel.now - since > world.liveness_secs:
      raise Violation(
        f"no version for {self._kernel.now - since:.1f} s although the store"
        f" was reachable and {self._schedule.quorum} islands lived"
      )

  def died(self, island: Any) -> None:
    """An island's process ended."""
    self.ledger.died(island.index)
    for fragment in range(self._schedule.fragments):
      self._spoken.pop((island.index, fragment), None)
    if island.fragments:
      trained = self._world.trained
      trained[island.index] = max(trained[island.index], island.core.step)

  def finish(self) -> None:
    """Balances the rows of all islands and fragments."""
    for role in self._world.islands:
      if role.life is None:
        self.seen["given_up"] += 1
        continue
      # Rows of an earlier life beyond its step are read again when it goes on.
      for fragment in range(self._schedule.fragments):
        self.balance(role.life.shell, fragment)
