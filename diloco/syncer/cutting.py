"""The syncer's part in cuts, and what cuts need of the store: procedures.

A *pin* keeps tensors that a cut points to: payloads of its heads, and of the
contributions that were on their way. They stay when merged or replaced, until
the cut is deleted, which happens here too. See `diloco.snapshots.cuts`.
"""

import dataclasses
import logging
from collections.abc import Iterable, Sequence

from diloco import errors
from diloco.snapshots import cut_parts, cuts, keys, operations, records
from diloco.syncer import orders

logger = logging.getLogger(__name__)

_News = list[orders.CutRequested | orders.CutEnded]


@dataclasses.dataclass
class _Open:
  """A cut this syncer has taken part in and that has not ended."""

  part: records.CutHeads
  heads: list[records.Head]
  written: bool = False  # the part of the heads
  closed: bool = False  # the channel is written too

  def lacks(self, name: str) -> bool:
    """Whether a contribution of this name is not in its heads."""
    fragment, island, _, step = map(int, name.split("."))
    if fragment >= len(self.heads):
      return False
    return step > self.heads[fragment].merged_step(island)


class CutKeeper:
  """Takes the syncer's parts, and guards what complete cuts point to."""

  def __init__(self) -> None:
    self._epoch = 0
    self._open: _Open | None = None
    self._left: list[_Open] = []  # when the next cut came; may be complete
    self._pins: dict[int, frozenset[str]] = {}  # by cut, prefixes of payloads
    self._held: set[str] = set()  # contributions to delete once unpinned
    self._ended: set[int] = set()  # cuts that were seen to have ended

  def recover(self, heads: Sequence[records.Head]) -> operations.Procedure[int]:
    """Learns what there is of a syncer that takes over; gives the last cut.

    A cut that the predecessor was in the middle of can be taken again if none
    of its versions is stamped with it. Otherwise what was on its way at that
    moment may be merged and gone, so the cut is given up.
    """
    self._epoch = max(head.epoch for head in heads)
    taken = max(head.cut for head in heads)
    for look in (yield from self._all_looks(taken)):
      if look.is_complete or keys.CHANNEL in look.names:
        self._pins[look.cut] = yield from self._pins_of(look.cut)
        taken = max(taken, look.cut)
      elif look.is_open and look.cut <= taken:
        yield from cuts.abandon(
          look.cut, "the syncer was replaced during the cut"
        )
      if not look.is_open:
        self._ended.add(look.cut)
    return taken

  def look(
    self, channel: Sequence[records.Contribution] | None
  ) -> operations.Procedure[_News]:
    """Looks for news, at most once a heartbeat; gives events for the core.

    Raises:
      OSError: the store failed; the next look tries again.
    """
    yield from self._settle()
    newest = max((yield from cuts.numbers()), default=0)
    if not newest or newest in self._ended:
      # The core may have met a stamp of a cut that is over.
      return [] if channel is None else [orders.CutEnded(newest)]
    try:
      return (yield from self._look_at(newest, channel))
    except errors.CorruptSnapshotError as error:
      yield from cuts.abandon(newest, f"a part is damaged: {error}")
      return []

  def _look_at(
    self, newest: int, channel: Sequence[records.Contribution] | None
  ) -> operations.Procedure[_News]:
    look = yield from cuts.look(newest)
    mine = self._open if self._open and self._open.part.cut == newest else None
    if look.names & {keys.COMPLETE, keys.ABANDONED}:
      return (yield from self._end(look))
    if look.is_open_in(self._epoch):
      if mine is None:
        return [orders.CutRequested(newest)]
      yield from self._go_on(mine, look, channel)
    elif look.request is not None and look.request.epoch < self._epoch:
      # Who set the run back did not see it.
      yield from cuts.abandon(
        newest, "the run was set back before it was complete"
      )
    return []

  def take_part(
    self, number: int, heads: Sequence[records.Head]
  ) -> operations.Procedure[None]:
    """Writes down the heads as they are, before anything else is merged.

    Raises:
      OSError: the store failed; the next look tries again.
    """
    part = records.CutHeads(
      cut=number,
      epoch=max(head.epoch for head in heads),
      token=max(head.token for head in heads),
      heads=[head.to_fields() for head in heads],
    )
    if self._open is not None and self._open.part.cut != number:
      self._left.append(self._open)
    # Held in memory first: from now on nothing of it may be deleted.
    self._open = _Open(part, list(heads))
    yield from self._write_heads(self._open)

  def _write_heads(self, mine: _Open) -> operations.Procedure[None]:
    mine.written = yield from cuts.add_heads(mine.part)
    if not mine.written:
      logger.warning("cut_part_refused cut=%d", mine.part.cut)
      self._open = None
      yield from self._release()

  def _go_on(
    self,
    mine: _Open,
    look: cuts.Look,
    channel: Sequence[records.Contribution] | None,
  ) -> operations.Procedure[None]:
    if not mine.written:
      yield from self._write_heads(mine)
    elif not mine.closed and channel is not None and not look.missing_islands:
      asked = look.request
      assert asked is not None
      yield from _add_channel(mine.part, mine.heads, asked, channel)
      # It may be complete from now on, and the next one be asked for, before
      # this syncer looks again.
      self._pins[mine.part.cut] = yield from self._pins_of(mine.part.cut)
      mine.closed = True

  def _settle(self) -> operations.Procedure[None]:
    """Learns what cuts point to that ended before they were looked at again.

    The answer to the write of a cut's channel may be lost. Then it is complete
    as soon as the controller sees that, and the next one may be asked for.
    """
    while self._left:
      number = self._left[0].part.cut
      self._pins[number] = yield from self._pins_of(number)
      del self._left[0]

  def _end(self, look: cuts.Look) -> operations.Procedure[_News]:
    self._pins.pop(look.cut, None)
    if look.is_complete:
      self._pins[look.cut] = yield from self._pins_of(look.cut)
    self._open = None
    self._ended.add(look.cut)
    looks = yield from self._looks()
    for one in looks:
      if one.is_complete and one.cut not in self._pins:
        # It came and ended while this syncer was stopped.
        self._pins[one.cut] = yield from self._pins_of(one.cut)
    for number in cuts.expired(looks, self._pins):
      yield from cuts.delete(number)
      self._pins.pop(number, None)
    yield from self._release()
    return [orders.CutEnded(look.cut)]

  def is_pinned(self, name: str) -> bool:
    """Whether a contribution's payload must stay; its record is gone.

    It is deleted here once it need not stay any more.
    """
    prefix = keys.payload_prefix(name)
    # Until the channel is known, all that the heads of the cut lack.
    pinned = self._is_in_a_cut(prefix) or any(
      one.lacks(name) for one in self._unsettled()
    )
    if pinned:
      self._held.add(name)
    return pinned

  def is_pinned_payload(self, prefix: str) -> bool:
    """Whether a global payload must stay."""
    return self._is_in_a_cut(prefix) or any(
      head.payload == prefix for one in self._unsettled() for head in one.heads
    )

  def _unsettled(self) -> list[_Open]:
    return [*self._left, *([self._open] if self._open else [])]

  def _is_in_a_cut(self, prefix: str) -> bool:
    return any(prefix in pins for pins in self._pins.values())

  def _release(self) -> operations.Procedure[None]:
    """Deletes what was held back and is not pinned any more."""
    for name in sorted(self._held):
      if not self.is_pinned(name):
        yield operations.DeleteTree(keys.payload_prefix(name))
        self._held.discard(name)

  def _all_looks(self, taken: int) -> operations.Procedure[list[cuts.Look]]:
    """Looks at all cuts there are, whatever a stale listing says.

    What a cut of the predecessor points to must not be deleted in ignorance. It
    is known to have taken part in those up to `taken`.
    """
    numbers = yield from cuts.all_numbers(taken)
    return (yield from self._looks(numbers, surely=True))

  def _looks(
    self, numbers: Iterable[int] | None = None, *, surely: bool = False
  ) -> operations.Procedure[list[cuts.Look]]:
    """Looks at cuts that can be read; those listed if none are named."""
    looks = []
    for number in (yield from cuts.numbers()) if numbers is None else numbers:
      try:
        look = yield from cuts.look(number)
        if surely and not look.names & {keys.COMPLETE, keys.ABANDONED}:
          look = yield from cuts.look_surely(number)
        looks.append(look)
      except errors.CorruptSnapshotError as error:
        logger.warning("cut_unreadable cut=%d error=%s", number, error)
    return looks

  def _pins_of(self, number: int) -> operations.Procedure[frozenset[str]]:
    """Prefixes of the payloads a cut points to."""
    try:
      heads, _ = yield operations.Read(
        keys.cut_heads_key(number), records.CutHeads
      )
      channel, _ = yield operations.Read(
        keys.cut_channel_key(number), records.CutChannel
      )
      found = [
        records.Head.from_fields(one).payload
        for one in (heads.heads if heads else ())
      ]
      found += [
        records.Contribution.from_fields(one).payload
        for one in (channel.contributions if channel else ())
      ]
    except errors.CorruptSnapshotError as error:
      # Nobody can go back to it, so nothing needs to be kept for it.
      logger.warning("cut_unreadable cut=%d error=%s", number, error)
      return frozenset()
    return frozenset(found)


def _add_channel(
  part: records.CutHeads,
  heads: Sequence[records.Head],
  asked: records.CutRequest,
  channel: Sequence[records.Contribution],
) -> operations.Procedure[None]:
  """Writes down what was sent before the cut and is not in its heads.

  All islands have taken their part, so all that they sent before is in the
  store, or was. What the syncer has seen of it is in `channel`; what it has
  not seen yet still has its record, though a stale listing may lack it.
  """
  positions = {}
  for island in asked.islands:
    key = keys.cut_part_key(part.cut, island)
    own, _ = yield operations.Read(key, records.CutPart)
    if own is None:
      return
    positions[island] = own
  sent = {seen.key: seen for seen in channel}
  names = yield operations.Names("contributions")
  for name in filter(keys.is_contribution_name, names):
    if name in sent:
      continue
    # What is damaged will never be merged.
    unseen, _ = yield from operations.sound(
      keys.contribution_key(name), records.Contribution
    )
    if unseen is not None:
      sent[name] = unseen
  yield from _add_unlisted(sent, heads, positions)
  on_their_way = [
    sent[name].to_fields()
    for name in sorted(sent)
    if _is_of_the_channel(sent[name], part, heads, positions)
  ]
  record = records.CutChannel(part.cut, part.token, on_their_way)
  key = keys.cut_channel_key(part.cut)
  found, generation = yield operations.Read(key, records.CutChannel)
  if found is None or found.token < part.token:
    yield operations.Point("mid_cut")
    yield operations.CompareAndSet(key, record, generation)


def _add_unlisted(
  sent: dict[str, records.Contribution],
  heads: Sequence[records.Head],
  islands: dict[int, records.CutPart],
) -> operations.Procedure[None]:
  """Reads by name what the islands' parts count on and nobody has listed.

  A part names the last publication of each fragment, and each publication the
  step that the one before it ended with, back to what the head holds.
  """
  for island, own in islands.items():
    for head, (_, _, step) in zip(heads, own.positions, strict=False):
      while step > head.merged_step(island):
        found = yield from _read_sent(sent, head.fragment, own, step)
        if found is None:
          break  # discarded, or an earlier life's that is no more
        sent[found.key] = found
        step = found.first_step


def _read_sent(
  sent: dict[str, records.Contribution],
  fragment: int,
  own: records.CutPart,
  step: int,
) -> operations.Procedure[records.Contribution | None]:
  """The publication of a step, by whichever life of an island made it."""
  for life in range(own.incarnation, 0, -1):
    name = keys.contribution_name(fragment, own.island, life, step)
    if name in sent:
      return sent[name]
    # What is damaged will never be merged.
    found, _ = yield from operations.sound(
      keys.contribution_key(name), records.Contribution
    )
    if found is not None:
      return found
  return None


def _is_of_the_channel(
  sent: records.Contribution,
  part: records.CutHeads,
  heads: Sequence[records.Head],
  islands: dict[int, records.CutPart],
) -> bool:
  if sent.cut >= part.cut or sent.epoch != part.epoch:
    return False
  if not 0 <= sent.fragment < len(heads):
    return False
  head = heads[sent.fragment]
  if sent.step <= head.merged_step(sent.island):
    return False
  if sent.base_version > head.version:
    return False
  owner = islands.get(sent.island)
  return owner is None or cut_parts.is_counted_on(sent, owner)
