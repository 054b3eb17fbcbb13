"""What the tapes say about each trained step, sorted for the ledger.

A *life* is one incarnation of an island and the steps it trained. A later life
may begin below the end of an earlier one and do those steps again. A
*contribution* is a step range of one island and fragment that was published.
Ranges are (first_step, step], open on the left, as on the tape.
"""

import collections
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from diloco.tape import events, reader

_FAR = 1 << 62
_OF_LIVES = (
  *(events.STARTED, events.ISLAND_DIED, events.STOPPED, events.RESTORED),
)
_KNOWN_VERSIONS = 1024  # of a fragment; the newest may be told again
Fold = Callable[[list["Life"], "FragmentHistory", int, int], None]


class Contribution(NamedTuple):
  """A step range that was offered to the syncer."""

  key: object
  incarnation: int
  first_step: int
  step: int
  c_tokens: int | None


class Merge(NamedTuple):
  """A contribution that entered a global version."""

  version: int
  contribution: Contribution


class Loss(NamedTuple):
  """A step range an island says it gave up."""

  incarnation: int
  first_step: int
  step: int


@dataclasses.dataclass
class Life:
  """One incarnation of an island: it trained (start, end]."""

  incarnation: int
  start: int
  tokens_per_step: int
  end: int
  died: bool = False
  stopped: bool = False


@dataclasses.dataclass
class Folded:
  """What is settled for good, up to a row; see `diloco.tape.folding`.

  Attributes:
    row: the last one.
    counts: fragment-tokens by fate.
    rows: number of rows by fate.
    in_vain: what was trained in vain, by the life that did it.
    violations: what was wrong with it.
  """

  row: int = 0
  counts: Counter[str] = dataclasses.field(default_factory=Counter)
  rows: Counter[str] = dataclasses.field(default_factory=Counter)
  in_vain: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
  violations: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class FragmentHistory:
  """All that happened to one fragment of one island and is not folded.

  Attributes:
    published: contributions by key, in the island's order.
    merged: contributions with the version they entered.
    discarded: reasons and contributions, in the syncer's order.
    rolled_back: contributions of versions that a return to a cut took back.
    reinjected: keys of contributions that wait again since such a return.
    overwritten: steps given up by adopting a version.
    quarantined: steps given up when the island was told of an offence.
    repeated: steps an incarnation was to do again, if it lived so long, that
      belong to a publication of an earlier one.
    dropped: steps whose publication the island dropped.
    submitted: steps on their way to publication.
    unsent: by incarnation, the step after which its progress is unpublished;
      at most where it started, if it restored progress.
    told: by incarnation, the last step it said to be published.
    handed: by incarnation, the last step it handed out or said to be settled.
    folded: what was settled for good and is summed up.
    fold_at: the size from which on more is to be folded.
  """

  published: dict[object, Contribution] = dataclasses.field(
    default_factory=dict
  )
  merged: list[Merge] = dataclasses.field(default_factory=list)
  discarded: list[tuple[str, Contribution]] = dataclasses.field(
    default_factory=list
  )
  rolled_back: list[Contribution] = dataclasses.field(default_factory=list)
  reinjected: set[object] = dataclasses.field(default_factory=set)
  overwritten: list[Loss] = dataclasses.field(default_factory=list)
  quarantined: list[Loss] = dataclasses.field(default_factory=list)
  repeated: list[Loss] = dataclasses.field(default_factory=list)
  dropped: list[Loss] = dataclasses.field(default_factory=list)
  submitted: list[Loss] = dataclasses.field(default_factory=list)
  unsent: dict[int, int] = dataclasses.field(default_factory=dict)
  told: dict[int, int] = dataclasses.field(default_factory=dict)
  handed: dict[int, int] = dataclasses.field(default_factory=dict)
  folded: Folded = dataclasses.field(default_factory=Folded)
  fold_at: int = 0

  @property
  def losses(self) -> tuple[list[Loss], ...]:
    """All lists of step ranges that islands told of."""
    return (
      *(self.overwritten, self.quarantined, self.repeated),
      *(self.dropped, self.submitted),
    )

  @property
  def size(self) -> int:
    """Number of facts."""
    others = (self.published, self.merged, self.discarded, self.rolled_back)
    return sum(map(len, (*others, *self.losses)))

  def part(self, first: int, last: int) -> "FragmentHistory":
    """Returns what is told of rows (first, last]; nothing reaches across."""

    def inside(item: Contribution | Loss) -> bool:
      return item.first_step >= first and item.step <= last

    return dataclasses.replace(
      self,
      published={k: i for k, i in self.published.items() if inside(i)},
      merged=[m for m in self.merged if inside(m.contribution)],
      discarded=[
        (reason, item)
        for reason, item in self.discarded
        if inside(self.published.get(item.key, item))
      ],
      rolled_back=[i for i in self.rolled_back if inside(i)],
      overwritten=[i for i in self.overwritten if inside(i)],
      quarantined=[i for i in self.quarantined if inside(i)],
      repeated=[i for i in self.repeated if inside(i)],
      dropped=[i for i in self.dropped if inside(i)],
      submitted=[i for i in self.submitted if inside(i)],
      unsent={i: min(step, last) for i, step in self.unsent.items()},
    )

  def keep_above(self, row: int, lives: Iterable[Life]) -> None:
    """Lets go of what is told of rows up to `row`."""
    unsent = {
      life.incarnation: max(row, self.unsent.get(life.incarnation, life.start))
      for life in lives
    }
    rest = self.part(row, _FAR)
    for field in dataclasses.fields(self):
      setattr(self, field.name, getattr(rest, field.name))
    self.unsent = unsent


class History:
  """The record of a run by island and fragment."""

  def __init__(
    self,
    record: reader.Record,
    num_fragments: int = 1,
    fold: Fold | None = None,
    fold_at: int = 0,
  ):
    """Sorts the record.

    Args:
      record: all tapes and metric logs of a run.
      num_fragments: P, or fewer; the tape may show more.
      fold: is called with lives and facts of an island's fragment when they
        have become many: `folding.fold`.
      fold_at: how many that is.
    """
    self.violations: list[str] = []
    self.num_fragments = num_fragments
    self.lives: dict[int, dict[int, Life]] = collections.defaultdict(dict)
    self.fragments: dict[tuple[int, int], FragmentHistory] = (
      collections.defaultdict(FragmentHistory)
    )
    self._fold, self._fold_at = fold, fold_at
    # By fragment, hashes of the keys of its last versions.
    self._versions: dict[int, dict[int, int]] = collections.defaultdict(dict)
    self._begun: dict[int, int] = {}  # by island, the incarnation that tells
    self._returns: list[list[tuple[int, int]]] = []  # by fragment, from, to
    self._reinjected: set[object] = set()
    handlers = {
      events.SUBMITTED: self._submitted,
      events.PUBLISHED: self._published,
      events.PUBLISH_DROPPED: self._submitted,
      events.ADOPTED: self._adopted,
      events.RESYNCED: self._resynced,
      events.EVALUATED: self._evaluated,
      events.SAVING: self._reached,
      events.CHECKPOINTED: self._reached,
      events.REBASED: self._reached,
      events.MERGED: self._merged,
      events.DISCARDED: self._discarded,
    }
    self._collect_lives(reader.select(record.events, _OF_LIVES))
    for island, lines in record.metrics.items():
      self._extend_by_metrics(island, lines)
    for line in record.events:
      if line["event"] == events.STARTED:
        self._begun[island_of(line)] = line["incarnation"]
      elif handler := handlers.get(line["event"]):
        handler(line)
    for island, fragment in self.fragments:
      self.lives[island]  # an island known by its contributions alone
      self.num_fragments = max(self.num_fragments, fragment + 1)

  def _collect_lives(self, lines: Iterable[reader.Line]) -> None:
    """Finds all lives first: roles are not ordered among each other."""
    ended = []
    for line in lines:
      if line["event"] == events.STARTED:
        lives = self.lives[island_of(line)]
        incarnation = line["incarnation"]
        lives[incarnation] = Life(
          incarnation, line["step"], line["tokens_per_step"], line["step"]
        )
        for fragment, step in enumerate(line.get("unsent_from_step") or ()):
          facts = self._facts(island_of(line), fragment)
          facts.unsent[incarnation] = min(step, line["step"])
          self._mute(line, fragment, step)
      elif line["event"] == events.RESTORED:
        spans = zip(line["version_from"], line["version_to"], strict=True)
        self._returns.append(list(spans))
        self._reinjected.update(line.get("reinjected") or ())
      else:
        ended.append(line)
    for facts in self.fragments.values():
      facts.reinjected = self._reinjected
    for line in ended:
      died = line["event"] == events.ISLAND_DIED
      key = "island_incarnation" if died else "incarnation"
      life = self.lives[island_of(line)].get(line[key])
      if life and died:
        life.died = True
      elif life:
        life.stopped = True
        life.end = max(life.end, line["step"])

  def _extend(self, island: int, incarnation: int, step: int) -> None:
    life = self.lives[island].get(incarnation)
    if life and step > life.end:
      life.end = step

  def _published(self, line: reader.Line) -> None:
    island, incarnation = island_of(line), line["incarnation"]
    item = _contribution(line, incarnation)
    facts = self._facts(island, line["fragment"])
    facts.told[incarnation] = max(item.step, facts.told.get(incarnation, 0))
    _hand(facts, incarnation, item.step)
    if item.step > facts.folded.row:
      facts.published[item.key] = item
    self._extend(island, incarnation, item.step)

  def _submitted(self, line: reader.Line) -> None:
    loss = Loss(line["incarnation"], line["first_step"], line["step"])
    facts = self._facts(island_of(line), line["fragment"])
    dropped = line["event"] == events.PUBLISH_DROPPED
    _append(facts.dropped if dropped else facts.submitted, facts, loss)
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
    facts: FragmentHistory,
    losses: list[Loss],
  ) -> None:
    """Takes what a fragment loses by a version that was swapped in."""
    if (until := item.get("muted_until")) is not None:
      self._mute(line, item["fragment"], until)
    first, last = item.get("lost_from_step"), item.get("lost_to_step")
    if first is None or last is None or first >= last:
      return
    _append(losses, facts, Loss(line["incarnation"], first, last))
    self._extend(island_of(line), line["incarnation"], last)

  def _mute(self, line: reader.Line, fragment: int, until: int) -> None:
    step = line.get("step")
    if step is not None and until > step:
      loss = Loss(line["incarnation"], step, until)
      facts = self._facts(island_of(line), fragment)
      _append(facts.repeated, facts, loss)

  def _reached(self, line: reader.Line) -> None:
    self._extend(island_of(line), line["incarnation"], line["step"])

  def _evaluated(self, line: reader.Line) -> None:
    if is_island(line):
      self._reached(line)

  def _merged(self, line: reader.Line) -> None:
    fragment, version = line["fragment"], line["version"]
    items = [
      (c["island"], _contribution(c, c["incarnation"]))
      for c in line["contributions"]
    ]
    keys = hash(frozenset([item.key for _, item in items]))
    versions = self._versions[fragment]
    known = versions.get(version)
    if known is not None:  # told again, by a syncer that took over
      if known != keys:
        self.violations.append(
          f"fragment {fragment}: version {version} was committed twice, from"
          " different contributions"
        )
      return
    if len(versions) == _KNOWN_VERSIONS:
      oldest = next(iter(versions))  # they are told of in order
      if version < oldest:  # told again after so many others
        return
      del versions[oldest]
    versions[version] = keys
    undone = self._undone(fragment, version)
    for island, item in items:
      facts = self._facts(island, fragment)
      if item.first_step < facts.folded.row:
        self.violations.append(
          f"island {island}, fragment {fragment}: steps ({item.first_step},"
          f" {item.step}] merged in version {version}, after all up to"
          f" {facts.folded.row} had a fate"
        )
      elif undone:
        facts.rolled_back.append(item)
      else:
        facts.merged.append(Merge(version, item))
      self._extend(island, item.incarnation, item.step)
      self._fold_if_many(island, fragment, facts)

  def _undone(self, fragment: int, version: int) -> bool:
    """Whether a return to a cut takes a version back."""
    spans = [s[fragment] for s in self._returns if fragment < len(s)]
    return any(first < version < last for first, last in spans)

  def _fold_if_many(
    self, island: int, fragment: int, facts: FragmentHistory
  ) -> None:
    if self._fold is None or facts.size < max(facts.fold_at, self._fold_at):
      return
    newest = self._begun.get(island, 0)
    lives = [life for _, life in sorted(self.lives[island].items())]
    later = [life for life in lives if life.incarnation > newest]
    starts = [
      min(life.start, facts.unsent.get(life.incarnation, life.start))
      for life in later
    ]
    self._fold(lives, facts, min(starts, default=_FAR), newest)

  def _facts(self, island: int, fragment: int) -> FragmentHistory:
    facts = self.fragments.get((island, fragment))
    if facts is None:
      facts = FragmentHistory(reinjected=self._reinjected)
      self.fragments[island, fragment] = facts
    return facts

  def _discarded(self, line: reader.Line) -> None:
    item = _contribution(line, line["island_incarnation"])
    facts = self._facts(line["island"], line["fragment"])
    reason = line["reason"].partition(":")[0]  # details follow a colon
    if item.step > facts.folded.row or item.key in facts.published:
      facts.discarded.append((reason, item))
    self._extend(line["island"], item.incarnation, item.step)

  def _extend_by_metrics(
    self, island: int, lines: Iterable[reader.Line]
  ) -> None:
    latest: dict[int, int] = {}
    repeated: dict[int, int] = {}
    undead: dict[int, tuple[int, int]] = {}
    newest = 0
    lives = self.lives[island]
    for line in lines:
      incarnation, step = line["incarnation"], line["step"]
      if incarnation < newest:  # the file has lines in the order of writing
        undead[incarnation] = step, newest
      newest = max(newest, incarnation)
      before = latest.get(incarnation)
      if before is None:
        life = lives.get(incarnation)
        before = life.start if life else step - 1
      if step <= before:
        repeated[incarnation] = step
      latest[incarnation] = max(before, step)
    for incarnation, step in latest.items():
      if incarnation in lives:
        self._extend(island, incarnation, step)
      else:
        self.violations.append(
          f"island {island}: incarnation {incarnation} logged steps but its"
          " tape has no 'started' line; they are not counted"
        )
    for incarnation, (step, later) in undead.items():
      self.violations.append(
        f"island {island}: incarnations {incarnation} and {later} overlap: the"
        f" first trained step {step} when the other had begun"
      )
    for incarnation, step in repeated.items():
      self.violations.append(
        f"island {island}: incarnation {incarnation} logged step {step} again"
      )


def _append(losses: list[Loss], facts: FragmentHistory, loss: Loss) -> None:
  """Adds a step range, less what is settled for good."""
  _hand(facts, loss.incarnation, loss.step)
  if loss.step > facts.folded.row:
    first = max(loss.first_step, facts.folded.row)
    losses.append(loss._replace(first_step=first))


def _hand(facts: FragmentHistory, incarnation: int, step: int) -> None:
  facts.handed[incarnation] = max(step, facts.handed.get(incarnation, 0))


def is_island(line: reader.Line) -> bool:
  """Whether an island wrote the line."""
  return str(line["role"]).startswith("island-")


def island_of(line: reader.Line) -> int:
  """Returns the island a line is about: its own, or its writer."""
  if line.get("island") is not None:
    return int(line["island"])
  return int(line["role"].removeprefix("island-"))


def _contribution(line: reader.Line, incarnation: int) -> Contribution:
  first, step = line["first_step"], line["step"]
  key = line.get("key") or (incarnation, first, step)
  return Contribution(key, incarnation, first, step, line.get("c_tokens"))
