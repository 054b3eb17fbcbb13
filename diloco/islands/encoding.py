"""A publication's values as the store keeps them, and how long they are.

Lengths are measured here and not on the devices: a merge takes the recorded
ones, so their last bits are in every version. Summed by `fragments.norms`, they
are the same on any kind of device and mesh, and the syncer measures alike.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from diloco.fragments import norms, partition
from diloco.islands import shards
from diloco.snapshots import arrays


class Encoded(NamedTuple):
  """One fragment's outer gradient as the store keeps it."""

  tensors: list[arrays.Tensor]  # in plan order
  norms: list[float]  # L2 norm per tensor, of the values as encoded

  @property
  def chunks(self) -> list[list[int]]:
    """Chunk shape per tensor."""
    return [list(t.layout.chunk_shape) for t in self.tensors]

  @property
  def num_bytes(self) -> int:
    """Bytes of all pieces this process holds."""
    return sum(v.nbytes for t in self.tensors for _, v in t.pieces)


def encode(
  specs: Sequence[partition.Tensor], outer_grads: Mapping[str, jax.Array]
) -> Encoded:
  """Takes a fragment's outer gradient to the host.

  Args:
    specs: the fragment's tensors, in plan order.
    outer_grads: from `swap.Swap.publish`.

  Returns:
    The encoded tensors and their norms.
  """
  tensors, lengths = [], []
  for spec in specs:
    values = outer_grads[spec.name]
    held = shards.to_host(spec.name, values)
    layout = arrays.Layout.of(spec.shape, values.dtype, held.shard_shape)
    tensors.append(arrays.Tensor(spec.name, layout, held.pieces))
    square = sum(norms.sum_of_squares(piece) for _, piece in held.pieces)
    lengths.append(square**0.5)
  return Encoded(tensors, lengths)
