"""What the tapes say about each trained step, sorted for the ledger.

A *life* is one incarnation of an island and the steps it trained. A later life
may begin below the end of an earlier one and do those steps again. A
*contribution* is a step range of one island and fragment that was published.
Ranges are (first_step, step], open on the left, as on the tape.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from diloco.tape import events, reader


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
class FragmentHistory:
  """All that happened to one fragment of one island.

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


class History:
  """The record of a run by island and fragment."""

  def __init__(self, record: reader.Record, num_fragments: int = 1):
    """Sorts the record.

    Args:
      record: all tapes and metric logs of a run.
      num_fragments: P, or fewer; the tape may show more.
    """
    self.violations: list[str] = []
    self.num_fragments = num_fragments
    self.lives: dict[int, dict[int, Life]] = collections.defaultdict(dict)
    self.fragments: dict[tuple[int, int], FragmentHistory] = (
      collections.defaultdict(FragmentHistory)
    )
    self._versions: dict[tuple[int, int], int] = {}  # hash of their keys
    handlers = {
      events.SUBMITTED: self._submitted,
      events.PUBLISHED: self._published,
      events.PUBLISH_DROPPED: self._dropped,
      events.ADOPTED: self._adopted,
      events.RESYNCED: self._resynced,
      events.EVALUATED: self._reached,
      events.SAVING: self._reached,
      events.CHECKPOINTED: self._reached,
      events.REBASED: self._reached,
      events.MERGED: self._merged,
      events.DISCARDED: self._discarded,
    }
    self._collect_lives(record.events)
    for line in record.events:
      if handler := handlers.get(line["event"]):
        handler(line)
    for line in record.events:
      if line["event"] == events.RESTORED:
        self._roll_back(line)
    for island, lines in record.metrics.items():
      self._extend_by_metrics(island, lines)
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
          facts = self.fragments[island_of(line), fragment]
          facts.unsent[incarnation] = min(step, line["step"])
          self._mute(line, fragment, step)
      elif line["event"] in (events.ISLAND_DIED, events.STOPPED):
        ended.append(line)
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
    self.fragments[island, line["fragment"]].published[item.key] = item
    self._extend(island, incarnation, item.step)

  def _submitted(self, line: reader.Line) -> None:
    loss = Loss(line["incarnation"], line["first_step"], line["step"])
    self.fragments[island_of(line), line["fragment"]].submitted.append(loss)
    self._extend(island_of(line), loss.incarnation, loss.step)

  def _dropped(self, line: reader.Line) -> None:
    loss = Loss(line["incarnation"], line["first_step"], line["step"])
    self.fragments[island_of(line), line["fragment"]].dropped.append(loss)
    self._extend(island_of(line), loss.incarnation, loss.step)

  def _adopted(self, line: reader.Line) -> None:
    if line.get("step") is not None:
      self._reached(line)
    facts = self.fragments[island_of(line), line["fragment"]]
    self._give_up(line, line, facts.overwritten)

  def _resynced(self, line: reader.Line) -> None:
    self._reached(line)
    for item in line["fragments"]:
      facts = self.fragments[island_of(line), item["fragment"]]
      self._give_up(line, item, facts.quarantined)

  def _give_up(
    self, line: reader.Line, item: reader.Line, losses: list[Loss]
  ) -> None:
    """Takes what a fragment loses by a version that was swapped in."""
    if (until := item.get("muted_until")) is not None:
      self._mute(line, item["fragment"], until)
    first, last = item.get("lost_from_step"), item.get("lost_to_step")
    if first is None or last is None or first >= last:
      return
    losses.append(Loss(line["incarnation"], first, last))
    self._extend(island_of(line), line["incarnation"], last)

  def _mute(self, line: reader.Line, fragment: int, until: int) -> None:
    step = line.get("step")
    if step is not None and until > step:
      loss = Loss(line["incarnation"], step, until)
      self.fragments[island_of(line), fragment].repeated.append(loss)

  def _reached(self, line: reader.Line) -> None:
    self._extend(island_of(line), line["incarnation"], line["step"])

  def _merged(self, line: reader.Line) -> None:
    fragment, version = line["fragment"], line["version"]
    items = [
      (c["island"], _contribution(c, c["incarnation"]))
      for c in line["contributions"]
    ]
    keys = hash(frozenset([item.key for _, item in items]))
    known = self._versions.get((fragment, version))
    if known is not None:  # told again, by a syncer that took over
      if known != keys:
        self.violations.append(
          f"fragment {fragment}: version {version} was committed twice, from"
          " different contributions"
        )
      return
    self._versions[fragment, version] = keys
    for island, item in items:
      self.fragments[island, fragment].merged.append(Merge(version, item))
      self._extend(island, item.incarnation, item.step)

  def _discarded(self, line: reader.Line) -> None:
    item = _contribution(line, line["island_incarnation"])
    history = self.fragments[line["island"], line["fragment"]]
    reason = line["reason"].partition(":")[0]  # details follow a colon
    history.discarded.append((reason, item))
    self._extend(line["island"], item.incarnation, item.step)

  def _roll_back(self, line: reader.Line) -> None:
    """Takes back the merges of versions after the cut's."""
    reinjected = set(line.get("reinjected") or ())
    spans = list(zip(line["version_from"], line["version_to"], strict=True))
    for (_, fragment), facts in self.fragments.items():
      if fragment >= len(spans):
        continue
      first, last = spans[fragment]
      kept = [m for m in facts.merged if not first < m.version < last]
      facts.rolled_back += [
        m.contribution for m in facts.merged if first < m.version < last
      ]
      facts.merged = kept
      facts.reinjected |= reinjected

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


def island_of(line: reader.Line) -> int:
  """Returns the island a line is about: its own, or its writer."""
  if line.get("island") is not None:
    return int(line["island"])
  return int(line["role"].removeprefix("island-"))


def _contribution(line: reader.Line, incarnation: int) -> Contribution:
  first, step = line["first_step"], line["step"]
  key = line.get("key") or (incarnation, first, step)
  return Contribution(key, incarnation, first, step, line.get("c_tokens"))
