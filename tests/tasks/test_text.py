"""Text sources, splits, shares and the position of a stream."""

import pathlib
import threading
import time

import numpy as np
import pytest

from diloco import errors
from diloco.tasks import streams, text

_SEQ_LEN = 7


def _write(root: pathlib.Path, count: int) -> str:
  for index in range(count):
    folder = root / f"part_{index % 3}"
    folder.mkdir(exist_ok=True)
    (folder / f"{index:03d}.txt").write_text(f"file {index} " * 5)
  return str(root / "**" / "*.txt")


def _files(corpus, split) -> list[bytes]:
  return corpus.split(split).tobytes().split(b"\0")


def _stream(data, split="train", **changes):
  options = dict(batch_size=3, seq_len=_SEQ_LEN, share=0, num_shares=1, seed=0)
  return text.stream(data, split, **{**options, **changes})


def _take(stream, count):
  return [next(stream)["tokens"] for _ in range(count)]


def _numbered(rows: int) -> np.ndarray:
  """Bytes whose row r starts with r: rows can be told apart."""
  data = np.zeros(rows * _SEQ_LEN + 1, np.uint8)
  data[: rows * _SEQ_LEN : _SEQ_LEN] = np.arange(rows)
  return data


def _row_ids(batches) -> list[int]:
  return np.concatenate(batches)[:, 0].tolist()


def test_default_source_is_the_standard_librarys_text():
  root, names = text.find_files("")
  assert "argparse.py" in names
  assert list(names) == sorted(names)
  assert not any("site-packages" in name for name in names)
  assert not any("_sysconfigdata" in name for name in names)
  assert (root / "argparse.py").is_file()


def test_default_corpus_loads_once_and_fast():
  start = time.process_time()
  corpus = text.load_corpus("", 0.02)
  assert time.process_time() - start < 10  # about 0.4 s on a free core
  assert text.load_corpus("", 0.02) is corpus
  total = len(corpus.train) + len(corpus.heldout)
  assert total > 5_000_000
  assert 0.005 < len(corpus.heldout) / total < 0.06


def test_no_file_is_in_both_splits(tmp_path):
  corpus = text.load_corpus(_write(tmp_path, 60), 0.3)
  train, heldout = _files(corpus, "train"), _files(corpus, "heldout")
  assert train and heldout and not set(train) & set(heldout)
  written = [path.read_bytes() for path in sorted(tmp_path.glob("*/*.txt"))]
  assert len(written) == len(train) + len(heldout) == 60
  for files in train, heldout:
    assert files == [one for one in written if one in files]


def test_split_depends_on_relative_paths_alone(tmp_path):
  first, second = tmp_path / "one", tmp_path / "elsewhere" / "two"
  for root, count in ((first, 40), (second, 50)):
    root.mkdir(parents=True)
    _write(root, count)
  one = text.load_corpus(str(first / "**" / "*.txt"), 0.3)
  two = text.load_corpus(str(second / "**" / "*.txt"), 0.3)
  # Ten files more, and no file changed sides.
  assert set(_files(one, "heldout")) < set(_files(two, "heldout"))
  assert set(_files(one, "train")) < set(_files(two, "train"))


def test_hash_of_a_path_never_changes():
  # Golden: another hash would move files between the splits of old runs.
  names = [f"{index}.py" for index in range(60)]
  heldout = [name for name in names if streams.is_heldout(name, 0.1)]
  assert heldout == [
    "8.py",
    "13.py",
    "14.py",
    "27.py",
    "35.py",
    "43.py",
    "44.py",
    "46.py",
  ]


def test_a_single_file_is_split_by_position(tmp_path):
  content = bytes(range(1, 101)) * 10  # ASCII: valid UTF-8
  (tmp_path / "all.txt").write_bytes(content)
  corpus = text.load_corpus(str(tmp_path / "all.txt"), 0.1)
  assert len(corpus.heldout) == 100
  joined = corpus.train.tobytes() + corpus.heldout.tobytes()
  assert joined == content


def test_binary_files_are_left_out(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"good text, long enough " * 9)
  (tmp_path / "b.txt").write_bytes(b"zero \0 byte")
  (tmp_path / "c.txt").write_bytes(b"\xff\xfe not UTF-8")
  (tmp_path / "d.txt").write_bytes(b"")
  corpus = text.load_corpus(str(tmp_path / "*.txt"), 0.1)
  joined = corpus.train.tobytes() + corpus.heldout.tobytes()
  assert joined == b"good text, long enough " * 9


def test_rows_overlap_by_one_byte():
  data = np.arange(22, dtype=np.uint8)
  rows = text.RowSource(data, _SEQ_LEN)
  assert len(rows) == 3
  assert rows[1]["tokens"].tolist() == list(range(7, 15))
  assert rows[2]["tokens"].dtype == np.int32


def test_shares_are_disjoint_and_cover():
  data = _numbered(20)
  seen = []
  for share, rows in ((0, 7), (1, 7), (2, 6)):
    stream = _stream(data, share=share, num_shares=3, batch_size=1)
    seen.append(_row_ids(_take(stream, 2 * rows)))
    stream.close()
  for ids in seen:
    # Each of two epochs holds the same rows, in another order.
    half = len(ids) // 2
    assert sorted(ids[:half]) == sorted(ids[half:])
    assert ids[:half] != ids[half:]
  flat = [row for ids in seen for row in ids[: len(ids) // 2]]
  assert sorted(flat) == list(range(20))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_seek_is_exact_across_epochs(split):
  # 20 rows in batches of 3: every epoch ends inside a batch.
  data = _numbered(20)
  reference = _stream(data, split)
  expected = _take(reference, 25)
  reference.close()
  stream = _stream(data, split)
  for position in (13, 0, 24, 6, 7):
    stream.seek(position)
    assert stream.position == position
    np.testing.assert_array_equal(next(stream)["tokens"], expected[position])
    assert stream.position == position + 1
  stream.seek(3)
  np.testing.assert_array_equal(np.stack(_take(stream, 22)), expected[3:])
  stream.close()


def test_order_follows_the_seed():
  data = _numbered(40)
  orders = []
  for seed in (0, 0, 1, 2**40):
    stream = _stream(data, seed=seed)
    orders.append(_row_ids(_take(stream, 13)))
    stream.close()
  assert orders[0] == orders[1]
  assert len({tuple(order) for order in orders}) == 3


def test_heldout_order_is_fixed():
  data = _numbered(12)
  orders = []
  for seed in (0, 5):
    stream = _stream(data, "heldout", seed=seed)
    orders.append(_row_ids(_take(stream, 8)))
    stream.close()
  assert orders[0] == orders[1]
  assert orders[0][:12] == orders[0][12:]
  assert sorted(orders[0][:12]) == list(range(12))


def test_close_ends_the_prefetch_thread():
  before = set(threading.enumerate())
  stream = _stream(_numbered(20))
  next(stream)
  started = set(threading.enumerate()) - before
  assert len(started) == 1
  stream.close()
  for thread in started:
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_stream_tells_how_many_batches_have_no_row_twice():
  stream = _stream(_numbered(20), share=1, num_shares=3, batch_size=2)
  assert stream.num_batches == 3  # of the rows 1, 4, ..., 19
  ids = _row_ids(_take(stream, 3))
  stream.close()
  assert len(set(ids)) == 6


def test_a_share_smaller_than_a_batch_repeats():
  stream = _stream(_numbered(5), share=1, num_shares=2, batch_size=8)
  assert stream.num_batches == 1
  ids = _row_ids(_take(stream, 1))
  stream.close()
  assert len(ids) == 8 and set(ids) == {1, 3}


@pytest.mark.parametrize(
  ("changes", "what", "why"),
  [
    ({"seq_len": 0}, "seq_len=0", "at least 1"),
    ({"batch_size": 0}, "batch_size=0", "at least 1"),
    ({"num_shares": 0}, "num_shares=0", "at least 1"),
    ({"share": 2, "num_shares": 2}, "share=2", "0 to 1"),
    ({"share": -1}, "share=-1", "0 to 0"),
    ({"num_shares": 21}, "21 shares", "only 20 rows"),
    ({"seq_len": 500}, "rows of 500", "only 0 rows"),
  ],
)
def test_sizes_that_cannot_work_are_refused(changes, what, why):
  with pytest.raises(errors.UserError) as caught:
    _stream(_numbered(20), **changes)
  assert what in caught.value.what
  assert why in caught.value.why


def test_a_negative_position_is_refused():
  stream = _stream(_numbered(20))
  with pytest.raises(ValueError, match="position=-1"):
    stream.seek(-1)
  stream.close()


def test_a_glob_without_matches_is_refused(tmp_path):
  with pytest.raises(errors.UserError, match="no file matches"):
    text.load_corpus(str(tmp_path / "*.txt"), 0.1)


def test_files_without_text_are_refused(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"")
  (tmp_path / "b.txt").write_bytes(b"\0\0")
  with pytest.raises(errors.UserError, match="none of the 2 matching files"):
    text.load_corpus(str(tmp_path / "*.txt"), 0.1)
