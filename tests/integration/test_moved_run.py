"""A real run whose machine is lost goes on elsewhere, from its store alone."""

import json
import shutil
import signal

import pytest
import real_run

from diloco import cli, logbook, process
from diloco.snapshots import store
from diloco.tape import events, reader


@pytest.fixture(scope="module")
def moved(far_s3, tmp_path_factory):
  """What became of a run that was killed whole, its directory with it."""
  root = tmp_path_factory.mktemp("moved")
  url = far_s3.place("moved")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    with real_run.Run(
      root,
      task=real_run.language_model(root),
      store=url,
      total_tokens=real_run.ENDLESS,
      programs={"checkpoint_every_steps": 40, "cut_every_secs": 3.0},
    ) as run:
      run.url = url
      run.start()
      # To look into the store costs more than to look beside it.
      run.wait_for(lambda: run.events("cut_completed"))
      run.wait_for(lambda: cuts_told(url))
      run.process.kill()  # its roles go on for a while
      run.while_alive = resumed(url, root / "too-soon")
      run.kill_everything()
      run.told = cuts_told(url)
      shutil.rmtree(run.dir)
      run.dir = root / "elsewhere"
      run._follower = reader.Follower(run.dir)
      run.start_command("resume", url, f"--workdir={run.dir}")
      run.wait_for(lambda: run.events("restored"))
      (back,) = run.events("restored")
      run.wait_for(lambda: len(lives_in(run, back["epoch"])) == 2)
      run.wait_for(
        lambda: any(
          c["incarnation"] > 1
          for e in run.events("merged")
          for c in e["contributions"]
        )
      )
      run.process.send_signal(signal.SIGINT)
      run.end = run.finish()
      yield run


def cuts_told(url):
  """Numbers of the cuts that the tapes in a store tell of."""
  snapshots = store.SnapshotStore(url)
  if "whole/config.json" not in snapshots.keys("log"):
    return []
  lines = reader.stream(logbook.fetch(url), only_role="controller").events
  return [e["cut"] for e in lines if e["event"] == events.CUT_COMPLETED]


def lives_in(run, epoch):
  """What the first life of each island since a return started from."""
  lives = [e for e in run.events("started") if e["epoch"] == epoch]
  return {e["role"]: e for e in reversed(lives)}


def resumed(url, folder):
  return cli.main(["resume", url, f"--workdir={folder}"])


def test_run_that_is_alive_is_left_alone(moved):
  assert moved.while_alive == 2
  assert not (moved.dir.parent / "too-soon").exists()


def test_run_goes_on_elsewhere_from_its_last_cut_that_is_told(moved):
  code, _, err = moved.end
  assert code == 0, err
  (back,) = moved.events("restored")
  assert back["cut"] == moved.told[-1]
  moved.check_books()
  assert moved.summary()["status"] == "stopped"


def test_islands_keep_their_optimizers(moved):
  (back,) = moved.events("restored")
  for island, step in back["steps"].items():
    first = lives_in(moved, back["epoch"])[f"island-{island}"]
    assert first["checkpoint"]["step"] == step
    assert first["peer"] is None


def test_nothing_of_the_store_is_in_the_run_directory(moved):
  assert [p.name for p in (moved.dir / "snapshots").iterdir()] == ["config"]
  snapshots = store.SnapshotStore(process.store_url(moved.dir))
  assert snapshots.url == moved.url
  assert snapshots.names("heads") == ["0000", "0001", "0002", "0003"]


def test_requests_of_every_role_are_counted_and_priced(moved):
  told = moved.summary()["store"]
  roles = told["requests_by_role"]
  assert {"controller", "island-0", "island-1", "syncer"} <= set(roles)
  for role in ("island-0", "syncer"):
    facts = roles[role]
    assert facts["reads"] and facts["per_sec"] > 0 and facts["usd_per_hour"] > 0
  assert told["requests_per_sec_per_island"] > 0 and told["usd_per_hour"] > 0
  assert "asked of the store" in (moved.dir / "report.html").read_text()


@pytest.mark.parametrize(
  ("argv", "told"),
  [
    (["status", "DIR"], "stopped"),
    (["status", "URL"], "stopped"),
    (["report", "URL"], "report.html"),
    (["explain", "URL", "FRAGMENT", "VERSION"], "version "),
    (["replay", "URL", "--json"], ""),
    (["evaluate", "DIR", "--batches=1"], ""),
    (["evaluate", "URL", "--batches=1"], ""),
  ],
)
def test_run_in_a_bucket_is_asked_as_any_other(
  moved, capsys, argv, told, tmp_path, monkeypatch
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # another machine's
  *_, last = moved.events("merged")
  places = {
    **{"DIR": str(moved.dir), "URL": moved.url},
    "FRAGMENT": f"--fragment={last['fragment']}",
    "VERSION": f"--version={last['version']}",
  }
  assert cli.main([places.get(word, word) for word in argv]) == 0
  out = capsys.readouterr().out
  assert told in out
  if "replay" in argv:
    found = json.loads(out)
    assert found["difference"] is None and found["arrays_compared"]


def test_run_goes_on_in_its_own_store_only(moved, capsys):
  argv = ["resume", str(moved.dir), "--config.store=file:///elsewhere"]
  assert cli.main(argv) == 2
  assert "cannot change within a run" in capsys.readouterr().err
