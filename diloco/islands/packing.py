"""Encoding on the devices, for the programs that extract outer gradients.

A tensor is encoded part by part, a *part* being what one device holds of it:
its values in order, block by block. So nothing moves between devices, and what
is stored of a tensor is a row of bytes for each part, in the order of the
parts' places in the tensor. How a block is stored is in
`diloco.fragments.codec`; here is how its scale s and integers q are chosen.
With a = max |x| and n the largest integer:

    nearest      s = a / n, and q = x / s to the nearest
    nearest, n=1 s = mean of the |x| above 0.7 mean |x|
    stochastic   s = a / n rounded up, q = floor(x / s + u), u uniform in [0, 1)

Three levels at the largest magnitude would leave nearly all values at 0; the
second line is close to the least squared error. Stochastic rounding is right on
average, which it can only be with a scale that covers the block. A block that
holds what is not finite gets a scale that is not: it stays detectable.

References: Streaming DiLoCo, arXiv 2501.18512, section 2.4; for three levels,
ternary weight networks, arXiv 1605.04711.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco import config as config_lib
from diloco.fragments import codec as codec_lib

_THRESHOLD = 0.7  # of the mean magnitude, for three levels
_TINY = float(np.finfo(np.float32).tiny)


class Encoding(NamedTuple):
  """How outer gradients are encoded."""

  codec: codec_lib.Codec
  stochastic: bool = False  # by random numbers that a key decides; else nearest
  feedback: bool = False  # whether what it leaves out is wanted, for later


def of(sync: config_lib.SyncConfig) -> Encoding:
  """What a configuration asks for."""
  codec = codec_lib.of(sync.codec, sync.codec_block)
  stochastic = sync.codec_rounding == "stochastic"
  return Encoding(codec, stochastic, sync.error_feedback)


def key_data(*numbers: int) -> np.ndarray:
  """A key that depends on these numbers alone, as it enters a program."""
  return np.random.SeedSequence(numbers).generate_state(2, np.uint32)


def sharding(tensor: jax.ShapeDtypeStruct, codec: codec_lib.Codec) -> Any:
  """How what is stored of a tensor is divided: as the tensor is."""
  found = tensor.sharding
  if not codec.packed or not isinstance(found, jax.sharding.NamedSharding):
    return found
  axes: list[str] = []
  for names in found.spec:
    axes += names if isinstance(names, tuple) else [names] if names else []
  spec = jax.sharding.PartitionSpec(tuple(axes) or None, None)
  return jax.sharding.NamedSharding(
    found.mesh, spec, memory_kind=found.memory_kind
  )


def encode(
  encoding: Encoding, values: jax.Array, part: Sequence[int], key: Any
) -> tuple[jax.Array, jax.Array]:
  """Encodes a tensor, float32; to be compiled.

  Parts of shape `part` tile it; rounding that is stochastic needs a key from
  `jax.random`.

  Returns:
    What is stored: [parts, bytes] uint8, or floats of the tensor's shape. And
    the float32 values that it stands for.
  """
  codec = encoding.codec
  if not codec.packed:
    dtype = codec_lib.FLOATS[codec.name]
    if encoding.stochastic and dtype != np.float32:
      values = _draw_upper_half(values, key)
    stored = _as_stored(values, dtype).astype(dtype)
    return stored, stored.astype(jnp.float32)
  rows = _to_rows(values, part)
  size = rows.shape[1]
  blocks = -(-size // codec.block)
  short = blocks * codec.block - size
  x = jnp.pad(rows, ((0, 0), (0, short))).reshape(-1, blocks, codec.block)
  counts = np.full((blocks, 1), codec.block, np.float32)
  counts[blocks - 1 :] -= short
  scales = _scales(encoding, x, counts)
  q = _integers(encoding, x, scales, key)
  stored = _packed(codec, q, scales).reshape(-1, blocks * codec.block_bytes)
  decoded = (q * scales).reshape(-1, blocks * codec.block)
  return (
    stored[:, : codec.num_bytes(size)],
    _from_rows(decoded[:, :size], values.shape, part),
  )


def _scales(encoding: Encoding, x: jax.Array, counts: np.ndarray) -> jax.Array:
  """[..., 1] float32 that bfloat16 can hold; nan where x is not finite."""
  magnitude = jnp.abs(x)
  largest = magnitude.max(axis=-1, keepdims=True)
  scales = largest / np.float32(encoding.codec.largest)
  if encoding.stochastic:
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    bits = (bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
  elif encoding.codec.largest == 1:
    shares = magnitude / jnp.where(largest > 0, largest, 1)
    mean = shares.sum(axis=-1, keepdims=True) / counts
    above = shares > _THRESHOLD * mean
    total = jnp.where(above, shares, 0).sum(axis=-1, keepdims=True)
    scales *= total / jnp.maximum(above.sum(axis=-1, keepdims=True), 1)
  scales = _as_stored(scales, codec_lib.SCALE)
  scales = jnp.where(scales >= _TINY, scales, 0)
  return jnp.where(jnp.isfinite(largest), scales, jnp.nan)


def _as_stored(values: jax.Array, dtype: Any) -> jax.Array:
  """What a type can hold, as float32.

  There and back by conversions alone, a compiler may leave both out.
  """
  kind = jnp.finfo(dtype)
  return jax.lax.reduce_precision(values, kind.nexp, kind.nmant)


def _integers(
  encoding: Encoding, x: jax.Array, scales: jax.Array, key: Any
) -> jax.Array:
  """The integers as float32."""
  usable = scales > 0
  steps = x / jnp.where(usable, scales, 1)
  if encoding.stochastic:
    bits = jax.random.bits(key, x.shape, jnp.uint16)
    uniform = (bits.astype(jnp.float32) + 0.5) * np.float32(2**-16)
    q = jnp.floor(steps + uniform)
  else:
    q = jnp.round(steps)
  largest = encoding.codec.largest
  return jnp.where(usable, jnp.clip(q, -largest, largest), 0)


def _packed(
  codec: codec_lib.Codec, q: jax.Array, scales: jax.Array
) -> jax.Array:
  """[parts, blocks, bytes]: the scale's bytes, then the integers'."""
  unsigned = (q + (codec.largest + 1)).astype(jnp.uint8)
  several = unsigned.reshape(*q.shape[:2], -1, codec.per_byte)
  places = np.arange(codec.per_byte, dtype=np.uint8) * np.uint8(codec.bits)
  integers = (several << places).sum(axis=-1, dtype=jnp.uint8)
  scale = scales[..., 0].astype(codec_lib.SCALE)
  scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
  return jnp.concatenate([scale, integers], axis=-1)


def _draw_upper_half(values: jax.Array, key: Any) -> jax.Array:
  """Rounds to a neighbour that 16 bits hold, the nearer one more often."""
  random = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
  bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
  bits = (bits + random) & np.uint32(0xFFFF0000)
  drawn = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(jnp.isfinite(values), drawn, values)


def _grid(shape: Sequence[int], part: Sequence[int]) -> list[int]:
  """Each axis as parts along it and elements in one, in turn."""
  pairs = zip(shape, part, strict=True)
  return [n for whole, size in pairs for n in (whole // size, size)]


def _to_rows(values: jax.Array, part: Sequence[int]) -> jax.Array:
  """[parts, elements]: parts in order, each in order."""
  axes = range(2 * len(part))
  split = values.reshape(_grid(values.shape, part))
  split = split.transpose([*axes[::2], *axes[1::2]])
  return split.reshape(-1, int(np.prod(part, dtype=int)))


def _from_rows(
  rows: jax.Array, shape: Sequence[int], part: Sequence[int]
) -> jax.Array:
  """What `_to_rows` was given."""
  count, grid = len(part), _grid(shape, part)
  split = rows.reshape([*grid[::2], *grid[1::2]])
  order = [n for axis in range(count) for n in (axis, count + axis)]
  return split.transpose(order).reshape(shape)
