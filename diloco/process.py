"""What every process of a run does at birth: logging, signals, configuration.

Roles run in sessions of their own. A Ctrl-C in the terminal reaches only the
controller, which then winds the run down in order.
"""

import json
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from diloco import config as config_lib
from diloco import crash, errors

FORMAT = "diloco-run-2"  # of a run directory
UNFINISHED = "config.tmp"  # a run killed in its very first write has only this
EXIT_FAILED = 1
EXIT_USER_ERROR = 2


# XLA on a CPU takes its temporaries from malloc and frees them in every step.
# By default glibc gives such blocks back to the system each time, and the page
# faults cost a third of the step; so an island keeps them. Read at start-up
# only, hence an environment; one that is already set wins.
ISLAND_ENV = {
  "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
  "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
  "MALLOC_TOP_PAD_": str(1 << 26),
}


def write_config(config: config_lib.RunConfig, run_dir: pathlib.Path) -> None:
  """Writes a run's config.json, whole or not at all."""
  run_dir.mkdir(parents=True, exist_ok=True)
  temporary = run_dir / UNFINISHED
  content = {"format": FORMAT, "config": config.to_dict()}
  temporary.write_text(json.dumps(content, indent=2) + "\n")
  temporary.rename(run_dir / "config.json")


def read_config(run_dir: str | os.PathLike[str]) -> config_lib.RunConfig:
  """Reads the configuration a run was started with.

  Raises:
    UserError: there is none, it cannot be read, or another version wrote it.
  """
  path = pathlib.Path(run_dir) / "config.json"
  try:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
      raise errors.UserError(
        f"the run directory {run_dir}",
        f"its run has format {content['format']!r}, this version reads"
        f" {FORMAT!r}",
        "use the version of diloco that wrote it, or another directory",
      )
    return config_lib.from_mapping(content["config"])
  except (OSError, ValueError, KeyError, TypeError) as error:
    if isinstance(error, errors.UserError):
      raise
    raise errors.UserError(
      f"the run directory {run_dir}",
      f"its config.json cannot be read ({error})",
      "name the directory of a run, or start one with 'diloco train'",
    ) from error


def processes_path(run_dir: str | os.PathLike[str]) -> pathlib.Path:
  """File that tells which processes a run's controller has started."""
  return pathlib.Path(run_dir) / "control" / "processes.json"


def read_processes(
  run_dir: str | os.PathLike[str],
) -> dict[str, dict[str, Any]]:
  """The newest process of each role: `pid`, `start_ticks` and more.

  Without the file, or with a damaged one, no role is known.
  """
  try:
    content = json.loads(processes_path(run_dir).read_text())
    return {
      str(role): {**facts, "pid": int(facts["pid"])}
      for role, facts in content.items()
    }
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return {}


def owner_name(pid: int) -> str:
  """Name under which a process of this machine holds a lease."""
  return f"{os.uname().nodename}.{pid}"


def print_error(error: Exception) -> None:
  """Tells the user what went wrong, on one line whatever the error holds."""
  line = " ".join(str(error).splitlines())
  print(f"error: {line}", file=sys.stderr)


def store_url(run_dir: str | os.PathLike[str]) -> str:
  """URL of a run's snapshot store."""
  path = pathlib.Path(run_dir).absolute() / "snapshots"
  return path.as_uri() + "/"


def setup_role(
  cores: Sequence[int], run_dir: str | os.PathLike[str], role: str
) -> None:
  """Prepares a role's process: its cores, its log, deaf to the terminal.

  Must run before JAX is imported: its thread pools are sized then.
  """
  if cores:
    os.sched_setaffinity(0, set(cores))
  crash.configure(run_dir, role)
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
  logging.basicConfig(
    stream=sys.stderr,
    level=logging.INFO,
    format="%(asctime)s %(levelname)s %(name)s %(message)s",
  )
  for noisy in ("absl", "jax", "orbax"):
    logging.getLogger(noisy).setLevel(logging.WARNING)
