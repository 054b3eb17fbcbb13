"""Snapshot store bandwidth, against plain files in the same run.

Question: how much of a plain file's bandwidth is left after chunks, checksums
and metadata? One payload, shaped like a fragment, is published and fetched;
the references write and read the same bytes as one file, without a flush, in
turn with the store so that noise meets both.

    publish_ratio              plain write / publish, from one warm buffer
    fetch_ratio                plain read / fetch, both into fresh memory
    fetch_ratio_numpy          the same against `np.fromfile`, whose fresh
                               memory has huge pages as the fetch's has
    fetch_ratio_preallocated   both into warm memory: the plain read is then
                               no more than a memory copy

Command: `diloco bench store --json`; cost: half a minute and three times the
payload on disk. All files are in the page cache: a device is not measured.
"""

from __future__ import annotations

import math
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diloco.snapshots import arrays

_PREFIX = "payload"
# name -> (reference, subject); a ratio is reference seconds / subject seconds.
_RATIOS = {
  "publish_ratio": ("plain_write", "publish"),
  "fetch_ratio": ("plain_read", "fetch"),
  "fetch_ratio_numpy": ("plain_read_numpy", "fetch"),
  "fetch_ratio_preallocated": ("plain_read_into", "fetch_into"),
}


def payload_shapes(num_bytes: int) -> list[tuple[int, ...]]:
  """Shapes of float32 tensors as in a fragment: one large, many small."""
  width = 2048 if num_bytes >= 64 << 20 else 64
  rows = num_bytes // (4 * width)
  if rows < 32:
    raise ValueError(f"payload of {num_bytes} bytes is too small; use 8192 up")
  matrix = (rows // 16, width)
  vectors = [(width,)] * (rows % 16)
  return [(8 * (rows // 16), width), *[matrix] * 8, *vectors]


def _views(
  buffer: np.ndarray, shapes: Sequence[tuple[int, ...]]
) -> dict[str, np.ndarray]:
  """Tensors that lie in one buffer, end to end."""
  views, start = {}, 0
  for number, shape in enumerate(shapes):
    stop = start + math.prod(shape)
    views[f"block/{number}/kernel"] = buffer[start:stop].reshape(shape)
    start = stop
  assert start == buffer.size
  return views


class _Bench:
  """One payload, its copies on disk and the operations on them."""

  def __init__(self, root: pathlib.Path, num_bytes: int):
    """Allocates and warms all buffers."""
    shapes = payload_shapes(num_bytes)
    size = sum(math.prod(shape) for shape in shapes)
    rng = np.random.default_rng(0)
    self.buffer = rng.standard_normal(size, dtype=np.float32)
    self.warm = np.zeros_like(self.buffer)
    self._tensors = _views(self.buffer, shapes)
    self._targets = _views(self.warm, shapes)
    self._plain = root / "plain"
    self._folder = root / "store"
    self._store = arrays.ArrayStore(self._folder)

  def operations(self) -> dict[str, Callable[[], Any]]:
    """What is timed, in the order of one trial."""
    return {
      "plain_write": self._plain_write,
      "publish": self._publish,
      "plain_read": self._plain.read_bytes,
      "plain_read_numpy": lambda: np.fromfile(self._plain, np.float32),
      "fetch": lambda: self._fetch(None),
      "plain_read_into": self._plain_read_into,
      "fetch_into": lambda: self._fetch(self._targets),
    }

  def clear(self) -> None:
    """Removes the files, so that every write meets the same state."""
    self._plain.unlink(missing_ok=True)
    shutil.rmtree(self._folder, ignore_errors=True)

  def _plain_write(self) -> None:
    with open(self._plain, "wb", buffering=0) as file:
      written = file.write(self.buffer.data)
    assert written == self.buffer.nbytes

  def _plain_read_into(self) -> None:
    with open(self._plain, "rb", buffering=0) as file:
      assert file.readinto(self.warm.data) == self.warm.nbytes

  def _publish(self) -> None:
    self._store.write(
      _PREFIX,
      [arrays.Tensor.whole(name, x) for name, x in self._tensors.items()],
    )

  def _fetch(
    self, targets: dict[str, np.ndarray] | None
  ) -> dict[str, np.ndarray]:
    if targets is None:
      targets = {k: np.empty_like(v) for k, v in self._tensors.items()}
    reads = [
      self._store.open(_PREFIX, name).begin_read(target)
      for name, target in targets.items()
    ]
    for read in reads:
      read.finish()
    return targets


def run(num_bytes: int = 256 << 20, trials: int = 9) -> dict[str, Any]:
  """Measures all ratios.

  Args:
    num_bytes: size of the payload.
    trials: of each operation, interleaved; medians are reported.

  Returns:
    The ratios of `_RATIOS`, each with `<name>_spread` [lowest, highest] over
    the trials, and `bytes_per_sec` of every operation.
  """
  with tempfile.TemporaryDirectory(prefix="diloco-bench-") as directory:
    bench = _Bench(pathlib.Path(directory), num_bytes)
    operations = bench.operations()
    secs: dict[str, list[float]] = {name: [] for name in operations}
    for trial in range(trials + 1):
      bench.clear()
      for name, operation in operations.items():
        start = time.perf_counter()
        result = operation()
        elapsed = time.perf_counter() - start
        if name.startswith("fetch_into"):
          assert np.array_equal(bench.warm, bench.buffer)
          bench.warm.fill(0)
        del result  # freed outside of the measurement
        if trial:  # the first one warms up
          secs[name].append(elapsed)
    size = bench.buffer.nbytes
  return _report(size, trials, secs)


def _report(
  num_bytes: int, trials: int, secs: dict[str, list[float]]
) -> dict[str, Any]:
  result: dict[str, Any] = {"payload_bytes": num_bytes, "trials": trials}
  for name, (reference, subject) in _RATIOS.items():
    ratios = [
      plain / own
      for plain, own in zip(secs[reference], secs[subject], strict=True)
    ]
    result[name] = statistics.median(ratios)
    result[f"{name}_spread"] = [min(ratios), max(ratios)]
  result["bytes_per_sec"] = {
    name: num_bytes / statistics.median(values) for name, values in secs.items()
  }
  return result
