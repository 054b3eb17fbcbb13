"""`diloco sweep`: many points from one file, in parallel, done once each."""

import argparse
import contextlib
import fnmatch
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from diloco import arguments, errors, hyper, process
from diloco import config as config_lib
from diloco.controller.engines import cluster
from diloco.report import figures, status
from diloco.workbench import compare, frozen, table
from diloco.workbench import executor as executor_lib

_MANY = 200  # points, from which on a sweep asks
_POLL_SECS = 0.1
_TELL_SECS = 15.0  # from one sign of life to the next, at least
_PAUSES = 50  # times what it took to look how far points are


def run(args: argparse.Namespace) -> int:
  """Sweeps, or goes on with the sweep of a directory; returns the exit code."""
  table.check_extra()
  cores = _cores(args.cores)
  workdir = args.workdir.absolute()
  if fresh := not (workdir / frozen.FILE).exists():
    _check_directory(args)
    sweep = frozen.build(args.sweep, *_points(args))
  else:
    sweep = frozen.read(workdir)
    if args.sweep and frozen.edited(sweep, args.sweep):
      _tell(
        f"{args.sweep} is not what it was when this sweep started; its points"
        " stay as they were"
      )
  only = _only(args, sweep)
  make_executor: Callable[[pathlib.Path], executor_lib.Executor]
  make_executor = functools.partial(executor_lib.Local, cores=cores)
  if args.ray:
    make_executor = functools.partial(
      executor_lib.Ray, config=_on_ray(args, sweep)
    )
  with process.private_files(), _sole(workdir):
    if fresh and not (workdir / frozen.FILE).exists():
      frozen.write(workdir, sweep)
    sweep = frozen.read(workdir)
    with contextlib.closing(make_executor(workdir)) as executor:
      Runner(workdir, sweep, executor).run(retry=args.retry, only=only)
    rows = table.write(workdir, sweep)
  return _conclude(args, rows)


def _only(args: argparse.Namespace, sweep: frozen.Sweep) -> str:
  """The pattern of the names of points that are to be done."""
  only: str = args.only or "*"
  names = [point.name for point in sweep.points]
  if not fnmatch.filter(names, only):
    raise errors.UserError(
      f"--only={only}",
      f"none of the {len(names)} points has such a name; the first is"
      f" {names[0]}",
      "give a pattern that the whole name fits, such as '*seed-1*'",
    )
  return only


def _on_ray(
  args: argparse.Namespace, sweep: frozen.Sweep
) -> config_lib.RunConfig:
  """What `executor.Ray` takes, if the points can be done there."""
  what = f"--ray={args.ray}"
  if args.cores is not None:
    raise errors.UserError(
      f"{what} --cores={args.cores}",
      "on Ray the cluster says how many cores there are",
      "leave --cores out",
    )
  if any(point.config.get("engine") == "ray" for point in sweep.points):
    raise errors.UserError(
      what,
      "there are points with config.engine = 'ray', whose islands find places"
      " of their own",
      "leave it out",
    )
  config = executor_lib.on_ray("" if args.ray == "auto" else args.ray)
  try:
    cluster.check(config)
  except errors.UserError as error:
    raise errors.UserError(what, error.why, error.remedy) from error
  return config


def _cores(asked: int | None) -> list[int]:
  cores = sorted(os.sched_getaffinity(0))
  if asked is not None and not 1 <= asked <= len(cores):
    raise errors.UserError(
      f"--cores={asked}",
      f"this machine has {len(cores)}",
      f"give 1 to {len(cores)}, or leave it out",
    )
  return cores[:asked]


def _check_directory(args: argparse.Namespace) -> None:
  what = f"--workdir={args.workdir}"
  if not args.sweep:
    raise errors.UserError(
      what, "there is no sweep in it to go on with", "give --sweep=FILE.py"
    )
  if args.retry:
    raise errors.UserError(
      "--retry", f"there is no sweep in {args.workdir}", "leave it out"
    )
  errors.refuse_tilde(what, args.workdir)
  # A sweep killed before its first file was whole has left only these.
  begun = ("points", "sweep.lock", f"{frozen.FILE}.*.tmp")
  folder = args.workdir
  if folder.exists() and (
    not folder.is_dir()
    or not all(any(map(path.match, begun)) for path in folder.iterdir())
  ):
    raise errors.UserError(
      what, "it is not empty and holds no sweep", "name a new directory"
    )


def _points(
  args: argparse.Namespace,
) -> tuple[list[hyper.Point], frozen.Kind]:
  points, trains = hyper.load(args.sweep.partition(":")[0])
  if len(points) > _MANY and not args.yes and args.only is None:
    told = f"{args.sweep} has {len(points)} points"
    answer = ""
    if sys.stdin.isatty():
      _tell(f"{told}. Do them all? [y/N]")
      answer = sys.stdin.readline()
    if answer.strip().lower() not in ("y", "yes"):
      raise errors.UserError(
        told, f"more than {_MANY} are only done when asked for", "add --yes"
      )
  return points, "train" if trains else "simulate"


def _sole(workdir: pathlib.Path) -> contextlib.AbstractContextManager[None]:
  workdir.mkdir(parents=True, exist_ok=True)
  busy = errors.UserError(
    f"--workdir={workdir}", "a sweep is at work in it", "stop it first"
  )
  return process.sole(workdir / "sweep.lock", busy)


class Runner:
  """Does what is left of a sweep."""

  def __init__(
    self,
    workdir: pathlib.Path,
    sweep: frozen.Sweep,
    executor: executor_lib.Executor,
  ):
    """Takes where points are, and how they run."""
    self._workdir, self._sweep = workdir, sweep
    self._executor = executor
    self._stops = self._heeded = 0  # signals, and those passed on
    self._begun = time.monotonic()
    self._tell_at = self._begun + _TELL_SECS
    self._ended = self._left = 0  # points, since this sweep began
    self._points = len(sweep.points)  # but for those left out
    self._had: dict[str, float] = {}  # shares of points that were done before

  def run(self, *, retry: bool, only: str = "*") -> None:
    """Does all points that are left.

    Args:
      retry: those that failed alone.
      only: pattern of the names of those to begin.

    Returns when they are done, or a signal has ended them.
    """
    with process.hearing(self._stop):
      queue = self._queue(retry=retry, only=only)
      while (queue and not self._stops) or self._executor.running():
        while queue and not self._stops and self._begin(queue[0]):
          queue.pop(0)
        time.sleep(_POLL_SECS)
        self._heed()
        if time.monotonic() > self._tell_at:
          self._progress()
        for name, cause in self._executor.ended().items():
          if cause:
            self._settle(name, f"it ended by {cause}")
          else:
            queue[:0] = [p for p in self._sweep.points if p.name == name]

  def _queue(self, *, retry: bool, only: str = "*") -> list[frozen.Point]:
    """Takes over points that run on, and returns those to begin."""
    points = self._sweep.points
    open_ = {p.name for p in points if self._found(p.name) != "finished"}
    adopted = {name for name in open_ if self._executor.adopt(name)}
    asked = set(fnmatch.filter(open_ - adopted, only))
    queue = [
      point
      for point in points
      if point.name in asked and (self._found(point.name) == "failed") == retry
    ]
    waits = len(open_ - adopted - asked)
    self._points = len(points) - waits
    self._left = len(adopted) + len(queue)
    self._had = {name: self._share(name) for name in adopted}
    _tell(
      f"{len(points)} points, {len(points) - len(open_)} done,"
      f" {len(adopted)} still running, {len(queue)} to begin"
      f"{f', {waits} left out' if waits else ''}"
    )
    return queue

  def _heed(self) -> None:
    """Passes signals on; not from their handler, which could miss a start."""
    if self._stops > self._heeded:
      self._heeded = self._stops
      _tell(
        "stopping: points save, but those in virtual time begin anew; once more"
        " ends them at once"
      )
      self._executor.stop()

  def _begin(self, point: frozen.Point) -> bool:
    """Starts a point, or tells why that fails; False while there's no room."""
    try:
      begun = self._executor.start(point.name, self._sweep.islands(point))
    except OSError as error:
      told = f"it could not be started: {errors.one_line(error)}"
      self._settle(point.name, told)
      return True
    if begun:
      anew = point.config.get("engine") == "virtual"
      self._had[point.name] = 0.0 if anew else self._share(point.name)
    return begun

  def _found(self, name: str) -> str:
    return (frozen.outcome(self._workdir, name) or {}).get("status", "")

  def _settle(self, name: str, reason: str) -> None:
    """Notes a point's end, for a reason unless it wrote its own; tells it."""
    facts = frozen.outcome(self._workdir, name)
    if facts is None:
      if self._stops:
        return  # before it began; the next sweep does it
      facts = {"status": "failed", "reason": reason, "secs": 0, "result": {}}
      frozen.set_outcome(self._workdir, name, facts)
    told = compare.headline(facts["result"])
    if facts["status"] != "finished":
      told = facts["reason"]
    self._ended, self._left = self._ended + 1, self._left - 1
    self._progress(
      f"{name} {facts['status']} in {figures.secs(facts['secs'])}:"
      f" {told or 'without a figure'}; "
    )

  def _progress(self, news: str = "") -> None:
    """Says how far the sweep is, and how long the rest will take."""
    start = time.monotonic()
    shares = {n: self._share(n) for n in self._executor.running()}
    now = time.monotonic()
    # Points run on the same cores, and their tapes grow.
    self._tell_at = now + max(_TELL_SECS, _PAUSES * (now - start))
    did = self._ended + sum(shares.values()) - sum(self._had.values())
    rest = self._left - sum(shares.values())
    # Of less than a tenth of a point nothing follows: it has been starting.
    secs = (now - self._begun) / did * rest if did > 0.1 else 0.0
    left = f", about {figures.secs(secs)}" if secs >= 1.0 else ""
    on = [f"{name} {figures.percent(share)}" for name, share in shares.items()]
    done = f"[{self._points - self._left}/{self._points}]"
    _tell(
      f"{done} {news}{self._left} to go{left}"
      f"{'' if news else '; ' + ', '.join(on)}"
    )

  def _share(self, name: str) -> float:
    """How much of a point that runs is done, 0 to 1."""
    run_dir = self._workdir / name
    known = run_dir.exists() and self._sweep.kind == "train"
    found = status.status(run_dir)["progress"] if known else None
    return min(found or 0.0, 1.0)

  def _stop(self, _: int) -> None:
    self._stops += 1


def _conclude(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> int:
  failed = [row for row in rows if row["status"] == "failed"]
  for row in failed:
    _tell(f"failed: {row['name']}: {row['reason']}")
  done = sum(row["status"] == "finished" for row in rows)
  goes_on = "the same command goes on" + " without --only" * bool(args.only)
  hint = f"; {goes_on}" if done < len(rows) else ""
  hint = "; --retry does those that failed again" if failed else hint
  _tell(f"{done} of {len(rows)} points done{hint}")
  arguments.answer(args, {"points": rows}, str(args.workdir / "table.csv"))
  return process.EXIT_FAILED if failed else 0


def _tell(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
