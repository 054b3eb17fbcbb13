"""What a cut is made of, and whether it is one moment of one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from diloco import errors
from diloco.snapshots import keys, operations, records


class Parts(NamedTuple):
  """All records of a cut but the last."""

  request: records.CutRequest  # what was asked
  heads: tuple[records.Head, ...]  # [P], all heads at one moment
  heads_part: records.CutHeads  # the record they are from
  channel: records.CutChannel  # the record of contributions on their way
  contributions: tuple[records.Contribution, ...]  # those
  islands: Mapping[int, records.CutPart]  # by island, its part

  def checksums(self) -> dict[str, int]:
    """CRC-32 of every record, by its name below the cut's prefix."""
    named: dict[str, records.Record] = {
      keys.REQUEST: self.request,
      keys.HEADS: self.heads_part,
      keys.CHANNEL: self.channel,
    }
    named |= {keys.cut_part_name(m): part for m, part in self.islands.items()}
    return {name: r.crc32() for name, r in named.items()}


def read_parts(asked: records.CutRequest) -> operations.Procedure[Parts]:
  """Reads what a cut is made of.

  Raises:
    CorruptSnapshotError: something is missing or damaged.
  """
  cut = asked.cut
  heads, _ = yield operations.Read(keys.cut_heads_key(cut), records.CutHeads)
  channel, _ = yield operations.Read(
    keys.cut_channel_key(cut), records.CutChannel
  )
  if heads is None or channel is None:
    gone = keys.HEADS if heads is None else keys.CHANNEL
    raise errors.CorruptSnapshotError(f"cut {cut} has no {gone}")
  islands = {}
  for island in asked.islands:
    key = keys.cut_part_key(cut, island)
    part, _ = yield operations.Read(key, records.CutPart)
    if part is None:
      raise errors.CorruptSnapshotError(f"cut {cut} has no part of {island}")
    islands[island] = part
  return Parts(
    request=asked,
    heads=tuple(records.Head.from_fields(h) for h in heads.heads),
    heads_part=heads,
    channel=channel,
    contributions=tuple(
      records.Contribution.from_fields(c) for c in channel.contributions
    ),
    islands=islands,
  )


def inconsistency(parts: Parts) -> str:
  """Why the parts cannot be one moment of one run; empty if they can."""
  cut, epoch = parts.request.cut, parts.request.epoch
  stamps = {(parts.heads_part.cut, parts.heads_part.epoch)}
  stamps |= {(part.cut, part.epoch) for part in parts.islands.values()}
  if stamps != {(cut, epoch)} or parts.channel.cut != cut:
    return f"its parts are of several cuts or epochs: {sorted(stamps)}"
  if parts.channel.token != parts.heads_part.token:
    return "heads and channel are of two syncers"
  for fragment, head in enumerate(parts.heads):
    if (head.fragment, head.epoch) != (fragment, epoch) or head.cut >= cut:
      return f"fragment {fragment} has no head from before the cut"
  return _effects_without_cause(parts)


def _effects_without_cause(parts: Parts) -> str:
  """What was received in the cut and sent after it."""
  for island, part in parts.islands.items():
    if part.island != island or len(part.positions) != len(parts.heads):
      return f"the part of island {island} is of another island or run"
    for head, (base, _, published) in zip(
      parts.heads, part.positions, strict=True
    ):
      merged, p = head.merged_step(island), head.fragment
      # Only a first life has all that was published before. Of an earlier
      # life's last publications one may show up, and be merged, after a later
      # life has looked; `comeback.decide` knows how to go on from that.
      if merged > published and part.incarnation == 1:
        return (
          f"fragment {p} has merged step {merged} of island {island}, which"
          f" had published {published}"
        )
      if base > head.version:
        return (
          f"island {island} had version {base} of fragment {p}, whose head is"
          f" {head.version}"
        )
  for sent in parts.contributions:
    owner = parts.islands.get(sent.island)
    if sent.fragment >= len(parts.heads) or sent.cut >= parts.request.cut:
      return f"contribution {sent.key} was sent after the cut"
    if sent.base_version > parts.heads[sent.fragment].version:
      return f"contribution {sent.key} starts from a version after the cut"
    if owner and not is_counted_on(sent, owner):
      return f"contribution {sent.key} was published after the cut"
  return ""


def is_counted_on(sent: records.Contribution, part: records.CutPart) -> bool:
  """Whether an island's part takes rows of a contribution for published."""
  published = part.positions[sent.fragment][2]
  if sent.incarnation < part.incarnation:
    # It may end later, and yet be all that is left of those rows: what an
    # earlier life wrote late supersedes what is shorter.
    return sent.first_step < published
  # A later life of the island did not take part.
  return sent.incarnation == part.incarnation and sent.step <= published
