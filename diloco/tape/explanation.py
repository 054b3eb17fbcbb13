"""What there is to say about a closed round; see `diloco.tape.explain`."""

import dataclasses
from typing import Any, Literal

Cause = Literal["all_in", "grace_spent", "draining"]


@dataclasses.dataclass(frozen=True)
class Part:
  """A contribution of the round; steps (first_step, step]."""

  key: str
  island: int
  incarnation: int
  first_step: int
  step: int
  c_tokens: int
  base_version: int
  staleness: int
  weight: float
  share: float  # of the round's total weight
  waited_secs: float  # from the round's opening to arrival; negative: before


@dataclasses.dataclass(frozen=True)
class Late:
  """A contribution that the round could have used and did not see."""

  key: str
  island: int
  incarnation: int
  first_step: int
  step: int
  late_secs: float | None  # after the close; None: on another syncer's clock
  fate: str  # "merged in version V", "discarded: REASON" or "pending"


@dataclasses.dataclass(frozen=True)
class Discarded:
  """A contribution discarded while the round was being made."""

  key: str
  island: int
  incarnation: int
  first_step: int
  step: int
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

  def to_json(self) -> dict[str, Any]:
    """Returns plain values."""
    return dataclasses.asdict(self)
