"""What the tapes say about each trained step, sorted for the ledger.

A *life* is one incarnation of an island and the steps it trained. A
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
    overwritten: steps given up by adopting a version.
    dropped: steps whose publication the island dropped.
    submitted: steps on their way to publication.
    unsent: by incarnation, the step after which it took over the unpublished
      progress of the incarnation before, if it restored that.
  """

  published: dict[object, Contribution] = dataclasses.field(
    default_factory=dict
  )
  merged: list[Merge] = dataclasses.field(default_factory=list)
  discarded: list[tuple[str, Contribution]] = dataclasses.field(
    default_factory=list
  )
  overwritten: list[Loss] = dataclasses.field(default_factory=list)
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
      events.MERGED: self._merged,
      events.DISCARDED: self._discarded,
    }
    self._collect_lives(record.events)
    for line in record.events:
      if handler := handlers.get(line["event"]):
        handler(line)
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
          facts.unsent[incarnation] = step
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
    first, last = line.get("lost_from_step"), line.get("lost_to_step")
    if first is None or last is None or first >= last:
      return
    loss = Loss(line["incarnation"], first, last)
    self.fragments[island_of(line), line["fragment"]].overwritten.append(loss)
    self._extend(island_of(line), loss.incarnation, loss.step)

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

  def _extend_by_metrics(self, island: int, lines: list[reader.Line]) -> None:
    latest: dict[int, int] = {}
    repeated: dict[int, int] = {}
    lives = self.lives[island]
    for line in lines:
      incarnation, step = line["incarnation"], line["step"]
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
    for incarnation, step in repeated.items():
      self.violations.append(
        f"island {island}: incarnation {incarnation} logged step {step} again"
      )


def island_of(line: reader.Line) -> int:
  """Returns the island a line is about: its own, or its writer."""
  if "island" in line:
    return int(line["island"])
  return int(line["role"].removeprefix("island-"))


def _contribution(line: reader.Line, incarnation: int) -> Contribution:
  first, step = line["first_step"], line["step"]
  key = line.get("key") or (incarnation, first, step)
  return Contribution(key, incarnation, first, step, line.get("c_tokens"))
