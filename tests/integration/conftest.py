"""What the tests of real runs share."""

import pytest
from real_run import Run


@pytest.fixture
def make_run(tmp_path):
  """Makes runs, and sees to it that each ends with its test."""
  made = []

  def make(**overrides):
    made.append(Run(tmp_path, **overrides))
    return made[-1]

  yield make
  for run in made:
    left = run.alive()
    run.kill_everything()
    assert not left, "processes were left behind"
