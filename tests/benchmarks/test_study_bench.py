from experiments.benchmarks import study


def test_study_is_measured_against_the_bare_loop():
  found = study.measure(
    islands=2, blocks=2, block_steps=24, d_model=16, num_layers=3, batch_size=1
  )
  low, high = found["cost_ratio_spread"]
  assert 0 < low <= found["cost_ratio"] <= high
  assert found["islands"] == 2 and found["tokens_per_step"] == 128
  assert found["step_cpu_secs"] > 0 and found["tokens_per_cpu_sec"] > 0
