"""The `inline` engine: every role is threads of this one process.

The controller, and all that it knows of roles, is that of every run; what is
here takes the place of `controller.engines.process`. Islands train on parts of
one JAX client. To be killed is cooperative: a role's death is told once its
threads have ended, so no two lives of it overlap; one whose threads hang is
told dead after a while, and does no more than what it hangs in.

What roles share, and what guards it: the snapshot store and the tape's lines by
locks of their own; the compiled programs by the trainer's lock; `likes` by the
engine's. The controller's state belongs to the controller's thread alone, which
hears of roles through channels, as ever.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from diloco import config as config_lib
from diloco import process, workers
from diloco.controller.engines import base
from diloco.islands import devices, programs, trainer
from diloco.islands import island as island_lib
from diloco.snapshots import operations, store
from diloco.syncer import main as syncer_main
from diloco.tasks import task as task_lib

_HANG_SECS = 10.0  # after a kill; then a role counts as gone
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class MortalThreads(workers.Threads):
  """See `workers.Threads`; these are of one life, which can be killed.

  A thread of Python cannot be ended from outside, so each of these asks before
  whatever it does next whether it still may: the main thread with every step
  and operation, a loop before every operation of the store, a pulse before a
  beat. `kill` may be called by any thread, all else by the role's main thread.
  """

  def __init__(self, prefix: str):
    self.prefix = prefix  # of the names of its threads
    self._dead = threading.Event()
    self._ends: list[Callable[[], None]] = []
    self._releases: list[Callable[[], None]] = []

  @property
  def dead(self) -> bool:
    """See `workers.Threads`."""
    return self._dead.is_set()

  def kill(self) -> None:
    """Has every thread end before whatever it does next; waits for none."""
    self._dead.set()

  def end(self) -> None:
    """Ends what is left of all threads, then releases what they had.

    Called where the role has ended otherwise than in order. What hangs in one
    of its threads hangs here.
    """
    self.kill()
    for end in [*self._ends, *reversed(self._releases)]:
      with contextlib.suppress(Exception):  # the others are to end too
        end()

  def check(self) -> None:
    """See `workers.Threads`."""
    if self.dead:
      raise workers.Ended

  def at_death(self, release: Callable[[], None]) -> None:
    """See `workers.Threads`."""
    self._releases.append(release)

  def loop(
    self,
    name: str,
    script: operations.Script[None],
    execute: Callable[[operations.Operation], Any],
    *,
    at_once: bool = False,
  ) -> workers.Loop:
    """See `workers.Threads`."""

    def while_alive(operation: operations.Operation) -> Any:
      self.check()
      return execute(operation)

    loop = super().loop(self._named(name), script, while_alive, at_once=at_once)
    self._ends.append(loop.close)
    return loop

  def pulse(
    self, beat: Callable[[], None], every_secs: float, name: str
  ) -> workers.Pulse:
    """See `workers.Threads`; the dead do not beat."""
    made = super().pulse(
      lambda: None if self.dead else beat(), every_secs, self._named(name)
    )
    self._ends.append(made.close)
    return made

  def once(self, name: str, work: Callable[[], None]) -> workers.Worker:
    """See `workers.Threads`."""
    made = super().once(self._named(name), work)
    self._ends.append(made.join)
    return made

  def _named(self, name: str) -> str:
    return f"{self.prefix}/{name}"


class Role:
  """A life of a role; see `base.Handle`."""

  def __init__(
    self,
    threads: MortalThreads,
    log: pathlib.Path,
    body: Callable[[], None],
  ):
    """Starts it; `body` returns once it has left in order."""
    self._threads = threads
    self._log = log
    self._body = body
    self._cause: str | None = None
    self._killed_secs = 0.0
    _LOGS.paths[threads.prefix] = log
    self._thread = threading.Thread(
      target=self._run, name=f"{threads.prefix}/main", daemon=True
    )
    self._thread.start()

  def _run(self) -> None:
    cause = f"exit {process.EXIT_FAILED}"
    try:
      self._body()
      cause = "exit 0"
    except workers.Ended:
      cause = "SIGKILL"
    except Exception as error:
      with contextlib.suppress(OSError), self._log.open("a") as log:
        cause = f"exit {process.end_with(error, log)}"
    finally:
      if cause != "exit 0":
        self._threads.end()
      _LOGS.paths.pop(self._threads.prefix, None)
      self._cause = cause

  @property
  def pid(self) -> int:
    """Process number: this one's."""
    return os.getpid()

  def cause_of_death(self) -> str | None:
    """How it ended, as "exit 0" or "SIGKILL"; None while it lives."""
    if not self._thread.is_alive():
      return self._cause or "unknown"
    since = self._killed_secs
    if since and time.monotonic() > since + _HANG_SECS:
      return "SIGKILL"
    return None

  def signal(self, number: int) -> None:
    """Kills it; no other signal can be sent to threads."""
    assert number == signal.SIGKILL
    self._killed_secs = self._killed_secs or time.monotonic()
    self._threads.kill()

  def wait(self, timeout_secs: float) -> bool:
    """Waits for its end; False on time-out."""
    self._thread.join(timeout_secs)
    return not self._thread.is_alive()


class Engine(base.Engine):
  """See `base.Engine`."""

  apart = binds = False
  host = base.LOOPBACK

  def __init__(
    self,
    run_dir: pathlib.Path,
    config: config_lib.RunConfig,
    task: task_lib.Task,
  ):
    """Raises `UserError` if this process has too few devices."""
    self._run_dir = run_dir
    self._config = config
    self._task = task
    self._places = devices.of_client(config.fleet, jax.devices())
    self._store = store.SnapshotStore(process.store_url(run_dir, config))
    self._number = next(_numbers)
    self._roles: list[Role] = []
    self._likes: dict[tuple[jax.Device, ...], trainer.Trainer] = {}
    self._lock = threading.Lock()
    logging.getLogger("diloco").addHandler(_LOGS)  # adds it once

  def start(self, launch: base.Launch) -> Role:
    """Starts a role and returns at once."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    incarnation = launch.facts["incarnation"]
    # Two runs may have directories of one name.
    run = f"{self._run_dir.name}-{self._number}"
    prefix = f"{run}:{launch.role}.{incarnation}"
    threads = MortalThreads(prefix)

    def body() -> None:
      if "slice" in launch.facts:
        self._live(launch, threads)
      else:
        syncer_main.live(
          self._run_dir, launch.role, incarnation, threads, self._store
        )

    role = Role(threads, launch.log, body)
    self._roles = [r for r in self._roles if r.cause_of_death() is None]
    self._roles.append(role)
    return role

  def _live(self, launch: base.Launch, threads: MortalThreads) -> None:
    """An island's life."""
    config = process.read_config(self._run_dir, or_copy=True)
    place = self._places[launch.facts["slice"]]
    spec = island_lib.Spec(
      self._run_dir,
      self._store.url,
      int(launch.role.removeprefix("island-")),
      launch.facts["incarnation"],
      config.fleet.slices[launch.facts["slice"]],
      self._store,
    )
    like = self._like(spec.slice.shape, place)
    programs.live(spec, config, self._task, place, threads, like)

  def _like(
    self, topology: tuple[int, ...], place: list[jax.Device]
  ) -> trainer.Trainer | None:
    """What islands on the same devices have in common; never makes a step.

    An island that has its devices to itself keeps nothing else on them.
    """
    if self._places.count(place) == 1 or self._config.loop:
      return None
    with self._lock:
      key = tuple(place)
      if key not in self._likes:
        self._likes[key] = trainer.Trainer(
          self._config, self._task, 0, topology, place
        )
      return self._likes[key]

  def survivors(self) -> dict[str, base.Survivor]:
    """None: roles end with the controller."""
    return {}

  def kill_leftovers(self) -> list[str]:
    """Ends all roles; returns no names, for none is of an earlier session."""
    for role in self._roles:
      role.signal(signal.SIGKILL)
    for role in self._roles:
      role.wait(_HANG_SECS)
    return []


class _Logs(logging.Handler):
  """Puts what is logged in a role's threads into its log, as a process does.

  Attributes:
    paths: of logs of those who live, by what the names of their threads begin
      with.
  """

  def __init__(self) -> None:
    """Knows of no role."""
    super().__init__()
    self.paths: dict[str, pathlib.Path] = {}
    self.setFormatter(logging.Formatter(_FORMAT))

  def emit(self, record: logging.LogRecord) -> None:
    """See `logging.Handler`."""
    path = self.paths.get((record.threadName or "").rpartition("/")[0])
    if path is not None:
      with contextlib.suppress(OSError), path.open("a") as log:
        log.write(self.format(record) + "\n")
    elif not logging.getLogger().handlers and logging.lastResort is not None:
      logging.lastResort.handle(record)


_LOGS = _Logs()
_numbers = itertools.count()  # of engines in this process
