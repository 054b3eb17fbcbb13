"""Version 0: how a run's first global parameters come to be.

Every island computes the same initial parameters from the run's seed, or reads
those that the run was given from the run's store, where they stay. Whoever
comes first publishes them; the others find the heads taken and adopt what is
there, so that all start equal to the bit whatever their meshes.
"""

import re
from collections.abc import Callable, Mapping

import jax
import numpy as np

from diloco import errors
from diloco.fragments import partition
from diloco.islands import learner, shards
from diloco.snapshots import digest, keys, records, store

Initial = Callable[[int], Mapping[str, jax.Array]]  # by fragment


def publish_initial(
  snapshots: store.SnapshotStore,
  plan: partition.FragmentPlan,
  initial: Initial,
  writer: str,
  first_fragment: int,
  *,
  begun: bool = False,
) -> None:
  """Creates version 0 of every fragment that has no head yet.

  It begins with `first_fragment`, so that islands starting together rarely
  write the same one. `writer` is unique to this process. Once a run has `begun`
  all heads are known to have been there.

  Raises:
    CorruptSnapshotError: a head is damaged, or was there and is lost.
  """
  for i in range(plan.num_fragments):
    fragment = (first_fragment + i) % plan.num_fragments
    key = keys.head_key(fragment)
    head, generation = snapshots.read_for_update(key, records.Head)
    if head is not None:
      continue
    # A fragment that had versions after its first has been trained.
    names = snapshots.names(keys.globals_prefix(fragment))
    if begun or keys.newest_version(names) > 0:
      if snapshots.read(key, records.Head) is not None:
        continue  # made and merged into since the first look
      raise errors.CorruptSnapshotError(
        f"{key} is lost: a new version 0 would undo what was merged; stop the"
        " run and give 'diloco resume' to go back to its last cut"
      )
    payload = keys.global_prefix(fragment, 0, writer)
    held = shards.fragment_to_host(initial(fragment))
    first = write_initial(snapshots, plan, fragment, held, payload)
    snapshots.compare_and_set(key, first, generation)


def write_initial(
  snapshots: store.SnapshotStore,
  plan: partition.FragmentPlan,
  fragment: int,
  initial: shards.HostFragment,
  payload: str,
) -> records.Head:
  """Writes the payload of a fragment's version 0; returns its head."""
  names = [spec.name for spec in plan.fragments[fragment]]
  tensors = [initial[n].stored(n, described=True) for n in names]
  snapshots.arrays.write(f"{payload}/params", tensors)
  return records.Head(
    fragment=fragment,
    version=0,
    token=0,
    payload=payload,
    chunks=[list(t.layout.chunk_shape) for t in tensors],
    clock={},
    merged={},
    digest=digest.tensors((n, initial[n].whole()) for n in names),
  )


def keep_given(
  snapshots: store.SnapshotStore,
  plan: partition.FragmentPlan,
  given: Mapping[str, np.ndarray],
) -> None:
  """Stores what a run starts from, for its islands and whoever replays it."""
  for fragment, tensors in enumerate(plan.fragments):
    held = {}
    for spec in tensors:
      box, values = [slice(0, n) for n in spec.shape], given[spec.leaf]
      if spec.part is not None:
        _, axis, start = spec.part
        values = values.take(range(start, start + spec.shape[axis]), axis)
      held[spec.name] = shards.HostTensor(spec.shape, ((tuple(box), values),))
    payload = f"{keys.initial_key(fragment)}.values"
    head = write_initial(snapshots, plan, fragment, held, payload)
    key = keys.initial_key(fragment)
    snapshots.write(key, records.Initial(**head.to_fields()))


def has_given(snapshots: store.SnapshotStore, num_fragments: int) -> bool:
  """Whether all of what a run starts from was stored."""
  every = map(keys.initial_key, range(num_fragments))
  return all(snapshots.read(key, records.Initial) for key in every)


def initial_of(
  snapshots: store.SnapshotStore, like: learner.Learner, *, given: bool
) -> Initial:
  """Where a run's initial parameters come from.

  Those of the seed `like` holds, which also knows the shards wanted of others
  that the run was `given`.
  """
  if not given:
    return like.swap.anchors.__getitem__
  fetcher = like.fetcher(snapshots)

  def read(fragment: int) -> Mapping[str, jax.Array]:
    key = keys.initial_key(fragment)
    head = snapshots.read(key, records.Initial)
    if head is None:
      raise errors.CorruptSnapshotError(f"{key} is lost: restore it")
    return fetcher.read(head)

  return read


def writer_name(island: int, incarnation: int) -> str:
  """What the payloads of a life's initial parameters are named after."""
  return f"i{island}.{incarnation}"


def initial_writer(head: records.Head) -> tuple[int, int] | None:
  """Island and incarnation that made version 0; None for later versions."""
  match = re.search(r"\.i(\d+)\.(\d+)$", head.payload)
  if head.version or match is None:
    return None
  return int(match[1]), int(match[2])
