"""Codecs of what is exchanged: how few bits a float32 becomes, and back.

`f32` and `bf16` keep floats. `int8`, `int4` and `int2` keep small integers q
and one scale s for each *block* of consecutive values of a tensor's part, and
stand for q s. A block takes 2 bytes of scale, a bfloat16, and behind them its
integers, packed from the low bits up, so that any row of whole blocks can be
decoded by itself. The last block of a part may be short. *Arithmetic size* is
what this comes to: bits / 8 bytes a value, and 2 bytes a block.

The scale has 8 significant bits and q at most 7 besides its sign, so q s is
exact in float32: what is decoded does not depend on who decodes it.

Outer gradients tolerate low precision far better than parameters do, which is
why islands publish differences from their anchor and never parameters.

Reference: Streaming DiLoCo, arXiv 2501.18512, section 2.4.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

FLOATS = {
  "f32": np.dtype(np.float32),
  "bf16": np.dtype(ml_dtypes.bfloat16),
}
INTEGERS = {"int8": 8, "int4": 4, "int2": 2}  # bits
NAMES = (*FLOATS, *INTEGERS)
BLOCK = 128  # values that share a scale, if nobody chooses
SCALE = np.dtype(ml_dtypes.bfloat16)


class Codec(NamedTuple):
  """One way to store float32 values; see the module."""

  name: str  # one of `NAMES`
  block: int = 0  # values that share a scale, a multiple of 4; 0 for floats

  @property
  def packed(self) -> bool:
    """Whether it keeps integers and scales."""
    return self.name in INTEGERS

  @property
  def bits(self) -> int:
    """Of a value, without its share of a scale."""
    return INTEGERS.get(self.name) or 8 * FLOATS[self.name].itemsize

  @property
  def per_byte(self) -> int:
    """Integers in a byte."""
    return 8 // self.bits

  @property
  def largest(self) -> int:
    """The largest integer; the smallest is its negative."""
    return int((1 << (self.bits - 1)) - 1)

  @property
  def block_bytes(self) -> int:
    """Of a whole block."""
    return SCALE.itemsize + self.block // self.per_byte

  def num_bytes(self, size: int) -> int:
    """Arithmetic size of `size` values that are encoded together."""
    if not self.packed:
      return size * self.bits // 8
    return -(-size // self.block) * SCALE.itemsize - (-size // self.per_byte)

  def __str__(self) -> str:
    return f"{self.name}:{self.block}" if self.packed else self.name

  def encode(self, values: np.ndarray) -> np.ndarray:
    """Encodes finite flat float32 to the nearest; `largest` is at least 7."""
    stored = np.empty(self.num_bytes(values.size), np.uint8)
    step = max(1, (1 << 16) // self.block) * self.block
    for start in range(0, values.size, step):
      begin = start // self.block * self.block_bytes
      some = self._encode(values[start : start + step])
      stored[begin : begin + some.size] = some
    return stored

  def _encode(self, values: np.ndarray) -> np.ndarray:
    x = np.zeros((-(-values.size // self.block), self.block), np.float32)
    x.reshape(-1)[: values.size] = values
    scales = np.abs(x).max(axis=1, keepdims=True) / np.float32(self.largest)
    scales = scales.astype(SCALE)
    wide = scales.astype(np.float32)
    q = np.divide(x, wide, out=np.zeros_like(x), where=wide > 0)
    q = np.clip(np.rint(q, out=q), -self.largest, self.largest, out=q)
    unsigned = (q + (self.largest + 1)).astype(np.uint8)
    places = np.arange(self.per_byte, dtype=np.uint8) * np.uint8(self.bits)
    several = unsigned.reshape(len(x), -1, self.per_byte) << places
    integers = np.bitwise_or.reduce(several, axis=2)
    stored = np.concatenate([scales.view(np.uint8), integers], axis=1)
    return stored.reshape(-1)[: self.num_bytes(values.size)]

  def decoded(
    self, stored: np.ndarray, size: int, step: int
  ) -> Iterator[np.ndarray]:
    """Yields `size` float32 values in order, about `step` at a time.

    What was yielded is overwritten when the next is taken. `stored`, [n] uint8,
    is from the first block on.
    """
    step = max(1, step // self.block) * self.block
    buffer = np.empty(min(step, size), np.float32)
    for start in range(0, size, step):
      out = buffer[: size - start]
      begin = start // self.block * self.block_bytes
      self.decode(stored[begin : begin + self.num_bytes(out.size)], out)
      yield out

  def decode(self, stored: np.ndarray, out: np.ndarray) -> None:
    """Decodes consecutive blocks, [n] uint8, into C-contiguous [size] float32.

    The last block may be short.
    """
    whole = out.size // self.block
    cut, end = whole * self.block_bytes, whole * self.block
    self._decode(
      stored[:cut].reshape(whole, self.block_bytes),
      out[:end].reshape(whole, self.block),
    )
    if rest := out.size - end:
      length = -(-rest // self.per_byte)
      padded = np.empty((1, length * self.per_byte), np.float32)
      self._decode(stored[None, cut : cut + SCALE.itemsize + length], padded)
      out[end:] = padded[0, :rest]

  def _decode(self, blocks: np.ndarray, out: np.ndarray) -> None:
    scales = np.ascontiguousarray(blocks[:, : SCALE.itemsize]).view(SCALE)
    integers = blocks[:, SCALE.itemsize :]
    if self.per_byte == 1:
      np.subtract(integers, np.float32(self.largest + 1), out=out)
    else:
      table = _table(self)
      np.take(table, integers, out=out.view(table.dtype), mode="clip")
    np.multiply(out, scales.astype(np.float32), out=out)


@functools.cache
def _table(codec: Codec) -> np.ndarray:
  """By byte, the integers in it as floats, seen as one wide number."""
  places = np.arange(codec.per_byte) * codec.bits
  found = (np.arange(256)[:, None] >> places) & ((1 << codec.bits) - 1)
  floats = (found - codec.largest - 1).astype(np.float32)
  wide = {2: np.complex64, 4: np.complex128}[codec.per_byte]
  return floats.view(wide)[:, 0]


def of(name: str, block: int = BLOCK) -> Codec:
  """The codec that a configuration names."""
  return Codec(name, block if name in INTEGERS else 0)


def parse(text: str) -> Codec:
  """The codec that a record names, as `str` writes it.

  Raises:
    ValueError: it names none.
  """
  name, _, block = text.partition(":")
  codec = Codec(name, int(block) if block.isdecimal() else 0)
  known = name in FLOATS or (name in INTEGERS and is_block(codec.block))
  if not known or str(codec) != text:
    raise ValueError(f"there is no codec {text!r}")
  return codec


def is_block(size: int) -> bool:
  """Whether so many values may share a scale."""
  return 4 <= size <= 1 << 16 and size % 4 == 0
