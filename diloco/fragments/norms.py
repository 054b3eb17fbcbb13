"""Lengths of tensors, measured the same way by who publishes and who merges.

Squares are summed in float32 over rows so short that no more than 3 parts in
100,000 can be lost, whatever the values; sums of rows in float64. So a norm is
right at any size, and no tensor is copied whole.
"""

import numpy as np

BLOCK = 1 << 16  # elements; M + 2 blocks of it stay in the L2 cache
_ROW = 1 << 9  # elements summed in float32: at most 2**9 roundings of 2**-24
_SAFE_SQUARES = (1e-26, 1e36)  # float32 sums of squares that lost nothing


def square(block: np.ndarray) -> float:
  """Sum of squares of a flat float32 block, always in the same order."""
  whole = block.size // _ROW * _ROW
  rows, tail = block[:whole].reshape(-1, _ROW), block[whole:]
  total = float(np.vecdot(rows, rows).sum(dtype=np.float64))
  if tail.size:
    total += float(np.vecdot(tail, tail))
  low, high = _SAFE_SQUARES
  if low < total < high or (total == 0 and not block.any()):
    return total
  wide = block.astype(np.float64)
  np.multiply(wide, wide, out=wide)
  return float(wide.sum())


def sum_of_squares(values: np.ndarray) -> float:
  """Of an array of any shape and float type, block by block.

  Not finite if one of the values is not.
  """
  flat, total = values.ravel(order="K"), 0.0
  with np.errstate(all="ignore"):
    for start in range(0, flat.size, BLOCK):
      block = flat[start : start + BLOCK]
      total += square(block.astype(np.float32, copy=False))
  return total
