"""The bookkeeping benchmark runs and its parts add up."""

import json
import tempfile

import pytest

from diloco.tape import recorder
from experiments.benchmarks import bookkeeping


def test_shares_add_up_and_nothing_is_left_behind(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  write = recorder._LineWriter.write
  result = bookkeeping.measure(
    model={
      "d_model": 32,
      "num_layers": 2,
      "num_heads": 2,
      "seq_len": 32,
      "batch_size": 2,
    },
    steps=24,
    checkpoints=2,
  )
  assert json.loads(json.dumps(result)) == result
  parts = [result[f"{n}_cpu_secs_per_step"] for n in ("checkpoint", "cut")]
  whole = sum(parts) + result["line_cpu_secs_per_step"]
  share = result["bookkeeping_share"]
  assert share == pytest.approx(whole / result["step_cpu_secs"])
  parts = [result[f"{name}_cpu_secs_per_step"] for name in ("line", "writer")]
  assert all(part > 0 for part in (*parts, result["view_share"]))
  shown = sum(parts) / result["step_cpu_secs"] + result["view_share"]
  assert result["shown_share"] == pytest.approx(shown)
  low, high = result["checkpoint_cpu_secs_spread"]
  assert 0 < low <= result["checkpoint_cpu_secs"] <= high
  # Each step has a metric line; how many publications, the machine decides.
  assert result["lines_per_step"] >= 1
  assert recorder._LineWriter.write is write
  assert list(tmp_path.iterdir()) == []
