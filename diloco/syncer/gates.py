"""Gates: whose contributions are refused for what they contain.

An island whose update is not finite, or far longer than others have been, is
told so and starts again from the global parameters. One that goes on offending
is suspended: its contributions are refused unseen, for a time that doubles.

    refuse if  norm / sqrt(c_steps)  >  factor * median

where the median is over the last accepted contributions of the fragment.
Steps of one island add up somewhere between their square root (unrelated) and
their number (all one way); the root refuses less. A gate that would refuse
everybody learns nothing, so after `patience` refusals in a row from at least
two islands it takes what comes as the new measure.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from typing import NamedTuple

from diloco.snapshots import records


@dataclasses.dataclass(frozen=True)
class GateSettings:
  """How strict to be."""

  # Times the median beyond which a norm is an outlier; 0 accepts all that is
  # finite.
  factor: float = 20.0
  history: int = 32  # accepted norms the median is taken over
  warmup: int = 8  # below this many accepted norms nothing is an outlier
  # Refusals in a row, by at least two islands, after which the gate gives in.
  patience: int = 8


class NormGate:
  """Judges the norms of one fragment's contributions."""

  __slots__ = ("_accepted", "_refused", "_settings", "_sorted")

  def __init__(self, settings: GateSettings):
    self._settings = settings
    self._accepted: collections.deque[float] = collections.deque()
    self._sorted: list[float] = []
    self._refused: list[int] = []  # islands refused since the last accepted

  def judge(self, contribution: records.Contribution) -> str:
    """Returns why to refuse a contribution; empty to let it in."""
    square = 0.0
    for norm in contribution.norms:
      square += norm * norm
    if not math.isfinite(square):
      return "not_finite"
    settings = self._settings
    if not settings.factor or len(self._sorted) < settings.warmup:
      return ""
    length = math.sqrt(square / contribution.c_steps)
    median = self._sorted[len(self._sorted) // 2]
    if not median or length <= settings.factor * median:
      return ""
    self._refused.append(contribution.island)
    if len(self._refused) >= settings.patience and len(set(self._refused)) > 1:
      self._accepted.clear()
      self._sorted.clear()
      return ""
    return f"norm_outlier: {length:.3g} per root of a step, median {median:.3g}"

  def accepted(self, contribution: records.Contribution) -> None:
    """Takes a merged contribution as a measure for later ones."""
    self._refused.clear()
    square = 0.0
    for norm in contribution.norms:
      square += norm * norm
    length = math.sqrt(square / contribution.c_steps)
    if len(self._accepted) == self._settings.history:
      oldest = self._accepted.popleft()
      del self._sorted[bisect.bisect_left(self._sorted, oldest)]
    self._accepted.append(length)
    bisect.insort(self._sorted, length)


@dataclasses.dataclass(frozen=True)
class Suspension:
  """When a repeated offender is suspended, and for how long."""

  after: int = 3  # offences in a row from which on an island is suspended
  # The first suspension; each further one is twice as long.
  base_secs: float = 10.0
  max_secs: float = 600.0  # the longest

  def secs(self, offences: int) -> float:
    """How long to suspend after the given number of offences; 0 for not."""
    if offences < self.after:
      return 0.0
    doubled = self.base_secs * 2.0 ** min(offences - self.after, 60)
    return min(doubled, self.max_secs)


class Offence(NamedTuple):
  """What an island has earned by what it sent."""

  offences: int  # in a row
  suspended_secs: float  # from now, refused unseen; 0 for not


@dataclasses.dataclass
class _Offender:
  incarnation: int = 0
  step: int = 0  # last one refused; what counts from it on is a new offence
  offences: int = 0
  until: float = 0.0  # suspended, on the caller's clock


class Offenders:
  """Islands that were refused for what they sent, and not merged since."""

  def __init__(self, suspension: Suspension):
    self._suspension = suspension
    self._known: dict[int, _Offender] = {}

  def __bool__(self) -> bool:
    return bool(self._known)

  def is_suspended(self, island: int, now: float) -> bool:
    """Whether what it sends is refused unseen."""
    known = self._known.get(island)
    return known is not None and now < known.until

  def add(self, refused: records.Contribution, now: float) -> Offence | None:
    """Counts an offence; None if its island could not know of the last one."""
    known = self._known.get(refused.island)
    if known is None:
      known = self._known[refused.island] = _Offender()
    elif (
      refused.incarnation <= known.incarnation
      and refused.first_step < known.step
    ):
      known.step = max(known.step, refused.step)
      return None
    known.incarnation, known.step = refused.incarnation, refused.step
    known.offences += 1
    secs = self._suspension.secs(known.offences)
    known.until = now + secs
    return Offence(known.offences, secs)

  def forgive(self, island: int) -> None:
    """What it sent was merged."""
    self._known.pop(island, None)
