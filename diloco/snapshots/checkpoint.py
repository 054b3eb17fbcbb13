"""Saved states of islands on disk: which exist, and which can be trusted.

A *checkpoint* is a directory below the run's, named
`checkpoints/island-<m>/<step>.<incarnation>.<serial>`. It counts only with its
marker, a record written last: after the arrays are complete, and after every
publication made before the state was copied is committed, so that no progress
lies in neither. The marker holds the CRC-32 of every file; what does not match
is passed over with a reason.

Checkpoints of cuts are *pinned* by empty files `pin-<n>` until the cut is gone.
"""

import dataclasses
import os
import pathlib
import shutil
import zlib
from collections.abc import Collection

from diloco import errors
from diloco.snapshots import records

MARKER = "complete.json"
_PIN = "pin-"
_NAMES = "[0-9]*.[0-9]*.[0-9]*"
_BLOCK_BYTES = 1 << 20


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
  leaves: dict[str, int]  # name of an array -> CRC-32 of its values
  files: dict[str, int]  # path below the directory -> CRC-32 of its bytes
  num_bytes: int


def directory(run_dir: str | os.PathLike[str], island: int) -> pathlib.Path:
  """Where an island's checkpoints are."""
  return pathlib.Path(run_dir).absolute() / "checkpoints" / f"island-{island}"


def path_of(
  folder: pathlib.Path, step: int, incarnation: int, serial: int
) -> pathlib.Path:
  """Where one checkpoint of one life is."""
  return folder / f"{step:09d}.{incarnation:04d}.{serial:06d}"


def file_checksums(path: pathlib.Path) -> dict[str, int]:
  """CRC-32 of every file of a checkpoint that is part of its content."""
  found = {}
  for file in sorted(path.rglob("*")):
    name = str(file.relative_to(path))
    own = name.startswith((MARKER, _PIN))
    if file.is_file() and not own:
      found[name] = _file_crc(file)
  return found


def _file_crc(file: pathlib.Path) -> int:
  crc = 0
  with file.open("rb") as content:
    while block := content.read(_BLOCK_BYTES):
      crc = zlib.crc32(block, crc)
  return crc


def commit(path: pathlib.Path, marker: Checkpoint) -> None:
  """Makes a checkpoint count, at once or not at all."""
  written = path / f"{MARKER}.new"
  written.write_bytes(marker.to_bytes())
  written.replace(path / MARKER)


def checksum(path: pathlib.Path) -> int:
  """CRC-32 of a checkpoint's marker, which has those of all else."""
  return _file_crc(path / MARKER)


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
  """Returns a checkpoint's marker once all its files match it.

  Raises:
    CorruptSnapshotError: a file is missing, added or changed.
  """
  marker = read_marker(path)
  try:
    found = file_checksums(path)
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


def completed(folder: pathlib.Path) -> list[pathlib.Path]:
  """Checkpoints that have a marker, the newest first."""
  found = []
  for path in folder.glob(_NAMES):
    _, *life = path.name.split(".")
    if all(n.isdecimal() for n in life) and (path / MARKER).exists():
      found.append(([int(n) for n in life], path))
  return [path for _, path in sorted(found, reverse=True)]


def pin(path: pathlib.Path, cut: int) -> None:
  """Keeps a checkpoint for as long as the cut exists."""
  (path / f"{_PIN}{cut}").touch()


def prune(folder: pathlib.Path, keep: int, cuts: Collection[int]) -> None:
  """Deletes all but the newest complete checkpoints and the pinned ones.

  The caller is the only writer of `folder` and has no save under way.

  Args:
    folder: where they are.
    keep: how many of the newest to keep.
    cuts: cuts that exist.
  """
  kept = set(completed(folder)[:keep])
  for path in folder.glob(_NAMES):
    pins = {int(p.name[len(_PIN) :]) for p in path.glob(f"{_PIN}[0-9]*")}
    if path not in kept and not pins & set(cuts):
      # The marker goes first: a torn deletion leaves nothing that counts.
      (path / MARKER).unlink(missing_ok=True)
      shutil.rmtree(path, ignore_errors=True)
