"""A run that goes on in another directory, from what its store has of it.

Its machine may be gone, and with it the last seconds of its tapes. What these
do not tell must not have happened: then the run is set back to the newest cut
that they tell of, of which they hold all (`logbook.Keeper.push`). That begins a
new epoch, in which nothing counts that an old role may still publish.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
import time

from diloco import config as config_lib
from diloco import errors, logbook, process, timing
from diloco.controller import restorer, roles, tenure
from diloco.fragments import partition
from diloco.snapshots import keys, members, operations, records, store
from diloco.tape import events, evidence, fates, history, reader, recorder


@dataclasses.dataclass(frozen=True)
class Found:
  """A run in its store.

  Attributes:
    url: of the store.
    config: the run's, with that store.
    plan: of its fragments.
    run: what its members go by; see `process.run_name`.
  """

  url: str
  config: config_lib.RunConfig
  plan: partition.FragmentPlan
  run: str

  @property
  def what(self) -> str:
    """The run, for a user."""
    return f"the run at {self.url}"


def look(url: str, run_dir: pathlib.Path, task: str | None) -> Found:
  """Finds a run that can go on in a new directory; touches neither.

  Args:
    url: of its store.
    run_dir: the new directory.
    task: that the user trusts, if any; see `process.check_task`.

  Raises:
    UserError: there is no such run, or it cannot go on there.
  """
  if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
    raise errors.UserError(
      f"--workdir={run_dir}",
      "it is not empty, and a run from elsewhere goes on in a new directory",
      "name another; a run that is in it already goes on with 'diloco resume"
      f" {run_dir}'",
    )
  copy = logbook.fetch(url)
  config = process.read_config(copy)
  process.check_task(config, copy, task)
  found = Found(
    url,
    dataclasses.replace(config, store=url),
    _plan(url),
    process.run_name(copy),
  )
  if config.engine == "virtual":
    raise errors.UserError(
      found.what,
      "it was in virtual time, and such a run cannot go on",
      "train from its configuration: it is the same again",
    )
  return found


def _plan(url: str) -> partition.FragmentPlan:
  plan = store.SnapshotStore(url).read_plan()
  if plan is None:
    raise errors.UserError(
      f"the run at {url}",
      "its files are there, but no fragment plan: its state is lost",
      "put the store back, or start anew",
    )
  return plan


def bring(found: Found, run_dir: pathlib.Path, cut: str | None) -> str | None:
  """Makes the run one of this machine, in a directory of its own.

  Args:
    found: the run.
    run_dir: the directory, new or empty.
    cut: that the user wants to go back to, "last" or a number.

  Returns:
    The cut that is still to be gone back to, as `cut`.

  Raises:
    UserError: the run is alive, or cannot go on from what its store has.
  """
  snapshots = store.SnapshotStore(found.url)
  times = timing.read(snapshots, found.config.controller)
  watch = tenure.Watch(times.control_ttl_secs)
  before = tenure.home(snapshots)
  _refuse_living(found, snapshots, times, watch)
  with process.private_files():
    try:
      _copy_files(found.url, run_dir)
      whole = _is_whole(run_dir)
      told = [] if whole else _told_cuts(found, run_dir, cut)
      run_id = process.draw_run_id()
      with tenure.take(
        snapshots, run_id, times.control_ttl_secs, found.what, watch
      ) as mine:
        mine.home = before  # where it stays, however this fails
        if not whole:
          _set_back(found, run_dir, told, mine.token)
        process.write_config(found.config, run_dir, run_id, found.run)
        mine.home = run_id
    except BaseException:
      shutil.rmtree(run_dir, ignore_errors=True)
      raise
  return cut if whole else None


def _refuse_living(
  found: Found,
  snapshots: store.SnapshotStore,
  times: timing.Timing,
  watch: tenure.Watch,
) -> None:
  """Watches for signs of life as long as a living role could give none.

  Not so if all have said that they leave.
  """
  first = _signs(found, snapshots)
  held = first["controller"]
  assert held is None or isinstance(held, records.Lease)
  free = watch.expired(held, time.monotonic())
  there = [s for s in first.values() if isinstance(s, records.Member)]
  lead = first["syncer"]
  led = isinstance(lead, records.Lease) and bool(lead.owner)
  if free and not led and there and all(one.left for one in there):
    return
  secs = max(times.member_ttl_secs, 0.0 if free else times.control_ttl_secs)
  print(f"{found.what}: is it alive? watching {secs:.0f} s", file=sys.stderr)
  end = time.monotonic() + secs
  while time.monotonic() < end:
    time.sleep(min(times.heartbeat_secs, 1.0))
    now = _signs(found, snapshots)
    for role in sorted({*first, *now}):
      if first.get(role) != now.get(role):
        raise errors.UserError(
          found.what,
          f"it is alive: its {role} gives signs of life",
          "stop it where it runs, and give the command again",
        )


def _signs(found: Found, snapshots: store.SnapshotStore) -> dict[str, object]:
  """The last sign of life of every role, by its name for a user.

  Raises:
    UserError: roles of another run are in its store.
  """
  signs: dict[str, object] = {}
  for role, key in (
    ("controller", keys.CONTROLLER_LEASE),
    ("syncer", keys.SYNCER_LEASE),
  ):
    lease = operations.sound(key, records.Lease)
    signs[role], _ = snapshots.perform(lease)
  everyone = members.of_run(found.run, snapshots.each)
  for member in snapshots.perform(everyone):
    where = f"{member.role} on {member.host} (process {member.pid})"
    signs[where] = member
  return signs


def _copy_files(url: str, run_dir: pathlib.Path) -> None:
  copy = logbook.fetch(url)  # with what its end has brought
  for folder in (recorder.TAPE_DIR, recorder.METRICS_DIR):
    (run_dir / folder).mkdir(parents=True, exist_ok=True)
    for path in (copy / folder).glob("*.jsonl"):
      shutil.copyfile(path, run_dir / folder / path.name)


def _is_whole(run_dir: pathlib.Path) -> bool:
  """Whether the tapes hold all: the last session ended in order."""
  lives, ended = {0}, set()
  for line in reader.stream(run_dir, only_role="controller").events:
    lives.add(line["incarnation"])
    if line["event"] == events.RUN_FINISHED:
      ended.add(line["incarnation"])
  return max(lives) in ended


def _told_cuts(
  found: Found, run_dir: pathlib.Path, cut: str | None
) -> list[int]:
  """Cuts that the tapes tell of, newest first, or the one asked for.

  Raises:
    UserError: there is none. It has deposed nobody, who may only be stopped.
  """
  told = {
    line["cut"]
    for line in reader.stream(run_dir, only_role="controller").events
    if line["event"] == events.CUT_COMPLETED
  }
  if cut not in (None, restorer.LAST):
    told &= {int(str(cut))}
  if not told:
    raise _torn(found, "they tell of no such cut")
  return sorted(told, reverse=True)


def _set_back(
  found: Found, run_dir: pathlib.Path, told: list[int], token: int
) -> None:
  """Goes back to the first of these cuts that will do."""
  why = ""
  going_back = restorer.Restorer(
    run_dir,
    found.config,
    found.plan,
    list,  # no role of it can be one of this directory
    roles.draw_incarnation(run_dir, "controller"),
    known=_unresolved(run_dir),
    token=token,
  )
  for number in told:
    try:
      going_back.prepare(str(number))
      return
    except errors.UserError as error:
      why = error.why
  raise _torn(found, why)


def _torn(found: Found, why: str) -> errors.UserError:
  return errors.UserError(
    found.what,
    "it did not end in order, so the last seconds of its tapes are lost with"
    f" its directory, and it cannot be set back to before that: {why}",
    "go on with it where it was begun, or start anew; 'diloco export' takes"
    " its parameters",
  )


def _unresolved(run_dir: pathlib.Path) -> dict[str, evidence.Contribution]:
  """What the tapes say was published, and not what became of it."""
  told = history.read(reader.stream(run_dir))
  return {
    str(item.key): item
    for facts in told.fragments.values()
    for item in facts.published.values()
    if item.key not in fates.resolved(facts)
  }
