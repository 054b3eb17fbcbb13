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


def _pace(island, present=(), replicas=1, bytes_per_sec=1000.0, jitter=0.0):
  """Of slices with speeds 1, 1/2 and 1/4, at one second a step."""
  slices = [types.SimpleNamespace(relative_speed=s) for s in (1.0, 0.5, 0.25)]
  config = types.SimpleNamespace(
    seed=7,
    replicas=replicas,
    fleet=types.SimpleNamespace(
      slices=slices, pace_step_secs=1.0, jitter=jitter
    ),
    virtual=types.SimpleNamespace(
      latency_secs=0.1, bytes_per_sec=bytes_per_sec
    ),
  )
  return step_log.Pace.of(config, island, slices[island], 300, present)


@pytest.mark.parametrize(
  ("of", "medians", "seeds", "reduce_secs"),
  [
    (dict(island=1), [2.0], [1], 0.0),
    # A ring of n carries 2 (n - 1) / n of 1200 bytes, after two latencies.
    (dict(island=0, replicas=3), [1.0, 2.0, 4.0], [0, 1, 2], 0.2 + 1.6),
    (dict(island=0, replicas=3, present=(0, 2)), [1.0, 4.0], [0, 2], 0.2 + 1.2),
    (dict(island=0, replicas=3, present=(1,)), [2.0], [1], 0.0),
    (
      dict(island=0, replicas=3, bytes_per_sec=0.0),
      *([1.0, 2.0, 4.0], [0, 1, 2], 0.2),
    ),
  ],
)
def test_pace_is_that_of_the_slowest_slice_and_of_adding_gradients(
  of, medians, seeds, reduce_secs
):
  pace = _pace(**of)
  assert pace.median_secs == medians
  assert pace.seeds == [(7, m) for m in seeds]
  assert pace.reduce_secs == pytest.approx(reduce_secs)
  assert pace.step_secs == pace.next_secs(5) == max(medians) + pace.reduce_secs


def test_step_of_several_slices_takes_as_long_as_the_slowest_of_them():
  job = _pace(island=0, replicas=3, jitter=2.0)
  alone = [_pace(island=m, jitter=2.0) for m in range(3)]
  slowest = set()
  for step in range(40):
    each = [pace.next_secs(step) for pace in alone]
    assert job.next_secs(step) == max(each) + job.reduce_secs
    slowest.add(each.index(max(each)))
  assert slowest == {0, 1, 2}
