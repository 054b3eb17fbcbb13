"""What lies on the devices, and what stays on the host."""

import jax
import numpy as np
import pytest

from diloco.islands import placement


def aligned(values):
  """The same values where a CPU device can read them in place."""
  memory = np.zeros(values.nbytes + 64, np.uint8)
  begin = -memory.ctypes.data % 64
  copy = memory[begin : begin + values.nbytes].view(values.dtype)
  copy[:] = values.ravel()
  return copy.reshape(values.shape)


@pytest.mark.parametrize("model", [1, 2])
def test_anchor_stays_as_it_is_whatever_becomes_of_its_device_copy(model):
  shape = (64, 64)
  values = np.arange(4096, dtype=np.float32).reshape(shape)
  where = placement.Placement((1, model), jax.devices()[:model])
  held = placement.HostTensor(
    "w",
    shape,
    where.param(shape).shard_shape(shape),
    tuple((box, aligned(values[box])) for box in where.boxes(shape)),
  )
  assert len(held.pieces) == model
  double = jax.jit(lambda x: 2 * x, donate_argnums=0)
  np.testing.assert_array_equal(double(where.put(held)), 2 * values)
  np.testing.assert_array_equal(held.whole(), values)
  np.testing.assert_array_equal(where.put(held), values)
