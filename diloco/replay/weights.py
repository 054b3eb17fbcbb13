"""What the contributions of a merge should have weighed.

The tape says with which weights the run merged; that alone would prove no more
than that the run did what it says. So weights are made again, from the steps a
replayed island did and the versions between: a wrong weight is a difference.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diloco.replay import script
from diloco.snapshots import records
from diloco.syncer import weighting


class Verdict(NamedTuple):
  """Weights as they should be, and where the tape says otherwise."""

  weights: tuple[float, ...]
  wrong: tuple[str, ...]


def check(
  merge: script.Merge,
  makings: Mapping[script.VersionId, script.Making],
  contributions: Sequence[records.Contribution],
  weights: weighting.Weighting,
) -> Verdict:
  """Weighs the contributions of a merge again.

  Args:
    merge: what the tape says of it.
    makings: how all versions came to be.
    contributions: records of the replay, one for each share.
    weights: of the run's configuration.

  Returns:
    The verdict. A contribution that is on no way to this version, or too far
    behind, keeps the tape's weight and is called wrong.
  """
  found: list[float] = []
  wrong: list[str] = []
  for share, record in zip(merge.shares, contributions, strict=True):
    behind = staleness(merge, record.base_version, makings)
    if behind is None or behind > weights.max_staleness:
      found.append(share.weight)
      far = "no version on the way" if behind is None else f"{behind} behind"
      wrong.append(f"{share.key}: it started from {far}, and was merged")
      continue
    weight = weights.weight(record.c_tokens, record.c_steps, behind)
    found.append(weight)
    told = {
      "weight": (share.weight, weight),
      "c_tokens": (share.c_tokens, record.c_tokens),
      "staleness": (share.staleness, behind),
    }
    wrong += [
      f"{share.key}: {name} {said!r} on the tape, {true!r} by its steps and"
      " versions"
      for name, (said, true) in told.items()
      if said != true
    ]
  return Verdict(tuple(found), tuple(wrong))


def staleness(
  merge: script.Merge,
  base_version: int,
  makings: Mapping[script.VersionId, script.Making],
) -> int | None:
  """Merges between the version a contribution started from and this one.

  A version that a return to a cut put back is the one it was made of. None if
  the base is not among this version's ancestors.
  """
  version, behind = merge.before, 0
  while version.version > base_version:
    match makings.get(version):
      case script.Return(_, old):
        version = old
      case script.Merge() as made:
        version, behind = made.before, behind + 1
      case _:
        return None
  return behind if version.version == base_version else None
