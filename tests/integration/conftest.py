"""What the tests of real runs share."""

import contextlib

import pytest
import real_run


@pytest.fixture
def make_run(tmp_path):
  """Makes runs, and sees to it that each ends with its test."""
  with contextlib.ExitStack() as made:
    yield lambda **overrides: made.enter_context(
      real_run.Run(tmp_path, **overrides)
    )
