"""Codecs of outer gradients, against a memory copy in the same run.

Question: how fast are values encoded on the device and decoded at the syncer,
and how many bytes does the store take beside their arithmetic size? One tensor
of normal values, in blocks of 128, nearest and stochastic rounding.

    encode_ratio = (bytes of float32 / seconds to encode them)
                   / (bytes a warm memory copy copies per second)

    decode_ratio  the same, of decoding in memory, as a merge does it
    stored_ratio  bytes of all files of the payload / arithmetic size

Encoding is timed as an island does it, by a compiled program; that of `f32`
only copies. Decoding is that of one thread, block by block, as a merge reads.
Both count the bytes of the float32 values. A process with an island's settings
of malloc measures, and the least of the trials counts.

Command: `diloco bench codec --json`; cost: half a minute, 1 GB of memory.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from diloco.fragments import codec as codec_lib
from diloco.fragments import norms, partition
from diloco.snapshots import arrays
from experiments.benchmarks import island as island_bench


def run(num_elements: int = 16 << 20, trials: int = 5) -> dict[str, Any]:
  """Measures all codecs.

  Args:
    num_elements: of the tensor.
    trials: of each variant, in turn.

  Returns:
    `memcpy_gbps` and, by codec, GB/s of float32 encoded and decoded, their
    ratios to the copy, and `stored_ratio`.
  """
  return island_bench.as_island(measure, num_elements, trials)


def measure(num_elements: int, trials: int) -> dict[str, Any]:
  """See `run`; in this process."""
  import jax

  from diloco.islands import encoding, packing

  values = np.random.default_rng(0).standard_normal(num_elements, np.float32)
  source, target = jax.device_put(values), np.ones_like(values)
  plan = partition.partition([partition.Tensor("w", values.shape, "mean")], 1)
  ways = [
    packing.Encoding(codec_lib.of(name), stochastic)
    for name in codec_lib.NAMES
    for stochastic in (False, True)
    if name != "f32" or not stochastic
  ]
  programs = {way: _program(way, values.shape) for way in ways}
  stored = {way: programs[way](source) for way in ways}
  secs: dict[Any, list[float]] = {}
  for _ in range(trials):
    _timed(secs, "copy", np.copyto, target, values)
    for way in ways:
      _timed(secs, ("encode", way), programs[way], source)
      if way.codec.packed and not way.stochastic:
        row = np.asarray(stored[way]).reshape(-1)
        _timed(secs, ("decode", way), _decode, way.codec, row, num_elements)
  least = {what: min(found) for what, found in secs.items()}
  found: dict[str, Any] = {
    "elements": num_elements,
    "memcpy_gbps": round(values.nbytes / least["copy"] / 1e9, 2),
  }
  for way in ways:
    name = way.codec.name + ("_stochastic" if way.stochastic else "")
    rates = {}
    for what in ("encode", "decode"):
      if (what, way) in least:
        took = least[what, way]
        rates[f"{what}_gbps"] = round(values.nbytes / took / 1e9, 3)
        rates[f"{what}_ratio"] = round(least["copy"] / took, 4)
    if not way.stochastic:
      encoder = encoding.Encoder(plan, way.codec, {"w": source.sharding})
      encoded = encoder.encode(0, {"w": stored[way]})
      exact = way.codec.num_bytes(num_elements)
      rates["bits_per_value"] = 8 * exact / num_elements
      rates["stored_ratio"] = round(_on_disk(encoded.tensors) / exact, 5)
    found[name] = rates
  return found


def _program(way: Any, shape: tuple[int, ...]) -> Callable[[Any], Any]:
  import jax

  from diloco.islands import packing

  def program(values: Any) -> Any:
    key = jax.random.wrap_key_data(packing.key_data(0))
    return packing.encode(way, values, shape, key)[0]

  compiled = jax.jit(program)
  return lambda values: jax.block_until_ready(compiled(values))


def _timed(
  secs: dict[Any, list[float]], what: Any, do: Callable[..., Any], *args: Any
) -> None:
  started = time.perf_counter()
  do(*args)
  secs.setdefault(what, []).append(time.perf_counter() - started)


def _decode(codec: codec_lib.Codec, row: np.ndarray, size: int) -> None:
  for _ in codec.decoded(row, size, norms.BLOCK):
    pass


def _on_disk(tensors: list[arrays.Tensor]) -> int:
  with tempfile.TemporaryDirectory() as folder:
    arrays.ArrayStore(pathlib.Path(folder)).write("payload", tensors)
    files = [f for f in pathlib.Path(folder).rglob("*") if f.is_file()]
    return sum(file.stat().st_size for file in files)
