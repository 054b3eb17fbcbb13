"""Heads of all fragments under one leadership: taken over, then moved on.

Procedures (see `diloco.snapshots.operations`): the live syncer and the
simulated one name their versions, make their heads and clear up after what
failed by these very lines.

A try to make a version that fails leaves no payload behind, or a disk would be
full of them. One that never came to its commit is deleted at once. Whether the
commit of another took effect is not known; before the fragment is merged again
its head is written anew, so that what is still on its way comes too late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.snapshots import keys, operations, records
from diloco.syncer import chores as chores_lib
from diloco.syncer import cutting, orders, protocol

logger = logging.getLogger(__name__)

_Head = records.Head  # `Heads.records` hides the module
# As many versions as are kept at least; who is further behind reads all.
_DELTAS_KEPT = 3
_AFTER_FENCE = operations.Point("after_fence")


class Content(NamedTuple):
  """What a head says of its version beyond what the round says."""

  chunks: list[list[int]]
  merged: dict[str, Any]
  digest: str
  codec: str = "f32"
  delta_codec: str = ""


class Heads:
  """Of one leadership.

  Attributes:
    token: fencing token it commits under.
    cut: the last one this leader has taken part in; its commits are after it.
    held: [P], as this syncer last wrote them.
    standing: fragments that stand still, for their head or newest version
      cannot be read, and why.
  """

  def __init__(
    self,
    token: int,
    make: Callable[..., records.Head] = records.Head,
    each: operations.Each = operations.in_turn,
  ):
    self.token = token
    self._each = each
    self.cut = 0
    self.held: list[protocol.Held] = []
    self.standing: dict[int, str] = {}
    self._closing = -1  # fragment whose version is being made
    self._looks = 0
    self._still: dict[int, tuple[str, int]] = {}  # payload, looks at it
    self._make = make
    self._tries = 0
    # By fragment, the payload whose commit may have succeeded unheard.
    self._unsettled: dict[int, str] = {}
    self._rubbish: list[str] = []  # payloads that no head will point to

  @property
  def records(self) -> list[records.Head]:
    """[P], the heads as this syncer last wrote them."""
    return [held.head for held in self.held]

  def fence(self, num_fragments: int) -> operations.Procedure[None]:
    """Raises the token of every head.

    Raises:
      LookupError: a fragment has no head.
      CorruptSnapshotError: one is damaged.
      FencedError: somebody with a newer token was here.
    """
    fences = (protocol.fence(p, self.token) for p in range(num_fragments))
    self.held = yield from self._each(fences)

  def take_over(
    self,
    num_fragments: int,
    cuts: cutting.CutKeeper | None,
    chores: chores_lib.Chores,
  ) -> operations.Procedure[int]:
    """Does what comes between taking the lease and leading; gives the last cut.

    If the store fails in it, all of it is done again.
    """
    yield from self.fence(num_fragments)
    yield _AFTER_FENCE
    heads = self.records
    cut = max(head.cut for head in heads)
    if cuts is not None:
      cut = yield from cuts.recover(heads)
    yield from chores.take_over(heads)
    self.cut = cut
    return cut

  def close_round(
    self,
    close: orders.Close,
    weights: Sequence[float],
    content_of: Callable[[Any], Content],
  ) -> operations.Procedure[None]:
    """Merges a round and makes the result the fragment's head.

    Raises:
      RefusedError: some contributions cannot be used. Nothing is committed.
      FencedError: another syncer committed to this fragment, or it is unknown
        whether an earlier try did.
      OSError, CorruptSnapshotError: the store failed. Nothing is committed, as
        far as is known.
    """
    self._closing = close.fragment
    try:
      yield from self._close_round(close, weights, content_of)
    except errors.CorruptSnapshotError as error:
      self.standing.setdefault(close.fragment, str(error))
      raise
    finally:
      self._closing = -1
    self.standing.pop(close.fragment, None)

  def _close_round(
    self,
    close: orders.Close,
    weights: Sequence[float],
    content_of: Callable[[Any], Content],
  ) -> operations.Procedure[None]:
    fragment = close.fragment
    yield from self._settle(fragment)
    held = self.held[fragment]
    assert close.version == held.head.version + 1
    # Never the same prefix twice: the commit of an earlier try may have
    # succeeded although nobody was told.
    self._tries += 1
    writer = f"s{self.token}.{self._tries}"
    payload = keys.global_prefix(fragment, close.version, writer)
    contributions = tuple([c.contribution for c in close.chosen])

    def head_of(merged: Any) -> records.Head:
      content = content_of(merged)
      head = self._make(
        fragment=fragment,
        version=close.version,
        token=self.token,
        payload=payload,
        clock={str(m): step for m, step in close.clock.items()},
        epoch=held.head.epoch,
        cut=self.cut,  # a later one than when the round closed, it may be
        deltas=_deltas(held.head, payload) if content.delta_codec else [],
        holes={str(m): list(map(list, h)) for m, h in close.holes.items()},
        **content._asdict(),
      )
      self._unsettled[fragment] = payload  # the commit comes next
      return head

    present = {c.contribution.island for c in close.chosen}
    share = len(present) / max(len(present) + len(close.absent), 1)
    merge = operations.Merge(
      held.head, payload, contributions, tuple(weights), share
    )
    try:
      moved = yield from protocol.close_round(held, merge, head_of)
    except operations.FAILURES as failure:
      if isinstance(failure, protocol.SpoiledError):
        del self._unsettled[fragment]  # it is known: nothing was committed
      if fragment not in self._unsettled:
        self._rubbish.append(payload)
        try:
          yield from self._sweep()
        except OSError as error:
          logger.warning("delete_failed prefix=%s error=%s", payload, error)
      raise
    self.held[fragment] = moved
    self._unsettled.pop(fragment, None)

  def look_after(self) -> operations.Procedure[list[_Head]]:
    """Looks at heads; puts back, and gives, those that the store has spoiled.

    At those that stand still, and at the next one of all; more would keep a
    leader from its rounds. One that is about to be moved is looked at then.
    Whether the tensors of a version that stays can be read is told, too.

    Raises:
      OSError: the store failed.
      FencedError: another syncer leads.
    """
    following = self._looks % len(self.held)
    self._looks += 1
    healed = []
    for fragment in sorted({following, *self.standing} - {self._closing}):
      held = self.held[fragment]
      doubted = fragment in self._unsettled
      try:
        found = yield from protocol.heal(held, doubted=doubted)
        if found is held:
          yield from self._read_if_it_stays(held.head)
          continue
      except errors.CorruptSnapshotError as error:
        self.standing.setdefault(fragment, str(error))
        continue
      self.held[fragment] = found
      self.standing.pop(fragment, None)
      healed.append(found.head)
    return healed

  def _read_if_it_stays(self, head: _Head) -> operations.Procedure[None]:
    """Reads a version that is still the newest, at every doubling of its looks.

    A merge reads the version before it. But islands that have published, and
    cannot fetch the version that came of it, publish no more: if that version
    is damaged before anybody has it, there is no merge that would find out.

    Raises:
      OSError: the store failed.
      CorruptSnapshotError: it cannot be read.
      FencedError: another syncer leads, and may have deleted this version.
    """
    fragment = head.fragment
    payload, looks = self._still.get(fragment, ("", 0))
    looks = looks + 1 if payload == head.payload else 1
    self._still[fragment] = head.payload, looks
    if looks == 1 or looks & (looks - 1):
      return
    try:
      yield operations.ReadPayload(head)
    except errors.CorruptSnapshotError as error:
      if not (yield from protocol.leads(self.token)):
        raise errors.FencedError(
          f"the lease of token {self.token} was taken over"
        ) from error
      raise
    self.standing.pop(fragment, None)

  def _settle(self, fragment: int) -> operations.Procedure[None]:
    """Leaves nothing of earlier tries, before there is another one."""
    if fragment in self._unsettled:
      self.held[fragment] = yield from protocol.rewrite(self.held[fragment])
      self._rubbish.append(self._unsettled.pop(fragment))
    if self._rubbish:
      yield from self._sweep()

  def _sweep(self) -> operations.Procedure[None]:
    while self._rubbish:
      yield operations.DeleteTree(self._rubbish[-1])
      self._rubbish.pop()


def _deltas(before: records.Head, payload: str) -> list[list[str]]:
  """What leads from earlier versions to the one after `before`."""
  found = [*before.deltas, [before.digest, payload]]
  return found[-_DELTAS_KEPT:]


class Standstill(NamedTuple):
  """A fragment nobody can commit to: its head is damaged or lost."""

  fragment: int
  version: int  # the newest there are tensors of
  reason: str


def standstills(num_fragments: int) -> operations.Procedure[list[Standstill]]:
  """Finds fragments without a head that had one.

  Whoever publishes has seen all heads.
  """
  sent = yield operations.Names("contributions")
  begun = any(map(keys.is_contribution_name, sent))
  found = []
  for fragment in range(num_fragments):
    key = keys.head_key(fragment)
    names = yield operations.Names(keys.globals_prefix(fragment))
    newest = keys.newest_version(names)
    try:
      head, _ = yield operations.read_head(fragment)
    except errors.CorruptSnapshotError as error:
      found.append(Standstill(fragment, newest, f"{key}: {error}"))
      continue
    if head is None and (newest or begun):
      found.append(Standstill(fragment, newest, f"{key} is lost"))
  return found
