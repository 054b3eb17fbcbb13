"""Norms are right whatever the size and the values."""

import math

import ml_dtypes
import numpy as np
import pytest

from diloco.fragments import norms


def test_what_float32_would_swallow_is_counted():
  # Each one is half a unit in the last place of 4096 squared.
  values = np.ones(400_001, np.float32)
  values[0] = 4096.0
  exact = 4096.0**2 + 400_000
  swallowed = np.cumsum(np.square(values), dtype=np.float32)[-1]
  assert abs(swallowed / exact - 1) > 0.01
  assert norms.sum_of_squares(values) == pytest.approx(exact, rel=3e-5)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
  "shape", [(), (0,), (1,), (511,), (3, 512), (7, 5, 11), (norms.BLOCK + 513,)]
)
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-3, 1.0, 1e19, 1e37])
def test_sum_equals_that_of_float64(dtype, shape, scale):
  drawn = np.random.default_rng(0).standard_normal(shape) * scale
  values = np.asarray(drawn, np.float32).astype(dtype)
  exact = float(np.square(values.astype(np.float64)).sum())
  assert norms.sum_of_squares(values) == pytest.approx(exact, rel=3e-5, abs=0)


def test_order_and_stride_of_an_array_make_no_difference():
  values = np.random.default_rng(1).standard_normal((6, 700)).astype(np.float32)
  found = {norms.sum_of_squares(v) for v in (values, values.T, values[::-1])}
  assert max(found) == pytest.approx(min(found), rel=3e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(bad):
  values = np.ones(norms.BLOCK + 2, np.float32)
  values[-1] = bad
  assert not math.isfinite(norms.sum_of_squares(values))


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_embedding_of_a_billion_elements_is_measured_right(dtype):
  values = np.full((262_144, 3840), 1.25, dtype)
  exact = 1.25**2 * values.size
  assert norms.sum_of_squares(values) == pytest.approx(exact, rel=3e-5)
