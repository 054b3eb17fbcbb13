"""Protocols as sequences of store operations, without the store.

A *procedure* is a generator that yields operations and receives their results.
It holds the order on which safety rests (payload, then record, then head) and
every decision between two operations, but does nothing itself. The live shells
perform procedures on the snapshot store; the simulated world performs the same
ones on a store of its own, where each operation may be slow, fail before or
after it took effect, or be the last thing its process ever did.

A *script* is a procedure that also waits, as the loop of a background thread
does: for a number of seconds, or until it is woken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar

from diloco import errors
from diloco.snapshots import keys, records

T = TypeVar("T")


class Read(NamedTuple):
  """Gives (record or None, generation)."""

  key: str
  kind: type[records.Record]


@functools.cache
def read_head(fragment: int) -> Read:
  """Reads a fragment's head; made once for each."""
  return Read(keys.head_key(fragment), records.Head)


class Write(NamedTuple):
  """Writes a record unconditionally."""

  key: str
  record: records.Record


class CompareAndSet(NamedTuple):
  """Writes if the key is still at `generation`; gives whether it was."""

  key: str
  record: records.Record
  generation: Any


class Delete(NamedTuple):
  """Deletes one key; one that is not there is no error."""

  key: str


class DeleteTree(NamedTuple):
  """Deletes everything below a prefix."""

  prefix: str


class Names(NamedTuple):
  """Gives the sorted names directly below a prefix; may be out of date."""

  prefix: str


class WritePayload(NamedTuple):
  """Writes tensors below a prefix; when it returns they are durable."""

  prefix: str
  content: Any


class ReadPayload(NamedTuple):
  """Reads the tensors a head points to."""

  head: records.Head


class ReadState(NamedTuple):
  """Reads the optimizer state that a peer's answer points to."""

  state: records.PeerState


class Merge(NamedTuple):
  """Merges contributions into the payload of a new version; gives its facts."""

  head: records.Head  # the version before
  payload: str  # prefix of the version to write
  contributions: tuple[records.Contribution, ...]
  weights: tuple[float, ...]
  share: float = 1.0  # of the islands that are there, those who contribute


class Compute(NamedTuple):
  """Gives what a call returns; a script's other users need not wait for it."""

  work: Callable[[], Any]


class Step(Compute):
  """An inner step: gives its metrics. Who has a loop of its own does it."""


class Point(NamedTuple):
  """A named instant between two operations, for those who plan crashes."""

  name: str


Operation = (
  Read
  | Write
  | CompareAndSet
  | Delete
  | DeleteTree
  | Names
  | WritePayload
  | ReadPayload
  | ReadState
  | Merge
  | Compute
  | Point
)
Procedure = Generator[Operation, Any, T]


class Nap(NamedTuple):
  """Waits that long, or until woken."""

  secs: float


# A number is waited for in seconds, whatever happens; None until woken.
Script = Generator[Operation | Nap | float | None, Any, T]

# Performs procedures that do not depend on each other; gives their results.
Each = Callable[[Iterable[Procedure[Any]]], Procedure[list[Any]]]


def in_turn(procedures: Iterable[Procedure[Any]]) -> Procedure[list[Any]]:
  """Performs one after the other: an `Each`, and the order of any other."""
  found = []
  for procedure in procedures:
    found.append((yield from procedure))
  return found


def sound(key: str, kind: type[records.Record]) -> Procedure[tuple[Any, Any]]:
  """A record, None if it is missing or damaged, and its generation.

  What is damaged is replaced by compare-and-set like anything else. Were it
  deleted first, a delete that lands late could take what replaced it.
  """
  try:
    found, generation = yield Read(key, kind)
  except errors.CorruptSnapshotError as error:
    return None, error.generation
  return found, generation


# What a store may throw into a procedure.
FAILURES = (OSError, errors.CorruptSnapshotError)


def perform(procedure: Script[T], execute: Callable[[Any], Any]) -> T:
  """Runs a procedure, or a script, to its end; gives what it returns.

  `execute` does one operation, or pause; what it raises is raised at the
  `yield`.
  """
  try:
    go_on(procedure, execute)
  except StopIteration as end:
    value: T = end.value
    return value
  raise AssertionError("a procedure stops at what is to end it")


def go_on(
  procedure: Script[Any],
  execute: Callable[[Any], Any],
  until: tuple[type, ...] = (),
  result: Any = None,
) -> None:
  """Runs a script up to the next operation of the kinds in `until`.

  `result` is of the one at which it stands; None at its beginning.

  Raises:
    StopIteration: the script has ended.
  """
  operation = procedure.send(result)
  while not isinstance(operation, until):
    try:
      result = execute(operation)
    except Exception as error:
      operation = procedure.throw(error)
    else:
      operation = procedure.send(result)
