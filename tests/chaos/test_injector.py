"""What counts as a fault that was done, with a command in a test's hands."""

import pytest

from diloco.chaos import faults, injector


class FakeKeeper:
  """A command that is in one state for ever."""

  starts = 1
  state = "finished"
  refused = False
  failure = "error: no cut"

  def start(self, *flags):
    self.state = "failed" if flags else "running"
    self.refused = bool(flags)

  def kill(self):
    return self.state == "running"

  def tend(self):
    return self.state


@pytest.fixture
def trial(tmp_path):
  (tmp_path / "run").mkdir()
  made = injector.Trial(tmp_path, 1000, 3, 2, None)
  made.keeper = FakeKeeper()
  return made


@pytest.mark.parametrize(
  "fault",
  [
    faults.Fault(0, "sigkill", "controller"),
    faults.Fault(0, "all_islands"),
    faults.Fault(0, "everything"),
  ],
)
def test_what_hit_nobody_was_not_done(trial, fault):
  line = fault.to_json()
  trial._inject(fault, line)
  assert line["roles"] == [] and "was alive" in line["outcome"]


def test_fault_whose_run_ended_before_it_is_left_for_the_next(
  trial, tmp_path, monkeypatch
):
  trial.keeper.start = lambda: None
  monkeypatch.setattr(trial, "_wait_recovered", lambda *_: 0.0)
  fault = faults.Fault(0, "corrupt", "board", damage="flip")
  assert trial.run([fault]) == [fault]
  assert injector.read_log(tmp_path) == []


def test_run_that_was_hit_in_vain_recovers_before_the_next_fault(
  trial, tmp_path, monkeypatch
):
  recovered = []

  def wait(since, new_controller=False):
    recovered.append(new_controller)
    trial._state = "finished" if len(recovered) > 1 else "running"
    return since

  monkeypatch.setattr(trial, "_wait_recovered", wait)
  monkeypatch.setattr(trial, "_pause", lambda secs: None)
  fault = faults.Fault(0, "crash_point", point="mid_restore")
  trial.run([fault])
  (line,) = injector.read_log(tmp_path)
  assert line["outcome"] == "error: no cut"
  assert recovered == [False, True] and "recovered_secs" in line
