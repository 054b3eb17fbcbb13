"""The merge benchmark runs and reports what the command line promises."""

import json
import sys
import tempfile

import pytest

from experiments.benchmarks import merge

VARIANTS = ["", "_store"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_report_is_complete_and_plausible(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  result = merge.run(num_elements=1 << 16, num_contributions=3, trials=2)
  assert json.loads(json.dumps(result)) == result
  for variant in VARIANTS:
    name = f"memcpy_ratio{variant}"
    low, high = result[f"{name}_spread"]
    assert 0 < low <= result[name] <= high
  assert set(result["phase_secs"]) == {"accumulate", "outer_step"}
  assert result["fragment_bytes"] == 4 << 16
  assert result["num_contributions"] == 3
  assert result["baseline_rss_bytes"] < result["peak_rss_bytes"]
  assert result["baseline_rss_bytes"] < result["peak_rss_limit_bytes"]
  assert result["memcpy_ratio_bound"] == pytest.approx(2 * 3 / 9)
  assert list(tmp_path.iterdir()) == []


def test_odd_sizes_are_refused():
  with pytest.raises(ValueError, match="multiple of 64"):
    merge.run(num_elements=100)
