"""A real run that goes back to its cut: by itself, then when it is resumed."""

import json
import os
import re
import signal
import time

import pytest
import real_run

from diloco.snapshots import keys, records, store


def damage_head(run, fragment):
  path = run.dir / "snapshots" / keys.head_key(fragment)
  path.write_bytes(path.read_bytes()[:-9])


def damage_newest(run, fragment):
  """Cuts the tensors of a fragment's newest version short; gives it."""
  snapshots = store.SnapshotStore((run.dir / "snapshots").as_uri())
  head = snapshots.read(keys.head_key(fragment), records.Head)
  for path in (run.dir / "snapshots" / head.payload).rglob("*"):
    if path.is_file() and path.name != "zarr.json":
      os.truncate(path, path.stat().st_size // 2)
  return head.version


def versions(run, fragment):
  merged = [e for e in run.events("merged") if e["fragment"] == fragment]
  return [e["version"] for e in merged]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Its own way back is in `healed`, the second one's end in `told`."""
  with real_run.Run(
    tmp_path_factory.mktemp("cuts"), total_tokens=real_run.ENDLESS
  ) as run:
    run.start()
    run.wait_for(lambda: len(run.events("merged")) > 12)
    run.cut = run.command("cut", "--json")
    merged = len(run.events("merged"))
    run.wait_for(lambda: len(run.events("merged")) > merged + 8)
    while not run.events("global_damaged"):
      assert run.process.poll() is None
      damage_newest(run, 1)
      time.sleep(0.2)
    run.wait_for(lambda: run.events("restored"))
    (run.healed,) = run.events("restored")
    newest = run.healed["version_to"][1] + 2
    run.wait_for(lambda: max(versions(run, 1)) > newest)
    run.before = run.losses()
    run.kill_everything()
    run.first = run.finish()
    run.deaths = run.events("island_died") + run.events("syncer_died")
    damage_head(run, 2)
    run.start_command("resume", run.dir)
    run.wait_for(lambda: len(run.events("restored")) == 2)
    newest = run.events("restored")[1]["version_to"]
    run.wait_for(
      lambda: all(max(versions(run, p)) > n for p, n in enumerate(newest))
    )
    run.process.send_signal(signal.SIGINT)
    run.told = run.finish()
    yield run


def test_run_that_is_on_goes_back_by_itself_when_a_version_is_damaged(run):
  code, out, err = run.cut
  assert code == 0, err
  facts = json.loads(out)
  assert facts["status"] == "complete"
  assert err.splitlines()[0] == f"cut {facts['cut']} requested"
  _, _, err = run.first
  told = f"restored cut {facts['cut']} ("
  assert sum(told in x for x in err.splitlines()) == 1
  assert run.healed["cut"] == facts["cut"]
  # A busy machine may silence a leader; that is no death of the way back.
  deaths = [(e.get("island"), e["cause"]) for e in run.deaths]
  deposed = re.compile("was taken over|deposed")
  assert [d for d in deaths if d[0] or not deposed.search(d[1])] == []


def test_run_goes_on_from_a_cut_after_all_was_killed_and_a_head_damaged(run):
  code, _, err = run.told
  assert code == 0, err
  cut = run.healed["cut"]
  told = [x for x in err.splitlines() if x.startswith("restored")]
  assert len(told) == 1 and told[0].startswith(f"restored cut {cut} (fragment")
  _, restored = run.events("restored")
  for fragment, (old, new) in enumerate(
    zip(restored["version_from"], restored["version_to"], strict=True)
  ):
    assert new > old
    assert versions(run, fragment) == sorted(versions(run, fragment))
    assert new + 1 in versions(run, fragment)
  last = {e["role"]: e["step"] for e in run.events("started")}
  for island, step in restored["steps"].items():
    assert last[f"island-{island}"] == step
  facts = run.summary()
  assert (facts["status"], facts["sessions"]) == ("stopped", 2)
  run.check_books()
  assert run.losses()[len(run.before)] < run.before[0]  # it did not begin anew
