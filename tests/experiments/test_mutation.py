"""The list of mutants fits the code, and the harness sees what it should."""

import os
import signal
import sys
import tempfile

import pytest

from experiments import mutation

MUTANTS = mutation.load()


def test_every_mutant_still_fits_the_code():
  names = [mutant.name for mutant in MUTANTS]
  assert len(set(names)) == len(names)
  for mutant in MUTANTS:
    source = (mutation.ROOT / mutant.file).read_text()
    wrong = mutant.apply(source)
    assert wrong != source
    compile(wrong, mutant.file, "exec")  # it is to be wrong, not broken
    assert all((mutation.ROOT / path).exists() for path in mutant.tests)
    assert "module" in mutant.stages(), mutant.name  # a direct test of it


def test_mutant_that_fits_nowhere_is_named():
  mutant = mutation.Mutant("lost", "diloco/run.py", "no such text", "x", "")
  with pytest.raises(ValueError, match=r"'lost'.* 0 times"):
    mutant.apply("print()")


def test_wrong_line_is_killed_and_an_equal_one_lives(tmp_path):
  tree = mutation.copy_tree(tmp_path)
  near = {
    "file": "diloco/syncer/weighting.py",
    "why": "",
    "tests": ("tests/syncer/test_weighting.py",),
  }
  source = (mutation.ROOT / near["file"]).read_text()
  line = next(x for x in source.splitlines() if "return self" in x)
  wrong = mutation.Mutant("wrong", before=line, after=line + " * 2", **near)
  equal = mutation.Mutant("equal", before=line, after=line + " * 1", **near)
  only = {"module"}
  assert mutation.killer(wrong, tree, only) == "module"
  assert mutation.killer(equal, tree, only) is None
  assert (tree / near["file"]).read_text() == source


@pytest.fixture
def folders(tmp_path, monkeypatch):
  """Where the tool makes its folder; it copies nothing there."""
  for name in ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"):
    monkeypatch.setenv(name, "1")
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  monkeypatch.setattr(mutation, "copy_tree", lambda tree: tree)
  monkeypatch.setattr(sys, "argv", ["mutation", f"--only={MUTANTS[0].name}"])
  before = signal.getsignal(signal.SIGTERM)
  yield lambda: list(tmp_path.iterdir())
  signal.signal(signal.SIGTERM, before)
  mutation._over.clear()


def test_tests_that_fail_without_any_mutant_kill_none(folders, monkeypatch):
  monkeypatch.setattr(mutation, "_fails", lambda command, tree: "-x" in command)
  with pytest.raises(RuntimeError, match=r"the sound tree fails: pytest -x"):
    mutation.main()
  assert not folders()


def test_tool_that_is_terminated_leaves_no_folder(folders, monkeypatch):
  def fails(command, tree):
    assert folders()
    os.kill(os.getpid(), signal.SIGTERM)
    return not mutation._over.wait(20)

  monkeypatch.setattr(mutation, "_fails", fails)
  with pytest.raises(SystemExit, match="143"):
    mutation.main()
  assert not folders()
