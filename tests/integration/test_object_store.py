"""A real run on a real S3 server, and what can be asked of it afterwards."""

import json

import pytest
from real_run import Run

from diloco import cli, process
from diloco.snapshots import store


@pytest.fixture(scope="module")
def done(s3, tmp_path_factory):
  """A finished run, and what it printed; an island was killed in it."""
  run = Run(
    tmp_path_factory.mktemp("object_store"),
    store=s3.place("run"),
    total_tokens=24_000,
    faults=[{"target": "island-1", "at_fraction": 0.25}],
  )
  return run, run.start().finish()


def test_run_on_s3_goes_on_when_an_island_is_killed(done):
  run, (code, _, err) = done
  assert code == 0, err
  run.check_books()
  (died,) = run.events("island_died")
  assert (died["island"], died["cause"]) == (1, "SIGKILL")


def test_nothing_of_the_store_is_in_the_run_directory(done):
  run, _ = done
  assert [p.name for p in (run.dir / "snapshots").iterdir()] == ["config"]
  snapshots = store.SnapshotStore(process.store_url(run.dir))
  assert snapshots.url == run.values["store"]
  assert snapshots.names("heads") == ["0000", "0001", "0002", "0003"]


def test_requests_of_every_role_are_counted_and_priced(done):
  run, _ = done
  told = run.summary()["store"]
  roles = told["requests_by_role"]
  # Who is killed young has told of none, and may not be back before the end.
  assert {"controller", "island-0", "syncer"} <= set(roles)
  for role in ("island-0", "syncer"):
    facts = roles[role]
    assert facts["reads"] and facts["per_sec"] > 0 and facts["usd_per_hour"] > 0
  assert told["requests_per_sec_per_island"] > 0 and told["usd_per_hour"] > 0
  assert "asked of the store" in (run.dir / "report.html").read_text()


@pytest.mark.parametrize(
  ("argv", "told"),
  [
    (["status", "DIR"], "finished"),
    (["status", "URL"], "finished"),
    (["report", "URL"], "report.html"),
    (["explain", "URL", "--fragment=0", "--version=1"], "version 1"),
    (["replay", "URL", "--json"], ""),
    (["evaluate", "DIR", "--batches=1"], ""),
    (["evaluate", "URL", "--batches=1"], ""),
  ],
)
def test_run_on_s3_is_asked_as_any_other(
  done, capsys, argv, told, tmp_path, monkeypatch
):
  run, _ = done
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # another machine's
  places = {"DIR": str(run.dir), "URL": run.values["store"]}
  assert cli.main([places.get(word, word) for word in argv]) == 0
  out = capsys.readouterr().out
  assert told in out
  if "replay" in argv:
    found = json.loads(out)
    assert found["difference"] is None and found["arrays_compared"]


def test_run_on_s3_goes_on_in_its_own_store_only(done, capsys):
  run, _ = done
  argv = ["resume", str(run.dir), "--config.store=file:///elsewhere"]
  assert cli.main(argv) == 2
  assert "cannot change within a run" in capsys.readouterr().err
