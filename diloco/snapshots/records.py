"""Small records of the snapshot store: the truth of a run.

A record is a JSON object. Parsing is strict: a record that is torn, lacks a
field or has one of the wrong type raises `CorruptSnapshotError`, and nothing
read from the store is ever executed.
"""

import dataclasses
import functools
import json
import zlib
from typing import Any, Self, get_origin, get_type_hints

from diloco import errors

FORMAT = 1  # version of the store layout


@functools.cache
def _hints(kind: type) -> dict[str, tuple[type, ...]]:
  """The types JSON may give each field of a record."""
  hints: dict[str, tuple[type, ...]] = {}
  for name, hint in get_type_hints(kind).items():
    plain = get_origin(hint) or hint
    hints[name] = (float, int) if plain is float else (plain,)
  return hints


def _checksum(fields: Any) -> int:
  return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


@dataclasses.dataclass(frozen=True)
class Record:
  """Base of all records: strict JSON in both directions."""

  def to_bytes(self) -> bytes:
    """Serialises as JSON with a checksum of the content."""
    fields = dataclasses.asdict(self)
    return json.dumps({"crc32": _checksum(fields), "record": fields}).encode()

  @classmethod
  def from_bytes(cls, data: bytes) -> Self:
    """Parses and checks every field.

    Raises:
      CorruptSnapshotError: not JSON, a field missing, unknown or of the wrong
        type.
    """
    try:
      envelope = json.loads(data)
      fields, checksum = envelope["record"], envelope["crc32"]
    except (ValueError, KeyError, TypeError) as error:
      raise errors.CorruptSnapshotError(
        f"{cls.__name__} record cannot be parsed: {error!r}"
      ) from error
    if checksum != _checksum(fields):
      raise errors.CorruptSnapshotError(
        f"{cls.__name__} record does not match its checksum"
      )
    hints = _hints(cls)  # type: ignore[arg-type]
    if not isinstance(fields, dict) or set(fields) != set(hints):
      raise errors.CorruptSnapshotError(
        f"{cls.__name__} record is {fields!r}, expected fields {sorted(hints)}"
      )
    for name, kinds in hints.items():
      if not isinstance(fields[name], kinds):
        raise errors.CorruptSnapshotError(
          f"{cls.__name__}.{name} is {fields[name]!r}, expected {kinds}"
        )
    return cls(**fields)


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

  @property
  def c_steps(self) -> int:
    """Inner steps this outer gradient sums up."""
    return self.step - self.first_step

  @property
  def key(self) -> str:
    """Name of the record in the store; unique for ever."""
    return (
      f"{self.fragment:04d}.{self.island:04d}"
      f".{self.incarnation:04d}.{self.step:09d}"
    )


@dataclasses.dataclass(frozen=True)
class Head(Record):
  """Newest global version of one fragment; moved by compare-and-set."""

  fragment: int
  version: int
  token: int  # fencing token of the lease it was committed under
  payload: str  # prefix of parameters and outer momentum in the store
  chunks: list[list[int]]  # chunk shape per tensor, in plan order
  clock: dict[str, int]  # island -> last local step merged: a vector clock
  merged: dict[str, Any]  # what the tape says of this version

  def merged_step(self, island: int) -> int:
    """Last local step of an island that this version contains."""
    return self.clock.get(str(island), 0)


@dataclasses.dataclass(frozen=True)
class Lease(Record):
  """Leadership over a shard of fragments."""

  owner: str
  token: int  # grows with every change of owner
  beat: int  # grows with every renewal; watched, never compared with a clock


@dataclasses.dataclass(frozen=True)
class Member(Record):
  """An island's sign of life."""

  island: int
  incarnation: int
  beat: int
  step: int
  step_secs: float
  present: bool  # whether a round should wait for it


@dataclasses.dataclass(frozen=True)
class Board(Record):
  """What the syncer last did, in one small object: a hint, never the truth.

  Islands poll it instead of P heads. `versions` has the newest version of each
  fragment, `open_rounds` maps a fragment to the islands already in its round.
  """

  versions: list[int]  # [P]
  open_rounds: dict[str, list[int]]
