"""Digests of tensors."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import aead

from diloco.snapshots import digest


def ones(*shape):
  return np.ones(shape, np.float32)


@pytest.mark.parametrize("rows", [2, 0, 1 << 17])  # or none, or some pieces
def test_digest_is_a_gmac_over_head_and_values(rows):
  values = np.arange(rows * 3, dtype="<f4").reshape(rows, 3)
  head = f'["w", "float32", [{rows}, 3]]\n'.encode()
  cipher = aead.AESGCM(b"diloco-digest-01")
  tag = cipher.encrypt(bytes(12), b"", head + values.tobytes())
  assert digest.tensors([("w", values)]) == f"gmac:{tag.hex()}"


def test_digest_that_an_earlier_version_took_is_taken_again():
  values = np.arange(6, dtype="<f4").reshape(2, 3)
  head = b'["w", "float32", [2, 3]]\n'
  old = hashlib.blake2b(head + values.tobytes(), digest_size=16).hexdigest()
  assert digest.tensors([("w", values)], old) == old
  new = digest.tensors([("w", values)])
  assert new == digest.tensors([("w", values)], new) != old
  assert digest.alike(new, new) and digest.alike(old, old)
  assert not digest.alike(old, new) and not digest.alike(new, old)


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
  assert len(digest.tensors([("s", scalar), ("h", half)])) == 37
