"""The doctor: promises of a store that real processes keep or see broken."""

import copy
import json

import bad_stores
import pytest
from observing import refused

from diloco import config as config_lib
from diloco import errors, promises
from diloco.commands import table
from diloco.snapshots import store
from diloco.workbench import doctor

EFFORT = promises.Effort(rounds=6, small=5, large_bytes=1 << 20)
CONFIG = """
def get_config():
  return dict(
    total_tokens=100_000,
    task=dict(options=dict(
      d_model=16, num_layers=1, num_heads=2, d_ff=16, seq_len=16,
      batch_size=4, data_glob={data!r},
    )),
    fleet=dict(slices=(dict(topology="1"), dict(topology="1"))),
    sync=dict(num_fragments=2, every=2, overlap_steps=1),
  )
"""


@pytest.fixture(autouse=True)
def little(monkeypatch):
  monkeypatch.setattr(promises.Effort, "within", lambda *_: EFFORT)


def diagnose(capsys, argv, open_store=store.SnapshotStore):
  """Exit code, and findings by what comes before the colon."""
  args = table.find(["doctor"]).make_parser().parse_args([*argv, "--json"])
  code = doctor.main(args, open_store)
  facts = json.loads(capsys.readouterr().out)
  assert facts["ok"] == (code == 0)
  told = {one["text"].partition(":")[0]: one for one in facts["findings"]}
  return code, told, facts


def failures(told):
  return {what for what, one in told.items() if one["level"] == "FAIL"}


def test_bucket_is_tried_as_a_directory_is_and_left_as_it_was(
  s3, tmp_path, capsys
):
  url = s3.place(tmp_path.name)
  _, told, facts = diagnose(capsys, [f"--store={url}", "--quick"])
  # A busy machine may be too slow for H, but every promise holds.
  assert not [what for what in failures(told) if what.startswith("store")]
  assert facts["store"]["width"] > 1
  assert store.SnapshotStore(s3.place("")).keys(tmp_path.name) == []
  with pytest.raises(errors.UserError, match="--store = 's3:///x'"):
    diagnose(capsys, ["--store=s3:///x"])


@pytest.mark.parametrize("fails", [False, True])
def test_directory_that_is_not_there_is_not_there_afterwards(
  tmp_path, capsys, fails
):
  url = (tmp_path / "typo" / "store").as_uri()
  open_store = bad_stores.broken if fails else store.SnapshotStore
  _, told, _ = diagnose(capsys, [f"--store={url}", "--quick"], open_store)
  assert ("store" in failures(told)) == fails
  assert not list(tmp_path.iterdir())
  assert promises.broken(url) == []
  assert not list(tmp_path.iterdir())


def test_store_that_loses_updates_is_found(tmp_path, capsys):
  argv = [f"--store={tmp_path}"]
  code, told, _ = diagnose(capsys, argv, bad_stores.losing)
  assert code == 1
  found = {"store, create-once", "store, compare-and-set"}
  assert found <= failures(told)  # contention is found by chance
  assert all("conditional writes" in told[what]["advice"] for what in found)
  assert not list(tmp_path.iterdir())


def test_run_to_come_is_looked_at_on_a_sound_store(tmp_path, capsys):
  (tmp_path / "data.txt").write_text("all work and no play. " * 2000)
  config = tmp_path / "config.py"
  config.write_text(CONFIG.format(data=str(tmp_path / "data.txt")))
  room = tmp_path / "room"
  room.mkdir()
  fleet = "--fleet=experiments/fleets/four_regions.py"
  argv = [f"--store={room}", f"--config={config}", fleet]
  _, told, facts = diagnose(capsys, argv)
  # Whether timeouts and disk will do depends on the machine of the day.
  assert not [what for what in failures(told) if what.startswith("store")]
  assert {"python", "packages", "devices", "memory", "fleet, asia"} <= set(told)
  assert "2 islands" in told["cores"]["text"]
  assert facts["predicted"]["every"] >= 24
  assert 0 < facts["predicted"]["step_secs"] < 60
  assert not list(room.iterdir())


def test_clients_are_deaf_to_interrupts_from_their_birth_on(tmp_path):
  told = promises.observe(tmp_path.as_uri(), EFFORT, bad_stores.deaf)
  assert len(told) == promises.CLIENTS


def test_store_that_fails_is_one_line(tmp_path, capsys):
  code, told, _ = diagnose(capsys, [f"--store={tmp_path}"], bad_stores.broken)
  assert code == 1 and failures(told) == {"store"}
  assert "no route to the store" in told["store"]["text"]
  assert not list(tmp_path.iterdir())


def test_configuration_that_is_refused_is_a_finding_among_others(
  tmp_path, capsys
):
  config = tmp_path / "config.py"
  config.write_text(CONFIG.format(data=str(tmp_path / "nothing*.txt")))
  argv = [f"--store={tmp_path}", f"--config={config}"]
  code, told, _ = diagnose(capsys, argv, bad_stores.broken)
  assert code == 1 and "memory" in told
  (refused,) = failures(told) - {"store"}
  assert "nothing*.txt" in refused + told[refused]["text"]


SPEED = {
  "width": 1,
  "round_trip_secs": 1e-3,
  "busy_round_trip_secs": 1e-3,
  "write_bytes_per_sec": 1e9,
  "read_bytes_per_sec": 1e9,
  "write_cpu_secs_per_byte": 1e-9,
  "read_cpu_secs_per_byte": 1e-9,
  "gbps": 8.0,
}


@pytest.mark.parametrize(
  ("params", "every", "level", "told"),
  [
    (1e6, 24, "note", "H = 24 or more, overlap_steps = 1"),
    (1e10, 24, "warn", "config.sync.every = 24"),
    (1e12, 24, "FAIL", "H = 1000 is too short"),
  ],
)
def test_h_is_what_the_store_carries(params, every, level, told):
  config = config_lib.from_mapping({"sync": {"every": every}})
  training = doctor._Training(params, 1.0, config, True)
  found = list(doctor._predict(training, {"store": SPEED}))
  assert found[-1].level == level and told in found[-1].text


def test_timeouts_are_judged_alone_and_when_the_store_is_busy():
  chosen = {"controller": {"takeover_secs": 1.5}}
  for values, changes, level in (
    ({}, {}, "ok"),
    ({}, {"busy_round_trip_secs": 0.2}, "warn"),
    ({}, {"round_trip_secs": 0.2, "busy_round_trip_secs": 0.2}, "ok"),
    (chosen, {"round_trip_secs": 0.2}, "FAIL"),
  ):
    config = config_lib.from_mapping(values)
    (found,) = doctor._timeouts(config, SPEED | changes)
    assert found.level == level


SOUND = [
  {
    "create": [(i == 0, "client-0")] * 2,
    "update": [(i == 1, "client-1")] * 2,
    "count": [2 * i + 1, 2 * i + 2],
    "overwrite": (0, 0),
    "small": (0, 0),
    "large": {"sound": True},
  }
  for i in range(promises.CLIENTS)
]


@pytest.mark.parametrize(
  ("name", "seen", "told"),
  [
    ("create", [(False, "client-0"), (False, "nobody")], "create-once"),
    ("create", [(True, "client-3")] * 2, "create-once"),
    ("update", [(True, "client-3")] * 2, "compare-and-set"),
    ("count", [1, 7], "contention: lost updates: 1"),
    ("count", [9], "contention: updates that never got in: 1"),
    ("overwrite", (1, 0), "read after write: old values: 1"),
    ("overwrite", (0, 2), "overwriting: damaged reads: 2"),
    ("small", (3, 0), "listing after write: records missing: 3"),
    ("small", (0, 1), "listing after delete: records left: 1"),
    ("large", {"sound": False}, "large tensors: wrong values: 1"),
  ],
)
def test_each_broken_promise_is_named(name, seen, told):
  effort = promises.Effort(rounds=2, small=5)
  assert not [f for f in promises.judge(SOUND, effort) if f.level != "ok"]
  all_seen = copy.deepcopy(SOUND)
  all_seen[3][name] = seen
  (found,) = [f for f in promises.judge(all_seen, effort) if f.level != "ok"]
  assert found.level == "FAIL" and told in found.text and found.advice


@pytest.mark.parametrize(
  ("flag", "told"),
  [
    ("--store=nowhere", "there is no such directory"),
    ("--config=nowhere.py", "there is no such file"),
    ("--fleet=nowhere.py", "there is no such file"),
    ("--params=-1", "at least 1"),
  ],
)
def test_bad_input_is_one_line_and_touches_nothing(
  flag, told, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  assert told in refused(capsys, ["doctor", flag])
  assert not list(tmp_path.iterdir())
