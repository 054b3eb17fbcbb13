"""Processes of a session's roles: started, attached to, killed, mourned.

A *seat* is a place for a syncer process. Any of them may lead; the first is
called `syncer`, the others `standby`. A run may have an evaluator besides, for
which nothing waits.
"""

import itertools
import logging
import os
import pathlib
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco import config as config_lib
from diloco import config_changes, errors, process
from diloco.controller import resources
from diloco.controller.engines import base
from diloco.snapshots import keys, lease, operations, records, store
from diloco.tape import events, recorder

logger = logging.getLogger(__name__)

EVALUATOR = "evaluator"
_KILL_SECS = 10.0
_TAIL_BYTES = 1 << 16
_FAILED = re.compile("exit [1-9][0-9]*")
_SAID = 300  # characters of a last line that go on the tape
_ERROR = "error: "  # begins the line of `process.print_error`
# A role lives on when these change: the controller alone reads them, or tells.
_OWN_FIELDS = ("config.faults", "config.programs")
_LIVE_FIELDS = tuple(f"config.{name}" for name in config_changes.LIVE)


class Death(NamedTuple):
  """A role's process is gone."""

  role: str
  cause: str

  @property
  def failed(self) -> bool:
    """Whether it ended by itself, with an error, and not by a signal."""
    return _FAILED.fullmatch(self.cause) is not None


def seats(standbys: int) -> list[str]:
  """Names of the run's syncer processes."""
  more = [f"standby{n}" for n in range(2, standbys + 1)]
  return ["syncer", *(["standby"] if standbys else []), *more]


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
  for incarnation in itertools.count(max(last, newest_tape(run_dir, role)) + 1):
    try:
      recorder.tape_path(run_dir, role, incarnation).touch(
        0o600, exist_ok=False
      )
    except FileExistsError:
      continue
    return incarnation
  raise AssertionError("numbers do not end")


def draw_life(island: int, newest: int) -> operations.Procedure[int]:
  """Draws the number of an island's next life, which no other anywhere gets.

  What a life publishes is named after its number.

  Args:
    island: whose.
    newest: a number that is known to be taken.
  """
  try:
    member, _ = yield operations.Read(keys.member_key(island), records.Member)
  except errors.CorruptSnapshotError:
    member = None
  newest = max(newest, member.incarnation if member else 0)
  while not (life := (yield from lease.draw(keys.lives_key(island), newest))):
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

    Args:
      config: the run's configuration.
      run_dir: directory of the run.
      engine: where its roles live.
      tape: where their lives go.
      check: asked before a role is started or sent a signal; raises
        `FencedError` once that is another controller's to do.

    Raises:
      UserError: the fleet does not fit this machine.
    """
    self._check = check
    self._store = store.SnapshotStore(process.store_url(run_dir, config))
    self._run_dir = run_dir
    self._engine = engine
    self._tape = tape
    self._digest = digest(config)
    cores: Sequence[int] = []
    if engine.binds:
      cores = resources.available_cores()
      resources.check_fits(config, cores)
    self.evaluators = [EVALUATOR] if config.programs.evaluator else []
    cores, self._evaluator_cores = resources.without_evaluator(config, cores)
    self._resources = resources.ResourceManager(config, cores)
    self.islands = {f"island-{m}": m for m in range(config.fleet.islands)}
    self.seats = seats(config.controller.standbys)
    self._handles: dict[str, base.Handle] = {}
    self._incarnations: dict[str, int] = {}
    self._tokens: dict[str, int] = {}  # seat -> token it leads or led under
    self._log_begun: dict[str, int] = {}  # role -> size before its last life
    self._killed: dict[str, str] = {}  # role -> why, until it is buried

  @property
  def names(self) -> list[str]:
    """All of them, syncers first."""
    return [*self.seats, *self.islands, *self.evaluators]

  @property
  def outlive(self) -> bool:
    """Whether they live on without their controller."""
    return self._engine.apart

  def alive(self, role: str) -> bool:
    """Whether the role has a process, as far as is known."""
    return role in self._handles

  def pid(self, role: str) -> int:
    """Of a role that has a process."""
    return self._handles[role].pid

  def incarnation(self, role: str) -> int:
    """The role's newest life."""
    return self._incarnations[role]

  def says_it_leads(self, seat: str, token: int) -> None:
    """A syncer holds the lease under `token`, or with 0 waits for it."""
    self._tokens[seat] = token

  @property
  def leader(self) -> str | None:
    """The seat that leads; one deposed has an older token."""
    leading = {s: t for s, t in self._tokens.items() if t and self.alive(s)}
    return max(leading, key=lambda s: leading[s], default=None)

  @property
  def deposed(self) -> list[str]:
    """Living seats that led until another did, under a newer token.

    The heads refuse their tokens for good.
    """
    newest = max(self._tokens.values(), default=0)
    tokens = self._tokens.items()
    return [s for s, token in tokens if 0 < token < newest and self.alive(s)]

  def attach(self) -> list[str]:
    """Takes up roles that an earlier controller of this run left alive.

    Those that run under another configuration are ended.
    """
    attached = []
    survivors = self._engine.survivors()
    self._check()
    changed = [
      role
      for role, found in survivors.items()
      if found.facts.get("config") != self._digest
    ]
    if changed:
      killed = self._engine.kill_leftovers()
      logger.warning("config_changed roles_ended=%s", ",".join(killed))
      return []
    for role, found in survivors.items():
      if not self._adopt(role, found):
        logger.warning("unknown_role_ended role=%s", role)
        found.handle.signal(signal.SIGKILL)
        found.handle.wait(_KILL_SECS)
        continue
      attached.append(role)
    return attached

  def _adopt(self, role: str, found: base.Survivor) -> bool:
    try:
      incarnation = int(found.facts["incarnation"])
      if role in self.islands:
        self._resources.rebind(
          self.islands[role], found.facts["slice"], found.facts["cores"]
        )
    except (KeyError, TypeError, ValueError, LookupError):
      return False
    if role not in self.names:
      return False
    self._handles[role] = found.handle
    self._incarnations[role] = incarnation
    return True

  def start(self, role: str) -> None:
    """Starts a new life of a role.

    Raises:
      OSError: the machine or the store refuses; nothing was started.
    """
    last = self._incarnations.get(role, 0)
    if role in self.islands:
      newest = max(last, newest_tape(self._run_dir, role))
      last = self._store.perform(draw_life(self.islands[role], newest)) - 1
    self._check()  # the store may have taken its time
    incarnation = draw_incarnation(self._run_dir, role, last)
    self._incarnations[role] = incarnation
    self._begin_log(role)
    args = ["--run_dir", str(self._run_dir), "--incarnation", str(incarnation)]
    facts = {"incarnation": incarnation, "config": self._digest}
    if role in self.islands:
      self._start_island(role, args, facts)
    elif role in self.evaluators:
      self._start_evaluator(role, args, facts)
    else:
      self._start_syncer(role, args, facts)

  def _start_syncer(
    self, seat: str, args: list[str], facts: dict[str, Any]
  ) -> None:
    self._tokens.pop(seat, None)
    args += ["--role", seat]
    launch = base.Launch(
      seat, "diloco.syncer.main", args, self.log(seat), facts=facts
    )
    self._handles[seat] = self._engine.start(launch)
    self._tape.record(events.SYNCER_STARTED, pid=self.pid(seat), seat=seat)

  def _start_island(
    self, role: str, args: list[str], facts: dict[str, Any]
  ) -> None:
    island = self.islands[role]
    slice_index, cores = self._resources.bind(island)
    args += ["--island", str(island), "--slice", str(slice_index)]
    args += ["--cores", *map(str, cores)]
    self._handles[role] = self._engine.start(
      base.Launch(
        role,
        "diloco.islands.main",
        args,
        self.log(role),
        env=process.ISLAND_ENV,
        cores=cores,
        facts=facts | {"slice": slice_index, "cores": list(cores)},
      )
    )
    self._tape.record(
      events.ISLAND_STARTED,
      island=island,
      island_incarnation=self._incarnations[role],
      pid=self.pid(role),
      cores=cores,
    )

  def _start_evaluator(
    self, role: str, args: list[str], facts: dict[str, Any]
  ) -> None:
    cores = self._evaluator_cores
    args += ["--cores", *map(str, cores)]
    launch = base.Launch(
      role,
      "diloco.islands.evaluator",
      args,
      self.log(role),
      env=process.ISLAND_ENV,
      cores=cores,
      facts=facts,
    )
    self._handles[role] = self._engine.start(launch)
    self._tape.record(events.EVALUATOR_STARTED, pid=self.pid(role), cores=cores)

  def deaths(self) -> list[Death]:
    """Roles whose process has ended since the last call, each once."""
    found = []
    for role, handle in list(self._handles.items()):
      cause = handle.cause_of_death()
      if cause is not None:
        found.append(Death(role, cause))
    return found

  def buried(self, death: Death, *, expected: bool) -> None:
    """The process is known to be gone; on the record unless `expected`."""
    role = death.role
    led = role == self.leader
    del self._handles[role]
    why = self._killed.pop(role, "")
    if death.failed:  # a user's own bug, most likely
      why = why or self.error(role)[:_SAID]
    if expected:
      return
    cause = f"{death.cause}: {why}" if why else death.cause
    logger.warning("died role=%s cause=%s", role, cause)
    if role in self.islands:
      self._tape.record(
        events.ISLAND_DIED,
        island=self.islands[role],
        island_incarnation=self._incarnations[role],
        cause=cause,
      )
    elif role in self.evaluators:
      self._tape.record(events.EVALUATOR_DIED, cause=cause)
    else:
      self._tape.record(events.SYNCER_DIED, cause=cause, seat=role, led=led)

  def slice_lost(self, role: str) -> None:
    """The island's slice is suspect; another is bound if one is free."""
    self._resources.slice_lost(self.islands[role])

  def signal(self, role: str, number: int) -> None:
    """Sends a signal, if the role has a process; any thread may."""
    self._check()
    if (handle := self._handles.get(role)) is not None:
      handle.signal(number)

  def kill(self, role: str, why: str = "") -> None:
    """Kills a role's process, if it has one; `why` goes with its death."""
    if role in self._handles:
      self._killed[role] = why
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
    return sorted({*living, *self._engine.kill_leftovers()})

  def is_stranger(self, role: str, pid: object) -> bool:
    """Whether `pid` is not the process this controller knows for a role."""
    handle = self._handles.get(role)
    return handle is None or (pid is not None and pid != handle.pid)

  def keep_record(self) -> None:
    """Makes sure that others can read which processes there are."""
    self._engine.keep_record()

  def kill_stray(self, pid: int) -> None:
    """Ends a process of this run that is not the one known by its role."""
    self._check()
    self._engine.kill_stray(pid)

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

  def _begin_log(self, role: str) -> None:
    """Notes where the log of a new life begins: logs are continued."""
    log = self.log(role)
    self._log_begun[role] = log.stat().st_size if log.exists() else 0
