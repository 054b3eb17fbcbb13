"""A learner's snapshot to and from disk, by Orbax.

What is saved: parameters, the inner optimizer's state, and for each fragment
with progress that never left the island its value at the last publication, and
what error feedback has of it (`diloco.islands.feedback`).
The step, the data position (the same number) and the positions of fragments
are in the marker (`diloco.snapshots.checkpoint`). A step draws no random
numbers but those its number determines, so there is no generator to save.
"""

import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diloco import errors
from diloco.fragments import partition
from diloco.islands import core, feedback, shards, swap
from diloco.islands import learner as learner_lib
from diloco.snapshots import checkpoint

# Orbax tells its own threads of a save by signals that all of a process share.
_ORBAX = threading.Lock()
# First letters of what error feedback has: owed, lent and left.
_RESIDUALS = "xyz"


def content_of(
  snapshot: learner_lib.Snapshot,
  plan: partition.FragmentPlan,
  positions: Sequence[core.Position],
) -> dict[str, jax.Array]:
  """What a checkpoint holds: arrays by short names, divided as they are."""
  params, references, residuals = snapshot.progress
  arrays = {f"p{i:06d}": params[n] for i, n in enumerate(sorted(params))}
  for i, leaf in enumerate(jax.tree.leaves(snapshot.opt_state)):
    arrays[f"o{i:06d}"] = leaf
  names = sorted(tensor.name for f in plan.fragments for tensor in f)
  numbers = {name: i for i, name in enumerate(names)}
  for tensors, position in zip(plan.fragments, positions, strict=True):
    if position.published < snapshot.step:
      for tensor in tensors:
        arrays[f"r{numbers[tensor.name]:06d}"] = references[tensor.name]
  for fragment, found in residuals.items():
    parts = [("x", 0, 0, 0, found.owed)]
    for loan in found.loans:
      span = loan.first_step, loan.end
      parts.append(("y", *span, 0, loan.lent))
      parts += [("z", *span, step, left) for step, left in loan.left.items()]
    for kind, first_step, end, step, values in parts:
      place = f"{fragment}.{found.known}.{first_step}.{end}.{step}"
      for name, array in (values or {}).items():
        arrays[f"{kind}{numbers[name]:06d}.{place}"] = array
  return arrays


def _residuals_of(
  arrays: Mapping[str, jax.Array], tensors: Sequence[str]
) -> dict[int, feedback.Saved]:
  """What `content_of` made of these; `tensors` are sorted."""
  parts: dict[tuple[Any, ...], dict[str, Any]] = {}
  for short, array in arrays.items():
    if short[0] in _RESIDUALS:
      number, *place = map(int, short[1:].split("."))
      part = parts.setdefault((*place[:4], short[0], place[4]), {})
      part[tensors[number]] = array
  found: dict[int, feedback.Saved] = {}
  for key in sorted(parts):
    fragment, known, first_step, end, kind, step = key
    if kind == "x":
      found[fragment] = feedback.Saved(known, parts[key], [])
      continue
    loans = found.setdefault(fragment, feedback.Saved(known, None, [])).loans
    if not loans or loans[-1].first_step != first_step:
      loans.append(feedback.Loan(0, first_step, end))
    if kind == "y":
      loans[-1].lent = parts[key]
    else:
      loans[-1].left[step] = parts[key]
  return found


def checkpointer() -> Any:
  """Orbax's writer and reader; who only looks at a task does without Orbax."""
  import orbax.checkpoint as ocp

  return ocp.StandardCheckpointer()


def write(
  writer: Any,
  path: pathlib.Path,
  snapshot: learner_lib.Snapshot,
  plan: partition.FragmentPlan,
  positions: Sequence[core.Position],
  **who: int,
) -> checkpoint.Checkpoint:
  """Writes a snapshot; returns its marker once it is complete on disk.

  `positions`, [P], are where its fragments are; `who` has the fields of the
  marker that say whose it is.
  """
  arrays = content_of(snapshot, plan, positions)
  path.mkdir(parents=True, exist_ok=True)
  with _ORBAX:
    writer.save(path / checkpoint.ARRAYS, arrays, force=True)
    digests = {
      name: checkpoint.leaf_digest(name, np.asarray(values))
      for name, values in arrays.items()
    }
    writer.wait_until_finished()
  return checkpoint.Checkpoint(
    **who,
    step=snapshot.step,
    positions=[list(p) for p in positions],
    leaves=digests,
    files=checkpoint.file_sizes(path),
    num_bytes=sum(a.nbytes for a in arrays.values()),
  )


def restore(
  path: pathlib.Path,
  like: learner_lib.Learner,
) -> tuple[checkpoint.Checkpoint, learner_lib.Snapshot]:
  """Reads a checkpoint back: its marker, and the snapshot in host memory.

  It has the shapes and shardings of `like`, who will go on with it.

  Raises:
    CorruptSnapshotError: it is not what was saved, or of another model.
  """
  marker = checkpoint.verify(path)
  tensors = like.swap.tensors
  names = sorted(like.params)
  wanted: dict[str, Any] = {
    f"p{i:06d}": like.params[n] for i, n in enumerate(names)
  }
  for i, leaf in enumerate(jax.tree.leaves(like.opt_state)):
    wanted[f"o{i:06d}"] = leaf
  ordered = sorted(tensors)
  references = {
    short: name
    for i, name in enumerate(ordered)
    if (short := f"r{i:06d}") in marker.leaves
  }
  wanted |= {short: tensors[name] for short, name in references.items()}
  wanted |= {
    short: tensors[ordered[int(short[1:7])]]
    for short in marker.leaves
    if short[0] in _RESIDUALS
  }
  if wanted.keys() != marker.leaves.keys():
    raise errors.CorruptSnapshotError(
      f"checkpoint {path.name} is not of this model and optimizer"
    )
  arrays = _read(path, wanted)
  for name, values in arrays.items():
    checkpoint.check_leaf(path, marker, name, np.asarray(values))
  return marker, learner_lib.Snapshot(
    marker.step,
    swap.Progress(
      {n: arrays[f"p{i:06d}"] for i, n in enumerate(names)},
      {name: arrays[short] for short, name in references.items()},
      _residuals_of(arrays, ordered),
    ),
    jax.tree.unflatten(
      jax.tree.structure(like.opt_state),
      [arrays[name] for name in sorted(arrays) if name.startswith("o")],
    ),
  )


def _read(path: pathlib.Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
  abstract = {
    name: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=shards.in_host_memory(x.sharding)
    )
    for name, x in wanted.items()
  }
  reader = checkpointer()
  try:
    with _ORBAX:
      found: dict[str, Any] = reader.restore(path / checkpoint.ARRAYS, abstract)
  except Exception as error:  # Orbax raises many kinds for a broken file.
    what = " ".join(str(error).split())[:200]
    raise errors.CorruptSnapshotError(
      f"checkpoint {path.name} cannot be restored: {what}"
    ) from error
  finally:
    reader.close()
  return found
