"""What a process runs under, told and taken up again."""

import os

import pytest

from diloco.islands import surroundings


def test_description_has_what_can_change_bits(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--some_flag")
  monkeypatch.setenv("HOME_GROWN", "1")
  told = surroundings.describe()
  assert told["cores"] == sorted(os.sched_getaffinity(0))
  assert told["environ"]["XLA_FLAGS"] == "--some_flag"
  assert "HOME_GROWN" not in told["environ"]
  assert told["software"]["jax"].count(".") >= 2


def test_environment_is_as_told_and_nothing_more(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--of_today")
  monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
  monkeypatch.setenv("HOME_GROWN", "1")
  environ = surroundings.environ({"XLA_FLAGS": "--of_then"})
  assert environ["XLA_FLAGS"] == "--of_then"
  assert environ["HOME_GROWN"] == "1"
  assert "MALLOC_ARENA_MAX" not in environ


def test_other_software_is_named():
  told = surroundings.describe()["software"]
  assert surroundings.changes(told) == []
  (change,) = surroundings.changes(told | {"jax": "0.0.1"})
  assert change == f"jax 0.0.1, now {told['jax']}"


@pytest.mark.parametrize(
  ("told", "available", "chosen"),
  [
    ([1], [0, 1], (1,)),
    ([5, 6], [0, 1, 2], (0, 1)),
    ([0, 1], [1], None),
  ],
)
def test_same_cores_or_as_many_others_are_chosen(told, available, chosen):
  assert surroundings.choose_cores(told, available) == chosen
