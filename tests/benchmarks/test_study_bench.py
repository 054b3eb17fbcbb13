import pytest

from experiments.benchmarks import study


def test_study_is_measured_against_the_bare_loop():
  found = study.measure(
    islands=2, blocks=2, block_steps=8, d_model=16, num_layers=2, batch_size=1
  )
  # Whatever else it does, a study makes the steps that the bare loop makes.
  assert found["step_cpu_secs"] > 0.5 * found["bare_step_cpu_secs"] > 0
  assert found["cost_ratio"] > 0.5
  tokens_per_step = found["tokens_per_cpu_sec"] * found["step_cpu_secs"]
  assert tokens_per_step == pytest.approx(found["tokens_per_step"]) == 128
