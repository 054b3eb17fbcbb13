"""Parameters as files: what is in them, who can read them, what is refused."""

import json
import tempfile

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.flax
from observing import python

from diloco import cli, errors
from diloco.snapshots import portable

TREE = {
  "block_0/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
  "block_0/bias": np.ones(3, np.float32),
  "embedding": np.full((4, 2), 0.5, np.float32),
  "scale": np.array(2.0, np.float32),
}

# A program that never heard of this package.
STRANGER = """
import sys

class Blocked:
  def find_spec(self, name, *_):
    assert name.partition(".")[0] != "diloco", name

sys.meta_path.insert(0, Blocked())
import orbax.checkpoint as ocp

reader = ocp.StandardCheckpointer()
params = reader.restore(sys.argv[1])
print({name: float(leaf.sum()) for name, leaf in params.items()})
print(reader.metadata(sys.argv[1]).custom_metadata["merged_tokens"])
"""


@pytest.mark.parametrize("names", [("a", "a/b/c"), ("a/b/c", "a")])
def test_parameter_of_the_name_of_a_group_is_no_nested_dict(names):
  flat = dict.fromkeys(names, np.ones(2, np.float32))
  with pytest.raises(errors.UserError, match="'a/b/c' is within it"):
    portable.nested(flat)


@pytest.mark.parametrize("form", portable.FORMATS)
def test_what_is_written_is_read_again(tmp_path, form, monkeypatch):
  # The place for what is temporary may be on another disk.
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
  portable.write(tmp_path / "out", form, TREE, {"run": "r"})
  found = portable.read("it", tmp_path / "out")
  assert found.keys() == TREE.keys()
  for name, values in TREE.items():
    np.testing.assert_array_equal(found[name], values)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def export(run, out, form, *flags):
  argv = ["export", str(run.dir), f"--format={form}", f"--out={out}", *flags]
  return cli.main(argv)


def test_command_writes_a_version_with_what_it_is(run, tmp_path, capsys):
  out = tmp_path / "out.safetensors"
  assert export(run, out, "safetensors", "--version=6", "--json") == 0
  facts = json.loads(capsys.readouterr().out)
  assert facts["parameters"] == 7 and facts["versions"] == [6, 6]
  with safetensors.safe_open(out, framework="np") as file:
    told = file.metadata()
    assert [file.get_tensor(name)[0] for name in "ab"] == [6.0, 6.0]
  assert told["run"] == "mine" and told["versions"] == "[6, 6]"
  assert int(told["merged_tokens"]) == 6 * (10 + 11) // 2
  assert told["config_digest"] == facts["config_digest"]


def test_npz_of_a_cut(run, tmp_path, capsys):
  assert export(run, tmp_path / "a.npz", "npz", "--cut=1") == 0
  assert "versions 4 to 5 by fragment" in capsys.readouterr().out
  with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
    assert json.loads(str(found["__metadata__"]))["cut"] == "1"
    assert found["a"].tolist() == [5.0] * 4


def test_orbax_loads_without_this_package(run, tmp_path):
  assert export(run, tmp_path / "out", "orbax") == 0
  told = python(STRANGER, str(tmp_path / "out"))
  assert told.splitlines() == ["{'a': 28.0, 'b': 21.0}", "73"]


@pytest.mark.parametrize("form", portable.FORMATS)
def test_nothing_is_overwritten(run, tmp_path, capsys, form):
  (tmp_path / "there").write_text("mine")
  assert export(run, tmp_path / "there", form) == 2
  assert "it is there already" in capsys.readouterr().err
  assert export(run, tmp_path / "no" / "where", form) == 2
  assert "folder does not exist" in capsys.readouterr().err
  assert (tmp_path / "there").read_text() == "mine"


def test_link_to_nowhere_is_there_already(tmp_path):
  (tmp_path / "out").symlink_to(tmp_path / "gone")
  with pytest.raises(errors.UserError, match="there already"):
    portable.write(tmp_path / "out", "npz", TREE, {})


def test_what_comes_there_meanwhile_is_not_replaced(tmp_path, monkeypatch):
  out = tmp_path / "out"

  def write(path, *_):
    path.write_text("ours")
    out.write_text("theirs")

  monkeypatch.setitem(portable._WRITERS, "npz", write)
  with pytest.raises(errors.UserError, match="there already"):
    portable.write(out, "npz", TREE, {})
  assert out.read_text() == "theirs"
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_version_that_is_gone_leaves_nothing(run, tmp_path, capsys):
  assert export(run, tmp_path / "out", "npz", "--version=5") == 2
  assert "there are versions 0, 6, 7 and cuts 1" in capsys.readouterr().err
  assert not (tmp_path / "out").exists()


def test_foreign_half_precision_is_read(tmp_path):
  values = {"w": np.ones(3, ml_dtypes.bfloat16)}
  safetensors.flax.save_file(values, tmp_path / "theirs")
  found = portable.read("it", tmp_path / "theirs")
  assert found["w"].dtype == np.float32 and found["w"].tolist() == [1, 1, 1]


def test_what_is_no_such_file_is_refused_in_one_line(tmp_path):
  (tmp_path / "text").write_text("no parameters")
  (tmp_path / "folder").mkdir()
  for name, told in (
    ("none", "no such file"),
    ("text", "cannot be read"),
    ("folder", "cannot be read"),
  ):
    with pytest.raises(errors.UserError, match=told) as refused:
      portable.read("it", tmp_path / name)
    assert "\n" not in str(refused.value)


def test_whole_numbers_are_no_parameters(tmp_path):
  np.savez(tmp_path / "a.npz", w=np.ones(3, np.int8))
  with pytest.raises(errors.UserError, match="'w' is int8"):
    portable.read("it", tmp_path / "a.npz")


def test_first_tensors_that_differ_are_named():
  shapes = {name: values.shape for name, values in TREE.items()}
  portable.check_fits("it", TREE, shapes)
  for bad in (np.nan, -np.inf):
    ill = TREE | {"block_0/bias": np.array([1, bad, 2], np.float32)}
    with pytest.raises(errors.UserError, match="'block_0/bias' is not finite"):
      portable.check_fits("it", ill, shapes)
  others = {**TREE, "embedding": filled_like((4, 3)), "new": filled_like((1,))}
  del others["block_0/bias"]
  with pytest.raises(errors.UserError) as refused:
    portable.check_fits("it", others, shapes)
  told = str(refused.value)
  assert "'block_0/bias' is missing" in told
  assert "'embedding' is [4, 3], the task's [4, 2]" in told
  assert "'new' is not the task's" in told
  many = {f"x{i}": filled_like((1,)) for i in range(9)}
  with pytest.raises(errors.UserError, match="and 10 more"):
    portable.check_fits("it", many, shapes)


def filled_like(shape):
  return np.zeros(shape, np.float32)
