"""The command that keeps a run going, with processes in its place."""

import pathlib
import sys

import pytest
from observing import until

from diloco.chaos import injector


@pytest.fixture
def make_keeper(tmp_path, monkeypatch):
  """A keeper whose command is a script that finds how often it ran."""
  made = []

  def make(script):
    fake = tmp_path / "fake_python"
    fake.write_text(
      f"#!{sys.executable}\nimport os, pathlib, signal, time\n"
      f"starts = pathlib.Path({str(tmp_path / 'starts')!r})\n"
      "n = len(starts.read_text()) if starts.exists() else 0\n"
      "starts.write_text('x' * (n + 1))\n" + script
    )
    fake.chmod(0o755)
    monkeypatch.setattr(injector.sys, "executable", str(fake))
    made.append(injector.Keeper(tmp_path / "run", tmp_path / "log"))
    return made[-1]

  yield make
  for keeper in made:
    keeper.kill()


def _end(keeper):
  ends = ("finished", "failed")
  return until(lambda: (state := keeper.tend()) in ends and state)


def test_command_that_was_killed_is_started_again_until_it_is_done(
  make_keeper,
):
  keeper = make_keeper("if n < 2: os.kill(os.getpid(), signal.SIGKILL)\n")
  keeper.start()
  assert _end(keeper) == "finished"
  assert keeper.starts == 3


def test_command_that_fails_by_itself_is_not_started_again(make_keeper):
  keeper = make_keeper("print('error: no room'); raise SystemExit(2)\n")
  keeper.start()
  assert _end(keeper) == "failed"
  assert keeper.failure == "the command ended with code 2: error: no room"
  assert keeper.refused and keeper.starts == 1


def test_kill_is_no_failure(make_keeper, tmp_path):
  keeper = make_keeper("time.sleep(0 if n else 60)\n")
  keeper.start()
  starts = pathlib.Path(tmp_path / "starts")
  until(lambda: starts.exists() and starts.read_text())
  keeper.kill()
  assert _end(keeper) == "finished"
  assert keeper.starts == 2
