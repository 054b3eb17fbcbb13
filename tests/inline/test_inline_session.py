"""A run beside its user, within the user's own process: `diloco.start`."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

import diloco
from diloco import errors
from diloco import run as run_lib
from diloco.workbench import session
from tests.inline import test_inline_engine as inline
from tests.observing import events, until

ENDLESS = 10_000_000
ROOT = pathlib.Path(diloco.__file__).parent.parent


@pytest.fixture(scope="module")
def story(tmp_path_factory):
  """One run that is started, struck, changed, stopped and gone on with."""
  folder = tmp_path_factory.mktemp("story") / "run"
  # A busy machine silences no leader for as long as its lease then lasts.
  patient = {"restart_base_secs": 0.05, "takeover_secs": 3.0}
  config = inline.make_config(2, total_tokens=ENDLESS, controller=patient)
  mask = os.umask(0)
  try:
    run = diloco.start(config, folder)
    run.again = diloco.start(config, folder)
    until(lambda: events(run.dir, "merged"))
    (folder.parent / "mine").touch()
  finally:
    os.umask(mask)
  run.kill("island-1")
  run.kill("syncer")
  until(lambda: events(run.dir, "started", role="island-1", incarnation=2))
  # The successor's token; the first one drawn may have been in vain.
  until(lambda: len(events(run.dir, "lease_acquired")) > 1)
  run.changed = run.change(
    sync__quorum=2, sync__every=8, sync__grace="0.1", outer__learning_rate=0.5
  )
  until(lambda: events(run.dir, "merged", learning_rate=0.5))
  run.watch(secs=0.0)
  before = len(events(run.dir, "merged"))
  run.watch(merges=2)
  run.watched = len(events(run.dir, "merged")) - before
  run.interrupted = interrupted(run)
  run.states = [run.state, run.stop()]
  run.first = run.summary
  until(lambda: not inline.names())
  config["total_tokens"] = run.first["tokens_trained"] + 100
  run.states.append(diloco.start(config, folder).wait())
  return run


def test_cell_that_is_run_twice_starts_nothing_twice(story):
  assert story.again.dir == story.dir
  assert len(events(story.dir, "run_started")) == 2  # the second one went on


def test_run_is_watched_until_it_has_merged_so_often(story):
  assert story.watched >= 2


def interrupted(run):
  """How many were merged after an interrupt in the middle of watching."""

  @contextlib.contextmanager
  def screen():
    yield lambda: signal.raise_signal(signal.SIGINT)

  run._screen = screen
  # A shell has what it starts in the background ignore interrupts.
  handler = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    run.watch()  # it would never return
  finally:
    signal.signal(signal.SIGINT, handler)
  del run._screen
  before = len(events(run.dir, "merged"))
  return until(lambda: len(events(run.dir, "merged")) - before)


def test_interrupted_cell_stops_nothing(story):
  assert story.interrupted > 0
  assert story.states[0] == "running"


def test_start_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
  started = []

  def wait(run_dir, child):
    started.append(child)
    raise KeyboardInterrupt

  monkeypatch.setattr(session, "_wait", wait)
  config = inline.make_config(2, total_tokens=100) | {"engine": "process"}
  with pytest.raises(KeyboardInterrupt):
    diloco.start(config, tmp_path / "run")
  assert started[0].returncode == -signal.SIGKILL
  assert not (tmp_path / "run").exists()


def test_killed_roles_come_back(story):
  assert [e["cause"] for e in events(story.dir, "island_died")] == ["SIGKILL"]
  assert events(story.dir, "started", role="island-1", incarnation=2)
  (died,) = events(story.dir, "syncer_died")
  assert died["cause"] == "SIGKILL" and died["led"]


def test_settings_change_with_an_audit_line(story):
  told = events(story.dir, "config_changed")[0]["changes"]
  assert told == {name: list(pair) for name, pair in story.changed.items()}
  assert told["sync.quorum"] == [1, 2] and len(told) == 4
  assert events(story.dir, "merged", learning_rate=0.5)


def test_run_is_stopped_and_started_again_where_it_was(story):
  assert story.states == ["running", "stopped", "finished"]
  for facts in (story.first, story.summary):
    assert facts["tokens_unaccounted"] == 0 and not facts["violations"]
  last = events(story.dir, "started")[-2:]
  assert all("checkpoint" in e["restored_from"] for e in last)


def test_files_of_the_user_keep_their_modes(story):
  assert story.dir.stat().st_mode & 0o777 == 0o700
  assert (story.dir.parent / "mine").stat().st_mode & 0o777 == 0o666


def test_role_that_is_not_there_cannot_be_killed(story):
  with pytest.raises(errors.UserError, match="island-7"):
    story.kill("island-7")


def test_refused_run_leaves_nothing(tmp_path):
  config = inline.make_config(2, total_tokens=100)
  config["fleet"]["slices"] = [{"topology": "9999"}]
  with pytest.raises(errors.UserError, match="9999"):
    diloco.start(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_terminal_is_left_alone_by_a_run_that_cannot_listen(
  tmp_path, monkeypatch
):
  def refused(*_):
    raise OSError("no descriptor is left")

  shown = []
  monkeypatch.setattr(run_lib.channel, "Server", refused)
  monkeypatch.setattr(
    run_lib.live, "LiveView", lambda *_, **__: shown.append(1)
  )
  with pytest.raises(OSError, match="no descriptor"):
    run_lib.conduct(inline.make_config(1, total_tokens=100), tmp_path / "run")
  assert not shown


def test_mistake_of_the_users_own_is_shown_where_they_look(tmp_path):
  task = {"name": "tests.engines.test_engines:mistaken"}
  run = diloco.start(inline.make_config(2, task=task), tmp_path / "run")
  with pytest.raises(errors.UserError, match="ZeroDivisionError: in my own"):
    run.watch()
  assert run.wait() == "failed"


SCRIPT = """
import sys
import diloco
from tests.inline import test_inline_engine as inline
from tests.observing import events, until

run = diloco.start(inline.make_config(1, total_tokens=10_000_000), sys.argv[1])
until(lambda: events(run.dir, "merged"))
print("on", flush=True)
sys.stdin.readline()
"""


def test_run_of_another_process_is_not_reached_and_ends_with_it(tmp_path):
  folder = tmp_path / "run"
  other = subprocess.Popen(
    [sys.executable, "-c", SCRIPT, str(folder)],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert other.stdout.readline() == "on\n"
  run = session.Session(folder)
  for reach in (run.stop, lambda: run.kill("island-0")):
    with pytest.raises(
      errors.UserError, match=f"threads of process {other.pid}"
    ):
      reach()
  assert run.change(sync__every=8) == {"sync.every": (4, 8)}
  _, said = other.communicate("\n", timeout=100)
  assert (other.returncode, said) == (0, "")
  assert run.state == "killed"
