"""A fleet of fakes, and sessions of one run in it."""

import fake_fleet
import pytest


@pytest.fixture
def fleet():
  return fake_fleet.Fleet()


@pytest.fixture
def session(tmp_path, fleet):
  def make(**values):
    return fake_fleet.Session(tmp_path, fleet, **values)

  return make
