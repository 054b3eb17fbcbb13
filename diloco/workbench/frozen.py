"""A sweep as it was when it started: every point's whole configuration.

`sweep.json` of a sweep's directory holds them all, each with a checksum, and is
written at once. What became of a point is in `points/NAME.json`; its run, or
what a simulator found, in the directory `NAME`.
"""

import collections
import copy
import dataclasses
import json
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from diloco import config as config_lib
from diloco import errors, hyper, methods, process, typed
from diloco.planning.fleet import flags
from diloco.report import summary

FILE = "sweep.json"
_FORMAT = "diloco-sweep-1"
_NAME = re.compile(r"\w[\w.=,+-]{0,119}", re.A)
_TAKEN = (
  *(FILE, "sweep.lock", "points", "compilation_cache", "table.csv"),
  "control",
)

Kind = Literal["train", "simulate"]


@dataclasses.dataclass(frozen=True)
class Point:
  """One point."""

  name: str  # of its directory
  given: Mapping[str, Any]  # the fields that the sweep file sets
  config: Mapping[str, Any]  # all fields of a run; of a simulation, the flags


@dataclasses.dataclass(frozen=True)
class Sweep:
  """All points."""

  kind: Kind  # what is done with a point
  file: str  # the sweep file's name, and `crc32` its checksum at the start
  crc32: str
  points: tuple[Point, ...]  # in the order of the file

  def islands(self, point: Point) -> int:
    """How many islands a point runs; what is one thread counts as one."""
    if self.kind == "simulate":
      return 1
    config = config_lib.from_mapping(point.config)
    return 1 if config.engine == "virtual" else config.fleet.islands


def build(place: str, points: Sequence[hyper.Point], kind: Kind) -> Sweep:
  """Freezes the points of a sweep file, FILE.py or FILE.py:VARIANT.

  Raises:
    UserError: a point cannot be, two are the same or have one name, or one has
      a name that no directory has.
  """
  path = place.partition(":")[0]
  named = names(points, "point")
  for name in named:
    if not _NAME.fullmatch(name) or name in _TAKEN:
      raise errors.UserError(
        f"the point {typed.show(name)}",
        "it is to be a directory's name, of at most 120 letters, digits and"
        " .=,+-_",
        "give the point a field 'name'",
      )
  twice = [name for name, n in collections.Counter(named).items() if n > 1]
  if twice:
    raise errors.UserError(
      f"the name {twice[0]!r}",
      "two points of the sweep have it",
      "let them differ in a field, or give each a field 'name' of its own",
    )
  configs: Sequence[Mapping[str, Any]] = points
  if kind == "train":
    configs = _configs(place, points, named)
  else:
    for point in points:
      flags.scenario(flags.parser().parse_args(flags.written(point)))
  seen: dict[str, str] = {}
  for name, config in zip(named, configs, strict=True):
    fields = json.dumps(_json({**config, "name": ""}), sort_keys=True)
    if (other := seen.setdefault(fields, name)) != name:
      raise errors.UserError(
        f"the points {other!r} and {name!r}",
        "they differ in nothing but their names",
        "leave one of them out",
      )
  return Sweep(
    kind,
    pathlib.Path(path).name,
    _crc32(pathlib.Path(path).read_bytes()),
    tuple(
      Point(name, _json(given), _json(config))
      for name, given, config in zip(named, points, configs, strict=True)
    ),
  )


def _configs(
  place: str, points: Sequence[hyper.Point], named: Sequence[str]
) -> list[dict[str, Any]]:
  from diloco import launch  # with JAX; a sweep that is gone on with needs none

  # As it was written: what a method leaves out depends on the method.
  base = typed.plain(launch.read_config(place))
  found = []
  for name, point in zip(named, points, strict=True):
    config = copy.deepcopy(base)
    if "method" in point:
      config = methods.exchanged(config, point["method"])
    try:
      for field, value in point.items():
        _set(config, field, value)
      found.append(config_lib.from_mapping(config).to_dict())
    except errors.UserError as error:
      what = f"the point {name!r}: {error.what}"
      raise errors.UserError(what, error.why, error.remedy) from error
  return found


def _set(config: Any, field: str, value: Any) -> None:
  """Sets "a.b[0].c"; what no configuration has is refused afterwards."""
  *parents, last = re.findall(r"[^.\[\]]+", field) or [field]
  node = config
  try:
    for part in parents:
      if isinstance(node, list) or part.isdigit():
        node = node[int(part)]
      else:
        node = node.setdefault(part, {})
    node[int(last) if isinstance(node, list) else last] = value
  except (LookupError, ValueError, TypeError, AttributeError) as error:
    raise errors.UserError(
      f"config.{field}", "there is no such field", "correct its name"
    ) from error


def names(points: Sequence[Mapping[str, Any]], without: str) -> list[str]:
  """Names points by the fields in which they differ; `without` if in nothing.

  A field "name" is a name to take as it is.
  """
  varied = [f for f in differing(points) if f != "name"]
  short = short_names(varied)
  found = []
  for point in points:
    pairs = [f"{short[f]}={_text(point[f])}" for f in varied if f in point]
    found.append(str(point.get("name") or ",".join(pairs) or without))
  return found


def differing(points: Sequence[Mapping[str, Any]]) -> list[str]:
  """Fields whose values are not the same in all points, in their order."""
  fields = dict.fromkeys(field for point in points for field in point)
  missing = object()
  return [
    field
    for field in fields
    if len({repr(point.get(field, missing)) for point in points}) > 1
  ]


def short_names(fields: Sequence[str]) -> dict[str, str]:
  """The shortest ends of dotted names that tell them apart."""
  short = {}
  for field in fields:
    parts = field.split(".")
    ends = [".".join(parts[i:]) for i in reversed(range(len(parts)))]
    others = [f".{other}" for other in fields if other != field]
    free = (e for e in ends if not any(o.endswith(f".{e}") for o in others))
    short[field] = next(free, field)
  return short


def _text(value: Any) -> str:
  if isinstance(value, bool):
    return str(value).lower()
  return re.sub(r"[^\w.+-]+", "-", str(value), flags=re.A).strip("-")


def write(workdir: pathlib.Path, sweep: Sweep) -> None:
  """Writes `sweep.json`, whole or not at all."""
  points = [
    {**dataclasses.asdict(point), "crc32": _crc32(_plain(point))}
    for point in sweep.points
  ]
  content = {"format": _FORMAT, **dataclasses.asdict(sweep), "points": points}
  (workdir / "points").mkdir(parents=True, exist_ok=True)
  summary.replace(workdir / FILE, json.dumps(content, indent=1) + "\n")


def read(workdir: pathlib.Path) -> Sweep:
  """Reads the sweep of a directory.

  Raises:
    UserError: there is none, another version wrote it, or it was changed.
  """
  what = f"the sweep in {workdir}"
  try:
    content = json.loads((workdir / FILE).read_text())
    if content["format"] != _FORMAT:
      raise errors.UserError(
        what,
        f"it has format {content['format']!r}, this version reads {_FORMAT!r}",
        "use the version of diloco that wrote it, or another directory",
      )
    points = []
    for fields in content["points"]:
      crc32 = fields.pop("crc32")
      points.append(Point(**fields))
      if crc32 != _crc32(_plain(points[-1])):
        raise ValueError(f"point {fields['name']!r} was changed")
    told = {k: content[k] for k in ("kind", "file", "crc32")}
    return Sweep(**told, points=tuple(points))
  except errors.UserError:
    raise
  except (*process.UNREADABLE, AttributeError) as error:
    raise errors.UserError(
      what,
      f"its {FILE} cannot be read ({errors.one_line(error)})",
      "undo what was done to it, or sweep in another directory",
    ) from error


def edited(sweep: Sweep, path: str) -> bool:
  """Whether a sweep file is not what it was when the sweep started.

  Raises:
    UserError: it is another file.
  """
  file = pathlib.Path(path.partition(":")[0])
  now = _crc32(file.read_bytes()) if file.is_file() else ""
  if now != sweep.crc32 and file.name != sweep.file:
    raise errors.UserError(
      f"--sweep={path}",
      f"the directory holds the sweep of {sweep.file}",
      "name that file, or another --workdir",
    )
  return now != sweep.crc32


def outcome_path(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """File that tells what became of a point."""
  return workdir / "points" / f"{name}.json"


def outcome(workdir: pathlib.Path, name: str) -> dict[str, Any] | None:
  """What became of a point; None if nobody knows."""
  try:
    found = json.loads(outcome_path(workdir, name).read_text())
    return found if isinstance(found["status"], str) else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def set_outcome(workdir: pathlib.Path, name: str, facts: Any) -> None:
  """Writes what became of a point, whole or not at all."""
  text = json.dumps(facts, indent=1) + "\n"
  summary.replace(outcome_path(workdir, name), text)


def _json(value: Any) -> Any:
  return json.loads(json.dumps(value, default=str))


def _plain(point: Point) -> bytes:
  return json.dumps(dataclasses.asdict(point), sort_keys=True).encode()


def _crc32(data: bytes) -> str:
  return f"{zlib.crc32(data):08x}"
