"""What a replay does in which order."""

import pytest
from run_tape import A, B, RunTape, two_islands

from diloco import errors
from diloco.replay import order, script

V = script.VersionId
A1, B1 = script.LifeId(*A), script.LifeId(*B)


def tasks(planned):
  return planned.tasks


def told(planned):
  words = []
  for task, _ in tasks(planned):
    match task:
      case order.Begin(life):
        words.append(f"begin {life.island}")
      case order.Advance(life, operations, _):
        words.append(f"island {life.island} to {operations[-1].step}")
      case order.Make(making):
        words.append(f"make {making.id.version}")
  return words


def test_lives_go_on_until_they_need_a_version_that_is_not_there():
  assert told(two_islands().plan()) == [
    "make 0",
    "begin 0",
    "island 0 to 8",
    "begin 1",
    "island 1 to 4",
    "make 1",
    "island 0 to 16",
    "make 2",
  ]


def test_last_part_of_a_life_is_marked():
  last = {
    task.life: task.last
    for task, _ in tasks(two_islands().plan())
    if isinstance(task, order.Advance)
  }
  assert last == {A1: True, B1: True}


def test_what_nobody_needs_any_more_is_forgotten():
  freed = [free for _, free in tasks(two_islands().plan())]
  made = [name for free in freed for name in free]
  # The newest version stays.
  assert V(0, 0) in made and V(0, 1) in made and V(0, 2) not in made
  assert sum(isinstance(name, str) for name in made) == 3
  assert freed[0] == ()


def test_restored_life_waits_for_the_state_it_takes():
  tape = two_islands()
  tape.save(A, 20, serial=1)
  state = {"incarnation": 1, "serial": 1, "step": 20}
  tape.start((2, 1), 20, [2], checkpoint=state | {"island": 0})
  key = tape.submit((2, 1), 24, base=2, first=20)
  tape.merge(3, (key, 1.0))
  words = told(tape.plan())
  assert words.index("begin 2") > words.index("island 0 to 20")


def test_tape_that_contradicts_itself_is_refused():
  tape = RunTape()
  tape.start(A)
  tape.adopt(A, 3, 1)  # before anybody made it
  key = tape.submit(A, 8, base=1, first=3)
  tape.merge(1, (key, 1.0))
  with pytest.raises(errors.UserError, match="waits for Adopt"):
    tasks(tape.plan())


def test_order_does_not_depend_on_how_roles_are_interleaved():
  tape = two_islands()
  expected = told(tape.plan())
  tape.lines.sort(key=lambda line: line["role"])
  assert told(tape.plan()) == expected
