"""Version 0: how a run's first global parameters come to be.

Every island computes the same initial parameters from the run's seed. Whoever
comes first publishes them; the others find the heads taken and adopt what is
there, so that all start equal to the bit whatever their meshes.
"""

import numpy as np

from diloco.fragments import partition
from diloco.islands import inner_step, placement
from diloco.snapshots import arrays, records, store


def publish_initial(
  snapshots: store.SnapshotStore,
  plan: partition.FragmentPlan,
  params: inner_step.FlatParams,
  writer: str,
  first_fragment: int,
) -> None:
  """Creates version 0 of every fragment that has no head yet.

  Args:
    snapshots: the store.
    plan: the fragment plan.
    params: this island's initial parameters.
    writer: unique to this process, part of the payload's name.
    first_fragment: where to start, so that islands starting together rarely
      write the same fragment.
  """
  for i in range(plan.num_fragments):
    fragment = (first_fragment + i) % plan.num_fragments
    key = store.head_key(fragment)
    head, generation = snapshots.read_for_update(key, records.Head)
    if head is not None:
      continue
    payload = store.global_prefix(fragment, 0, writer)
    tensors = []
    for spec in plan.fragments[fragment]:
      held = placement.to_host(spec.name, params[spec.name])
      layout = arrays.Layout.of(spec.shape, np.float32, held.shard_shape)
      tensors.append(arrays.Tensor(spec.name, layout, held.pieces))
    snapshots.arrays.write(f"{payload}/params", tensors)
    head = records.Head(
      fragment=fragment,
      version=0,
      token=0,
      payload=payload,
      chunks=[list(t.layout.chunk_shape) for t in tensors],
      clock={},
      merged={},
    )
    snapshots.compare_and_set(key, head, generation)


def read_heads(
  snapshots: store.SnapshotStore, plan: partition.FragmentPlan
) -> list[records.Head]:
  """Returns the head of every fragment.

  Raises:
    LookupError: the run has no global parameters yet.
  """
  heads = []
  for fragment in range(plan.num_fragments):
    head = snapshots.read(store.head_key(fragment), records.Head)
    if head is None:
      raise LookupError(f"fragment {fragment} has no global version yet")
    heads.append(head)
  return heads
