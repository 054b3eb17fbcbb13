import ml_dtypes
import numpy as np
import pytest

from diloco import errors
from diloco.fragments import codec


def test_f32_is_exact_and_free():
  values = np.arange(5, dtype=np.float32)
  assert codec.encode(values, "f32") is values


def test_bf16_rounds_to_nearest_even_within_half_a_unit():
  values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
  encoded = codec.encode(values, "bf16")
  assert encoded.dtype == ml_dtypes.bfloat16
  # 8 bits of significand: the spacing is at most 2**-7 of the value.
  error = np.abs(encoded.astype(np.float32) - values)
  assert np.all(error <= np.abs(values) * 2**-8)
  halfway = np.float32([1 + 2**-8, 1 + 3 * 2**-8])
  rounded = codec.encode(halfway, "bf16").astype(np.float32)
  np.testing.assert_array_equal(rounded, [1.0, 1 + 2**-6])


def test_unknown_codec_is_refused_by_name():
  with pytest.raises(errors.UserError, match=r"int3.*bf16"):
    codec.check("int3")
