"""`diloco metrics`: what a run has logged, for other programs to show.

Everything comes from the run's files, read by a process of its own, so that
islands pay nothing. There are three series: one of steps for each island, one
of merges, counted over all fragments, and one of evaluations of the global
parameters.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

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


class Writer(Protocol):
  """Takes points; `close` when there are no more."""

  def write(self, point: Point) -> None:
    """Takes one."""

  def close(self) -> None:
    """Brings everything to disk."""


class TensorBoard:
  """Event files, a folder for each series, so that islands overlay."""

  def __init__(self, out: pathlib.Path, run: opened.Run):
    """Args: where to, and of which run."""
    del run
    self._out, self._writers = out, dict[str, Any]()
    self._lib = _library("tensorboardX")

  def write(self, point: Point) -> None:
    """See `Writer`."""
    if point.series not in self._writers:
      folder = str(self._out / point.series)
      self._writers[point.series] = self._lib.SummaryWriter(folder)
    for name, value in point.scalars.items():
      self._writers[point.series].add_scalar(
        name, value, point.step, walltime=point.wall_secs
      )

  def close(self) -> None:
    """See `Writer`."""
    for writer in self._writers.values():
      writer.close()


class Parquet:
  """A table for each series; the islands share one."""

  def __init__(self, out: pathlib.Path, run: opened.Run):
    """Args: where to, and of which run."""
    del run
    self._out, self._rows = out, dict[str, list[dict[str, Any]]]()
    self._arrow = _library("pyarrow")
    self._parquet = _library("pyarrow.parquet")

  def write(self, point: Point) -> None:
    """See `Writer`."""
    name, _, island = point.series.partition("island-")
    row = {"step": point.step, "wall_secs": point.wall_secs, **point.scalars}
    if island:
      name, row = "steps", {"island": int(island), **row}
    self._rows.setdefault(name, []).append(row)

  def close(self) -> None:
    """See `Writer`."""
    self._out.mkdir(parents=True, exist_ok=True)
    for name, rows in self._rows.items():
      names = dict.fromkeys(column for row in rows for column in row)
      table = self._arrow.table({n: [r.get(n) for r in rows] for n in names})
      self._parquet.write_table(table, self._out / f"{name}.parquet")


class WeightsAndBiases:
  """A run of Weights & Biases on this disk; `wandb sync` uploads it."""

  def __init__(self, out: pathlib.Path, run: opened.Run):
    """Args: where to, and of which run."""
    out.mkdir(parents=True, exist_ok=True)
    lib = _library("wandb")
    self._run = lib.init(
      project="diloco",
      name=run.dir.resolve().name,
      config=run.settings.to_dict(),
      dir=str(out),
      mode="offline",
      settings=lib.Settings(silent=True, console="off"),
    )
    self._known: set[str] = set()

  def write(self, point: Point) -> None:
    """See `Writer`."""
    if point.series not in self._known:
      self._known.add(point.series)
      axis = f"{point.series}/step"
      self._run.define_metric(f"{point.series}/*", step_metric=axis)
    row = {"step": point.step, "wall_secs": point.wall_secs, **point.scalars}
    finite = {k: v for k, v in row.items() if math.isfinite(v)}
    self._run.log({f"{point.series}/{k}": v for k, v in finite.items()})

  def close(self) -> None:
    """See `Writer`."""
    self._run.finish()


_WRITERS: dict[str, Callable[[pathlib.Path, opened.Run], Writer]] = {
  "tensorboard": TensorBoard,
  "parquet": Parquet,
  "wandb": WeightsAndBiases,
}


def _library(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    package = name.partition(".")[0]
    raise errors.UserError(
      f"metrics for {package}",
      "that package is not installed",
      f"pip install {package}, or 'diloco[workbench]'",
    ) from error


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
