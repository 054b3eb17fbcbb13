"""Grids of settings, and the files that return them."""

import pathlib

import pytest

from diloco import errors, hyper
from experiments import sweeps

A = hyper.sweep("a", [1, 2])
B = hyper.sweep("b.c", ["x", "y"])


def test_product_turns_the_last_fastest():
  assert hyper.product(A, B) == [
    {"a": 1, "b.c": "x"},
    {"a": 1, "b.c": "y"},
    {"a": 2, "b.c": "x"},
    {"a": 2, "b.c": "y"},
  ]


def test_zip_joins_partners_and_chain_puts_behind():
  assert hyper.zip(A, B) == [{"a": 1, "b.c": "x"}, {"a": 2, "b.c": "y"}]
  assert hyper.chain(A, B) == [*A, *B]
  assert hyper.product(hyper.chain(A, B), [{"d": 0}])[2] == {"b.c": "x", "d": 0}


@pytest.mark.parametrize(
  ("combine", "why"),
  [
    (lambda: hyper.zip(A, hyper.sweep("d", [1, 2, 3])), "2, 3 points"),
    (lambda: hyper.product(A, A), "both set it"),
    (lambda: hyper.zip(A, A), "both set it"),
  ],
)
def test_what_does_not_fit_together_is_refused(combine, why):
  with pytest.raises(errors.UserError, match=why):
    combine()


def test_random_points_are_those_of_their_seed_and_in_range():
  fields = {
    "u": hyper.uniform(2, 3),
    "l": hyper.log_uniform(1e-4, 1e-1),
    "c": hyper.choice("p", "q"),
  }
  points = hyper.random(200, fields, seed=3)
  assert points == hyper.random(200, fields, seed=3)
  assert points != hyper.random(200, fields, seed=4)
  assert all(2 <= p["u"] <= 3 for p in points)
  assert all(1e-4 <= p["l"] <= 1e-1 for p in points)
  # Evenly in the logarithm: a third of the points in each decade.
  assert 40 < sum(p["l"] < 1e-3 for p in points) < 95
  assert {p["c"] for p in points} == {"p", "q"}


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("def get_sweep():\n  return []\n", "no points"),
    ("def get_sweep():\n  return [3]\n", "TypeError"),
    ("def get_sweep():\n  return [{3: 4}]\n", "a field is a text"),
    ("def other():\n  pass\n", "get_sweep"),
    ("def get_sweep():\n  return 1 / 0\n", r"ZeroDivisionError.*line 2"),
    ("import sys\nsys.exit(3)\n", "SystemExit"),
    ("def get_sweep(:\n", "SyntaxError"),
  ],
)
def test_bad_sweep_file_is_refused(tmp_path, text, why):
  path = tmp_path / "sweep.py"
  path.write_text(text)
  with pytest.raises(errors.UserError, match=why) as refused:
    hyper.load(str(path))
  assert "\n" not in str(refused.value)


def test_every_sweep_of_the_project_says_what_its_points_are_for():
  folder = pathlib.Path(sweeps.__file__).parent
  files = [p for p in sorted(folder.glob("*.py")) if p.stem != "__init__"]
  trained = {path.stem: hyper.load(str(path))[1] for path in files}
  assert trained == {
    "published": False,
    "quorum": True,
    "unequal_islands": False,
  }
  for path in files:
    assert f"--sweep=experiments/sweeps/{path.name}" in path.read_text()
