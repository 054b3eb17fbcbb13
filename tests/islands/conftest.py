"""The directory of a run of islands in this process."""

import pytest


@pytest.fixture
def run_dir(tmp_path):
  path = tmp_path / "run"
  path.mkdir()
  return path
