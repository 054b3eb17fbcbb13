"""Methods as graphs: which reductions there are and who waits for them.

In every step the device does the forward pass of layers 1 to L, then of layers
L to 1 the gradient of the activations and that of the weights; each of the
three takes step_secs / (3 L). What a layer sends may leave once its weights'
gradient is done, so a reduction overlaps with the backward pass of the layers
below it. The first forward node of a later step waits for it.

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
spread over the H steps as `fragments.schedule` does it.
"""

import dataclasses
from collections.abc import Mapping

from diloco.fragments import schedule
from diloco.planning.bandwidth import graph
from diloco.planning.bandwidth import workload as workload_lib


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


def period(method: Method, work: workload_lib.Workload) -> int:
  """Steps after which everything repeats."""
  return work.every if method.periodic else 1


def fragments(
  method: Method, work: workload_lib.Workload
) -> tuple[tuple[int, ...], ...]:
  """Layers of each fragment, counted from 0."""
  count = work.num_fragments if method.streaming else 1
  return tuple(tuple(range(p, work.layers, count)) for p in range(count))


def build(
  method: Method, work: workload_lib.Workload, steps: int
) -> list[graph.Node]:
  """The graph of so many inner steps."""
  bits = method.bits or workload_lib.codec_bits(work.codec)
  gbits = work.layer_gbits * bits * work.reduce_factor
  parts = fragments(method, work)
  plan = schedule.Schedule(period(method, work), len(parts))
  secs = work.step_secs / (3 * work.layers)
  nodes: list[graph.Node] = []
  waits: dict[int, list[int]] = {}  # reductions by the step that needs them

  def add(kind: graph.Kind, step: int, layer: int, *after: int) -> int:
    if kind == "reduce":
      delay = work.reduce_delay_secs
      node = graph.Node(kind, step, layer, after, 0.0, gbits, delay)
    else:
      node = graph.Node(kind, step, layer, after, secs)
    nodes.append(node)
    return len(nodes) - 1

  last: tuple[int, ...] = ()
  for step in range(steps):
    offsets = (plan.offset(p) for p in range(len(parts)))
    due = {
      layer
      for layers, offset in zip(parts, offsets, strict=True)
      if step % plan.sync_every == offset
      for layer in layers
    }
    last = (*last, *waits.pop(step, []))
    for layer in range(work.layers):
      last = (add("forward", step, layer, *last),)
    for layer in reversed(range(work.layers)):
      last = (add("backward_activations", step, layer, *last),)
      weights = add("backward_weights", step, layer, *last)
      if layer in due:
        sent = add("reduce", step, layer, weights)
        waits.setdefault(step + 1 + method.overlap_steps, []).append(sent)
  return nodes
