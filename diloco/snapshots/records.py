"""Small records of the snapshot store: the truth of a run.

A record is a JSON object. Parsing is strict: a record that is torn, lacks a
field or has one of the wrong type raises `CorruptSnapshotError`, and nothing
read from the store is ever executed.
"""

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable
from typing import Any, Self, get_origin, get_type_hints

from diloco import errors
from diloco.snapshots import keys

FORMAT = 4  # version of the store layout


@functools.cache
def _hints(kind: type) -> dict[str, tuple[type, ...]]:
  """The types JSON may give each field of a record."""
  hints: dict[str, tuple[type, ...]] = {}
  for name, hint in get_type_hints(kind).items():
    plain = get_origin(hint) or hint
    hints[name] = (float, int) if plain is float else (plain,)
  return hints


@functools.cache
def _required(kind: type) -> frozenset[str]:
  """Fields without a default; a record of an older version may lack others."""
  return frozenset(
    field.name
    for field in dataclasses.fields(kind)
    if field.default is field.default_factory is dataclasses.MISSING
  )


def checksum(fields: Any) -> int:
  """CRC-32 of what can be written as JSON, whatever the order of its keys."""
  return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


@dataclasses.dataclass(frozen=True)
class Record:
  """Base of all records: strict JSON in both directions."""

  def to_bytes(self) -> bytes:
    """Serialises as JSON with a checksum of the content."""
    fields = self.to_fields()
    return json.dumps({"crc32": checksum(fields), "record": fields}).encode()

  def crc32(self) -> int:
    """Checksum of the content."""
    return checksum(self.to_fields())

  def to_fields(self) -> dict[str, Any]:
    """Gives what `from_fields` takes; what the fields hold is shared."""
    names = _hints(type(self))  # type: ignore[arg-type]
    return {name: getattr(self, name) for name in names}

  def key_in_store(self) -> str:
    """The one key it belongs under; empty if its content does not say."""
    return _KEYS[type(self)](self) if type(self) in _KEYS else ""

  @classmethod
  def from_bytes(cls, data: bytes) -> Self:
    """Parses and checks every field.

    Raises:
      CorruptSnapshotError: not JSON, a field without a default missing, one
        unknown or of the wrong type.
    """
    try:
      envelope = json.loads(data)
      fields, expected = envelope["record"], envelope["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      raise errors.CorruptSnapshotError(
        f"{cls.__name__} record cannot be parsed: {error!r}"
      ) from error
    if expected != checksum(fields):
      raise errors.CorruptSnapshotError(
        f"{cls.__name__} record does not match its checksum"
      )
    return cls.from_fields(fields)

  @classmethod
  def from_fields(cls, fields: Any) -> Self:
    """Makes a record of what `to_fields` gave, and checks it.

    Raises:
      CorruptSnapshotError: a field without a default is missing, or one is
        unknown or of the wrong type.
    """
    hints = _hints(cls)  # type: ignore[arg-type]
    required = _required(cls)  # type: ignore[arg-type]
    if not isinstance(fields, dict) or not (
      required <= fields.keys() <= hints.keys()
    ):
      raise errors.CorruptSnapshotError(
        f"{cls.__name__} record is {fields!r}, expected fields {sorted(hints)}"
      )
    for name in fields:
      kinds = hints[name]
      if not isinstance(fields[name], kinds):
        raise errors.CorruptSnapshotError(
          f"{cls.__name__}.{name} is {fields[name]!r}, expected {kinds}"
        )
    return cls(**fields)


def check_key(record: Record, key: str) -> None:
  """Refuses a record that is whole and lies under another record's key.

  Raises:
    CorruptSnapshotError: its content belongs elsewhere.
  """
  if (belongs := record.key_in_store()) not in ("", key):
    raise errors.CorruptSnapshotError(
      f"the record under {key} belongs under {belongs}"
    )


@dataclasses.dataclass(frozen=True)
class Contribution(Record):
  """Commit record of one published outer gradient.

  The payload was complete in the store before this record was written; a
  contribution exists only when its record does. It covers the island's local
  steps (first_step, step].
  """

  island: int
  incarnation: int
  fragment: int
  base_version: int
  first_step: int
  step: int
  c_tokens: int
  codec: str
  plan_hash: str
  payload: str  # prefix of the tensors in the store
  chunks: list[list[int]]  # chunk shape per tensor, in plan order
  num_bytes: int
  norms: list[float]  # L2 norm per tensor, in plan order
  epoch: int = 0  # grows with every roll-back to a cut
  cut: int = 0  # last cut its island had taken part in

  @property
  def c_steps(self) -> int:
    """Inner steps this outer gradient sums up."""
    return self.step - self.first_step

  @functools.cached_property
  def key(self) -> str:
    """Name of the record in the store; unique for ever."""
    return keys.contribution_name(
      self.fragment, self.island, self.incarnation, self.step
    )


@dataclasses.dataclass(frozen=True)
class Head(Record):
  """Newest global version of one fragment; moved by compare-and-set."""

  fragment: int
  version: int
  token: int  # fencing token of the lease it was committed under
  payload: str  # prefix of parameters and optimizer buffers in the store
  chunks: list[list[int]]  # chunk shape per tensor, in plan order
  clock: dict[str, int]  # island -> last local step merged: a vector clock
  merged: dict[str, Any]  # what the tape says of this version
  epoch: int = 0  # grows with every roll-back to a cut
  cut: int = 0  # last cut its syncer had taken part in
  digest: str = ""  # of the version's parameters
  # island -> (first, last] behind the clock that no version has, newest last
  holes: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
  codec: str = "f32"  # of the parameters; digest is of what they decode to
  # Payloads with differences, to this version last, and the digest of what each
  # is from.
  deltas: list[list[str]] = dataclasses.field(default_factory=list)
  delta_codec: str = ""  # of these

  def merged_step(self, island: int) -> int:
    """Last local step of an island that this version contains."""
    return self.clock.get(str(island), 0)


@dataclasses.dataclass(frozen=True)
class Initial(Head):
  """A fragment that the run was given to start from; it stays with the run."""


@dataclasses.dataclass(frozen=True)
class Lease(Record):
  """Leadership over all fragments, or a controller's over a run."""

  owner: str
  token: int  # grows with every change of owner
  beat: int  # grows with every renewal; watched, never compared with a clock
  home: str = ""  # of a controller's: id of the one directory the run is in


@dataclasses.dataclass(frozen=True)
class DrawnToken(Record):
  """The newest number drawn: of a lease's tokens, or of an island's lives."""

  token: int


@dataclasses.dataclass(frozen=True)
class Member(Record):
  """A role's sign of life: which of its lives has its place, and where."""

  role: str
  incarnation: int
  beat: int
  nonce: str  # of this process: two may have been given one number
  # For people, and for who attaches; seconds since the epoch, by its own clock.
  run: str = ""
  host: str = ""
  pid: int = 0
  since_secs: float = 0.0
  told_secs: float = 0.0
  left: bool = False  # in order
  # Of an island.
  step: int = 0
  step_secs: float = 0.0
  present: bool = False  # whether a round should wait for it

  @functools.cached_property
  def island(self) -> int:
    """Number of the island that it is; -1 for another role."""
    return keys.island_of(self.role)


@dataclasses.dataclass(frozen=True)
class Board(Record):
  """What the syncer last did, in one small object: a hint, never the truth.

  Islands poll it instead of P heads. `versions` has the newest version of each
  fragment, `open_rounds` maps a fragment to the islands already in its round.
  """

  versions: list[int]  # [P]
  open_rounds: dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class Verdict(Record):
  """What the syncer has against an island; overwritten by the next one."""

  island: int
  incarnation: int
  offences: int  # in a row, over all of its incarnations
  fragment: int
  reason: str
  suspended_secs: float  # refused unseen for so long; 0 for not


@dataclasses.dataclass(frozen=True)
class Epoch(Record):
  """Which timeline the store is in, 0 being that of a run never rolled back.

  It is the decision of a restore too; see `restore`.
  """

  epoch: int
  cut: int  # the cut it was rolled back to
  # [P], what the heads were set to.
  versions: list[int] = dataclasses.field(default_factory=list)
  done: bool = True  # else a restore is under way, or died
  stamp: int = 0  # the newest cut there was then; heads are stamped with it
  # Keys of contributions that wait again.
  reinjected: list[str] = dataclasses.field(default_factory=list)
  token: int = 0  # of the newest controller that may restore


@dataclasses.dataclass(frozen=True)
class CutRequest(Record):
  """Asks all roles for their parts of a cut."""

  cut: int
  epoch: int
  islands: list[int]  # those expected to take part


@dataclasses.dataclass(frozen=True)
class CutPart(Record):
  """One island's part: its saved state, with all it published before it."""

  cut: int
  epoch: int
  island: int
  incarnation: int
  step: int
  checkpoint: str  # directory, relative to the run's
  checksum: int  # `crc32` of the saved state's marker
  positions: list[list[int]]  # [P] of base, first step, published step


@dataclasses.dataclass(frozen=True)
class CutHeads(Record):
  """The syncer's part: all heads at one moment."""

  cut: int
  epoch: int
  token: int
  heads: list[dict[str, Any]]  # [P], fields of `Head`


@dataclasses.dataclass(frozen=True)
class CutChannel(Record):
  """Contributions sent before a cut and not merged in its heads."""

  cut: int
  token: int  # of the heads it belongs to
  contributions: list[dict[str, Any]]  # fields of `Contribution`


@dataclasses.dataclass(frozen=True)
class CutComplete(Record):
  """Written last: the cut can be restored; or never will be, if it is void."""

  cut: int
  epoch: int
  parts: dict[str, int]  # name below the cut's prefix -> its `crc32`

  @property
  def is_void(self) -> bool:
    """Whether the cut was given up."""
    return not self.parts


@dataclasses.dataclass(frozen=True)
class PeerRequest(Record):
  """An island's call for an inner optimizer's state."""

  island: int
  incarnation: int
  versions: list[int]  # [P], what the answer's sender must have adopted


@dataclasses.dataclass(frozen=True)
class PeerState(Record):
  """Answer to a `PeerRequest`: where the tensors are, and what they hold."""

  island: int  # who asked
  incarnation: int
  from_island: int
  from_incarnation: int
  step: int  # of the sender
  versions: list[int]  # [P], the sender's base versions then
  payload: str
  scalars: dict[str, int]  # leaf -> value, of an integer or bool
  chunks: dict[str, list[int]]  # leaf -> chunk shape in the store
  digest: str  # of all tensors, in the order of their names


@dataclasses.dataclass(frozen=True)
class CutAbandoned(Record):
  """The cut will never be complete; its number is not used again."""

  cut: int
  reason: str


# Where records belong whose content says so.
_KEYS: dict[type[Record], Callable[[Any], str]] = {
  Contribution: lambda r: keys.contribution_key(r.key),
  Head: lambda r: keys.head_key(r.fragment),
  Initial: lambda r: keys.initial_key(r.fragment),
  Member: lambda r: keys.member_key(r.role),
  Verdict: lambda r: keys.verdict_key(r.island),
  CutRequest: lambda r: keys.cut_request_key(r.cut),
  CutPart: lambda r: keys.cut_part_key(r.cut, r.island),
  CutHeads: lambda r: keys.cut_heads_key(r.cut),
  CutChannel: lambda r: keys.cut_channel_key(r.cut),
  CutComplete: lambda r: keys.cut_complete_key(r.cut),
  PeerRequest: lambda r: keys.peer_request_key(r.island),
  PeerState: lambda r: keys.peer_state_key(r.island, r.incarnation),
  CutAbandoned: lambda r: keys.cut_abandoned_key(r.cut),
}
