"""Text as bytes: where it is found, how it is split, how it is streamed.

A *corpus* is every file of a source, joined into two byte arrays: train and
held-out. Files, not rows, are split, by a hash of their relative path, so that
the split is the same on every machine and survives added files. Rows are fixed
windows of the joined bytes.
"""

import dataclasses
import functools
import glob
import os
import pathlib
import sysconfig
import threading
from collections.abc import Iterable, Mapping

import numpy as np

from diloco import errors
from diloco.tasks import streams, task

VOCAB = 256
# Files with zero bytes count as binary, so a zero can only be a separator.
_SEPARATOR = b"\0"
_STANDARD_LIBRARY_SUFFIXES = frozenset({".py", ".txt", ".rst", ".md"})
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
# Written by the interpreter's own build: differs from machine to machine.
_SKIPPED_PREFIX = "_sysconfigdata"

_load_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Corpus:
  """The two splits of a text source."""

  train: np.ndarray  # [bytes], uint8
  heldout: np.ndarray  # [bytes], uint8

  def split(self, name: task.Split) -> np.ndarray:
    """Returns the bytes of the split called `name`."""
    return self.train if name == "train" else self.heldout


def find_files(data_glob: str) -> tuple[pathlib.Path, tuple[str, ...]]:
  """Lists the files of a text source, in an order every machine shares.

  The source is a glob of text files, `**` for any depth, or "" for those of the
  running Python's standard library.

  Returns:
    The source's root and the files' sorted POSIX paths relative to it.

  Raises:
    UserError: nothing matches.
  """
  if data_glob:
    root = _glob_root(data_glob)
    found = map(pathlib.Path, glob.glob(data_glob, recursive=True))
    names = [path.relative_to(root).as_posix() for path in found]
  else:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names = _standard_library_files(root)
  names = sorted(name for name in names if (root / name).is_file())
  if not names:
    raise errors.UserError(
      f"data_glob={data_glob!r}",
      f"no file matches under {str(root)!r}",
      "check the pattern, or leave it empty for the standard library's text",
    )
  return root, tuple(names)


def load_corpus(data_glob: str, heldout_fraction: float) -> Corpus:
  """Reads a text source once per process and splits it by file.

  When one split gets no file at all (a corpus of a file or two), the last
  `heldout_fraction` of the joined bytes is held out instead.

  Raises:
    UserError: nothing matches, or no file holds text.
  """
  # Islands may be threads of one process: they share one copy of the bytes.
  with _load_lock:
    return _load_corpus(data_glob, heldout_fraction)


@functools.lru_cache(maxsize=4)
def _load_corpus(data_glob: str, heldout_fraction: float) -> Corpus:
  root, names = find_files(data_glob)
  found = {name: _read_text(root / name) for name in names}
  texts = {name: text for name, text in found.items() if text}
  if not texts:
    raise errors.UserError(
      f"data_glob={data_glob!r}",
      f"none of the {len(names)} matching files holds UTF-8 text",
      "point it at text files",
    )
  parts: tuple[list[bytes], list[bytes]] = [], []  # train, held-out
  for name, text in texts.items():
    parts[streams.is_heldout(name, heldout_fraction)].append(text)
  if all(parts):
    return Corpus(*map(_join, parts))
  joined = _join(texts.values())
  cut = len(joined) - int(len(joined) * heldout_fraction)
  return Corpus(joined[:cut], joined[cut:])


def _glob_root(data_glob: str) -> pathlib.Path:
  """The deepest folder above every match: the part without wildcards."""
  parts = pathlib.Path(data_glob).parts[:-1]
  fixed = []
  for part in parts:
    if glob.has_magic(part):
      break
    fixed.append(part)
  return pathlib.Path(*fixed)


def _standard_library_files(root: pathlib.Path) -> list[str]:
  names = []
  for folder, subfolders, files in os.walk(root):
    subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS]
    relative = pathlib.Path(folder).relative_to(root)
    for name in files:
      wanted = pathlib.PurePath(name).suffix in _STANDARD_LIBRARY_SUFFIXES
      if wanted and not name.startswith(_SKIPPED_PREFIX):
        names.append((relative / name).as_posix())
  return names


def _read_text(path: pathlib.Path) -> bytes:
  """The file's bytes, empty if they are not text."""
  data = path.read_bytes()
  if _SEPARATOR in data:
    return b""
  try:
    data.decode("utf-8")
  except UnicodeDecodeError:
    return b""
  return data


def _join(texts: Iterable[bytes]) -> np.ndarray:
  return np.frombuffer(_SEPARATOR.join(texts), np.uint8)


class RowSource:
  """Random access to rows: {"tokens": `seq_len` + 1 bytes, int32}.

  Rows start `seq_len` bytes apart: the last byte of a row is the first of the
  next, so every byte but the very first is predicted exactly once.
  """

  def __init__(self, data: np.ndarray, seq_len: int):
    self._data = data
    self._seq_len = seq_len

  def __len__(self) -> int:
    return max(0, (len(self._data) - 1) // self._seq_len)

  def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
    start = index * self._seq_len
    row = self._data[start : start + self._seq_len + 1]
    return {"tokens": row.astype(np.int32)}


def stream(
  data: np.ndarray,
  split: task.Split,
  *,
  batch_size: int,
  seq_len: int,
  share: int,
  num_shares: int,
  seed: int,
) -> streams.Stream:
  """Streams {"tokens": int32 [batch, seq_len + 1]} of one share of a split.

  The split's data are [bytes], uint8; a row predicts `seq_len` of them. The
  others are as for `streams.stream`.

  Raises:
    UserError: a size is out of range, or there is no row for every share.
  """
  if seq_len < 1:
    raise errors.UserError(
      f"seq_len={seq_len}", "it must be at least 1", "raise seq_len"
    )
  return streams.stream(
    RowSource(data, seq_len),
    f"the {split} text in rows of {seq_len} tokens",
    "more text, a smaller seq_len",
    shuffled=split == "train",
    batch_size=batch_size,
    share=share,
    num_shares=num_shares,
    seed=seed,
  )
