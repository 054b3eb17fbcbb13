"""Where a replay keeps what it made: versions, contributions, saved states.

Unlike the store of a run it keeps every version until nobody needs it.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Sequence

from diloco.replay import script
from diloco.snapshots import arrays, keys, records, store


@dataclasses.dataclass(frozen=True)
class _Version(records.Head):
  """A head that stays: one for each version, not one for each fragment."""

  def key_in_store(self) -> str:
    """See `records.Record`."""
    return _version_key(self.fragment, self.version)


class Scratch:
  """A directory with a store in it; shared by the processes of a replay."""

  def __init__(self, folder: pathlib.Path):
    """Opens it; what is not there is made."""
    self._folder = folder
    url = (folder / "snapshots").absolute().as_uri()
    self.snapshots = store.SnapshotStore(url)

  def write_head(self, head: records.Head) -> None:
    """Makes a version exist; its payload is complete."""
    version = _Version.from_fields(head.to_fields())
    self.snapshots.write(version.key_in_store(), version)

  def read_head(self, fragment: int, version: int) -> records.Head:
    """Returns the head of a version that exists."""
    key = _version_key(fragment, version)
    head = self.snapshots.read(key, _Version)
    assert head is not None
    return head

  def write_contribution(
    self, record: records.Contribution, tensors: Sequence[arrays.Tensor]
  ) -> None:
    """Writes a contribution."""
    self.snapshots.arrays.write(record.payload, tensors)
    self.snapshots.write(keys.contribution_key(record.key), record)

  def read_contribution(self, key: str) -> records.Contribution:
    """Returns the record of a contribution that exists."""
    record = self.snapshots.read(
      keys.contribution_key(key), records.Contribution
    )
    assert record is not None
    return record

  def state_path(self, state: script.StateId) -> pathlib.Path:
    """Where a saved state is."""
    name = ".".join(map(str, state))
    return (self._folder / "states" / name).absolute()

  def copy_version(self, old: script.VersionId, new: script.VersionId) -> None:
    """Makes a version of the values of another."""
    head = self.read_head(*old)
    # Named after the version whose values it has, as in the store of a run.
    made = keys.payload_version(head.payload)
    payload = keys.global_prefix(old.fragment, made, f"r{new.version}")
    root = self._folder / "snapshots"
    shutil.copytree(root / head.payload, root / payload)
    self.write_head(
      dataclasses.replace(head, version=new.version, payload=payload)
    )

  def forget(self, name: script.VersionId | str) -> None:
    """Deletes the arrays of a version or of a contribution."""
    if isinstance(name, str):
      self.snapshots.delete_tree(keys.payload_prefix(name))
    else:
      self.snapshots.delete_tree(self.read_head(*name).payload)


def _version_key(fragment: int, version: int) -> str:
  return f"versions/{fragment:04d}.{version:09d}"
