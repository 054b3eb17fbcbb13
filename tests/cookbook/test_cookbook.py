"""The cookbook, typed in from top to bottom as a user would.

One shell does what `docs/cookbook.md` says: files are written, shell blocks
typed, other Python run as scripts. All tests look at what came of that.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import diloco
from diloco import config as config_lib
from diloco import launch, process
from diloco import run as run_lib
from diloco.tape import events, reader
from diloco.tasks import registry

ROOT = pathlib.Path(diloco.__file__).parent.parent
TEXT = (ROOT / "docs" / "cookbook.md").read_text()
# The last file's name in the words before it, if these end with a colon.
_BLOCK = re.compile(
  r"(?:^[^\n]*`(\w+\.py)`[^`]*:\n\n)?^```(python|sh)\n(.*?)^```",
  re.DOTALL | re.MULTILINE,
)


def blocks():
  """(file name or "", language, body) of every block."""
  return _BLOCK.findall(TEXT)


def script():
  """All blocks as one shell script; what scripts print goes to N.out."""
  lines = ["set -e"]
  scripts = 0
  for name, language, body in blocks():
    if language == "sh":
      lines.append(body)
      continue
    if not name:
      scripts += 1
    path = name or f"script{scripts}.py"
    lines += [f"cat > {path} <<'END_OF_FILE'", body + "END_OF_FILE"]
    if not name:
      lines.append(f"python {path} > {scripts}.out")
  return "\n".join(lines)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
  """The folder of somebody who has read the cookbook."""
  folder = tmp_path_factory.mktemp("reader")
  bins = pathlib.Path(sys.executable).parent
  subprocess.run(
    ["bash", "-c", script()],
    cwd=folder,
    env={
      **os.environ,
      "PATH": os.pathsep.join([str(bins), os.environ["PATH"]]),
      "PYTHONPATH": str(ROOT),
    },
    check=True,
  )
  return folder / "cookbook"


@pytest.fixture
def place(done, monkeypatch):
  """The same folder, to import from."""
  monkeypatch.syspath_prepend(str(done))
  monkeypatch.chdir(done)
  yield done
  for name in ("bigram", "experiment", "unequal"):
    sys.modules.pop(name, None)


def summary_of(run_dir):
  return json.loads((run_dir / "summary.json").read_text())


def test_every_block_is_a_file_or_is_executed():
  names = [name for name, language, _ in blocks() if language == "python"]
  assert len(blocks()) == len(re.findall("^```\\w", TEXT, re.MULTILINE))
  assert {"bigram.py", "experiment.py", "faults.py"} < set(names)
  assert names.count("") >= 3


@pytest.mark.parametrize(
  "name", [name for name, _, body in blocks() if "def get_config" in body]
)
def test_every_configuration_would_run(place, tmp_path, name):
  config = config_lib.from_mapping(launch.load_config(place / name))
  run_lib.preflight(config, tmp_path / "new")


def test_own_model_and_own_text(place):
  losses = {}
  for name in ("experiment.py", "own_text.py"):
    task = config_lib.from_mapping(launch.load_config(place / name)).task
    made = registry.make_task(task.name, task.options)
    stream = made.batches("train", share=0, num_shares=2, seed=0)
    batch = next(stream)
    stream.close()
    assert b"e" in bytes(batch["tokens"].astype(np.uint8))
    losses[name] = batch["tokens"].shape
  assert losses == {"experiment.py": (8, 33), "own_text.py": (4, 65)}


def test_run_was_killed_resumed_and_finished(done):
  summary = summary_of(done / "run")
  assert summary["sessions"] == 2
  assert summary["tokens_trained"] >= 40_000
  assert summary["final_eval_loss"] < np.log(256) - 1
  assert summary["tokens_unaccounted"] == 0
  injected = [fault["target"] for fault in summary["faults"]]
  assert {"island-1", "syncer"} <= set(injected)
  told = (done / "1.out").read_text()
  assert told.startswith(f"finished {summary['final_eval_loss']}")
  assert "'embedding'" in told


def test_study_was_done_in_virtual_time(done):
  summary = summary_of(done / "study")
  assert summary["method"] == "diloco" and summary["status"] == "finished"
  assert summary["tokens_unaccounted"] == 0
  assert summary["merges"]["contributors_mean"] == 2


def test_changed_setting_is_told_and_kept(done):
  record = reader.read(done / "run")
  changes = reader.select(record.events, {events.CONFIG_CHANGED})
  assert [line["changes"] for line in changes] == [
    {"total_tokens": [30_000, 40_000]}
  ]
  assert process.read_config(done / "run").total_tokens == 40_000


def test_sweep_is_done_and_compared(done):
  groups = json.loads((done / "momenta.json").read_text())["groups"]
  without, with_momentum = groups
  assert without["fields"] == {
    "config.outer.count_absent": True,  # as ever without a momentum
    "config.outer.momentum": 0.0,
  }
  seeds = [run["seed"] for run in with_momentum["runs"]]
  assert (len(without["runs"]), seeds) == (1, [0, 1])
  for point in ("momentum=0.0,seed=0", "momentum=0.5,seed=1"):
    summary = summary_of(done / "momenta" / point)
    assert summary["status"] == "finished"
    assert summary["final_eval_loss"] < np.log(256) - 1
  mean = with_momentum["results"]["final_eval_bits_per_token"]
  assert (done / "2.out").read_text() == f"{mean}\n"


def test_tape_and_ledger_are_read(done):
  count, islands = re.match(
    r"(\d+) merges, ([\d.]+) islands", (done / "3.out").read_text()
  ).groups()
  assert int(count) > 0 and 1 <= float(islands) <= 2


def test_result_is_taken_away(done):
  trained = diloco.Run(done / "run")
  loss = trained.summary["final_eval_loss"]
  told = (done / "4.out").read_text()
  assert told.startswith(f"finished {loss}\n{trained.versions()} ")
  assert "island" in told
  shapes = {name: leaf.shape for name, leaf in trained.params().items()}
  assert shapes == {
    "bias": (256,),
    "embedding": (256, 32),
    "output": (32, 256),
  }
  # An island has other devices, and so other orders of its sums.
  again = float((done / "5.out").read_text().split()[0])
  assert again == pytest.approx(loss, rel=1e-6)


def test_another_run_starts_from_what_was_taken_away(place, tmp_path):
  config = config_lib.from_mapping(launch.load_config(place / "further.py"))
  _, _, given = run_lib.preflight(config, tmp_path / "next")
  for name, leaf in diloco.Run("run").params().items():
    np.testing.assert_array_equal(given[name], leaf)


def test_policies_decide_when_a_round_closes(done):
  told = (done / "6.out").read_text()
  assert told == textwrap.dedent("""\
    4.0
    [0, 1] (2,)
  """)
