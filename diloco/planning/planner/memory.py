"""Bytes on each chip and on each island's hosts.

A chip holds its share of

    parameters f32, Adam's two moments f32, gradients f32, a bf16 copy
    between two steps, f32: of a fragment that leaves anchor, values and outer
    gradient, of one that comes version and reference

divided evenly over the island's chips, and, undivided, the activations of one
sequence with one layer recomputed at a time, and two gathered layers in bf16.
An evaluation has the global parameters in the place of gradients. Anchors stay
on the hosts, and what was last published: with carry up to three times.
"""

import dataclasses

from diloco.planning.planner import exchange, resources
from diloco.planning.planner import model as model_lib

_IN_FLIGHT = 3 + 2  # arrays of a fragment; P <= H, so one goes each way
_KEPT_PUBLICATIONS = 3
_LAYER_BYTES = 34  # a token and unit of width, of one recomputed layer


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one chip, by what they hold, and of the island's hosts."""

  parameters: float
  optimizer: float
  gradients: float
  in_flight: float
  activations: float
  host_anchors: float  # of the whole island, as the next
  host_published: float

  @property
  def chip(self) -> float:
    """All that one chip holds."""
    return sum(dataclasses.astuple(self)[:-2])  # the last two are of the hosts


def of_island(
  model: model_lib.Model, island: resources.Island, choice: exchange.Exchange
) -> Memory:
  """Computes what an island's chips and hosts hold."""
  share = model.params / island.chips
  tokens = model_lib.SEQUENCE
  layer = model.params / model.layers
  return Memory(
    parameters=(4 + 2) * share,
    optimizer=8 * share,
    gradients=4 * share,
    in_flight=_IN_FLIGHT * 4 * share / choice.num_fragments,
    activations=tokens * model.width * (2 * model.layers + _LAYER_BYTES)
    + (2 * 2 * layer if island.chips > 1 else 0.0),
    host_anchors=4 * model.params,
    host_published=4
    * model.params
    * (_KEPT_PUBLICATIONS if choice.carry else 1),
  )
