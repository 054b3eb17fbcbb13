"""A publication's values as the store keeps them, and how long they are.

Lengths are measured here and not on the devices: a merge takes the recorded
ones, so their last bits are in every version. Summed by `fragments.norms`, they
are the same on any kind of device and mesh, and the syncer measures alike.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from diloco.fragments import codec as codec_lib
from diloco.fragments import norms, partition
from diloco.islands import shards
from diloco.snapshots import arrays, layout


class Encoded(NamedTuple):
  """One fragment's outer gradient as the store keeps it."""

  tensors: list[arrays.Tensor]  # in plan order
  norms: list[float]  # L2 norm per tensor, of the values as encoded
  chunks: list[list[int]]  # per tensor, as a commit record has them

  @property
  def num_bytes(self) -> int:
    """Bytes of all pieces this process holds."""
    return sum(v.nbytes for t in self.tensors for _, v in t.pieces)


class Encoder:
  """Takes outer gradients to the host, as one codec stores them.

  Attributes:
    codec: which.
  """

  def __init__(
    self,
    plan: partition.FragmentPlan,
    codec: codec_lib.Codec,
    shardings: shards.Shardings,
  ):
    self.codec = codec
    self._plan = plan
    self._shardings = shardings

  def encode(
    self, fragment: int, outer_grads: Mapping[str, jax.Array]
  ) -> Encoded:
    """Takes a fragment's outer gradient, from `swap.Swap.publish`."""
    found = Encoded([], [], [])
    for spec in self._plan.fragments[fragment]:
      held = shards.to_host(outer_grads[spec.name])
      # Without metadata, of which the record says what is wanted.
      stored = held.stored(spec.name)
      if self.codec.packed:
        part = self._shardings[spec.name].shard_shape(spec.shape)
        rows = layout.packed(self.codec, spec.shape, part)
        stored = stored._replace(layout=rows)
        squares = [self._square(piece, part) for _, piece in held.pieces]
        found.chunks.append(list(part))
      else:
        squares = [norms.sum_of_squares(piece) for _, piece in held.pieces]
        found.chunks.append(list(stored.layout.chunk_shape))
      found.tensors.append(stored)
      found.norms.append(sum(squares) ** 0.5)
    return found

  def _square(self, row: np.ndarray, part: tuple[int, ...]) -> float:
    """Sum of squares of the values that a part's row stands for."""
    blocks = self.codec.decoded(row.reshape(-1), math.prod(part), norms.BLOCK)
    return math.fsum(norms.square(block) for block in blocks)
