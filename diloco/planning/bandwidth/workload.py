"""What is trained, over which links, and how many bits of it cross them."""

import dataclasses
import math

from diloco.fragments import codec as codec_lib

# Bits a parameter takes on the wire, with its share of a block's scale.
CODEC_BITS = {
  name: 8.0 * codec_lib.of(name).num_bytes(codec_lib.BLOCK) / codec_lib.BLOCK
  for name in codec_lib.NAMES
}

# Ethernet, IP and TCP headers take 54 bytes of a jumbo frame of 9,014.
WIRE_OVERHEAD = 9014 / 8960


@dataclasses.dataclass(frozen=True)
class Workload:
  """A model of equal layers, trained at several sites."""

  params: float = 1e9  # N
  layers: int = 24  # L; every layer holds N / L parameters
  step_secs: float = 0.1  # pure computing of one inner step
  every: int = 100  # H, inner steps between two syncs of the same parameters
  fragment_layers: int = 3  # layers of a fragment
  sites: int = 2  # ends of the links; each has one copy of the model
  codec: str = "bf16"  # of what is reduced, unless a method says otherwise
  latency_secs: float = 0.0  # one way, between any two sites

  @property
  def num_fragments(self) -> int:
    """P; the last fragment may be smaller."""
    return math.ceil(self.layers / self.fragment_layers)

  @property
  def layer_gbits(self) -> float:
    """Of one layer's reduction, at one bit a parameter, headers included."""
    return self.params / self.layers * WIRE_OVERHEAD / 1e9

  @property
  def reduce_factor(self) -> float:
    """Times its size that each site sends of a tensor, in a ring of S sites.

    2 (S - 1) / S: a reduce-scatter and an all-gather. For two sites it is 1:
    each sends the other all it has.
    """
    return 2 * (self.sites - 1) / self.sites

  @property
  def reduce_delay_secs(self) -> float:
    """A ring passes on 2 (S - 1) times."""
    return 2 * (self.sites - 1) * self.latency_secs
