"""Times and lines of steps, on a clock of their own."""

import types

import pytest

from diloco.islands import step_log


class Lines:
  def __init__(self):
    self.lines = []
    self.closed = False

  def record(self, **fields):
    assert not self.closed
    self.lines.append(fields)

  def close(self):
    self.closed = True

  def column(self, name):
    return [line[name] for line in self.lines]


@pytest.fixture
def clock():
  return types.SimpleNamespace(secs=0.0)


@pytest.fixture
def lines():
  return Lines()


@pytest.fixture
def log(lines, clock):
  return step_log.StepLog(lines, 3, 10, clock=lambda: clock.secs)


def test_step_takes_from_the_end_of_the_one_before_it(clock, log, lines):
  for step, dispatched, now in [(1, 0.0, 0.5), (2, 0.5, 2.0), (3, 2.0, 5.0)]:
    clock.secs = now  # when the step before has ended
    log.dispatched(step, {"loss": step}, dispatched)
  clock.secs = 6.0
  log.finish()
  # Dispatched while the one before runs, a step has not begun.
  assert lines.column("step_secs") == [2.0, 3.0, 1.0]
  assert lines.column("gap_secs") == [None, 3.0, 1.0]
  assert lines.column("loss") == [1.0, 2.0, 3.0] and log.loss == 3.0
  assert lines.column("step") == [1, 2, 3]
  assert {(x["tokens"], x["incarnation"]) for x in lines.lines} == {(10, 3)}
  assert log.step_secs == pytest.approx(3.0 + 0.1 * (1.0 - 3.0))


def test_no_gap_is_counted_over_something_else(clock, log, lines):
  log.dispatched(1, {"loss": 1.0}, 0.0)
  clock.secs = 1.0
  log.dispatched(2, {"loss": 1.0}, 1.0)
  clock.secs = 2.0
  log.pause()  # an evaluation, say
  clock.secs = 100.0
  log.dispatched(3, {"loss": 1.0}, 100.0)
  clock.secs = 101.0
  log.finish()
  assert lines.column("step_secs") == [1.0, 1.0, 1.0]
  assert lines.column("gap_secs") == [None, 1.0, None]
  assert log.step_secs == 1.0


def test_last_step_is_logged_at_the_end(clock, log, lines):
  log.finish()
  assert lines.lines == []
  log.dispatched(1, {"loss": 0.123456789}, 0.0)
  log.close()
  assert lines.column("loss") == [0.1234568]
  assert lines.closed
