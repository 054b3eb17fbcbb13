"""Why a round closed when it did, from the tape alone.

A *round* makes one version of one fragment. Its `merged` line says who was in;
what came too late for it is found in later lines: contributions that started
from an older version than the one the round made. Times within a round are on
the monotonic clock of the syncer that led, so they are compared only among
lines of one lease; the token tells.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

from diloco import errors
from diloco.tape import events, reader

Cause = Literal["all_in", "grace_spent", "draining"]
_ROUNDED_SECS = 1e-6  # more than a difference of two times is off by


@dataclasses.dataclass(frozen=True)
class _Contribution:
  """Of steps (first_step, step]."""

  key: str
  island: int
  incarnation: int
  first_step: int
  step: int


@dataclasses.dataclass(frozen=True)
class Part(_Contribution):
  """A contribution of the round."""

  c_tokens: int
  base_version: int
  staleness: int
  weight: float
  share: float  # of the round's total weight
  waited_secs: float  # from the round's opening to arrival; negative: before


@dataclasses.dataclass(frozen=True)
class Late(_Contribution):
  """A contribution that the round could have used and did not see."""

  late_secs: float | None  # after the close; None: on another syncer's clock
  fate: str  # "merged in version V", "discarded: REASON" or "pending"


@dataclasses.dataclass(frozen=True)
class Discarded(_Contribution):
  """A contribution discarded while the round was being made."""

  reason: str
  arrived_secs: float | None  # after the round opened


@dataclasses.dataclass(frozen=True)
class Explanation:
  """All the tape says about one round."""

  fragment: int
  version: int
  cause: Cause
  opened_by: int | None  # the island
  parts: tuple[Part, ...]
  absent: tuple[int, ...]
  late: tuple[Late, ...]
  discarded: tuple[Discarded, ...]
  quorum_secs: float
  grace_secs: float
  grace_spent_secs: float
  grace_facts: dict[str, float]  # empty on a tape that lacks them
  merge_secs: float
  outer_grad_norm: float
  digest: str
  role: str
  incarnation: int  # of the syncer whose tape has the line
  token: int | None  # of the lease it was committed under
  retold: bool  # told by a successor of the one who committed


@dataclasses.dataclass(frozen=True)
class _Said:
  """A syncer's line, with the token of the lease it then held."""

  line: reader.Line
  token: int | None


def explain(record: reader.Record, fragment: int, version: int) -> Explanation:
  """Explains one round; refuses one that the tape does not have."""
  said = [s for s in _syncers(record) if s.line.get("fragment") == fragment]
  merges: dict[int, _Said] = {}
  for one in said:
    if one.line["event"] == events.MERGED:
      merges.setdefault(one.line["version"], one)
  if version not in merges:
    raise _not_there(record, fragment, version, sorted(merges))
  try:
    return _explanation(said, merges, version, _published(record, fragment))
  except KeyError as error:
    raise errors.UserError(
      f"the tape of fragment {fragment}",
      f"a line lacks the field {error}",
      "use the version of diloco that wrote it",
    ) from error


def _explanation(
  said: list[_Said],
  merges: dict[int, _Said],
  version: int,
  published: dict[str, reader.Line],
) -> Explanation:
  line = merges[version].line
  token = line.get("token", merges[version].token)
  parts = _parts(line)
  opened = [
    s.line["island"]
    for s in said
    if s.line["event"] == events.ROUND_OPENED and s.line["version"] == version
  ]
  return Explanation(
    fragment=line["fragment"],
    version=version,
    cause=_cause(line),
    opened_by=opened[-1] if opened else None,
    parts=parts,
    absent=tuple(line["absent"]),
    late=tuple(_late(said, merges, version, token, published)),
    discarded=tuple(_discarded(said, merges, version, token)),
    quorum_secs=line["quorum_secs"],
    grace_secs=line["grace_secs"],
    grace_spent_secs=line["grace_spent_secs"],
    grace_facts=dict(line.get("grace_facts") or {}),
    merge_secs=line["merge_secs"],
    outer_grad_norm=line["outer_grad_norm"],
    digest=line.get("digest", ""),
    role=line["role"],
    incarnation=line["incarnation"],
    token=token,
    retold=token != merges[version].token,
  )


def _syncers(record: reader.Record) -> list[_Said]:
  """Lines of all who led, in the order of their leases."""
  tokens: dict[tuple[str, int], int] = {}
  said = []
  for line in record.events:
    who = line["role"], line["incarnation"]
    if line["event"] == events.LEASE_ACQUIRED:
      tokens[who] = line["token"]
    elif line["event"] in (
      events.MERGED,
      events.DISCARDED,
      events.ROUND_OPENED,
    ):
      said.append(_Said(line, tokens.get(who)))
  return sorted(said, key=_order)


def _order(said: _Said) -> float:
  """By lease. A controller that sets the run back has none, and comes after."""
  if said.token is not None:
    return said.token
  return said.line.get("token", math.inf) + 0.5


def _published(record: reader.Record, fragment: int) -> dict[str, reader.Line]:
  """What islands say of their contributions, by key."""
  return {
    line["key"]: {
      "island": int(line["role"].removeprefix("island-")),
      **line,
    }
    for line in record.events
    if line["event"] == events.PUBLISHED and line["fragment"] == fragment
  }


def _cause(line: reader.Line) -> Cause:
  if not line["absent"]:
    return "all_in"
  if line["grace_spent_secs"] >= line["grace_secs"] - _ROUNDED_SECS:
    return "grace_spent"
  return "draining"


def _parts(line: reader.Line) -> tuple[Part, ...]:
  total = sum(c["weight"] for c in line["contributions"])
  return tuple(
    Part(
      *_who(c),
      c_tokens=c["c_tokens"],
      base_version=line["version"] - 1 - c["staleness"],
      staleness=c["staleness"],
      weight=c["weight"],
      share=c["weight"] / total if total else 0.0,
      waited_secs=c["waited_secs"],
    )
    for c in line["contributions"]
  )


def _late(
  said: list[_Said],
  merges: dict[int, _Said],
  version: int,
  token: int | None,
  published: dict[str, reader.Line],
) -> Iterator[Late]:
  """What started before this version, and was not in it nor settled by then."""
  line = merges[version].line
  closed_at = line.get("closed_at")
  for fate, item, clock in _after(said, merges, version):
    # A discarded one may be of an island that did not live to tell of it.
    told = {**published.get(item["key"], {}), **item}
    if "base_version" in told and told["base_version"] < version:
      secs = _between(closed_at, item.get("arrived_at"), clock == token)
      yield Late(*_who(item), secs, fate)
  settled = {i["key"] for _, i, _ in _after(said, merges, 0)}
  for key, item in published.items():
    if key not in settled and item["base_version"] < version:
      yield Late(*_who(item), None, "pending")


def _after(
  said: list[_Said], merges: dict[int, _Said], version: int
) -> Iterator[tuple[str, dict[str, Any], int | None]]:
  """Contributions settled after `version` was: fate, line, token."""
  for later in sorted(v for v in merges if v > version):
    # The round's own lease, not that of whoever told of it.
    clock = merges[later].line.get("token", merges[later].token)
    for item in merges[later].line["contributions"]:
      base = later - 1 - item["staleness"]
      yield f"merged in version {later}", {**item, "base_version": base}, clock
  reached = version not in merges
  for one in said:
    reached = reached or one.line is merges[version].line
    if reached and one.line["event"] == events.DISCARDED:
      yield f"discarded: {one.line['reason']}", one.line, one.token


def _between(
  start: float | None, end: float | None, one_clock: bool
) -> float | None:
  if not one_clock or start is None or end is None:
    return None
  return end - start


def _discarded(
  said: list[_Said],
  merges: dict[int, _Said],
  version: int,
  token: int | None,
) -> Iterator[Discarded]:
  """Discards between the merge before this one and this one."""
  merged = merges[version].line
  opened_at = merged.get("opened_at")
  found: list[_Said] = []
  for one in said:
    if one.line is merged:
      break
    if one in merges.values():  # not one that is only told again
      found.clear()
    elif one.line["event"] == events.DISCARDED:
      found.append(one)
  for one in found:
    arrived_at = one.line.get("arrived_at")
    secs = _between(opened_at, arrived_at, one.token == token)
    yield Discarded(*_who(one.line), one.line["reason"], secs)


def _who(item: dict[str, Any]) -> tuple[str, int, int, int, int]:
  incarnation = item.get("island_incarnation", item.get("incarnation", 0))
  return (
    item["key"],
    item["island"],
    incarnation,
    item["first_step"],
    item["step"],
  )


def _not_there(
  record: reader.Record, fragment: int, version: int, merged: list[int]
) -> errors.UserError:
  what = f"--fragment={fragment} --version={version}"
  if not merged:
    fragments = sorted(
      {e["fragment"] for e in record.events if e["event"] == events.MERGED}
    )
    there = f"of this fragment, only of fragments {fragments}"
    return errors.UserError(
      what,
      f"the tape tells of no merge {there if fragments else 'at all'}",
      "name a fragment that was merged",
    )
  if version == 0:
    why = "version 0 is the initial parameters; no round made it"
  elif version > merged[-1]:
    why = f"it is not merged yet; the newest version is {merged[-1]}"
  else:
    why = "the tape tells of no round that made it"
  remedy = f"name a version from {merged[0]} to {merged[-1]}"
  return errors.UserError(what, why, remedy)
