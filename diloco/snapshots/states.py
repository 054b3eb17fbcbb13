"""Copies of saved states in the store, for who goes on on another machine.

Where the store is not below the run directory, each state that counts there
(`diloco.snapshots.checkpoint`) is copied:

    states/island-<m>/<state>/files/<file>/<offset>   a piece of a file
    states/island-<m>/<state>/pin-<n>                 cut n points to it
    states/island-<m>/<state>/complete.json           its marker, written last

As on disk only what has its marker counts, and nothing is believed before sizes
and digests in the marker are checked.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent import futures
from typing import NamedTuple

from diloco import errors
from diloco.snapshots import checkpoint, locations, store

_ROOT = "states"
_PIECE_BYTES = 32 << 20  # one is in memory for each of
_WIDTH = 4  # threads


class _Piece(NamedTuple):
  """A part of a file, by its bytes."""

  file: str
  start: int
  stop: int

  @property
  def key(self) -> str:
    """Below the state's prefix."""
    return f"files/{self.file}/{self.start:016d}"


def of_run(
  run_dir: str | os.PathLike[str], snapshots: store.SnapshotStore
) -> Copies | None:
  """Where a run's states are copied to; None if its store lies with them."""
  in_memory = urllib.parse.urlsplit(snapshots.url).scheme == "memory"
  inside = in_memory or locations.lies_in(snapshots.url, run_dir)
  return None if inside else Copies(snapshots)


class Copies:
  """The copies in a store. A state is named by where it is on disk."""

  def __init__(self, snapshots: store.SnapshotStore):
    self._store = snapshots

  def keep(
    self,
    path: pathlib.Path,
    cut: int = 0,
    leaves: Callable[[], bool] = lambda: False,
  ) -> None:
    """Copies a state that counts, and that a `cut` points to unless it is 0.

    It is given up before the next piece once who copies it `leaves`.

    Raises:
      OSError: disk or store fails, or it was given up; no copy counts.
      CorruptSnapshotError: the state does not count.
    """
    marker = checkpoint.read_marker(path)
    prefix = _prefix(path)

    def put(piece: _Piece) -> None:
      if leaves():
        raise OSError("who copies a state leaves")
      with (path / piece.file).open("rb") as file:
        file.seek(piece.start)
        data = file.read(piece.stop - piece.start)
      self._store.put(f"{prefix}/{piece.key}", data)

    _side_by_side(put, _pieces(marker.files))
    if cut:
      self._store.put(f"{prefix}/{checkpoint.PIN}{cut}", b"")
    self._store.put(f"{prefix}/{checkpoint.MARKER}", marker.to_bytes())

  def completed(self, folder: pathlib.Path) -> list[str]:
    """Names of an island's states that have a copy, the newest first."""
    return checkpoint.newest_first(
      name
      for name, files in self._find(folder).items()
      if checkpoint.MARKER in files
    )

  def read_marker(self, path: pathlib.Path) -> checkpoint.Checkpoint:
    """Returns the marker of a state's copy.

    Raises:
      OSError: the store cannot be read.
      CorruptSnapshotError: there is none, or it is damaged.
    """
    data = self._store.get(f"{_prefix(path)}/{checkpoint.MARKER}")
    if data is None:
      raise errors.CorruptSnapshotError(
        f"checkpoint {path.name} is neither here nor in the store"
      )
    return checkpoint.Checkpoint.from_bytes(data)

  def fetch(self, path: pathlib.Path) -> None:
    """Brings a state to this machine; what it holds is yet to be checked.

    Raises:
      OSError: store or disk fails.
      CorruptSnapshotError: there is no copy of all of it.
    """
    marker = self.read_marker(path)
    shutil.rmtree(path, ignore_errors=True)  # of who died at this
    for name in marker.files:
      file = path / name
      if not file.resolve().is_relative_to(path.resolve()):
        raise errors.CorruptSnapshotError(
          f"checkpoint {path.name}: {name!r} is no file of a state"
        )
      file.parent.mkdir(parents=True, exist_ok=True)
      file.touch()

    def get(piece: _Piece) -> None:
      data = self._store.get(f"{_prefix(path)}/{piece.key}")
      if data is None or len(data) != piece.stop - piece.start:
        raise errors.CorruptSnapshotError(
          f"checkpoint {path.name}: {piece.file} is not whole in the store"
        )
      with (path / piece.file).open("r+b") as file:
        file.seek(piece.start)
        file.write(data)

    _side_by_side(get, _pieces(marker.files))
    checkpoint.commit(path, marker)

  def prune(
    self,
    folder: pathlib.Path,
    keep: int,
    cuts: Collection[int],
    incarnation: int,
  ) -> None:
    """Deletes copies as `checkpoint.prune` deletes states.

    Those of lives after `incarnation` are theirs to delete.
    """
    found = self._find(folder)
    whole = [name for name in found if checkpoint.MARKER in found[name]]
    kept = set(checkpoint.newest_first(whole)[:keep])
    pins = {f"{checkpoint.PIN}{cut}" for cut in cuts}
    for name in checkpoint.newest_first(found):
      later = checkpoint.life_of(name)[0] > incarnation
      if name not in kept and not later and not pins & found[name]:
        prefix = _prefix(folder / name)
        self._store.delete(f"{prefix}/{checkpoint.MARKER}")
        self._store.delete_tree(prefix)

  def _find(self, folder: pathlib.Path) -> Mapping[str, set[str]]:
    """By state, the first parts of its keys."""
    keys = (k.split("/") for k in self._store.keys(f"{_ROOT}/{folder.name}"))
    return {
      name: {key[1] for key in of_state if len(key) > 1}
      for name, of_state in itertools.groupby(keys, lambda key: key[0])
    }


def _prefix(path: pathlib.Path) -> str:
  return f"{_ROOT}/{path.parent.name}/{path.name}"


def _pieces(files: Mapping[str, int]) -> Iterator[_Piece]:
  for name, size in files.items():
    for start in range(0, size, _PIECE_BYTES):
      yield _Piece(name, start, min(start + _PIECE_BYTES, size))


def _side_by_side(
  do: Callable[[_Piece], None], pieces: Iterable[_Piece]
) -> None:
  with futures.ThreadPoolExecutor(_WIDTH) as pool:
    for _ in pool.map(do, pieces):  # the first that raises ends the others
      pass
