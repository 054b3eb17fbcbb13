"""Do the tests see a wrong line? Each mutant is the tree with one line wrong.

`mutants.toml` beside this file lists them: what is replaced by what, and what
that would mean. A mutant is *killed* when a stage fails: the tests of its
module, then all unit tests of its package, then simulated schedules of the
protocol. Whole runs are not asked, they take too long.

    python -m experiments.mutation --jobs=2

prints one JSON object: how many were killed by which stage, and who is alive.
With `--only=diloco/tape --stages=module` it tells in minutes which lines of a
package no direct test looks at. `--mutants=FILE` tries another list: one chosen
before any of it was tried measures how many wrong lines still live.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import queue
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence

ROOT = pathlib.Path(__file__).parent.parent
LIST = ROOT / "experiments" / "mutants.toml"
_COPIED = ("diloco", "experiments", "tests", "docs", "pyproject.toml")
_STAGE_SECS = 600.0
_POLL_SECS = 0.2
_SCHEDULES = 500
STAGES = ("module", "package", "schedules")


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One wrong line.

  Attributes:
    name: unique, in the words of the mistake.
    file: path of the module below the root.
    before: text that occurs there once.
    after: what stands there instead.
    why: what goes wrong then.
    tests: files that test the module first; default its mirror in `tests`.
  """

  name: str
  file: str
  before: str
  after: str
  why: str
  tests: tuple[str, ...] = ()

  def apply(self, source: str) -> str:
    """The wrong source; ValueError where the list and the code disagree."""
    count = source.count(self.before)
    if count != 1:
      raise ValueError(
        f"mutant {self.name!r}: its text occurs {count} times in {self.file};"
        " name it so that it occurs once"
      )
    return source.replace(self.before, self.after)

  def stages(self) -> dict[str, list[str]]:
    """Commands after `python -m`, by the stage's name, nearest first."""
    parts = pathlib.Path(self.file).parts[1:]
    package = "/".join(("tests", *parts[:-1][:1]))
    near = self.tests or (f"{package}/test_{parts[-1]}",)
    near = tuple(path for path in near if (ROOT / path).exists())
    pytest = ["pytest", "-x", "-q", "-p", "no:randomly"]
    pytest += ["-p", "no:cacheprovider"]
    stages = {}
    if near:
      stages["module"] = [*pytest, *near]
    if len(parts) > 1:
      stages["package"] = [*pytest, package]
    schedules = f"--schedules={_SCHEDULES}"
    stages["schedules"] = ["diloco.cli", "simulate-protocol", schedules]
    return stages


def load(path: pathlib.Path = LIST) -> list[Mutant]:
  """All mutants of the list."""
  rows = tomllib.loads(path.read_text())["mutant"]
  return [
    Mutant(**{**row, "tests": tuple(row.get("tests", ()))}) for row in rows
  ]


# What tests import besides the code that is mutated. A process that has it is
# forked for each command, which saves the seconds that importing it takes.
_PRELOADED = ["pytest", "numpy", "jax", "flax", "optax", "tensorstore", "grain"]
_OURS = ("diloco", "experiments", "__mp_main__")


def _perform(command: Sequence[str], tree: pathlib.Path) -> None:
  """Does `python -m command` in the tree, unheard, in a new process."""
  os.setsid()
  threading.Thread(target=_end_with_tool, daemon=True).start()
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)
  os.dup2(nowhere, 2)
  for name in list(sys.modules):
    if name.partition(".")[0] in _OURS:
      del sys.modules[name]
  os.chdir(tree)
  os.environ["PYTHONPATH"] = str(tree)
  sys.path.insert(0, str(tree))
  sys.argv = list(command)
  runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _end_with_tool() -> None:
  """Ends this process and what it started with the tool, however that ends."""
  tool = multiprocessing.parent_process()
  assert tool is not None
  tool.join()
  os.killpg(0, signal.SIGKILL)


_over = threading.Event()  # whether the tool is to end, and all it has started


def _fails(command: Sequence[str], tree: pathlib.Path) -> bool:
  context = multiprocessing.get_context("forkserver")
  process = context.Process(target=_perform, args=(command, tree))
  process.start()
  end = time.monotonic() + _STAGE_SECS
  while process.is_alive() and time.monotonic() < end and not _over.is_set():
    process.join(_POLL_SECS)
  if process.is_alive() and process.pid:
    with contextlib.suppress(ProcessLookupError):  # it leads no group yet
      os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
  return process.exitcode != 0


def killer(
  mutant: Mutant,
  tree: pathlib.Path,
  stages: Container[str] = STAGES,
) -> str | None:
  """Name of the stage that sees the mutant; None if it lives.

  Args:
    mutant: which.
    tree: a copy of the sound tree, which it is again afterwards.
    stages: which of `STAGES` may be asked.
  """
  path = tree / mutant.file
  sound = path.read_text()
  path.write_text(mutant.apply(sound))
  try:
    for stage, command in mutant.stages().items():
      if stage in stages and _fails(command, tree):
        return stage
    return None
  finally:
    path.write_text(sound)


def copy_tree(tree: pathlib.Path) -> pathlib.Path:
  """Copies what tests need into a directory; returns it."""
  ignored = shutil.ignore_patterns("__pycache__")
  for name in _COPIED:
    if (ROOT / name).is_dir():
      shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    else:
      shutil.copy(ROOT / name, tree / name)
  return tree


def _sound_stages(
  mutants: Iterable[Mutant], stages: Container[str]
) -> list[list[str]]:
  """Every command that a mutant could fail, each once."""
  commands = {
    tuple(command)
    for mutant in mutants
    for stage, command in mutant.stages().items()
    if stage in stages
  }
  return [list(command) for command in sorted(commands)]


@contextlib.contextmanager
def _ending() -> Iterator[None]:
  """Has what is under way end with whatever ends the tool."""
  try:
    yield
  except BaseException:
    _over.set()
    raise


def _terminate(number: int, _: object) -> None:
  signal.signal(number, signal.SIG_IGN)  # it is cleaned up after
  sys.exit(128 + number)


def run(
  mutants: Sequence[Mutant], jobs: int, stages: Container[str] = STAGES
) -> dict[str, object]:
  """Tries all mutants; raises RuntimeError where the sound tree fails."""
  with tempfile.TemporaryDirectory(prefix="diloco-mutants-") as folder:
    base = pathlib.Path(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(base / "cache"))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    trees: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
    for job in range(jobs):
      trees.put(copy_tree(base / str(job)))

    def sound(command: list[str]) -> str:
      tree = trees.get()
      try:
        return " ".join(command) if _fails(command, tree) else ""
      finally:
        trees.put(tree)

    def attempt(mutant: Mutant) -> str | None:
      tree = trees.get()
      try:
        found = killer(mutant, tree, stages)
      finally:
        trees.put(tree)
      print(f"{found or 'ALIVE':9} {mutant.name}", file=sys.stderr, flush=True)
      return found

    _over.clear()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool, _ending():
      broken = [c for c in pool.map(sound, _sound_stages(mutants, stages)) if c]
      if broken:
        raise RuntimeError(f"the sound tree fails: {'; '.join(broken)}")
      killers = list(pool.map(attempt, mutants))
  alive = [m for m, k in zip(mutants, killers, strict=True) if k is None]
  return {
    "mutants": len(mutants),
    "killed": dict(Counter(k for k in killers if k is not None)),
    "alive": {m.name: m.why for m in alive},
  }


def main() -> int:
  """Parses flags, prints the result; 1 while a mutant lives."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--jobs", type=int, default=2)
  parser.add_argument(
    "--only", default="", help="text in a mutant's name or file"
  )
  parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
  parser.add_argument(
    "--mutants", type=pathlib.Path, default=LIST, help="another list"
  )
  args = parser.parse_args()
  signal.signal(signal.SIGTERM, _terminate)
  mutants = [
    m for m in load(args.mutants) if args.only in m.name or args.only in m.file
  ]
  result = run(mutants, args.jobs, args.stages)
  print(json.dumps(result, indent=2))
  return 1 if result["alive"] else 0


if __name__ == "__main__":
  sys.exit(main())
