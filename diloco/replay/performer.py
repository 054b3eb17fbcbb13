"""An island's life, performed from a script: a trainer driven by a tape."""

import math
import pathlib
from collections.abc import Sequence

import jax

from diloco import config as config_lib
from diloco import errors
from diloco.islands import (
  bootstrap,
  checkpoints,
  core,
  encoding,
  feedback,
  shards,
  swap,
)
from diloco.islands import learner as learner_lib
from diloco.islands import trainer as trainer_lib
from diloco.replay import scratch as scratch_lib
from diloco.replay import script
from diloco.snapshots import checkpoint, keys, records, store
from diloco.tasks import registry, replicated


class Performer:
  """One life; see the module."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    life: script.LifeId,
    settings: script.Settings,
    folder: pathlib.Path,
    original: store.SnapshotStore,
  ):
    """Makes the trainer, in its initial state.

    Args:
      config: the run's, with the life's `total_tokens`.
      life: which.
      settings: what it ran under; of an elastic job, with its slices.
      folder: the replay's scratch directory.
      original: the run's store.
    """
    self._config = config
    self._life = life
    self._scratch = scratch_lib.Scratch(folder)
    made = registry.make_task(
      config.task.name, config.task.options, config.replicas
    )
    self._ahead = 0  # by so many steps schedules are
    self._task = replicated.on(
      made, settings.present, lambda step: step + self._ahead
    )
    topology = [int(n) for n in settings.topology.split("x")]
    self._trainer = trainer_lib.Trainer(
      config, self._task, life.island, topology, jax.devices()
    )
    self._plan = self._trainer.plan
    self._swap = self._trainer.swap
    self._encoder = encoding.Encoder(
      self._plan, self._swap.codec, self._swap.shardings
    )
    self._initial = bootstrap.initial_of(
      original, self._trainer, given=bool(config.init_from)
    )
    self._bases: list[int] = []
    self._writer = checkpoints.checkpointer()

  def initial(self, fragment: int) -> None:
    """Writes the initial parameters of a fragment as its version 0."""
    head = bootstrap.write_initial(
      self._scratch.snapshots,
      self._plan,
      fragment,
      shards.fragment_to_host(self._initial(fragment)),
      keys.global_prefix(fragment, 0, bootstrap.writer_name(*self._life)),
    )
    self._scratch.write_head(head)

  def begin(self, beginning: script.Beginning) -> None:
    """Puts the life's first state together."""
    saved = self._restore(beginning.saved)
    lent = self._restore(beginning.lent) or saved
    self._bases = list(beginning.versions)
    self._ahead = beginning.scheduled - beginning.step
    self._trainer.resume(
      beginning.step,
      [self._read(p, v) for p, v in enumerate(beginning.versions)],
      beginning.first_steps,
      opt_state=lent.opt_state if lent is not None else None,
      saved=saved and saved.progress,
      carried=beginning.carried,
      news=[
        feedback.News(version, *answer)
        for version, answer in zip(
          beginning.versions, beginning.answers, strict=True
        )
      ],
    )
    self._trainer.compile()

  def advance(self, operations: Sequence[script.Operation]) -> dict[str, float]:
    """Does operations, and the inner steps between them.

    Returns:
      The norm of each contribution made, by its key.
    """
    norms = {}
    for operation in operations:
      while self._trainer.step < operation.step:
        self._trainer.do_step(self._trainer.take_batch())
      if self._trainer.step != operation.step:
        raise errors.UserError(
          f"{operation!r} of {self._life}",
          f"it comes after step {self._trainer.step}",
          "the tape contradicts itself; restore it",
        )
      if isinstance(operation, script.Publish):
        if (found := self._publish(operation)) is not None:
          norms[operation.key] = math.hypot(*found)
      else:
        self._do(operation)
    return norms

  def _do(self, operation: script.Operation) -> None:
    trainer, params = self._trainer, self._trainer.state.params
    match operation:
      case script.Adopt(_, fragment, version):
        self._bases[fragment] = version
        anchor = self._read(fragment, version)
        news = feedback.News(version, operation.merged_step, operation.holes)
        trainer.adopt(operation, anchor, news)
      case script.Rebase(step, fragment):
        anchor = self._swap.anchors[fragment]
        self._swap.start_over(params, fragment, anchor, step)
      case script.Mend(_, source):
        healthy = self._restore(source)
        trainer.mend_optimizer(healthy.opt_state if healthy else None)
      case script.Poison(_, fragment):
        self._swap.poison(trainer.params, fragment)
      case script.Save() | script.Lend():
        self._save(operation.state)

  def _publish(self, publish: script.Publish) -> list[float] | None:
    """Copies in any case, as the swap may need them; encodes what is merged."""
    fragment = publish.fragment
    if self._bases[fragment] != publish.base_version:
      raise errors.UserError(
        f"{publish!r} of {self._life}",
        f"its fragment started from version {self._bases[fragment]}",
        "the tape contradicts itself; restore it",
      )
    outer_grads = self._swap.publish(
      self._trainer.state.params,
      fragment,
      publish.step,
      core.Origin(publish.base_version, publish.first_step),
    )
    if not publish.wanted:
      return None
    encoded = self._encoder.encode(fragment, outer_grads)
    steps = publish.step - publish.first_step
    record = records.Contribution(
      island=self._life.island,
      incarnation=self._life.incarnation,
      fragment=fragment,
      base_version=publish.base_version,
      first_step=publish.first_step,
      step=publish.step,
      c_tokens=steps * self._task.tokens_per_batch,
      codec=str(self._encoder.codec),
      plan_hash=self._plan.hash,
      payload=keys.payload_prefix(publish.key),
      chunks=encoded.chunks,
      num_bytes=encoded.num_bytes,
      norms=encoded.norms,
    )
    self._scratch.write_contribution(record, encoded.tensors)
    return encoded.norms

  def _read(self, fragment: int, version: int) -> swap.Params:
    found = shards.read_fragment(
      self._scratch.snapshots,
      self._scratch.read_head(fragment, version),
      self._plan.fragments[fragment],
      self._swap.shardings,
    )
    return shards.hold(found, self._swap.shardings)

  def _save(self, state: script.StateId) -> None:
    """As the island's saver does, with the references of all fragments."""
    path = self._scratch.state_path(state)
    positions = [core.Position(0, 0, -1)] * self._plan.num_fragments
    marker = checkpoints.write(
      self._writer,
      path,
      self._trainer.snapshot(),
      self._plan,
      positions,
      island=state.island,
      incarnation=state.incarnation,
      serial=state.serial,
      epoch=0,
      cut=0,
    )
    checkpoint.commit(path, marker)

  def _restore(
    self, state: script.StateId | None
  ) -> learner_lib.Snapshot | None:
    if state is None:
      return None
    path = self._scratch.state_path(state)
    return checkpoints.restore(path, self._trainer)[1]

  def close(self) -> None:
    """Releases everything."""
    self._trainer.close()
    self._writer.close()
