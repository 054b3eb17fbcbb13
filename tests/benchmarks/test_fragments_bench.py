"""Every fragment of a small model passes all stations."""

import json

from experiments.benchmarks import fragments


def test_stations_are_measured_against_their_references_and_memory_told():
  found = fragments.run(1, 32, 64, num_fragments=3)
  json.dumps(found)
  assert found["num_elements"] == 64 * 32 + 16 * 32**2 + 32
  assert found["ratio"].keys() == fragments._REFERENCES.keys()
  assert all(found["bytes_per_sec"][name] > 0 for name in found["ratio"])
  for name, (least, most) in found["spread"].items():
    assert least <= found["ratio"][name] <= most
  assert found["largest_over_mean"] <= 4 / 3
  island = found["memory"]["island"]
  assert island["models_bytes"] == 2 * 4 * found["num_elements"]
  assert island["peak_bytes"] > island["baseline_bytes"]
