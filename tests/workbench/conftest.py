"""A run of two fragments with versions, a cut and a tape: `made`, `run`."""

import pytest
from cut_builder import PLAN, filled, run_with_a_cut

from diloco import config as config_lib
from diloco import process
from diloco.snapshots import digest
from diloco.tape import events, recorder
from diloco.workbench import opened


def value_digest(fragment, value):
  tensors = PLAN.fragments[fragment]
  return digest.tensors((t.name, filled(t, value)) for t in tensors)


def write_tape(run_dir):
  """Merges of both fragments up to version 7, as the store's heads have it."""
  with_steps = recorder.MetricLog(run_dir, 0)
  for step in (1, 2, 3):
    with_steps.record(step=step, loss=3.0 / step, tokens=10, task={"nll": step})
  with_steps.close()
  tape = recorder.Recorder(run_dir, "controller", 1)
  tape.record(events.RUN_STARTED, method="m", islands=1, total_tokens=100)
  tape.close()
  tape = recorder.Recorder(run_dir, "syncer", 1)
  for version in range(1, 8):
    for fragment in (0, 1):
      share = {
        "key": "k",
        "island": 0,
        "incarnation": 1,
        "first_step": 0,
        "step": 1,
      }
      tape.record(
        events.MERGED,
        fragment=fragment,
        version=version,
        contributions=[share | {"key": "k", "c_tokens": 10 + fragment}],
        digest=value_digest(fragment, float(version)),
      )
  tape.close()


@pytest.fixture
def made(tmp_path):
  run_dir = tmp_path / "run"
  run_dir.mkdir()
  process.write_config(config_lib.from_mapping({"name": "mine"}), run_dir)
  made, _ = run_with_a_cut(run_dir, process.store_url(run_dir))
  made.commit(1, 6, {}, value=6.0)
  made.commit(1, 7, {}, value=7.0)
  write_tape(run_dir)
  return made


@pytest.fixture
def run(made):
  return opened.Run(made.dir)
