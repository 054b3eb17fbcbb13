"""What is told of an island's lives and of what they did to a fragment.

A *life* is one incarnation of an island and the steps it trained. A later life
may begin below the end of an earlier one and do those steps again. A
*contribution* is a step range of one island and fragment that was published.
Ranges are (first_step, step], open on the left, as on the tape.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_FAR = 1 << 62


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
  """One incarnation of an island: it trained (start, end].

  Attributes:
    epoch: in which it began; a return to a cut begins another.
    untold_from: the step of a cut that the run was set back to for want of the
      ends of its tapes, if it lived then: of what it did after that step, some
      was never told.
  """

  incarnation: int
  start: int
  tokens_per_step: int
  end: int
  died: bool = False
  stopped: bool = False
  begun: bool = True  # its first line was read, not only what others say of it
  epoch: int = 0
  untold_from: int | None = None


@dataclasses.dataclass
class Folded:
  """What is settled for good, up to a row; see `diloco.tape.folding`.

  Attributes:
    row: the last one.
    counts: fragment-tokens by fate.
    rows: number of rows by fate.
    in_vain: what was trained in vain, by the life that did it.
    violations: what was wrong with it.
    version: the newest that any of it was merged into.
  """

  row: int = 0
  counts: Counter[str] = dataclasses.field(default_factory=Counter)
  rows: Counter[str] = dataclasses.field(default_factory=Counter)
  in_vain: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
  violations: list[str] = dataclasses.field(default_factory=list)
  version: int = 0


@dataclasses.dataclass
class FragmentHistory:
  """All that happened to one fragment of one island and is not folded.

  Attributes:
    published: contributions by key, in the island's order.
    merged: contributions with the version they entered.
    discarded: reasons and contributions, in the syncer's order.
    rolled_back: contributions of versions that a return to a cut took back.
    reinjected: keys of those of them that wait again since such a return.
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

  @property
  def keys(self) -> set[object]:
    """Keys of all contributions that are told of."""
    merged = (merge.contribution for merge in self.merged)
    return {*self.published, *(i.key for i in (*merged, *self.rolled_back))}

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
      reinjected=self.reinjected
      & {i.key for i in self.rolled_back if inside(i)},
      overwritten=[i for i in self.overwritten if inside(i)],
      quarantined=[i for i in self.quarantined if inside(i)],
      repeated=[i for i in self.repeated if inside(i)],
      dropped=[i for i in self.dropped if inside(i)],
      submitted=[i for i in self.submitted if inside(i)],
      unsent={i: min(step, last) for i, step in self.unsent.items()},
    )

  def merged_until(self, version: int) -> int:
    """Returns the last row that is in a version."""
    steps = [m.contribution.step for m in self.merged if m.version <= version]
    return max(steps, default=self.folded.row)

  def roll_back(self, first: int, last: int) -> None:
    """Takes back what entered versions between the two."""
    merged, self.merged = self.merged, []
    for merge in merged:
      if first < merge.version < last:
        self.rolled_back.append(merge.contribution)
      else:
        self.merged.append(merge)

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


class StepLog:
  """What is wrong with the steps that an island logged."""

  def __init__(self) -> None:
    self.newest = 0  # incarnation
    self.first: dict[int, int] = {}  # by incarnation, steps
    self.latest: dict[int, int] = {}
    self.repeated: dict[int, int] = {}
    self.undead: dict[int, tuple[int, int]] = {}  # step, the later incarnation

  def take(self, incarnation: int, step: int) -> None:
    """Takes the next line; they are in the order of writing."""
    if incarnation < self.newest:
      self.undead[incarnation] = step, self.newest
    self.newest = max(self.newest, incarnation)
    self.first.setdefault(incarnation, step)
    before = self.latest.get(incarnation, step - 1)
    if step <= before:
      self.repeated[incarnation] = step
    self.latest[incarnation] = max(before, step)

  def violations(self, lives: Mapping[int, Life]) -> list[str]:
    """Returns what must not be, given the island's lives."""
    found = [
      f"incarnation {incarnation} logged steps but its tape has no 'started'"
      " line; they are not counted"
      for incarnation in self.latest
      if not lives[incarnation].begun
    ]
    found += [
      f"incarnations {incarnation} and {later} overlap: the first trained step"
      f" {step} when the other had begun"
      for incarnation, (step, later) in self.undead.items()
    ]
    before = {
      incarnation: step
      for incarnation, step in self.first.items()
      if lives[incarnation].begun and step <= lives[incarnation].start
    }
    found += [
      f"incarnation {incarnation} logged step {step} again"
      for incarnation, step in (before | self.repeated).items()
    ]
    return found
