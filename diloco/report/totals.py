"""Running totals of a run, kept beside its tapes: what a view is so far.

Reading the record of a month takes long; its totals are small. So whoever has
read on for a while leaves the view behind, with how far each file was read, in
`tape/totals.json`, and the next reader goes on from there. Nothing depends on
it: without it, or if it is damaged or not of these files, all is read again.
"""

import array
import base64
import collections
import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

from diloco.report import island_view, series, sessions
from diloco.report import view as view_lib
from diloco.tape import reader, recorder

FILE_NAME = "totals.json"
_FORMAT = "diloco-totals-4"
_EVERY_BYTES = 8 << 20  # of the record, from one time they are kept to the next
_TAIL_BYTES = 256

# Tuples of these kinds, and objects with attributes.
_TUPLES = {
  kind.__name__: kind for kind in (view_lib.Eval, island_view.RecentStep)
}
_OBJECTS: dict[str, type[Any]] = {
  kind.__name__: kind
  for kind in (
    *(view_lib.RunView, view_lib.Merges, island_view.IslandView),
    *(island_view.Life, series.Series, series.Amounts),
    *(sessions.Sessions, sessions.Session),
  )
}


@dataclasses.dataclass
class Reading:
  """A view, and where to read on."""

  view: view_lib.RunView  # of all lines that the follower has returned
  follower: reader.Follower  # of the run's record
  kept_bytes: int = 0  # how much of the record the kept totals are of


def begin(run_dir: str | os.PathLike[str]) -> Reading:
  """Returns the view that was kept, or one of nothing yet."""
  try:
    reading = _restore(pathlib.Path(run_dir))
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    reading = Reading(view_lib.RunView(), reader.Follower(run_dir))
  reading.view.config = view_lib.read_config(run_dir)
  return reading


def catch_up(run_dir: str | os.PathLike[str]) -> view_lib.RunView:
  """Returns the view of all there is, and keeps it if that was much."""
  reader.check_directory(run_dir)
  reading = begin(run_dir)
  reading.view.update(reading.follower.news())
  keep(run_dir, reading)
  return reading.view


def keep(run_dir: str | os.PathLike[str], reading: Reading) -> None:
  """Leaves the view behind if much was read since it was left last."""
  read = reading.follower.num_bytes
  if read < reading.kept_bytes + _EVERY_BYTES:
    return
  reading.kept_bytes = read
  root = pathlib.Path(run_dir)
  position = reading.follower.position
  body = json.dumps(
    {
      "position": position,
      "tails": {name: _tail(root / name, p[0]) for name, p in position.items()},
      "view": _encoded(reading.view),
    }
  )
  content = json.dumps(
    {"format": _FORMAT, "crc32": zlib.crc32(body.encode()), "body": body}
  )
  path = root / recorder.TAPE_DIR / FILE_NAME
  temporary = path.with_suffix(f".{os.getpid()}.tmp")
  try:
    temporary.write_text(content)
    temporary.replace(path)
  except OSError:  # no room, or not ours to write: read again the next time
    temporary.unlink(missing_ok=True)


def _restore(root: pathlib.Path) -> Reading:
  """Raises one of many errors if there is nothing to go on from."""
  path = root / recorder.TAPE_DIR / FILE_NAME
  content = json.loads(path.read_text())
  text = content["body"]
  known = content["format"], content["crc32"]
  if known != (_FORMAT, zlib.crc32(text.encode())):
    raise ValueError("not of this format, or damaged")
  body = json.loads(text)
  for name, (offset, *_) in body["position"].items():
    if _tail(root / name, offset) != body["tails"][name]:
      raise ValueError(f"{name} is not the file that was read")
  view = _decoded(body["view"])
  island = island_view.IslandView(0)
  pairs = [(one, island) for one in view.islands.values()]
  for made, new in [(view, view_lib.RunView()), *pairs]:
    if vars(made).keys() != vars(new).keys():
      raise ValueError("another version kept it")
  follower = reader.Follower(root, body["position"])
  return Reading(view, follower, follower.num_bytes)


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
  name = type(value).__name__
  if name in _TUPLES or isinstance(value, tuple):
    return [name, [_encoded(item) for item in value]]
  if name in _OBJECTS:
    return [name, {k: _encoded(v) for k, v in vars(value).items()}]
  match value:
    case array.array():
      return ["array", base64.b64encode(value.tobytes()).decode()]
    case collections.deque():
      return ["deque", [value.maxlen, [_encoded(item) for item in value]]]
    case list():
      return ["list", [_encoded(item) for item in value]]
    case pathlib.Path():
      return ["path", os.fspath(value)]
    case dict():  # a Counter too
      pairs = [[_encoded(k), _encoded(v)] for k, v in value.items()]
      return [name, pairs]
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
  "path": pathlib.Path,
  "dict": _pairs,
  "Counter": lambda pairs: collections.Counter(_pairs(pairs)),
}
