"""A publication's values: outer gradients, encoded.

Pure: equal parameters and anchors give equal bytes, in the publisher's thread
and in a replay.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from diloco.fragments import codec as codec_lib
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
  specs: Sequence[partition.Tensor],
  params: Mapping[str, jax.Array],
  anchor: shards.HostFragment,
  codec: str,
) -> Encoded:
  """Outer gradient of each tensor: anchor minus island parameters.

  Args:
    specs: the fragment's tensors, in plan order.
    params: the island's values of them.
    anchor: the global version they started from.
    codec: "f32" or "bf16".

  Returns:
    The encoded tensors and their norms.
  """
  tensors, lengths = [], []
  for spec in specs:
    held = shards.to_host(spec.name, params[spec.name])
    pieces, square = [], 0.0
    for (box, values), (_, base) in zip(
      held.pieces, anchor[spec.name].pieces, strict=True
    ):
      encoded = codec_lib.encode(np.subtract(base, values), codec)
      square += norms.sum_of_squares(encoded)
      pieces.append((box, encoded))
    layout = arrays.Layout.of(
      spec.shape, codec_lib.DTYPES[codec], held.shard_shape
    )
    tensors.append(arrays.Tensor(spec.name, layout, pieces))
    lengths.append(square**0.5)
  return Encoded(tensors, lengths)
