"""Bytes on each chip and on each island's hosts.

A chip holds its share of

    parameters f32, Adam's two moments f32, gradients f32, a bf16 copy
    fragments in flight: (tau P / H + 1) of them leaving, as many arriving, f32
    with carry, the two newest published values of every fragment, f32

divided evenly over the island's chips, and, undivided, the activations of one
sequence with one layer recomputed at a time, and two gathered layers in bf16.
Anchors stay on the hosts.
"""

import dataclasses
import math

from diloco.planning.planner import exchange, resources
from diloco.planning.planner import model as model_lib

_KEPT_PUBLICATIONS = 2
_LAYER_BYTES = 34  # a token and unit of width, of one recomputed layer


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one chip, by what they hold, and of the island's hosts."""

  parameters: float
  optimizer: float
  gradients: float
  in_flight: float
  carried: float
  activations: float
  host_anchors: float  # of the whole island

  @property
  def chip(self) -> float:
    """All that one chip holds."""
    return sum(dataclasses.astuple(self)[:-1])  # the last is of the hosts


def of_island(
  model: model_lib.Model, island: resources.Island, choice: exchange.Exchange
) -> Memory:
  """Computes what an island's chips and hosts hold."""
  share = model.params / island.chips
  fragments = choice.num_fragments
  flying = math.ceil(choice.overlap_steps * fragments / choice.every) + 1
  tokens = model_lib.SEQUENCE
  layer = model.params / model.layers
  return Memory(
    parameters=(4 + 2) * share,
    optimizer=8 * share,
    gradients=4 * share,
    in_flight=2 * 4 * share * min(1.0, flying / fragments),
    carried=4 * share * _KEPT_PUBLICATIONS if choice.carry else 0.0,
    activations=tokens * model.width * (2 * model.layers + _LAYER_BYTES)
    + (2 * 2 * layer if island.chips > 1 else 0.0),
    host_anchors=4 * model.params,
  )
