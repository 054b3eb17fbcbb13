"""What `diloco replay` refuses, and what it says."""

import json
import types

import pytest
from observing import refused
from run_tape import A, RunTape, two_islands

from diloco import config as config_lib
from diloco import process
from diloco.replay import order, replayer, script

OUTCOME = replayer.Replayed(
  compared=12,
  equal=12,
  arrays_compared=4,
  difference=None,
  lives=3,
  steps=1234,
  wall_secs=1.25,
)


@pytest.fixture
def write_run(tmp_path):
  """Writes a run directory of a tape; returns it."""

  def write(tape):
    (tmp_path / "tape").mkdir()
    for line in tape.lines:
      name = f"{line['role']}-{line['incarnation']:04d}.jsonl"
      with (tmp_path / "tape" / name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    process.write_config(config_lib.RunConfig(), tmp_path)
    return tmp_path

  return write


def refusal(capsys, *words):
  return refused(capsys, ["replay", *words])


def test_directory_without_a_run_is_refused(capsys, tmp_path):
  assert "config.json cannot be read" in refusal(capsys, tmp_path)


def test_run_that_merged_nothing_is_refused(capsys, write_run):
  assert "nothing to compare" in refusal(capsys, write_run(RunTape()))


def test_tape_of_an_earlier_version_is_refused(capsys, write_run):
  tape = RunTape()
  tape.start(A)
  del tape.lines[0]["base_versions"]
  err = refusal(capsys, write_run(tape))
  assert "tape of island 0.1" in err and "'base_versions'" in err


def test_broken_line_is_named(capsys, write_run):
  run_dir = write_run(two_islands())
  path = run_dir / "tape" / "syncer-0001.jsonl"
  path.write_text("{broken\n" + path.read_text())
  assert f"{path}, line 1" in refusal(capsys, run_dir)


def test_run_without_its_store_is_refused(capsys, write_run):
  err = refusal(capsys, write_run(two_islands()))
  assert "no fragment plan" in err


def test_live_run_is_refused(capsys, write_run, monkeypatch):
  run_dir = write_run(two_islands())
  monkeypatch.setattr(
    replayer.liveness, "controller_alive", lambda run_dir: True
  )
  assert "is alive; stop it first" in refusal(capsys, run_dir)


def test_equal_outcome_in_words():
  assert replayer.describe(OUTCOME) == (
    "12 of 12 versions are equal to the bit, 4 of them compared with the"
    " stored values too\nreplayed 3 lives, 1,234 inner steps in 1.2 s"
  )


@pytest.mark.parametrize(
  ("contributions", "said"),
  [
    (("a", "b"), "contributions of another norm: a, b"),
    ((), "all its contributions have the norms they had"),
  ],
)
def test_difference_says_whose_it_is(contributions, said):
  difference = replayer.Difference(2, 7, "aa", "bb", contributions)
  outcome = replayer.Replayed(12, 11, 0, difference, 3, 1234, 1.25)
  text = replayer.describe(outcome)
  assert "first difference: version 7 of fragment 2" in text
  assert "the run has aa, the replay bb" in text
  assert said in text


def test_outcome_is_plain_json():
  plain = json.loads(json.dumps(OUTCOME.to_json()))
  assert plain["difference"] is None and plain["compared"] == 12


def test_version_that_could_not_be_made_is_compared_and_not_equal():
  replay = object.__new__(replayer.Replayer)
  refused = replayer.Difference(0, 2, "digest", "refused", ("key",))
  made = {script.VersionId(0, 1): "digest"}
  plan = types.SimpleNamespace(tasks=[(None, [])])
  vars(replay).update(_digests=made, _plan=plan, _workers={}, _at={}, _steps=0)
  replay._copied = set()
  replay._do = lambda task: refused
  found = replay.run()
  assert (found.compared, found.equal) == (2, 1)


@pytest.mark.parametrize(("stored", "compared"), [(set(), 1), ({(0, 3)}, 2)])
def test_copy_counts_as_compared_only_with_the_store(stored, compared):
  replay = object.__new__(replayer.Replayer)
  first, back = script.VersionId(0, 1), script.VersionId(0, 3)
  plan = types.SimpleNamespace(
    tasks=[(order.Make(script.Return(back, first)), [])]
  )
  scratch = types.SimpleNamespace(copy_version=lambda old, new: None)
  vars(replay).update(_digests={first: "digest"}, _plan=plan, _scratch=scratch)
  vars(replay).update(_copied=set(), _workers={}, _at={}, _steps=0)
  replay._compare_arrays = lambda: (None, stored)
  found = replay.run()
  assert (found.compared, found.arrays_compared) == (compared, len(stored))
