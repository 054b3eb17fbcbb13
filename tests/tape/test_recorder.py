"""The recorder: whole lines whatever happens to the writer."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from diloco.tape import reader, recorder


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_line_carries_header_and_fields(tmp_path):
  tape = recorder.Recorder(tmp_path, "island-3", 2, clock=lambda: 5.5)
  tape.record("started", step=7, share=np.int64(1), path=tmp_path / "x")
  tape.close()
  assert tape.path == tmp_path / "tape" / "island-3-0002.jsonl"
  assert _lines(tape.path) == [
    {
      "event": "started",
      "role": "island-3",
      "incarnation": 2,
      "wall_secs": 5.5,
      "step": 7,
      "share": 1,
      "path": str(tmp_path / "x"),
    }
  ]


@pytest.mark.parametrize("name", ["role", "incarnation", "wall_secs", "event"])
def test_header_fields_are_refused(tmp_path, name):
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  with pytest.raises(ValueError, match=name):
    tape.record("merged", **{name: 1})
  tape.close()


def test_unknown_type_is_refused_and_leaves_no_line(tmp_path):
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  with pytest.raises(TypeError, match="object"):
    tape.record("merged", key=object())
  tape.close()
  assert tape.path.read_bytes() == b""


def test_metrics_go_on_in_one_file_with_wall_time(tmp_path):
  for step in (1, 2):
    log = recorder.MetricLog(tmp_path, 4, clock=lambda: 9.0)
    log.record(step=step, loss=np.float32(0.5))
    log.close()
  assert _lines(tmp_path / "metrics" / "island-4.jsonl") == [
    {"step": 1, "loss": 0.5, "wall_secs": 9.0},
    {"step": 2, "loss": 0.5, "wall_secs": 9.0},
  ]


def test_closed_twice_is_fine_and_recording_then_is_not(tmp_path):
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  tape.close()
  tape.close()
  with pytest.raises(ValueError, match="closed"):
    tape.record("merged")


def test_threads_never_mix_lines(tmp_path):
  tape = recorder.Recorder(tmp_path, "syncer", 1)

  def write(name):
    for number in range(200):
      tape.record("written", name=name, number=number, pad="x" * number)

  threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  tape.close()
  lines = _lines(tape.path)
  assert len(lines) == 1200
  for name in range(6):
    numbers = [line["number"] for line in lines if line["name"] == name]
    assert numbers == list(range(200))


@pytest.mark.parametrize("size", [1, 3, 1 << 16, (1 << 16) + 5, 3 << 16])
def test_torn_tail_is_cut_before_writing_on(tmp_path, size):
  path = recorder.metrics_path(tmp_path, 0)
  path.parent.mkdir()
  path.write_bytes(b'{"step":1}\n' + b"z" * size)
  log = recorder.MetricLog(tmp_path, 0, clock=lambda: 1.0)
  log.record(step=2)
  log.close()
  assert [line["step"] for line in _lines(path)] == [1, 2]


def test_file_with_nothing_but_a_torn_line_is_emptied(tmp_path):
  path = recorder.metrics_path(tmp_path, 0)
  path.parent.mkdir()
  path.write_bytes(b"x" * 200_000)
  recorder.MetricLog(tmp_path, 0).close()
  assert path.read_bytes() == b""


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_delays_lines_and_loses_none(tmp_path, monkeypatch, why):
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  room = 10

  def write(fd, data):
    nonlocal room
    if not room:
      raise OSError(why, "no room")
    taken, room = data[:room], room - len(data[:room])
    return real_write(fd, taken)

  real_write = os.write
  monkeypatch.setattr(os, "write", write)
  for number in range(3):
    tape.record("merged", number=number)
  assert len(tape.path.read_bytes()) == 10
  room = 10_000
  tape.record("merged", number=3)
  tape.close()
  assert [line["number"] for line in _lines(tape.path)] == [0, 1, 2, 3]


def _no_room(*args, **kwargs):
  raise OSError(errno.ENOSPC, "no room")


@pytest.mark.parametrize("refused", ["os.open", "os.mkdir", "os.write"])
def test_tape_of_a_role_born_on_a_full_disk_waits_for_room(
  tmp_path, monkeypatch, caplog, refused
):
  with monkeypatch.context() as patch:
    patch.setattr(refused, _no_room)
    tape = recorder.Recorder(tmp_path, "syncer", 1)
    for number in range(2):
      tape.record("merged", number=number)
    with pytest.raises(OSError, match="no room for lines"):
      tape.flush()
  tape.record("merged", number=2)
  tape.flush()
  assert [line["number"] for line in _lines(tape.path)] == [0, 1, 2]
  tape.close()
  assert caplog.text.count("disk_full") == 1


def test_tape_that_never_found_room_says_what_is_lost(
  tmp_path, monkeypatch, caplog
):
  with monkeypatch.context() as patch:
    patch.setattr(os, "open", _no_room)
    tape = recorder.Recorder(tmp_path, "syncer", 1)
    tape.record("merged")
    tape.close()
  tape.close()
  assert "lines_lost" in caplog.text
  with pytest.raises(ValueError, match="closed"):
    tape.record("merged")


def test_flush_says_whether_the_kernel_has_every_line(tmp_path, monkeypatch):
  told = []  # to the run, which takes what is in the file
  tape = recorder.Recorder(
    tmp_path, "syncer", 1, recorded=lambda: told.append(len(_lines(tape.path)))
  )
  tape.record("merged", number=0)
  tape.flush()

  def write(fd, data):
    raise OSError(errno.ENOSPC, "no room")

  with monkeypatch.context() as patch:
    patch.setattr(os, "write", write)
    tape.record("merged", number=1)
    with pytest.raises(OSError, match="no room for lines"):
      tape.flush()
  tape.flush()
  assert [line["number"] for line in _lines(tape.path)] == [0, 1]
  assert told == [1, 2]
  tape.close()


def test_line_that_waits_is_written_at_the_end_if_there_is_room(
  tmp_path, monkeypatch, caplog
):
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  with monkeypatch.context() as patch:
    patch.setattr(os, "write", _no_room)
    for number in range(2):
      tape.record("merged", number=number)
  tape.close()
  assert [line["number"] for line in _lines(tape.path)] == [0, 1]
  assert "lines_lost" not in caplog.text


def test_other_write_errors_are_raised(tmp_path, monkeypatch):
  tape = recorder.Recorder(tmp_path, "syncer", 1)

  def write(fd, data):
    raise OSError(errno.EIO, "broken disk")

  with monkeypatch.context() as patch, pytest.raises(OSError, match="broken"):
    patch.setattr(os, "write", write)
    tape.record("merged")
  tape.close()


def test_so_much_may_wait_for_room_on_a_disk_and_no_more(tmp_path, monkeypatch):
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  with monkeypatch.context() as patch:
    patch.setattr(recorder, "_MAX_WAITING_BYTES", 1000)
    patch.setattr(os, "write", _no_room)
    tape.record("merged", number=0)
    with pytest.raises(OSError, match="no room"):
      tape.record("merged", text="x" * 1000)
  tape.close()


_ENDLESS_WRITER = """
import sys
from diloco.tape import recorder
tape = recorder.Recorder(sys.argv[1], "syncer", 1)
number = 0
while True:
  tape.record("written", number=number)
  number += 1
"""


def test_killed_writer_leaves_whole_lines_in_order(tmp_path):
  child = subprocess.Popen(
    [sys.executable, "-c", _ENDLESS_WRITER, str(tmp_path)]
  )
  path = recorder.tape_path(tmp_path, "syncer", 1)
  deadline = time.monotonic() + 30
  while not (path.exists() and path.stat().st_size > 50_000):
    assert time.monotonic() < deadline and child.poll() is None
    time.sleep(0.01)
  child.send_signal(signal.SIGKILL)
  child.wait()
  record = reader.read(tmp_path, strict=True)
  numbers = [line["number"] for line in record.events]
  assert numbers == list(range(len(numbers))) and numbers
