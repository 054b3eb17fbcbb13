"""The store benchmark runs and reports what the command line promises."""

import json
import math
import tempfile

import pytest

from experiments.benchmarks import store

RATIOS = [
  "publish_ratio",
  "fetch_ratio",
  "fetch_ratio_numpy",
  "fetch_ratio_preallocated",
]


def test_report_is_complete_and_plausible(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  result = store.run(num_bytes=1 << 20, trials=2)
  assert json.loads(json.dumps(result)) == result
  assert result["payload_bytes"] == 1 << 20
  for name in RATIOS:
    low, high = result[f"{name}_spread"]
    assert 0 < low <= result[name] <= high
  assert all(rate > 0 for rate in result["bytes_per_sec"].values())
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [8192, 1 << 20, 100 << 20, 256 << 20])
def test_payload_has_the_size_asked_for(num_bytes):
  shapes = store.payload_shapes(num_bytes)
  total = 4 * sum(math.prod(shape) for shape in shapes)
  assert total == num_bytes


def test_payload_that_is_too_small_is_refused():
  with pytest.raises(ValueError, match="too small"):
    store.payload_shapes(4096)
