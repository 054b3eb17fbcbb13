"""Sources yield the flattened tensor whole and in order."""

import itertools
import math

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from diloco import errors
from diloco.fragments import codec
from diloco.snapshots import arrays, layout
from diloco.syncer import packed, sources


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
  parts=st.lists(st.integers(0, 12), max_size=8), step=st.integers(1, 9)
)
def test_rechunk_keeps_order_and_length(parts, step):
  values = np.arange(sum(parts))
  pieces = np.split(values, np.cumsum(parts)[:-1]) if parts else []
  blocks = [block.copy() for block in sources.rechunk(pieces, step)]
  assert all(block.size == step for block in blocks[:-1])
  assert np.array_equal(np.concatenate([[], *blocks]), values)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
  shape=st.lists(st.integers(1, 7), max_size=4).map(tuple),
  chunk_bytes=st.integers(4, 200),
  data=st.data(),
)
def test_stored_tensor_is_read_in_flat_order(shape, chunk_bytes, data):
  shard = tuple(
    data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    for size in shape
  )
  size = math.prod(shape)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(layout, "MAX_CHUNK_BYTES", chunk_bytes)
    patch.setattr(layout, "MIN_CHUNK_BYTES", 4)
    grid = arrays.Layout.of(shape, np.float32, shard)
  values = np.arange(size, dtype=np.float32).reshape(shape)
  store = arrays.ArrayStore("memory://")
  store.write("p", [arrays.Tensor("x", grid, [(None, values)])])
  source = sources.StoreSource(store.open("p", "x"))
  assert source.size == size
  step = data.draw(st.integers(1, size))
  blocks = [block.copy() for block in source.blocks(step)]
  assert np.array_equal(np.concatenate(blocks), np.arange(size))
  assert all(block.size == step for block in blocks[:-1])


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
  shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
  block=st.sampled_from([2, 4, 6]),
  chunk_bytes=st.integers(4, 200),
  data=st.data(),
)
def test_packed_tensor_is_read_in_flat_order(shape, block, chunk_bytes, data):
  part = tuple(
    data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    for size in shape
  )
  form = codec.of("int4", block)
  size, rows = math.prod(shape), []
  values = np.zeros(shape, np.float32)
  numbers = np.random.default_rng(size).standard_normal(shape, np.float32)
  for at in itertools.product(
    *(range(0, n, step) for n, step in zip(shape, part, strict=True))
  ):
    box = tuple(slice(a, a + n) for a, n in zip(at, part, strict=True))
    rows.append(form.encode(numbers[box].reshape(-1)))
    decoded = np.empty(math.prod(part), np.float32)
    form.decode(rows[-1], decoded)
    values[box] = decoded.reshape(part)
  store = arrays.ArrayStore("memory://")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(layout, "MAX_CHUNK_BYTES", chunk_bytes)
    patch.setattr(layout, "MIN_CHUNK_BYTES", 4)
    whole = arrays.Layout((len(rows), rows[0].size), "uint8", (1, rows[0].size))
    store.write("p", [arrays.Tensor("x", whole, [(None, np.stack(rows))])])
    source = packed.PackedSource(store.open("p", "x"), form, shape, part)
  assert source.size == size
  step = data.draw(st.integers(1, size))
  blocks = [b.copy() for b in source.blocks(step)]
  assert np.array_equal(np.concatenate(blocks), values.reshape(-1))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_memory_and_store_agree(dtype):
  values = np.random.default_rng(0).standard_normal((50, 70)).astype(dtype)
  store = arrays.ArrayStore("memory://")
  store.write("p", [arrays.Tensor.whole("x", values)])
  for source in (
    sources.MemorySource(values),
    sources.StoreSource(store.open("p", "x")),
  ):
    blocks = [block.copy() for block in source.blocks(1000)]
    assert {block.dtype for block in blocks} == {np.dtype(np.float32)}
    expected = values.reshape(-1).astype(np.float32)
    assert np.array_equal(np.concatenate(blocks), expected)


def test_float32_in_memory_is_not_copied():
  values = np.zeros(10, np.float32)
  block = next(sources.MemorySource(values).blocks(4))
  assert np.shares_memory(block, values)


def test_damage_surfaces_while_reading(tmp_path):
  store = arrays.ArrayStore(tmp_path)
  values = np.ones((4, 1 << 20), np.float32)  # eight chunks
  store.write("p", [arrays.Tensor.whole("x", values)])
  next(tmp_path.rglob("c.3.0")).unlink()
  source = sources.StoreSource(store.open("p", "x"))
  blocks = source.blocks(1 << 16)
  for _ in range(48):  # what lies before the missing chunk is still served
    next(blocks)
  with pytest.raises(errors.CorruptSnapshotError):
    list(blocks)
