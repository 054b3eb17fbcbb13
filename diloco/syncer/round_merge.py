"""The arithmetic of a round: contributions in the store to a new version there.

Heads and who may move them are not known here, so a replay merges with the very
same code.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from concurrent import futures

import numpy as np

from diloco import config as config_lib
from diloco import errors
from diloco.fragments import codec, partition
from diloco.snapshots import arrays, keys, operations, records, store
from diloco.snapshots import digest as digest_lib
from diloco.snapshots import layout as layouts
from diloco.syncer import merge as merge_lib
from diloco.syncer import outer_optimizer, packed, passes, protocol, sources


@dataclasses.dataclass(frozen=True)
class Merged:
  """What a merge did."""

  outer_grad_norm: float
  num_bytes: int  # of the contributions read
  digest: str  # of the version's parameters
  cosine: float | None  # mean of the tensors', by size; None for one alone
  learning_rate: float  # of the outer step


class RoundMerger:
  """Merges rounds, one after the other.

  Attributes:
    params_codec: what all of a version is stored in.
    delta_codec: what is new in it is stored in; empty for nothing.
  """

  def __init__(
    self,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    method: merge_lib.Method,
    outer: outer_optimizer.OuterOptimizer,
    rules: merge_lib.Rules = merge_lib.Rules(),
    down_codec: str = "f32",
  ):
    """Does nothing yet; versions are sent in `down_codec`, as "int4:128"."""
    self._down = codec.parse(down_codec)
    self.params_codec = "f32" if self._down.packed else down_codec
    self.delta_codec = down_codec if self._down.packed else ""
    self._store = snapshots
    self._plan = plan
    self._method = method
    self._merger = merge_lib.Merger(outer, rules)

  @classmethod
  def of(
    cls,
    snapshots: store.SnapshotStore,
    plan: partition.FragmentPlan,
    config: config_lib.RunConfig,
  ) -> RoundMerger:
    """What merges as a run's configuration says."""
    outer = outer_optimizer.OuterOptimizer(**vars(config.outer))
    sync = config.sync
    rules = merge_lib.Rules(
      sync.merge_embeddings,
      sync.merge_clip,
      sync.merge_trim,
      one_by_one=config.method == "async_local_sgd",
    )
    down = str(codec.of(sync.down_codec, sync.codec_block))
    return cls(snapshots, plan, sync.merge, outer, rules, down)

  def set_learning_rate(self, learning_rate: float) -> None:
    """Takes outer steps of another length from the next merge on."""
    self._merger = _with_rate(self._merger, learning_rate)

  def chunks(self, fragment: int) -> list[list[int]]:
    """Chunk shape of every tensor of a version, in plan order."""
    return [
      list(arrays.Layout.of(spec.shape, np.float32).chunk_shape)
      for spec in self._plan.fragments[fragment]
    ]

  def merge(self, operation: operations.Merge) -> Merged:
    """Merges tensor by tensor and writes the payload.

    Raises:
      RefusedError: some contributions cannot be used.
      OSError: the store failed.
    """
    head, payload = operation.head, operation.payload
    merger = self._merger  # another thread may set another one meanwhile
    if merger.outer.count_absent:
      share = operation.share
      if merger.rules.one_by_one:  # each is the only one of its outer step
        share /= len({one.island for one in operation.contributions})
      merger = _with_rate(merger, merger.outer.learning_rate * share)
    arrivals = self._arrivals(head)
    params: list[arrays.Tensor] = []
    kept: dict[str, list[arrays.Tensor]] = {n: [] for n in merger.outer.buffers}
    square = 0.0
    cosines: list[tuple[float, int]] = []
    for index, spec in enumerate(self._plan.fragments[head.fragment]):
      inputs = self._open(spec, index, operation)
      theta, buffers = self._read(head, spec, index)
      body = spec.merge == "rda"
      method = self._method if body else merger.rules.embeddings
      try:
        outcome = merger.apply(inputs, method, theta, buffers, arrivals + 1)
      except passes.ContributionError as error:
        raise protocol.RefusedError(
          {
            operation.contributions[i].key: why
            for i, why in error.reasons.items()
          }
        ) from error
      square += outcome.norm**2
      if outcome.cosine is not None:
        cosines.append((outcome.cosine, spec.size))
      params.append(arrays.Tensor.whole(spec.name, theta))
      for tensors, values in zip(kept.values(), buffers, strict=True):
        tensors.append(arrays.Tensor.whole(spec.name, values))
    digest = self._write_params(head, payload, params)
    for name, tensors in kept.items():
      self._store.arrays.write(f"{payload}/{name}", tensors)
    if keys.DELAYED in kept:
      arrivals += len(inputs) if merger.rules.one_by_one else 1
      count = np.array(arrivals % merger.outer.delay, np.float32)
      self._store.arrays.write(
        f"{payload}/{keys.ARRIVALS}",
        [arrays.Tensor.whole(keys.ARRIVALS, count)],
      )
    return Merged(
      square**0.5,
      sum(c.num_bytes for c in operation.contributions),
      digest,
      sum(c * n for c, n in cosines) / sum(n for _, n in cosines)
      if cosines
      else None,
      merger.outer.learning_rate,
    )

  def _write_params(
    self, head: records.Head, payload: str, masters: list[arrays.Tensor]
  ) -> str:
    """Writes what all adopt, and the master beside; gives a digest."""
    told, deltas = [], []
    specs = self._plan.fragments[head.fragment]
    for index, (spec, master) in enumerate(zip(specs, masters, strict=True)):
      values = master.pieces[0][1]
      if self._down.packed:
        before = self._read_part(head, keys.PARAMS, spec, index)
        row = self._down.encode((values - before).reshape(-1))
        layout = layouts.packed(self._down, spec.shape, spec.shape)
        pieces = [(None, row[None])]
        deltas.append(arrays.Tensor(spec.name, layout, pieces, described=False))
        change = np.empty_like(before)
        self._down.decode(row, change.reshape(-1))
        values = np.add(before, change, out=change)
      dtype = codec.FLOATS[self.params_codec]
      coded = values.astype(dtype, copy=False)
      layout = master.layout._replace(dtype=dtype.name)
      told.append(arrays.Tensor(spec.name, layout, [(None, coded)]))
    write = self._store.arrays.write
    with futures.ThreadPoolExecutor(1) as beside:
      digest = beside.submit(
        digest_lib.tensors,
        ((t.name, t.pieces[0][1].astype(np.float32, copy=False)) for t in told),
      )
      if deltas:
        write(f"{payload}/{keys.DELTA}", deltas)
      if self._coded:
        write(f"{payload}/{keys.MASTER}", masters)
      write(f"{payload}/{keys.PARAMS}", told)
    return digest.result()

  @property
  def _coded(self) -> bool:
    """Whether what all adopt is not the master."""
    return self._down.name != "f32"

  def _open(
    self,
    spec: partition.Tensor,
    index: int,
    operation: operations.Merge,
  ) -> list[merge_lib.Input]:
    inputs, reasons = [], {}
    scales = _clipped(operation, self._merger.rules.clip)
    for record, weight, scale in zip(
      operation.contributions, operation.weights, scales, strict=True
    ):
      try:
        source = self._source(spec, record, index)
      except (ValueError, IndexError, errors.CorruptSnapshotError) as error:
        reasons[record.key] = f"corrupt: {error}"
        continue
      inputs.append(merge_lib.Input(source, weight, record.norms[index], scale))
    if reasons:
      raise protocol.RefusedError(reasons)
    return inputs

  def _arrivals(self, head: records.Head) -> int:
    """Merges of the newest version that a delayed momentum still waits for."""
    buffers = self._merger.outer.buffers
    if keys.DELAYED not in buffers or not keys.payload_version(head.payload):
      return 0
    prefix = f"{head.payload}/{keys.ARRIVALS}"
    return int(self._store.arrays.read(prefix, keys.ARRIVALS))

  def _source(
    self, spec: partition.Tensor, record: records.Contribution, index: int
  ) -> sources.Source:
    chunks = record.chunks[index]
    layout = layouts.of_record(record.codec, spec.shape, chunks)
    stored = self._store.arrays.open(record.payload, spec.name, layout)
    found = codec.parse(record.codec)
    if found.packed:
      return packed.PackedSource(stored, found, spec.shape, chunks)
    return sources.StoreSource(stored)

  def _read(
    self, head: records.Head, spec: partition.Tensor, index: int
  ) -> tuple[np.ndarray, list[np.ndarray]]:
    """Master and the outer optimizer's buffers of the newest version.

    Version 0 has none, and they are zero. A head that was set back to a cut has
    the payload of an older version.
    """
    made = keys.payload_version(head.payload) > 0
    what = keys.MASTER if made and self._coded else keys.PARAMS
    theta = self._read_part(head, what, spec, index)
    names = self._merger.outer.buffers
    if made:
      return theta, [self._read_part(head, n, spec, index) for n in names]
    return theta, [np.zeros_like(theta) for _ in names]

  def _read_part(
    self, head: records.Head, part: str, spec: partition.Tensor, index: int
  ) -> np.ndarray:
    layout = arrays.Layout(spec.shape, "float32", tuple(head.chunks[index]))
    prefix = f"{head.payload}/{part}"
    return self._store.arrays.open(prefix, spec.name, layout).read()


def _with_rate(
  merger: merge_lib.Merger, learning_rate: float
) -> merge_lib.Merger:
  outer = dataclasses.replace(merger.outer, learning_rate=learning_rate)
  return merge_lib.Merger(outer, merger.rules)


def _clipped(operation: operations.Merge, clip: float) -> list[float]:
  """What contributions are shortened to that are longer than most.

  By the norms of whole fragments as their records state them; what is read is
  held to that.
  """
  norms = [math.hypot(*c.norms) for c in operation.contributions]
  some = [norm for norm in norms if norm > 0]  # who is still says nothing
  if not clip or not some:
    return [1.0] * len(norms)
  longest = clip * statistics.median(some)
  return [min(1.0, longest / norm) if norm else 1.0 for norm in norms]
