"""What a replay does, as data: the words a plan is written in.

A *life* is one incarnation of an island. Its script says how it began and what
it did between which steps, in the order of its tape; inner steps fill the gaps.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple


class LifeId(NamedTuple):
  """One incarnation of an island."""

  island: int
  incarnation: int

  def __str__(self) -> str:
    return f"island {self.island}.{self.incarnation}"


class VersionId(NamedTuple):
  """A global version of a fragment."""

  fragment: int
  version: int

  def __str__(self) -> str:
    return f"version {self.version} of fragment {self.fragment}"


class StateId(NamedTuple):
  """A state that was kept: that of one life at one step."""

  island: int
  incarnation: int
  step: int
  serial: int = 0  # which save of its life; 0 for what was lent to a peer


# Operations of a life. Each happens when `step` inner steps are done.


class Publish(NamedTuple):
  """Hand the progress of steps (first_step, step] out."""

  step: int
  fragment: int
  base_version: int
  first_step: int
  key: str
  wanted: bool = False  # some version has it; otherwise it need not be written


class Adopt(NamedTuple):
  """Swap a version in."""

  step: int
  fragment: int
  version: int
  kept_from: int
  muted_until: int = 0
  resync: bool = False
  merged_step: int = 0  # this and the next: see `feedback.News`
  holes: tuple[tuple[int, int], ...] = ()


class Rebase(NamedTuple):
  """Set a fragment that was muted to its anchor."""

  step: int
  fragment: int


class Mend(NamedTuple):
  """Replace what is not finite in the inner optimizer's state."""

  step: int
  source: StateId | None  # where from; None for zeros


class Poison(NamedTuple):
  """Make a fragment's values not finite: a configured fault."""

  step: int
  fragment: int


class Save(NamedTuple):
  """Keep the whole state: a later life went on from it."""

  step: int
  state: StateId


class Lend(NamedTuple):
  """Keep the inner optimizer's state: another island was given it."""

  step: int
  state: StateId


Operation = Publish | Adopt | Rebase | Mend | Poison | Save | Lend


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a life ran under; all of it can change bits."""

  topology: str
  cores: tuple[int, ...]
  environ: Mapping[str, str]
  software: Mapping[str, str]
  total_tokens: int
  present: tuple[int, ...] = ()  # slices of an elastic job; else none
  own_rate: float | None = None  # of "eager" steps; None: as configured


@dataclasses.dataclass(frozen=True)
class Beginning:
  """How a life's state was made.

  Attributes:
    step: inner steps done in earlier lives.
    versions: [P], global versions it started from.
    first_steps: [P], the step each fragment's progress counts from; progress
      from before `step` is carried over from the saved state.
    saved: the own saved state it took.
    lent: the peer's optimizer state it took instead of the saved one.
    scheduled: steps that its learning-rate schedules have gone.
    answers: [P], the island's last step in these versions, and its holes.
  """

  step: int
  versions: tuple[int, ...]
  first_steps: tuple[int, ...]
  saved: StateId | None
  lent: StateId | None
  scheduled: int
  answers: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

  @property
  def carried(self) -> tuple[int, ...]:
    """Fragments with progress from the saved state."""
    return tuple(p for p, s in enumerate(self.first_steps) if s < self.step)


@dataclasses.dataclass(frozen=True)
class Life:
  """A life's script."""

  id: LifeId
  settings: Settings
  beginning: Beginning
  operations: tuple[Operation, ...]


@dataclasses.dataclass(frozen=True)
class Initial:
  """How version 0 came to be: the initial parameters of one life."""

  id: VersionId
  life: LifeId
  digest: str


class Share(NamedTuple):
  """A contribution in a merge."""

  key: str
  weight: float
  norm: float  # of the outer gradient, as the syncer read it
  c_tokens: int  # as the syncer counted
  staleness: int


@dataclasses.dataclass(frozen=True)
class Merge:
  """How a version came to be: from the one before and contributions."""

  id: VersionId
  shares: tuple[Share, ...]
  digest: str
  learning_rate: float  # of the outer step

  @property
  def before(self) -> VersionId:
    """The version it was made from."""
    return self.id._replace(version=self.id.version - 1)


@dataclasses.dataclass(frozen=True)
class Return:
  """How a version came to be: an earlier one put back by a return to a cut."""

  id: VersionId
  of: VersionId


Making = Initial | Merge | Return


_KINDS: Mapping[str, Any] = {
  kind.__name__: kind
  for kind in (
    *(LifeId, StateId, Settings, Beginning),
    *(Publish, Adopt, Rebase, Mend, Poison, Save, Lend),
  )
}


def to_json(value: Any) -> Any:
  """What a worker is told, as plain values: of ours a name and the fields."""
  fields = value
  if dataclasses.is_dataclass(value):
    fields = vars(value).values()
  elif not isinstance(value, tuple | list):
    return value
  name = type(value).__name__
  return [*([name] if name in _KINDS else []), *map(to_json, fields)]


def from_json(value: Any) -> Any:
  """The value of `to_json`; lists are tuples."""
  if not isinstance(value, list):
    return value
  fields = tuple(map(from_json, value))
  if fields and isinstance(fields[0], str) and fields[0] in _KINDS:
    return _KINDS[fields[0]](*fields[1:])
  return fields
