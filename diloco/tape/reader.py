"""Readers of the run's record: all at once, or as it grows.

A line counts once its newline is written. A last line without one is torn
(its writer was killed) or under way, and is left for a later poll. A line
that is whole and yet no JSON object, or lacks what `diloco.tape.schema` asks
for, is a *problem*: it is named with file and line, and the lines around it are
read all the same.
"""

import dataclasses
import functools
import heapq
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from diloco import errors
from diloco.tape import recorder, schema

Line = dict[str, Any]
Fault = Callable[[Line], str]  # what is wrong with a line; empty if nothing

_TAPE_NAME = re.compile(r"(?P<role>.+)-(?P<incarnation>\d+)\.jsonl")
_METRICS_NAME = re.compile(r"island-(?P<island>\d+)\.jsonl")


@dataclasses.dataclass(frozen=True)
class Record:
  """Lines of a run, whole or a part of them.

  Attributes:
    events: tape lines of all roles. Lines of one role stand as written; roles
      are interleaved by wall time, which is good for pictures only.
    metrics: metric lines by island, as written.
    problems: broken lines, one error each, not raised.
  """

  events: list[Line]
  metrics: dict[int, list[Line]]
  problems: list[errors.UserError]

  def __bool__(self) -> bool:
    return bool(self.events or self.metrics or self.problems)


def read(run_dir: str | os.PathLike[str], *, strict: bool = False) -> Record:
  """Reads all tapes and metric logs of a run.

  Args:
    run_dir: directory of the run; without tapes the record is empty.
    strict: raise the first broken line instead of collecting it.

  Returns:
    The record.

  Raises:
    UserError: `run_dir` is no directory, or a line is broken and `strict`.
  """
  root = pathlib.Path(run_dir)
  if not root.is_dir():
    raise errors.UserError(
      f"run directory {root}",
      "there is no such directory",
      "give the directory a run was started with",
    )
  record = Follower(root).poll()
  if strict and record.problems:
    raise record.problems[0]
  return record


class Follower:
  """Reads a run's record piece by piece; each line is returned once."""

  def __init__(self, run_dir: str | os.PathLike[str]):
    """Starts before the first line of every file; files may come later."""
    self._root = pathlib.Path(run_dir)
    self._files: dict[pathlib.Path, _LineReader] = {}

  def poll(self) -> Record:
    """Returns what was written since the last poll."""
    problems: list[errors.UserError] = []
    roles: dict[str, list[Line]] = {}
    for match, path in _listed(self._root / recorder.TAPE_DIR, _TAPE_NAME):
      role = match["role"]
      fault: Fault = functools.partial(
        schema.fault_of_event, role=role, incarnation=int(match["incarnation"])
      )
      lines = self._lines(path, "event", fault, problems)
      roles.setdefault(role, []).extend(lines)
    metrics: dict[int, list[Line]] = {}
    folder = self._root / recorder.METRICS_DIR
    for match, path in _listed(folder, _METRICS_NAME):
      fault = schema.fault_of_metric
      if steps := self._lines(path, "step", fault, problems):
        metrics[int(match["island"])] = steps
    return Record(interleave(roles.values()), metrics, problems)

  def _lines(
    self,
    path: pathlib.Path,
    needed: str,
    fault: Fault,
    problems: list[errors.UserError],
  ) -> list[Line]:
    reader = self._files.setdefault(path, _LineReader(path, needed, fault))
    return reader.read(problems)


def interleave(roles: Iterable[list[Line]]) -> list[Line]:
  """Merges lists of lines by wall time, keeping the order within each.

  A clock that was set back does not reorder a list: a line counts as no
  earlier than the line before it.
  """
  return [line for _, _, line in heapq.merge(*map(_keyed, roles, _count()))]


def _count() -> Iterator[int]:
  number = 0
  while True:
    yield number
    number += 1


def _keyed(
  lines: list[Line], role: int
) -> Iterator[tuple[float, tuple[int, int], Line]]:
  latest = 0.0
  for position, line in enumerate(lines):
    latest = max(latest, line["wall_secs"])
    yield latest, (role, position), line


def _listed(
  folder: pathlib.Path, pattern: re.Pattern[str]
) -> list[tuple[re.Match[str], pathlib.Path]]:
  """Returns the files whose names match, incarnations in order."""
  try:
    names = os.listdir(folder)
  except FileNotFoundError:
    return []
  found = [m for m in map(pattern.fullmatch, names) if m]
  found.sort(key=lambda m: [(len(g), g) for g in m.groups()])
  return [(m, folder / m.string) for m in found]


class _LineReader:
  """One file, read up to its last whole line."""

  def __init__(self, path: pathlib.Path, needed: str, fault: Fault):
    self._path = path
    self._needed = needed
    self._fault = fault
    self._offset = 0
    self._count = 0  # lines before the offset

  def read(self, problems: list[errors.UserError]) -> list[Line]:
    try:
      if os.stat(self._path).st_size <= self._offset:
        return []
      with open(self._path, "rb") as file:
        file.seek(self._offset)
        data = file.read()
    except FileNotFoundError:
      return []
    whole = data[: data.rfind(b"\n") + 1]
    self._offset += len(whole)
    lines = []
    for text in whole.split(b"\n")[:-1]:
      self._count += 1
      line = self._parse(text)
      if isinstance(line, dict):
        lines.append(line)
      else:
        problems.append(line)
    return lines

  def _parse(self, text: bytes) -> Line | errors.UserError:
    try:
      line = json.loads(text)
    except ValueError:
      line = None
    why = f"it is no JSON object with {self._needed!r} and numeric 'wall_secs'"
    if (
      isinstance(line, dict)
      and self._needed in line
      and isinstance(line.setdefault("wall_secs", 0.0), int | float)
    ):
      why = self._fault(line)
    if not why:
      return line
    return errors.UserError(
      f"{self._path}, line {self._count}",
      why,
      "the line is left out; restore the file or delete that line",
    )
