"""An island: the inner loop, and all that goes on around it unseen.

The main thread does inner steps and nothing else. Publication and adoption
run in threads of their own (`publisher`, `adopter`); between two steps the
main thread only starts device copies and swaps references. It never waits for
the store, the syncer or another island.

Reference: Decoupled DiLoCo, arXiv 2604.21428.
"""

import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from diloco import config as config_lib
from diloco import config_changes, heartbeat, timing, workers
from diloco.islands import (
  bootstrap,
  evaluation,
  exchange,
  hands,
  inner_step,
  own,
  publisher,
  recovery,
  step_log,
  surroundings,
)
from diloco.islands import learner as learner_lib
from diloco.islands import trainer as trainer_lib
from diloco.snapshots import (
  checkpoint,
  members,
  operations,
  records,
  requests,
  store,
)
from diloco.tape import events, recorder
from diloco.tasks import task as task_lib

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_SECS = (0.005, 0.05)  # of the board; a tenth of a step in between
_IN_FLIGHT_SECS = (1.0, 5.0)  # how long a drain waits for rounds under way


@dataclasses.dataclass(frozen=True)
class Spec:
  """What one incarnation of an island is told at birth."""

  run_dir: pathlib.Path
  store_url: str
  island: int
  incarnation: int
  slice: config_lib.SliceConfig
  opened: store.SnapshotStore | None = None  # the store, if it is open
  present: tuple[int, ...] = ()  # slices of an elastic job that are there
  recorded: Callable[[], None] = lambda: None  # see `recorder.Recorder`


class Island:
  """One incarnation of an island. Only its owner's thread may call it.

  Attributes:
    learner: holds what it trains.
    progress: how far its main thread is.
    times: the run's timeouts.
  """

  def __init__(
    self,
    spec: Spec,
    config: config_lib.RunConfig,
    task: task_lib.Task,
    devices: Sequence[jax.Device],
    report: Callable[[records.Member, tuple[int, float]], None] = lambda *_: (
      None
    ),
    threads: workers.Threads = workers.Threads(),
    like: trainer_lib.Trainer | None = None,
  ):
    """Builds what trains; `joining` brings it into the run.

    `report` is called, on a thread that never touches the store, with every
    sign of life and `heartbeat.Progress.standing`. `like` is a trainer of this
    process on the same devices, which has not made a step; what that compiled
    and computed is not done again.

    Raises:
      UserError: the task does not fit the mesh.
    """
    self._threads = threads
    self._clock = threads.clock
    self._report = report
    self._spec = spec
    self._config = config
    self._task = task
    self._tape = recorder.Recorder(
      spec.run_dir,
      f"island-{spec.island}",
      spec.incarnation,
      threads.wall,
      spec.recorded,
    )
    self._store = spec.opened or store.SnapshotStore(spec.store_url)
    self.times = timing.read(
      self._store, config.controller, lambda: not threads.dead
    )
    self.progress = heartbeat.Progress(self._check)
    self._born = heartbeat.born(
      spec.run_dir, f"island-{spec.island}", spec.incarnation, threads
    )
    self._present = False
    self._check_place: Callable[[], None] = lambda: None  # until it beats
    self.learner: learner_lib.Learner = (
      own.Own if config.loop else trainer_lib.Trainer
    )(config, task, spec.island, spec.slice.shape, devices, like)
    self._pace = step_log.Pace.of(
      config,
      spec.island,
      spec.slice,
      self.learner.plan.num_params,
      spec.present,
    )
    self._log = step_log.StepLog(
      recorder.MetricLog(spec.run_dir, spec.island, threads.wall),
      spec.incarnation,
      task.tokens_per_batch,
      self._clock,
    )
    self._recovery = recovery.Recovery(
      spec.run_dir,
      self._store,
      self.learner,
      spec.island,
      spec.incarnation,
      self.times.heartbeat_secs,
      self._clock,
    )
    self._requests = None
    if spec.opened is None:  # else others of this process ask through it too
      counter = requests.Counter(spec.store_url, self._clock)
      self._requests = threads.pulse(
        lambda: self._tape.record(events.STORE_REQUESTS, **counter.made()),
        requests.EVERY_SECS,
        "requests",
      )

  @property
  def step(self) -> int:
    """Inner steps done, over all incarnations."""
    return self._exchange.core.step

  def perform(self, script: operations.Script[T]) -> T:
    """Runs one of this island's scripts to its end."""
    return operations.perform(script, self._execute)

  def go_on(self, script: operations.Script[Any], metrics: Any = None) -> None:
    """Runs a script up to the next inner step, which the caller does.

    It stands at a step of these `metrics`, or at its beginning.

    Raises:
      StopIteration: the script has ended.
    """
    operations.go_on(script, self._execute, (operations.Step,), metrics)

  def _check(self) -> None:
    self._threads.check()
    self._check_place()

  def _execute(self, operation: Any) -> Any:
    self._check()
    if isinstance(operation, float):
      return time.sleep(operation)
    if isinstance(operation, operations.Compute):
      return operation.work()
    return self.execute(operation)

  def execute(self, operation: operations.Operation) -> Any:
    """Does one operation of this island's scripts."""
    return self._recovery.execute(operation)

  def joining(self) -> operations.Script[None]:
    """Restores, compiles, starts the background threads, is on record.

    Raises:
      UserError: the task does not fit the run's fragment plan.
    """
    spec, learner = self._spec, self.learner
    yield from self._patiently(lambda: self._store.write_plan(learner.plan))
    yield from self._patiently(self._publish_initial)
    yield from self._patiently(self._take_place)
    basis = yield from self._recovery.recovering(
      self._config.sync_every(spec.island)
    )
    learner.compile()
    self._evaluator = evaluation.Evaluator(
      self._task,
      learner,
      self._store,
      self.progress,
      self.times,
      clock=self._clock,
    )
    tokens_per_step = self._task.tokens_per_batch
    if_so: dict[str, Any] = {}
    if self._config.sync.adoption == "eager":
      if_so = {"own_rate": self._config.outer.learning_rate}
    if spec.present:
      if_so |= {
        "present": spec.present,
        "replicas": self._config.replicas,
        "scheduled": learner.scheduled,
      }
    self._tape.record(
      events.STARTED,
      tokens_per_step=tokens_per_step,
      kind=spec.slice.kind,
      topology=spec.slice.topology,
      devices=learner.placement.mesh.size,
      relative_speed=spec.slice.relative_speed,
      paced_step_secs=self._pace.step_secs,
      share=[spec.island, self._config.fleet.islands],
      total_tokens=self._config.total_tokens,
      **if_so,
      **surroundings.describe(),
      **recovery.facts(basis, spec.island),
    )
    identity = publisher.Identity(
      spec.island, spec.incarnation, tokens_per_step, basis.standing.epoch
    )
    setting = publisher.Setting(
      spec.run_dir,
      identity,
      self._config,
      self._store,
      learner,
      self._tape,
      self.progress,
      self.times,
      self._threads,
    )
    self._exchange = exchange.Exchange(setting, basis, self._poll_secs)
    self._heartbeat = heartbeat.Heartbeat(
      self._store,
      lambda: self._member(self.step),
      self.times.heartbeat_secs,
      lambda member: self._report(member, self.progress.standing),
      self._threads,
    )
    self._check_place = self._heartbeat.check

  def _patiently(self, do: Callable[[], None]) -> operations.Script[None]:
    """Does it once the store answers: an outage is no death of an island."""
    while True:
      try:
        yield operations.Compute(do)
        return
      except OSError as error:
        logger.warning("start_waits error=%s", error)
        yield self.times.retry_secs

  def _publish_initial(self) -> None:
    spec, plan = self._spec, self.learner.plan
    num_islands = self._config.fleet.islands
    saved = checkpoint.directory(spec.run_dir, spec.island)
    bootstrap.publish_initial(
      self._store,
      plan,
      bootstrap.initial_of(
        self._store, self.learner, given=bool(self._config.init_from)
      ),
      writer=bootstrap.writer_name(spec.island, spec.incarnation),
      first_fragment=spec.island * plan.num_fragments // num_islands,
      begun=bool(checkpoint.completed(saved)),
    )

  def _poll_secs(self) -> float:
    shortest, longest = _POLL_SECS
    pause_secs = min(max(self._log.step_secs / 10, shortest), longest)
    # A store that is far away is asked no faster than it answers.
    return max(pause_secs, self.times.round_trip_secs)

  def _take_place(self) -> None:
    """See `members.take_place`."""
    self._store.perform(members.take_place(self._member(0)))

  def _member(self, step: int) -> records.Member:
    return dataclasses.replace(
      self._born,
      step=step,
      step_secs=self._log.step_secs,
      present=self._present,
    )

  def train(
    self, num_steps: int, interrupted: Callable[[], bool] = lambda: False
  ) -> dict[str, Any]:
    """Does inner steps; `interrupted` is asked after each whether to stop.

    Gives steps done now and in all, and the last training loss in nats.
    """
    return self.perform(self.training(num_steps, interrupted))

  def _do_step(self) -> inner_step.Metrics:
    # A loop of the user's own does its steps itself; see `go_on`.
    assert isinstance(self.learner, trainer_lib.Trainer)
    return self.learner.do_step(self.learner.take_batch())

  def training(
    self, num_steps: int, interrupted: Callable[[], bool]
  ) -> operations.Script[dict[str, Any]]:
    """See `train`."""
    started_at = self.step
    self._present = True
    # A program may have ended the wait of the window before.
    yield from self._wait_for_answers(interrupted)
    if self._exchange.core.holds(self._clock()):
      num_steps = 0
    slot = self._clock()
    for _ in range(num_steps):
      dispatched_secs = self._clock()
      metrics = yield operations.Step(self._do_step)
      self._exchange.between_steps()
      self._log.dispatched(self.learner.step, metrics, dispatched_secs)
      self.progress.moved()
      # The next step takes its time after that wait, and not meanwhile.
      slot += yield from self._wait_for_answers(interrupted)
      if self._pace.step_secs:
        self._log.finish()
        slot = max(slot + self._pace.next_secs(self.step), self._clock())
        yield max(0.0, slot - self._clock())
      if interrupted():
        break
    self._log.finish()
    step = self.step
    return {"steps": step - started_at, "step": step, "loss": self._log.loss}

  def configure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Goes on by other settings, those of `config_changes.LIVE`."""
    self._config = config_changes.with_live(self._config, settings)
    every = self._config.sync_every(self._spec.island)
    self._exchange.reschedule(every)
    return {"step": self.step}

  def _wait_for_answers(
    self, interrupted: Callable[[], bool]
  ) -> operations.Script[float]:
    """As a synchronous method does, if the run is configured to.

    Gives the seconds that it took.
    """
    exchange, clock = self._exchange, self._clock
    if not exchange.core.holds(clock()):
      return 0.0
    self._log.pause()
    begun = clock()  # and the step before is done
    yield from exchange.wait(clock, self.look, interrupted, _POLL_SECS[0])
    if exchange.core.unanswered and not interrupted():
      logger.warning("no_answer step=%d", self.step)
    waited = clock() - begun
    self._log.waited(waited)
    return waited

  def look(self) -> None:
    """Adopts what is new and takes part in cuts, while it does no steps."""
    self._exchange.between_steps()
    self.progress.moved()

  def idling(self) -> operations.Script[None]:
    """See `look`."""
    yield from ()
    self.look()

  def drain(self, timeout_secs: float) -> dict[str, Any]:
    """Publishes all progress, at a standstill; `flushed` if it was in time."""
    return self.perform(self.draining(timeout_secs))

  def draining(self, timeout_secs: float) -> operations.Script[dict[str, Any]]:
    """See `drain`."""
    self._log.pause()
    exchange = self._exchange
    shortest, longest = _IN_FLIGHT_SECS
    patience_secs = min(max(4 * self._log.step_secs, shortest), longest)
    with self.progress.may_take(timeout_secs):
      flushed = yield from exchange.publishing_all(
        self._clock,
        self.look,
        lambda: exchange.flush(0.0),
        hands.Patience(patience_secs, longest, timeout_secs),
        _POLL_SECS[0],
      )
    self._present = False
    self._heartbeat.nudge()
    return {"flushed": flushed, "step": self.step}

  def handing_over(self, timeout_secs: float) -> operations.Script[None]:
    """Has the next life go on as if it were this one: nothing is under way.

    All progress is published, answered and adopted, and the state is saved,
    unless that takes longer than `timeout_secs` each.
    """
    yield from self.draining(timeout_secs)
    exchange, clock, poll_secs = self._exchange, self._clock, _POLL_SECS[0]
    deadline = clock() + timeout_secs
    while exchange.core.in_flight and clock() < deadline:
      self.look()
      yield poll_secs
    serial = exchange.save()
    while not exchange.wait_saved(serial, 0.0) and clock() < deadline:
      yield poll_secs

  def begin_reading(self) -> evaluation.Reading:
    """Begins to read the newest global versions, to be evaluated."""
    return evaluation.Reading(self._evaluator, self._threads)

  def evaluate(
    self,
    target: str,
    num_batches: int,
    reading: evaluation.Reading | None = None,
  ) -> dict[str, Any]:
    """Held-out loss of the newest "global" or of the "local" parameters.

    The global versions are what a `reading` that is done has found; without
    one they are read now.

    Raises:
      CorruptSnapshotError: a global version cannot be read, however often.
      OSError: the store cannot be reached.
    """
    self._log.pause()
    evaluator = self._evaluator
    if target == "local":
      found = evaluation.Found(self.learner.params)
    else:
      found = reading.take() if reading else evaluator.read()
    result = evaluator.evaluate(found, num_batches)
    self._tape.record(events.EVALUATED, target=target, step=self.step, **result)
    return result

  def checkpoint(self, *, wait: bool) -> dict[str, Any]:
    """Saves the island's own state; without a `wait` copies are only started.

    It is `durable` if it is known to be complete.
    """
    if wait:
      self._log.pause()
    started = self._clock()
    serial = self._exchange.save()
    durable, limit_secs = False, self.times.drain_secs
    if wait:
      with self.progress.may_take(limit_secs):
        durable = self._exchange.wait_saved(serial, limit_secs)
    return {
      "step": self.step,
      "durable": durable,
      "secs": self._clock() - started,
    }

  def saving(self, *, wait: bool) -> operations.Script[dict[str, Any]]:
    """See `checkpoint`."""
    yield from ()
    return self.checkpoint(wait=wait)

  def poison(self, fragment: int) -> dict[str, Any]:
    """Makes a fragment's values not finite: a fault to be healed from."""
    self.learner.swap.poison(self.learner.params, fragment)
    self._tape.record(events.POISONED, fragment=fragment, step=self.step)
    return {"step": self.step}

  def abandon(self) -> None:
    """Releases the files of a life that has no threads any more."""
    self.learner.close()
    self._tape.close()
    self._log.close()

  def close(self, reason: str) -> None:
    """Leaves the run: ends all threads and releases all files."""
    self._present = False
    self._exchange.close()
    self._heartbeat.close()
    self.learner.close()
    if self._requests is not None:
      self._requests.close()
    self._tape.record(events.STOPPED, step=self.step, reason=reason)
    self._tape.close()
    self._log.close()
