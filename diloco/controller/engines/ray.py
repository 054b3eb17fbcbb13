"""The `ray` engine: roles placed on the nodes of a Ray cluster.

Ray only places. Each life of a role has a detached actor, its `keeper.Keeper`,
which Ray never restarts; the controller alone does that. The actor starts the
process that every engine of processes starts, and tells how it ended. Roles
outlive their controller as long as the cluster lives; the next one finds their
actors by name.

Where a node sees the run directory, logs and tapes are where they always are.
Where it does not, a role lives in a folder of its own: its keeper is sent the
configuration and the controller's address, and returns the log; what it records
comes through the store (`diloco.relay`).
A life is numbered, not its process: process numbers of two nodes may be equal.
What might wait for the cluster is done on a thread of the engine's own; the
controller's thread only looks at what has come back.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

from diloco import channel, relay
from diloco import config as config_lib
from diloco.controller.engines import base, cluster, keeper
from diloco.controller.engines import process as process_engine
from diloco.snapshots import locations, store

logger = logging.getLogger(__name__)

# Of the time after which a role hangs; so long one may live where nobody can
# withdraw its permit.
_LEASES_A_HANG = 6
_MARGIN_SECS = 1.0  # for clocks that run at another rate, and to die in
_KILL_SECS = 5.0  # for a keeper to end its role; then Ray ends the keeper
_ANSWER_SECS = 10.0  # for a keeper to say who it is
_TOLD_SECS = 2.0  # for all of them to hear where the controller is
# Of the controller's environment; a node has its own PATH and HOME.
_HANDED_ON = ("AWS_", "DILOCO_", "GOOGLE_", "JAX_", "XLA_")

Placed = tuple[Any, Any]  # a keeper's actor, and what its `live` will return


class Handle(base.Handle):
  """A life of a role on some node; see `base.Handle`."""

  def __init__(
    self,
    life: int,
    release: Callable[[], object],
    log: pathlib.Path,
    placed: "futures.Future[Placed]",
    submit: Callable[..., "futures.Future[Any]"],
  ):
    self._ray = cluster.load()
    self._life = life
    self._release = release  # takes its permit away
    self._log = log
    self._placed = placed
    self._submit = submit
    self._cause: str | None = None
    self._killed_secs = 0.0
    self._forced = False

  @property
  def pid(self) -> int:
    """Number of the role's life, by which its channel names it too."""
    return self._life

  def cause_of_death(self) -> str | None:
    """How it ended, as "exit 0", "SIGKILL" or "node lost"; None if alive."""
    if self._cause is None and self._placed.done():
      self._cause = self._look()
      overdue = self._killed_secs and (
        time.monotonic() > self._killed_secs + _KILL_SECS
      )
      if self._cause is None and overdue and not self._forced:
        self._forced = True
        self._submit(self._ray.kill, self._placed.result()[0])
    return self._cause

  def _look(self) -> str | None:
    errors = self._ray.exceptions
    try:
      actor, end = self._placed.result()
      if not self._ray.wait([end], timeout=0)[0]:
        return None
      found = self._ray.get(end)
    except errors.ActorUnavailableError:
      # It could not be asked for a moment.
      self._placed = self._submit(lambda: (actor, actor.live.remote()))
      return None
    except Exception as error:  # Ray's, and there are many
      logger.warning("keeper_lost life=%d error=%s", self._life, error)
      if self._forced:
        return "SIGKILL"
      lost = isinstance(error, errors.ActorDiedError)
      return _lost(str(error)) if lost else f"not kept: {error}"
    # Nobody is left who needs it; a successor need not wait.
    with contextlib.suppress(OSError):
      self._release()
    self._submit(self._ray.kill, actor)
    last = found.log + (f"error: {found.why}\n" if found.why else "").encode()
    with contextlib.suppress(OSError), self._log.open("ab+") as log:
      log.seek(-min(len(last), log.tell()), os.SEEK_END)
      if log.read() != last:  # two handles of a life may see its end
        log.write(last)
    return process_engine.cause(found.code)

  def signal(self, number: int) -> None:
    """Sends a signal to the role and all it started."""
    if number == signal.SIGKILL:
      if self._killed_secs:
        return
      self._killed_secs = time.monotonic()
    self._submit(lambda: self._placed.result()[0].signal.remote(number))


def _lost(text: str) -> str:
  return "node lost" if "node" in text and "died" in text else "keeper lost"


class Engine(base.Engine):
  """See `base.Engine`."""

  apart = True
  binds = False

  def __init__(self, run_dir: pathlib.Path, config: config_lib.RunConfig):
    """Connects to the cluster; starts nothing.

    Raises:
      UserError: there is no cluster, or it is too small.
    """
    self._mine = cluster.connect(config.ray_address)
    self._ray = ray = cluster.load()
    self._slices = config.fleet.slices
    self._lease_secs = config.controller.hang_limit_secs / _LEASES_A_HANG
    self._run_dir = run_dir
    self._permits = run_dir / "control" / "permits"
    # A store that is not in the run directory is open to all nodes.
    self._store: store.SnapshotStore | None = None
    if config.store and not locations.lies_in(config.store, run_dir):
      self._store = store.SnapshotStore(config.store)
    self._address = b""  # of the controller, as all who live were told it
    self._telling: futures.Future[None] | None = None
    self.host = ray.util.get_node_ip_address()
    path = run_dir.resolve()
    place = f"{path.stat().st_ino}:{path}"  # not of a copy
    self._namespace = (
      f"diloco-{hashlib.sha256(place.encode()).hexdigest()[:16]}"
    )
    ray.cloudpickle.register_pickle_by_value(keeper)
    self._keeper = ray.remote(keeper.Keeper)
    self._calls = futures.ThreadPoolExecutor(1, "ray")
    try:
      cluster.check_fits(config)
    except BaseException:
      self.close()
      raise

  def close(self) -> None:
    """Leaves the cluster, where roles go on."""
    self._calls.shutdown()
    if self._mine:
      self._ray.shutdown()

  def start(self, launch: base.Launch) -> Handle:
    """Starts a role and returns at once.

    A life that may still be alive somewhere is deprived of its permit, and the
    new one begins when it must have ended.

    Raises:
      OSError: its files cannot be written.
    """
    life = launch.facts["incarnation"]
    word = secrets.token_hex(16)
    files = self._files(word)
    self._permits.mkdir(parents=True, exist_ok=True)
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    launch.log.touch()  # with this process's mode for files
    wait_secs = 0.0
    of_role = [n for n in self._held() if n.rpartition(".")[0] == launch.role]
    self._withdraw(of_role)
    if of_role:
      wait_secs = self._lease_secs + _MARGIN_SECS
    permit = self._permits / f"{launch.role}.{life}"
    permit.write_text(word)
    if self._store:
      self._store.put(relay.permit_key(launch.role, life), word.encode())
    env = {k: v for k, v in os.environ.items() if k.startswith(_HANDED_ON)}
    order = keeper.Order(
      module=launch.module,
      args=list(launch.args),
      env={
        **launch.env,
        **env,
        "PYTHONPATH": process_engine.python_path(),
        "DILOCO_LIFE": str(life),
      },
      log=str(launch.log),
      permit=str(permit),
      word=word,
      wait_secs=wait_secs,
      lease_secs=self._lease_secs,
      facts=dict(launch.facts),
      run_dir=str(self._run_dir),
      files=files,
    )
    placed = self._calls.submit(self._place, permit.name, launch, order)
    return self._handle(permit.name, life, launch.log, placed)

  def _handle(
    self,
    name: str,
    life: int,
    log: pathlib.Path,
    placed: "futures.Future[Placed]",
  ) -> Handle:
    release = functools.partial(self._withdraw, [name])
    return Handle(life, release, log, placed, self._calls.submit)

  def _held(self) -> set[str]:
    """Names of all permits, in the run directory and in the store."""
    here = [path.name for path in self._permits.glob("*")]
    return {*here, *(self._store.keys(relay.PERMITS) if self._store else ())}

  def _withdraw(self, names: Iterable[str]) -> None:
    """Takes permits away."""
    for name in names:
      (self._permits / name).unlink(missing_ok=True)
      if self._store:
        self._store.delete(f"{relay.PERMITS}/{name}")

  def _files(self, word: str) -> dict[str, bytes]:
    """What a role must know where nothing of the run is seen but the store."""
    if self._store is None:
      return {}
    files = {
      "config.json": (self._run_dir / "config.json").read_bytes(),
      relay.APART: word.encode(),
    }
    with contextlib.suppress(FileNotFoundError):
      path = channel.address_path(self._run_dir)
      name = path.relative_to(self._run_dir).as_posix()
      files[name] = path.read_bytes()
    return files

  def tell_address(self) -> None:
    """See `base.Engine`."""
    if self._store is None or (self._telling and not self._telling.done()):
      return  # a keeper that is silent must not fill the line of calls
    path = channel.address_path(self._run_dir)
    with contextlib.suppress(FileNotFoundError):
      address = path.read_bytes()
      if address != self._address:
        name = path.relative_to(self._run_dir).as_posix()
        self._telling = self._calls.submit(self._tell_address, name, address)

  def _tell_address(self, name: str, address: bytes) -> None:
    told = [actor.put.remote(name, address) for _, actor in self._actors()]
    if told:
      heard, _ = self._ray.wait(told, num_returns=len(told), timeout=_TOLD_SECS)
      if len(heard) < len(told):
        return  # once more, with the next turn
    for one in told:
      with contextlib.suppress(self._ray.exceptions.RayActorError):  # has gone
        self._ray.get(one)
    self._address = address  # unless somebody's disk was full

  def _place(
    self, name: str, launch: base.Launch, order: keeper.Order
  ) -> Placed:
    need: dict[str, float] = {"CPU": launch.facts.get("cpus", 0.0)}
    if "slice" in launch.facts:
      hardware = self._slices[launch.facts["slice"]]
      need = dict(cluster.of_slice(hardware, sorted(cluster.kinds())))
    actor = self._keeper.options(
      name=name,
      namespace=self._namespace,
      lifetime="detached",
      max_restarts=0,
      max_task_retries=0,
      max_concurrency=8,  # `live` of two controllers, and who asks meanwhile
      num_cpus=need.pop("CPU", 0.0),
      resources=need,
      scheduling_strategy="SPREAD",
    ).remote(order)
    return actor, actor.live.remote()

  def survivors(self) -> dict[str, base.Survivor]:
    """Roles an earlier controller of this run left alive, by name."""
    found: dict[str, base.Survivor] = {}
    for role, actor in self._actors():
      try:
        facts = self._ray.get(actor.facts.remote(), timeout=_ANSWER_SECS)
      except self._ray.exceptions.RayError as error:
        logger.warning("keeper_silent role=%s error=%s", role, error)
        self._calls.submit(self._ray.kill, actor)
        continue  # its permit goes when its successor starts
      life = facts["incarnation"]
      if role not in found or found[role].facts["incarnation"] < life:
        placed: futures.Future[Placed] = futures.Future()
        placed.set_result((actor, actor.live.remote()))
        log = self._run_dir / "logs" / f"{role}.log"
        handle = self._handle(f"{role}.{life}", life, log, placed)
        found[role] = base.Survivor(handle, facts)
    return found

  def _actors(self) -> list[tuple[str, Any]]:
    """Keepers of this run, with their roles."""
    found = []
    for named in self._ray.util.list_named_actors(all_namespaces=True):
      if named["namespace"] == self._namespace:
        role = named["name"].rpartition(".")[0]
        with contextlib.suppress(ValueError):  # it has gone meanwhile
          actor = self._ray.get_actor(named["name"], self._namespace)
          found.append((role, actor))
    return found

  def kill_leftovers(self) -> list[str]:
    """Ends all roles of this run, whoever started them; returns who lived."""
    self._calls.submit(lambda: None).result()  # all that was asked for is done
    living = self.survivors()
    for found in living.values():
      found.handle.signal(signal.SIGKILL)
    for found in living.values():
      found.handle.wait(2 * _KILL_SECS)
    for _, actor in self._actors():  # that did not answer, or were replaced
      self._ray.kill(actor)
    left: set[str] | None = None
    with contextlib.suppress(OSError):
      left = self._held()  # by lives that nobody saw end
      self._withdraw(left)
    if left is None or left:
      time.sleep(self._lease_secs + _MARGIN_SECS)
    return sorted(living)

  # Ray keeps the record. A stray is a life that is not the one known, and only
  # roles tell the numbers of lives apart, so `kill_stray` leaves it to its
  # permit: that goes when another life of its role starts, and a session starts
  # all roles that it has not taken up; or with all others at the end.
