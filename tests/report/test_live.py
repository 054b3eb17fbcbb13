"""Live view, status and liveness."""

import io
import json
import os
import subprocess
import sys

import pytest
import run_builder

from diloco import errors, process
from diloco.report import dashboard, figures, live, liveness, totals
from diloco.report import status as status_lib
from diloco.tape import events, recorder


class Terminal(io.StringIO):
  """A stream that says it is a terminal."""

  def isatty(self):
    return True


def _announce(run_dir, pid, ticks):
  (run_dir / "control").mkdir(exist_ok=True)
  content = {
    "pid": pid,
    "started_ticks": ticks,
    "directory": process.directory_id(run_dir),
  }
  (run_dir / "control" / "controller.json").write_text(json.dumps(content))


def test_own_process_is_alive_and_a_recycled_id_is_not(tmp_path):
  assert not liveness.controller_alive(tmp_path)
  ticks = liveness.start_ticks(os.getpid())
  assert ticks is not None and ticks > 0
  _announce(tmp_path, os.getpid(), ticks)
  assert liveness.controller_alive(tmp_path)
  _announce(tmp_path, os.getpid(), ticks - 1)
  assert not liveness.controller_alive(tmp_path)
  path = tmp_path / "control" / "controller.json"
  path.write_text("{torn")
  assert not liveness.controller_alive(tmp_path)


def test_zombie_and_missing_process_are_dead():
  child = subprocess.Popen([sys.executable, "-c", ""])
  os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
  assert liveness.start_ticks(child.pid) is None  # not yet waited for
  child.wait()
  assert liveness.start_ticks(child.pid) is None


def test_status_of_a_dead_run_is_json_and_says_crashed(tmp_path):
  plan = run_builder.Plan(finish=False, secs=6.0)
  facts = status_lib.status(run_builder.simulate(tmp_path, plan))
  json.dumps(facts, allow_nan=False)
  assert facts["status"] == "crashed" and not facts["alive"]
  assert facts["tokens"] > 0 and facts["merges"] > 0
  assert 0 < facts["progress"] < 1
  assert facts["islands"]["0"]["step"] > 0


def test_island_that_outlives_its_controller_is_not_called_dead(tmp_path):
  plan = run_builder.Plan(finish=False, secs=6.0)
  view = totals.catch_up(run_builder.simulate(tmp_path, plan)).view
  end = view.last_wall_secs
  soon = status_lib.status_of(view, alive=False, now=end + 1)
  later = status_lib.status_of(view, alive=False, now=end + 60)
  assert soon["islands"]["0"]["state"] == "training"
  assert later["islands"]["0"]["state"] == "dead"


def test_status_of_a_live_run(tmp_path):
  plan = run_builder.Plan(finish=False, secs=6.0)
  run_dir = run_builder.simulate(tmp_path, plan)
  _announce(run_dir, os.getpid(), liveness.start_ticks(os.getpid()))
  facts = status_lib.status(run_dir)
  assert facts["alive"] and facts["status"] == "running"
  assert facts["islands"]["1"]["state"] == "training"


def test_clock_moves_between_two_lines_and_time_left_is_told(tmp_path):
  plan = run_builder.Plan(finish=False, secs=6.0)
  view = totals.catch_up(run_builder.simulate(tmp_path, plan)).view
  end = view.last_wall_secs
  soon, later = (
    status_lib.status_of(view, alive=True, now=end + secs) for secs in (1, 3)
  )
  assert later["wall_secs"] == pytest.approx(soon["wall_secs"] + 2)
  missing = soon["tokens_budget"] - soon["tokens"]
  assert soon["secs_left"] == missing / soon["tokens_per_sec"]
  assert "s left" in dashboard.describe(soon)
  assert "left" not in dashboard.describe(soon | {"secs_left": 0.0})
  one = dashboard.describe(soon | {"faults": 1, "deaths": 2, "merges": 1_200})
  assert (
    "1,200 merges" in one and " 1 fault " in f"{one} " and "2 deaths" in one
  )
  dead = status_lib.status_of(view, alive=False, now=end + 1)
  assert (dead["wall_secs"], dead["secs_left"]) == (view.wall_secs, None)


def test_time_of_a_run_in_virtual_time_is_that_of_its_tape(tmp_path):
  plan = run_builder.Plan(finish=False, secs=6.0)
  run_dir = run_builder.simulate(tmp_path, plan)
  (run_dir / "config.json").write_text('{"engine": "virtual"}')
  _announce(run_dir, os.getpid(), liveness.start_ticks(os.getpid()))
  facts = status_lib.status(run_dir)
  assert facts["status"] == "running"
  assert 5 < facts["wall_secs"] < 10
  assert facts["tokens_per_sec"] > 0 and facts["bytes_per_sec"] > 0


@pytest.mark.parametrize("terminal", [True, False])
def test_before_the_first_step_islands_are_compiling(tmp_path, terminal):
  stream = Terminal() if terminal else io.StringIO()
  view = live.LiveView(tmp_path, stream, hint="Ctrl-C saves")
  run_builder.simulate(tmp_path, run_builder.Plan(finish=False, secs=0.9))
  view.tick()
  view.close()
  shown = stream.getvalue()
  assert "compiling" in shown and "starting" not in shown
  assert ("Ctrl-C saves" in shown) == terminal
  again = live.LiveView(tmp_path, stream, hint="Ctrl-C leaves")
  again.close(alive=False)
  assert "Ctrl-C leaves" not in stream.getvalue()  # there is nothing to end


def test_cursor_is_hidden_by_who_is_sure_to_show_it_again(tmp_path):
  """Whoever makes a view may be interrupted before the first tick."""
  stream = Terminal()
  view = live.LiveView(tmp_path, stream)
  assert stream.getvalue() == ""
  view.tick()
  assert "\x1b[?25l" in stream.getvalue()
  view.close()
  assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_status_of_an_empty_and_of_a_missing_directory(tmp_path):
  facts = status_lib.status(tmp_path)
  assert facts["status"] == "empty" and facts["islands"] == {}
  with pytest.raises(errors.UserError):
    status_lib.status(tmp_path / "nowhere")


def test_rendered_status_names_islands_and_emulation(tmp_path, capsys):
  islands = (run_builder.Island(0.2, "v5p", 0.5, True), run_builder.Island())
  plan = run_builder.Plan(islands=islands, secs=5.0)
  live.render_status(run_builder.simulate(tmp_path, plan))
  shown = capsys.readouterr().out
  for text in ("v5p", "emulated", "done", "merges", "global eval"):
    assert text in shown


def test_lines_that_are_piped_are_whole(tmp_path, capsys, monkeypatch):
  plan = run_builder.Plan(islands=3 * (run_builder.Island(),), secs=5.0)
  run_dir = run_builder.simulate(tmp_path, plan)
  for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("COLUMNS", "40")
  live.render_status(run_dir)
  shown = capsys.readouterr().out
  assert "restarts" in shown and "\N{HORIZONTAL ELLIPSIS}" not in shown
  assert dashboard.describe(status_lib.status(run_dir)) in shown


def test_plain_view_tells_news_and_lines(tmp_path):
  stream = io.StringIO()
  view = live.LiveView(tmp_path, stream)
  run_builder.simulate(tmp_path, run_builder.Plan(faults=((1, 5.0),)))
  view.tick()
  view.close()
  shown = stream.getvalue()
  assert "fault_injected kind=sigkill target=island-1 at_tokens=" in shown
  assert "island_died island=1 cause=signal SIGKILL" in shown
  assert "island_restart island=1" in shown
  assert "evaluated target=global bits_per_token=" in shown
  assert "loss" not in shown  # one unit: bits
  assert "run_finished status=finished" in shown
  assert shown.count("islands training") == 1  # not repeated unchanged
  assert "\x1b" not in shown


def test_plain_view_does_not_repeat_earlier_sessions(tmp_path):
  run_builder.simulate(tmp_path, run_builder.Plan(faults=((1, 5.0),)))
  stream = io.StringIO()
  view = live.LiveView(tmp_path, stream)
  tape = recorder.Recorder(tmp_path, "controller", 2)
  tape.record(events.ISLAND_DIED, island=0, island_incarnation=1, cause="new")
  tape.close()
  view.tick()
  view.close()
  assert stream.getvalue().count("island_died") == 1
  assert "cause=new" in stream.getvalue()


def test_tick_before_anything_is_there(tmp_path):
  stream = io.StringIO()
  view = live.LiveView(tmp_path / "later", stream)
  view.tick()
  view.close()
  assert "0 tokens" in stream.getvalue()


def test_terminal_view_draws_a_table(tmp_path):
  stream = Terminal()
  view = live.LiveView(tmp_path, stream)
  run_builder.simulate(tmp_path, run_builder.Plan(secs=4.0))
  view.tick()
  view.close()
  assert "island" in stream.getvalue() and "restarts" in stream.getvalue()


@pytest.mark.parametrize(
  ("cost_secs", "pause_secs"), [(0.001, 0.5), (0.005, 2.0), (1.0, 5.0)]
)
def test_view_that_is_dear_to_draw_is_drawn_less_often(
  tmp_path, monkeypatch, cost_secs, pause_secs
):
  view = live.LiveView(tmp_path, io.StringIO(), quiet=True)
  now, spent, drawn = [100.0], [0.0], []

  def draw(at, alive):
    drawn.append(at)
    spent[0] += cost_secs

  monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(live.time, "thread_time", lambda: spent[0])
  monkeypatch.setattr(view, "_show", draw)
  for after in (0.0, 0.99 * pause_secs, 1.01 * pause_secs):
    now[0] = 100.0 + after
    view.tick()
  assert drawn == [100.0, 100.0 + 1.01 * pause_secs]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
  "error", [OSError(24, "Too many open files"), KeyError("what nobody foresaw")]
)
def test_view_that_cannot_be_shown_ends_no_run(
  tmp_path, monkeypatch, caplog, terminal, error
):
  monkeypatch.setattr(live, "_DRAW_SECS", 0.0)
  stream = Terminal() if terminal else io.StringIO()
  view = live.LiveView(tmp_path, stream)
  run_builder.simulate(tmp_path, run_builder.Plan(secs=4.0))

  def fail():
    raise error

  with monkeypatch.context() as patched:
    patched.setattr(view._reading.follower, "poll", fail)
    view.tick()
    view.tick()
    view.close()
  assert [r.message.split()[0] for r in caplog.records] == ["not_shown"]


def test_watch_ends_with_the_run(tmp_path, capsys):
  run_builder.simulate(tmp_path, run_builder.Plan(secs=4.0))
  live.watch(tmp_path)
  assert "finished" in capsys.readouterr().err
  with pytest.raises(errors.UserError):
    live.watch(tmp_path / "nowhere")


@pytest.mark.parametrize(
  "shown, expected",
  [
    (figures.count(0), "0"),
    (figures.count(999), "999"),
    (figures.count(999_999), "1 M"),
    (figures.count(1_234_567), "1.23 M"),
    (figures.num_bytes(1500), "1.5 kB"),
    (figures.secs(0.0123), "12.3 ms"),
    (figures.secs(59.96), "60 s"),
    (figures.secs(3600), "60 min 00 s"),
    (figures.secs(86400), "24 h 00 min"),
    (figures.percent(0.12345), "12.3 %"),
    (figures.percent(None), figures.DASH),
    (figures.number(float("nan")), figures.DASH),
    (figures.times(1.5), "1.5\N{MULTIPLICATION SIGN}"),
    (figures.number(12345.6), "12,346"),
    (figures.number(999.6), "1,000"),
    (figures.number(-999.4), "-999"),
  ],
)
def test_figures_are_written_for_people(shown, expected):
  assert shown == expected
