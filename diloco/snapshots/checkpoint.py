"""Saved states of islands on disk: which exist, and which can be trusted.

A *checkpoint* is a directory below the run's, named
`checkpoints/island-<m>/<step>.<incarnation>.<serial>`. It counts only with its
marker, a record written last: after the arrays are complete, and after every
publication made before the state was copied is committed, so that no progress
lies in neither. Orbax writes the arrays, each device's shards, into a directory
that it renames once they are complete. The marker holds the digest of every
array, taken from memory, and the size of every file: nothing is read again
until it is used, and what does not match then is passed over with a reason.

Checkpoints of cuts are *pinned* by empty files `pin-<n>` until the cut is gone.
"""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Collection, Iterable

import numpy as np
import tensorstore as ts

from diloco import errors
from diloco.snapshots import digest, records

ARRAYS = "arrays"  # Orbax's own directory in a checkpoint
MARKER = "complete.json"
PIN = "pin-"
_NAMES = "[0-9]*.[0-9]*.[0-9]*"


@dataclasses.dataclass(frozen=True)
class Checkpoint(records.Record):
  """Marker of a complete checkpoint."""

  island: int
  incarnation: int
  serial: int  # which save of its incarnation, from 1
  step: int
  epoch: int
  cut: int  # last cut the island had taken part in
  positions: list[list[int]]  # [P] of base, first step, published step
  leaves: dict[str, str]  # name of an array -> its digest
  files: dict[str, int]  # path below the directory -> its bytes
  num_bytes: int


def directory(run_dir: str | os.PathLike[str], island: int) -> pathlib.Path:
  """Where an island's checkpoints are."""
  return pathlib.Path(run_dir).absolute() / "checkpoints" / f"island-{island}"


def path_of(
  folder: pathlib.Path, step: int, incarnation: int, serial: int
) -> pathlib.Path:
  """Where one checkpoint of one life is."""
  return folder / f"{step:09d}.{incarnation:04d}.{serial:06d}"


def file_sizes(path: pathlib.Path) -> dict[str, int]:
  """Bytes of every file of a checkpoint that is part of its content."""
  found = {}
  for file in sorted(path.rglob("*")):
    name = str(file.relative_to(path))
    own = name.startswith((MARKER, PIN))
    if file.is_file() and not own:
      found[name] = file.stat().st_size
  return found


def leaf_digest(name: str, values: np.ndarray) -> str:
  """What a marker says of an array."""
  return digest.tensors([(name, values)])


def commit(path: pathlib.Path, marker: Checkpoint) -> None:
  """Makes a checkpoint count, at once or not at all."""
  written = path / f"{MARKER}.new"
  written.write_bytes(marker.to_bytes())
  written.replace(path / MARKER)


def read_marker(path: pathlib.Path) -> Checkpoint:
  """Returns a checkpoint's marker.

  Raises:
    CorruptSnapshotError: there is none, or it is damaged.
  """
  try:
    return Checkpoint.from_bytes((path / MARKER).read_bytes())
  except OSError as error:
    raise errors.CorruptSnapshotError(
      f"checkpoint {path.name} has no readable marker: {error}"
    ) from error


def verify(path: pathlib.Path) -> Checkpoint:
  """Returns a checkpoint's marker if its files are there, each of its size.

  Raises:
    CorruptSnapshotError: a file is missing, added, or shorter or longer.
  """
  marker = read_marker(path)
  try:
    found = file_sizes(path)
  except OSError as error:
    raise errors.CorruptSnapshotError(
      f"checkpoint {path.name} cannot be read: {error}"
    ) from error
  for name in sorted({*marker.files, *found}):
    if found.get(name) != marker.files.get(name):
      state = "is missing" if name not in found else "is not what was saved"
      raise errors.CorruptSnapshotError(
        f"checkpoint {path.name}: {name} {state}"
      )
  return marker


def read_all(path: pathlib.Path, marker: Checkpoint) -> None:
  """Reads every array of a checkpoint; JAX is not needed.

  Raises:
    CorruptSnapshotError: one is not what was saved.
  """
  for name in marker.leaves:
    check_leaf(path, marker, name, _read(path, name))


def check_leaf(
  path: pathlib.Path, marker: Checkpoint, name: str, values: np.ndarray
) -> None:
  """Raises `CorruptSnapshotError` unless an array is what was saved."""
  told = marker.leaves.get(name, "")
  if digest.tensors([(name, values)], told) != told:
    raise errors.CorruptSnapshotError(
      f"checkpoint {path.name}: array {name} is not what was saved"
    )


def _read(path: pathlib.Path, name: str) -> np.ndarray:
  base = {"driver": "file", "path": f"{path / ARRAYS}/"}
  kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
  try:
    opened = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True)
    values: np.ndarray = opened.result().read().result()
  except (ValueError, OSError) as error:
    what = " ".join(str(error).split())[:200]
    raise errors.CorruptSnapshotError(
      f"checkpoint {path.name}: array {name} cannot be read: {what}"
    ) from error
  return values


def completed(folder: pathlib.Path) -> list[pathlib.Path]:
  """Checkpoints that have a marker, the newest first."""
  names = (path.name for path in folder.glob(_NAMES))
  found = [folder / name for name in newest_first(names)]
  return [path for path in found if (path / MARKER).exists()]


def newest_first(names: Iterable[str]) -> list[str]:
  """Those names that a checkpoint can have, in this order."""
  found = (name for name in names if life_of(name))
  return sorted(found, key=life_of, reverse=True)


def life_of(name: str) -> tuple[int, ...]:
  """Incarnation and serial of a checkpoint's name; empty if it is none."""
  numbers = name.split(".")
  if len(numbers) != 3 or not all(n.isdecimal() for n in numbers):
    return ()
  return int(numbers[1]), int(numbers[2])


def pin(path: pathlib.Path, cut: int) -> None:
  """Keeps a checkpoint for as long as the cut exists."""
  (path / f"{PIN}{cut}").touch()


def prune(folder: pathlib.Path, keep: int, cuts: Collection[int]) -> None:
  """Deletes all but the newest complete checkpoints and the pinned ones.

  The caller is the only writer of `folder` and has no save under way.
  """
  kept = set(completed(folder)[:keep])
  for path in folder.glob(_NAMES):
    pins = {int(p.name[len(PIN) :]) for p in path.glob(f"{PIN}[0-9]*")}
    if path not in kept and not pins & set(cuts):
      # The marker goes first: a torn deletion leaves nothing that counts.
      (path / MARKER).unlink(missing_ok=True)
      shutil.rmtree(path, ignore_errors=True)
