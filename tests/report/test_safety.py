"""What a run did to stay safe: shown by status, live view and summary."""

import io

from rich import console

from diloco.report import dashboard, live, narrative, view
from diloco.report import status as status_lib
from diloco.tape import reader


def line(event, role="syncer", wall_secs=1.0, **fields):
  return {
    "event": event,
    "role": role,
    "incarnation": 1,
    "wall_secs": wall_secs,
    **fields,
  }


STARTED = line("started", "island-1", step=0, tokens_per_step=8)
TOLD = line(
  "quarantined",
  island=1,
  island_incarnation=1,
  reason="not_finite",
  offences=3,
  suspended_secs=10.0,
)
RESTORED = line("restored", "controller", cut=4, epoch=2, why="--cut=4")


def shown(*lines):
  made = view.RunView()
  made.update(reader.Record(list(lines), {}, []))
  return made


def state(*lines, now=5.0):
  return status_lib.status_of(shown(*lines), alive=True, now=now)


def text_of(status):
  screen = console.Console(file=io.StringIO(), width=200)
  screen.print(dashboard.render(status, "run"))
  return screen.file.getvalue()


def test_suspension_is_shown_while_it_lasts():
  status = state(STARTED, TOLD)
  island = status["islands"]["1"]
  assert (island["quarantines"], island["suspended_secs"]) == (1, 6.0)
  assert "island 1: quarantined 1 time, refused unseen" in text_of(status)
  later = state(STARTED, TOLD, now=12.0)
  assert later["islands"]["1"]["suspended_secs"] == 0.0
  assert "refused unseen" not in text_of(later)


def test_suspension_ends_with_the_life_it_was_told_to():
  again = STARTED | {"incarnation": 2}
  status = state(STARTED, TOLD, again)
  assert status["islands"]["1"]["suspended_secs"] == 0.0


def test_run_that_has_ended_refuses_nobody():
  begun = line("run_started", "controller", wall_secs=0.0)
  ended = line("run_finished", "controller", status="failed")
  status = state(begun, STARTED, TOLD, ended)
  assert status["islands"]["1"]["suspended_secs"] == 0.0
  assert "refused unseen" not in text_of(status)


def test_takeovers_roll_backs_and_the_age_of_the_last_cut_are_told():
  leads = [line("lease_acquired", token=n) for n in (1, 2)]
  cut = line("cut_completed", "controller", wall_secs=3.0, cut=4)
  # A restore that was finished by a second attempt is one; so is a cut that a
  # controller tells late, which stood still while another went on.
  late = [line("cut_completed", "controller", cut=n) for n in (4, 3)]
  status = state(STARTED, *leads, cut, *late, RESTORED, RESTORED)
  assert status["takeovers"] == status["rollbacks"] == 1
  assert status["last_cut_age_secs"] == 2.0
  text = text_of(status)
  assert "1 takeover " in text and "1 rollback " in text
  assert "cut 4, 2 s ago" in text
  quiet = text_of(state(STARTED))
  assert "takeovers" not in quiet and "cut" not in quiet


def test_steps_done_anew_after_a_return_bring_the_end_no_nearer():
  begun = line("run_started", "controller", total_tokens=1_000)
  steps = [*range(1, 101), *range(41, 51)]  # the cut was taken at step 40
  log = [
    {"step": s, "tokens": 8, "wall_secs": 0.1 * i, "incarnation": 1 + i // 100}
    for i, s in enumerate(steps)
  ]
  made = view.RunView()
  again = STARTED | {"incarnation": 2, "step": 40}
  tape = [begun, STARTED, RESTORED, again]
  made.update(reader.Record(tape, {1: log}, []))
  status = status_lib.status_of(made, alive=True, now=11.0)
  assert (status["tokens"], status["progress"]) == (880, 0.4)
  assert status["secs_left"] == 600 / status["tokens_per_sec"]
  assert "40.0 %  400 of 1 k tokens" in text_of(status)


def test_broken_lines_of_the_tape_are_shown():
  status = state(STARTED) | {"problems": ["tape/a, line 3: torn"]}
  assert "tape/a, line 3: torn" in text_of(status)


def test_story_tells_of_refusals_cuts_and_roll_backs():
  cut = line("cut_completed", "controller", cut=4)
  resynced = line("resynced", "island-1", step=3, fragments=[])
  told = " ".join(
    narrative._safety(shown(STARTED, TOLD, resynced, cut, cut, RESTORED))
  )
  assert "islands 1 quarantined, 1 time in all" in told
  assert "1 consistent cut taken" in told
  assert "set back to cut 4: --cut=4" in told
  assert narrative._safety(shown(STARTED)) == []


def test_live_view_tells_of_them_as_they_happen(tmp_path):
  stream = io.StringIO()
  shows = live.LiveView(tmp_path, stream)
  shows._print_events(reader.Record([TOLD, RESTORED], {}, []))
  text = stream.getvalue()
  assert "quarantined island=1 reason=not_finite" in text
  assert "restored cut=4" in text
