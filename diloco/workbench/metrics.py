"""`diloco metrics`: what a run has logged, for other programs to show.

Everything comes from the run's files, read by a process of its own, so that
islands pay nothing. There are three series: one of steps for each island, one
of merges, counted over all fragments, and one of evaluations of the global
parameters.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from diloco import errors
from diloco.report import liveness, openmetrics, status, summary
from diloco.snapshots import portable
from diloco.tape import events, reader
from diloco.workbench import opened

_OF_MERGES = (
  *("fragment", "version", "outer_grad_norm", "merge_secs", "bytes", "cosine"),
  *("quorum_secs", "grace_secs", "grace_spent_secs"),
)
_OF_EVALUATIONS = ("loss", "bits_per_token", "tokens", "version")
_NO_SCALARS = ("step", "wall_secs", "incarnation")


class Point(NamedTuple):
  """Scalars of one moment; `step` counts within the series."""

  series: str
  step: int
  wall_secs: float
  scalars: dict[str, float]


class Points:
  """Makes points of a run's lines, in whatever pieces they come."""

  def __init__(self) -> None:
    self._merges = 0
    self._versions: dict[int, int] = {}  # newest, by fragment

  def of(self, record: reader.Record) -> Iterator[Point]:
    """What these lines add."""
    for island, lines in record.metrics.items():
      for line in lines:
        yield _point(f"island-{island}", line["step"], line, set(line))
    for line in record.events:
      if line["event"] == events.MERGED:
        yield from self._merged(line)
      elif line["event"] == events.EVALUATED and line["target"] == "global":
        yield _point("evaluations", line["step"], line, _OF_EVALUATIONS)

  def _merged(self, line: reader.Line) -> Iterator[Point]:
    fragment, version = line["fragment"], line["version"]
    if version <= self._versions.get(fragment, 0):
      return  # told again, by a syncer that took over
    self._versions[fragment] = version
    self._merges += 1
    parts = line["contributions"]
    stale = [part.get("staleness") or 0 for part in parts]
    more = {
      "islands": len({part["island"] for part in parts}),
      "staleness": sum(stale) / max(len(stale), 1),
    }
    yield _point("merges", self._merges, line | more, (*_OF_MERGES, *more))


def _point(series: str, step: int, line: reader.Line, names: Any) -> Point:
  flat = opened.flat({name: line[name] for name in names if name in line})
  scalars = {
    name: float(value)
    for name, value in flat.items()
    if isinstance(value, int | float) and name not in _NO_SCALARS
  }
  return Point(series, step, line["wall_secs"], scalars)


class Writer(NamedTuple):
  """Takes points, and brings everything to disk when there are no more."""

  write: Callable[[Point], None]
  close: Callable[[], None]


def _tensorboard(out: pathlib.Path, run: opened.Run) -> Writer:
  """Event files, a folder for each series, so that islands overlay."""
  del run
  library, writers = _library("tensorboardX"), dict[str, Any]()
  kind = _library("tensorboardX.proto.summary_pb2").Summary

  def write(point: Point) -> None:
    if point.series not in writers:
      folder = str(out / point.series)
      writers[point.series] = library.FileWriter(folder)
    # All of a moment in one event: one each would take ten times as long.
    values = [
      kind.Value(tag=name, simple_value=value)
      for name, value in point.scalars.items()
    ]
    writers[point.series].add_summary(
      kind(value=values), point.step, point.wall_secs
    )

  def close() -> None:
    for writer in writers.values():
      writer.close()

  return Writer(write, close)


def _parquet(out: pathlib.Path, run: opened.Run) -> Writer:
  """A table for each series; the islands share one."""
  del run
  arrow, parquet = _library("pyarrow"), _library("pyarrow.parquet")
  tables = collections.defaultdict[str, list[dict[str, Any]]](list)

  def write(point: Point) -> None:
    name, _, island = point.series.partition("island-")
    row = {"step": point.step, "wall_secs": point.wall_secs, **point.scalars}
    if island:
      name, row = "steps", {"island": int(island), **row}
    tables[name].append(row)

  def close() -> None:
    out.mkdir()
    for name, rows in tables.items():
      names = dict.fromkeys(column for row in rows for column in row)
      table = arrow.table({n: [row.get(n) for row in rows] for n in names})
      parquet.write_table(table, out / f"{name}.parquet")

  return Writer(write, close)


def _weights_and_biases(out: pathlib.Path, run: opened.Run) -> Writer:
  """A run of Weights & Biases on this disk; `wandb sync` uploads it."""
  library, known = _library("wandb"), set[str]()
  out.mkdir()
  made = library.init(
    project="diloco",
    name=run.dir.resolve().name,
    config=run.settings.to_dict(),
    dir=str(out),
    mode="offline",
    settings=library.Settings(silent=True, console="off"),
  )

  def write(point: Point) -> None:
    if point.series not in known:
      known.add(point.series)
      axis = f"{point.series}/step"
      made.define_metric(f"{point.series}/*", step_metric=axis)
    row = {"step": point.step, "wall_secs": point.wall_secs, **point.scalars}
    finite = {k: v for k, v in row.items() if math.isfinite(v)}
    made.log({f"{point.series}/{k}": v for k, v in finite.items()})

  return Writer(write, made.finish)


_WRITERS: dict[str, Callable[[pathlib.Path, opened.Run], Writer]] = {
  "tensorboard": _tensorboard,
  "parquet": _parquet,
  "wandb": _weights_and_biases,
}


def _library(name: str) -> Any:
  package = name.partition(".")[0]
  extra = package if package == "wandb" else "workbench"
  return errors.needed(name, f"metrics for {package}", extra)


def main(args: argparse.Namespace) -> int:
  """Runs the command; returns the exit code."""
  run = opened.Run(args.dir)
  out = args.out or run.dir / args.format
  if args.format == "openmetrics":
    if args.follow and args.out is None:
      raise errors.UserError(
        "--follow", "a scraper reads a file again and again", "give --out"
      )
    return _expose(run, args.out, args.follow)
  portable.check_free(pathlib.Path(os.path.abspath(out)))
  writer, points = _WRITERS[args.format](out, run), Points()
  follower, count = reader.Follower(run.dir), 0
  with contextlib.suppress(KeyboardInterrupt):
    for _ in _beats(run.dir, args.follow):
      for point in points.of(follower.news()):
        writer.write(point)
        count += 1
  writer.close()
  told = {"out": str(out), "format": args.format, "points": count}
  print(json.dumps(told) if args.json else f"{out}: {count:,} points")
  return 0


def _beats(run_dir: pathlib.Path, follow: float) -> Iterator[None]:
  """Once, or every so many seconds and once more when the run has ended."""
  while follow and liveness.controller_alive(run_dir):
    yield
    time.sleep(follow)
  yield


def _expose(run: opened.Run, out: pathlib.Path | None, follow: float) -> int:
  with contextlib.suppress(KeyboardInterrupt):
    for _ in _beats(run.dir, follow):
      told = openmetrics.text(status.status(run.dir), run.dir.resolve().name)
      if out is None:
        print(told, end="")
      else:
        summary.replace(out, told)
  return 0
