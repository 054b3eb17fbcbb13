"""The snapshot store's arrays: exact round trips, and no silent damage."""

import gc
import itertools
import math
import pathlib
import tracemalloc

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import tracing
from hypothesis import strategies as st

from diloco import errors
from diloco.fragments import codec
from diloco.snapshots import arrays, layout

DTYPES = [np.float32, ml_dtypes.bfloat16, np.int8]


def values_of(shape, dtype, seed=0):
  """Every byte random, so that NaN payloads are covered too."""
  dtype = np.dtype(dtype)
  size = math.prod(shape) * dtype.itemsize
  raw = np.random.default_rng(seed).bytes(size)
  return np.frombuffer(raw, dtype).reshape(shape)


def assert_same_bits(actual, expected):
  assert actual.shape == expected.shape
  assert actual.dtype == expected.dtype
  assert actual.tobytes() == expected.tobytes()


def box_of(*bounds):
  return tuple(slice(start, stop) for start, stop in bounds)


@pytest.fixture(autouse=True, scope="module", params=["ours", "TensorStore's"])
def checksums(request):
  """Who compares those of chunks as small as tests have them."""
  with pytest.MonkeyPatch.context() as patch:
    if request.param == "ours":
      patch.setattr(arrays, "_LARGE", 0)
    yield


@pytest.fixture
def store(tmp_path):
  return arrays.ArrayStore(tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4)])
def test_round_trip_keeps_every_bit(store, shape, dtype):
  values = values_of(shape, dtype)
  store.write("p", [arrays.Tensor.whole("x", values)])
  assert_same_bits(store.read("p", "x"), values)
  out = np.zeros(shape, dtype)
  assert store.open("p", "x").read(out=out) is out
  assert_same_bits(out, values)


@pytest.mark.parametrize("base", ["memory://", "memory://some/where"])
def test_url_base_and_known_layout(base):
  store = arrays.ArrayStore(base)
  values = values_of((4, 6), np.float32)
  tensor = arrays.Tensor.whole("x", values)
  store.write("a/b", [tensor])
  opened = store.open("a/b", "x")
  assert opened.layout == tensor.layout
  known = store.open("a/b", "x", tensor.layout)
  assert_same_bits(known.read(), values)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  rows=st.integers(1, 70),
  columns=st.integers(1, 9),
  dtype=st.sampled_from(DTYPES),
  max_bytes=st.integers(4, 300),
  data=st.data(),
)
def test_any_box_of_any_size_reads_back(rows, columns, dtype, max_bytes, data):
  values = values_of((rows, columns), dtype)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(layout, "MAX_CHUNK_BYTES", max_bytes)
    patch.setattr(layout, "MIN_CHUNK_BYTES", 4)
    tensor = arrays.Tensor.whole("x", values)
  store = arrays.ArrayStore("memory://")
  store.write("p", [tensor])
  bounds = []
  for size in values.shape:
    start = data.draw(st.integers(0, size - 1))
    bounds.append((start, data.draw(st.integers(start + 1, size))))
  index = box_of(*bounds)
  assert_same_bits(store.open("p", "x").read(index), values[index])
  assert_same_bits(store.read("p", "x"), values)


def test_shards_of_several_writers_make_one_tensor(tmp_path):
  values = values_of((8, 16), np.float32)
  grid = arrays.Layout.of((8, 16), np.float32, (4, 4))
  for row in range(2):
    writer = arrays.ArrayStore(tmp_path)
    boxes = [
      box_of((4 * row, 4 * row + 4), (4 * column, 4 * column + 4))
      for column in range(4)
    ]
    pieces = [(box, values[box]) for box in boxes]
    writer.write("p", [arrays.Tensor("x", grid, pieces)])
  reader = arrays.ArrayStore(tmp_path).open("p", "x")
  assert_same_bits(reader.read(), values)
  for box in [
    box_of((0, 8), (5, 6)),
    box_of((3, 5), (0, 16)),
    box_of((1, 2), (15, 16)),
  ]:
    assert_same_bits(reader.read(box), np.ascontiguousarray(values[box]))
  out = np.zeros((16, 8), np.float32)
  reader.begin_read(out.T).finish()
  assert_same_bits(np.ascontiguousarray(out.T), values)


def test_names_do_not_collide_with_chunks(store):
  tensors = {
    name: np.float32(n) + np.zeros((), np.float32)
    for n, name in enumerate(["a", "a/c", "c", "a/zarr.json", "ü b%2F", "a.b"])
  }
  store.write("p", [arrays.Tensor.whole(*item) for item in tensors.items()])
  for name, value in tensors.items():
    assert store.read("p", name) == value


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_names_that_leave_the_prefix_are_refused(store, name):
  with pytest.raises(ValueError, match="cannot be named"):
    store.read("p", name)


@pytest.mark.parametrize(
  ("shape", "shard", "dtype", "chunk"),
  [
    ((), None, "float32", ()),
    ((4096, 1024), None, "float32", (512, 1024)),
    ((4096, 1024), None, "bfloat16", (1024, 1024)),
    ((4096, 4096), (2048, 1024), "float32", (256, 1024)),
    ((4096, 4096), (2048, 4096), "float32", (128, 4096)),
    ((4096, 4096), (4096, 256), "float32", (1024, 256)),
    ((50257, 768), None, "float32", (680, 768)),
    # The leading axis cannot be divided: the next one is.
    ((1, 8192, 8192), None, "float32", (1, 64, 8192)),
    ((6, 3000, 1000), (3, 3000, 1000), "float32", (1, 500, 1000)),
    # A prime shard: one large chunk, not a million small ones.
    ((2 * 6000011,), (6000011,), "float32", (6000011,)),
  ],
)
def test_chunks_tile_shards(shape, shard, dtype, chunk):
  grid = arrays.Layout.of(shape, dtype, shard)
  assert grid.chunk_shape == chunk


@pytest.mark.parametrize(
  ("shape", "dtype", "shard", "message"),
  [
    ((3, 0), "float32", None, "empty axis"),
    ((3,), "float64", None, "float64 is not stored"),
    ((6,), "float32", (4,), "do not tile"),
    ((6,), "float32", (3, 1), "do not tile"),
  ],
)
def test_impossible_layouts_are_refused(shape, dtype, shard, message):
  with pytest.raises(ValueError, match=message):
    arrays.Layout.of(shape, dtype, shard)


def test_pieces_that_do_not_fit_are_refused(store):
  grid = arrays.Layout.of((8, 4), "float32", (4, 4))
  half = np.zeros((4, 4), np.float32)
  cases = [
    (box_of((2, 6), (0, 4)), half, "splits a chunk"),
    (box_of((0, 8), (0, 4)), half, "needs float32"),
    (box_of((0, 4), (0, 4)), half.astype(np.int8), "needs float32"),
    (box_of((0, 4)), half, "no box"),
    ((slice(0, 4, 2), slice(0, 4)), half, "no box"),
  ]
  for box, values, message in cases:
    with pytest.raises(ValueError, match=message):
      store.write("p", [arrays.Tensor("x", grid, [(box, values)])])
  with pytest.raises(ValueError, match="needs float32"):
    tensor = arrays.Tensor("x", grid, [(None, np.ones((8, 4), np.float32))])
    store.write("p", [tensor])
    store.open("p", "x").read(out=np.zeros((8, 4), np.int8))


def chunk_files(root: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for p in root.rglob("c*") if p.is_file())


def flip(path):
  raw = bytearray(path.read_bytes())
  raw[len(raw) // 2] ^= 1
  path.write_bytes(raw)


def truncate(path):
  path.write_bytes(path.read_bytes()[:-5])


def empty(path):
  path.write_bytes(b"")


@pytest.mark.parametrize("value", [0.0, 1.5])
@pytest.mark.parametrize("damage", [pathlib.Path.unlink, flip, truncate, empty])
def test_damaged_chunks_are_errors(tmp_path, damage, value):
  # All-zero tensors equal the fill value: they must be stored all the same.
  values = np.full((8, 4), value, np.float32)
  grid = arrays.Layout.of((8, 4), np.float32, (4, 4))
  store = arrays.ArrayStore(tmp_path)
  pieces = [
    (box_of((0, 4), (0, 4)), values[:4]),
    (box_of((4, 8), (0, 4)), values[4:]),
  ]
  store.write("p", [arrays.Tensor("x", grid, pieces)])
  assert_same_bits(store.read("p", "x"), values)
  files = chunk_files(tmp_path)
  assert len(files) == 2
  damage(files[1])
  with pytest.raises(errors.CorruptSnapshotError):
    store.read("p", "x")
  # The other chunk is still good.
  assert_same_bits(
    store.open("p", "x").read(box_of((0, 4), (0, 4))), values[:4]
  )


@pytest.mark.parametrize("damage", [pathlib.Path.unlink, truncate, empty])
def test_damaged_metadata_is_an_error(store, tmp_path, damage):
  tensor = arrays.Tensor.whole("x", np.ones(3, np.float32))
  store.write("p", [tensor])
  damage(next(tmp_path.rglob("zarr.json")))
  with pytest.raises(errors.CorruptSnapshotError):
    store.open("p", "x")
  # Who knows the layout does not need the metadata.
  assert_same_bits(
    store.open("p", "x", tensor.layout).read(), np.ones(3, np.float32)
  )


def test_store_out_of_reach_is_not_corruption(tmp_path):
  store = arrays.ArrayStore(tmp_path / "file")
  (tmp_path / "file").write_text("in the way")
  with pytest.raises(OSError, match="writing p failed"):
    store.write("p", [arrays.Tensor.whole("x", np.ones(3, np.float32))])


def test_opening_arrays_for_ever_needs_no_more_memory():
  """A syncer opens arrays of new names with every merge, for months."""
  shelf = arrays.ArrayStore("memory://")
  layout = arrays.Layout.of((4,), np.dtype("float32"))

  def blocks_after(batch):
    for number in range(300):
      shelf.open(f"{batch}/{number}", "a", layout)
    gc.collect()
    found = tracemalloc.take_snapshot().filter_traces(
      [tracemalloc.Filter(True, arrays.__file__)]
    )
    return sum(s.count for s in found.statistics("filename"))

  with tracing.traced():
    counts = [blocks_after(batch) for batch in range(5)]
  # Its tables fill up slowly; one block an array would be 300 every time.
  assert min(b - a for a, b in itertools.pairwise(counts)) < 150


def test_tensor_is_not_written_until_all_of_its_writes_are(tmp_path):
  store = arrays.ArrayStore(tmp_path)
  tensors = [
    arrays.Tensor.whole(name, np.ones(3, np.float32)) for name in "abc"
  ]
  for number in range(3):
    prefix = f"p{number}"
    (tmp_path / prefix).mkdir()
    (tmp_path / prefix / "abc"[number]).write_text("in the way")
    with pytest.raises(OSError, match=f"writing {prefix} failed"):
      store.write(prefix, tensors)


MB = 1 << 20
# float32: shape of a tensor, of one of its shards, and of a chunk.
CHUNKS = [
  ((4, 3), (4, 3), (4, 3)),
  ((64, MB), (64, MB), (1, MB // 2)),  # 2 MB at most
  ((7, 1024, 128), (7, 1024, 128), (4, 1024, 128)),  # as even as can be
  # Rows that span four shards: a reader of whole rows holds 4 MB and not 8.
  ((16384, 16384), (16384, 4096), (64, 4096)),
  # No divisor of a shard comes near, so it stays whole.
  ((30030034,), (15015017,), (15015017,)),
]


@pytest.mark.parametrize(("shape", "shard", "chunk"), CHUNKS)
def test_chunks_are_a_few_megabytes_of_whole_rows(shape, shard, chunk):
  found = layout.Layout.of(shape, np.float32, shard)
  assert found.chunk_shape == chunk


def test_packed_tensor_is_a_row_of_bytes_for_each_part():
  int4 = codec.parse("int4:128")
  row = int4.num_bytes(12)
  found = layout.of_record("int4:128", (4, 6), (2, 6))
  assert found == layout.Layout((2, row), "uint8", (1, row))
  # A chunk holds as many values as one of 2 MB in float32 does.
  large = layout.of_record("int4:128", (2 * MB,), (2 * MB,))
  assert large.chunk_shape == (1, int4.num_bytes(MB // 2))
  with pytest.raises(ValueError, match="shard"):
    layout.of_record("int4:128", (4, 6), (3, 6))
