"""Whether a contribution was refused for a reason that is true.

`Keeper` is the checker's own account of one leader's gate: from what the
contributions contain, and in which order they came, it says which of them that
leader must refuse. `why_untrue` judges all other reasons by what is in the
store at that moment. Neither asks the syncer's core.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

from diloco.verification import row_ledger, values

# The rules of `diloco.syncer.gates`, told once more.
_FACTOR, _HISTORY, _WARMUP, _PATIENCE = 20.0, 32, 8, 8
_SUSPENDED_AFTER, _BASE_SECS, _MOST_SECS = 3, 10.0, 600.0

_OFFENCES = ("not_finite", "norm_outlier")


@dataclasses.dataclass
class _Offender:
  """An island that was refused, and not merged since."""

  incarnation: int = 0
  step: int = 0
  offences: int = 0
  until: float = -math.inf


class Keeper:
  """What one leader must refuse.

  Attributes:
    heads: [P], the versions it knows, the last ones it committed itself.
    refusals: key of a contribution to the reason it must be refused for.
    gave_in: whether a gate has given in since this was looked at.
  """

  def __init__(self, heads: list[values.Version], epoch: int, most: int):
    self.heads = heads
    self.refusals: dict[str, str] = {}
    self.gave_in = False
    self._epoch = epoch
    self._most = most
    self._lengths: list[collections.deque[float]] = [
      collections.deque(maxlen=_HISTORY) for _ in heads
    ]
    self._refused: list[list[int]] = [[] for _ in heads]  # islands, in a row
    self._offenders: dict[int, _Offender] = {}
    self._admitted: set[str] = set()

  @property
  def suspends(self) -> int:
    """Islands that were refused often enough to be suspended."""
    return sum(o.offences >= _SUSPENDED_AFTER for o in self._offenders.values())

  def is_suspended(self, island: int, now: float) -> bool:
    """Whether an island's contributions are refused unseen."""
    offender = self._offenders.get(island)
    return offender is not None and now < offender.until

  def arrived(self, record: Any, content: values.Delta, now: float) -> str:
    """A commit record was found; why must it be refused for its content?"""
    key = record.key
    if key in self._admitted or not self._is_candidate(record, content):
      return ""
    reason = self._judge(record, content, now)
    if not reason:
      self._admitted.add(key)
      self.refusals.pop(key, None)
    else:
      self.refusals[key] = reason
      if reason in _OFFENCES:
        self.offence(record, now)
    return reason

  def _is_candidate(self, record: Any, content: values.Delta) -> bool:
    """Whether it comes as far as the gate."""
    head = self.heads[record.fragment]
    if record.epoch != self._epoch or record.base_version > head.number:
      return False
    merged = head.rows.get(record.island, ())
    if merged and merged[-1][1] > content.spans[0][0]:
      return False
    return head.behind(content.base, self._most) <= self._most

  def _judge(self, record: Any, content: values.Delta, now: float) -> str:
    fragment, island = record.fragment, record.island
    if self.is_suspended(island, now):
      return "suspended"
    if not content.finite:
      return "not_finite"
    lengths, refused = self._lengths[fragment], self._refused[fragment]
    if len(lengths) < _WARMUP:
      return ""
    median = sorted(lengths)[len(lengths) // 2]
    if _length(content) <= _FACTOR * median:
      return ""
    refused.append(island)
    if len(refused) >= _PATIENCE and len(set(refused)) > 1:
      lengths.clear()
      refused.clear()
      self.gave_in = True
      return ""
    return "norm_outlier"

  def offence(self, record: Any, now: float) -> None:
    """Counts an offence, unless its island could not know of the last one."""
    offender = self._offenders.setdefault(record.island, _Offender())
    if (
      offender.offences
      and record.incarnation <= offender.incarnation
      and record.first_step < offender.step
    ):
      offender.step = max(offender.step, record.step)
      return
    offender.incarnation, offender.step = record.incarnation, record.step
    offender.offences += 1
    doublings = offender.offences - _SUSPENDED_AFTER
    if doublings >= 0:
      secs = min(_BASE_SECS * 2.0**doublings, _MOST_SECS)
      offender.until = now + secs

  def discarded(self, key: str) -> None:
    """This leader has discarded a contribution."""
    self._admitted.discard(key)

  def committed(self, version: values.Version) -> None:
    """This leader knows of a version that it committed."""
    fragment = version.fragment
    self.heads[fragment] = version
    for content in version.added:
      self._refused[fragment].clear()
      self._lengths[fragment].append(_length(content))
      self._offenders.pop(content.island, None)


def _length(content: values.Delta) -> float:
  """What the gate compares: a norm for the root of the steps."""
  first_step, step = content.spans[0]
  return content.norm / math.sqrt(step - first_step)


def why_untrue(
  reason: str,
  record: Any,
  content: values.Delta,
  newest: values.Version,
  most: int,
  ledger: row_ledger.RowLedger,
) -> str:
  """Why a contribution cannot be refused for this reason; empty if it can.

  A leader that is deposed and does not know it judges by an older version.
  What it finds too old or contained is so all the more in the newest one.
  """
  if reason == "too_stale":
    behind = newest.behind(content.base, most)
    if behind <= most:
      return f"it is {behind} versions behind, {most} are allowed"
  elif reason == "overlaps_merged":
    merged = newest.rows.get(record.island, ())
    if not values.overlap(merged, content.spans):
      return f"it shares no row with those merged, {list(merged)}"
  elif reason == "passed_over":
    merged = newest.rows.get(record.island, ())
    if not merged or merged[-1][1] < record.step:
      return f"nothing after it is merged, only {list(merged)}"
    if any(f <= record.first_step and record.step <= e for f, e in merged):
      return f"all its rows are merged, {list(merged)}"
  elif reason == "superseded":
    return _why_not_superseded(record, content, newest, ledger)
  elif reason == "overlapped":
    # Its other rows may be in what the leader has not seen yet.
    begins = any(
      record.first_step < other.first_step < record.step
      for other in ledger.waiting(record.island, record.fragment)
    )
    merged = newest.rows.get(record.island, ())
    if not begins and not values.overlap(merged, content.spans):
      return "nothing begins in the middle of it"
  elif reason == "not_finite":
    if content.finite:
      return "it is finite"
  else:
    return "nothing in this world can be the reason"
  return ""


def _why_not_superseded(
  record: Any,
  content: values.Delta,
  newest: values.Version,
  ledger: row_ledger.RowLedger,
) -> str:
  """A later one shares rows with it, and all its rows wait without it.

  Or what did is merged, or was given up, since.
  """
  first, last = record.first_step, record.step
  island, fragment = record.island, record.fragment
  waiting = [
    other
    for other in ledger.waiting(island, fragment)
    if other.key != record.key and other.epoch == record.epoch
  ]
  later = any(o.step >= last and o.first_step < last for o in waiting)
  for other in waiting if later else ():
    if other.step >= last and other.first_step <= first:
      return ""
  merged = newest.rows.get(island, ())
  settled = [*ledger.settled(island, fragment, merged)]
  if later:
    settled += [(o.first_step, o.step) for o in waiting]
  if any(f <= first and last <= e for f, e in values.union(settled)):
    return ""
  return "its rows are in nothing that waits"
