"""How long things took while a run was under fire, from its tapes.

*Takeover*: from the death of the leading syncer to its successor's lease;
*merging*: to the next version, by which the successor is at work for certain.
*Rejoin*: from the death of an island to the end of its next step. *Gap*: of an
island that no fault touched, the longest time between two steps while another
role was dead or shut out, over its own median; *calm gap*: the same in as long
a time right before, if nothing was dead or shut out in it.
"""

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diloco.tape import events, reader


class Gap(NamedTuple):
  """The longest gap of an island around a fault, over its own median."""

  ratio: float
  island: int
  fault: int  # serial
  kind: str


class Samples(NamedTuple):
  """All that was measured in a run, or in several."""

  takeover_secs: list[float]
  merging_secs: list[float]
  rejoin_secs: list[float]
  survivor_gaps: list[Gap]
  calm_gaps: list[float]  # ratios
  collateral: list[str]  # islands that died although nobody hit them

  @classmethod
  def none(cls) -> "Samples":
    """Returns no samples."""
    return cls(*([] for _ in cls._fields))

  def add(self, other: "Samples") -> None:
    """Takes the samples of another run."""
    for name, values in other._asdict().items():
      getattr(self, name).extend(values)


def measure(
  record: reader.Whole, faults: Sequence[Mapping[str, Any]]
) -> Samples:
  """Measures every fault that was done, of the lines of `chaos.jsonl`."""
  found = Samples.none()
  leases = sorted(
    (line["wall_secs"], line["role"])
    for line in record.events
    if line["event"] == events.LEASE_ACQUIRED
  )
  merges = sorted(
    line["wall_secs"]
    for line in record.events
    if line["event"] == events.MERGED
  )
  starts = [
    (line["wall_secs"], line["island"], line["island_incarnation"])
    for line in record.events
    if line["event"] == events.ISLAND_STARTED
  ]
  for before, fault in zip([None, *faults], faults, strict=False):
    if fault["outcome"] != "done":
      continue
    calm_since = _over(before) if before else 0.0
    roles = fault["roles"]
    controller_hit = "controller" in roles
    if not controller_hit and fault["kind"] != "sigstop":
      takeover = _takeover(fault, roles, leases)
      found.takeover_secs.extend(takeover)
      later = bisect.bisect_right(merges, fault["wall_secs"] + sum(takeover))
      if takeover and later < len(merges):
        found.merging_secs.append(merges[later] - fault["wall_secs"])
    for island, lines in record.metrics.items():
      if f"island-{island}" in roles:
        if fault["kind"] != "sigstop" and not controller_hit:
          found.rejoin_secs.extend(_rejoin(fault, lines))
      else:
        begun = [
          incarnation
          for wall, m, incarnation in starts
          if m == island and wall <= fault["wall_secs"]
        ]
        life = max(begun, default=0)
        _survive(fault, island, lines, life, calm_since, found)
  return found


def _over(fault: Mapping[str, Any]) -> float:
  """When the run had recovered from a fault; inf if nobody knows."""
  if fault["outcome"] != "done" and not fault["roles"]:
    return float(fault["wall_secs"])  # nobody was hit
  return fault.get("recovered_secs") or math.inf


def _takeover(
  fault: Mapping[str, Any],
  roles: Sequence[str],
  leases: Sequence[tuple[float, str]],
) -> list[float]:
  """Seconds without a leader, if the fault killed the one there was."""
  died = fault["wall_secs"]
  before = [role for wall, role in leases if wall <= died]
  after = [wall for wall, _ in leases if wall > died]
  if not before or not after or before[-1] not in roles:
    return []
  return [after[0] - died]


def _rejoin(
  fault: Mapping[str, Any], lines: Sequence[reader.Line]
) -> list[float]:
  """Seconds from an island's death to its next step."""
  died = fault["wall_secs"]
  before = [line["incarnation"] for line in lines if line["wall_secs"] <= died]
  last = max(before, default=0)
  again = [
    line["wall_secs"]
    for line in lines
    if line["incarnation"] > last and line["wall_secs"] > died
  ]
  return [min(again) - died] if again else []


def _survive(
  fault: Mapping[str, Any],
  island: int,
  lines: Sequence[reader.Line],
  begun: int,
  calm_since: float,
  found: Samples,
) -> None:
  """Measures an island that the fault did not touch.

  `begun` is the newest of its lives that had begun by then, if that is known;
  `calm_since` is when the run had recovered from the fault before.
  """
  begin, end = fault["wall_secs"], fault.get("recovered_secs")
  if end is None:
    return  # the run ended first
  walls = [line["wall_secs"] for line in lines]
  first, last = (
    bisect.bisect_right(walls, begin),
    bisect.bisect_left(walls, end),
  )
  if not 0 < first < len(lines):
    return
  during = lines[first : last + 1]
  life = max(lines[first - 1]["incarnation"], begun)
  if any(line["incarnation"] > life for line in during):
    found.collateral.append(f"island-{island} in fault {fault['serial']}")
    return
  if lines[first - 1]["incarnation"] < life:
    return  # it was still starting
  touching = _gaps(during)
  median = statistics.median(
    _gaps(line for line in lines if line["incarnation"] == life) or [0.0]
  )
  if not touching or median <= 0:
    return
  found.survivor_gaps.append(
    Gap(max(touching) / median, island, fault["serial"], fault["kind"])
  )
  calm_begin = begin - (end - begin)
  start = bisect.bisect_right(walls, calm_begin)
  calm = _gaps(lines[start:first])
  if (
    calm
    and calm_begin >= calm_since
    and start > 0
    and lines[start - 1]["incarnation"] == life
  ):
    found.calm_gaps.append(max(calm) / median)


def _gaps(lines: Iterable[reader.Line]) -> list[float]:
  return [line["gap_secs"] for line in lines if line["gap_secs"] is not None]


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
  """Returns count, p50, p99 and maximum; percentiles are values that occur."""
  ranks = {"p50": 50, "p99": 99, "max": 100}
  found: list[float | None] = [None] * len(ranks)
  if values:
    at = np.percentile(values, [*ranks.values()], method="inverted_cdf")
    found = at.round(3).tolist()
  return {"count": len(values), **dict(zip(ranks, found, strict=True))}
