"""No decision compares wall clocks: they jump."""

import ast
import pathlib

import diloco

ROOT = pathlib.Path(diloco.__file__).parent

# Whatever decides: what to merge, who leads, who is dead, what to do next.
DECIDING = (
  "controller",
  "fragments",
  "islands",
  "snapshots",
  "syncer",
  "channel.py",
  *("config.py", "config_changes.py", "config_checks.py"),
  "process.py",
  "run.py",
  "timing.py",
)
WALL = {
  "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"},
  "datetime": {"now", "today", "utcnow"},
}


def wall_clocks(path):
  """Lines in which a module reads the time of day, by attribute or import."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      if node.attr in WALL.get(node.value.id, ()):
        yield node.lineno
    elif isinstance(node, ast.ImportFrom) and node.module in WALL:
      yield node.lineno


def test_finder_finds(tmp_path):
  path = tmp_path / "module.py"
  path.write_text(
    "import time\nfrom time import time as now\nx = time.time\n"
    "y = time.monotonic()\nz = datetime.now()\n"
  )
  assert sorted(wall_clocks(path)) == [2, 3, 5]


def test_nothing_that_decides_reads_the_time_of_day():
  paths = [
    path
    for name in DECIDING
    for path in (sorted((ROOT / name).rglob("*.py")) or [ROOT / name])
  ]
  assert len(paths) > 40
  assert [path for path in paths if list(wall_clocks(path))] == []
  # The tape's `wall_secs`, for pictures only.
  assert list(wall_clocks(ROOT / "tape" / "recorder.py"))
