"""Merge bandwidth, against a memory copy in the same run.

Question: how near to memory speed does the syncer merge? Contributions of one
tensor are merged radial-directionally and the outer Nesterov step is taken.

    memcpy_ratio = (bytes of the contributions / merge seconds)
                   / (bytes copied per second by a warm memory copy)

The headline has the contributions in memory and their norms known from the
commit records, as in a run, so that one reading pass is enough; `two_passes`
measures the norms first. `store` and `store_mapped` read and check the same
contributions from chunked files in the page cache.

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
import json
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

from diloco.snapshots import arrays
from diloco.syncer import merge, outer_optimizer, passes, sources

STORE_BUFFERS = 6

_OUTER = outer_optimizer.OuterOptimizer(learning_rate=0.7, momentum=0.9)
_PREFIX = "contributions"
_WIDTH = 64  # of the tensor; its rows are what is divided into chunks


def run(
  num_elements: int = 32 << 20,
  num_contributions: int = 4,
  trials: int = 9,
  threads: int = 1,
) -> dict[str, Any]:
  """Measures the ratios, the phases and the peak memory.

  Args:
    num_elements: of each contribution; a multiple of 64.
    num_contributions: M.
    trials: of each variant, interleaved; medians are reported.
    threads: that share a merge.

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
    operations = _operations(vectors, root, threads)
    secs = _time(operations, trials)
    norms = [m.norm for m in passes.measure(_in_memory(vectors), threads)]
    memory = _measure_child(root, norms)
  num_bytes = sum(v.nbytes for v in vectors)
  return _report(num_bytes, vectors[0].nbytes, secs) | {
    "num_elements": num_elements,
    "num_contributions": num_contributions,
    "trials": trials,
    "threads": threads,
    **memory,
  }


def _in_memory(vectors: Sequence[np.ndarray]) -> list[sources.Source]:
  return [sources.MemorySource(v) for v in vectors]


def _in_store(
  root: pathlib.Path, count: int, mapped: bool
) -> list[sources.Source]:
  store = arrays.ArrayStore(root, mapped=mapped)
  return [
    sources.StoreSource(store.open(_PREFIX, str(i))) for i in range(count)
  ]


def _operations(
  vectors: list[np.ndarray], root: pathlib.Path, threads: int
) -> dict[str, Callable[[], Any]]:
  """What is timed, in the order of one trial."""
  theta, momentum, copied = (np.ones_like(vectors[0]) for _ in range(3))
  merger = merge.Merger(_OUTER, threads)
  memory, count = _in_memory(vectors), len(vectors)
  norms = [m.norm for m in passes.measure(memory, threads)]

  def merged(
    tensors: Sequence[sources.Source], known: Sequence[float | None] = norms
  ) -> Callable[[], Any]:
    contributions = [
      merge.Input(tensor, 1.0 + i, norm)
      for i, (tensor, norm) in enumerate(zip(tensors, known, strict=True))
    ]
    return lambda: merger.apply(contributions, "rda", theta, [momentum])

  return {
    "memcpy": lambda: np.copyto(copied, vectors[-1]),
    "merge": merged(memory),
    "merge_two_passes": merged(memory, [None] * count),
    "merge_store": merged(_in_store(root, count, mapped=False)),
    "merge_store_mapped": merged(_in_store(root, count, mapped=True)),
    "measure": lambda: passes.measure(memory, threads),
    "outer_step": lambda: _outer_step(theta, momentum, copied, threads),
  }


def _outer_step(
  theta: np.ndarray, momentum: np.ndarray, grad: np.ndarray, threads: int
) -> None:
  """The outer step alone, block by block as the merge takes it."""
  flat = [x.reshape(-1) for x in (theta, momentum, grad)]

  def work(first: int, last: int) -> None:
    scratch = np.empty(passes.BLOCK, np.float32)
    for n in range(first, last):
      parts = [x[n * passes.BLOCK : (n + 1) * passes.BLOCK] for x in flat]
      _OUTER.step(parts[0], parts[1:2], parts[2], scratch[: parts[0].size])

  passes.share(work, passes.num_blocks(theta.size), threads)


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
    "measure": medians["measure"],
    "accumulate": medians["merge"] - medians["outer_step"],
    "outer_step": medians["outer_step"],
  }
  result["bytes_per_sec"] = {
    name: (num_bytes if name.startswith("me") else copy_bytes) / value
    for name, value in medians.items()
  } | {"memcpy": copy_bytes / medians["memcpy"]}
  result["memcpy_ratio_bound"] = 2 * num_bytes / (num_bytes + 6 * copy_bytes)
  return result


def _measure_child(root: pathlib.Path, norms: list[float]) -> dict[str, int]:
  """Peak memory of a merge from the store, in a process of its own."""
  with concurrent.futures.ProcessPoolExecutor(
    1, mp_context=multiprocessing.get_context("spawn")
  ) as pool:
    return pool.submit(streamed_merge_memory, root, norms).result()


def streamed_merge_memory(
  root: pathlib.Path, norms: list[float]
) -> dict[str, int]:
  """Merges from the store in this process and returns what memory it took."""
  baseline = status_bytes("VmRSS")
  stored = [
    arrays.ArrayStore(root).open(_PREFIX, str(i)) for i in range(len(norms))
  ]
  layout = stored[0].layout
  theta, momentum = (np.ones(layout.shape, np.float32) for _ in range(2))
  contributions = [
    merge.Input(sources.StoreSource(s), 1.0, norm)
    for s, norm in zip(stored, norms, strict=True)
  ]
  done = threading.Event()
  anonymous = [0]

  def watch() -> None:
    while not done.wait(0.002):
      anonymous[0] = max(anonymous[0], status_bytes("RssAnon"))

  watcher = threading.Thread(target=watch)
  watcher.start()
  try:
    merge.Merger(_OUTER, threads=1).apply(
      contributions, "rda", theta, [momentum]
    )
  finally:
    done.set()
    watcher.join()
  chunk_bytes = math.prod(layout.chunk_shape) * layout.numpy_dtype.itemsize
  return {
    "fragment_bytes": layout.nbytes,
    "chunk_bytes": chunk_bytes,
    "peak_rss_bytes": status_bytes("VmHWM"),
    "peak_rss_limit_bytes": baseline
    + 3 * layout.nbytes
    + STORE_BUFFERS * len(norms) * chunk_bytes,
    "baseline_rss_bytes": baseline,  # interpreter and imports
    "peak_anonymous_bytes": anonymous[0],  # sampled, so a lower bound
  }


def status_bytes(field: str) -> int:
  """A memory figure of this process, from the Linux kernel."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(f"{field}:"):
      return int(line.split()[1]) * 1024
  raise OSError(f"/proc/self/status has no {field}; run on Linux")


if __name__ == "__main__":
  print(json.dumps(run(), indent=2))
