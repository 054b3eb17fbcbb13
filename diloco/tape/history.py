"""What the tapes say about each trained step, sorted for the ledger.

Lines are taken as they come, and what is settled is summed up meanwhile
(`diloco.tape.folding`), so that a history is small and can be kept and gone on
with. A follower cannot look ahead: something may be told later of rows that are
summed up. Then the history is *reopened* and worth nothing, and `read` makes
another, which looks first where lives begin and what returns to cuts take back.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import ClassVar

from diloco.tape import events, evidence, folding, reader

_FAR = 1 << 62
_OF_LIVES = (
  *(events.STARTED, events.ISLAND_DIED, events.STOPPED, events.RESTORED),
)
_KNOWN_VERSIONS = 256  # of a fragment; the newest may be told again
_CUTS = 2  # a run can be set back to the last ones
_WAITING = 8  # times `folding.LIMIT` facts that wait for a cut after them


class History:
  """The record of a run by island and fragment.

  Attributes:
    lives: by island and incarnation, also those that only others told of yet.
    fragments: facts by island and fragment.
    logs: by island, of the steps it logged.
    broken: rules that lines of the tapes broke, in words.
    reopened: something was told of rows that are summed up.
  """

  def __init__(self) -> None:
    self.lives: dict[int, dict[int, evidence.Life]] = {}
    self.fragments: dict[tuple[int, int], evidence.FragmentHistory] = {}
    self.logs: dict[int, evidence.StepLog] = {}
    self.broken: list[str] = []
    self.reopened = False
    # By fragment, checksums of the keys of its last versions.
    self._versions: dict[int, dict[int, int]] = {}
    self._begun: dict[int, int] = {}  # by island, the incarnation that tells
    self._settled: dict[int, int] = {}  # by island, last row that is summed up
    self._returns: list[list[tuple[int, int]]] = []  # by fragment, from, to
    self._reinjected: set[object] = set()  # by all returns, if not summed up
    # Of returns for want of tapes: epoch, step of the cut by island.
    self._torn: list[tuple[int, dict[int, int]]] = []
    self._cuts: dict[int, list[int]] = {}  # the last ones, versions

  def take(self, line: reader.Line, island: int | None = None) -> None:
    """Takes the next line of a tape, or of an island's metric log."""
    if island is None:
      if handler := self._HANDLERS.get(line["event"]):
        handler(self, line)
      return
    incarnation, step = line["incarnation"], line["step"]
    if island not in self.logs:
      self.logs[island] = evidence.StepLog()
    self.logs[island].take(incarnation, step)
    self._extend(island, incarnation, step)

  def foresee(self, record: reader.Record) -> None:
    """Takes all lives and returns to cuts of a record that is to be taken."""
    for line in reader.select(record.events, _OF_LIVES):
      self.take(line)
    self._begun.clear()

  def lives_of(self, island: int) -> list[evidence.Life]:
    """Returns the lives of an island, in order."""
    lives = sorted(self.lives.get(island, {}).items())
    return [life for _, life in lives if life.begun]

  @property
  def islands(self) -> list[int]:
    """All islands that are told of."""
    return sorted({*self.lives, *(island for island, _ in self.fragments)})

  @property
  def num_fragments(self) -> int:
    """P, as far as was told."""
    return 1 + max((fragment for _, fragment in self.fragments), default=-1)

  @property
  def violations(self) -> list[str]:
    """What must not be, and is not of one fragment alone."""
    return [
      *(
        f"island {island}: {text}"
        for island, log in sorted(self.logs.items())
        for text in log.violations(self.lives[island])
      ),
      *self.broken,
    ]

  def _life(self, island: int, incarnation: int) -> evidence.Life:
    lives = self.lives.setdefault(island, {})
    if incarnation not in lives:
      lives[incarnation] = evidence.Life(incarnation, 0, 0, 0, begun=False)
    return lives[incarnation]

  def _facts(self, island: int, fragment: int) -> evidence.FragmentHistory:
    facts = self.fragments.get((island, fragment))
    if facts is None:
      facts = evidence.FragmentHistory()
      self.fragments[island, fragment] = facts
    return facts

  def _extend(self, island: int, incarnation: int, step: int) -> None:
    life = self._life(island, incarnation)
    if step > life.end:
      if life.begun and life.end < self._settled.get(island, 0):
        self.reopened = True
      life.end = step

  def _started(self, line: reader.Line) -> None:
    island, incarnation = island_of(line), line["incarnation"]
    life = self._life(island, incarnation)
    self._begun[island] = incarnation
    if life.begun:  # foreseen
      return
    life.begun, life.start = True, line["step"]
    life.tokens_per_step = line["tokens_per_step"]
    life.end = max(life.end, life.start)
    life.epoch = line.get("epoch") or 0
    self._tear(island, life)
    for fragment, step in enumerate(line.get("unsent_from_step") or ()):
      facts = self._facts(island, fragment)
      facts.unsent[incarnation] = min(step, line["step"])
      self._mute(line, fragment, step)
    for (other, _), facts in self.fragments.items():
      unsent = facts.unsent.get(incarnation, life.start)
      if other == island and unsent < facts.folded.row:
        self.reopened = True

  def _died(self, line: reader.Line) -> None:
    self._life(line["island"], line["island_incarnation"]).died = True

  def _stopped(self, line: reader.Line) -> None:
    self._life(island_of(line), line["incarnation"]).stopped = True
    self._reached(line)

  def _restored(self, line: reader.Line) -> None:
    pairs = zip(line["version_from"], line["version_to"], strict=True)
    spans = list(pairs)
    if spans in self._returns:  # told again, or foreseen
      return
    self._returns.append(spans)
    self._reinjected.update(line.get("reinjected") or ())
    cut = line.get("cut")
    self._cuts = {
      n: v for n, v in self._cuts.items() if cut is None or n <= cut
    }
    for (_, fragment), facts in self.fragments.items():
      if fragment < len(spans):
        facts.roll_back(*spans[fragment])
        taken_back = {item.key for item in facts.rolled_back}
        facts.reinjected = self._reinjected & taken_back
        if facts.folded.version > spans[fragment][0]:
          self.reopened = True
    if line.get("torn"):
      steps = {int(island): step for island, step in line["steps"].items()}
      self._torn.append((line["epoch"], steps))
      for island in self.lives:
        for life in self.lives_of(island):
          self._tear(island, life)

  def _tear(self, island: int, life: evidence.Life) -> None:
    """Notes from where on a life's tapes may have told more than was kept.

    It is so of those that lived as the run was lost; of one that was over, the
    tapes tell all that there is to tell.
    """
    if not self._torn:
      return  # of thousands of lives, each would look at all
    over = life.died or life.stopped
    epochs = {one.epoch for i in self.lives for one in self.lives_of(i)}
    for epoch, steps in self._torn:
      former = max((e for e in epochs if e < epoch), default=None)
      if life.epoch == former and not over and life.untold_from is None:
        life.untold_from = max(life.start, steps.get(island, 0))

  def _cut_completed(self, line: reader.Line) -> None:
    self._cuts[line["cut"]] = line.get("versions") or []
    for number in sorted(self._cuts)[:-_CUTS]:
      del self._cuts[number]

  def _published(self, line: reader.Line) -> None:
    island, incarnation = island_of(line), line["incarnation"]
    item = _contribution(line, incarnation)
    facts = self._facts(island, line["fragment"])
    facts.told[incarnation] = max(item.step, facts.told.get(incarnation, 0))
    _hand(facts, incarnation, item.step)
    self.reopened |= item.first_step < facts.folded.row
    if item.step > facts.folded.row:
      facts.published[item.key] = item
    self._extend(island, incarnation, item.step)

  def _submitted(self, line: reader.Line) -> None:
    loss = evidence.Loss(line["incarnation"], line["first_step"], line["step"])
    facts = self._facts(island_of(line), line["fragment"])
    dropped = line["event"] == events.PUBLISH_DROPPED
    self._append(facts.dropped if dropped else facts.submitted, facts, loss)
    self._extend(island_of(line), loss.incarnation, loss.step)

  def _adopted(self, line: reader.Line) -> None:
    if line.get("step") is not None:
      self._reached(line)
    facts = self._facts(island_of(line), line["fragment"])
    self._give_up(line, line, facts, facts.overwritten)

  def _resynced(self, line: reader.Line) -> None:
    self._reached(line)
    for item in line["fragments"]:
      facts = self._facts(island_of(line), item["fragment"])
      self._give_up(line, item, facts, facts.quarantined)

  def _give_up(
    self,
    line: reader.Line,
    item: reader.Line,
    facts: evidence.FragmentHistory,
    losses: list[evidence.Loss],
  ) -> None:
    """Takes what a fragment loses by a version that was swapped in."""
    if (until := item.get("muted_until")) is not None:
      self._mute(line, item["fragment"], until)
    first, last = item.get("lost_from_step"), item.get("lost_to_step")
    if first is None or last is None or first >= last:
      return
    self._append(losses, facts, evidence.Loss(line["incarnation"], first, last))
    self._extend(island_of(line), line["incarnation"], last)

  def _mute(self, line: reader.Line, fragment: int, until: int) -> None:
    step = line.get("step")
    if step is not None and until > step:
      loss = evidence.Loss(line["incarnation"], step, until)
      facts = self._facts(island_of(line), fragment)
      self._append(facts.repeated, facts, loss)

  def _reached(self, line: reader.Line) -> None:
    self._extend(island_of(line), line["incarnation"], line["step"])

  def _evaluated(self, line: reader.Line) -> None:
    if is_island(line):
      self._reached(line)

  def _append(
    self,
    losses: list[evidence.Loss],
    facts: evidence.FragmentHistory,
    loss: evidence.Loss,
  ) -> None:
    """Adds a step range, less what is summed up."""
    _hand(facts, loss.incarnation, loss.step)
    row = facts.folded.row
    self.reopened |= loss.first_step < row
    if loss.step > row:
      losses.append(loss._replace(first_step=max(loss.first_step, row)))

  def _merged(self, line: reader.Line) -> None:
    fragment, version = line["fragment"], line["version"]
    items = [
      (c["island"], _contribution(c, c["incarnation"]))
      for c in line["contributions"]
    ]
    told = repr(sorted(str(item.key) for _, item in items))
    keys = zlib.crc32(told.encode())
    versions = self._versions.setdefault(fragment, {})
    known = versions.get(version)
    if known is not None:  # told again, by a syncer that took over
      if known != keys:
        self.broken.append(
          f"fragment {fragment}: version {version} was committed twice, from"
          " different contributions"
        )
      return
    if len(versions) == _KNOWN_VERSIONS:
      oldest = next(iter(versions))  # they are told of in order
      if version < oldest:  # told again after so many others, or late
        self.reopened = True
        return
      del versions[oldest]
    versions[version] = keys
    undone = self._undone(fragment, version)
    for island, item in items:
      facts = self._facts(island, fragment)
      if item.first_step < facts.folded.row:
        self.reopened = True
        self.broken.append(
          f"island {island}, fragment {fragment}: steps ({item.first_step},"
          f" {item.step}] merged in version {version}, after all up to"
          f" {facts.folded.row} had a fate"
        )
      elif undone:
        facts.rolled_back.append(item)
        facts.reinjected |= self._reinjected & {item.key}
      else:
        facts.merged.append(evidence.Merge(version, item))
      self._extend(island, item.incarnation, item.step)
      self._fold_if_many(island, fragment, facts)

  def _undone(self, fragment: int, version: int) -> bool:
    """Whether a return to a cut takes a version back."""
    spans = [s[fragment] for s in self._returns if fragment < len(s)]
    return any(first < version < last for first, last in spans)

  def _fold_if_many(
    self, island: int, fragment: int, facts: evidence.FragmentHistory
  ) -> None:
    if facts.size < max(facts.fold_at, folding.LIMIT):
      return
    newest = self._begun.get(island, 0)
    lives = self.lives_of(island)
    later = [life for life in lives if life.incarnation > newest]
    starts = [
      min(life.start, facts.unsent.get(life.incarnation, life.start))
      for life in later
    ]
    limit = min(starts, default=_FAR)
    if self._cuts and facts.size < _WAITING * folding.LIMIT:
      versions = self._cuts[min(self._cuts)]
      if fragment < len(versions):
        limit = min(limit, facts.merged_until(versions[fragment]))
    known = facts.keys if self._reinjected else set()
    folding.fold(lives, facts, limit, newest)
    self._reinjected -= known - facts.keys
    settled = self._settled.get(island, 0)
    self._settled[island] = max(settled, facts.folded.row)

  def _discarded(self, line: reader.Line) -> None:
    item = _contribution(line, line["island_incarnation"])
    facts = self._facts(line["island"], line["fragment"])
    reason = line["reason"].partition(":")[0]  # details follow a colon
    row = facts.folded.row
    self.reopened |= item.first_step < row and item.key not in facts.published
    if item.step > row or item.key in facts.published:
      facts.discarded.append((reason, item))
    self._extend(line["island"], item.incarnation, item.step)

  _HANDLERS: ClassVar[
    Mapping[str, Callable[["History", reader.Line], None]]
  ] = {
    events.STARTED: _started,
    events.ISLAND_DIED: _died,
    events.STOPPED: _stopped,
    events.RESTORED: _restored,
    events.CUT_COMPLETED: _cut_completed,
    events.SUBMITTED: _submitted,
    events.PUBLISHED: _published,
    events.PUBLISH_DROPPED: _submitted,
    events.ADOPTED: _adopted,
    events.RESYNCED: _resynced,
    events.EVALUATED: _evaluated,
    events.SAVING: _reached,
    events.CHECKPOINTED: _reached,
    events.REBASED: _reached,
    events.MERGED: _merged,
    events.DISCARDED: _discarded,
  }


def read(record: reader.Record) -> History:
  """Returns the history of a record that can be read twice, whatever it is."""
  history = History()
  history.foresee(record)
  for island, lines in record.metrics.items():
    for line in lines:
      history.take(line, island)
  for line in record.events:
    history.take(line)
  history.reopened = False
  return history


def _hand(facts: evidence.FragmentHistory, incarnation: int, step: int) -> None:
  facts.handed[incarnation] = max(step, facts.handed.get(incarnation, 0))


def is_island(line: reader.Line) -> bool:
  """Whether an island wrote the line."""
  return str(line["role"]).startswith("island-")


def island_of(line: reader.Line) -> int:
  """Returns the island a line is about: its own, or its writer."""
  if line.get("island") is not None:
    return int(line["island"])
  return int(line["role"].removeprefix("island-"))


def _contribution(line: reader.Line, incarnation: int) -> evidence.Contribution:
  first, step = line["first_step"], line["step"]
  key = line.get("key") or (incarnation, first, step)
  return evidence.Contribution(
    key, incarnation, first, step, line.get("c_tokens")
  )
