"""Coming back: an island's own saved state, and where it left off.

Parameters come from the newest global versions. What the store cannot give,
the inner optimizer's moments, comes from the island's own checkpoints. Steps
go on after the last one known to have been done, so no row of data is read
twice, and the data position is that step.
"""

import json
import logging
import os
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from diloco.fragments import partition
from diloco.islands import inner_step
from diloco.snapshots import records, store
from diloco.tape import recorder

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16


def last_step(
  run_dir: str | os.PathLike[str],
  snapshots: store.SnapshotStore,
  plan: partition.FragmentPlan,
  island: int,
) -> int:
  """Last inner step this island is known to have done, 0 for a new one.

  Looks at everything that could know: its tape and metric log, commit records
  still waiting, the vector clocks of the heads, and the last sign of life.
  """
  steps = [0, _last_step_on_file(recorder.metrics_path(run_dir, island))]
  tapes = pathlib.Path(run_dir).glob(
    f"{recorder.TAPE_DIR}/island-{island}-[0-9]*.jsonl"
  )
  steps += [_last_step_on_file(path) for path in tapes]
  # Records before heads: a merge moves a step from the first to the second,
  # so this order cannot miss it in both.
  for name in filter(
    store.is_contribution_name, snapshots.names("contributions")
  ):
    _, owner, _, step = name.split(".")
    if int(owner) == island:
      steps.append(int(step))
  for fragment in range(plan.num_fragments):
    head = snapshots.read(store.head_key(fragment), records.Head)
    if head is not None:
      steps.append(head.merged_step(island))
  member = snapshots.read(store.member_key(island), records.Member)
  if member is not None:
    steps.append(member.step)
  return max(steps)


def _last_step_on_file(path: pathlib.Path) -> int:
  """Largest step among the last lines of a tape or metric log."""
  if not path.exists():
    return 0
  with path.open("rb") as file:
    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
    lines = file.read().split(b"\n")[:-1]  # what follows is torn or empty
  steps = [0]
  for line in lines:
    try:
      steps.append(int(json.loads(line)["step"]))
    except (ValueError, KeyError, TypeError):
      continue  # the first line is cut, others may have no step
  return max(steps)


class Checkpointer:
  """An island's saved states, written by Orbax in the background."""

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens `directory`, which holds one folder per saved step."""
    self._directory = pathlib.Path(directory).absolute()
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=True
      ),
    )

  def save(self, state: inner_step.TrainState, step: int) -> None:
    """Starts saving; returns once the state may be donated again."""
    if step in self._manager.all_steps():
      return
    self._manager.save(step, args=ocp.args.StandardSave(_leaves(state)))

  def wait(self) -> None:
    """Waits for saves under way; raises what went wrong in them."""
    self._manager.wait_until_finished()

  def restore(
    self, like: inner_step.TrainState
  ) -> tuple[inner_step.TrainState, int] | None:
    """Returns the newest readable state and its step, or None.

    A checkpoint that cannot be read is passed over with a log line, and moved
    aside so that a later save may take its step.

    Args:
      like: a state of the shapes and shardings wanted.
    """
    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      _leaves(like),
    )
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        leaves = self._manager.restore(
          step, args=ocp.args.StandardRestore(abstract)
        )
      except Exception as error:  # Orbax raises many kinds for a broken file.
        logger.warning("checkpoint_unreadable step=%d error=%r", step, error)
        self._move_aside(step)
        continue
      flat = [leaves[key] for key in sorted(leaves)]
      return jax.tree.unflatten(jax.tree.structure(like), flat), step
    return None

  def _move_aside(self, step: int) -> None:
    aside = self._directory.with_name(self._directory.name + ".unreadable")
    aside.mkdir(exist_ok=True)
    target = aside / f"{step}.{len(list(aside.iterdir()))}"
    shutil.move(self._directory / str(step), target)
    self._manager.reload()

  def close(self) -> None:
    """Waits for saves under way and releases the manager."""
    self._manager.close()


def _leaves(state: inner_step.TrainState) -> dict[str, Any]:
  # Numbered leaves: independent of the classes an optimizer's state is made of.
  return {f"{i:06d}": x for i, x in enumerate(jax.tree.leaves(state))}
