"""Methods on links: compute utilisation, and the bandwidth that it takes.

In every step the device does the forward pass of layers 1 to L, then of layers
L to 1 the gradient of the activations and that of the weights; each of the
three takes step_secs / (3 L). What a layer sends may leave once its weights'
gradient is done, so a reduction overlaps with the backward pass of the layers
below it. The link takes reductions one at a time, bits / bandwidth seconds
each; latency delays who waits, and not the next one. The first layer of a later
step waits for it.

| method | reduces | after | the waiting step |
| --- | --- | --- | --- |
| data_parallel | every layer | every step | next |
| diloco | every layer | every H-th step | next |
| streaming | a fragment, strided | P times in H steps | next |
| overlapped | a fragment, strided | P times in H steps | next but one |
| overlapped_int4 | as above, in int4 | | |

Strided: fragment p holds layers p, p + P, p + 2 P, ...: the upper ones leave
early in the backward pass. (With blocks of neighbouring layers seven cells of
the published table come out one or two grid steps too high.) Fragments are
spread over the H steps as `fragments.schedule` does it. Then

    utilisation = H step_secs / wall seconds of H steps

in the steady state: of the third of three periods. On the grid of bandwidths
there are two readings of "what a utilisation takes". `reached` is the first
grid point where it is reached. `figure` is the grid point before, the last one
where it is not: that is what the published tables hold (`published` tells how
we know).

Reference: the simulator of Streaming DiLoCo, arXiv 2501.18512, section 3.1.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from diloco import errors
from diloco.fragments import schedule
from diloco.planning.bandwidth import workload as workload_lib

GRID_GBPS = np.logspace(-1, 3, 50)
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
_PERIODS = 3
_MOST_NODES = 1_000_000  # passes of a layer; about 10 seconds


@dataclasses.dataclass(frozen=True)
class Method:
  """How parameters are kept in step."""

  title: str  # for people
  periodic: bool = True  # synchronises each H steps, not each step
  streaming: bool = False  # a fragment at a time, not the whole model
  overlap_steps: int = 0  # tau, steps that need not wait for what is under way
  # A parameter takes on the wire, in place of the workload's codec.
  bits: float | None = None


METHODS: Mapping[str, Method] = {
  "data_parallel": Method("data parallel", periodic=False),
  "diloco": Method("DiLoCo"),
  "streaming": Method("streaming", streaming=True),
  "overlapped": Method(
    "streaming, overlapped", streaming=True, overlap_steps=1
  ),
  "overlapped_int4": Method(
    "streaming, overlapped, 4-bit",
    streaming=True,
    overlap_steps=1,
    bits=4 + 32 / 128,  # as published figures are met: f32 scales
  ),
}


@dataclasses.dataclass(frozen=True)
class Needed:
  """Bandwidth of the link between sites for one utilisation.

  Both are None where no point of the grid reaches it; the figure alone is where
  the first one does.
  """

  level: float
  figure_gbps: float | None
  reached_gbps: float | None


def utilisation(
  method: Method, work: workload_lib.Workload, link_gbps: np.ndarray
) -> np.ndarray:
  """Share of the time in which the device computes: [B], in (0, 1].

  Args:
    method: how parameters are kept in step.
    work: the model, the sites.
    link_gbps: [B], bandwidth of the slowest link.

  Raises:
    UserError: there are too many passes to follow.
  """
  steps = work.every if method.periodic else 1
  size = _PERIODS * steps * work.layers * 3
  if size > _MOST_NODES:
    raise errors.UserError(
      f"--every={work.every} with --layers={work.layers}",
      f"that is {size} nodes, and {_MOST_NODES} are followed at most",
      "lower one of them, or ask for --method=decoupled",
    )
  bits = method.bits or workload_lib.CODEC_BITS[work.codec]
  sending = work.layer_gbits * bits * work.reduce_factor / link_gbps
  parts = work.num_fragments if method.streaming else 1
  offsets = [schedule.Schedule(steps, parts).offset(p) for p in range(parts)]
  secs = work.step_secs / (3 * work.layers)
  device = link = np.zeros(len(link_gbps))  # when it is free
  there: dict[int, np.ndarray] = {}  # all that a step waits for
  ends = []
  for step in range(_PERIODS * steps):
    device = np.maximum(device, there.pop(step, 0.0))
    for _ in range(work.layers):
      device = device + secs
    for layer in reversed(range(work.layers)):
      device = device + secs + secs
      if step % steps == offsets[layer % parts]:
        link = np.maximum(link, device) + sending
        waiting = step + 1 + method.overlap_steps
        done = link + work.reduce_delay_secs
        there[waiting] = np.maximum(there.get(waiting, 0.0), done)
    ends.append(device)
  period_secs = ends[-1] - ends[-1 - steps]
  return np.minimum(steps * work.step_secs / period_secs, 1.0)


def needed(curve: np.ndarray) -> tuple[Needed, ...]:
  """Both readings at every level, of a utilisation on the grid."""
  found = []
  for level in LEVELS:
    good = np.flatnonzero(curve >= level - 1e-9)  # rounding of long sums
    first = int(good[0]) if len(good) else -1
    found.append(Needed(level, _point(first - 1), _point(first)))
  return tuple(found)


def _point(index: int) -> float | None:
  return float(GRID_GBPS[index]) if index >= 0 else None


def grid_steps(gbps: float) -> int:
  """Index of the nearest grid point; published figures are rounded to 0.1."""
  return int(np.abs(np.log(GRID_GBPS / gbps)).argmin())
