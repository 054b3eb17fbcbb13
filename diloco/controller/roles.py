"""Processes of a session's roles: started, attached to, signalled, missed.

What its controller's core orders is done here; who leads, who is started again
and whose death is on the record are its own business (`fleet`).
"""

import dataclasses
import logging
import os
import pathlib
import signal
from collections.abc import Callable, Container, Sequence
from typing import Any

from diloco import config as config_lib
from diloco import config_changes, process
from diloco.controller import fleet, orders, resources
from diloco.controller.engines import base
from diloco.report import roster
from diloco.snapshots import keys, lease, members, operations, records, store
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)

_KILL_SECS = 10.0
_TAIL_BYTES = 1 << 16
_VERSION = 1  # of what roles say to a controller, and of where they beat
_ERROR = "error: "  # begins the line of `process.print_error`
# A role lives on when these change: the controller alone reads them, or tells.
_OWN_FIELDS = ("config.faults", "config.programs")
_LIVE_FIELDS = tuple(f"config.{name}" for name in config_changes.LIVE)


def newest_tape(run_dir: pathlib.Path, role: str) -> int:
  """The newest life of a role that has a tape here; 0 without any."""
  tapes = (run_dir / recorder.TAPE_DIR).glob(f"{role}-[0-9]*.jsonl")
  return max((int(path.stem.rpartition("-")[2]) for path in tapes), default=0)


def draw_incarnation(run_dir: pathlib.Path, role: str, last: int = 0) -> int:
  """Draws the number of a role's next life, which no other process here gets.

  What a life writes here is named after its number; so its tape is made now,
  and only if it is not there.
  """
  (run_dir / recorder.TAPE_DIR).mkdir(parents=True, exist_ok=True)
  life = max(last, newest_tape(run_dir, role)) + 1
  while True:
    try:
      recorder.tape_path(run_dir, role, life).touch(0o600, exist_ok=False)
      return life
    except FileExistsError:
      life += 1


def draw_life(role: str, newest: int) -> operations.Procedure[int]:
  """Draws the number of a role's next life, which no other anywhere gets.

  It has the role's place among the members by it, and what it publishes is
  named after it. `newest` is a number that is known to be taken.
  """
  member, _ = yield from operations.sound(keys.member_key(role), records.Member)
  newest = max(newest, member.incarnation if member else 0)
  if keys.is_island(role):
    key = lease.drawn_key(keys.earlier_lives_key(keys.island_of(role)))
    earlier, _ = yield from operations.sound(key, records.DrawnToken)
    newest = max(newest, earlier.token if earlier else 0)
  while not (life := (yield from lease.draw(keys.lives_key(role), newest))):
    pass
  return int(life)


def digest(config: config_lib.RunConfig) -> str:
  """Changes with every field that a living role may have read."""
  fields = {
    name: value
    for name, value in process.flat(config.to_dict())
    if not name.startswith(_OWN_FIELDS) and name not in _LIVE_FIELDS
  }
  return f"{records.checksum(fields):08x}"


class Roles:
  """All roles of one session, and their processes."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    run_dir: pathlib.Path,
    engine: base.Engine,
    tape: recorder.Recorder,
    check: Callable[[], None] = lambda: None,
  ):
    """Knows the fleet; starts nothing yet.

    `check` is asked before a role is started or sent a signal; it raises
    `FencedError` once that is another controller's to do.

    Raises:
      UserError: the fleet does not fit this machine.
    """
    self._check = check
    self._store = store.SnapshotStore(process.store_url(run_dir, config))
    self._run_dir = run_dir
    self.engine = engine
    self._tape = tape
    self._digest = digest(config)
    cores: Sequence[int] = []
    if engine.binds:
      cores = resources.available_cores()
      resources.check_fits(config, cores)
    self._names = fleet.Names.of(config)
    cores, self._evaluator_cores = resources.without_evaluator(config, cores)
    self._resources = resources.ResourceManager(config, cores)
    self._islands = self._names.islands
    self._handles: dict[str, base.Handle] = {}
    self._incarnations: dict[str, int] = {}
    self._log_begun: dict[str, int] = {}  # role -> size before its last life

  def attach(self) -> list[orders.Begun]:
    """Takes up roles that an earlier controller of this run left alive.

    Those of another version or configuration are ended: they would beat, speak
    or train otherwise than this one expects.

    Raises:
      UserError: roles of another run are in its store.
    """
    attached: list[orders.Begun] = []
    survivors = self.engine.survivors()
    self._tell_out_of_reach(survivors)
    self._check()
    for name, mine in (("version", _VERSION), ("config", self._digest)):
      theirs = {found.facts.get(name) for found in survivors.values()}
      if theirs - {mine}:
        killed = self.engine.kill_leftovers()
        logger.warning("%s_changed roles_ended=%s", name, ",".join(killed))
        return []
    for role, found in survivors.items():
      if not self._adopt(role, found):
        logger.warning("unknown_role_ended role=%s", role)
        found.handle.signal(signal.SIGKILL)
        found.handle.wait(_KILL_SECS)
        continue
      life, pid = self._incarnations[role], found.handle.pid
      attached.append(orders.Begun(role, life, pid, taken_up=True))
    return attached

  def _tell_out_of_reach(self, survivors: Container[str]) -> None:
    """Says who lives elsewhere: their next lives will have them leave."""
    run = process.run_name(self._run_dir)
    try:
      found = self._store.perform(members.of_run(run, self._store.each))
    except operations.FAILURES as error:
      logger.warning("out_of_reach_unknown error=%s", error)
      return
    for role, one in roster.of(found).items():
      if one["state"] == roster.ALIVE and role not in survivors:
        logger.warning(
          "out_of_reach role=%s life=%d host=%s pid=%d heard_secs=%.1f",
          *(role, one["life"], one["host"], one["pid"], one["heard_secs"]),
        )

  def _adopt(self, role: str, found: base.Survivor) -> bool:
    try:
      incarnation = int(found.facts["incarnation"])
      if role in self._islands:
        place = (found.facts[name] for name in ("slice", "cores", "left"))
        self._resources.rebind(self._islands[role], *place)
    except (KeyError, TypeError, ValueError, LookupError):
      return False
    if role not in self._names.all:
      return False
    self._handles[role] = found.handle
    self._incarnations[role] = incarnation
    return True

  def start(self, role: str) -> orders.Begun:
    """Starts a new life of a role.

    Raises:
      OSError: the machine or the store refuses; nothing was started.
    """
    newest = newest_tape(self._run_dir, role)
    newest = max(newest, self._incarnations.get(role, 0))
    drawn = self._store.perform(draw_life(role, newest))
    self._check()  # the store may have taken its time
    incarnation = draw_incarnation(self._run_dir, role, drawn - 1)
    self._incarnations[role] = incarnation
    log = self.log(role)  # which goes on from its lives before
    self._log_begun[role] = log.stat().st_size if log.exists() else 0
    launch, begun = self._launch(role, incarnation)
    handle = self._handles[role] = self.engine.start(launch)
    event, facts = begun
    self._tape.record(event, pid=handle.pid, **facts)
    return orders.Begun(role, incarnation, handle.pid)

  def _launch(
    self, role: str, incarnation: int
  ) -> tuple[base.Launch, tuple[str, dict[str, Any]]]:
    """How to start a life, and its line on the tape but for the process."""
    args = ["--run_dir", str(self._run_dir), "--incarnation", str(incarnation)]
    facts: dict[str, Any] = {
      "incarnation": incarnation,
      "config": self._digest,
      "version": _VERSION,
    }
    module = "diloco.islands.main"
    cores: Sequence[int] = []
    begun: tuple[str, dict[str, Any]]
    if role in self._islands:
      island = self._islands[role]
      slice_index, cores = self._resources.bind(island)
      args += ["--island", str(island), "--slice", str(slice_index)]
      args += ["--cores", *map(str, cores)]
      left = list(self._resources.left)
      facts |= {"slice": slice_index, "cores": list(cores), "left": left}
      told = {"island": island, "island_incarnation": incarnation}
      begun = events.ISLAND_STARTED, told | {"cores": cores}
    elif role in self._names.evaluators:
      module, cores = "diloco.islands.evaluator", self._evaluator_cores
      args += ["--cores", *map(str, cores)]
      begun = events.EVALUATOR_STARTED, {"cores": cores}
    else:
      module = "diloco.syncer.main"
      args += ["--role", role]
      begun = events.SYNCER_STARTED, {"seat": role}
    log, env = self.log(role), process.MALLOC_ENV
    return base.Launch(role, module, args, log, env, cores, facts), begun

  def deaths(self) -> list[orders.Died]:
    """Roles whose process has ended since the last call, each once."""
    found = []
    for role, handle in list(self._handles.items()):
      cause = handle.cause_of_death()
      if cause is not None:
        del self._handles[role]
        log = str(self.log(role))
        died = orders.Died(role, self._incarnations[role], cause, log=log)
        if died.failed:
          died = dataclasses.replace(died, error=self.error(role))
        found.append(died)
    return found

  def slice_lost(self, role: str) -> None:
    """The island's slice is suspect; another is bound if one is free."""
    self._resources.slice_lost(self._islands[role])

  def signal(self, role: str, number: int) -> None:
    """Sends a signal, if the role has a process; any thread may."""
    self._check()
    if (handle := self._handles.get(role)) is not None:
      handle.signal(number)

  def kill(self, role: str) -> None:
    """Kills a role's process, if it has one."""
    self.signal(role, signal.SIGKILL)

  def end_all(self) -> list[str]:
    """Leaves nothing of this run alive; gives the names of those that lived."""
    self._check()
    living = list(self._handles)
    for role in self._handles:
      self.kill(role)
    for role, handle in self._handles.items():
      if not handle.wait(_KILL_SECS):
        logger.error("unkillable role=%s pid=%d", role, handle.pid)
    return sorted({*living, *self.engine.kill_leftovers()})

  def kill_stray(self, pid: int) -> None:
    """Ends a process of this run that is not the one known by its role."""
    self._check()
    self.engine.kill_stray(pid)

  def log(self, role: str) -> pathlib.Path:
    """Where a role's output goes."""
    return self._run_dir / "logs" / f"{role}.log"

  def error(self, role: str) -> str:
    """The line in which a role's last life said why it ended.

    That is its last one of an error, or else its very last; "" if it said
    nothing, or nothing can be read.
    """
    try:
      with self.log(role).open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        begun = self._log_begun.get(role, 0)
        log.seek(max(begun, end - _TAIL_BYTES))
        text = log.read().decode(errors="replace")
    except OSError as error:
      logger.warning("log_unreadable role=%s error=%s", role, error)
      return ""
    lines = [line for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(_ERROR)]
    return next(iter([*said[-1:], *lines[-1:]]), "").removeprefix(_ERROR)
