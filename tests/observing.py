"""What tests of many rooms wait for, and what they find on tapes."""

import json
import subprocess
import sys
import time

from diloco import cli
from diloco.report import liveness
from diloco.tape import reader


def until(holds, secs=240.0):
  """Waits until something holds, and gives what it gave then."""
  deadline = time.monotonic() + secs  # as good as for ever
  while not (found := holds()):
    assert time.monotonic() < deadline, "timed out"
    time.sleep(0.01)
  return found


def events(run_dir, name, **fields):
  """Lines of the run's tapes that tell of such an event, with these fields."""
  return [
    line
    for line in reader.read(run_dir).events
    if line["event"] == name and fields.items() <= line.items()
  ]


def holder(workdir, name):
  """The living process that has taken a point's lock."""
  try:
    facts = json.loads((workdir / "points" / f"{name}.lock").read_text())
  except (OSError, ValueError):
    return None
  return facts if liveness.start_ticks(facts["pid"]) else None


def refused(capsys, argv):
  """The one line of a command that cannot be done."""
  assert cli.main([*map(str, argv)]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1, err
  return err


def python(code, *args, **how):
  """What a process of its own prints that executes this."""
  return subprocess.run(
    [sys.executable, "-c", code, *args],
    capture_output=True,
    text=True,
    check=True,
    **how,
  ).stdout


def loaded_by(code):
  """Packages that a process of its own has loaded once it has executed this."""
  names = "{m.partition('.')[0] for m in sys.modules}"
  return set(python(f"{code}\nimport sys\nprint(*{names})").split())
