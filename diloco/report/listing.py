"""The runs below a directory, each told from the ends of its files.

No tape is read whole, so a folder of long runs is listed at once.
"""

import collections
import contextlib
import datetime
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from diloco import errors, process
from diloco.report import figures, liveness, roster, sessions, summary
from diloco.tape import events, recorder, schema

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16
_AT_ONCE = 24  # stores asked side by side
_PATIENCE_SECS = 10.0  # for all of them
_TURN_SECS = 1.0  # then as many more are asked


def runs(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the runs in a directory and below it, by their path.

  Args:
    folder: where to look; a run itself is listed alone.

  Returns:
    Plain JSON values: `dir`, `name`, `status`, `tokens`, `tokens_budget`,
    `final_eval_loss` in nats, `wall_secs`, the wall time of its last line, and
    of a run that did not end `roles`, the state of each (see `roster`). What is
    not known is None, as where a store gives no answer in ten seconds.

  Raises:
    UserError: there is no such directory.
    OSError: it cannot be looked into.
  """
  if not pathlib.Path(folder).is_dir():
    raise errors.UserError(
      f"the directory {folder}", "there is none", "name one that holds runs"
    )
  os.scandir(folder).close()  # below it, who may not look is passed over
  found = [_facts(run_dir) for run_dir in below(folder)]
  unended = [
    one["dir"]
    for one in found
    if one["status"] in ("running", sessions.CRASHED)
  ]
  roles = _roles(unended)
  return [one | {"roles": roles.get(one["dir"])} for one in found]


def _roles(run_dirs: Sequence[str]) -> dict[str, dict[str, str]]:
  """The roles' states of runs whose stores answer in time, by directory."""
  found = {}
  waiting = collections.deque(run_dirs)
  unanswered = set(run_dirs)

  def ask() -> None:
    while waiting:
      try:
        run_dir = waiting.popleft()
      except IndexError:
        return  # another has taken the last one
      try:
        if roles := roster.look(run_dir):
          found[run_dir] = {role: one["state"] for role, one in roles.items()}
      except errors.UserError:
        pass  # another run has its store by now
      except Exception as error:  # others are listed all the same
        why = errors.one_line(error)
        logger.warning("roles_unknown dir=%s error=%s", run_dir, why)
      unanswered.discard(run_dir)

  # They end with the process: a pool would be waited for.
  threads: list[threading.Thread] = []
  now = time.monotonic()
  deadline = now + _PATIENCE_SECS
  while True:
    # Where stores hang, others take the place of those that wait for them.
    new = [
      threading.Thread(target=ask, daemon=True)
      for _ in range(min(_AT_ONCE, len(waiting)))
    ]
    for thread in new:
      thread.start()
    threads += new
    turn = min(deadline, now + _TURN_SECS)
    for thread in threads:
      thread.join(max(0.0, turn - time.monotonic()))
    now = time.monotonic()
    if now >= deadline or not any(thread.is_alive() for thread in threads):
      break
  for run_dir in sorted(unanswered.copy()):
    logger.warning("roles_unknown dir=%s error=no answer in time", run_dir)
  return found.copy()


def below(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Yields the directories of runs in a directory and below it."""
  for place, names, _ in os.walk(folder):
    run_dir = pathlib.Path(place)
    # Others have a config.json too.
    if _is_run(run_dir):
      names.clear()
      yield run_dir
    names[:] = sorted(name for name in names if not name.startswith("."))


def _is_run(folder: pathlib.Path) -> bool:
  try:
    kept = (folder / process.STORE).is_dir() or process.origin(folder)
    return process.holds_run(folder) and bool(kept)
  except OSError:
    return False  # not ours to look into


def _facts(run_dir: pathlib.Path) -> dict[str, Any]:
  facts: dict[str, Any] = {
    "dir": str(run_dir),
    "name": None,
    "status": "unreadable",
    "tokens": None,
    "tokens_budget": None,
    "final_eval_loss": None,
    "wall_secs": None,
    "roles": None,
  }
  with contextlib.suppress(OSError, errors.UserError):
    tapes = list(run_dir.glob(f"{recorder.TAPE_DIR}/*.jsonl"))
    logs = list(run_dir.glob(f"{recorder.METRICS_DIR}/*.jsonl"))
    times = [path.stat().st_mtime for path in (*tapes, *logs)]
    facts["wall_secs"] = max(times, default=None)
    config = process.read_config(run_dir)
    facts |= {
      "name": config.name,
      "tokens": sum(map(_tokens, logs)),
      "tokens_budget": config.total_tokens,
      "status": _status(run_dir, tapes),
    }
  if facts["status"] not in ("unreadable", "running", sessions.CRASHED):
    facts |= _result(run_dir / summary.FILE_NAME)
  return facts


def _status(run_dir: pathlib.Path, tapes: Sequence[pathlib.Path]) -> str:
  if liveness.controller_alive(run_dir):
    return "running"
  own = [
    path
    for path in tapes
    if path.name.startswith("controller-") and path.stat().st_size
  ]  # an empty one is of a controller that was refused
  if not own:
    return "empty"
  newest = max(own, key=lambda path: (len(path.name), path.name))
  ends = [
    line
    for line in _last_lines(newest)
    if line.get("event") == events.RUN_FINISHED
  ]
  return str(ends[-1].get("status")) if ends else sessions.CRASHED


def _tokens(log: pathlib.Path) -> int:
  """What an island has trained, by its last step."""
  for line in reversed(_last_lines(log)):
    tokens = line.get("tokens")
    if tokens is not None and not schema.fault_of_metric(line):
      return int(line["step"] * tokens)
  return 0


def _last_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines in the last bytes of a file, but for broken ones."""
  with path.open("rb") as file:
    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
    texts = file.read().splitlines()
  found = []
  for text in texts:
    try:
      line = json.loads(text)
    except (ValueError, RecursionError):
      continue
    if isinstance(line, dict):
      found.append(line)
  return found


def _result(path: pathlib.Path) -> dict[str, Any]:
  try:
    told = json.loads(path.read_text())
    loss = told["final_eval_loss"]
    return {
      "tokens": int(told["tokens_trained"]),
      "final_eval_loss": None if loss is None else float(loss),
    }
  except (*process.UNREADABLE, OverflowError):
    return {}


def show(found: Sequence[dict[str, Any]]) -> str:
  """Runs as text, one a line, with their directories last, at length."""
  heads = ("state", "alive", "tokens", "of", "bits/token", "last line", "run")
  return figures.columns([heads, *map(_row, found)], right=range(1, 5))


def _row(one: dict[str, Any]) -> tuple[str, ...]:
  alive = when = figures.DASH
  if (roles := one["roles"]) is not None:
    alive = f"{[*roles.values()].count(roster.ALIVE)} of {len(roles)}"
  if one["wall_secs"] is not None:
    moment = datetime.datetime.fromtimestamp(one["wall_secs"])
    when = f"{moment:%Y-%m-%d %H:%M}"
  return (
    one["status"],
    alive,
    figures.count(one["tokens"]),
    figures.count(one["tokens_budget"]),
    figures.number(figures.bits(one["final_eval_loss"]), 4),
    when,
    one["dir"] + (f" ({one['name']})" if one["name"] else ""),
  )
