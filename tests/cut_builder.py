"""A run of two fragments and two islands in a store, with cuts."""

import contextlib
import dataclasses
import pathlib

import numpy as np
import tensorstore as ts

from diloco import errors
from diloco.fragments import partition
from diloco.snapshots import (
  arrays,
  checkpoint,
  cuts,
  digest,
  keys,
  operations,
  records,
  store,
  verify,
)
from diloco.syncer import grace, orders

PLAN = partition.partition(
  [partition.Tensor("a", (4,), "rda"), partition.Tensor("b", (3,), "rda")], 2
)
ISLANDS = (0, 1)


class Died(BaseException):
  """The process is gone: nothing can catch it."""


def contribution(**fields):
  """One of an island's first eight steps, but for these fields."""
  plain = dict(island=0, incarnation=1, fragment=0, base_version=0)
  plain |= dict(first_step=0, step=8, c_tokens=80, codec="f32", payload="x")
  plain |= dict(plan_hash=PLAN.hash, chunks=[], num_bytes=0, norms=[])
  return records.Contribution(**plain | fields)


def close_of(**fields):
  """The close of a first round, at once and of nobody, but for these fields."""
  plain = dict(fragment=0, version=1, chosen=(), absent=(), clock={}, holes={})
  plain |= dict(opened_at=0.0, closed_at=0.0, quorum_secs=0.0, grace_secs=0.0)
  plain |= dict(grace_spent_secs=0.0, queued_secs=0.0)
  plain |= dict(facts=grace.GraceFacts(0.1, 0.1, 0.1))
  return orders.Close(**plain | fields)


def write_leaf(path, name, values):
  """Writes an array of a saved state where and as Orbax does."""
  base = {"driver": "file", "path": f"{path / checkpoint.ARRAYS}/"}
  kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
  ts.open(
    {"driver": "zarr", "kvstore": kvstore},
    dtype=ts.dtype(values.dtype),
    shape=values.shape,
    create=True,
    delete_existing=True,
  ).result().write(values).result()


def save_state(path, values, **fields):
  """Saves a state of one array, which counts; returns its marker."""
  write_leaf(path, "p000000", values)
  plain = dict(island=0, incarnation=1, epoch=0, cut=0, positions=[[0, 0, 0]])
  marker = checkpoint.Checkpoint(
    **plain | fields,
    leaves={"p000000": checkpoint.leaf_digest("p000000", values)},
    files=checkpoint.file_sizes(path),
    num_bytes=0,
  )
  checkpoint.commit(path, marker)
  return marker


class CutRun:
  """The records and tensors of a run, without its processes."""

  def __init__(self, run_dir: pathlib.Path, url: str = "memory://"):
    self.dir = run_dir
    self.store = store.SnapshotStore(url)
    self.store.write_plan(PLAN)
    for fragment in range(2):
      self.commit(fragment, 0, {}, value=0.0)

  def execute(self, operation):
    """Does one operation, as a syncer whose outer steps keep nothing."""
    if isinstance(operation, operations.ReadPayload):
      return verify.check_version(self.store, PLAN, (), operation.head)
    return self.store.execute(operation)

  def perform(self, procedure):
    return operations.perform(procedure, self.execute)

  def perform_until(self, procedure, count):
    """Dies before operation `count`; says whether it was reached."""
    left = count

    def execute(operation):
      nonlocal left
      if not left:
        raise Died
      left -= 1
      return self.store.execute(operation)

    try:
      return False, operations.perform(procedure, execute)
    except Died:
      return True, None

  def head(self, fragment):
    return self.store.read(keys.head_key(fragment), records.Head)

  def heads(self):
    return [self.head(p) for p in range(2)]

  def commit(self, fragment, version, clock, value, *, cut=0, token=1):
    """Makes a version the head, as a syncer does."""
    payload = keys.global_prefix(fragment, version, f"s{token}.{value}")
    tensors, parts = PLAN.fragments[fragment], ["params"]
    parts += ["momentum"] if version else []
    for part in parts:
      self.store.arrays.write(
        f"{payload}/{part}",
        [arrays.Tensor.whole(t.name, filled(t, value)) for t in tensors],
      )
    epoch = self.store.read(keys.EPOCH, records.Epoch)
    head = records.Head(
      fragment=fragment,
      version=version,
      token=token,
      payload=payload,
      chunks=[list(t.shape) for t in tensors],
      clock={str(m): step for m, step in clock.items()},
      merged={"version": version},
      epoch=epoch.epoch if epoch else 0,
      cut=cut,
      digest=digest.tensors((t.name, filled(t, value)) for t in tensors),
    )
    self.store.write(keys.head_key(fragment), head)
    return head

  def publish(self, fragment, island, base, first_step, step, *, cut=0):
    """Makes a contribution, as an island does."""
    tensors = PLAN.fragments[fragment]
    name = f"{fragment:04d}.{island:04d}.0001.{step:09d}"
    payload = keys.payload_prefix(name)
    self.store.arrays.write(
      payload, [arrays.Tensor.whole(t.name, filled(t, 1.0)) for t in tensors]
    )
    epoch = self.store.read(keys.EPOCH, records.Epoch)
    record = contribution(
      island=island,
      fragment=fragment,
      base_version=base,
      first_step=first_step,
      step=step,
      c_tokens=100 * (step - first_step),
      payload=payload,
      chunks=[list(t.shape) for t in tensors],
      num_bytes=16,
      norms=[1.0] * len(tensors),
      epoch=epoch.epoch if epoch else 0,
      cut=cut,
    )
    self.store.write(keys.contribution_key(name), record)
    return record

  def delete(self, sent, *, payload=False):
    self.store.delete(keys.contribution_key(sent.key))
    if payload:
      self.store.delete_tree(sent.payload)

  def waiting(self):
    names = self.store.names("contributions")
    return {
      n: self.store.read(keys.contribution_key(n), records.Contribution)
      for n in names
    }

  def save(self, cut, island, step, positions, incarnation=1):
    """Saves an island's state and adds its part of a cut."""
    folder = checkpoint.directory(self.dir, island)
    path = checkpoint.path_of(folder, step, incarnation, cut)
    values = np.full(4, 100 * island + step, np.float32)
    marker = save_state(
      path,
      values,
      **dict(island=island, serial=cut, step=step, cut=cut),
      incarnation=incarnation,
      positions=[list(p) for p in positions],
    )
    part = records.CutPart(
      cut=cut,
      epoch=0,
      island=island,
      incarnation=incarnation,
      step=step,
      checkpoint=str(path.relative_to(self.dir)),
      checksum=marker.crc32(),
      positions=marker.positions,
    )
    assert self.perform(cuts.add_part(part))
    return part

  def take_cut(self, sent=(), *, step=16, published=(16, 8)):
    """Takes a whole cut of the heads as they are, by hand."""
    asked = self.perform(cuts.request(ISLANDS, 2))
    heads = self.heads()
    for island in ISLANDS:
      positions = [[h.version, 0, published[island]] for h in heads]
      self.save(asked.cut, island, step + asked.cut, positions)
    token = max(h.token for h in heads)
    fields = [dataclasses.asdict(h) for h in heads]
    part = records.CutHeads(asked.cut, asked.epoch, token, fields)
    assert self.perform(cuts.add_heads(part))
    self.store.write(
      keys.cut_channel_key(asked.cut),
      records.CutChannel(
        asked.cut, token, [dataclasses.asdict(c) for c in sent]
      ),
    )
    self.perform(cuts.complete(asked))
    return asked.cut


def run_with_a_cut(run_dir, url="memory://"):
  """A run that went on after a cut; returns it, and what was under way."""
  run = CutRun(run_dir, url)
  run.commit(0, 5, {0: 8, 1: 4}, value=5.0)
  run.commit(1, 4, {0: 8, 1: 4}, value=4.0)
  sent = [run.publish(0, 0, 5, 8, 16), run.publish(1, 1, 3, 4, 8)]
  cut = run.take_cut(sent)
  run.commit(0, 6, {0: 16, 1: 4}, value=6.0, cut=cut)
  run.commit(0, 7, {0: 24, 1: 4}, value=7.0, cut=cut)
  run.delete(sent[0])  # merged; the cut keeps its payload
  run.publish(0, 0, 7, 24, 32, cut=cut)
  return run, sent


def filled(tensor, value):
  return np.full(tensor.shape, value, np.float32)


class _IdleError(Exception):
  """There is nothing to merge."""


def lead(rounds, execute, script):
  """Performs a part of leading, with the merges it asks for, in one thread."""

  def merge(operation):
    if operation is None:
      raise _IdleError
    return rounds._merger.merge(operation)

  try:
    operations.perform(script, execute)
  finally:  # as the next turn of the loop would
    while rounds.is_merging:
      with contextlib.suppress(_IdleError):
        operations.perform(rounds.merge(), merge)
      operations.perform(rounds.finish(), execute)


def spoil(run, key):
  """Damages the bytes of a record."""
  data = run.store._kvs.read(key).result().value
  run.store._kvs.write(key, data[: len(data) // 2]).result()


def is_readable(run, key, kind):
  try:
    return run.store.read(key, kind) is not None
  except errors.CorruptSnapshotError:
    return False
