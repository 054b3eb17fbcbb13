"""What the syncer's core hears, and what it answers.

Values without behaviour: the core, its shell and the simulated worlds speak in
them. Times are the caller's monotonic clock in seconds.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diloco.snapshots import records
from diloco.syncer import grace

Hole = tuple[int, int]  # steps (first, last]


class Start(NamedTuple):
  """A fragment as its head has it."""

  version: int  # the newest
  clock: Mapping[int, int]  # a vector clock, island -> last merged step
  # Island -> steps before that which no version has: another life or base
  # skipped them, or they were not to be seen when later ones were merged. They
  # never will be: what was trained since stands on what the island made of
  # them.
  holes: Mapping[int, tuple[Hole, ...]] = {}


# Events


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
  """Commit records became visible, together as far as one look can tell.

  A look after an outage finds several publications of one island; the latest
  contains the others, so all are taken in before any round closes.
  """

  contributions: Sequence[records.Contribution]


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
  """Islands that are training now, with their seconds per step."""

  step_secs: Mapping[int, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
  """The version asked for by `Close` is the fragment's head."""

  fragment: int


@dataclasses.dataclass(frozen=True)
class MergeRefused:
  """The merge found contributions it must not use; nothing was committed."""

  fragment: int
  reasons: Mapping[str, str]  # contribution key -> reason


@dataclasses.dataclass(frozen=True)
class MergeFailed:
  """The store failed during a merge; a later `Tick` may try again.

  Each failure in a row doubles the pause of that fragment, and of no other.
  """

  fragment: int


@dataclasses.dataclass(frozen=True)
class Tick:
  """Time passed."""


@dataclasses.dataclass(frozen=True)
class Drain:
  """Close every round as soon as its quorum allows, without grace."""


@dataclasses.dataclass(frozen=True)
class CutRequested:
  """A cut was asked for."""

  number: int


@dataclasses.dataclass(frozen=True)
class CutEnded:
  """The cut is complete or given up: its channel need not be kept."""

  number: int


Event = (
  Arrived
  | Membership
  | Committed
  | MergeRefused
  | MergeFailed
  | Tick
  | Drain
  | CutRequested
  | CutEnded
)


# Actions


@dataclasses.dataclass(frozen=True, slots=True)
class Open:
  """A round opened; islands that would miss it may now follow."""

  fragment: int
  version: int
  island: int


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
  """One contribution in a closing round."""

  contribution: records.Contribution
  staleness: int
  arrived_at: float
  waited_secs: float  # arrival after the round opened; negative: before


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
  """Merge these and commit the result as `version`."""

  fragment: int
  version: int
  chosen: tuple[Chosen, ...]
  absent: tuple[int, ...]  # live islands that are not in
  clock: Mapping[int, int]  # the vector clock of the new version
  holes: Mapping[int, tuple[Hole, ...]]  # what it passes over; see `Start`
  opened_at: float
  closed_at: float
  quorum_secs: float
  grace_secs: float  # offered
  grace_spent_secs: float
  queued_secs: float  # from the end of the window to `closed_at`
  facts: grace.GraceFacts  # what the offer was made from


@dataclasses.dataclass(frozen=True, slots=True)
class Discard:
  """This contribution will never be merged."""

  contribution: records.Contribution
  reason: str
  arrived_at: float


@dataclasses.dataclass(frozen=True)
class Quarantine:
  """Tell an island that what it publishes is refused, and start it anew."""

  island: int
  incarnation: int
  fragment: int
  reason: str
  offences: int  # in a row
  suspended_secs: float  # from now, refused unseen; 0 for not


@dataclasses.dataclass(frozen=True)
class Remind:
  """See that an island can still read what it was told last."""

  island: int


@dataclasses.dataclass(frozen=True)
class Cut:
  """Write down the heads as they are now: the syncer's part of a cut."""

  number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
  """This contribution was merged already; only its record is left over."""

  contribution: records.Contribution


Action = Open | Close | Discard | Quarantine | Remind | Cut | Forget
