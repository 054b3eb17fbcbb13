"""Readers of the run's record: all at once, line by line, or as it grows.

A line counts once its newline is written. A last line without one is torn
(its writer was killed) or under way, and is left for a later poll. A line
that is whole and yet no JSON object, or is not what `diloco.tape.schema` asks
for, is *broken*: its file is named as a problem, with how many of its lines are
broken and what is wrong with the first, and the lines around it are read all
the same.

`read` and `Follower.poll` hold what they read; `stream` and `Follower.news`
hold one line of each role, however long the run was.
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from diloco import errors
from diloco.tape import recorder, schema

Line = dict[str, Any]
Fault = Callable[[Line], str]  # what is wrong with a line; empty if nothing

_TAPE_NAME = re.compile(r"(?P<role>.+)-(?P<incarnation>\d{1,6})\.jsonl")
_BLOCK_BYTES = 1 << 18  # read at once, from the end
_METRICS_NAME = re.compile(r"island-(?P<island>\d{1,4})\.jsonl")


class BrokenLinesError(errors.UserError):
  """A file of the record with broken lines, or one that cannot be read.

  Attributes:
    path: of the file.
    count: how many lines are known to be broken.
  """

  def __init__(self, path: pathlib.Path, number: int, why: str, count: int):
    """Names one broken line, of `count`; 0: the whole file."""
    more = f" (one of {count} broken lines)" if count > 1 else ""
    super().__init__(
      f"{path}, line {number}{more}" if number else f"{path}",
      why,
      "what is broken is left out; restore the file or delete such lines",
    )
    self.path = path
    self.count = count


@dataclasses.dataclass(frozen=True)
class Record:
  """Lines of a run, whole or a part of them.

  Attributes:
    events: tape lines of all roles. Lines of one role stand as written; roles
      are interleaved by wall time, which is good for pictures only.
    metrics: metric lines by island, as written.
    problems: files with broken lines, one error each, not raised.
    sound: how many lines of each file were sound, from its beginning on; like
      `problems` it is whole once all lines were taken.
  """

  events: Iterable[Line]
  metrics: Mapping[int, Iterable[Line]]
  problems: list[BrokenLinesError]
  sound: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Whole(Record):
  """A record in memory."""

  events: list[Line]
  metrics: dict[int, list[Line]]


def read(run_dir: str | os.PathLike[str], *, strict: bool = False) -> Whole:
  """Reads all tapes and metric logs of a run into memory; without any: empty.

  Args:
    run_dir: directory of the run.
    strict: raise the first file with broken lines instead of collecting it.

  Raises:
    UserError: `run_dir` is no directory, or a line is broken and `strict`.
  """
  record = Follower(check_directory(run_dir)).poll()
  if strict and record.problems:
    raise record.problems[0]
  return record


def stream(
  run_dir: str | os.PathLike[str],
  only_role: str | None = None,
  until: Mapping[str, list[Any]] | None = None,
) -> Record:
  """Returns all that is written by now, to be read as often as one likes.

  `events` and `metrics` read the files anew each time they are iterated over,
  always up to the same ends; `problems` has what the iterations so far came
  upon. With `only_role` there are its tapes alone, and no metrics; with
  `until`, all that a follower at that position has returned.

  Raises:
    UserError: `run_dir` is no directory.
  """
  root = check_directory(run_dir)
  found = _Found()

  def end_of(path: pathlib.Path) -> int:
    if until is None:
      return _size(path)
    return int(until.get(_name(path), [0])[0])

  tapes = [
    (path, role, incarnation, end_of(path))
    for path, role, incarnation in _tapes(root)
    if only_role in (None, role)
  ]
  logs = [] if only_role else _metric_logs(root)
  metrics = {island: (path, end_of(path)) for path, island in logs}

  def events(needles: tuple[bytes, ...]) -> Iterator[Line]:
    roles: dict[str, list[Iterator[Line]]] = {}
    for path, role, incarnation, end in tapes:
      file = _tape_file(path, role, incarnation)
      roles.setdefault(role, []).append(file.lines(found, end, needles))
    return interleave(map(itertools.chain.from_iterable, roles.values()))

  def steps(
    path: pathlib.Path, end: int, needles: tuple[bytes, ...]
  ) -> Iterator[Line]:
    return _metric_file(path).lines(found, end, needles)

  return Record(
    _Again(events),
    {
      i: _Again(functools.partial(steps, *place))
      for i, place in metrics.items()
      if place[1]
    },
    found.problems,
    found.sound,
  )


def select(lines: Iterable[Line], names: Collection[str]) -> Iterator[Line]:
  """Returns the lines of some events, from a stream without parsing others."""
  if isinstance(lines, _Again):
    lines = lines.begin(tuple(f'"{name}"'.encode() for name in names))
  return (line for line in lines if line["event"] in names)


def newest(
  run_dir: str | os.PathLike[str], role: str, names: Collection[str]
) -> Iterator[Line]:
  """Yields a role's lines of some events, the last first, as far as asked."""
  needles = tuple(f'"{name}"'.encode() for name in names)
  for path, of, incarnation in reversed(_tapes(check_directory(run_dir))):
    if of == role:
      lines = _tape_file(path, role, incarnation).backwards(needles)
      yield from (line for line in lines if line["event"] in names)


class _Again:
  """An iterable that begins anew each time.

  Attributes:
    begin: makes an iterator; given needles, one of lines that have one of them.
  """

  def __init__(self, begin: Callable[[tuple[bytes, ...]], Iterator[Line]]):
    self.begin = begin

  def __iter__(self) -> Iterator[Line]:
    return self.begin(())


class _Found:
  """What came of reading some files."""

  def __init__(self) -> None:
    self.problems: list[BrokenLinesError] = []
    self.sound: dict[str, int] = {}

  def broken(self, problem: BrokenLinesError) -> None:
    """Takes the newest word on a file: one problem for each."""
    for i, known in enumerate(self.problems):
      if known.path == problem.path:
        self.problems[i] = problem
        return
    self.problems.append(problem)


class Follower:
  """Reads a run's record piece by piece; each line is returned once."""

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    position: Mapping[str, list[Any]] | None = None,
  ):
    """Starts before the first line of every file, or at an earlier `position`.

    Files may come later, and the directory of the run too.
    """
    self._root = pathlib.Path(run_dir)
    self._position = dict(position or {})
    self._files: dict[pathlib.Path, _File] = {}

  @property
  def position(self) -> dict[str, list[Any]]:
    """How far each file is read, by name.

    Bytes, lines, how many are broken, number of the first and what it lacks.
    """
    read = {
      file.name: [file.offset, file.count, file.broken, *file.first]
      for file in self._files.values()
    }
    return self._position | read

  @property
  def num_bytes(self) -> int:
    """How much is read, of all files."""
    return sum(offset for offset, *_ in self.position.values())

  def poll(self) -> Whole:
    """Returns what was written since the last poll, as lists."""
    news = self.news()
    events = list(news.events)
    metrics = {i: list(lines) for i, lines in news.metrics.items()}
    metrics = {i: lines for i, lines in metrics.items() if lines}
    return Whole(events, metrics, news.problems, news.sound)

  def news(self) -> Record:
    """Returns what was written since the last poll, to be read once, now."""
    found = _Found()
    roles: dict[str, list[Iterator[Line]]] = {}
    for path, role, incarnation in _tapes(self._root):
      if path not in self._files:
        self._add(_tape_file(path, role, incarnation))
      roles.setdefault(role, []).append(self._files[path].lines(found))
    metrics = {}
    for path, island in _metric_logs(self._root):
      if path not in self._files:
        self._add(_metric_file(path))
      metrics[island] = self._files[path].lines(found)
    lines = interleave(map(itertools.chain.from_iterable, roles.values()))
    return Record(lines, metrics, found.problems, found.sound)

  def _add(self, file: "_File") -> None:
    if place := self._position.get(file.name):
      file.offset, file.count, file.broken, *first = place
      file.first = (first[0], first[1])
    self._files[file.path] = file


def interleave(roles: Iterable[Iterable[Line]]) -> Iterator[Line]:
  """Merges lines of several roles by wall time, keeping the order within each.

  A clock that was set back does not reorder a role: a line comes right after
  the one before it if it is older.
  """
  keyed = map(_keyed, roles, itertools.count())
  return (line for _, _, line in heapq.merge(*keyed))


def together(record: Record) -> Iterator[tuple[Line, int | None]]:
  """Yields all lines by wall time, those of a metric log with its island."""
  logs = list(record.metrics)
  lines = [record.events, *record.metrics.values()]
  keyed = map(_keyed, lines, itertools.count())
  for _, (place, _), line in heapq.merge(*keyed):
    yield line, logs[place - 1] if place else None


def _keyed(
  lines: Iterable[Line], role: int
) -> Iterator[tuple[float, tuple[int, int], Line]]:
  for position, line in enumerate(lines):
    yield line["wall_secs"], (role, position), line


def check_directory(run_dir: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the path of a run; refuses one that is not there."""
  root = pathlib.Path(run_dir)
  if not root.is_dir():
    raise errors.UserError(
      f"run directory {root}",
      "there is no such directory",
      "give the directory a run was started with",
    )
  return root


def _tapes(root: pathlib.Path) -> list[tuple[pathlib.Path, str, int]]:
  """Paths, roles and incarnations of a run's tapes."""
  found = _listed(root / recorder.TAPE_DIR, _TAPE_NAME)
  return [(p, match["role"], int(match["incarnation"])) for match, p in found]


def _metric_logs(root: pathlib.Path) -> list[tuple[pathlib.Path, int]]:
  found = _listed(root / recorder.METRICS_DIR, _METRICS_NAME)
  return [(path, int(match["island"])) for match, path in found]


def _listed(
  folder: pathlib.Path, pattern: re.Pattern[str]
) -> list[tuple[re.Match[str], pathlib.Path]]:
  """Returns the files whose names match, incarnations in order."""
  try:
    names = os.listdir(folder)
  except (FileNotFoundError, NotADirectoryError):
    return []
  found = [m for m in map(pattern.fullmatch, names) if m]
  found.sort(key=lambda m: [(len(g), g) for g in m.groups()])
  return [(m, folder / m.string) for m in found]


def _tape_file(path: pathlib.Path, role: str, incarnation: int) -> "_File":
  fault: Fault = functools.partial(
    schema.fault_of_event, role=role, incarnation=incarnation
  )
  return _File(path, "event", fault)


def _metric_file(path: pathlib.Path) -> "_File":
  return _File(path, "step", schema.fault_of_metric)


def _name(path: pathlib.Path) -> str:
  return f"{path.parent.name}/{path.name}"


def _size(path: pathlib.Path) -> int:
  try:
    return os.stat(path).st_size
  except OSError:
    return 0


class _File:
  """One file, read line by line up to its last whole line."""

  def __init__(self, path: pathlib.Path, needed: str, fault: Fault):
    self.path = path
    self.name = _name(path)
    self.offset = 0
    self.count = 0  # lines before the offset
    self.broken = 0  # of them
    self._needed = needed
    self._fault = fault
    self.first = (0, "")  # that was broken: number and what is wrong

  def lines(
    self,
    found: _Found,
    end: int | None = None,
    needles: tuple[bytes, ...] = (),
  ) -> Iterator[Line]:
    """Yields the sound lines that are left, before byte `end`.

    With needles, only lines that have one of them, and nothing is found out
    about the others.
    """
    if _size(self.path) <= self.offset:
      return
    try:
      with open(self.path, "rb") as file:
        yield from self._left(file, found, end, needles)
    except FileNotFoundError:
      return  # gone since it was listed
    except OSError as error:
      why = f"it cannot be read ({error.strerror})"
      found.broken(BrokenLinesError(self.path, 0, why, self.broken))
      return
    if not needles:
      found.sound[self.name] = self.count - self.broken

  def _left(
    self,
    file: BinaryIO,
    found: _Found,
    end: int | None,
    needles: tuple[bytes, ...],
  ) -> Iterator[Line]:
    file.seek(self.offset)
    while text := file.readline():
      if not text.endswith(b"\n") or (
        end is not None and self.offset + len(text) > end
      ):
        break
      self.offset += len(text)
      self.count += 1
      if needles and not any(needle in text for needle in needles):
        continue
      line, why = self._parse(text)
      if why:
        self._tell(why, found)
      else:
        yield line

  def backwards(self, needles: tuple[bytes, ...]) -> Iterator[Line]:
    """Yields the sound lines that have one of the needles, the last first."""
    with contextlib.suppress(OSError), open(self.path, "rb") as file:
      left, rest, torn = _size(self.path), b"", True
      while left > 0:
        begin = max(left - _BLOCK_BYTES, 0)
        file.seek(begin)
        texts = (file.read(left - begin) + rest).split(b"\n")
        if torn:
          texts.pop()  # what follows the last newline
          torn = not texts
        rest = texts.pop(0) if begin and texts else b""
        left = begin
        for text in reversed(texts):
          if any(needle in text for needle in needles):
            line, why = self._parse(text)
            if not why:
              yield line

  def _tell(self, why: str, found: _Found) -> None:
    self.broken += 1
    if not self.first[0]:
      self.first = self.count, why
    found.broken(BrokenLinesError(self.path, *self.first, self.broken))

  def _parse(self, text: bytes) -> tuple[Line, str]:
    """Returns a line, and what is wrong with it."""
    try:
      line = json.loads(text)
    except (ValueError, RecursionError):
      line = None
    if not isinstance(line, dict) or self._needed not in line:
      return {}, f"it is no JSON object with {self._needed!r}"
    if b"\\ud" in text.lower() and not _is_unicode(line):
      return {}, "it holds text that is no Unicode"
    line.setdefault("wall_secs", 0.0)
    return line, self._fault(line)


def _is_unicode(line: Line) -> bool:
  """Whether no half of a surrogate pair stands alone."""
  try:
    json.dumps(line, ensure_ascii=False).encode()
  except UnicodeEncodeError:
    return False
  return True
