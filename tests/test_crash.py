"""Crash points in real processes: who dies, at which pass, and how often."""

import pathlib
import re
import signal
import subprocess
import sys

import pytest

import diloco
from diloco import crash

ROOT = pathlib.Path(diloco.__file__).parent
KILLED = -signal.SIGKILL

_PASSER = """
import sys
from diloco import crash

run_dir, role, *names = sys.argv[1:]
crash.configure(run_dir, role)
for name in names:
  crash.point(name)
  print(name, flush=True)
"""


def pass_points(run_dir, role, *names):
  """Exit code of a process that passes `names`, and which it got past."""
  done = subprocess.run(
    [sys.executable, "-c", _PASSER, str(run_dir), role, *names],
    cwd=ROOT.parent,
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stdout.split()


def test_nothing_happens_where_nothing_is_armed(tmp_path):
  assert pass_points(tmp_path, "syncer", "after_merge") == (0, ["after_merge"])
  crash.arm(tmp_path, [])
  assert pass_points(tmp_path, "syncer", "after_merge") == (0, ["after_merge"])
  assert crash.fired(tmp_path) == []


def test_process_dies_at_the_armed_pass_and_no_earlier(tmp_path):
  crash.arm(tmp_path, [crash.Coordinate("syncer", "after_merge", 3)])
  names = ["after_merge", "after_lease"] * 4
  code, passed = pass_points(tmp_path, "syncer", *names)
  assert code == KILLED
  assert passed == names[:4]


def test_coordinate_is_consumed_once_and_on_record(tmp_path):
  coordinate = crash.Coordinate("syncer", "after_merge")
  crash.arm(tmp_path, [coordinate])
  assert pass_points(tmp_path, "syncer", "after_merge") == (KILLED, [])
  (fired,) = crash.fired(tmp_path)
  assert (fired.coordinate, fired.role) == (coordinate, "syncer")
  assert pass_points(tmp_path, "syncer", "after_merge")[0] == 0
  crash.arm(tmp_path, [coordinate])  # it stays consumed
  assert pass_points(tmp_path, "syncer", "after_merge")[0] == 0
  crash.arm(tmp_path, [coordinate._replace(serial=1)])
  assert pass_points(tmp_path, "syncer", "after_merge")[0] == KILLED


def test_only_the_named_role_dies_or_any_if_none_is_named(tmp_path):
  crash.arm(tmp_path, [crash.Coordinate("island-1", "mid_adopt")])
  assert pass_points(tmp_path, "island-0", "mid_adopt")[0] == 0
  assert pass_points(tmp_path, "island-1", "mid_adopt")[0] == KILLED
  crash.arm(tmp_path, [crash.Coordinate(crash.ANY_ROLE, "mid_adopt")])
  assert pass_points(tmp_path, "island-0", "mid_adopt")[0] == KILLED
  assert pass_points(tmp_path, "island-1", "mid_adopt")[0] == 0


def test_passes_are_counted_anew_by_each_process(tmp_path):
  crash.arm(tmp_path, [crash.Coordinate("syncer", "after_merge", 2)])
  for _ in range(3):
    assert pass_points(tmp_path, "syncer", "after_merge")[0] == 0
  code, _ = pass_points(tmp_path, "syncer", "after_merge", "after_merge")
  assert code == KILLED


def test_running_process_finds_what_is_armed_later(tmp_path):
  crash.arm(tmp_path, [])
  process = subprocess.Popen(
    [
      sys.executable,
      "-c",
      "import sys; from diloco import crash\n"
      f"crash.configure({str(tmp_path)!r}, 'syncer')\n"
      "for line in sys.stdin:\n"
      "  crash.point('after_merge'); print('passed', flush=True)\n",
    ],
    cwd=ROOT.parent,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdin and process.stdout
  with process:
    print(file=process.stdin, flush=True)
    assert process.stdout.readline() == "passed\n"
    crash.arm(tmp_path, [crash.Coordinate("syncer", "after_merge")])
    print(file=process.stdin, flush=True)
    assert process.stdout.readline() == ""
    assert process.wait() == KILLED


@pytest.mark.parametrize(
  "coordinate",
  [
    crash.Coordinate("syncer", "no_such_point"),
    crash.Coordinate("syncer", "after_merge", 0),
  ],
)
def test_impossible_coordinate_is_refused(tmp_path, coordinate):
  with pytest.raises(ValueError, match="a point is one of"):
    crash.arm(tmp_path, [coordinate])


def test_every_point_of_the_code_has_a_name_and_every_name_a_point():
  passed = set()
  for path in ROOT.rglob("*.py"):
    # The simulated world has points of its own accord.
    if path.name != "crash.py" and "verification" not in path.parts:
      found = re.findall(r'(?:crash\.point|Point)\("(\w+)"\)', path.read_text())
      passed |= set(found)
  assert passed == set(crash.POINTS)
