"""`import diloco`: names that cost nothing until they are used."""

import subprocess
import sys

import pytest

import diloco
from diloco import interface
from diloco import run as run_lib
from diloco.planning.planner import command


def test_import_loads_nothing_but_the_standard_library():
  code = "import diloco, sys; dir(diloco)\n"
  code += "print(*{m.partition('.')[0] for m in sys.modules})"
  result = subprocess.run(
    [sys.executable, "-Sc", code], capture_output=True, text=True, check=True
  )
  loaded = set(result.stdout.split()) - set(sys.stdlib_module_names)
  assert loaded == {"diloco", "__main__"}


@pytest.mark.parametrize("name", diloco.__all__)
def test_every_name_is_there_and_has_words(name):
  assert name in dir(diloco)
  found = getattr(diloco, name)
  assert found.__name__ == name
  assert found.__doc__


def test_another_name_is_not():
  with pytest.raises(AttributeError, match="no attribute 'tarin'"):
    _ = diloco.tarin


def test_simulation_is_json_that_reads_as_text():
  flags = dict(chips=2048, slices=8, days=1, seeds=1, windows=0)
  facts = diloco.simulate(**flags, islands=2, speeds=(1, 0.5), elastic=False)
  assert 0 < facts["goodput"]["mean"] <= 1
  assert facts["slices"] == 8
  assert repr(facts).startswith("1 days, 2,048 chips in 8 slices")
  assert "<pre>1 days" in facts._repr_html_()


@pytest.mark.parametrize(
  ("settings", "told"),
  [({"chip": 3}, "--chip"), ({"islands": 0}, "at least 1")],
)
def test_simulation_that_cannot_be_is_a_user_error(settings, told):
  with pytest.raises(diloco.UserError, match=told):
    diloco.simulate(**settings)


def test_plan_is_what_the_command_proposes(monkeypatch):
  found = diloco.plan("experiments/fleets/two_rooms.py", 1e9, seeds=2)
  argv = ["--fleet=experiments/fleets/two_rooms.py", "--params=1e9"]
  args = command.parser().parse_args([*argv, "--seeds=2"])
  assert found == command.propose(args)
  assert "\n" in repr(found)


def test_bad_config_is_a_user_error_and_leaves_no_trace(tmp_path):
  with pytest.raises(diloco.UserError, match=r"config\.sync\.qourum"):
    diloco.train({"sync": {"qourum": 2}}, tmp_path / "run")
  with pytest.raises(diloco.UserError, match="no such file"):
    diloco.train("nowhere.py", tmp_path / "run")
  with pytest.raises(diloco.UserError, match="no such file"):
    diloco.train(300 * "x" + ".py", tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("place", "told"),
  [
    (None, "=None: a NoneType is no path"),
    (b"runs", "=b'runs': a bytes is no path"),
    ("a\0b", "null byte; name a directory"),
    (300 * "x", "too long a name, of 300 characters"),
  ],
)
@pytest.mark.parametrize(
  "use",
  [
    diloco.Run,
    lambda place: diloco.train({}, place),
    lambda place: diloco.train({}, place, cut=1),
    lambda place: diloco.start({}, place),
    lambda place: run_lib.train({}, place),
  ],
  ids=["Run", "train", "train to a cut", "start", "run.train"],
)
def test_what_names_no_directory_is_a_user_error(use, place, told):
  with pytest.raises(diloco.UserError) as caught:
    use(place)
  assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("cut", "told"), [("lats", "known by its number"), (1, "holds no run")]
)
def test_cut_that_cannot_be_is_a_user_error(tmp_path, monkeypatch, cut, told):
  monkeypatch.setattr(run_lib, "train", None)
  with pytest.raises(diloco.UserError, match=told):
    diloco.train({"name": "run"}, tmp_path / "run", cut=cut)


@pytest.mark.parametrize(
  ("status", "raised"),
  [("failed", diloco.FailedRunError), ("killed", KeyboardInterrupt)],
)
def test_run_that_ends_badly_raises(tmp_path, monkeypatch, status, raised):
  result = run_lib.Result(status, {"reason": "lost"}, tmp_path / "report.html")
  monkeypatch.setattr(run_lib, "train", lambda *_, **__: result)
  with pytest.raises(raised):
    interface.train({"name": "run"}, tmp_path)
