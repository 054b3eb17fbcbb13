"""The record of a month: memory does not grow with it, status reads its end."""

import json
import re
import threading
import tracemalloc

import month
import pytest
import tracing

from diloco import run as run_lib
from diloco.report import charts, html, live, series, status, summary, totals
from diloco.report import view as view_lib
from diloco.tape import folding, history, schema


@pytest.fixture
def small(monkeypatch):
  """Bounds so small that a short record reaches them."""
  monkeypatch.setattr(series, "LIMIT", 64)
  monkeypatch.setattr(folding, "LIMIT", 32)
  monkeypatch.setattr(history, "_KNOWN_VERSIONS", 16)
  monkeypatch.setattr(totals, "_EVERY_BYTES", 1 << 16)
  monkeypatch.setattr(totals, "_TIMES", 0)


@pytest.fixture
def parsed(monkeypatch):
  """Counts the lines that were read."""
  lines = []
  for name in ("fault_of_event", "fault_of_metric"):
    real = getattr(schema, name)

    def count(line, *rest, real=real, **more):
      lines.append(1)
      return real(line, *rest, **more)

    monkeypatch.setattr(schema, name, count)
  return lines


def _peak(work):
  """Returns the most memory that was in use, and the result."""
  with tracing.traced():
    result = work()
    return tracemalloc.get_traced_memory()[1], result


def _grow(run_dir, steps, islands):
  """Peaks of status and summary before and after a run grows fivefold."""
  run = month.Month(run_dir, islands=islands)
  run.write(steps)
  peaks = []
  for _ in range(2):
    # Totals of nothing: the whole record is read.
    (run_dir / "tape" / totals.FILE_NAME).unlink(missing_ok=True)
    first, _ = _peak(lambda: status.status(run_dir))
    (run_dir / "tape" / totals.FILE_NAME).unlink(missing_ok=True)
    second, loaded = _peak(lambda: summary.load(run_dir))
    assert loaded.ledger.balanced, loaded.ledger.violations
    peaks.append((first, second))
    run.write(4 * steps)
  run.close()
  return peaks


def test_memory_does_not_grow_with_the_record(small, tmp_path):
  summary.load(tmp_path)  # what is imported late
  (status_before, before), (status_after, after) = _grow(tmp_path, 150, 2)
  # Five times the lines; what is kept is at its bounds, give or take a half.
  assert status_after < 1.6 * status_before
  assert after < 1.6 * before


@pytest.mark.campaign
def test_memory_does_not_grow_with_a_record_of_gigabytes(tmp_path):
  _, (status_peak, peak) = _grow(tmp_path, 40_000, 8)
  size = sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl"))
  assert size > 2e9
  assert status_peak < 120e6
  assert peak < 120e6


def test_status_reads_no_more_than_the_end(small, tmp_path, parsed):
  run = month.Month(tmp_path, islands=2)
  run.write(400)
  whole = status.status(tmp_path)
  everything = len(parsed)
  parsed.clear()
  again = status.status(tmp_path)
  assert not parsed
  assert _timeless(again) == _timeless(whole)
  run.write(2)
  run.close()
  assert status.status(tmp_path)["islands"]["0"]["step"] == 402
  assert 0 < len(parsed) < everything / 50


def test_totals_lead_to_what_the_whole_record_does(small, tmp_path):
  run = month.Month(tmp_path, islands=3)
  run.write(150, deaths_every=60)
  status.status(tmp_path)
  run.write(150, deaths_every=60)
  run.close()
  kept = tmp_path / "tape" / totals.FILE_NAME
  assert kept.exists()
  with_totals = summary.summarise(tmp_path)
  kept.unlink()
  assert summary.summarise(tmp_path) == with_totals


def test_totals_that_are_damaged_or_of_other_files_are_made_again(
  small, tmp_path, parsed
):
  run = month.Month(tmp_path, islands=2)
  run.write(200)
  run.close()
  good = _timeless(status.status(tmp_path))
  everything = len(parsed)
  kept = tmp_path / "tape" / totals.FILE_NAME
  text = kept.read_text()
  damage = [
    "",
    text[:-100],
    text.replace('"code": ', '"code": 1'),  # another version's
    text.replace("RunView", "RunViex"),
    json.dumps({"code": totals._CODE, "crc32": 3, "body": "{}"}),
  ]
  for content in damage:
    kept.write_text(content)
    parsed.clear()
    assert _timeless(status.status(tmp_path)) == good
    assert len(parsed) == everything
  tape = tmp_path / "tape" / "syncer-0001.jsonl"
  lines = tape.read_text().splitlines(keepends=True)
  tape.write_text("".join(lines[: len(lines) // 2]))
  assert status.status(tmp_path)["merges"] == len(lines) // 2
  tape.unlink()
  assert status.status(tmp_path)["merges"] == 0


def test_look_that_was_cut_short_is_not_kept(small, tmp_path, monkeypatch):
  run = month.Month(tmp_path, islands=2)
  run.write(200)
  run.close()
  reading = totals.begin(tmp_path)

  def interrupted(self, record, past=None):
    next(iter(record.events))
    raise KeyboardInterrupt

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(view_lib.RunView, "update", interrupted)
    reading.read_on()
  reading.read_on()  # as who closes the view does
  totals.keep(reading)
  assert not (tmp_path / "tape" / totals.FILE_NAME).exists()
  anew = totals.catch_up(tmp_path, reading)
  assert anew is not reading and not anew.torn
  assert (tmp_path / "tape" / totals.FILE_NAME).exists()


def test_view_waits_for_no_totals_and_takes_nothing_in_meanwhile(
  small, tmp_path, monkeypatch
):
  monkeypatch.setattr(live, "_DRAW_SECS", 0.0)
  run = month.Month(tmp_path, islands=2)
  run.write(200)
  view = live.LiveView(tmp_path, quiet=True)
  keep, may_go_on, beside = totals.keep, threading.Event(), []

  def slow(*of):
    beside.append(threading.current_thread() is not threading.main_thread())
    if beside[-1]:
      may_go_on.wait()
    keep(*of)

  monkeypatch.setattr(totals, "keep", slow)
  view.tick()
  run.write(50)
  run.close()
  view.tick()
  assert beside == [True] and view.shown.merges.count == 200
  may_go_on.set()
  view.close()
  assert view.shown.merges.count == 250
  assert totals.begin(tmp_path).follower.num_bytes > 0


def test_totals_that_cannot_be_kept_are_said_to_be_so(
  small, tmp_path, monkeypatch, caplog
):
  def fail(*_):
    raise ValueError("a tape became shorter")

  monkeypatch.setattr(totals, "keep", fail)
  run = month.Month(tmp_path, islands=2)
  run.write(200)
  run.close()
  view = live.LiveView(tmp_path, quiet=True)
  view.tick()
  view.close()
  assert "totals_not_kept" in caplog.text and "became shorter" in caplog.text
  assert view.shown.merges.count == 200


def test_totals_are_kept_less_often_the_larger_they_are(
  small, tmp_path, monkeypatch
):
  run = month.Month(tmp_path, islands=2)
  run.write(200)
  kept = tmp_path / "tape" / totals.FILE_NAME
  totals.catch_up(tmp_path)
  monkeypatch.setattr(totals, "_TIMES", 8)
  reading = totals.begin(tmp_path)
  first, size = reading.follower.num_bytes, kept.stat().st_size
  before = kept.read_bytes()
  while reading.follower.num_bytes < first + 7 * size:
    assert totals.catch_up(tmp_path, reading) is reading
    assert kept.read_bytes() == before
    run.write(50)
  while reading.follower.num_bytes < first + 9 * size:
    run.write(50)
    totals.catch_up(tmp_path, reading)
  run.close()
  assert kept.read_bytes() != before


def test_what_a_killed_process_was_writing_is_gone_after_the_next(
  small, tmp_path, monkeypatch
):
  run = month.Month(tmp_path, islands=2)
  run.write(200)
  run.close()

  def killed(self, target):
    raise KeyboardInterrupt

  for number in (1, 2):  # two processes
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
      patch.setattr("pathlib.Path.replace", killed)
      patch.setattr("os.getpid", lambda number=number: number)
      totals.catch_up(tmp_path)
  assert list(tmp_path.glob("tape/*.tmp"))
  totals.catch_up(tmp_path)
  assert not list(tmp_path.glob("tape/*.tmp"))


def test_tape_that_is_put_right_is_read_again(small, tmp_path):
  run = month.Month(tmp_path, islands=2)
  run.write(200)
  run.close()
  tape = tmp_path / "tape" / "syncer-0001.jsonl"
  sound = tape.read_bytes()
  middle = len(sound) // 2
  tape.write_bytes(sound[:middle] + b"\0\0\0" + sound[middle + 3 :])
  spoiled = _timeless(status.status(tmp_path))
  tape.write_bytes(sound)
  found = _timeless(status.status(tmp_path))
  (tmp_path / "tape" / totals.FILE_NAME).unlink(missing_ok=True)
  assert found == _timeless(status.status(tmp_path)) != spoiled


def test_report_of_a_long_run_is_drawn_from_bounded_series(
  small, tmp_path, monkeypatch
):
  monkeypatch.setattr(charts, "_POINTS", 64)
  run = month.Month(tmp_path, islands=2)
  run.write(500, deaths_every=200)
  run.close()
  loaded = summary.load(tmp_path)
  steps = loaded.view.islands[0].steps
  assert len(steps) < 64 and steps.stride >= 8
  assert steps.column("count").sum() == loaded.view.islands[0].num_steps
  assert steps.column("tokens").sum() == loaded.view.islands[0].tokens
  page = html.write_report(tmp_path).read_text()
  assert "What happened" in page
  drawn = re.findall(r"application/json.>(.*?)</script>", page)
  assert len(drawn) == 8
  for text in drawn:
    for line in json.loads(text)["lines"]:
      assert len(line["x"]) <= charts._MOST_BINS + 1


def _timeless(facts):
  """Facts of status that do not depend on when it was asked."""
  return {k: v for k, v in facts.items() if k != "last_cut_age_secs"}


def test_a_long_record_is_told_of_before_it_is_read(
  tmp_path, monkeypatch, caplog
):
  run = month.Month(tmp_path, islands=2)
  run.write(20)
  run.close()
  run_lib._conclude(tmp_path)
  assert not caplog.messages
  monkeypatch.setattr(run_lib, "_LONG_RECORD_BYTES", 1000)
  facts, report = run_lib._conclude(tmp_path)
  assert f"leaves them to 'diloco report {tmp_path}'" in caplog.text
  assert facts["merges"]["count"] == 20 and report.exists()


def test_end_of_a_session_reads_no_more_than_what_is_new(
  small, tmp_path, parsed, caplog, monkeypatch
):
  monkeypatch.setattr(run_lib, "_LONG_RECORD_BYTES", 20_000)
  run = month.Month(tmp_path, islands=2)
  view = live.LiveView(tmp_path, quiet=True)
  for _ in range(8):  # the controller follows
    run.write(100, deaths_every=60)
    view.close()
  everything = len(parsed)
  parsed.clear()
  run.write(1)
  run.close()
  facts, _ = run_lib._conclude(tmp_path)
  assert not caplog.messages
  assert len(parsed) < everything / 10
  assert facts["ledger"]["balanced"] and facts["ledger"]["merged"] > 100_000
  (tmp_path / "tape" / totals.FILE_NAME).unlink()
  assert summary.summarise(tmp_path) == facts
  # A tape that is not the one that was read: all is read again.
  summary.load(tmp_path)
  (tmp_path / "tape" / "syncer-0001.jsonl").write_text("")
  assert not summary.summarise(tmp_path)["ledger"]["merged"]


def test_ledger_of_a_run_that_went_back_far_is_that_of_a_whole_reading(
  small, tmp_path, parsed
):
  run = month.Month(tmp_path, islands=2)
  run.write(300)
  summary.load(tmp_path)
  run.control.tell(
    "restored",
    month.EPOCH + 400,
    cut=1,
    version_from=[9] * 4,
    version_to=[99] * 4,
  )
  for island in run.islands:
    island.tape.close()
    island.step, island.first = 36, [36] * 4
    island.start(month.EPOCH + 400)
  run.versions = [99] * 4
  run.write(300)
  run.close()
  parsed.clear()
  facts = summary.summarise(tmp_path)
  assert len(parsed) > 3000  # of the past, too
  assert facts["ledger"]["balanced"], facts["violations"]
  assert facts["tokens_discarded"]["rolled_back"] > 0
  parsed.clear()
  assert summary.summarise(tmp_path) == facts
  assert len(parsed) < 100  # it was kept
  (tmp_path / "tape" / totals.FILE_NAME).unlink()
  assert summary.summarise(tmp_path) == facts
