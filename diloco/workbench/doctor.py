"""`diloco doctor`: tests on the real thing what a run will stand on.

The machine, the store by concurrent clients, and what both mean for a run:

    H         the shortest period of the planner's at which the store carries
              the traffic of all islands and fragments are back within H / 4
    grace     the adaptive window, for a quorum that is there at once
    overhead  processor time to write an outer gradient and read the answer,
              over that of H steps; a step on an accelerator does not feel it

It writes into a directory of its own, which it removes. What it does not see
is a power cut, and clients on other machines: run it on each of them.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil
from packaging import requirements, specifiers

from diloco import config as config_lib
from diloco import errors, launch, process, promises, timing
from diloco import run as run_lib
from diloco.controller import resources as machine
from diloco.islands import trainer
from diloco.planning.bandwidth import decoupled, workload
from diloco.planning.planner import exchange, resources
from diloco.snapshots import arrays, locations, store
from diloco.syncer import grace
from diloco.tasks import task as task_lib

Finding = promises.Finding

_EXAMPLE_PARAMS, _EXAMPLE_STEP_SECS = 1e9, 1.0  # where nobody says
_STEPS = 5  # that are timed
_PROBE_BYTES = 1 << 20
# Of an island, in parameters of 4 bytes: parameters, gradients, two moments,
# anchors, the two newest publications, fragments in flight.
_HELD = 8
_SAVED = 14  # two contributions, and four checkpoints with their moments


class _Training(NamedTuple):
  """What will use the store; `stated` if the user has said so."""

  params: float
  step_secs: float
  config: config_lib.RunConfig
  stated: bool


def main(
  args: argparse.Namespace, open_store: promises.OpenStore = store.SnapshotStore
) -> int:
  """Runs the command; returns the exit code.

  `open_store` is called in each client's process.

  Raises:
    UserError: an argument cannot be used; nothing was touched.
  """
  facts: dict[str, Any] = {}
  findings = []
  for finding in _examine(args, facts, open_store):
    findings.append(finding)
    if not args.json:
      print(finding, flush=True)
  failed = any(finding.level == "FAIL" for finding in findings)
  if args.json:
    told = [finding._asdict() for finding in findings]
    print(json.dumps({"ok": not failed, "findings": told, **facts}, indent=2))
  return process.EXIT_FAILED if failed else 0


def _examine(
  args: argparse.Namespace,
  facts: dict[str, Any],
  open_store: promises.OpenStore,
) -> Iterator[Finding]:
  """Tests everything, and adds figures to `facts`."""
  url = args.store if "://" in args.store else ""
  if url:
    locations.check(url, "--store")
  folder = pathlib.Path(tempfile.gettempdir() if url else args.store).absolute()
  if not folder.is_dir():
    raise errors.UserError(
      f"--store={args.store}", "there is no such directory", "make it first"
    )
  fleet = resources.load(args.fleet) if args.fleet else None
  config, task = config_lib.RunConfig(), None
  params = args.params or _EXAMPLE_PARAMS
  if args.config:
    config = config_lib.from_mapping(launch.load_config(args.config))
  yield from _software()
  try:
    with (
      locations.left_as_found(url),
      tempfile.TemporaryDirectory(prefix="doctor-", dir=folder) as room,
    ):
      if args.config:
        try:
          task, plan, _ = run_lib.preflight(config, pathlib.Path(room, "run"))
          params = float(plan.num_params)
        except errors.UserError as error:
          yield _refusal(error, "FAIL")
      disk = None if url else folder
      yield from _machine(config if task else None, params, disk)
      name = pathlib.Path(room).name
      place = locations.below(url or folder.as_uri(), name)
      try:
        yield from _store(place, args.quick, open_store, facts)
      finally:
        if url:
          store.SnapshotStore(url).delete_tree(name)
    step_secs = args.step_secs or _step_secs(config, task, args.quick)
    yield from _timeouts(config, facts["store"])
    training = _Training(params, step_secs, config, stated=bool(task))
    yield from _predict(training, facts)
    for site in fleet.sites if fleet else ():
      yield _link(site, facts["store"]["gbps"])
  except (OSError, errors.CorruptSnapshotError) as error:
    yield Finding("FAIL", f"store: {errors.one_line(error)}", "use another one")


def _refusal(error: errors.UserError, level: promises.Level) -> Finding:
  return Finding(level, f"{error.what}: {error.why}", error.remedy)


def _software() -> Iterator[Finding]:
  """Python and packages, against what this version of diloco asks for."""
  about = importlib.metadata.metadata("diloco")
  here, asked = platform.python_version(), about["Requires-Python"]
  good = here in specifiers.SpecifierSet(asked)
  yield Finding("ok" if good else "FAIL", f"python: {here}, needs {asked}")
  wrong = []
  for text in importlib.metadata.requires("diloco") or ():
    one = requirements.Requirement(text)
    if one.marker is None or one.marker.evaluate({"extra": ""}):
      version = "missing"
      with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(one.name)
      if version == "missing" or version not in one.specifier:
        wrong.append(f"{text} (here: {version})")
  if wrong:
    yield Finding("FAIL", f"packages: {', '.join(wrong)}", "install them")
  else:
    yield Finding("ok", "packages: all are there")


def _machine(
  config: config_lib.RunConfig | None,
  params: float,
  folder: pathlib.Path | None,
) -> Iterator[Finding]:
  """Devices, cores, memory, and the disk if any, against the needs of a run."""
  devices, cores = jax.devices(), len(machine.available_cores())
  yield Finding("ok", f"devices: {len(devices)} x {devices[0].device_kind}")
  islands = config.fleet.islands if config else 0
  advice = "islands share them: use fewer, or more cores"
  short = islands > cores
  text = f"cores: {cores} for {islands or 'any number of'} islands"
  yield Finding("warn" if short else "ok", text, advice if short else "")
  own = psutil.Process().memory_info().rss
  versions = config.sync.max_staleness + 2 if config else 0
  versions *= 1 + len(config.outer.buffers) if config else 1
  needed = islands * (own + 4 * params * _HELD)
  yield _enough("memory", psutil.virtual_memory().available, needed)
  needed = 4 * params * (versions + islands * _SAVED)
  if folder is not None:
    yield _enough(f"disk of {folder}", shutil.disk_usage(folder).free, needed)


def _enough(what: str, free: float, needed: float) -> Finding:
  text = f"{what}: {free / 1e9:.3g} GB free"
  text += f", about {needed / 1e9:.3g} GB needed" if needed else ""
  if needed > free:
    return Finding("FAIL", text, "free some, or train a smaller model")
  return Finding("warn" if needed > free / 2 else "ok", text)


def _store(
  room: str,
  quick: bool,
  open_store: promises.OpenStore,
  facts: dict[str, Any],
) -> Iterator[Finding]:
  """Promises and speed of the store."""
  url = locations.below(room, "store")
  snapshots = store.SnapshotStore(url)
  trip = timing.measure(snapshots)
  probe = arrays.Tensor.whole("w", np.ones(_PROBE_BYTES // 4, np.float32))
  started = time.perf_counter()
  snapshots.arrays.write("probe", [probe])
  rate = _PROBE_BYTES / (time.perf_counter() - started)
  effort = promises.QUICK if quick else promises.Effort()
  effort = effort.within(trip, rate)
  seen = promises.observe(url, effort, open_store)
  yield from promises.judge(seen, effort)
  yield from promises.taken_too_late(open_store(url), "late")  # not by chance
  size = effort.large_bytes
  (wrote, write_cpu), (read, read_cpu) = (
    [statistics.mean(one["large"][key][i] for one in seen[1:]) for i in (0, 1)]
    for key in ("wrote", "read")
  )
  busy = max(trip, seen[0]["large"]["round_trip_secs"])
  facts["store"] = {
    "round_trip_secs": trip,
    "width": snapshots.width,
    "busy_round_trip_secs": busy,
    "write_bytes_per_sec": size / wrote,
    "read_bytes_per_sec": size / read,
    "write_cpu_secs_per_byte": write_cpu / size,
    "read_cpu_secs_per_byte": read_cpu / size,
    "gbps": 8e-9 * size / max(wrote, read),
  }
  yield Finding(
    "note",
    f"store, speed of each of {promises.WRITERS} clients, caches included:"
    f" writes {size / wrote / 1e6:,.0f} MB/s, reads {size / read / 1e6:,.0f}"
    f" MB/s; round trip {1e3 * trip:.3g} ms, meanwhile {1e3 * busy:.3g} ms",
  )


def _step_secs(
  config: config_lib.RunConfig, task: task_lib.Task | None, quick: bool
) -> float:
  """Of an inner step: its pace, or measured here on the first island's."""
  if config.fleet.pace_step_secs:
    return config.fleet.pace_step_secs
  first = config.fleet.slices[0]
  quick = quick or bool(config.loop)  # nobody knows what its steps cost
  if task is None or quick or first.num_devices > jax.device_count():
    return _EXAMPLE_STEP_SECS
  one = trainer.Trainer(config, task, 0, first.shape, jax.devices())
  with contextlib.closing(one):
    state = one.bare_loop(1, one.state)
    started = time.perf_counter()
    one.bare_loop(_STEPS, state)
    return (time.perf_counter() - started) / _STEPS


def _timeouts(
  config: config_lib.RunConfig, speed: promises.Seen
) -> Iterator[Finding]:
  """Whether the store allows the run's timeouts: alone, and when busy."""
  levels: tuple[tuple[str, promises.Level], ...]
  levels = ("round_trip_secs", "FAIL"), ("busy_round_trip_secs", "warn")
  chosen, fragments = config.controller, config.sync.num_fragments
  for name, level in levels:
    try:
      made = timing.derive(chosen, speed[name], fragments, speed["width"])
    except errors.UserError as error:
      yield _refusal(error, level)
      return
    # A run derives it from the calm store, and goes on by it.
    chosen = dataclasses.replace(chosen, takeover_secs=made.takeover_secs)
  text = f"a dead syncer is replaced within {chosen.takeover_secs:g} s"
  yield Finding("ok", f"timeouts: the store is fast enough for them; {text}")


class _Prospect:
  """A run on the store as measured, with H as asked."""

  def __init__(self, training: _Training, speed: promises.Seen, every: int):
    config = training.config
    sync, islands = config.sync, config.fleet.islands
    up = workload.CODEC_BITS[sync.codec]
    down = workload.CODEC_BITS[sync.down_codec]
    fragments, trip = min(sync.num_fragments, every), speed["round_trip_secs"]
    self.merge_secs = (
      training.params
      / fragments
      / 8
      * (
        islands * up / speed["read_bytes_per_sec"]
        + down / speed["write_bytes_per_sec"]
      )
    )
    # A client's share was measured, so each island has a link of its own.
    links = [
      decoupled.Link(speed["gbps"], trip / 4, 1, training.step_secs),
      decoupled.Link(math.inf, 0.0, 0, training.step_secs),
    ]
    exchanged = decoupled.Sync(
      *(training.params, every, fragments, 0, up, down),
      merge_secs=self.merge_secs + trip,
    )
    traffic = decoupled.traffic(exchanged, links, syncer_site=1)[0]
    self.load = traffic.load
    self.overlap_steps = exchange.overlap_steps(traffic.round_trip_steps)
    self.fits = exchange.fits(self.load, self.overlap_steps, every)
    cores = min(1.0, len(machine.available_cores()) / islands)
    busy = up * speed["write_cpu_secs_per_byte"]
    busy += down * speed["read_cpu_secs_per_byte"]
    busy *= training.params / 8 / every
    self.step_overhead = busy / training.step_secs / cores
    self.grace_secs = grace.AdaptiveGrace(
      self.overlap_steps, sync.grace_gamma
    ).grace_secs(grace.GraceFacts(training.step_secs, 0.0, self.merge_secs))


def _predict(
  training: _Training, facts: dict[str, promises.Seen]
) -> Iterator[Finding]:
  """H, grace and what they cost."""
  speed, params = facts["store"], training.params
  told = f"{params:.3g} parameters, steps of {training.step_secs:.3g} s"
  tried = {h: _Prospect(training, speed, h) for h in exchange.PERIODS}
  every = next((h for h, prospect in tried.items() if prospect.fits), None)
  if every is None:
    text = f"{told}: H = {exchange.PERIODS[-1]} is too short for this store"
    yield Finding("FAIL", text, "use a faster one, or longer steps")
    return
  best = tried[every]
  facts["predicted"] = {**training._asdict(), "every": every, **vars(best)}
  del facts["predicted"]["config"]
  yield Finding(
    "note",
    f"{told}: H = {every} or more, overlap_steps = {best.overlap_steps}, grace"
    f" up to {best.grace_secs:.3g} s, steps longer by at most"
    f" {best.step_overhead:.2%}",
  )
  asked = _Prospect(training, speed, training.config.sync.every)
  if training.stated and not asked.fits:
    text = f"config.sync.every = {training.config.sync.every}: the store is"
    text += f" {asked.load:.0%} busy, and a fragment is back after"
    text += f" {asked.overlap_steps} steps"
    yield Finding("warn", text, f"raise it to {every}")


def _link(site: resources.Site, gbps: float) -> Finding:
  """What a fleet file says of a link against what this client was given."""
  text = f"fleet, {site.name}: link_gbps = {site.link_gbps:g}, measured from"
  text += f" here {gbps:.3g}"
  if site.slices and gbps < site.link_gbps:
    return Finding("warn", text, f"plan with --wan_gbps={gbps:.3g}")
  return Finding("ok", text)
