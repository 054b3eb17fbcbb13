"""What lies on the devices, and what stays on the host."""

import jax
import numpy as np
import pytest

from diloco.islands import placement, shards


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
  where = placement.Placement((1, model), jax.devices()[:model]).param(shape)
  held = shards.HostTensor(
    "w",
    shape,
    where.shard_shape(shape),
    tuple((box, aligned(values[box])) for box in shards.boxes(shape, where)),
  )
  assert len(held.pieces) == model
  double = jax.jit(lambda x: 2 * x, donate_argnums=0)
  np.testing.assert_array_equal(double(shards.put(held, where)), 2 * values)
  np.testing.assert_array_equal(held.whole(), values)
  np.testing.assert_array_equal(shards.put(held, where), values)
