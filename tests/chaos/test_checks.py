"""What a campaign calls broken, on tapes written by hand."""

import json

import pytest

from diloco.chaos import checks
from diloco.tape import recorder


def _merge(version, token=1, fragment=0):
  return {
    "event": "merged",
    "fragment": fragment,
    "version": version,
    "token": token,
  }


def _restore(*versions):
  return {"event": "restored", "version_to": list(versions)}


@pytest.mark.parametrize(
  ("lines", "broken"),
  [
    ([_merge(1), _merge(2), _merge(1, fragment=1)], []),
    ([_merge(2), _merge(1)], []),  # roles are not ordered among each other
    ([_merge(1), _merge(1)], []),  # told again
    ([_merge(1), _merge(2), _restore(4), _merge(5)], []),
    ([_merge(1), _merge(3)], ["fragment 0 jumps to versions [3]"]),
    (
      [_merge(1), _merge(1, token=2)],
      ["version 1 of fragment 0 has several committers: tokens 1, 2"],
    ),
  ],
)
def test_versions_grow_by_one_and_have_one_committer(lines, broken):
  assert checks.versions_broken(lines) == broken


def _run(tmp_path, last_start, status="finished", trained=100):
  """An island of twelve steps whose first life died at the tenth."""
  first = recorder.Recorder(tmp_path, "island-0", 1)
  first.record("started", step=0, tokens_per_step=10)
  item = {"fragment": 0, "first_step": 0, "step": 8, "c_tokens": 80}
  first.record("published", key="a", **item)
  merged = {k: v for k, v in item.items() if k != "fragment"}
  syncer = recorder.Recorder(tmp_path, "syncer", 1)
  one = {"key": "a", "island": 0, "incarnation": 1, **merged}
  syncer.record("merged", fragment=0, version=1, token=1, contributions=[one])
  log = recorder.MetricLog(tmp_path, 0)
  for step in range(1, 11):
    log.record(step=step, tokens=10, incarnation=1)
  controller = recorder.Recorder(tmp_path, "controller", 1)
  controller.record("island_died", island=0, island_incarnation=1)
  second = recorder.Recorder(tmp_path, "island-0", 2)
  second.record("started", step=last_start, tokens_per_step=10)
  for step in range(last_start + 1, 13):
    log.record(step=step, tokens=10, incarnation=2)
  facts = {"status": status, "tokens_trained": trained, "tokens_budget": 100}
  (tmp_path / "summary.json").write_text(json.dumps(facts))
  return tmp_path


def test_run_that_did_what_it_lost_again_is_sound(tmp_path):
  books = checks.check(_run(tmp_path, 8))
  assert books.broken == []
  assert books.facts["rows_unmerged"] == {"pending": 4}


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ({"last_start": 10}, "2 rows are lost_with_island and were not read again"),
    ({"last_start": 11}, r"rows (10, 11] were skipped"),
    ({"last_start": 8, "status": "stopped"}, "the run is stopped, not"),
    ({"last_start": 8, "trained": 90}, "90 of 100 tokens trained"),
  ],
)
def test_broken_run_is_called_broken(tmp_path, arguments, text):
  broken = checks.check(_run(tmp_path, **arguments)).broken
  assert any(text in line for line in broken), broken


def test_run_without_a_summary_is_broken_only_if_it_had_to_finish(tmp_path):
  run_dir = _run(tmp_path, 8)
  (run_dir / "summary.json").unlink()
  assert "there is no summary" in checks.check(run_dir).broken[0]
  assert checks.check(run_dir, must_finish=False).broken == []


def test_damaged_tape_is_broken(tmp_path):
  run_dir = _run(tmp_path, 8)
  with (run_dir / "tape" / "syncer-0001.jsonl").open("a") as file:
    file.write("no json\n")
  assert "the record is damaged" in checks.check(run_dir).broken[0]
