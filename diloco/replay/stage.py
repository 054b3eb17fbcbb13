"""Worker processes of a replay: one for lives alike, only one of them busy."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Hashable, Mapping
from typing import Any

from diloco import errors
from diloco.islands import surroundings
from diloco.replay import script

_TAIL_BYTES = 2000


def kind(settings: script.Settings) -> Hashable:
  """What lives have in common that can be lived again in one process."""
  return (
    len(settings.cores),
    tuple(sorted(settings.environ.items())),
    *(settings.topology, settings.total_tokens, settings.present),
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
        _command(settings, run_dir, scratch),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=surroundings.environ(settings.environ),
        text=True,
      )
    os.sched_setaffinity(self._process.pid, cores)

  def ask(self, life: script.LifeId, do: str, **fields: Any) -> dict[str, Any]:
    """Sends one command for a life and waits for its answer.

    Raises:
      UserError: it could not be done.
    """
    assert self._process.stdin and self._process.stdout
    try:
      command = {"life": life, "do": do, **fields}
      self._process.stdin.write(json.dumps(command) + "\n")
      self._process.stdin.flush()
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ""
    if not line:
      raise errors.UserError(
        f"replay of {life}", self._last_words(), f"see {self._log}"
      )
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
      raise errors.UserError(
        f"replay of {life}", answer["error"], f"see {self._log}"
      )
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


def _command(
  settings: script.Settings,
  run_dir: pathlib.Path,
  scratch: pathlib.Path,
) -> list[str]:
  facts: Mapping[str, Any] = {
    "run_dir": run_dir,
    "scratch": scratch,
    "topology": settings.topology,
    "total_tokens": settings.total_tokens,
    "present": json.dumps(settings.present),
  }
  words = [f"--{name}={value}" for name, value in facts.items()]
  return [sys.executable, "-m", "diloco.replay.worker", *words]
