"""Faults of the store: a small disk that fills, shuts, and damaged objects."""

import contextlib
import errno
import os
import pathlib
import random
import shutil
import subprocess
import time
from collections.abc import Iterator

import psutil

from diloco.snapshots import keys

_SOURCE = "diloco-chaos"  # by which a small disk is known among all mounts
_SIZE_MIB = 96
_BALLAST = "ballast"
_RETRY_SECS = 0.02
_PATIENCE_SECS = 3.0
_BLOCK = bytes(1 << 16)


class SmallDisk:
  """A file system of limited size in memory, mounted on a directory."""

  def __init__(self, path: pathlib.Path):
    """Mounts it; `path` is made if need be.

    Raises:
      OSError: this process may not mount.
    """
    self.path = path
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={_SIZE_MIB}m", _SOURCE, str(path))

  @contextlib.contextmanager
  def full(self) -> Iterator[None]:
    """No byte is free meanwhile."""
    ballast = self.path / _BALLAST
    try:
      _fill(ballast)
      yield
    finally:
      ballast.unlink(missing_ok=True)

  @contextlib.contextmanager
  def read_only(self) -> Iterator[None]:
    """Nothing can be written meanwhile.

    Raises:
      OSError: somebody was writing whenever it was tried.
    """
    deadline = time.monotonic() + _PATIENCE_SECS
    while True:
      try:
        _mount("-o", "remount,ro", str(self.path))
        break
      except OSError:
        if time.monotonic() > deadline:
          raise
        time.sleep(_RETRY_SECS)
    try:
      yield
    finally:
      _mount("-o", "remount,rw", str(self.path))


def mounted_below(directory: pathlib.Path) -> list[pathlib.Path]:
  """Where small disks are mounted below a directory, the newest first."""
  mounts = psutil.disk_partitions(all=True)
  paths = [pathlib.Path(m.mountpoint) for m in mounts if m.device == _SOURCE]
  return [p for p in paths if p.is_relative_to(directory.resolve())][::-1]


def keep_and_unmount(path: pathlib.Path) -> None:
  """Takes a small disk away and leaves its content in its place.

  Raises:
    OSError: the content could not be kept, or it could not be unmounted.
  """
  copy = path.with_name(path.name + ".copy")
  ballast = shutil.ignore_patterns(_BALLAST)
  try:
    shutil.copytree(path, copy, ignore=ballast, dirs_exist_ok=True)
  finally:
    _command("umount", "-l", str(path))
  with contextlib.suppress(OSError):
    path.rmdir()
    copy.rename(path)


def _fill(path: pathlib.Path) -> None:
  fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
  try:
    while os.write(fd, _BLOCK) == len(_BLOCK):
      pass
  except OSError as error:
    if error.errno != errno.ENOSPC:
      raise
  finally:
    os.close(fd)


def may_mount(path: pathlib.Path) -> str:
  """Why this process may not mount a file system on `path`; empty if it may.

  Leaves nothing there.
  """
  try:
    keep_and_unmount(SmallDisk(path).path)
  except OSError as error:
    return str(error)
  finally:
    with contextlib.suppress(OSError):
      path.rmdir()
  return ""


def _mount(*args: str) -> None:
  _command("mount", *args)


def _command(name: str, *args: str) -> None:
  try:
    # In a session of its own: a Ctrl-C in the terminal is not meant for it.
    done = subprocess.run(
      [name, *args], capture_output=True, text=True, start_new_session=True
    )
  except FileNotFoundError as error:
    raise OSError(f"there is no {name} command") from error
  if done.returncode:
    raise OSError(" ".join(done.stderr.split()) or f"{name} failed")


def damage_one(
  snapshots: pathlib.Path, what: str, how: str, rng: random.Random
) -> str | None:
  """Damages one object of a class; returns its key, None if there is none."""
  candidates = list(_objects(snapshots, what))
  rng.shuffle(candidates)
  for path in candidates:
    with contextlib.suppress(OSError):  # it may vanish under our hands
      _damage(path, how, rng)
      return str(path.relative_to(snapshots))
  return None


def _objects(snapshots: pathlib.Path, what: str) -> Iterator[pathlib.Path]:
  if what == "board":
    yield snapshots / keys.BOARD
  elif what == "member":
    yield from (snapshots / "members").glob("island-[0-9]*")
  elif what == "record":
    found = (snapshots / "contributions").glob("*")
    yield from filter(lambda p: keys.is_contribution_name(p.name), found)
  else:  # chunks of contributions that were committed
    for record in _objects(snapshots, "record"):
      chunks = (snapshots / "payloads" / record.name).rglob("*")
      files = (path for path in chunks if path.is_file())
      yield from (path for path in files if path.name != "zarr.json")


def _damage(path: pathlib.Path, how: str, rng: random.Random) -> None:
  if how == "delete":
    path.unlink()
    return
  with path.open("r+b") as file:
    size = os.fstat(file.fileno()).st_size
    if how == "truncate":
      file.truncate(size // 2)
    else:
      place = rng.randrange(max(size, 1))
      file.seek(place)
      byte = file.read(1) or b"\0"
      file.seek(place)
      file.write(bytes([byte[0] ^ 0x55]))
