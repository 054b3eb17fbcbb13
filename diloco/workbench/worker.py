"""The process of one point of a sweep: does it, and writes what became of it.

`python -m diloco.workbench.worker WORKDIR NAME CORES FOLDER` is all that runs a
point, wherever it is called. The point's lock goes with this process: a sweep
that was killed leaves its points running, and nobody else begins them.
"""

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from diloco import errors, process
from diloco.workbench import frozen

EXIT_BUSY = 75  # somebody else does this point
_BUSY_SECS = 2.0
_claims: list[socket.socket] = []  # of cores, as long as this process lives


def main(argv: Sequence[str]) -> int:
  """Does a point; returns the exit code.

  Of a sweep's directory, a point, its cores or how many of this machine it is
  to look for, and the folder where the sweep was started.
  """
  workdir, name, cores = pathlib.Path(argv[0]), argv[1], json.loads(argv[2])
  life = process.end_with_keeper()
  # A run's roles on a Ray cluster would be taken for this process.
  os.environ.pop(process.ROLE, None)
  logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
  with contextlib.suppress(OSError):  # a node may have no such folder
    os.chdir(argv[3])
  if isinstance(cores, int):
    cores = _free_cores(cores)
  if cores:
    os.sched_setaffinity(0, cores)  # before JAX sizes its pools
  with process.private_files(), _own(workdir, name, life) as mine:
    if not mine:
      time.sleep(_BUSY_SECS)  # it is begun again until whoever has it has ended
      return EXIT_BUSY
    facts = _done(workdir, name)
    frozen.set_outcome(workdir, name, facts)
    return 0 if facts["status"] == "finished" else process.EXIT_FAILED


def begun(workdir: pathlib.Path, name: str, life: int) -> bool:
  """Whether that life of a point's process has taken the point's lock."""
  with contextlib.suppress(OSError, ValueError):
    found = json.loads(_lock(workdir, name).read_text())
    return bool(found["life"] == life)
  return False


def _free_cores(number: int) -> list[int]:
  """Cores that no other point has taken so; none if there are not so many."""
  found: list[int] = []
  for core in sorted(os.sched_getaffinity(0)):
    claim = socket.socket(socket.AF_UNIX)
    try:
      # Not a file: the name is free again when this process has ended.
      claim.bind(f"\0diloco-core-{core}")
    except OSError:
      claim.close()
      continue
    _claims.append(claim)
    found.append(core)
    if len(found) == number:
      return found
  logging.getLogger(__name__).warning(
    "cores_shared wanted=%d free=%d why=%r",
    number,
    len(found),
    "points of others, maybe of other users, have the rest; bound to none",
  )
  while _claims:
    _claims.pop().close()
  return []


@contextlib.contextmanager
def _own(workdir: pathlib.Path, name: str, life: int | None) -> Iterator[bool]:
  with _lock(workdir, name).open("a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      yield False
      return
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "life": life}))
    file.flush()
    yield True


def _lock(workdir: pathlib.Path, name: str) -> pathlib.Path:
  return workdir / "points" / f"{name}.lock"


def _done(workdir: pathlib.Path, name: str) -> dict[str, Any]:
  """Does the point, or what is left of it; never raises for what it does."""
  start = time.monotonic()
  status, reason = "failed", ""
  result: dict[str, Any] = {}
  try:
    sweep = frozen.read(workdir)
    point = next(p for p in sweep.points if p.name == name)
    do = _train if sweep.kind == "train" else _simulate
    status, reason, result = do(workdir / name, point)
  except errors.UserError as error:
    reason = str(error)
  except Exception as error:
    logging.getLogger(__name__).exception("point_failed name=%s", name)
    reason = errors.with_place(error)
  return {
    "status": status,
    "reason": " ".join(reason.split()),
    "secs": time.monotonic() - start,
    "result": flat(result),
  }


def _train(
  run_dir: pathlib.Path, point: frozen.Point
) -> tuple[str, str, dict[str, Any]]:
  with contextlib.suppress(OSError, ValueError, TypeError):
    # Killed between its end and the note of it: nothing is left to do.
    facts = json.loads((run_dir / "summary.json").read_text())
    if facts["status"] == "finished":
      return "finished", "", facts
  if point.config.get("engine") == "virtual":
    shutil.rmtree(run_dir, ignore_errors=True)  # it cannot go on where it was
  from diloco import run  # with JAX

  facts = dict(run.train(point.config, run_dir, quiet=True).summary)
  return facts["status"], facts["reason"], facts


def _simulate(
  folder: pathlib.Path, point: frozen.Point
) -> tuple[str, str, dict[str, Any]]:
  from diloco.planning.fleet import command, flags
  from diloco.report import summary

  facts = command.simulate(flags.written(point.config))
  folder.mkdir(exist_ok=True)
  text = json.dumps(facts, indent=2) + "\n"
  summary.replace(folder / "result.json", text)
  return "finished", "", facts


_PARTS = ("islands", "ledger", "made_from")  # of a summary: not of the run


def flat(facts: Any, prefix: str = "") -> dict[str, float]:
  """The figures of a summary or a simulation, by dotted names."""
  found: dict[str, float] = {}
  for key, value in facts.items():
    if isinstance(value, dict) and key not in _PARTS:
      found |= flat(value, f"{prefix}{key}.")
    elif isinstance(value, int | float) and not isinstance(value, bool):
      found[f"{prefix}{key}"] = value
  return found


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
