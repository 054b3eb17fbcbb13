"""Compute utilisation against bandwidth, and the bandwidth it takes.

    utilisation = H step_secs / wall seconds of H steps

in the steady state: of the third of three periods. On the grid of bandwidths
there are two readings of "what a utilisation takes". `reached` is the first
grid point where it is reached. `figure` is the grid point before, the last one
where it is not: that is what the published tables hold (`published` tells how
we know).
"""

import dataclasses

import numpy as np

from diloco import errors
from diloco.planning.bandwidth import graph, methods
from diloco.planning.bandwidth import workload as workload_lib

GRID_GBPS = np.logspace(-1, 3, 50)
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
_PERIODS = 3
_MOST_NODES = 1_000_000  # about 10 seconds and 400 MB


@dataclasses.dataclass(frozen=True)
class Needed:
  """Bandwidth of the link between sites for one utilisation; None: beyond."""

  level: float
  figure_gbps: float | None
  reached_gbps: float | None


def utilisation(
  method: methods.Method,
  work: workload_lib.Workload,
  link_gbps: np.ndarray,
) -> np.ndarray:
  """Share of the time in which the device computes: [B], in (0, 1].

  Args:
    method: how parameters are kept in step.
    work: the model, the sites.
    link_gbps: [B], bandwidth of the slowest link.

  Raises:
    UserError: the graph would be too large to follow.
  """
  steps = methods.period(method, work)
  size = _PERIODS * steps * work.layers * 3
  if size > _MOST_NODES:
    raise errors.UserError(
      f"--every={work.every} with --layers={work.layers}",
      f"that is {size} nodes, and {_MOST_NODES} are followed at most",
      "lower one of them, or ask for --method=decoupled",
    )
  nodes = methods.build(method, work, _PERIODS * steps)
  done = graph.done_secs(nodes, link_gbps)
  ends = np.zeros((_PERIODS, len(link_gbps)))
  for node, secs in zip(nodes, done, strict=True):
    if node.kind == "backward_weights":
      ends[node.step // steps] = secs
  return np.minimum(steps * work.step_secs / (ends[-1] - ends[-2]), 1.0)


def needed(curve: np.ndarray) -> tuple[Needed, ...]:
  """Both readings at every level, of a utilisation on the grid."""
  found = []
  for level in LEVELS:
    good = np.flatnonzero(curve >= level - 1e-9)  # rounding of long sums
    first = int(good[0]) if len(good) else len(GRID_GBPS)
    found.append(Needed(level, _point(first - 1), _point(first)))
  return tuple(found)


def _point(index: int) -> float | None:
  inside = 0 <= index < len(GRID_GBPS)
  return float(GRID_GBPS[index]) if inside else None


def grid_steps(gbps: float) -> int:
  """Index of the nearest grid point; published figures are rounded to 0.1."""
  return int(np.abs(np.log(GRID_GBPS / gbps)).argmin())
