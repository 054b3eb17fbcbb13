"""The snapshot store of the simulated world: a dictionary that misbehaves.

Records are kept as objects, damage is a mark. What is written late, twice or
not at all is the kernel's doing; this is what it does it to.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from diloco import errors
from diloco.snapshots import keys, operations, records
from diloco.verification import values

Handler = Callable[[Any, Any], Any]
NOTHING = (None, 0)  # what a read gives where no record is
# What a full disk refuses.
TAKING_ROOM = (
  *(operations.Write, operations.CompareAndSet),
  *(operations.WritePayload, operations.Merge),
)


class FaultyStore:
  """Records and symbolic payloads."""

  def __init__(self) -> None:
    """An empty store; `observer` must be set before it is used."""
    self.observer: Any = None  # hears of all at the instant it happens
    self.records: dict[str, tuple[Any, int]] = {}
    self.payloads: dict[str, Any] = {}
    self.directories: dict[str, dict[str, None]] = collections.defaultdict(dict)
    self.damaged: set[str] = set()  # keys and prefixes
    self.swapped = False  # whether a record may lie under another's key
    self.ever_damaged: set[str] = set()  # those too that were written anew
    # The records while nothing is damaged: a plain look-up is a read then.
    self.plain: dict[str, tuple[Any, int]] | None = self.records
    self.full = 0  # intervals of full disk under way
    self.stale: dict[str, dict[str, list[str]]] = {}  # by role, old listings
    self.hidden: set[str] = set()  # keys that no listing has
    self.unlisted: set[str] = set()  # names of commit records that ever were
    self._leases = ""  # key of what is damaged or lost of the lease
    self._generation = 0
    self._aliases: dict[tuple[str, int], values.Version] = {}
    self.handlers: dict[type, Handler] = {
      operations.Read: self._read,
      operations.Write: self._write,
      operations.CompareAndSet: self._compare_and_set,
      operations.Delete: self._delete,
      operations.DeleteTree: self._delete_tree,
      operations.Names: self._names,
      operations.WritePayload: self._write_payload,
      operations.ReadPayload: lambda o, _: self.version_of(o.head),
      operations.ReadState: lambda o, _: self.content(o.state.payload),
      operations.Merge: self._merge,
      operations.Point: self._point,
    }

  def peek(self, key: str) -> Any:
    """A record as it is, or None; for observers."""
    return self.records.get(key, (None, 0))[0]

  def seed(self, key: str, content: Any) -> None:
    """Puts a record or a payload there before the run begins."""
    if isinstance(content, records.Record):
      self._put(key, content)
    else:
      self.payloads[key] = content
      self._enter(key)

  # Operations

  def _read(self, operation: operations.Read, life: Any) -> Any:
    key = operation[0]
    if self.damaged and key in self.damaged and key in self.records:
      error = errors.CorruptSnapshotError(f"{key} does not match its checksum")
      error.generation = self.records[key][1]
      raise error
    found = self.records.get(key, NOTHING)
    if self.swapped and found[0] is not None:
      self._check_key(key, *found)
    return found

  def _check_key(self, key: str, record: Any, generation: int) -> None:
    try:
      records.check_key(record, key)
    except errors.CorruptSnapshotError as error:
      error.generation = generation
      raise

  def _write(self, operation: operations.Write, life: Any) -> None:
    record: Any
    key, record = operation
    self._put(key, record)
    kind = type(record)
    if kind is records.Contribution:
      self.observer.contribution_written(key, record, life)
    elif kind is records.Board:
      self.observer.board_written(record)

  def _compare_and_set(
    self, operation: operations.CompareAndSet, life: Any
  ) -> bool:
    record: Any
    key, record, generation = operation
    found = self.records.get(key)
    if (found[1] if found else 0) != generation:
      return False
    kind = type(record)
    if kind is records.Head:
      self.observer.head_moved(found and found[0], record, life)
    elif key == keys.SYNCER_LEASE:
      self.observer.lease_moved(record, life)
    elif kind is records.Epoch:
      self.observer.epoch_moved(found[0] if found else None, record, life)
    self._put(key, record)
    if kind is records.Contribution:
      self.observer.contribution_written(key, record, life)
    return True

  def _put(self, key: str, record: Any) -> None:
    self._generation += 1
    if key not in self.records:
      self._enter(key)
    if self.damaged:
      self.damaged.discard(key)
    self.records[key] = (record, self._generation)

  def _enter(self, key: str) -> None:
    """Makes a key visible in the listings of all directories above it."""
    parent, _, name = key.rpartition("/")
    self.directories[parent][name] = None
    while "/" in parent:
      parent, _, name = parent.rpartition("/")
      self.directories[parent][name] = None

  def _remove(self, key: str) -> None:
    parent, _, name = key.rpartition("/")
    self.directories[parent].pop(name, None)

  def _delete(self, operation: operations.Delete, life: Any) -> None:
    key = operation[0]
    found = self.records.pop(key, None)
    if found is not None:
      self._remove(key)
      if type(found[0]) is records.Contribution:
        self.observer.contribution_deleted(key[14:], found[0], life)

  def _delete_tree(self, operation: operations.DeleteTree, life: Any) -> None:
    prefix = operation[0]
    payload = self.payloads.get(prefix)
    if payload is not None:
      self.observer.payload_deleted(prefix, payload)
      del self.payloads[prefix]
      self._remove(prefix)
    elif prefix in self.payloads:
      del self.payloads[prefix]  # the store has lost it
    if prefix in self.directories:
      for key in [k for k in self.records if k.startswith(prefix + "/")]:
        self._delete(operations.Delete(key), life)
      for key in [k for k in self.payloads if k.startswith(prefix + "/")]:
        self._delete_tree(operations.DeleteTree(key), life)
      self._remove(prefix)

  def _names(self, operation: operations.Names, life: Any) -> list[str]:
    prefix = operation[0]
    if self.stale and (old := self.stale.get(life.role.name)) is not None:
      return list(old.get(prefix, ()))
    found = self.directories.get(prefix)
    if self.hidden and found:
      start = len(prefix) + 1
      hidden = {key[start:] for key in self.hidden if key.startswith(prefix)}
      return sorted(found.keys() - hidden)
    return sorted(found) if found else []

  def _write_payload(
    self, operation: operations.WritePayload, life: Any
  ) -> None:
    prefix, content = operation
    if prefix not in self.payloads:
      self._enter(prefix)
    if self.damaged:
      self.damaged.discard(prefix)
    self.payloads[prefix] = content

  def version_of(self, head: records.Head) -> Any:
    """The values a head points to, under the head's number."""
    content = self.content(head.payload)
    if content.number == head.version:
      return content
    # A head that was set back to an older version's payload.
    alias = self._aliases.get((head.payload, head.version))
    if alias is None:
      alias = values.Version(
        head.fragment,
        head.version,
        content.rows,
        parent=content,
        theta=content.theta,
      )
      self._aliases[head.payload, head.version] = alias
    return alias

  def content(self, prefix: str) -> Any:
    """A payload's value; it may be missing or damaged."""
    content = self.payloads.get(prefix)
    if content is None or (self.damaged and prefix in self.damaged):
      raise errors.CorruptSnapshotError(f"{prefix} is missing or damaged")
    return content

  def _merge(self, operation: operations.Merge, life: Any) -> Any:
    if (again := self.payloads.get(operation.payload)) is not None:
      return again  # its writes were delivered twice
    contents = []
    for record in operation.contributions:
      try:
        contents.append(self.content(record.payload))
      except errors.CorruptSnapshotError as error:
        contents.append(error)
    version = self.observer.merge(operation, contents, life)
    self._write_payload(
      operations.WritePayload(operation.payload, version), life
    )
    return version

  def _point(self, operation: operations.Point, life: Any) -> None:
    if operation.name == "mid_recovery":
      self.observer.looks(life.shell.index)

  # Damage

  def may_damage(self, operation: Any) -> bool:
    """Whether this writes something that the protocol can lose.

    What it cannot lose and go on, heads and global versions, is spoiled on its
    own (`spoil`): it takes a return to a cut (`diloco resume --cut=last`).
    """
    if isinstance(operation, operations.WritePayload):
      return operation.prefix.startswith(("payloads/", "peers/"))
    if isinstance(operation, operations.Write):
      return operation.key.startswith(
        ("contributions/", "members/", "peers/", "verdicts/", "board")
      )
    if isinstance(operation, operations.CompareAndSet):
      # The lease, or the newest token drawn for it: without both, and before
      # the heads are fenced, nothing tells which token was given out.
      key = operation.key
      return key.startswith(keys.SYNCER_LEASE) and self._leases in ("", key)
    return False

  def damage(self, operation: Any, *, lost: bool) -> None:
    """Spoils what an operation just wrote."""
    key = operation[0]
    if isinstance(operation, operations.CompareAndSet):
      found = self.records.get(key)
      if found is None or found[0] is not operation.record:
        return  # it wrote nothing
      self._leases = key
    self.plain = None
    if not lost:
      self.damaged.add(key)
      self.ever_damaged.add(key)
    elif isinstance(operation, operations.WritePayload):
      self.payloads[key] = None
    elif (found := self.records.pop(key, None)) is not None:
      self._remove(key)
      self.observer.record_lost(found[0])

  def spoil(self, key: str, *, lost: bool) -> None:
    """Damages or loses a head, or a payload, that is there."""
    self.plain = None
    self.damaged.add(key)
    if lost:
      self._remove(key)
    if key not in self.records:
      return
    # Whoever compares generations sees that it is not the same any more.
    self._generation += 1
    record, _ = self.records.pop(key)
    if not lost:
      self.records[key] = (record, self._generation)

  def hide(self, key: str) -> None:
    """Keeps a key out of all listings."""
    self.hidden.add(key)
    self.unlisted.add(key.rpartition("/")[2])

  def swap(self, key: str, other: str) -> None:
    """Puts the record of another key under a key: whole, and not its own."""
    self.plain, self.swapped = None, True
    self._generation += 1
    self.records[key] = (self.records[other][0], self._generation)

  def listings(self) -> dict[str, list[str]]:
    """All listings as they are now, for a role that will see old ones."""
    return {name: sorted(found) for name, found in self.directories.items()}
