"""A campaign: many faults over several real runs, then the books of each.

A run trains a tiny language model on the sources of the standard library, three
unequal islands on this machine's cores. It takes as many faults as it has time
to recover from, and is sized for that; what does not fit goes into the next.

A campaign that is told to end cleans up by itself. One that was killed leaves
the processes of its run and the small disk below its store, which would keep
anybody from deleting the directory; whoever names it next clears it.
"""

import collections
import contextlib
import json
import logging
import pathlib
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from diloco import config as config_lib
from diloco import crash, errors, process
from diloco.chaos import (
  checks,
  injector,
  measures,
  store_faults,
)
from diloco.chaos import faults as faults_lib
from diloco.chaos import fleet as fleet_lib
from diloco.controller.engines import cluster
from diloco.tape import reader

logger = logging.getLogger(__name__)

_LOCK = "campaign.lock"

FAULTS_PER_RUN = 12
_SECS_PER_FAULT = 6.0
_SECS_PER_RUN = 20.0
_PACE_SECS = 0.1
_SPEEDS = (1.0, 0.6, 0.4)
# Tiny, so that what is measured is the protocol and not the model.
MODEL = {
  "d_model": 32,
  "num_layers": 1,
  "num_heads": 4,
  "seq_len": 32,
  "batch_size": 4,
  "warmup_steps": 5,
}
_TOKENS_PER_STEP = MODEL["seq_len"] * MODEL["batch_size"]
_CUT_SECS = 15.0
_CACHE = "compilation_cache"
_WORST_GAPS = 8
_IDLE_RUNS = 3  # without a single fault done: something is wrong


def values(num_faults: int, engine: str = "process") -> dict[str, Any]:
  """Configuration of a run that has time for so many faults."""
  secs = _SECS_PER_RUN + _SECS_PER_FAULT * num_faults
  tokens_per_sec = _TOKENS_PER_STEP * sum(_SPEEDS) / _PACE_SECS
  return {
    "name": "chaos",
    "engine": engine,
    "total_tokens": int(secs * tokens_per_sec),
    "task": {"name": "language_model", "options": dict(MODEL)},
    "fleet": {
      "slices": [
        {"kind": "v5p", "topology": "1", "relative_speed": speed}
        for speed in _SPEEDS
      ],
      "pace_step_secs": _PACE_SECS,
    },
    "sync": {"num_fragments": 8, "every": 8, "adoption": "carry"},
    "outer": {"learning_rate": 1.0, "momentum": 0.0},
    "programs": {
      "window_steps": 8,
      "eval_batches": 1,
      "final_eval_batches": 4,
      "checkpoint_every_steps": 40,
      "cut_every_secs": _CUT_SECS,
    },
    "controller": {
      "restart_base_secs": 0.1,
      "restart_max_secs": 2.0,
      "max_restarts": 1000,
    },
  }


class Campaign:
  """All runs of one seed, and what came out."""

  def __init__(
    self,
    workdir: pathlib.Path,
    trials: int,
    seed: int,
    kinds: Sequence[str] = tuple(faults_lib.KINDS),
    per_run: int = FAULTS_PER_RUN,
    engine: str = "process",
  ):
    """Plans; starts nothing. Clears what a killed campaign left here.

    Raises:
      UserError: the directory is in use, or there is no such kind; there is
        no Ray cluster with room for its runs.
    """
    if workdir.is_dir():
      clear_dead(workdir.absolute())
    if workdir.exists() and (workdir.is_file() or any(workdir.iterdir())):
      raise errors.UserError(
        f"--workdir={workdir}",
        "a campaign needs a directory of its own",
        "name a new or empty one",
      )
    self._workdir = workdir.absolute()
    self._trials, self._seed = trials, seed
    self._per_run = max(per_run, 2)
    self._plan = faults_lib.plan(seed, trials, len(_SPEEDS), kinds)
    self._kinds, self._engine = kinds, engine
    if engine == "ray":
      cluster.check(config_lib.from_mapping(values(self._per_run, engine)))
    self._samples = measures.Samples.none()
    self._runs: list[dict[str, Any]] = []
    self._lines: list[dict[str, Any]] = []
    self._skipped: dict[str, str] = {}

  def run(self) -> dict[str, Any]:
    """Does all of it; returns the result as plain JSON values.

    Raises:
      KeyboardInterrupt: a signal told it to stop; nothing is left running or
        mounted.
    """
    with interruptible(), own(self._workdir):
      return self._run()

  def _run(self) -> dict[str, Any]:
    queue = self._without_impossible(self._plan)
    idle = 0
    while queue and idle < _IDLE_RUNS:
      chosen, rest = faults_lib.share(queue, self._per_run)
      before = len(self._lines)
      left = self._one_run(len(self._runs), chosen)
      queue = sorted([*left, *rest], key=lambda fault: fault.serial)
      idle = idle + 1 if len(self._lines) == before else 0
    return self._result(len(queue))

  def _without_impossible(
    self, plan: list[faults_lib.Fault]
  ) -> list[faults_lib.Fault]:
    """Leaves out kinds this process may not do; the result says which."""
    needs = [fault for fault in plan if fault.kind in faults_lib.NEED_MOUNT]
    if needs and (why := store_faults.may_mount(self._workdir / "probe")):
      for kind in sorted({fault.kind for fault in needs}):
        self._skipped[kind] = f"no file system can be mounted: {why}"
    return [fault for fault in plan if fault.kind not in self._skipped]

  def _one_run(
    self, index: int, faults: list[faults_lib.Fault]
  ) -> list[faults_lib.Fault]:
    """Makes a run, does faults to it, keeps its books; returns those left."""
    trial_dir = self._workdir / f"run-{index:03d}"
    config = config_lib.from_mapping(values(len(faults), self._engine))
    disk = None
    if any(fault.kind in faults_lib.NEED_MOUNT for fault in faults):
      disk = store_faults.SmallDisk(trial_dir / "run" / process.STORE)
    # After that: a copy of it lies in the store.
    process.write_config(config, trial_dir / "run")
    # All runs compile the same programs.
    (self._workdir / _CACHE).mkdir(exist_ok=True)
    (trial_dir / "run" / _CACHE).symlink_to(self._workdir / _CACHE)
    trial = injector.Trial(
      trial_dir,
      config.total_tokens,
      config.fleet.islands,
      1 + config.controller.standbys,
      disk,
    )
    left, broken = list(faults), []
    try:
      left = trial.run(faults)
    except injector.StuckError as error:
      broken.append(str(error))
      done = {line["serial"] for line in injector.read_log(trial_dir)}
      left = [fault for fault in faults if fault.serial not in done]
    finally:
      strays = trial.clean_up()
      if disk is not None:
        store_faults.keep_and_unmount(disk.path)
    if strays:
      broken.append(f"processes were left behind: {strays}")
    self._keep_books(trial_dir, broken, trial.keeper.starts)
    return left

  def _keep_books(
    self, trial_dir: pathlib.Path, broken: list[str], starts: int
  ) -> None:
    lines = injector.read_log(trial_dir)
    books = checks.check(trial_dir / "run", must_finish=not broken)
    self._samples.add(measures.measure(reader.read(trial_dir / "run"), lines))
    self._lines += lines
    self._runs.append(
      {
        "dir": str(trial_dir),
        "faults": len(lines),
        "starts": starts,
        "broken": [*broken, *books.broken],
        "coordinates": lines if broken or books.broken else [],
        **books.facts,
      }
    )

  def _result(self, not_reached: int) -> dict[str, Any]:
    done = [line for line in self._lines if line["outcome"] == injector.DONE]
    missed = [line for line in self._lines if line["outcome"] != injector.DONE]
    points = collections.Counter(
      line["point"] for line in done if line["kind"] == "crash_point"
    )
    broken = [run for run in self._runs if run["broken"]]
    gaps = sorted(self._samples.survivor_gaps, reverse=True)
    return {
      "command": self._command(),
      "seed": self._seed,
      "trials": self._trials,
      "done": len(done),
      "by_kind": dict(collections.Counter(line["kind"] for line in done)),
      "points": {point: points[point] for point in crash.POINTS},
      "missed": missed,
      "not_reached": not_reached,
      "skipped_kinds": self._skipped,
      "runs": self._runs,
      "runs_broken": len(broken),
      "passed": bool(done) and not broken and not not_reached,
      "takeover_secs": measures.spread(self._samples.takeover_secs),
      "merging_secs": measures.spread(self._samples.merging_secs),
      "rejoin_secs": measures.spread(self._samples.rejoin_secs),
      "survivor_gap_over_median": measures.spread([g.ratio for g in gaps]),
      "calm_gap_over_median": measures.spread(self._samples.calm_gaps),
      "worst_gaps": [g._asdict() for g in gaps[:_WORST_GAPS]],
      "collateral_deaths": self._samples.collateral,
    }

  def _command(self) -> str:
    kinds = ",".join(self._kinds)
    return (
      f"diloco chaos --workdir=DIR --trials={self._trials} --seed={self._seed}"
      f" --kinds={kinds} --faults_per_run={self._per_run}"
      f" --engine={self._engine}"
    )


@contextlib.contextmanager
def own(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps other campaigns out of a directory, and clears it in the end."""
  workdir.mkdir(parents=True, exist_ok=True)
  with _locked(workdir):
    try:
      yield
    finally:
      _clear(workdir)


def clear_dead(workdir: pathlib.Path) -> None:
  """Clears what a killed campaign left in its directory; its files stay.

  Does nothing to a directory that was never a campaign's.

  Raises:
    UserError: a campaign is at work there.
  """
  if (workdir / _LOCK).is_file():
    with _locked(workdir):
      _clear(workdir)


def _locked(workdir: pathlib.Path) -> contextlib.AbstractContextManager[None]:
  busy = errors.UserError(
    f"--workdir={workdir}",
    "a campaign is at work in it",
    "name another directory, or stop that campaign first",
  )
  return process.sole(workdir / _LOCK, busy)


def _clear(workdir: pathlib.Path) -> None:
  for run_dir in sorted(workdir.glob("run-*/run")):
    fleet_lib.end_processes(run_dir)
  for path in store_faults.mounted_below(workdir):
    try:
      store_faults.keep_and_unmount(path)
    except OSError as error:
      logger.warning("disk_not_kept path=%s error=%s", path, error)


def interruptible() -> contextlib.AbstractContextManager[None]:
  """Makes the first signal to stop a KeyboardInterrupt, and ignores others.

  So what is cleaned up on the way out is cleaned up to the end.
  """
  told = False

  def stop(number: int) -> None:
    nonlocal told
    if told:
      return
    told = True
    logger.warning("stopping signal=%s", signal.Signals(number).name)
    raise KeyboardInterrupt

  return process.hearing(stop)


def table(result: dict[str, Any]) -> str:
  """The result in lines for people."""
  lines = [
    f"{result['done']} of {result['trials']} faults done in"
    f" {len(result['runs'])} runs, seed {result['seed']}",
  ]
  lines += [f"  {kind:14} {n}" for kind, n in sorted(result["by_kind"].items())]
  passed = [p for p, n in result["points"].items() if n]
  lines.append(f"crash points: {len(passed)} of {len(result['points'])}")
  for name, why in result["skipped_kinds"].items():
    lines.append(f"skipped {name}: {why}")
  for line in result["missed"]:
    what = line.get("point") or line.get("target") or ""
    lines.append(f"missed {line['kind']} {what}: {line['outcome']}")
  for name in (
    "takeover_secs",
    "merging_secs",
    "rejoin_secs",
    "survivor_gap_over_median",
    "calm_gap_over_median",
  ):
    found = result[name]
    lines.append(
      f"{name}: p50 {found['p50']}, p99 {found['p99']}, max {found['max']}"
      f" ({found['count']})"
    )
  lines += [
    f"died though not hit: {text}" for text in result["collateral_deaths"]
  ]
  for run in result["runs"]:
    lines += [f"BROKEN {run['dir']}: {text}" for text in run["broken"]]
    lines += [f"  {json.dumps(line)}" for line in run["coordinates"]]
  if result["runs_broken"]:
    lines.append(f"again: {result['command']}")
  lines.append("passed" if result["passed"] else "FAILED")
  return "\n".join(lines)
