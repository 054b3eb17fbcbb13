"""A run whose islands really train, in one thread and in virtual time.

Islands, syncer, exchange, merges and tapes are those of a live run; what stands
around them is here: instead of processes and a controller, a schedule of events
that a seed determines to the bit.
"""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from diloco import config as config_lib
from diloco import errors, process, timing, workers
from diloco.controller import outcome as outcome_lib
from diloco.controller import pilot
from diloco.fragments import partition
from diloco.islands import bootstrap, trainer
from diloco.islands import island as island_lib
from diloco.planning.fleet import traces
from diloco.snapshots import operations, portable, store
from diloco.syncer import syncer as syncer_lib
from diloco.tape import events, recorder
from diloco.tasks import replicated
from diloco.tasks import task as task_lib
from diloco.virtual import memory, scheduler
from diloco.virtual import slices as slices_lib

logger = logging.getLogger(__name__)

_FOREVER_SECS = float(10**12)
_IDLE_SECS = 0.05
_LOOK_SECS = 0.2  # and a round trip, in which the syncer has looked around


class Fleet:
  """All roles of a run, and the time that they live in."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    run_dir: pathlib.Path,
    task: task_lib.Task,
    plan: partition.FragmentPlan,
    given: portable.Params | None,
    watch: Callable[[], object] = lambda: None,
  ):
    """Makes the store and what the islands have in common.

    Raises:
      UserError: see `check`.
    """
    self.config = config
    self.run_dir = run_dir
    self.task = task
    self._watch = watch
    self.time = scheduler.Scheduler()
    self.snapshots = memory.MemoryStore()
    self.snapshots.write_plan(plan)
    if given is not None:
      bootstrap.keep_given(self.snapshots, plan, given)
    virtual, tree = config.virtual, self.snapshots.tree
    self.link = scheduler.Link(
      virtual.latency_secs, virtual.bytes_per_sec, lambda: tree.moved
    )
    self.times = check(config, plan)
    self.snapshots.write(timing.KEY, self.times)
    self.tape = recorder.Recorder(
      run_dir, "controller", 1, lambda: self.time.now
    )
    self.pilot = pilot.Pilot(config, task.tokens_per_batch)
    self._faults = list(config.faults)
    self._winds_down = False
    self.islands = [Seat(self, m) for m in range(config.fleet.islands)]
    for entry in _trace(config):
      self.time.after(entry.secs, functools.partial(self._suffer, entry))
    self._syncer: Syncer | None = None
    self._num_syncers = 0
    self._likes: dict[tuple[int, ...], trainer.Trainer] = {}

  def like(self, topology: tuple[int, ...]) -> trainer.Trainer:
    """What islands of a topology have in common; it never makes a step."""
    if topology not in self._likes:
      self._likes[topology] = trainer.Trainer(
        self.config, self.task, 0, topology, _devices(topology)
      )
    return self._likes[topology]

  def run(self) -> outcome_lib.Outcome:
    """Trains until the budget is spent, winds down, keeps the store."""
    self.begin()
    try:
      self.train_until(self.config.total_tokens)
      return self._wind_down()
    except KeyboardInterrupt:
      self._finished(outcome_lib.Outcome("killed", "interrupted"))
      raise
    finally:
      self.end()

  def begin(self) -> None:
    """Starts all roles; nothing happens yet."""
    config = self.config
    self.tape.record(
      events.RUN_STARTED,
      method=config.method,
      islands=config.fleet.islands,
      total_tokens=config.total_tokens,
    )
    self.start_syncer()
    for seat in self.islands:
      seat.start()

  @property
  def spent(self) -> bool:
    """Whether the budget is trained; who comes back later does not alter it."""
    return self._winds_down or self.pilot.budget_spent

  def train_until(self, tokens: int) -> None:
    """Goes on until so many tokens are trained."""
    self.time.run(lambda: self.pilot.tokens >= tokens, _FOREVER_SECS)

  def end(self) -> None:
    """Releases what the roles have open."""
    for seat in self.islands:
      seat.kill("run ended", told=False)
    self.tape.close()

  def _wind_down(self) -> outcome_lib.Outcome:
    seats, time = self.islands, self.time
    self._winds_down = True
    reason = "token budget trained"
    self.tape.record(events.RUN_STOPPING, reason=reason)
    there = [seat for seat in seats if seat.ready]
    drain_secs = self.times.drain_secs
    # First they end their steps.
    time.run(
      lambda: all(s.drained or not s.ready for s in there),
      self.times.hang_secs + drain_secs,
    )
    # Nothing dies any more, but it may have died before.
    time.run(lambda: self._syncer is not None, _FOREVER_SECS)
    syncer = self._syncer
    assert syncer is not None
    syncer.drain()
    time.run(lambda: False, _LOOK_SECS + self.times.round_trip_secs)
    time.run(lambda: syncer.is_settled, drain_secs)
    final = self._evaluate([seat for seat in there if seat.ready])
    for seat in there:
      seat.leave()
    syncer.close()
    outcome = outcome_lib.conclude(final)
    try:
      url = process.store_url(self.run_dir, self.config)
      self.snapshots.keep(store.SnapshotStore(url))
    except OSError as error:
      why = f"its store could not be written ({errors.of_store(error)})"
      outcome = outcome_lib.Outcome("failed", why)
    self._finished(outcome)
    return outcome

  def _finished(self, outcome: outcome_lib.Outcome) -> None:
    self.tape.record(
      events.RUN_FINISHED, status=outcome.status, reason=outcome.reason
    )

  def _evaluate(self, seats: list[Seat]) -> dict[str, Any]:
    if not seats:
      return {"error": "no island is left that could"}
    batches = self.config.programs.final_eval_batches
    island = seats[0].island
    assert island is not None
    return island.evaluate("global", batches)

  def start_syncer(self) -> None:
    """Starts the next life of the syncer."""
    self._num_syncers += 1
    self._syncer = Syncer(
      self.snapshots,
      self.config,
      recorder.Recorder(
        self.run_dir, "syncer", self._num_syncers, lambda: self.time.now
      ),
      f"syncer.{self._num_syncers}",
      scheduler.Process(self.time, scheduler.Link()),
    )
    self.tape.record(events.SYNCER_STARTED, pid=0, seat="syncer")

  def moved(self, seat: Seat) -> bool:
    """An island has made a step; says whether the budget is spent."""
    assert seat.island is not None
    self._watch()
    self.pilot.observe(seat.number, seat.island.step)
    if self._due():
      # Not in the middle of what a thread is doing.
      self.time.after(0.0, self._strike_due)
    return self.spent

  def _due(self) -> list[config_lib.FaultConfig]:
    spent = self.pilot.tokens / self.config.total_tokens
    return [fault for fault in self._faults if spent >= fault.at_fraction]

  def _strike_due(self) -> None:
    for fault in self._due():
      if self._strike(fault):
        self._faults.remove(fault)

  def _strike(self, fault: config_lib.FaultConfig) -> bool:
    """Injects a fault; says whether that could be done."""
    secs = self.config.controller.restart_base_secs
    seat = None
    if fault.target.startswith("island-"):
      seat = self.islands[int(fault.target.removeprefix("island-"))]
    there = seat.ready if seat else self._syncer is not None
    if self.spent or not there:
      return False
    self.tape.record(
      events.FAULT_INJECTED,
      kind=fault.kind,
      target=fault.target,
      at_tokens=self.pilot.tokens,
    )
    if seat is None:
      self._replace_syncer(secs)
    elif fault.kind == "poison":
      assert seat.island is not None
      seat.island.poison(0)
    else:
      seat.die(secs)
    return True

  def _replace_syncer(self, secs: float) -> None:
    """Kills the syncer, and starts the next one after that time."""
    if self._syncer is None or self.spent:
      return
    self._syncer.kill()
    self._syncer = None
    died = {"cause": "SIGKILL", "seat": "syncer", "led": True}
    self.tape.record(events.SYNCER_DIED, **died)
    self.time.after(secs, self.start_syncer)

  def _suffer(self, entry: traces.Entry) -> None:
    """A failure of the trace."""
    repair_secs = entry.repair_secs
    if repair_secs is None:
      repair_secs = self.config.virtual.repair_secs
    if entry.island is None:
      self._replace_syncer(repair_secs)
    else:
      seat = self.islands[entry.island % len(self.islands)]
      seat.lose(entry.island, repair_secs)


def check(
  config: config_lib.RunConfig, plan: partition.FragmentPlan
) -> timing.Timing:
  """Checks what a run in virtual time needs; returns its timeouts.

  Raises:
    UserError: the trace of deaths cannot be read, or strikes what there is
      not; a slice has more devices than this process sees; the link is too slow
      for the timeouts chosen.
  """
  _trace(config)
  for slice_ in config.fleet.slices:
    _devices(slice_.shape)
  # To compare and set is to read and to write.
  round_trip_secs = 2 * config.virtual.latency_secs
  return timing.derive(config.controller, round_trip_secs, plan.num_fragments)


def _devices(topology: Sequence[int]) -> list[jax.Device]:
  """Devices for an island; all islands share them."""
  wanted, found = int(np.prod(topology)), jax.devices()
  if wanted > len(found):
    raise errors.UserError(
      f"a slice of {wanted} devices in virtual time",
      f"all islands train in this process, which sees {len(found)}",
      "use smaller slices, or set XLA_FLAGS="
      f"--xla_force_host_platform_device_count={wanted}",
    )
  return found[:wanted]


def _trace(config: config_lib.RunConfig) -> tuple[traces.Entry, ...]:
  """The trace of the configuration; each island is a slice of its own."""
  path = config.virtual.trace
  if not path:
    return ()
  try:
    found = traces.read(path)
  except errors.UserError as error:
    what = f"config.virtual.trace, {error.what}"
    raise errors.UserError(what, error.why, error.remedy) from error
  found = tuple(
    entry if entry.slice is None else entry._replace(island=entry.slice)
    for entry in found
  )
  slices = config.replicas * config.fleet.islands
  for entry in found:
    known = entry.service == "syncer" or (
      entry.island is not None and entry.island < slices
    )
    if not known:
      raise errors.UserError(
        f"config.virtual.trace = {path!r}",
        f"at {entry.secs:g} s it strikes what is neither the syncer nor one of"
        f" {slices} islands",
        "name island-<m>, or m alone, or syncer",
      )
  return found


class Seat:
  """An island's place, with the life that fills it.

  Attributes:
    number: m.
    island: its life, if it has one.
    ready: whether it has joined, and lives.
    drained: whether it has published all it has.
  """

  def __init__(self, fleet: Fleet, number: int):
    config = fleet.config
    self.number = number
    self.island: island_lib.Island | None = None
    self.ready = self.drained = False
    self._fleet = fleet
    self._slice = config.fleet.slices[number]
    self._lives = 0
    self._process: scheduler.Process | None = None
    self._slices = slices_lib.Slices(config, number, fleet.time, self._regroup)
    self._outdated = False  # the slices are others than this life's
    self._begun: list[tuple[int, int]] = []  # see `slices.trained`

  def start(self) -> None:
    """Starts its next life."""
    fleet, slice_ = self._fleet, self._slice
    present = self._slices.present if fleet.config.elastic else ()
    self._outdated = False
    self._task = replicated.on(fleet.task, present, self._scheduled)
    self._lives += 1
    self._process = scheduler.Process(fleet.time, fleet.link)
    self.island = island_lib.Island(
      island_lib.Spec(
        fleet.run_dir,
        process.store_url(fleet.run_dir),
        self.number,
        self._lives,
        slice_,
        fleet.snapshots,
        present,
      ),
      fleet.config,
      self._task,
      _devices(slice_.shape),
      threads=self._process,
      like=fleet.like(slice_.shape),
    )
    self._tell(events.ISLAND_STARTED, pid=0, cores=[])
    steps = self._process.loop("steps", self._live(), self.island.execute)
    steps.start()

  def _scheduled(self, step: int) -> int:
    """How far an elastic job's schedules are, in steps of its slices."""
    tokens = slices_lib.trained(self._begun, step)
    return round(tokens / self._task.tokens_per_batch)

  def _tell(self, event: str, **fields: Any) -> None:
    self._fleet.tape.record(
      event, island=self.number, island_incarnation=self._lives, **fields
    )

  def _live(self) -> operations.Script[None]:
    """What its main thread does."""
    island, fleet = self.island, self._fleet
    assert island is not None
    yield from island.joining()
    self.ready = True
    self._begun.append((island.step, self._task.tokens_per_batch))
    fleet.pilot.joined(self.number, island.step, self._task.tokens_per_batch)
    self._tell(events.ISLAND_READY, step=island.step)
    yield 0.0  # all that start together join before the first step
    while not (fleet.spent or self._outdated):
      for name, args in self._wanted():
        match name:
          case "train":
            yield from island.training(
              args["num_steps"],
              lambda: fleet.moved(self) or self._outdated,
            )
          case "evaluate":
            island.evaluate(**args)
          case "checkpoint":
            island.checkpoint(**args)
    if not fleet.spent:
      return (yield from self._reconfigure(island))
    yield from island.draining(fleet.times.drain_secs)
    self.drained = True
    while True:
      yield _IDLE_SECS
      island.look()

  def _reconfigure(self, island: island_lib.Island) -> operations.Script[None]:
    """Goes on in another life, with the slices that there are."""
    yield from island.handing_over(self._fleet.times.drain_secs)
    yield self._fleet.config.virtual.reconfigure_secs
    assert self._process is not None
    self._process.kill()
    self.leave("slices changed")
    self.start()

  def _wanted(self) -> list[tuple[str, Any]]:
    """Programs for it, up to the next train window."""
    fleet = self._fleet
    ahead = fleet.config.programs.windows_ahead
    queued = {seat.number: ahead for seat in fleet.islands if seat.ready}
    wanted = fleet.pilot.wanted(queued | {self.number: ahead - 1})
    return [(w.name, w.args) for w in wanted if w.island == self.number]

  def lose(self, number: int, repair_secs: float) -> None:
    """One of its slices dies, by its number among those of all islands."""
    self._slices.lose(number % self._fleet.config.replicas, repair_secs)

  @property
  def _can_live(self) -> bool:
    """Whether it has slices enough; only an elastic job does with fewer."""
    elastic = self._fleet.config.elastic
    return bool(self._slices.present) if elastic else self._slices.complete

  def _regroup(self) -> None:
    """Slices have gone or come back."""
    if self._fleet.spent:
      return
    if self._fleet.config.elastic:
      self._fleet.tape.record(
        events.SLICES_CHANGED, island=self.number, present=self._slices.present
      )
      # At the end of the step: one that is under way counts, as if no slice had
      # died in it.
      self._outdated = True
    if not self._can_live:
      self.kill("SIGKILL")
    elif self.island is None:
      self.start()

  def die(self, repair_secs: float) -> None:
    """Is killed, and comes back after that time, if its slices are there."""
    if self.island is None or self._fleet.spent:
      return
    self.kill("SIGKILL")
    self._fleet.time.after(repair_secs, self._come_back)

  def _come_back(self) -> None:
    if self.island is None and self._can_live and not self._fleet.spent:
      self.start()

  def kill(self, cause: str, *, told: bool = True) -> None:
    """Ends its life where it is."""
    if self.island is None:
      return
    assert self._process is not None
    self._process.kill()
    self.island.abandon()
    self.island, self.ready, self.drained = None, False, False
    if told:
      self._tell(events.ISLAND_DIED, cause=cause)

  def leave(self, reason: str = "run ended") -> None:
    """Ends its life in order."""
    if self.island is not None:
      self.island.close(reason)
      self.island, self.ready = None, False


class Syncer(syncer_lib.Syncer):
  """A life of the syncer in virtual time."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    config: config_lib.RunConfig,
    tape: recorder.Recorder,
    owner: str,
    threads: scheduler.Process,
  ):
    super().__init__(snapshots, config, tape, owner, threads)
    self._process = threads
    self._main: workers.Loop = threads.loop(
      "syncer", self.serving(), self.execute
    )
    self._main.start()

  def wake(self) -> None:
    """See `syncer.Syncer`."""
    self._main.wake()

  def kill(self) -> None:
    """Ends its life where it is."""
    self._process.kill()
    self._tape.close()
