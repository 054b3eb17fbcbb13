"""The studies of the fleet simulator, small."""

import pytest

from diloco import config as config_lib
from experiments.benchmarks import fleet_against_reality, scavenging


def test_islands_use_extra_capacity_better_than_one_job():
  rows = scavenging.run(shares=(1.0,), seeds=(0,), chips=400_000)["rows"]
  saved = {(r["method"], r["extra_speed"]): r["saving_of_ideal"] for r in rows}
  assert saved["islands", 1.0] == pytest.approx(1, abs=0.05)
  assert saved["islands", 0.6] == pytest.approx(1, abs=0.05)
  assert saved["elastic", 1.0] < 0.9
  assert saved["elastic", 0.6] < 0.3


@pytest.mark.parametrize("kills", fleet_against_reality.KILLS)
def test_runs_to_be_predicted_are_valid_and_have_their_kills(kills):
  values = fleet_against_reality.config(kills, 30_000, seed=kills)
  config = config_lib.from_mapping(values)
  assert len(config.faults) == kills
  assert values == fleet_against_reality.config(kills, 30_000, seed=kills)
