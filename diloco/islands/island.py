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
from collections.abc import Callable, Sequence
from typing import Any

import jax

from diloco import config as config_lib
from diloco import errors
from diloco.fragments import partition, schedule
from diloco.islands import (
  adopter,
  bootstrap,
  core,
  evaluation,
  heartbeat,
  inner_step,
  publisher,
  recovery,
  step_log,
  swap,
)
from diloco.islands import placement as placement_lib
from diloco.snapshots import records, store
from diloco.tape import events, recorder
from diloco.tasks import task as task_lib

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


class Island:
  """One incarnation of an island. Only its owner's thread may call it."""

  def __init__(
    self,
    spec: Spec,
    config: config_lib.RunConfig,
    task: task_lib.Task,
    devices: Sequence[jax.Device],
    after_beat: Callable[[records.Member, bool], None] = lambda *_: None,
  ):
    """Joins the run: builds, restores, compiles, and starts the threads.

    Args:
      spec: who this is.
      config: the run's configuration.
      task: what to train.
      devices: devices of its slice.
      after_beat: called on a thread of its own with every sign of life, and
        whether a train window is under way.

    Raises:
      UserError: the task does not fit the run's fragment plan or the mesh.
    """
    self._spec = spec
    self._config = config
    self._task = task
    self._tape = recorder.Recorder(
      spec.run_dir, f"island-{spec.island}", spec.incarnation
    )
    self._store = store.SnapshotStore(spec.store_url)
    self._placement = placement_lib.Placement(spec.slice.shape, devices)
    self._tree = inner_step.ParamTree(task, config.seed)
    self._plan = self._check_plan()
    first_step = recovery.last_step(
      spec.run_dir, self._store, self._plan, spec.island
    )
    versions = self._build_state(first_step)
    self._start(first_step, versions)
    self._heartbeat = heartbeat.Heartbeat(
      self._store,
      self._member,
      config.controller.heartbeat_secs,
      lambda member: after_beat(member, self._stepping),
    )

  @property
  def step(self) -> int:
    """Inner steps done, over all incarnations."""
    return self._core.step

  @property
  def param_shapes(self) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter leaf."""
    return dict(self._tree.shapes)

  def _check_plan(self) -> partition.FragmentPlan:
    plan = partition.partition(
      self._tree.tensors(), self._config.sync.num_fragments
    )
    self._store.write_plan(plan)
    return plan

  def _build_state(self, first_step: int) -> list[int]:
    """Makes the train state; returns the versions it is equal to."""
    spec = self._spec
    params = self._tree.init(self._placement)
    bootstrap.publish_initial(
      self._store,
      self._plan,
      params,
      writer=f"i{spec.island}.{spec.incarnation}",
      first_fragment=spec.island
      * self._plan.num_fragments
      // self._config.fleet.islands,
    )
    total_steps = self._config.total_tokens * self._config.speed_share(
      spec.island
    )
    optimizer = self._task.optimizer(
      max(1, round(total_steps / self._task.tokens_per_batch))
    )
    state = inner_step.TrainState(
      params,
      inner_step.init_opt_state(optimizer, params, self._placement),
      jax.device_put(_step_array(0), self._placement.replicated()),
    )
    self._checkpoints = recovery.Checkpointer(
      spec.run_dir / "checkpoints" / f"island-{spec.island}"
    )
    restored = self._checkpoints.restore(state)
    self._restored_from = "global version"
    if restored is not None:
      state, saved_step = restored
      self._restored_from = f"checkpoint of step {saved_step}, global version"
    elif not first_step:
      self._restored_from = "initial parameters"
    opt_state = inner_step.set_schedule_step(state.opt_state, first_step)
    self._state = jax.device_put(
      inner_step.TrainState(state.params, opt_state, _step_array(first_step)),
      jax.tree.map(lambda x: x.sharding, state),
    )
    self._swap = swap.Swap(
      self._config.sync.adoption, self._config.sync.blend_alpha
    )
    versions = self._adopt_heads(first_step)
    self._stream = self._task.batches(
      "train",
      share=spec.island,
      num_shares=self._config.fleet.islands,
      seed=self._config.seed,
    )
    self._stream.seek(first_step)
    self._compile(optimizer)
    return versions

  def _adopt_heads(self, step: int) -> list[int]:
    """Sets every fragment to its global version."""
    params = self._state.params
    self._anchors: list[placement_lib.HostFragment] = []
    versions = []
    for fragment, tensors in enumerate(self._plan.fragments):
      version, anchor = self._read_newest(fragment, tensors)
      for name, held in anchor.items():
        params[name] = self._placement.put(held)
      self._anchors.append(anchor)
      self._swap.started(fragment, step, {n: params[n] for n in anchor})
      versions.append(version)
    return versions

  def _read_newest(
    self, fragment: int, tensors: Sequence[partition.Tensor]
  ) -> tuple[int, placement_lib.HostFragment]:
    # A version may be retired while it is read; then there is a newer one.
    tried = None
    while True:
      head = self._store.read(store.head_key(fragment), records.Head)
      assert head is not None
      try:
        return head.version, placement_lib.read_fragment(
          self._store, head, tensors, self._placement
        )
      except errors.CorruptSnapshotError:
        if head.payload == tried:
          raise
        tried = head.payload

  def _compile(self, optimizer: Any) -> None:
    """Compiles everything the loop will call, before the first step."""
    batch = self._placement.put_batch(next(self._stream))
    self._stream.seek(self._stream.position - 1)
    self._step_fn = inner_step.compile_step(
      self._task, optimizer, self._tree, self._state, batch
    )
    for tensors in self._plan.fragments:
      names = [t.name for t in tensors]
      self._swap.copy({n: self._state.params[n] for n in names})
    self._evaluator = evaluation.Evaluator(
      self._task, self._tree, self._store, self._plan, self._placement
    )

  def _start(self, first_step: int, versions: Sequence[int]) -> None:
    """Starts the background threads and goes on the record."""
    spec, sync = self._spec, self._config.sync
    tokens_per_step = self._task.tokens_per_batch
    self._core = core.IslandCore(
      schedule.Schedule(sync.every, sync.num_fragments),
      spec.island,
      sync.adoption,
      follow=sync.follow,
      step=first_step,
      versions=versions,
    )
    speed = spec.slice.relative_speed
    self._pace_secs = self._config.fleet.pace_step_secs / speed
    self._log = step_log.StepLog(
      recorder.MetricLog(spec.run_dir, spec.island),
      spec.incarnation,
      tokens_per_step,
    )
    self._present = self._stepping = False
    self._tape.record(
      events.STARTED,
      step=first_step,
      restored_from=self._restored_from,
      tokens_per_step=tokens_per_step,
      kind=spec.slice.kind,
      topology=spec.slice.topology,
      devices=self._placement.num_devices,
      relative_speed=speed,
      paced_step_secs=self._pace_secs,
      share=[spec.island, self._config.fleet.islands],
    )
    self._publisher = publisher.Publisher(
      self._store,
      self._plan,
      publisher.Identity(spec.island, spec.incarnation, tokens_per_step),
      sync.codec,
      self._tape,
    )
    self._adopter = adopter.Adopter(
      self._store,
      self._plan,
      self._placement,
      spec.island,
      versions,
      self._poll_secs,
    )

  def _poll_secs(self) -> float:
    shortest, longest = _POLL_SECS
    return min(max(self._log.step_secs / 10, shortest), longest)

  def _member(self, beat: int) -> records.Member:
    return records.Member(
      island=self._spec.island,
      incarnation=self._spec.incarnation,
      beat=beat,
      step=self._core.step,
      step_secs=self._log.step_secs,
      present=self._present,
    )

  def train(
    self, num_steps: int, interrupted: Callable[[], bool] = lambda: False
  ) -> dict[str, Any]:
    """Does inner steps.

    Args:
      num_steps: how many.
      interrupted: asked after every step whether to stop early.

    Returns:
      Steps done now and in all, and the last training loss in nats.
    """
    started_at = self._core.step
    self._present = self._stepping = True
    slot = time.monotonic()
    for _ in range(num_steps):
      self._one_step()
      if self._pace_secs:
        self._log.finish()
        slot = max(slot + self._pace_secs, time.monotonic())
        time.sleep(slot - time.monotonic() if slot > time.monotonic() else 0)
      if interrupted():
        break
    self._log.finish()
    self._stepping = False
    step = self._core.step
    return {"steps": step - started_at, "step": step, "loss": self._log.loss}

  def _one_step(self) -> None:
    batch = self._placement.put_batch(next(self._stream))
    dispatched_secs = time.monotonic()
    self._state, metrics = self._step_fn(self._state, batch)
    step = self._core.step + 1
    self._between_steps(step)
    self._log.dispatched(step, metrics, dispatched_secs)

  def _between_steps(self, step: int) -> None:
    """Publishes and adopts what is due; starts copies, waits for nothing."""
    board, fetched = self._adopter.take()
    by_fragment = {f.fragment: f for f in fetched}
    actions = self._core.handle(
      core.Stepped(
        step,
        ready=[(f.fragment, f.version, f.merged_step) for f in fetched],
        board=_board_event(board),
      )
    )
    for action in actions:
      if isinstance(action, core.Adopt):
        self._adopt(action, by_fragment[action.fragment])
      else:
        self._publish(action)

  def _publish(self, action: core.Publish) -> None:
    anchor = self._anchors[action.fragment]
    copies = self._swap.copy({n: self._state.params[n] for n in anchor})
    self._swap.published(action.fragment, action.step, copies)
    self._tape.record(
      events.SUBMITTED,
      fragment=action.fragment,
      first_step=action.first_step,
      step=action.step,
    )
    self._publisher.submit(publisher.Publication(action, copies, anchor))

  def _adopt(self, action: core.Adopt, fetched: adopter.Fetched) -> None:
    local = {n: self._state.params[n] for n in fetched.params}
    adopted = self._swap.adopt(
      action.fragment, action.kept_from, local, fetched.params
    )
    self._state.params.update(adopted)
    self._anchors[action.fragment] = fetched.anchor
    self._tape.record(
      events.ADOPTED,
      fragment=action.fragment,
      version=action.version,
      step=self._core.step,
      mode=self._config.sync.adoption,
      bytes=fetched.num_bytes,
      digest=fetched.digest,
      secs=fetched.secs,
      lost_from_step=action.lost_from,
      lost_to_step=action.lost_to,
    )

  def bare_loop(self) -> Callable[[int], None]:
    """Returns the loop without an island around it, for comparison.

    It runs the same compiled step on a copy of the state and the same data,
    and reads the metrics of a step while the next one runs.
    """
    state = jax.tree.map(jax.numpy.copy, self._state)

    def loop(num_steps: int) -> None:
      nonlocal state
      last = None
      for _ in range(num_steps):
        batch = self._placement.put_batch(next(self._stream))
        state, metrics = self._step_fn(state, batch)
        if last is not None:
          float(last["loss"])
        last = metrics
      jax.block_until_ready(state)

    return loop

  def drain(self, timeout_secs: float) -> dict[str, Any]:
    """Publishes all progress; the island stands still meanwhile.

    Returns:
      `flushed`: whether all of it reached the store in time.
    """
    self._log.pause()
    deadline = time.monotonic() + timeout_secs
    shortest, longest = _IN_FLIGHT_SECS
    patience = min(max(4 * self._log.step_secs, shortest), longest)
    in_flight_until = min(deadline, time.monotonic() + patience)
    while self._core.in_flight and time.monotonic() < in_flight_until:
      self._between_steps(self._core.step)
      time.sleep(_POLL_SECS[0])
    for action in self._core.handle(core.Drain()):
      assert isinstance(action, core.Publish)
      self._publish(action)
    flushed = self._publisher.flush(max(0.0, deadline - time.monotonic()))
    self._present = False
    self._heartbeat.nudge()
    return {"flushed": flushed, "step": self._core.step}

  def evaluate(self, target: str, num_batches: int) -> dict[str, Any]:
    """Held-out loss of the newest global or of the local parameters.

    Args:
      target: "global" or "local".
      num_batches: held-out batches, always the first ones.

    Returns:
      `loss` in nats per token, `tokens`, `bits_per_token`, `secs`.
    """
    self._log.pause()
    params = self._state.params if target == "local" else None
    result = self._evaluator.evaluate(params, num_batches)
    self._tape.record(
      events.EVALUATED, target=target, step=self._core.step, **result
    )
    return result

  def checkpoint(self, *, wait: bool) -> dict[str, Any]:
    """Saves the island's own state; `wait` for it to be complete."""
    self._log.pause()
    started = time.monotonic()
    self._checkpoints.save(self._state, self._core.step)
    if wait:
      self._checkpoints.wait()
    secs = time.monotonic() - started
    self._tape.record(
      events.CHECKPOINTED, step=self._core.step, secs=secs, durable=wait
    )
    return {"step": self._core.step, "secs": secs}

  def close(self, reason: str) -> None:
    """Leaves the run: ends all threads and releases all files."""
    self._present = False
    self._adopter.close()
    self._publisher.close()
    self._heartbeat.close()
    self._stream.close()
    self._checkpoints.close()
    self._tape.record(events.STOPPED, step=self._core.step, reason=reason)
    self._tape.close()
    self._log.close()


def _board_event(board: records.Board | None) -> core.Board | None:
  if board is None:
    return None
  rounds = {int(p): islands for p, islands in board.open_rounds.items()}
  return core.Board(board.versions, rounds)


def _step_array(step: int) -> jax.Array:
  return jax.numpy.asarray(step, jax.numpy.int32)
