"""Endless, seekable streams of batches over rows that are read at random.

A *share* is every n-th row. Training rows are shuffled within the share,
differently in each epoch. Held-out rows come in one fixed shuffled order, the
same for every seed and epoch, so that the first few batches already sample all
of them.
"""

import hashlib

import grain
import numpy as np

from diloco import errors
from diloco.tasks import task

_PREFETCHED_BATCHES = 3  # with the one being consumed, four in memory
_HELDOUT_ORDER_SEED = 0
_MOST_REPEATS = 8  # of a small share's rows in one batch


def is_heldout(name: str, heldout_fraction: float) -> bool:
  """Whether what has this name is held out, on every machine."""
  digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
  return int.from_bytes(digest[:8], "big") < heldout_fraction * 2**64


class Stream:
  """Batches of rows, as mappings of numpy arrays.

  Implements `task.BatchStream`. One thread reads a few batches ahead.
  """

  def __init__(self, dataset: grain.MapDataset, num_batches: int):
    """Streams the batches of `dataset`, from index 0; see `BatchStream`."""
    self.num_batches = num_batches
    options = grain.ReadOptions(
      num_threads=1, prefetch_buffer_size=_PREFETCHED_BATCHES
    )
    self.position = 0
    self._iterator = iter(dataset.to_iter_dataset(options))

  def __next__(self) -> task.Batch:
    """Returns the batch at `position` and advances by one."""
    batch = next(self._iterator)
    self.position += 1
    return batch

  def seek(self, position: int) -> None:
    """Continues at `position`, counted in batches from the start."""
    if position < 0:
      raise ValueError(f"position={position}: a stream starts at position 0")
    self._iterator.set_state({"next_index": position})
    self.position = position

  def close(self) -> None:
    """Ends the prefetch thread; the stream cannot be read any more."""
    self._iterator.close()


def stream(
  rows: grain.sources.RandomAccessDataSource,
  of: str,
  remedy: str,
  *,
  shuffled: bool,
  batch_size: int,
  share: int,
  num_shares: int,
  seed: int,
) -> Stream:
  """Streams the batches of one share of the rows.

  Args:
    rows: of one split: mappings of numpy arrays.
    of: what they are, for errors, after "shares of".
    remedy: what else to do where there are too few of them.
    shuffled: by the seed and anew in each epoch, as training is; otherwise in
      the one order of held-out rows.
    batch_size: rows per batch.
    share: index of this share.
    num_shares: number of shares, disjoint and together all rows.
    seed: of the order.

  Raises:
    UserError: a size is out of range, or there is no row for every share.
  """
  _check_sizes(batch_size, share, num_shares)
  each = len(rows) // num_shares
  if not each:
    raise errors.UserError(
      f"{num_shares} shares of {of}",
      f"there are only {len(rows)} rows",
      f"{remedy} or fewer islands",
    )
  if shuffled and batch_size > _MOST_REPEATS * each:
    raise errors.UserError(
      f"batch_size={batch_size}",
      f"each of {num_shares} shares of {of} has {each}, and a batch"
      f" would hold them all more than {_MOST_REPEATS} times",
      f"use a smaller batch_size, or {remedy}",
    )
  # A sequence mixes seed and share well: neighbouring seeds of neighbouring
  # epochs never meet in the same order.
  entropy = [seed % 2**64, share] if shuffled else [_HELDOUT_ORDER_SEED]
  order_seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
  mine = grain.MapDataset.source(rows).slice(slice(share, None, num_shares))
  return Stream(
    mine.shuffle(seed=order_seed)
    .repeat(reseed_each_epoch=shuffled)
    # Without it, Grain counts endless batches of one row past 2^63.
    .batch(batch_size, drop_remainder=True),
    max(1, len(mine) // batch_size),
  )


def _check_sizes(batch_size: int, share: int, num_shares: int) -> None:
  for name, value in (("batch_size", batch_size), ("num_shares", num_shares)):
    if value < 1:
      raise errors.UserError(
        f"{name}={value}", "it must be at least 1", f"raise {name}"
      )
  if not 0 <= share < num_shares:
    raise errors.UserError(
      f"share={share}",
      f"shares are numbered 0 to {num_shares - 1}",
      "choose one of them",
    )
