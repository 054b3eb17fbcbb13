"""What lies on the devices, and what stays on the host."""

import jax
import numpy as np
import pytest

from diloco import errors
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
  where = placement.Placement((1, model), jax.devices()[:model]).param(
    "w", shape
  )
  held = shards.HostTensor(
    shape,
    tuple((box, aligned(values[box])) for box in shards.boxes(shape, where)),
  )
  assert len(held.pieces) == model
  double = jax.jit(lambda x: 2 * x, donate_argnums=0)
  np.testing.assert_array_equal(double(shards.put(held, where)), 2 * values)
  np.testing.assert_array_equal(held.whole(), values)
  np.testing.assert_array_equal(shards.put(held, where), values)


class Sharded:
  """A task of three axes, its matrices divided along two of them."""

  mesh_axes = ("data", "fsdp", "model")
  batch_axes = ("data", "fsdp")

  def sharding(self, path, shape):
    if path.endswith("bias"):
      return None
    return jax.sharding.PartitionSpec("fsdp", "model")


@pytest.mark.parametrize(
  ("topology", "parts"),
  [((2, 2, 2), (4, 3)), ((1, 4), (2, 6)), ((2,), (8, 6))],
)
def test_task_says_how_it_is_divided(topology, parts):
  rules = placement.Rules.of(Sharded())
  made = placement.Placement(topology, jax.devices(), rules)
  assert made.mesh.size == np.prod(topology)
  assert made.param("w", (8, 6)).shard_shape((8, 6)) == parts
  assert made.param("bias", (7,)).shard_shape((7,)) == (7,)
  fed = made.put_batch({"x": np.zeros((8, 3))})["x"]
  count = rules.batch_devices(rules.sizes(topology))
  assert count == np.prod(topology[:2])
  assert fed.sharding.shard_shape((8, 3)) == (8 // count, 3)


def test_without_a_word_the_largest_divisible_axis_is_divided():
  made = placement.Placement((2, 4), jax.devices())
  for shape, parts in (
    ((64, 128), (64, 32)),
    ((128, 64), (32, 64)),
    ((126, 64), (126, 16)),
    ((126, 63), (126, 63)),
    ((4, 4), (4, 4)),  # too small to be worth it
    ((), ()),
  ):
    assert made.param("w", shape).shard_shape(shape) == parts
  assert made.batch().shard_shape((8, 3)) == (4, 3)


def test_only_axis_is_that_of_batches():
  rules = placement.Rules(axes=("data",))
  made = placement.Placement((8,), jax.devices(), rules)
  assert made.param("w", (64, 64)).is_fully_replicated


@pytest.mark.parametrize(
  ("spec", "said"),
  [
    (("tensor",), "names 'tensor', and the mesh has data, fsdp, model"),
    (("fsdp", "fsdp"), "names a mesh axis twice"),
    ((None, "model"), "axis 1, 5 long, cannot be divided among 2 devices"),
    ((None, None, "model"), "axis 2, which it lacks, cannot be divided"),
    (((("fsdp", "model")),), "axis 0, 6 long, cannot be divided among 4"),
  ],
)
def test_division_that_cannot_be_is_refused(spec, said):
  rules = placement.Rules.of(Sharded())._replace(param=lambda *_: spec)
  made = placement.Placement((2, 2, 2), jax.devices(), rules)
  with pytest.raises(errors.UserError, match=said) as refused:
    made.param("layer/w", (6, 5))
  assert "'layer/w'" in str(refused.value) and "\n" not in str(refused.value)


def test_topology_of_more_axes_than_the_mesh_is_refused():
  with pytest.raises(errors.UserError, match=r"no more axes than data, model;"):
    placement.Placement((2, 2, 2), jax.devices())
