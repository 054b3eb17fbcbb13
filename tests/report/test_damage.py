from diloco.report import dashboard, view
from diloco.report import status as status_lib
from diloco.tape import reader


def line(event, **fields):
  return {"event": event, "role": "syncer", "wall_secs": 1.0, **fields}


DAMAGED = line("global_damaged", fragment=2, version=7, reason="torn")


def state(*lines):
  shown = view.RunView()
  shown.update(reader.Record(list(lines), {}, []))
  return status_lib.status_of(shown, alive=True, now=2.0)


def test_status_says_which_fragment_stands_still():
  status = state(DAMAGED)
  (told,) = status["damaged"]
  assert told == "fragment 2 stands still: its version 7 cannot be read (torn)"
  assert told in status["problems"]
  shown = dashboard._damage(status)
  assert shown[0].plain.strip() == told
  assert "resume" in shown[1].plain


def test_damage_is_over_with_the_next_version_or_a_restore():
  merged = line("merged", fragment=2, version=8, contributions=[])
  other = line("merged", fragment=1, version=8, contributions=[])
  assert state(DAMAGED, other)["damaged"]
  assert state(DAMAGED, merged)["damaged"] == []
  assert state(DAMAGED, line("restored"))["damaged"] == []
  assert state(DAMAGED, line("restored"))["problems"]


def test_status_names_the_last_complete_cut():
  assert state()["last_cut"] is None
  cuts = [line("cut_completed", cut=n) for n in (3, 4)]
  assert state(*cuts, line("cut_abandoned", cut=5))["last_cut"] == 4
