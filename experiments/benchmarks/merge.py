"""Merge bandwidth, against a memory copy in the same run.

Question: how near to memory speed does the syncer merge? Contributions of one
tensor are merged radial-directionally and the outer Nesterov step is taken.

    memcpy_ratio = (bytes of the contributions / merge seconds)
                   / (bytes copied per second by a warm memory copy)

The headline has the contributions in memory and their norms known from the
commit records, as in a run, so that one reading pass is enough. `store` reads
and checks the same contributions from chunked files in the page cache.

Least traffic of one pass, in tensors: M reads and 1 write to accumulate, 3
reads and 2 writes for the outer step, so (M + 6) / M bytes per byte
contributed; a copy moves 2. That alone bounds the ratio by 2 M / (M + 6): 0.8
at M = 4.

Peak memory is that of a child process that streams the contributions from the
store: theta, momentum, one accumulator and, per contribution, `STORE_BUFFERS`
chunks: one being merged, one being read, and what the decoder's allocator
holds. The fragment is one tensor, which is the worst case: the accumulator is
as large as the largest tensor.

Command: `diloco bench merge --json`; cost: about a minute, 1 GB of memory and
half a GB of disk.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diloco.fragments import norms
from diloco.snapshots import arrays
from diloco.syncer import merge, outer_optimizer, sources

STORE_BUFFERS = 6

_OUTER = outer_optimizer.OuterOptimizer(learning_rate=0.7, momentum=0.9)
_PREFIX = "contributions"
_WIDTH = 64  # of the tensor; its rows are what is divided into chunks


def run(
  num_elements: int = 32 << 20,
  num_contributions: int = 4,
  trials: int = 9,
) -> dict[str, Any]:
  """Measures the ratios, the phases and the peak memory.

  Args:
    num_elements: of each contribution; a multiple of 64.
    num_contributions: M.
    trials: of each variant, interleaved; medians are reported.

  Returns:
    `memcpy_ratio` and its variants, each with `<name>_spread` [lowest,
    highest]; `phase_secs`; `peak_rss_bytes` with its limit and baseline.
  """
  if num_elements <= 0 or num_elements % _WIDTH:
    raise ValueError(f"{num_elements} elements; use a multiple of {_WIDTH}")
  rng = np.random.default_rng(0)
  shape = (num_elements // _WIDTH, _WIDTH)
  vectors = [
    rng.standard_normal(shape, dtype=np.float32)
    for _ in range(num_contributions)
  ]
  with tempfile.TemporaryDirectory(prefix="diloco-bench-") as directory:
    root = pathlib.Path(directory)
    arrays.ArrayStore(root).write(
      _PREFIX,
      [arrays.Tensor.whole(str(i), v) for i, v in enumerate(vectors)],
    )
    known = [math.sqrt(norms.sum_of_squares(v)) for v in vectors]
    secs = _time(_operations(vectors, root, known), trials)
    memory = _measure_child(root, known)
  num_bytes = sum(v.nbytes for v in vectors)
  return _report(num_bytes, vectors[0].nbytes, secs) | {
    "num_elements": num_elements,
    "num_contributions": num_contributions,
    "trials": trials,
    **memory,
  }


def _operations(
  vectors: list[np.ndarray], root: pathlib.Path, known: list[float]
) -> dict[str, Callable[[], Any]]:
  """What is timed, in the order of one trial."""
  theta, momentum, copied = (np.ones_like(vectors[0]) for _ in range(3))
  merger, store = merge.Merger(_OUTER), arrays.ArrayStore(root)
  stored = [store.open(_PREFIX, str(i)) for i in range(len(vectors))]

  def merged(tensors: Sequence[sources.Source]) -> Callable[[], Any]:
    contributions = [
      merge.Input(tensor, 1.0 + i, norm)
      for i, (tensor, norm) in enumerate(zip(tensors, known, strict=True))
    ]
    return lambda: merger.apply(contributions, "rda", theta, [momentum])

  return {
    "memcpy": lambda: np.copyto(copied, vectors[-1]),
    "merge": merged([sources.MemorySource(v) for v in vectors]),
    "merge_store": merged([sources.StoreSource(s) for s in stored]),
    "outer_step": lambda: _outer_step(theta, momentum, copied),
  }


def _outer_step(
  theta: np.ndarray, momentum: np.ndarray, grad: np.ndarray
) -> None:
  """The outer step alone, block by block as the merge takes it."""
  flat = [x.reshape(-1) for x in (theta, momentum, grad)]
  scratch = np.empty(norms.BLOCK, np.float32)
  for start in range(0, theta.size, norms.BLOCK):
    parts = [x[start : start + norms.BLOCK] for x in flat]
    _OUTER.step(parts[0], parts[1:2], parts[2], scratch[: parts[0].size])


def _time(
  operations: dict[str, Callable[[], Any]], trials: int
) -> dict[str, list[float]]:
  """Seconds of each trial; all operations take turns."""
  secs: dict[str, list[float]] = {name: [] for name in operations}
  for trial in range(trials + 1):
    for name, operation in operations.items():
      start = time.perf_counter()
      operation()
      if trial:  # the first one warms up
        secs[name].append(time.perf_counter() - start)
  return secs


def _report(
  num_bytes: int, copy_bytes: int, secs: dict[str, list[float]]
) -> dict[str, Any]:
  """Ratios per trial, then medians, so that noise meets both sides."""
  result: dict[str, Any] = {}
  for name in secs:
    if not name.startswith("merge"):
      continue
    ratios = [
      (num_bytes / own) / (copy_bytes / copy)
      for own, copy in zip(secs[name], secs["memcpy"], strict=True)
    ]
    key = name.replace("merge", "memcpy_ratio")
    result[key] = statistics.median(ratios)
    result[f"{key}_spread"] = [min(ratios), max(ratios)]
  medians = {name: statistics.median(values) for name, values in secs.items()}
  result["secs"] = medians
  result["phase_secs"] = {
    "accumulate": medians["merge"] - medians["outer_step"],
    "outer_step": medians["outer_step"],
  }
  result["bytes_per_sec"] = {
    name: (num_bytes if name.startswith("me") else copy_bytes) / value
    for name, value in medians.items()
  } | {"memcpy": copy_bytes / medians["memcpy"]}
  result["memcpy_ratio_bound"] = 2 * num_bytes / (num_bytes + 6 * copy_bytes)
  return result


def _measure_child(root: pathlib.Path, known: list[float]) -> dict[str, int]:
  """Peak memory of a merge from the store, in a process of its own."""
  with concurrent.futures.ProcessPoolExecutor(
    1, mp_context=multiprocessing.get_context("spawn")
  ) as pool:
    return pool.submit(streamed_merge_memory, root, known).result()


def streamed_merge_memory(
  root: pathlib.Path, known: list[float]
) -> dict[str, int]:
  """Merges from the store in this process and returns what memory it took."""
  baseline = status_bytes("VmRSS")
  stored = [
    arrays.ArrayStore(root).open(_PREFIX, str(i)) for i in range(len(known))
  ]
  layout = stored[0].layout
  theta, momentum = (np.ones(layout.shape, np.float32) for _ in range(2))
  contributions = [
    merge.Input(sources.StoreSource(s), 1.0, norm)
    for s, norm in zip(stored, known, strict=True)
  ]
  done = threading.Event()
  anonymous = [0]

  def watch() -> None:
    while not done.wait(0.002):
      anonymous[0] = max(anonymous[0], status_bytes("RssAnon"))

  watcher = threading.Thread(target=watch)
  watcher.start()
  try:
    merge.Merger(_OUTER).apply(contributions, "rda", theta, [momentum])
  finally:
    done.set()
    watcher.join()
  chunk_bytes = math.prod(layout.chunk_shape) * layout.numpy_dtype.itemsize
  return {
    "fragment_bytes": theta.nbytes,
    "chunk_bytes": chunk_bytes,
    "peak_rss_bytes": status_bytes("VmHWM"),
    "peak_rss_limit_bytes": baseline
    + 3 * theta.nbytes
    + STORE_BUFFERS * len(known) * chunk_bytes,
    "baseline_rss_bytes": baseline,  # interpreter and imports
    "peak_anonymous_bytes": anonymous[0],  # sampled, so a lower bound
  }


def status_bytes(field: str) -> int:
  """A memory figure of this process, from the Linux kernel."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(f"{field}:"):
      return int(line.split()[1]) * 1024
  raise OSError(f"/proc/self/status has no {field}; run on Linux")
