"""Processes that live islands' lives again: one for lives alike, one busy.

`python -m diloco.replay.worker` holds what each island held, less its threads,
and does what it is told on its standard input, one JSON line a command, each
answered by one line. Tensors go through a scratch store.
"""

import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Hashable
from typing import Any

from diloco import config as config_lib
from diloco import errors, process
from diloco.islands import surroundings
from diloco.replay import script

_TAIL_BYTES = 2000


def kind(settings: script.Settings) -> Hashable:
  """What lives have in common that can be lived again in one process."""
  return (
    len(settings.cores),
    tuple(sorted(settings.environ.items())),
    *(settings.topology, settings.total_tokens),
    *(settings.present, settings.own_rate),
  )


class Worker:
  """The process of lives whose settings are alike."""

  def __init__(
    self,
    life: script.LifeId,
    settings: script.Settings,
    run_dir: pathlib.Path,
    scratch: pathlib.Path,
  ):
    """Starts it under the settings of a life.

    Raises:
      UserError: this machine has fewer cores than the life had.
    """
    available = sorted(os.sched_getaffinity(0))
    cores = surroundings.choose_cores(settings.cores, available)
    if cores is None:
      raise errors.UserError(
        f"replay of {life}",
        f"it ran on {len(settings.cores)} cores and {len(available)} are here;"
        " sums would be divided otherwise",
        "replay on a machine with as many cores",
      )
    self._log = scratch / "logs" / f"{life.island}.{life.incarnation}.log"
    self._log.parent.mkdir(parents=True, exist_ok=True)
    with self._log.open("ab") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=surroundings.environ(settings.environ),
        text=True,
      )
    os.sched_setaffinity(self._process.pid, cores)
    # It leaves with the first command, should the process be dead by then.
    self._first = _line(str(run_dir), str(scratch), settings)

  def ask(self, life: script.LifeId, do: str, *args: Any) -> Any:
    """Has a method of `performer.Performer` called; returns what it did.

    Raises:
      UserError: it could not be done.
    """
    assert self._process.stdin and self._process.stdout
    try:
      command, self._first = self._first + _line(life, do, args), ""
      self._process.stdin.write(command)
      self._process.stdin.flush()
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ""
    answer, why = json.loads(line) if line else (None, self._last_words())
    if why:
      raise errors.UserError(f"replay of {life}", why, f"see {self._log}")
    return answer

  def _last_words(self) -> str:
    code = self._process.wait()
    with self._log.open("rb") as log:
      log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
      lines = log.read().decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "silently")
    return f"its process ended with exit code {code}: {last.strip()}"

  def close(self) -> None:
    """Ends the process, whatever it is doing."""
    self._process.kill()
    self._process.communicate()


def _line(*values: Any) -> str:
  return json.dumps(script.to_json(values)) + "\n"


def lived(
  config: config_lib.RunConfig, settings: script.Settings
) -> config_lib.RunConfig:
  """The configuration that a life had, which resumptions have changed since."""
  if (rate := settings.own_rate) is not None:
    outer = dataclasses.replace(config.outer, learning_rate=rate)
    config = dataclasses.replace(config, outer=outer)
  return dataclasses.replace(config, total_tokens=settings.total_tokens)


def main() -> int:
  """Answers commands until there are none; returns the exit code."""
  logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
  # What a library prints must not get among the answers.
  answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  commands = (script.from_json(json.loads(line)) for line in sys.stdin)
  *places, settings = next(commands)
  run_dir, scratch = map(pathlib.Path, places)
  # JAX reads its environment once, which is in place by now.
  from diloco.islands import compilation
  from diloco.replay import performer
  from diloco.snapshots import store

  compilation.use_cache(scratch / "compilation_cache")
  config = lived(process.read_config(run_dir), settings)
  original = store.SnapshotStore(process.store_url(run_dir))
  lives: dict[script.LifeId, performer.Performer] = {}
  for life, do, args in commands:
    if life not in lives:
      lives[life] = performer.Performer(
        config, life, settings, scratch, original
      )
    answer, why = None, ""
    try:
      answer = getattr(lives[life], do)(*args)
    except (errors.UserError, errors.CorruptSnapshotError) as error:
      why = str(error)
    answers.write(_line(answer, why))
    answers.flush()
    if do == "close":
      del lives[life]
  return 0


if __name__ == "__main__":
  sys.exit(main())
