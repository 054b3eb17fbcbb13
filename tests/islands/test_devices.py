"""Islands on one host share no device."""

import types

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


def client(*slices):
  """Devices as Pathways has them: (slice, number) each."""
  return [
    types.SimpleNamespace(slice_index=index, number=number)
    for index, size in slices
    for number in range(size)
  ]


def fleet_of(*topologies):
  slices = [{"topology": topology} for topology in topologies]
  return config_lib.from_mapping({"fleet": {"slices": slices}}).fleet


@pytest.mark.parametrize(
  ("topologies", "found", "places"),
  [
    (["2", "1", "2x2"], range(8), [[0, 1], [2], [3, 4, 5, 6]]),
    (["1", "1", "1"], range(2), [[0], [1], [0]]),
    (["1", "1"], range(1), [[0], [0]]),
  ],
)
def test_one_client_divides_its_devices(topologies, found, places):
  assert devices.of_client(fleet_of(*topologies), found) == places


def test_slices_of_hardware_are_slices_of_the_fleet():
  # In the client's own order, which need not be that of the slices.
  seen = client((1, 4), (0, 4), (2, 8))
  places = devices.of_client(fleet_of("2x2", "2", "8"), seen)
  assert [{d.slice_index for d in place} for place in places] == [{0}, {1}, {2}]
  assert [[d.number for d in place] for place in places] == [
    [0, 1, 2, 3],
    [0, 1],
    [*range(8)],
  ]


@pytest.mark.parametrize(
  ("topologies", "found", "why"),
  [
    (["4", "4"], range(4), "sees 4.*device_count=8"),
    (["2", "1"], range(2), "sees 2, and only slices of one device"),
    (["2", "4"], client((0, 2), (1, 2)), r"slices\[1\].*number 1 has 2"),
    (["1", "1", "1"], client((0, 2), (1, 2)), r"slices\[2\].* 2 slices"),
  ],
)
def test_client_with_too_few_devices_is_refused(topologies, found, why):
  with pytest.raises(errors.UserError, match=why):
    devices.of_client(fleet_of(*topologies), found)
