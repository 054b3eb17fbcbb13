"""What an island does to the store, in the order that makes it safe.

Procedures (see `diloco.snapshots.operations`): publish, fetch, and how an
island comes back.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.islands import comeback, core, peer_protocol
from diloco.snapshots import checkpoint, cuts, keys, operations, records

logger = logging.getLogger(__name__)

_RETRY_SECS = 0.2
_READ_ATTEMPTS = 5  # of one version that is to be evaluated

# Made once: procedures are run a million times in simulations.
_AFTER_COMMIT_RECORD = operations.Point("after_commit_record")
_AFTER_PAYLOAD = operations.Point("after_payload")
_BEFORE_COMMIT_RECORD = operations.Point("before_commit_record")
_MID_RECOVERY = operations.Point("mid_recovery")


def publish(
  record: records.Contribution, content: Any
) -> operations.Procedure[None]:
  """Writes a contribution: the payload, then the record that proves it."""
  yield operations.WritePayload(record.payload, content)
  yield _AFTER_PAYLOAD
  yield _BEFORE_COMMIT_RECORD
  yield operations.Write(keys.contribution_key(record.key), record)
  yield _AFTER_COMMIT_RECORD


class Fetched(NamedTuple):
  """A version, and what was read of its parameters."""

  head: records.Head
  content: Any


def fetch(
  fragment: int, newer_than: int
) -> operations.Procedure[Fetched | None]:
  """Reads the newest version of a fragment.

  A version may be retired while it is read; then there is a newer one.

  Returns:
    The version, or None when there is no newer one.

  Raises:
    CorruptSnapshotError: the newest version cannot be read, or its head is
      another fragment's.
  """
  tried = None
  while True:
    head, _ = yield operations.read_head(fragment)
    if head is None:
      return None
    if head.fragment != fragment:
      raise errors.CorruptSnapshotError(
        f"the head of fragment {fragment} is that of fragment {head.fragment}"
      )
    if head.version <= newer_than:
      return None
    try:
      content = yield operations.ReadPayload(head)
    except errors.CorruptSnapshotError:
      if head.payload == tried:
        raise
      tried = head.payload
      continue
    return Fetched(head, content)


def fetch_all(
  num_fragments: int, retry_secs: float, wanted: Callable[[], bool]
) -> operations.Script[list[Fetched]]:
  """Fetches all newest versions, to be evaluated, as long as they are wanted.

  Raises:
    CorruptSnapshotError: one cannot be read, however often it is tried.
    OSError: the store cannot be reached.
  """
  versions: list[Fetched] = []
  failures = 0  # of the version that is next
  while len(versions) < num_fragments:
    fragment = len(versions)
    try:
      found = yield from fetch(fragment, -1)
      if found is None:
        raise errors.CorruptSnapshotError(
          f"the head of fragment {fragment} is lost"
        )
    except operations.FAILURES as error:
      logger.warning("read_failed fragment=%d error=%s", fragment, error)
      failures += 1
      if failures == _READ_ATTEMPTS or not wanted():
        raise
      yield retry_secs
      continue
    versions.append(found)
    failures = 0
  return versions


def survey(
  island: int, num_fragments: int
) -> operations.Procedure[comeback.Known]:
  """What the store knows of an island: how far it is published and merged.

  Raises:
    LookupError: a fragment has no head.
  """
  # Records before heads: a merge moves a step from the first to the second,
  # so this order cannot miss it in both.
  names = yield operations.Names("contributions")
  waiting: list[records.Contribution] = []
  for name in filter(keys.is_contribution_name, names):
    fragment, owner, _, _ = map(int, name.split("."))
    if owner != island or fragment >= num_fragments:
      continue
    # What is damaged will never be merged.
    record, _ = yield from operations.sound(
      keys.contribution_key(name), records.Contribution
    )
    if record is not None:
      waiting.append(record)
  heads: list[records.Head] = []
  for fragment in range(num_fragments):
    head, _ = yield operations.read_head(fragment)
    if head is None:
      raise LookupError(f"fragment {fragment} has no head")
    heads.append(head)
  merged = [head.merged_step(island) for head in heads]
  published = list(merged)
  for record in waiting:
    # One from before a roll-back may land late, and is never merged.
    if record.epoch == heads[record.fragment].epoch:
      p = record.fragment
      published[p] = max(published[p], record.step)
  versions = tuple(head.version for head in heads)
  return comeback.Known(tuple(published), versions, tuple(merged))


class Standing(NamedTuple):
  """What the store tells an island that comes back."""

  epoch: int  # 0 before the first return to a cut
  part: records.CutPart | None  # of the cut that was gone back to
  cut: int  # the newest one asked for, 0 without any
  known: comeback.Known
  fetched: list[Fetched]  # [P], the versions that `known` names


def come_back(
  island: int, num_fragments: int
) -> operations.Procedure[Standing]:
  """Reads all that the next life of an island goes on from.

  What can fail here fails as a whole: the caller waits and begins anew.

  Raises:
    CorruptSnapshotError: a newest version, or the epoch, cannot be read.
    LookupError: a fragment has no head.
  """
  epoch, _ = yield operations.Read(keys.EPOCH, records.Epoch)
  part = None
  if epoch is not None:
    # Damaged, it proves no saved state.
    with contextlib.suppress(errors.CorruptSnapshotError):
      key = keys.cut_part_key(epoch.cut, island)
      part, _ = yield operations.Read(key, records.CutPart)
  cut = yield from newest_cut()
  known = yield from survey(island, num_fragments)
  yield _MID_RECOVERY
  fetched: list[Fetched] = []
  for fragment in range(num_fragments):
    found = yield from fetch(fragment, -1)
    if found is None:
      raise LookupError(f"fragment {fragment} has no head")
    fetched.append(found)
  # A version newer than the survey may hold steps it does not know of.
  merged = tuple(found.head.merged_step(island) for found in fetched)
  published = tuple(map(max, known.published, merged))
  versions = tuple(found.head.version for found in fetched)
  return Standing(
    epoch.epoch if epoch else 0,
    part,
    max([cut, *(found.head.cut for found in fetched)]),
    comeback.Known(published, versions, merged),
    fetched,
  )


class Basis(NamedTuple):
  """What the next life of an island may go on from."""

  plan: comeback.Comeback
  standing: Standing
  saved: checkpoint.Checkpoint | None = None  # of the newest state that will do
  state: Any = None  # what was restored of it
  heard: peer_protocol.Heard | None = None  # if one was needed and sent
  passed_over: Sequence[str] = ()  # what could not be used, and why


class Search(abc.ABC):
  """How a new life of an island finds what it goes on from.

  What cannot be used is passed over with a reason; what the store does not
  tell is waited for. How a world keeps saved states is in a subclass.
  """

  poll_secs = 0.05  # between two looks for an answer

  def __init__(self, island: int, incarnation: int, clock: Callable[[], float]):
    self._passed_over: list[str] = []
    self._island = island
    self._incarnation = incarnation
    self._clock = clock

  @abc.abstractmethod
  def saved_states(self) -> Sequence[Any]:
    """The island's saved states that count, the newest first.

    It is asked once the store has told all it knows, and before any peer is.
    This and the next three may raise `OSError`: then all begins anew.
    """

  @abc.abstractmethod
  def marker_of(self, saved: Any) -> checkpoint.Checkpoint:
    """What was saved; raises `CorruptSnapshotError` if nobody can tell."""

  @abc.abstractmethod
  def is_part(self, saved: Any, part: records.CutPart) -> bool:
    """Whether this very state is a part of a cut."""

  @abc.abstractmethod
  def restore(self, saved: Any) -> Any:
    """The state; raises `CorruptSnapshotError` if it cannot be read."""

  @abc.abstractmethod
  def patience_secs(self, peers: Sequence[records.Member]) -> float:
    """How long an answer of these peers is waited for."""

  def failed(self, error: Exception) -> None:
    """The store does not tell all, or keeps what peers have answered."""
    logger.warning("recovery_failed error=%s", error)

  def find(
    self, num_fragments: int, sync_every: int
  ) -> operations.Script[Basis]:
    """Finds it for P fragments and H steps, however long the store takes.

    Whoever started the island knows how long it may take to be ready.
    """
    while True:
      try:
        standing = yield from come_back(self._island, num_fragments)
      except (*operations.FAILURES, LookupError) as error:
        self.failed(error)
        yield _RETRY_SECS
        continue
      try:
        saved, state = self._newest_saved(num_fragments, standing)
        break
      except OSError as error:  # of where the states are
        self.failed(error)
        yield _RETRY_SECS
    known = standing.known
    plan = comeback.decide(_own(saved), known, sync_every)
    heard = None
    if plan.optimizer == "peer":
      heard = yield from self._ask(known.versions)
    return Basis(plan, standing, saved, state, heard, self._passed_over)

  def _newest_saved(
    self, num_fragments: int, standing: Standing
  ) -> tuple[checkpoint.Checkpoint | None, Any]:
    """Restores the newest saved state that can be trusted."""
    self._passed_over.clear()  # by an attempt that failed
    for saved in self.saved_states():
      try:
        marker = self.marker_of(saved)
        if not self.is_of_this_timeline(saved, marker, standing):
          why = "is from before a roll-back"
        elif len(marker.positions) != num_fragments:
          why = "has other fragments"
        else:
          return marker, self.restore(saved)
        self._passed_over.append(f"checkpoint of step {marker.step} {why}")
      except errors.CorruptSnapshotError as error:
        self._passed_over.append(str(error))
    return None, None

  def is_of_this_timeline(
    self, saved: Any, marker: checkpoint.Checkpoint, standing: Standing
  ) -> bool:
    """After a roll-back only the cut's own saved state is older than it."""
    if marker.epoch == standing.epoch:
      return True
    return standing.part is not None and self.is_part(saved, standing.part)

  def _ask(
    self, versions: Sequence[int]
  ) -> operations.Script[peer_protocol.Heard | None]:
    """Asks for an optimizer state; what fails here costs only its moments."""
    request = records.PeerRequest(
      self._island, self._incarnation, list(versions)
    )
    heard = None
    try:
      heard = yield from peer_protocol.ask(
        request,
        self.patience_secs,
        self._clock,
        self.poll_secs,
        self._passed_over.append,
      )
    except OSError as error:
      self._passed_over.append(f"no peer can be asked: {error}")
    try:
      yield from peer_protocol.hang_up(request)
      yield from peer_protocol.clean_up(self._island)
    except OSError as error:
      self.failed(error)
    return heard


def _own(marker: checkpoint.Checkpoint | None) -> comeback.Saved | None:
  if marker is None:
    return None
  positions = [core.Position(*p) for p in marker.positions]
  return comeback.Saved(
    marker.step,
    [p.published for p in positions],
    [p.first_step for p in positions],
  )


def newest_cut() -> operations.Procedure[int]:
  """Gives the number of the newest cut that was asked for, 0 without any."""
  return max((yield from cuts.numbers()), default=0)
