"""Digests of tensors."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

from diloco.snapshots import digest


def ones(*shape):
  return np.ones(shape, np.float32)


def test_digest_is_blake2b_over_head_and_values():
  values = np.arange(6, dtype="<f4").reshape(2, 3)
  head = b'["w", "float32", [2, 3]]\n'
  expected = hashlib.blake2b(head + values.tobytes(), digest_size=16)
  assert digest.tensors([("w", values)]) == expected.hexdigest()


@pytest.mark.parametrize(
  "other",
  [
    [("b", ones(2, 3)), ("a", ones(4))],
    [("a", ones(2, 3)), ("c", ones(4))],
    [("a", ones(3, 2)), ("b", ones(4))],
    [("a", ones(2, 3)), ("b", np.ones(4, np.float64))],
    [("a", ones(2, 3)), ("b", ones(3))],
    [("a", ones(2, 3))],
    [("a", ones(2, 3)), ("b", ones(4) * np.float32(1 + 2**-23))],
  ],
)
def test_digest_tells_names_shapes_types_order_and_the_last_bit(other):
  mine = [("a", ones(2, 3)), ("b", ones(4))]
  assert digest.tensors(mine) != digest.tensors(other)


def test_digest_tells_minus_zero_from_zero():
  zero = np.zeros(2, np.float32)
  assert digest.tensors([("a", zero)]) != digest.tensors([("a", -zero)])


def test_memory_order_does_not_change_a_digest():
  values = np.arange(12, dtype=np.float32).reshape(3, 4)
  other = np.asfortranarray(values)
  assert not other.flags.c_contiguous
  assert digest.tensors([("a", values)]) == digest.tensors([("a", other)])


def test_scalars_and_bfloat16_have_digests():
  scalar = np.array(1.5, np.float32)
  half = np.ones(3, ml_dtypes.bfloat16)
  assert len(digest.tensors([("s", scalar), ("h", half)])) == 32
