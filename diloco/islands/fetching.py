"""Reading global versions: only this host's shards, and only if undamaged."""

from typing import Any

import jax

from diloco import errors
from diloco.fragments import partition
from diloco.islands import protocol, shards
from diloco.snapshots import digest, operations, records, store


class Fetcher:
  """Fetches fragments of one plan for one mesh. Thread-safe."""

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    shardings: shards.Shardings,
  ):
    """Args: from where, of what, and which shards."""
    self._store = snapshots
    self._plan = plan
    self._shardings = shardings

  def fetch(self, fragment: int, newer_than: int) -> protocol.Fetched | None:
    """Reads a fragment's newest version, or None if there is no newer one.

    Raises:
      CorruptSnapshotError: it is damaged.
      OSError: the store could not be reached.
    """
    return operations.perform(
      protocol.fetch(fragment, newer_than), self.execute
    )

  def newest(self, fragment: int) -> protocol.Fetched:
    """Reads a fragment's newest version.

    Raises:
      CorruptSnapshotError: it is damaged, or its head is lost.
      OSError: the store could not be reached.
    """
    found = self.fetch(fragment, -1)
    if found is None:
      raise errors.CorruptSnapshotError(
        f"the head of fragment {fragment} is lost"
      )
    return found

  def execute(self, operation: operations.Operation) -> Any:
    """Does one operation of a procedure that reads global versions."""
    if isinstance(operation, operations.ReadPayload):
      return self.read(operation.head)
    return self._store.execute(operation)

  def read(self, head: records.Head) -> dict[str, jax.Array]:
    """Reads what a head points to.

    Raises:
      CorruptSnapshotError: it is damaged.
      OSError: the store could not be reached.
    """
    tensors = self._plan.fragments[head.fragment]
    found = shards.read_fragment(self._store, head, tensors, self._shardings)
    values = ((name, held.whole()) for name, held in found.items())
    if head.digest and head.digest != digest.tensors(values):
      raise errors.CorruptSnapshotError(
        f"version {head.version} of fragment {head.fragment} is not what was"
        " committed: its digest differs"
      )
    return shards.hold(found, self._shardings)
