"""The list of mutants fits the code, and the harness sees what it should."""

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
