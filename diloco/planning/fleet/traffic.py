"""What goes in and out of simulated rounds: delays, tracks, and a tally."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diloco import errors


@dataclasses.dataclass(frozen=True)
class Links:
  """Delays between islands and syncer, and what islands do about them.

  Attributes:
    publish_secs: from a due fragment to the syncer knowing of it.
    merge_secs: from the close of a round to its version.
    fetch_secs: from a version to an island having it on its devices.
    member_secs: from an island's last step to its counting as gone.
    join_secs: from its first step to its counting as there.
    jitter: standard deviation of a step's time, as a share of it.
    lockstep: wait for the answer to what was published.
  """

  publish_secs: float = 0.2
  merge_secs: float = 0.1
  fetch_secs: float = 0.2
  member_secs: float = 5.0
  join_secs: float = 0.0
  jitter: float = 0.0
  lockstep: bool = False

  def __post_init__(self) -> None:
    errors.check_amounts(self)
    errors.check(self, {"at least 0 and below 1": ["jitter"]})


class Stop(NamedTuple):
  """A stretch in which an island does not step."""

  start: float  # seconds
  end: float  # seconds; infinite if it does not come back
  killed: bool = False  # whether its process died; else its state survives


@dataclasses.dataclass(frozen=True)
class Track:
  """How an island gets on, apart from the rounds."""

  step_secs: float  # mean time of a step
  stops: Sequence[Stop] = ()  # in order of time, without overlap
  checkpoint_steps: int = 0  # saves its state each so many steps; 0: never


@dataclasses.dataclass
class Tally:
  """What happened in a stretch of virtual time.

  Attributes:
    steps: [M] inner steps done; those done again count again.
    kept_steps: [M] steps of which no island lost the result by dying.
    waiting_secs: [M] spent waiting in lockstep.
    stopped_secs: [M] spent in stops.
    secs: its length.
    merges: rounds closed.
    alive: sum over rounds of islands that were training.
    contributors: islands in them, by how often.
    staleness: of contributions merged, by how often.
    merged_steps: fragment-steps that entered a version.
    overwritten_steps: fragment-steps given up by adopting.
  """

  steps: np.ndarray
  kept_steps: np.ndarray
  waiting_secs: np.ndarray
  stopped_secs: np.ndarray
  secs: float = 0.0
  merges: int = 0
  alive: int = 0
  merged_steps: int = 0
  overwritten_steps: int = 0
  contributors: Counter[int] = dataclasses.field(default_factory=Counter)
  staleness: Counter[int] = dataclasses.field(default_factory=Counter)


def mean(counts: Counter[int]) -> float:
  """Of what was counted; not a number if that is nothing."""
  total = counts.total()
  return sum(n * c for n, c in counts.items()) / total if total else math.nan
