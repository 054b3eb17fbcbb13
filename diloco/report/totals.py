"""Running totals of a run, kept beside its tapes.

Reading the record of a month takes long; its totals are small. So whoever has
read on for a while leaves the view and the ledger's history behind, with how
far each file was read, in `tape/totals.json`, and the next reader goes on from
there. Nothing depends on it: without it, or if it is damaged, not of these
files or of another version of the code, all is read again.
"""

import array
import base64
import collections
import copy
import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from diloco.report import island_view, series, sessions
from diloco.report import view as view_lib
from diloco.tape import (
  evidence,
  fates,
  folding,
  history,
  painting,
  reader,
  recorder,
  schema,
)

FILE_NAME = "totals.json"
_EVERY_BYTES = 8 << 20  # of the record, from one time they are kept to the next
_TIMES = 2  # or so many times what was kept last: a controller has more to do
_TAIL_BYTES = 256

_MODULES = (
  *(view_lib, island_view, series, sessions, reader, schema),
  *(history, evidence, folding, fates, painting),
)


def _named(*kinds: type[Any]) -> dict[str, type[Any]]:
  return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


_TUPLES = _named(
  *(view_lib.Eval, island_view.RecentStep),
  *(evidence.Contribution, evidence.Merge, evidence.Loss),
  painting.LifeSpan,
)
_OBJECTS = _named(
  *(view_lib.RunView, view_lib.Merges, island_view.IslandView),
  *(island_view.Life, series.Series, series.Amounts),
  *(sessions.Sessions, sessions.Session, history.History),
  *(evidence.Life, evidence.Folded, evidence.FragmentHistory),
  evidence.StepLog,
)


@dataclasses.dataclass
class Reading:
  """A view, and where to read on.

  Attributes:
    view: of all lines that the follower has returned.
    follower: of the run's record.
    past: of the same lines, for the ledger; None once it was reopened.
    due_bytes: how much of the record is read when totals are kept next.
    run_dir: of the run.
    torn: whether a look was cut short, by an interrupt or a mistake: then the
      follower is beyond what was taken, and nothing is kept any more.
  """

  view: view_lib.RunView
  follower: reader.Follower
  past: history.History | None
  due_bytes: int
  run_dir: pathlib.Path
  torn: bool = False

  def read_on(self, *, again: bool = False) -> reader.Record:
    """Takes what is new; returns it, to be read `again` or not."""
    torn, self.torn = self.torn, True
    record = self.follower.poll() if again else self.follower.news()
    self.view.update(record, self.past)
    if self.past is not None and self.past.reopened:
      self.past = None
    self.torn = torn
    return record

  @property
  def is_due(self) -> bool:
    """Whether it is to be kept: much was read since it was kept last."""
    return not self.torn and self.follower.num_bytes >= self.due_bytes

  def whole_history(self) -> history.History:
    """Returns the history; reads all again if it was reopened."""
    if self.past is None:
      position = self.follower.position
      self.past = history.read(reader.stream(self.run_dir, until=position))
      self.due_bytes = _due(0)
    return self.past


def begin(run_dir: str | os.PathLike[str]) -> Reading:
  """Returns the view that was kept, or one of nothing yet."""
  try:
    reading = _restore(pathlib.Path(run_dir))
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    reading = Reading(
      view_lib.RunView(),
      reader.Follower(run_dir),
      history.History(),
      due_bytes=_due(0),
      run_dir=pathlib.Path(run_dir),
    )
  reading.view.config = view_lib.read_config(run_dir)
  return reading


def catch_up(
  run_dir: str | os.PathLike[str], reading: Reading | None = None
) -> Reading:
  """Returns a reading of all there is, and keeps it if that was much."""
  reader.check_directory(run_dir)
  if reading is None or reading.torn:
    reading = begin(run_dir)
  reading.read_on()
  keep(reading)
  return reading


def keep(reading: Reading) -> None:
  """Leaves the view behind if much was read since it was left last."""
  read = reading.follower.num_bytes
  if not reading.is_due:
    return
  reading.due_bytes = _due(read)
  body = "\n".join(_lines(reading))
  head = json.dumps({"code": _CODE, "crc32": zlib.crc32(body.encode())})
  content = f"{head}\n{body}"
  reading.due_bytes = _due(read, len(content))
  path = reading.run_dir / recorder.TAPE_DIR / FILE_NAME
  temporary = path.with_suffix(".tmp")  # two at once would be seen as damage
  try:
    temporary.write_text(content)
    temporary.replace(path)
  except OSError:  # no room, or not ours to write: read again the next time
    temporary.unlink(missing_ok=True)


def _lines(reading: Reading) -> Iterator[str]:
  """What is kept; a line for each fragment, for no thread runs beside one."""
  position, past = reading.follower.position, copy.copy(reading.past)
  fragments = {} if past is None else past.fragments
  if past is not None:
    past.fragments = {}
  tails = {n: _tail(reading.run_dir / n, p[0]) for n, p in position.items()}
  yield json.dumps(
    {
      "position": position,
      "tails": tails,
      "view": _encoded(reading.view),
      "past": _encoded(past),
    }
  )
  for item in fragments.items():
    yield json.dumps(_encoded(item))


def _due(read: int, size: int = 0) -> int:
  """When totals are kept next, after some of this size."""
  return read + max(_EVERY_BYTES, _TIMES * size)


def _restore(root: pathlib.Path) -> Reading:
  """Raises one of many errors if there is nothing to go on from."""
  path = root / recorder.TAPE_DIR / FILE_NAME
  kept = path.read_text()
  first, _, text = kept.partition("\n")
  head = json.loads(first)
  if head != {"code": _CODE, "crc32": zlib.crc32(text.encode())}:
    raise ValueError("of another version, or damaged")
  first, *fragments = text.split("\n")
  body = json.loads(first)
  for name, (offset, _, broken, *_) in body["position"].items():
    if broken:  # somebody may have put it right meanwhile
      raise ValueError(f"{name} has broken lines")
    if _tail(root / name, offset) != body["tails"][name]:
      raise ValueError(f"{name} is not the file that was read")
  view, past = _decoded(body["view"]), _decoded(body["past"])
  if past is not None:
    past.fragments = dict(_decoded(json.loads(each)) for each in fragments)
  follower = reader.Follower(root, body["position"])
  due = _due(follower.num_bytes, len(kept))
  return Reading(view, follower, past, due, root)


def _checksum() -> int:
  """Of the code that totals are made by."""
  files = [pathlib.Path(str(module.__file__)) for module in _MODULES]
  return zlib.crc32(b"".join(path.read_bytes() for path in files))


_CODE = _checksum()  # of what is loaded; the files may be others later


def _tail(path: pathlib.Path, offset: int) -> int:
  """Checksum of the last bytes before `offset`."""
  with open(path, "rb") as file:
    start = max(0, offset - _TAIL_BYTES)
    file.seek(start)
    data = file.read(offset - start)
  if len(data) < offset - start:
    raise ValueError(f"{path} is shorter than it was")
  return zlib.crc32(data)


def _encoded(value: Any) -> Any:
  """Plain JSON values; what JSON does not have becomes ["kind", content]."""
  kind = type(value)
  name = f"{kind.__module__}.{kind.__qualname__}"
  if name in _TUPLES:
    return [name, [_encoded(item) for item in value]]
  if name in _OBJECTS:
    return [name, {k: _encoded(v) for k, v in vars(value).items()}]
  match value:
    case array.array():
      return ["array", base64.b64encode(value.tobytes()).decode()]
    case collections.deque():
      return ["deque", [value.maxlen, [_encoded(item) for item in value]]]
    case list() | tuple() | set() if kind.__name__ in _PLAIN:
      return [kind.__name__, [_encoded(item) for item in value]]
    case pathlib.Path():
      return ["path", os.fspath(value)]
    case dict():  # a Counter too
      pairs = [[_encoded(k), _encoded(v)] for k, v in value.items()]
      return [kind.__name__, pairs]
  assert value is None or isinstance(value, str | int | float), value
  return value


def _decoded(value: Any) -> Any:
  if not isinstance(value, list):
    return value
  name, content = value
  if name in _OBJECTS:
    made = object.__new__(_OBJECTS[name])
    vars(made).update({k: _decoded(v) for k, v in content.items()})
    return made
  if name in _TUPLES:
    return _TUPLES[name](*map(_decoded, content))
  return _PLAIN[name](content)


def _pairs(pairs: list[Any]) -> dict[Any, Any]:
  return {_decoded(k): _decoded(v) for k, v in pairs}


_PLAIN: dict[str, Callable[[Any], Any]] = {
  "array": lambda text: array.array("d", base64.b64decode(text)),
  "deque": lambda content: collections.deque(
    map(_decoded, content[1]), maxlen=content[0]
  ),
  "list": lambda content: list(map(_decoded, content)),
  "tuple": lambda content: tuple(map(_decoded, content)),
  "set": lambda content: set(map(_decoded, content)),
  "path": pathlib.Path,
  "dict": _pairs,
  "Counter": lambda pairs: collections.Counter(_pairs(pairs)),
}
