"""A run from top to bottom: config, fleet, islands, merges, report."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from diloco import (
  channel,
  config_changes,
  crash,
  errors,
  logbook,
  process,
  promises,
  relay,
  timing,
)
from diloco import config as config_lib
from diloco.controller import controller as controller_lib
from diloco.controller import move, resources, restorer, roles, tenure
from diloco.controller import outcome as outcome_lib
from diloco.controller.engines import base, cluster
from diloco.controller.engines import process as process_engine
from diloco.controller.engines import ray as ray_engine
from diloco.fragments import partition
from diloco.inline import engine as inline_engine
from diloco.islands import bootstrap, compilation, devices, trial
from diloco.report import html, live, liveness, summary, totals
from diloco.report import view as view_lib
from diloco.snapshots import locations, members, portable, store
from diloco.tasks import registry
from diloco.tasks import task as task_lib
from diloco.virtual import fleet

logger = logging.getLogger(__name__)

_LONG_RECORD_BYTES = 200_000_000


@dataclasses.dataclass(frozen=True)
class Result:
  """What `train` returns.

  Attributes:
    status: see `outcome.Outcome`.
    summary: the content of summary.json.
    report: path of report.html.
  """

  status: outcome_lib.Status
  summary: Mapping[str, Any]
  report: pathlib.Path


@process.private_files()
def train(
  values: Mapping[str, Any],
  workdir: str | os.PathLike[str],
  *,
  quiet: bool = False,
  cut: str | None = None,
) -> Result:
  """Trains, or goes on with the run that is in `workdir`.

  Args:
    values: the configuration, such as a `ConfigDict`.
    workdir: directory of the run; made if it does not exist.
    quiet: show no live view.
    cut: set the run back to this cut first, "last" or a number.

  Returns:
    How it ended. A first Ctrl-C or SIGTERM winds the run down in order, which
    makes it "stopped"; a second kills it.

  Raises:
    UserError: the configuration, the machine or the directory will not do.
      Nothing has been started or written then.
    DetachedError: the controller failed; islands and syncers that are processes
      go on for `orphan_secs`, and the next `train` takes them up.
  """
  return conduct(values, workdir, quiet=quiet, cut=cut)


def conduct(
  values: Mapping[str, Any],
  workdir: str | os.PathLike[str],
  *,
  quiet: bool = False,
  cut: str | None = None,
  begun: Callable[[controller_lib.Controller], None] = lambda _: None,
) -> Result:
  """As `train`, but leaves modes of files to the caller; in any thread.

  Others see nothing of `workdir`, if it is made now. `begun` is given the
  controller before its first turn: other threads may call its `interrupt`, and
  signal its roles.
  """
  config = config_lib.from_mapping(values)
  run_dir = errors.directory("workdir", workdir).absolute()
  if config.engine in ("inline", "virtual"):
    process.keep_memory()  # before what follows has JAX begin
  if config.engine == "virtual":
    compilation.in_one_thread()
  task, plan, given = preflight(config, run_dir)
  resumed = process.holds_run(run_dir)
  if config.engine == "virtual":
    return _train_in_virtual_time(
      config, run_dir, task, plan, given, quiet=quiet
    )
  before = process.read_config(run_dir) if resumed else config
  snapshots = store.SnapshotStore(process.store_url(run_dir, config))
  run_id = process.run_id(run_dir) or process.draw_run_id()
  run = process.run_name(run_dir) or run_id
  snapshots.perform(members.of_run(run, snapshots.each))  # which may refuse
  if resumed:
    restorer.check_store(run_dir, snapshots)
    snapshots.write_plan(plan)  # refuses another plan before anything changes
  run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
  process.unwind_at_interrupts()
  with contextlib.ExitStack() as ending:
    engine = _engine(config, run_dir, task, ending)  # which may refuse
    held = ending.enter_context(_take(snapshots, config, run_dir, run_id))
    if not resumed:  # the lease names this directory by now
      held.check()
      process.write_config(config, run_dir, run_id)
    crash.configure(run_dir, "controller")
    if not engine.apart:
      ending.callback(engine.kill_leftovers)
    incarnation = roles.draw_incarnation(run_dir, "controller")

    def restorer_with(end: Callable[[], list[str]]) -> restorer.Restorer:
      return restorer.Restorer(
        run_dir, config, plan, end, incarnation, token=held.token
      )

    def end_roles() -> list[str]:
      held.check()
      return engine.kill_leftovers()

    if resumed and config.engine == "ray" and config.store:
      relay.collect(run_dir, snapshots)  # what was told of the last session
    # Before a head is set back or a role acts, of which no tape may tell.
    keeper = ending.enter_context(
      _kept(run_dir, config, held.check, incarnation)
    )
    if resumed:
      restorer_with(end_roles).prepare(cut)
    held.check()
    # Before any role, so that a run killed at any later instant can go on.
    process.write_config(config, run_dir, run_id)
    snapshots.write_plan(plan)
    if given is not None:
      bootstrap.keep_given(snapshots, plan, given)
    times = timing.settle(snapshots, config, anew=not engine.survivors())
    held.renew_within(times.control_ttl_secs)
    server = channel.Server(config.controller.port, engine.host)
    ending.callback(server.close)
    view = live.LiveView(
      run_dir,
      quiet=quiet,
      hint="Ctrl-C drains and saves; once more kills",
      exposed_secs=config.controller.openmetrics_secs,
    )
    controller = controller_lib.Controller(
      _without_past_faults(config, view.shown),
      run_dir,
      controller_lib.Outside(
        engine,
        server,
        on_tick=view.tick,
        set_back=lambda end: restorer_with(end).set_back(),
        tenure=held,
      ),
      task.tokens_per_batch,
      times,
      incarnation=incarnation,
      changed=config_changes.changes(before, config),
    )
    begun(controller)
    with (
      contextlib.closing(view),
      process.hearing(lambda _: controller.interrupt()),
    ):
      outcome = controller.run()
    if keeper:
      keeper.bring()
    concluded = _conclude(run_dir)
  if outcome.user_error:
    raise outcome.user_error
  return Result(outcome.status, *concluded)


def _engine(
  config: config_lib.RunConfig,
  run_dir: pathlib.Path,
  task: task_lib.Task,
  ending: contextlib.ExitStack,
) -> base.Engine:
  """Where the run's roles live; what it holds is released by `ending`."""
  if config.engine == "process":
    return process_engine.ProcessEngine(run_dir)
  if config.engine == "ray":
    return ending.enter_context(
      contextlib.closing(ray_engine.Engine(run_dir, config))
    )
  compilation.use_cache(run_dir / "compilation_cache")
  return inline_engine.Engine(run_dir, config, task)


def _train_in_virtual_time(
  config: config_lib.RunConfig,
  run_dir: pathlib.Path,
  task: task_lib.Task,
  plan: partition.FragmentPlan,
  given: portable.Params | None,
  *,
  quiet: bool,
) -> Result:
  """Trains in this process; the same again gives the same again."""
  if process.holds_run(run_dir):
    raise errors.UserError(
      f"--workdir={run_dir}",
      "it holds a run, and one in virtual time cannot go on",
      "name a new directory; from its configuration it is the same again",
    )
  compilation.use_cache(run_dir / "compilation_cache")
  announced = channel.address_path(run_dir)
  with contextlib.ExitStack() as ending:
    held, run_id = tenure.Unopposed(), process.draw_run_id()
    if config.store:  # in it nobody else may train meanwhile
      snapshots = store.SnapshotStore(config.store)
      held = ending.enter_context(_take(snapshots, config, run_dir, run_id))
    process.write_config(config, run_dir, run_id)
    ending.enter_context(_kept(run_dir, config, held.check))
    announced.parent.mkdir(exist_ok=True)
    announced.write_text(json.dumps(liveness.announcement(run_dir)))
    view = live.LiveView(run_dir, quiet=quiet, hint="Ctrl-C ends it")
    try:
      outcome = fleet.Fleet(config, run_dir, task, plan, given, view.tick).run()
    except Exception as error:
      why = errors.with_place(error)
      if isinstance(error, errors.UserError):
        if not isinstance(error, errors.OwnCodeError):
          raise
        why = f"{error.what}: {error.why}"
      log = run_dir / "logs" / "virtual.log"
      log.parent.mkdir(exist_ok=True)
      log.write_text("".join(traceback.format_exception(error)))
      raise errors.UserError(
        f"the run in {run_dir}", why, f"see {log}"
      ) from error
    finally:
      view.close()
      announced.unlink()
    return Result(outcome.status, *_conclude(run_dir))


def _take(
  snapshots: store.SnapshotStore,
  config: config_lib.RunConfig,
  run_dir: pathlib.Path,
  run_id: str,
) -> tenure.Tenure:
  """Keeps other controllers out of a run."""
  what = f"--workdir={run_dir}"

  def unused() -> bool:
    if process.holds_run(run_dir) and process.run_id(run_dir) != run_id:
      raise errors.UserError(
        what,
        "another controller has just begun a run in it",
        "leave it to that one, or stop that one first",
      )
    return not process.holds_run(run_dir) and tenure.is_unused(snapshots)

  ttl_secs = timing.read(snapshots, config.controller).control_ttl_secs
  mine = config.store or process.was_begun_in(run_dir)
  return tenure.take(
    snapshots,
    run_id,
    ttl_secs,
    what,
    copied=not mine and process.holds_run(run_dir),
    unused=unused,
  )


def preflight(
  config: config_lib.RunConfig, run_dir: pathlib.Path
) -> tuple[task_lib.Task, partition.FragmentPlan, portable.Params | None]:
  """Checks everything that can be checked before a run; starts nothing.

  It leaves nothing behind, but writes into a store that was named, to try it.

  Returns:
    The task, every function of which was tried, its fragments, and initial
    parameters if the run is to be given some and does not have them yet.

  Raises:
    UserError: the first thing that will not do.
  """
  _check_directory(run_dir, config)
  if config.engine == "process":  # else all islands share this one's cores
    resources.check_fits(config, resources.available_cores())
  if config.engine == "inline":
    devices.of_client(config.fleet, jax.devices())
  if config.engine == "ray":
    cluster.check(config)
  channel.check_port(config.controller.port)
  if config.store:
    _check_store(config.store, run_dir)
  task = registry.make_task(
    config.task.name, config.task.options, config.replicas
  )
  tree = trial.check(task, config)
  plan = tree.plan(config.sync)
  if config.engine == "virtual":
    fleet.check(config, plan)
  else:
    timing.derive(config.controller, 0.0)  # how fast the store is comes later
  return task, plan, _given(config, run_dir, tree.shapes, plan)


def _check_store(url: str, run_dir: pathlib.Path) -> None:
  """Refuses a store of the user's out of reach, unsafe, or of another run."""
  locations.check(url)
  what = f"config.store = {url!r}"
  try:
    broken = promises.broken(url)
    snapshots = store.SnapshotStore(url)
    known = process.holds_run(run_dir)
    home = snapshots.perform(move.home())
    held = not known and (
      snapshots.read_plan() is not None
      or (bool(home) and not tenure.is_unused(snapshots))
    )
    moved = known and home not in ("", process.run_id(run_dir))
  except (OSError, errors.CorruptSnapshotError) as error:
    why = errors.of_store(error)
    raise errors.UserError(
      what,
      f"it cannot be reached, read or written ({why})",
      "check the URL, and that endpoint, bucket and credentials are right",
    ) from error
  if broken:
    raise errors.UserError(what, broken[0].text, broken[0].advice)
  if held:
    raise errors.UserError(
      what,
      "there is a run in it, and it is not that of this --workdir",
      "name another prefix or the --workdir of that run, or go on with it here:"
      f" 'diloco resume {url} --workdir=NEW'",
    )
  if moved:
    raise errors.UserError(
      f"--workdir={run_dir}",
      f"its run was taken over at {url}, and goes on in another directory",
      f"go on there, or take it back: 'diloco resume {url} --workdir=NEW'",
    )


def _given(
  config: config_lib.RunConfig,
  run_dir: pathlib.Path,
  shapes: Mapping[str, tuple[int, ...]],
  plan: partition.FragmentPlan,
) -> portable.Params | None:
  """Reads and checks the parameters that `init_from` names, if need be."""
  if not config.init_from:
    return None
  if process.holds_run(run_dir):
    snapshots = store.SnapshotStore(process.store_url(run_dir))
    if bootstrap.has_given(snapshots, plan.num_fragments):
      return None  # a run goes on without the file
  what = f"config.init_from = {config.init_from!r}"
  found = portable.read(what, config.init_from)
  portable.check_fits(what, found, shapes)
  return found


def _check_directory(
  run_dir: pathlib.Path, config: config_lib.RunConfig
) -> None:
  what = f"--workdir={run_dir}"
  errors.refuse_tilde(what, run_dir)
  if run_dir.exists() and not run_dir.is_dir():
    raise errors.UserError(what, "it is a file", "name a directory")
  existing = run_dir
  while not existing.exists():
    existing = existing.parent
  try:
    # Permissions alone do not tell: not root's, not of a read-only disk.
    tempfile.TemporaryDirectory(dir=existing).cleanup()
  except OSError as error:
    raise errors.UserError(
      what,
      f"nothing can be written in {existing} ({error.strerror})",
      "choose another directory",
    ) from error
  if not run_dir.exists() or _never_began(run_dir, config):
    return
  if not process.holds_run(run_dir):
    raise errors.UserError(
      what,
      "it is not empty and holds no run",
      "name a new or empty directory, or that of a run to go on with",
    )
  if origin := process.origin(run_dir):
    raise errors.UserError(
      what,
      f"it is a copy of the run at {origin['url']}",
      "go on with that run where it was begun",
    )
  old = process.read_config(run_dir)
  if liveness.controller_alive(run_dir):
    raise move.alive(what)
  config_changes.check_resumable(old, config)


def _never_began(run_dir: pathlib.Path, config: config_lib.RunConfig) -> bool:
  """Whether nothing is there, or what a run has left that was killed at once.

  That is a lease, and a configuration that was not written to its end.
  """
  left = {path.name for path in run_dir.iterdir()} - {process.UNFINISHED}
  if left != {process.STORE} or config.store or process.holds_run(run_dir):
    return not left
  return tenure.is_unused(store.SnapshotStore(process.store_url(run_dir)))


def _without_past_faults(
  config: config_lib.RunConfig, shown: view_lib.RunView
) -> config_lib.RunConfig:
  """Drops faults that an earlier session of the run already injected."""
  past = [(event["kind"], event["target"]) for event in shown.faults]
  for problem in shown.broken:
    # No reason to stop: what a run goes on from is in its store.
    logger.warning("tape_damaged %s", problem)
  left = []
  for fault in config.faults:
    if (fault.kind, fault.target) in past:
      past.remove((fault.kind, fault.target))
    else:
      left.append(fault)
  return dataclasses.replace(config, faults=tuple(left))


def _kept(
  run_dir: pathlib.Path,
  config: config_lib.RunConfig,
  check: Callable[[], None] = lambda: None,
  life: int = 0,
) -> contextlib.AbstractContextManager[logbook.Keeper | None]:
  """Keeps a run's files where its store is, if that is not with them."""
  if not config.store:
    return contextlib.nullcontext()
  return logbook.Keeper(
    run_dir,
    store.SnapshotStore(config.store),
    check,
    relayed=config.engine == "ray",
    life=life,
  )


def _conclude(run_dir: pathlib.Path) -> tuple[dict[str, Any], pathlib.Path]:
  reading = totals.begin(run_dir)
  size = sum(path.stat().st_size for path in run_dir.glob("*/*.jsonl"))
  if reading.past is not None:
    size -= reading.follower.num_bytes
  if size > _LONG_RECORD_BYTES:
    logger.warning(
      "reading %d MB of the record for summary and report, a minute for every"
      " few hundred; Ctrl-C leaves them to 'diloco report %s'",
      size / 1e6,
      run_dir,
    )
  run = summary.load(run_dir, reading)
  summary.set_aside(run_dir, run)
  facts = summary.write_summary(run_dir, run)
  return facts, html.write_report(run_dir, run)
