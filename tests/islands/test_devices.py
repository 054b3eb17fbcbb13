"""Islands on one host share no device."""

import pytest

from diloco import config as config_lib
from diloco import errors
from diloco.islands import devices

FLEET = config_lib.FleetConfig(
  tuple(config_lib.SliceConfig(topology=t) for t in ("2", "1x2", "1"))
)
HOST = [f"gpu:{i}" for i in range(5)]


def test_islands_of_one_host_take_disjoint_devices():
  taken = [
    devices.of_slice(FLEET.device_indices(i), HOST)
    for i in range(len(FLEET.slices))
  ]
  assert taken == [["gpu:0", "gpu:1"], ["gpu:2", "gpu:3"], ["gpu:4"]]


def test_island_that_sees_only_its_own_devices_takes_them():
  # Emulated ones, or those the environment left visible.
  assert devices.of_slice(FLEET.device_indices(1), ["a", "b"]) == ["a", "b"]


def test_host_with_too_few_devices_is_named():
  with pytest.raises(errors.UserError, match="devices 2 to 3"):
    devices.of_slice(FLEET.device_indices(1), HOST[:3])


def test_process_sees_its_slices_devices_unless_told_otherwise():
  indices = FLEET.device_indices(1)
  found = devices.environ(indices, {"XLA_FLAGS": "--xla_foo=1"})
  assert found["JAX_PLATFORMS"] == "cpu"
  assert found["JAX_CUDA_VISIBLE_DEVICES"] == "2,3"
  assert found["XLA_FLAGS"] == (
    "--xla_foo=1 --xla_force_host_platform_device_count=2"
  )
  told = {"JAX_PLATFORMS": "cuda", "JAX_CUDA_VISIBLE_DEVICES": "6,7"}
  assert devices.environ(indices, told).items() >= told.items()
