"""A large model's fragments, all the way: extract, publish, merge, adopt.

Question: at a billion parameters, how fast does a fragment pass each station
between two islands, and what memory does that take? An island holds the model
and publishes every fragment; a second contribution of the same values is
written under another island's name; a syncer merges both, radial-directionally
with Nesterov momentum; the island adopts the result. Nothing trains.

    extract   subtract, encode and copy on the device      against a memory copy
    measure   lengths of what is encoded, on the host      against a memory copy
    publish   write the encoded values to the store        against a plain write
    merge     two contributions to a version in the store  against a memory copy
    fetch     read a version, and check its digest         against a plain read
    adopt     put it on the device and swap it in          against a memory copy

A ratio is (bytes / seconds) of the station over that of the reference, of one
fragment's bytes (of both contributions' for merge), measured in turn. Island
and syncer are processes of their own; their peak memory stands beside what
`memory` says it should be: copies of the model, and of the largest fragment.

Command: `diloco bench fragments --json`; cost: two minutes, 11 GB of memory and
10 GB of disk. All files are in the page cache, as far as it goes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from diloco import process
from diloco.fragments import partition
from diloco.snapshots import keys, operations, records, store
from diloco.syncer import outer_optimizer, round_merge
from experiments.benchmarks import merge as merge_bench

T = TypeVar("T")
Secs = dict[str, float]

_CODEC = "f32"
_STEPS = 8


def model(
  num_layers: int, width: int, vocabulary: int
) -> list[partition.Tensor]:
  """Parameters of a transformer with gated feed-forward blocks."""
  tensors = [partition.Tensor("embedding", (vocabulary, width), "mean")]
  for layer in range(num_layers):
    shapes = {
      "attention/qkv": (width, 3 * width),
      "attention/out": (width, width),
      "mlp/gate": (width, 4 * width),
      "mlp/up": (width, 4 * width),
      "mlp/down": (4 * width, width),
      "norm": (width,),
    }
    for name, shape in shapes.items():
      path = f"block_{layer:02d}/{name}"
      tensors.append(partition.Tensor(path, shape, "rda"))
  return tensors


def run(
  num_layers: int = 14,
  width: int = 2048,
  vocabulary: int = 32_768,
  num_fragments: int = 24,
) -> dict[str, Any]:
  """Takes every fragment through all stations once.

  Args:
    num_layers: of the model.
    width: of the model.
    vocabulary: rows of its embedding.
    num_fragments: P.

  Returns:
    Medians over fragments: `bytes_per_sec`, `ratio` of each station with its
    `spread`; `memory` of both processes.
  """
  leaves = model(num_layers, width, vocabulary)
  plan = partition.partition(leaves, num_fragments, split=True)
  sizes = [4 * sum(t.size for t in tensors) for tensors in plan.fragments]
  with tempfile.TemporaryDirectory(prefix="diloco-bench-") as directory:
    root = pathlib.Path(directory)
    spawn = multiprocessing.get_context("spawn")
    with (
      concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as island,
      concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as syncer,
    ):
      # As real ones.
      with mock.patch.dict(os.environ, process.MALLOC_ENV):
        syncer.submit(_syncer, root, plan).result()
        island.submit(_island, root, plan, leaves).result()
      found: list[Secs] = []
      for fragment in range(num_fragments):
        secs = island.submit(publish, fragment).result()
        secs |= syncer.submit(merge, fragment).result()
        secs |= island.submit(adopt, fragment).result()
        found.append(secs)
      memory = {
        "island": island.submit(_peak, 2, sum(sizes), max(sizes)).result(),
        "syncer": syncer.submit(_peak, 0, sum(sizes), max(sizes)).result(),
      }
  return _report(sizes, found) | {
    "num_elements": sum(sizes) // 4,
    "num_fragments": num_fragments,
    "largest_over_mean": max(sizes) / statistics.mean(sizes),
    "memory": memory,
  }


_REFERENCES = {
  "extract": "memcpy",
  "measure": "memcpy",
  "publish": "plain_write",
  "merge": "syncer_memcpy",
  "fetch": "plain_read",
  "adopt": "memcpy",
}


def _report(sizes: list[int], found: list[Secs]) -> dict[str, Any]:
  times = {"merge": 2}  # contributions
  rates = [
    {name: times.get(name, 1) * size / value for name, value in secs.items()}
    for size, secs in zip(sizes, found, strict=True)
  ]
  result: dict[str, Any] = {"ratio": {}, "spread": {}}
  for name, reference in _REFERENCES.items():
    ratios = [each[name] / each[reference] for each in rates]
    result["ratio"][name] = statistics.median(ratios)
    result["spread"][name] = [min(ratios), max(ratios)]
  result["bytes_per_sec"] = {
    name: statistics.median(each[name] for each in rates) for name in rates[0]
  }
  return result


# In each of the two processes, what it keeps between calls.
_here: dict[str, Any] = {}


def _timed(secs: Secs, name: str, work: Callable[[], T]) -> T:
  start = time.perf_counter()
  result = work()
  secs[name] = time.perf_counter() - start
  return result


def _island(
  root: pathlib.Path,
  plan: partition.FragmentPlan,
  leaves: list[partition.Tensor],
) -> None:
  """Makes the model and writes its version 0."""
  import jax
  import jax.numpy as jnp

  from diloco.fragments import codec as codec_lib
  from diloco.islands import bootstrap, encoding, fetching, packing, swap

  baseline = merge_bench.status_bytes("VmRSS")
  rng = np.random.default_rng(0)
  params = {
    leaf.name: jnp.array(rng.standard_normal(leaf.shape, dtype=np.float32))
    for leaf in leaves
  }
  codec = codec_lib.of(_CODEC)
  swaps = swap.Swap(plan, params, "carry", 0.0, packing.Encoding(codec))
  swaps.rehearse()
  snapshots = store.SnapshotStore((root / "store").as_uri())
  bootstrap.publish_initial(
    snapshots,
    plan,
    swaps.anchors.__getitem__,
    writer="bench",
    first_fragment=0,
  )
  learn = jax.jit(lambda x: 0.99 * x, donate_argnums=0)
  params = {leaf: learn(value) for leaf, value in params.items()}
  fetcher = fetching.Fetcher(snapshots, plan, swaps.shardings)
  _here.update(
    root=root,
    plan=plan,
    params=jax.block_until_ready(params),
    swap=swaps,
    encoder=encoding.Encoder(plan, codec, swaps.shardings),
    store=snapshots,
    fetcher=fetcher,
    baseline=baseline,
  )


def publish(fragment: int) -> Secs:
  """Extracts, measures and publishes a fragment; seconds of each station."""
  import jax

  secs: Secs = {}
  plan, swaps, snapshots = _here["plan"], _here["swap"], _here["store"]
  outer_grads = _timed(
    secs,
    "extract",
    lambda: jax.block_until_ready(
      swaps.publish(_here["params"], fragment, _STEPS)
    ),
  )
  encode = functools.partial(_here["encoder"].encode, fragment, outer_grads)
  encoded = _timed(secs, "measure", encode)
  _references(secs, [v for t in encoded.tensors for _, v in t.pieces])
  for island in (0, 1):
    record = records.Contribution(
      island=island,
      incarnation=1,
      fragment=fragment,
      base_version=0,
      first_step=0,
      step=_STEPS,
      c_tokens=_STEPS,
      codec=_CODEC,
      plan_hash=plan.hash,
      payload="",
      chunks=encoded.chunks,
      num_bytes=encoded.num_bytes,
      norms=encoded.norms,
    )
    payload = keys.payload_prefix(record.key)
    write = functools.partial(snapshots.arrays.write, payload, encoded.tensors)
    _timed(secs, "publish", write)
    record = dataclasses.replace(record, payload=payload)
    snapshots.write(keys.contribution_key(record.key), record)
  return secs


def _references(secs: Secs, arrays: list[np.ndarray]) -> None:
  """What the same bytes take in memory, and to and from a plain file."""
  targets = [np.ones_like(a) for a in arrays]

  def copy() -> None:
    for target, array in zip(targets, arrays, strict=True):
      np.copyto(target, array)

  _timed(secs, "memcpy", copy)
  plain = _here["root"] / "plain"

  def write() -> None:
    with open(plain, "wb", buffering=0) as file:
      for array in arrays:
        view = np.ascontiguousarray(array).data.cast("B")
        while view:
          view = view[file.write(view) :]

  _timed(secs, "plain_write", write)
  _timed(secs, "plain_read", plain.read_bytes)
  plain.unlink()


def adopt(fragment: int) -> Secs:
  """Fetches a fragment's new version and swaps it in."""
  import jax

  secs: Secs = {}
  swaps, params = _here["swap"], _here["params"]
  head = _here["store"].read(keys.head_key(fragment), records.Head)
  anchor = _timed(secs, "fetch", lambda: _here["fetcher"].read(head))

  def swap_in() -> None:
    swaps.adopt(params, fragment, anchor, _STEPS)
    leaves = {t.leaf for t in _here["plan"].fragments[fragment]}
    jax.block_until_ready([params[leaf] for leaf in leaves])

  _timed(secs, "adopt", swap_in)
  return secs


def _syncer(root: pathlib.Path, plan: partition.FragmentPlan) -> None:
  snapshots = store.SnapshotStore((root / "store").as_uri())
  outer = outer_optimizer.OuterOptimizer(0.7, 0.9)
  _here.update(
    store=snapshots,
    merger=round_merge.RoundMerger(snapshots, plan, "rda", outer),
    baseline=merge_bench.status_bytes("VmRSS"),
  )


def merge(fragment: int) -> Secs:
  """Merges a fragment's two contributions into version 1."""
  secs: Secs = {}
  snapshots, merger = _here["store"], _here["merger"]
  head = snapshots.read(keys.head_key(fragment), records.Head)
  found = []
  for island in (0, 1):
    name = keys.contribution_name(fragment, island, 1, _STEPS)
    found.append(
      snapshots.read(keys.contribution_key(name), records.Contribution)
    )
  payload = keys.global_prefix(fragment, 1, "s1.1")
  operation = operations.Merge(head, payload, tuple(found), (1.0, 2.0))
  merged = _timed(secs, "merge", lambda: merger.merge(operation))
  snapshots.write(
    keys.head_key(fragment),
    dataclasses.replace(
      head,
      version=1,
      payload=payload,
      chunks=merger.chunks(fragment),
      clock={"0": _STEPS, "1": _STEPS},
      digest=merged.digest,
    ),
  )
  for prefix in (head.payload, *(record.payload for record in found)):
    snapshots.delete_tree(prefix)
  source = np.ones(found[0].num_bytes // 4, np.float32)
  target = np.ones_like(source)
  _timed(secs, "syncer_memcpy", lambda: np.copyto(target, source))
  return secs


def _peak(models: int, model_bytes: int, fragment_bytes: int) -> dict[str, int]:
  """Peak memory of this process, beside the copies it is meant to hold.

  Args:
    models: copies of the whole model: an island's parameters and anchors.
    model_bytes: of one.
    fragment_bytes: of the largest fragment.
  """
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  held = _here["baseline"] + models * model_bytes
  return {
    "baseline_bytes": _here["baseline"],
    "models_bytes": models * model_bytes,
    "peak_bytes": peak,
    "largest_fragment_bytes": fragment_bytes,
    "fragments_beside": round((peak - held) / fragment_bytes, 2),
  }
