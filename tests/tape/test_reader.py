"""The reader: torn tails, broken lines, order, and following."""

import json

import pytest

from diloco import errors
from diloco.tape import reader, recorder


def _tape(run_dir, role, incarnation, *lines):
  path = recorder.tape_path(run_dir, role, incarnation)
  path.parent.mkdir(exist_ok=True)
  with open(path, "ab") as file:
    for line in lines:
      file.write(line if isinstance(line, bytes) else _encoded(line))
  return path


def _encoded(line):
  return json.dumps(line).encode() + b"\n"


def _event(name, wall_secs):
  return {"event": name, "wall_secs": wall_secs}


def _names(record):
  return [line["event"] for line in record.events]


def test_missing_directory_is_the_users_mistake(tmp_path):
  with pytest.raises(errors.UserError, match="no such directory"):
    reader.read(tmp_path / "nowhere")


def test_empty_directory_is_an_empty_record(tmp_path):
  record = reader.read(tmp_path)
  assert record.events == [] and record.metrics == {}


def test_other_files_are_left_alone(tmp_path):
  _tape(tmp_path, "syncer", 1, _event("a", 1))
  (tmp_path / "tape" / "notes.txt").write_text("not a tape")
  (tmp_path / "tape" / "syncer-0001.jsonl.swp").write_text("nor this")
  assert _names(reader.read(tmp_path, strict=True)) == ["a"]


def test_torn_tail_is_ignored_at_every_byte(tmp_path):
  last = _encoded({"event": "ünï", "wall_secs": 2, "text": "a\nb"})
  path = _tape(tmp_path, "syncer", 1, _event("a", 1))
  whole = path.read_bytes()
  for cut in range(len(last) + 1):
    path.write_bytes(whole + last[:cut])
    record = reader.read(tmp_path, strict=True)
    assert _names(record) == (["a", "ünï"] if cut == len(last) else ["a"])


@pytest.mark.parametrize(
  "broken",
  [
    b"\n",
    b'{"event": "b", "wall\n',
    b'["event"]\n',
    b'{"wall_secs": 3}\n',
    b'{"event": "b", "wall_secs": "soon"}\n',
    b"\x00\xff\r\x00\n",
    b'{"event": "b", "wall_secs": 2, "text": "\\ud83d"}\n',
    b'{"event": "b", "wall_secs": 2, "text": "\\uD83D"}\n',
    b"[" * 100_000 + b"\n",
  ],
)
def test_broken_middle_line_is_named_and_the_rest_read(tmp_path, broken):
  path = _tape(tmp_path, "syncer", 1, _event("a", 1), broken, _event("c", 3))
  record = reader.read(tmp_path)
  assert _names(record) == ["a", "c"]
  (problem,) = record.problems
  assert f"{path}, line 2" in str(problem)
  with pytest.raises(errors.UserError, match="line 2"):
    reader.read(tmp_path, strict=True)


def test_first_of_several_broken_lines_is_named_and_all_are_counted(tmp_path):
  lines = [_event("a", 1), b"{\n", _event("b", "soon"), _event("c", 3)]
  _tape(tmp_path, "syncer", 1, *lines)
  follower = reader.Follower(tmp_path)
  record = follower.poll()
  (problem,) = record.problems
  assert "line 2 (one of 2 broken lines)" in str(problem)
  assert "no JSON object" in str(problem) and problem.count == 2
  assert record.sound == {"tape/syncer-0001.jsonl": 2}
  # Who goes on from here knows of them.
  _tape(tmp_path, "syncer", 1, _event("d", 4), b"[\n")
  record = reader.Follower(tmp_path, follower.position).poll()
  assert "line 2 (one of 3 broken lines)" in str(record.problems[0])
  assert record.sound == {"tape/syncer-0001.jsonl": 3}


@pytest.mark.parametrize("tail", [b"", b"{", b"x" * 500])
def test_newest_lines_are_those_of_a_reading_from_the_end(
  tmp_path, tail, monkeypatch
):
  names = ("a", "b")
  for incarnation in (1, 2):
    lines = [_event(name, n) for n, name in enumerate("aXbXXaba" * 9)]
    _tape(tmp_path, "controller", incarnation, *lines, b"{\n", tail)
  _tape(tmp_path, "syncer", 1, _event("a", 3))
  record = reader.stream(tmp_path, only_role="controller")
  told = list(reader.select(record.events, names))
  assert len(told) == 90
  for size in (1, 40, 100, 1 << 20):
    monkeypatch.setattr(reader, "_BLOCK_BYTES", size)
    assert list(reader.newest(tmp_path, "controller", names)) == told[::-1]


def test_broken_metric_line_is_named(tmp_path):
  path = recorder.metrics_path(tmp_path, 1)
  path.parent.mkdir()
  path.write_bytes(b'{"step": 1}\n{"loss": 2}\n{"step": 3}\n')
  record = reader.read(tmp_path)
  assert [line["step"] for line in record.metrics[1]] == [1, 3]
  assert "island-1.jsonl, line 2" in str(record.problems[0])


def test_roles_keep_their_order_whatever_their_clocks_say(tmp_path):
  _tape(tmp_path, "island-0", 2, _event("a3", 1))
  _tape(tmp_path, "island-0", 1, _event("a1", 5), _event("a2", 2))
  _tape(tmp_path, "syncer", 1, _event("b1", 3), _event("b2", 6))
  names = _names(reader.read(tmp_path))
  assert [n for n in names if n[0] == "a"] == ["a1", "a2", "a3"]
  assert names[0] == "b1" and names[-1] == "b2"


def test_incarnations_are_ordered_as_numbers(tmp_path):
  for incarnation in (10000, 9999, 2, 1):
    _tape(tmp_path, "syncer", incarnation, _event(str(incarnation), 1))
  assert _names(reader.read(tmp_path)) == ["1", "2", "9999", "10000"]


def test_follower_returns_each_line_once(tmp_path):
  follower = reader.Follower(tmp_path / "run")
  assert not follower.poll().events  # before the directory is there
  (tmp_path / "run").mkdir()
  _tape(tmp_path / "run", "syncer", 1, _event("a", 1), b'{"event": "b"')
  assert _names(follower.poll()) == ["a"]
  assert not follower.poll().events
  _tape(tmp_path / "run", "syncer", 1, b"}\n", b"bad\n", _event("c", 3))
  _tape(tmp_path / "run", "island-0", 1, _event("d", 2))
  record = follower.poll()
  assert _names(record) == ["b", "d", "c"]
  assert "line 3" in str(record.problems[0])
  assert not follower.poll().events


def test_each_of_several_files_is_read_followed_and_told_of(tmp_path):
  roles = ("controller", "island-0", "island-1")
  for n, role in enumerate(roles):
    _tape(tmp_path, role, 1, _event(f"{role} 1", n), b"bad\n")
  for island in range(3):
    log = recorder.MetricLog(tmp_path, island)
    log.record(step=island + 1)
    log.close()
  whole, follower = reader.read(tmp_path), reader.Follower(tmp_path)
  first, streamed = follower.poll(), reader.stream(tmp_path)
  for record in (whole, first, streamed):
    assert _names(record) == [f"{role} 1" for role in roles]
    steps = {
      m: [x["step"] for x in lines] for m, lines in record.metrics.items()
    }
    assert steps == {0: [1], 1: [2], 2: [3]}
    assert [problem.path.name for problem in record.problems] == [
      f"{role}-0001.jsonl" for role in roles
    ]
    assert len(record.sound) == 6
  files = [*tmp_path.glob("*/*.jsonl")]
  assert len(follower.position) == len(files) == 6
  assert follower.num_bytes == sum(file.stat().st_size for file in files)
  for n, role in enumerate(roles):
    _tape(tmp_path, role, 1, _event(f"{role} 2", n), b"bad\n")
  for one in (follower, reader.Follower(tmp_path, follower.position)):
    news = one.poll()
    assert _names(news) == [f"{role} 2" for role in roles] and not news.metrics
    assert [problem.count for problem in news.problems] == [2, 2, 2]
  together = [island for _, island in reader.together(reader.read(tmp_path))]
  assert sorted(m for m in together if m is not None) == [0, 1, 2]
  assert len(together) == 9


def test_follower_goes_on_after_a_torn_tail_was_cut(tmp_path):
  log = recorder.MetricLog(tmp_path, 0)
  log.record(step=1)
  log.close()
  with open(log.path, "ab") as file:
    file.write(b'{"step": 2, "lo')
  follower = reader.Follower(tmp_path)
  assert [s["step"] for s in follower.poll().metrics[0]] == [1]
  log = recorder.MetricLog(tmp_path, 0)
  log.record(step=2)
  log.close()
  assert [s["step"] for s in follower.poll().metrics[0]] == [2]


def test_stream_reads_the_same_lines_as_often_as_it_is_asked(tmp_path):
  _tape(tmp_path, "syncer", 1, _event("a", 1), b"bad\n", _event("c", 3))
  _tape(tmp_path, "island-0", 1, _event("b", 2))
  log = recorder.MetricLog(tmp_path, 0)
  log.record(step=1)
  record = reader.stream(tmp_path)
  _tape(tmp_path, "syncer", 1, _event("later", 4))
  log.record(step=2)
  log.close()
  for _ in range(2):
    assert _names(record) == ["a", "b", "c"]
    assert [line["step"] for line in record.metrics[0]] == [1]
    assert len(record.problems) == 1
    assert record.sound == {
      "tape/syncer-0001.jsonl": 2,
      "tape/island-0-0001.jsonl": 1,
      "metrics/island-0.jsonl": 1,
    }


def test_stream_of_one_role_opens_no_other_file(tmp_path):
  _tape(tmp_path, "controller", 1, _event("a", 1))
  _tape(tmp_path, "island-0", 1, b"bad\n")
  log = recorder.MetricLog(tmp_path, 0)
  log.record(step=1)
  log.close()
  record = reader.stream(tmp_path, only_role="controller")
  assert _names(record) == ["a"]
  assert not record.metrics and not record.problems


def test_follower_goes_on_from_where_another_was(tmp_path):
  _tape(tmp_path, "syncer", 1, _event("a", 1), _event("b", 2))
  first = reader.Follower(tmp_path)
  first.poll()
  _tape(tmp_path, "syncer", 1, _event("c", 3), b"bad\n")
  position = first.position
  _tape(tmp_path, "island-0", 1, _event("b", 2))
  before = reader.stream(tmp_path, until=position)
  assert _names(before) == ["a", "b"]  # and nothing of a file that came since
  second = reader.Follower(tmp_path, position)
  # Nothing is forgotten before it was looked at again.
  assert second.position == position
  assert second.num_bytes == first.num_bytes > 0
  record = second.poll()
  assert _names(record) == ["b", "c"]
  assert "line 4" in str(record.problems[0])
  assert record.sound == {
    "tape/island-0-0001.jsonl": 1,
    "tape/syncer-0001.jsonl": 3,
  }


def test_file_that_cannot_be_read_is_named_and_the_rest_read(tmp_path):
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  tape.record("a")
  tape.close()
  recorder.tape_path(tmp_path, "island-0", 1).mkdir()
  for record in (reader.read(tmp_path), reader.stream(tmp_path)):
    assert [line["event"] for line in record.events] == ["a"]
    (problem,) = record.problems
    assert "island-0-0001.jsonl: it cannot be read (Is a dir" in str(problem)
    assert list(record.sound) == ["tape/syncer-0001.jsonl"]
  with pytest.raises(errors.UserError, match="cannot be read"):
    reader.read(tmp_path, strict=True)
