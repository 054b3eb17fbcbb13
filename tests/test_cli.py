"""The command line: bad input costs one line and leaves no trace."""

import argparse
import errno
import functools
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib

import bad_stores
import numpy as np
import pytest
from observing import loaded_by

import diloco
from diloco import (
  arguments,
  channel,
  cli,
  config_changes,
  errors,
  launch,
  process,
  promises,
)
from diloco import config as config_lib
from diloco import run as run_lib
from diloco.commands import table
from diloco.controller import move
from diloco.fragments import partition
from diloco.islands import bootstrap, inner_step
from diloco.report import liveness, summary
from diloco.snapshots import keys, lease, locations, records, store
from diloco.tasks import registry

ROOT = pathlib.Path(cli.__file__).parent.parent
SWEEP = ROOT / "experiments" / "sweeps" / "quorum.py"
CONFIG = """
import ml_collections

def get_config(variant=""):
  return ml_collections.ConfigDict(dict(
    total_tokens=100_000,
    task=dict(options=dict(
      d_model=16, num_layers=1, num_heads=2, d_ff=16, seq_len=16,
      batch_size=4, data_glob={data!r},
    )),
    fleet=dict(slices=(dict(topology="1"), dict(topology="1"))),
    sync=dict(num_fragments=2, every=2, overlap_steps=1),
  ))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
  """A folder with data and a configuration that would run."""
  monkeypatch.chdir(tmp_path)
  data = tmp_path / "data"
  data.mkdir()
  for i in range(40):
    (data / f"{i}.txt").write_text(f"{i} all work and no play. " * 20)
  (tmp_path / "empty").mkdir()
  (tmp_path / "empty" / "a.txt").touch()
  (tmp_path / "config.py").write_text(CONFIG.format(data=f"{data}/*.txt"))
  (tmp_path / "syntax.py").write_text("def get_config(:\n  pass\n")
  (tmp_path / "bare.py").write_text("x = 1\n")
  (tmp_path / "none.py").write_text("def get_config():\n  pass\n")
  (tmp_path / "raises.py").write_text("def get_config():\n  return 1 / 0\n")
  (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
  (tmp_path / "void.py").write_text("def get_config():\n  return {}\n")
  (tmp_path / "exits.py").write_text("import no_such_module_at_all\n")
  (tmp_path / "file").write_text("not a directory")
  (tmp_path / "foreign").mkdir()
  (tmp_path / "foreign" / "thesis.tex").write_text("years of work")
  (tmp_path / "broken").mkdir()
  (tmp_path / "broken" / "config.json").write_text("{")
  (tmp_path / "other").mkdir()
  (tmp_path / "other" / "config.json").write_text('{"format": 1, "config": {}}')
  return tmp_path


def tree_of(folder):
  """Everything on disk, to be compared."""
  return {
    str(path): path.read_bytes() if path.is_file() else None
    for path in sorted(folder.rglob("*"))
    if "__pycache__" not in path.parts
  }


def check_refused(place, capsys, argv, *told):
  before = tree_of(place)
  code = cli.main(argv)
  out, err = capsys.readouterr()
  assert (code, out) == (2, ""), err
  lines = err.splitlines()
  assert len(lines) == 1, err
  assert lines[0].startswith("error: ")
  # What, why and remedy.
  assert ": " in lines[0].removeprefix("error: ")
  assert len(lines[0].rpartition("; ")[2]) > 5
  for text in told:
    assert text in lines[0]
  assert tree_of(place) == before
  return lines[0]


def train(*overrides, config="config.py", workdir="run"):
  return [
    "train",
    f"--config={config}",
    f"--workdir={workdir}",
    *(o if o.startswith("-") else f"--config.{o}" for o in overrides),
  ]


GOING_ON = [train(), ["resume", "run"]]
# (arguments, what the line tells)
BAD_INPUT = {
  "unknown command": (["trian"], ["diloco trian", "choose one of"]),
  "unknown flag": (train("--wrokdir=x"), ["--wrokdir", "--workdir?"]),
  "flags that contradict each other": (
    train("outer.count_absent=true", "outer.momentum=0.5"),
    ["config.outer.count_absent = True", "config.outer.momentum = 0.5"],
  ),
  "unknown flag of another command": (
    ["sample", "run", "--promt=a"],
    ["--promt=a", "did you mean --prompt?"],
  ),
  "unknown flag instead": (
    ["train", "--config=config.py", "--wrkdir=run"],
    ["--wrkdir", "did you mean --workdir?"],
  ),
  "bad switch": (train("--quiet=maybe"), ["--quiet=maybe"]),
  "flag without a value": (["train", "--workdir=run", "--config"], ["config"]),
  "no config": (["train", "--workdir=run"], ["--config", "missing"]),
  "no workdir": (["train", "--config=config.py"], ["--workdir", "missing"]),
  "empty workdir": (train(workdir=""), ["--workdir", "missing"]),
  "override alone": (
    ["train", "--config.seed=1", "--workdir=run"],
    ["--config", "missing"],
  ),
  "argument": ([*train(), "seed=1"], ["'seed=1'", "--flag=value"]),
  "config file missing": (train(config="no.py"), ["no.py", "no such file"]),
  "config is a folder": (train(config="data"), ["data", "no such file"]),
  "config is no Python": (train(config="file"), ["--config=file", "no Python"]),
  "config with a syntax error": (
    train(config="syntax.py"),
    ["syntax.py", "SyntaxError", "line 1"],
  ),
  "config without get_config": (train(config="bare.py"), ["no function get_c"]),
  "config that returns nothing": (train(config="none.py"), ["returned None"]),
  "config that raises": (
    train(config="raises.py"),
    ["raises.py", "ZeroDivisionError: division by zero (line 2)"],
  ),
  "config that ends the process": (
    train(config="leaves.py"),
    ["leaves.py", "SystemExit: 3 (line 2)"],
  ),
  "config without a field": (
    train(config="void.py"),
    ["void.py", "nothing to configure"],
  ),
  "batch larger than the text": (
    train("task.options.batch_size=100000000"),
    ["batch_size=100000000", "rows of", "a smaller batch_size"],
  ),
  "config that cannot import": (
    train(config="exits.py"),
    ["exits.py", "no_such_module_at_all"],
  ),
  "config that takes no variant": (train(config="none.py:v"), ["TypeError"]),
  "misspelt override": (
    train("sync.qourum=2"),
    ["config.sync.qourum", "did you mean config.sync.quorum?"],
  ),
  "misspelt group": (train("snyc.quorum=2"), ["did you mean config.sync?"]),
  "misspelt switch": (
    train("--noconfig.sync.folow"),
    ["did you mean config.sync.follow?"],
  ),
  "misspelt option": (
    train("task.options.seq_ln=8"),
    ["seq_ln", "did you mean 'seq_len'?"],
  ),
  "misspelt field of a slice": (
    train("fleet.slices[1].topolgy=2"),
    ["did you mean config.fleet.slices[1].topology?"],
  ),
  "slice that is not there": (
    train("fleet.slices[2].topology=2"),
    ["config.fleet.slices[2]", "has 2 entries", "from 0"],
  ),
  "index that is no number": (
    train("fleet.slices[last].topology=2"),
    ["config.fleet.slices[last]", "has 2 entries"],
  ),
  "path through a number": (train("seed.x=2"), ["seed"]),
  "path without an end": (train("sync.=2"), ["config.sync"]),
  "empty override": (train("=2"), ["no such field"]),
  "override of a wrong type": (
    train("sync.quorum=2.5"),
    ["--config.sync.quorum=2.5", "2.5"],
  ),
  "override of a whole number by part of one": (
    train("total_tokens=1.5"),
    ["--config.total_tokens=1.5", "whole number", "2.4M"],
  ),
  "override of a number by text": (
    train("outer.momentum=much"),
    ["--config.outer.momentum=much"],
  ),
  "override of a switch": (
    train("sync.follow=maybe"),
    ["--config.sync.follow=maybe"],
  ),
  "override of a group": (train("sync=3"), ["--config.sync=3"]),
  "override of a choice": (
    train("sync.adoption=mix"),
    ["config.sync.adoption = 'mix'", "overwrite, blend, carry"],
  ),
  "override of an option's type": (
    train("task.options.seq_len=long"),
    ["seq_len=long"],
  ),
  "option out of range": (train("task.options.seq_len=0"), ["seq_len=0"]),
  "unknown task": (train("task.name=langage_model"), ["'language_model'?"]),
  "task module missing": (
    train("task.name=no_such_module:Task"),
    ["no_such_module", "PYTHONPATH"],
  ),
  "quorum above islands": (train("sync.quorum=3"), ["2 islands", "at most 2"]),
  "P above H": (train("sync.num_fragments=3"), ["P must not exceed H"]),
  "P above the number of tensors": (
    train("sync.num_fragments=500", "sync.every=500"),
    ["num_fragments = 500", "parameter tensors"],
  ),
  "data missing": (
    train("task.options.data_glob=nowhere/*.txt"),
    ["nowhere/*.txt", "no file matches"],
  ),
  "data empty": (
    train("task.options.data_glob=empty/*.txt"),
    ["empty/*.txt", "text"],
  ),
  "too little data": (
    train("task.options.seq_len=2000000"),
    ["rows of 2000000", "more text"],
  ),
  "topology beyond the machine": (
    train("fleet.slices[0].topology=999x999"),
    ["config.fleet.slices[0].topology = '999x999'", "devices"],
  ),
  "topology without sense": (
    train("fleet.slices[1].topology=2by2"),
    ["config.fleet.slices[1].topology = '2by2'", "'2x4'"],
  ),
  "batch not divisible": (
    train("fleet.slices[1].topology=3"),
    ["config.fleet.slices[1].topology = '3'", "a batch of 4", "divisor"],
  ),
  "too many islands": (
    train("fleet.slices=" + ",".join(["{'kind':'cpu'}"] * 999)),
    ["999 islands", "max_islands_per_core"],
  ),
  "workdir is a file": (train(workdir="file"), ["file", "name a directory"]),
  "workdir with a home that no shell has put in": (
    train(workdir="~/run"),
    ["a folder of the name '~'", "$HOME"],
  ),
  "workdir below a file": (train(workdir="file/run"), ["file", "choose"]),
  "workdir below a kernel folder": (
    train(workdir="/proc/diloco/run"),
    ["/proc", "choose another directory"],
  ),
  "workdir of somebody else": (
    train(workdir="foreign"),
    ["foreign", "not empty and holds no run"],
  ),
  "workdir with a broken run": (train(workdir="broken"), ["broken"]),
  "workdir of another version": (train(workdir="other"), ["other", "format"]),
  **{
    f"{command} without a directory": (
      [command],
      [f"diloco {command}", "are required"],
    )
    for command in ("status", "report", "resume")
  },
  **{
    f"{command} of {folder}": ([command, folder], [folder])
    for command in ("status", "report", "resume")
    for folder in ("nowhere", "foreign", "file", "broken")
  },
  "status with an unknown flag": (["status", "foreign", "--jsn"], ["--jsn"]),
  **{
    f"{argv[0]} of {folder}": (argv, [folder])
    for folder in ("nowhere", "foreign", "file", "broken", "empty")
    for argv in (
      ["cut", folder],
      ["replay", folder],
      ["explain", folder, "--fragment=0", "--version=1"],
    )
  },
  **{
    f"{argv[0]} of a run of another version": (
      argv,
      ["other", "has format 1, this version reads", "the version of diloco"],
    )
    for argv in (
      ["resume", "other"],
      ["status", "other"],
      ["report", "other"],
      ["cut", "other"],
      ["replay", "other"],
      ["explain", "other", "--fragment=0", "--version=1"],
    )
  },
  "resume with a cut that is no number": (
    ["resume", "other", "--cut=newest"],
    ["--cut=newest", "'last' or a number"],
  ),
  "explain without a round": (["explain", "other"], ["--fragment, --version"]),
  "explain of no number": (
    ["explain", "other", "--fragment=x", "--version=1"],
    ["--fragment", "'x'"],
  ),
  "chaos without a directory": (["chaos"], ["diloco chaos", "--workdir"]),
  "chaos in a directory in use": (["chaos", "--workdir=data"], ["of its own"]),
  "chaos in a file": (["chaos", "--workdir=file"], ["of its own"]),
  "chaos of an unknown kind": (
    ["chaos", "--workdir=new", "--kinds=sigfoo"],
    ["--kinds=sigfoo", "sigkill"],
  ),
  "chaos without faults": (
    ["chaos", "--workdir=new", "--trials=0"],
    ["--trials: '0'", "of at least 1"],
  ),
  "chaos without faults in a run": (
    ["chaos", "--workdir=new", "--faults_per_run=0"],
    ["--faults_per_run: '0'", "of at least 1"],
  ),
  "simulated protocol of no number": (
    ["simulate-protocol", "--seed=x"],
    ["--seed", "'x'"],
  ),
  "sample with too large a seed": (
    ["sample", "other", "--seed=4294967296"],
    ["--seed", "of at least 0 and at most 4294967295"],
  ),
  "ls of nowhere": (["ls", "nowhere"], ["nowhere", "holds runs"]),
  "ls of no name": (["ls", "x" * 5000], ["xxx", "File name too long"]),
  "comparison of no name": (["compare", "x" * 5000], ["File name too long"]),
  "sweep with a home that no shell has put in": (
    ["sweep", f"--sweep={SWEEP}", "--workdir=~/sweep"],
    ["a folder of the name '~'", "$HOME"],
  ),
  "sweep below a file": (
    ["sweep", f"--sweep={SWEEP}", "--workdir=file/sweep"],
    ["file/sweep", "Not a directory"],
  ),
  "plan without a fleet": (["plan"], ["diloco plan", "--fleet"]),
  "plan of a fleet that is not there": (
    ["plan", "--fleet=nowhere.py", "--params=1e9"],
    ["nowhere.py", "no such file"],
  ),
  "bench of nothing": (["bench"], ["diloco bench", "part"]),
  "bench of an unknown part": (["bench", "islnad"], ["islnad", "island"]),
}


BAD_STORES = {
  "runs/store": ["'runs/store'", "no URL", "s3://bucket/prefix"],
  "ftp://host/x": ["no URL of a store"],
  "file://host/x": ["no directory"],
  "file:///proc/nowhere": ["reached, read or written", "/proc/nowhere"],
  "s3:///x": ["no bucket"],
  "s3://B/x": ["Invalid S3 bucket name"],
  "s3://[/x": ["no URL of a store"],
  "gs://bucket/x?endpoint=y": ["'endpoint' is no option of 'gs'"],
  "s3://bucket/x?endpoint=host:9000": ["endpoint", "https://host"],
  "s3://bucket/x?endpoint=ftp://host": ["endpoint", "https://host"],
  "s3://bucket/x?endpoint": ["endpoint is empty"],
  "s3://bucket/x?region=&endpoint=http://y": ["region is empty"],
  "s3://bucket/x?endpoint=https://me:secret@y": ["'https://...@y'", "creden"],
  "s3://me:secret@bucket/x": ["credentials", "AWS_SECRET_ACCESS_KEY"],
  "s3://bucket/x?endpoint=http://127.0.0.1:1": ["reached", "Could not connect"],
}


@pytest.mark.parametrize("url", BAD_STORES)
def test_store_that_cannot_be_used_is_refused(url, place, capsys, monkeypatch):
  monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
  monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
  argv = train(f"store={url}")
  line = check_refused(place, capsys, argv, "config.store", *BAD_STORES[url])
  assert "secret@" not in line


@pytest.mark.parametrize(
  "command", ["evaluate", "export --format=npz --out=x.npz", "replay"]
)
def test_run_whose_store_is_out_of_reach_is_one_line(
  command, place, capsys, monkeypatch
):
  monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
  monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
  monkeypatch.setattr(locations, "_RETRIES", {"max_retries": 0})
  values = {"store": "s3://bucket/x?endpoint=http://127.0.0.1:1"}
  process.write_config(config_lib.from_mapping(values), place / "run")
  name, *flags = command.split()
  assert cli.main([name, "run", *flags]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert "store failed" in line and "Could not connect" in line
  assert "; check" in line


def test_s3_that_breaks_a_promise_is_refused_by_its_name(
  s3, place, capsys, monkeypatch
):
  url = s3.place(place.name)
  broken = train(f"store={url.replace('bucket', 'no-such-bucket', 1)}")
  check_refused(place, capsys, broken, "NoSuchBucket")
  held = store.SnapshotStore(url)
  monkeypatch.setattr(
    promises,
    "broken",
    functools.partial(promises.broken, open_store=bad_stores.losing),
  )
  told = ["compare-and-set: a write too late won", "conditional writes"]
  check_refused(place, capsys, train(f"store={url}"), *told)
  monkeypatch.undo()
  monkeypatch.chdir(place)
  tensor = partition.Tensor("of another model", (3,), "rda")
  held.write_plan(partition.partition([tensor], 1))
  check_refused(place, capsys, train(f"store={url}"), "there is a run in it")
  assert store.SnapshotStore(s3.place("")).keys(place.name) == ["plan"]


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_no_trace(name, place, capsys):
  argv, told = BAD_INPUT[name]
  check_refused(place, capsys, argv, *told)


def test_taken_port_is_refused(place, capsys):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    argv = train(f"controller.port={port}")
    check_refused(place, capsys, argv, f"port = {port}", "or 0")


def test_folder_without_permission_is_refused(place, capsys):
  if os.geteuid() == 0:
    pytest.skip("root may write anywhere; /proc stands in for it above")
  locked = place / "locked"
  locked.mkdir(mode=0o500)
  check_refused(place, capsys, train(workdir="locked/run"), "locked")


@pytest.fixture
def launched(monkeypatch):
  """The configurations of the runs that would be started."""
  configs = []
  monkeypatch.setattr(
    launch, "run", lambda config, *_, **__: configs.append(config) or 0
  )
  return configs


@pytest.fixture
def run_dir(place):
  """A run directory as `train` leaves it when it is killed early."""
  config = config_lib.from_mapping(launch.load_config("config.py"))
  folder = place / "run"
  process.write_config(config, folder)
  task = registry.make_task(config.task.name, config.task.options)
  tensors = inner_step.ParamTree(task, config.seed).tensors()
  plan = partition.partition(tensors, config.sync.num_fragments)
  store.SnapshotStore(process.store_url(folder)).write_plan(plan)
  return folder


@pytest.mark.parametrize(
  "override", ["seed=1", "sync.codec=f32", "task.options.batch_size=8"]
)
def test_run_does_not_go_on_with_another_config(
  run_dir, capsys, place, override
):
  field = override.partition("=")[0]
  if field.startswith("task.options"):
    field = "task.options"
  told = [f"config.{field} = ", "cannot change within a run", "--workdir"]
  check_refused(place, capsys, train(override), *told)


@pytest.mark.parametrize("argv", GOING_ON)
def test_run_does_not_go_on_with_another_fragment_plan(
  run_dir, capsys, place, argv
):
  tensor = partition.Tensor("of another model", (3,), "rda")
  plan = run_dir / "snapshots" / "plan"
  plan.unlink()
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  snapshots.write_plan(partition.partition([tensor], 1))
  check_refused(place, capsys, argv, "fragment plan", "--workdir")


@pytest.mark.parametrize(
  ("flags", "counted"),
  [
    ([], True),
    (["--config.outer.momentum=0.5"], False),
    (["--noconfig.outer.count_absent"], False),
    (["--config.outer.count_absent=false"], False),
    (["--config.outer.count_absent"], True),
  ],
)
def test_what_flags_leave_out_is_not_taken_for_said(place, flags, counted):
  config = launch.load_config("config.py")
  launch.override(config, flags)
  assert config_lib.from_mapping(config).outer.count_absent is counted


def test_flag_of_a_method_takes_what_the_file_had_for_another(place, capsys):
  text = pathlib.Path("config.py").read_text()
  written = "overlap_steps=1, quorum=1, adoption='carry'"
  pathlib.Path("config.py").write_text(text.replace("overlap_steps=1", written))
  config = config_lib.from_mapping(launch.load_config("config.py", "diloco"))
  assert config.method == "diloco" and config.sync.adoption == "overwrite"
  assert config.sync.every == 2
  told = capsys.readouterr().err
  assert told.startswith("config.method = 'diloco' has ")
  assert "sync.adoption = 'overwrite' for 'carry'" in told
  assert "every" not in told
  with pytest.raises(errors.UserError, match=r"quorum = 1: config\.method"):
    values = launch.load_config("config.py", "diloco")
    launch.override(values, ["--config.sync.quorum=1"])
    config_lib.from_mapping(values)


@pytest.fixture
def shapes(place):
  """Shapes of the parameters of `config.py`, by name."""
  config = config_lib.from_mapping(launch.load_config("config.py"))
  task = registry.make_task(config.task.name, config.task.options)
  return inner_step.ParamTree(task, config.seed).shapes


def test_parameters_of_another_model_are_refused(place, capsys, shapes):
  given = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
  first, second, *_ = sorted(given)
  del given[first]
  given[second] = np.zeros((2, 2), np.float32)
  np.savez("theirs.npz", **given)
  (place / "no.npz").write_text("no")
  check_refused(
    place,
    capsys,
    train("init_from=theirs.npz"),
    "config.init_from = 'theirs.npz': its tensors are not the task's:"
    f" {first!r} is missing, {second!r} is [2, 2], the task's"
    f" {list(shapes[second])};",
  )
  given = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
  given[first].flat[0] = np.nan
  np.savez("theirs.npz", **given)
  check_refused(
    place, capsys, train("init_from=theirs.npz"), f"{first!r} is not finite"
  )
  for name, told in (("no.npz", "cannot be read"), ("none", "no such file")):
    check_refused(place, capsys, train(f"init_from={name}"), told)


def test_run_that_was_given_parameters_goes_on_without_their_file(
  place, shapes
):
  given = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
  np.savez("theirs.npz", **given)
  values = launch.load_config("config.py")
  values.init_from = "theirs.npz"
  config, folder = config_lib.from_mapping(values), place / "run"
  _, plan, found = run_lib.preflight(config, folder)
  assert found.keys() == given.keys()
  process.write_config(config, folder)
  assert run_lib.preflight(config, folder)[2] is not None  # killed in between
  snapshots = store.SnapshotStore(process.store_url(folder))
  bootstrap.keep_given(snapshots, plan, found)
  (place / "theirs.npz").unlink()
  assert run_lib.preflight(config, folder)[2] is None


def test_run_in_a_folder_that_a_shell_named_tilde_goes_on(place):
  config = config_lib.from_mapping(launch.load_config("config.py"))
  folder = place / "~" / "run"
  with pytest.raises(errors.UserError, match="name '~'"):
    run_lib.preflight(config, folder)
  process.write_config(config, folder)
  run_lib.preflight(config, folder)


def test_start_that_fails_leaves_directory_and_store_to_the_next(
  place, monkeypatch, capsys
):
  def refuse(*_, **__):
    raise errors.UserError("this machine", "it will not do", "wait")

  values = launch.load_config("config.py")
  values.store = (place / "far").as_uri()
  for module, name in (
    (run_lib, "_engine"),
    (run_lib.roles, "draw_incarnation"),
  ):
    with monkeypatch.context() as patched:
      patched.setattr(module, name, refuse)
      assert cli.main(train(f"store={values.store}")) == 2
    assert "it will not do" in capsys.readouterr().err
    run_lib.preflight(config_lib.from_mapping(values), place / "run")


class Unbegun:
  """What a controller leaves that ends between its lease and its first file."""

  def __init__(self, place, elsewhere):
    self.dir = place / "run"
    self.args = [f"store={(place / 'far').as_uri()}/"] if elsewhere else []
    url = self.args[0].partition("=")[2] if elsewhere else None
    self.store = store.SnapshotStore(url or process.store_url(self.dir))
    self.dir.mkdir()
    (self.dir / process.UNFINISHED).write_text("{")  # of its configuration
    self.owned_by(0)

  def owned_by(self, pid):
    """A process of this machine has the run; 0 is one that is dead."""
    ticks = liveness.start_ticks(pid) if pid else 1
    owner = json.dumps([liveness.machine(), pid or os.getpid(), ticks, ""])
    key = keys.CONTROLLER_LEASE
    self.store.write(lease.drawn_key(key), records.DrawnToken(4))
    self.store.write(key, records.Lease(owner, 4, 9, "an id"))
    self.store.write(keys.EPOCH, records.Epoch(0, 0, token=4))


@pytest.fixture(params=["beside", "elsewhere"])
def unbegun(place, request):
  return Unbegun(place, request.param == "elsewhere")


def test_run_that_was_killed_before_it_began_begins(
  unbegun, monkeypatch, capsys
):
  def refuse(*_, **__):
    raise errors.UserError("this machine", "it will not do", "wait")

  monkeypatch.setattr(run_lib.roles, "draw_incarnation", refuse)
  assert cli.main(train(*unbegun.args)) == 2
  assert "it will not do" in capsys.readouterr().err
  assert process.read_config(unbegun.dir).seed == 0
  assert unbegun.store.perform(move.home()) == process.run_id(unbegun.dir)
  assert unbegun.store.read(keys.EPOCH, records.Epoch).token == 5


def test_run_that_is_about_to_begin_is_left_to_who_begins_it(
  unbegun, place, capsys
):
  unbegun.owned_by(os.getppid())
  argv = train(*unbegun.args)
  check_refused(place, capsys, argv, "a controller of this run is alive")


@pytest.mark.parametrize(
  "what, why",
  [
    ("config.json", "another controller has just begun a run in it"),
    ("tape/controller-1.jsonl", "goes on in another directory"),
  ],
)
def test_run_that_began_meanwhile_is_left_alone(
  unbegun, place, capsys, monkeypatch, what, why
):
  take = run_lib._take

  def begin_first(*args):
    path = unbegun.dir / what
    path.parent.mkdir(exist_ok=True)
    path.write_text("another's")
    if what != "config.json":
      unbegun.store.write(keys.BOARD, records.Board([1], {}))
    before.update(tree_of(place))
    return take(*args)

  before = {}
  monkeypatch.setattr(run_lib, "_take", begin_first)
  assert cli.main(train(*unbegun.args)) == 2
  assert why in capsys.readouterr().err
  assert tree_of(place) == before


@pytest.mark.parametrize("what", ["thesis.tex", "snapshots/heads/0000"])
def test_directory_with_more_than_a_lease_is_refused(
  unbegun, place, capsys, what
):
  path = unbegun.dir / what
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("years of work")
  argv = train(*unbegun.args)
  check_refused(place, capsys, argv, "not empty and holds no run")


def test_store_with_more_than_a_lease_is_refused(place, capsys):
  unbegun = Unbegun(place, elsewhere=True)
  unbegun.store.write(keys.BOARD, records.Board([1], {}))
  check_refused(place, capsys, train(*unbegun.args), "there is a run in it")


def test_copy_of_a_living_run_goes_on(place):
  """The lease in its own store names the controller of the original."""
  config = config_lib.from_mapping({"controller": {"takeover_secs": 0.1}})
  process.write_config(config, place / "run")

  def open_store(folder):
    return store.SnapshotStore(process.store_url(folder))

  def take(folder):
    run_id = process.run_id(folder)
    return run_lib._take(open_store(folder), config, folder, run_id)

  pid = os.getppid()
  owner = json.dumps([liveness.machine(), pid, liveness.start_ticks(pid), ""])
  held = records.Lease(owner, 1, 0, process.run_id(place / "run"))
  open_store(place / "run").write(keys.CONTROLLER_LEASE, held)
  copy = shutil.copytree(place / "run", place / "copy")
  with pytest.raises(errors.UserError, match="controller of this run is alive"):
    take(place / "run")
  with take(copy) as mine:
    assert mine.token == 2


# The options of one are a dict, and a list of it is a command.
GADGETS = {
  "subprocess:run": {"touch": 1, "pwned": 1},
  "planted:make": {},
}


@pytest.mark.parametrize("command", ["resume", "replay"])
@pytest.mark.parametrize("name", GADGETS)
def test_directory_from_elsewhere_has_no_code_executed(
  place, capsys, monkeypatch, command, name
):
  (place / "planted.py").write_text("open('pwned', 'w')")
  monkeypatch.syspath_prepend(str(place))
  values = {"task": {"name": name, "options": GADGETS[name]}}
  theirs = place / "theirs"
  process.write_config(config_lib.from_mapping(values), theirs)
  theirs.rename(place / "run")
  told = check_refused(place, capsys, [command, "run"], "copied or moved")
  assert f"--task={name}" in told
  check_refused(
    place, capsys, [command, "run", "--task=a:B"], "--task=a:B", name
  )


@pytest.mark.parametrize("command", ["train", "resume"])
def test_setting_changed_by_hand_is_refused(run_dir, capsys, place, command):
  path = run_dir / "config.json"
  path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
  argv = train("seed=1") if command == "train" else ["resume", "run"]
  check_refused(place, capsys, argv, "config.seed from 0 to 1")


def test_run_goes_on_without_its_config_json(run_dir, launched):
  wanted = process.read_config(run_dir).to_dict()
  (run_dir / "config.json").unlink()
  assert cli.main(["resume", "run"]) == 0
  assert launched[0].to_dict() == wanted


@pytest.mark.parametrize("argv", GOING_ON)
def test_run_whose_store_is_gone_is_left_alone(run_dir, capsys, place, argv):
  saved = run_dir / "checkpoints" / "island-0" / "000000040.0001.000001"
  saved.mkdir(parents=True)
  (saved / "complete.json").write_text("{}")
  shutil.rmtree(run_dir / "snapshots")
  (run_dir / "snapshots").mkdir()  # where it was mounted
  check_refused(place, capsys, argv, "has trained", "is missing or empty")


@pytest.mark.parametrize("argv", GOING_ON)
def test_store_of_another_version_is_refused(run_dir, capsys, place, argv):
  path = run_dir / "snapshots" / "plan"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
  check_refused(place, capsys, argv, "the store at", "format 1", "--workdir")


@pytest.mark.parametrize(
  "broken",
  ['{"event": "mer', '["merged"]', '{"event": "merged", "version": 3}'],
)
def test_broken_line_of_the_tape_is_named_and_stops_no_summary(
  run_dir, capsys, place, broken
):
  path = run_dir / "tape" / "syncer-0001.jsonl"
  path.parent.mkdir()
  whole = '{"event": "lease_acquired", "token": %d}\n'
  path.write_text(whole % 1 + broken + "\n" + whole % 2)
  told = f"{path.relative_to(place)}, line 2"
  argv = ["explain", "run", "--fragment=0", "--version=1"]
  check_refused(place, capsys, argv, told)
  check_refused(place, capsys, ["replay", "run"], told)
  for command in ("status", "report"):
    assert cli.main([command, "run", "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert told in problem


def test_damaged_fragment_plan_is_one_line(run_dir, capsys):
  (run_dir / "snapshots" / "plan").write_bytes(b"\0")
  assert cli.main(train()) == 1
  out, err = capsys.readouterr()
  assert out == ""
  assert len(err.splitlines()) == 1
  assert "fragment plan" in err


@pytest.fixture
def living(run_dir):
  """A run whose controller lives: this process."""
  path = channel.address_path(run_dir)
  path.parent.mkdir()
  facts = {
    "pid": os.getpid(),
    "started_ticks": liveness.start_ticks(os.getpid()),
    "directory": process.directory_id(run_dir),
  }
  path.write_text(json.dumps(facts))
  return run_dir


@pytest.mark.parametrize("argv", GOING_ON)
def test_run_with_a_living_controller_is_left_alone(
  living, capsys, place, argv
):
  check_refused(place, capsys, argv, "controller of this run is alive")


@pytest.mark.parametrize("command", ["train", "resume", "status"])
def test_run_in_whose_store_another_has_signed_in_is_refused(
  run_dir, capsys, place, command
):
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  other = records.Member("standby", 3, 1, "n", run="another", host="far")
  snapshots.write(keys.member_key("standby"), other)
  argv = train() if command == "train" else [command, "run"]
  told = "standby, life 3 on far, has signed in there for another run"
  check_refused(place, capsys, argv, told)


def test_controller_of_the_original_is_not_that_of_a_copy(living, place):
  assert liveness.controller_alive(living)
  assert not liveness.controller_alive(shutil.copytree(living, place / "copy"))


def test_resume_checks_the_data_again(run_dir, capsys, place):
  for path in (place / "data").iterdir():
    path.unlink()
  check_refused(place, capsys, ["resume", "run"], "no file matches")


@pytest.mark.parametrize("words", [[], ["--quiet"], ["--quiet", "--json"]])
def test_resumed_run_is_as_quiet_as_it_is_asked_to_be(
  run_dir, monkeypatch, words
):
  seen = {}
  monkeypatch.setattr(
    launch, "run", lambda *_, **given: seen.update(given) or 0
  )
  assert cli.main(["resume", str(run_dir), *words]) == 0
  assert seen["quiet"] == ("--quiet" in words)
  assert seen["as_json"] == ("--json" in words)


def test_fields_the_file_leaves_out_can_be_overridden(place, monkeypatch):
  seen = {}

  def take(config, workdir, **_):
    seen.update(config=config_lib.from_mapping(config), workdir=workdir)
    return 0

  monkeypatch.setattr(launch, "run", take)
  argv = train(
    *("sync.grace=0.5", "outer.momentum=0.25", "name=mine", "sync.quorum=2"),
    *("--noconfig.sync.follow", "task.options.mlp=swiglu"),
    *("fleet.slices[1].relative_speed=0.5", "fleet.slices[0].topology=2"),
  )
  assert cli.main(argv) == 0
  config = seen["config"]
  assert seen["workdir"] == pathlib.Path("run")
  assert (config.sync.grace, config.outer.momentum) == ("0.5", 0.25)
  assert (config.name, config.sync.quorum) == ("mine", 2)
  assert not config.sync.follow
  assert config.task.options["mlp"] == "swiglu"


@pytest.mark.parametrize(
  ("words", "tokens"),
  [
    (["--config.total_tokens=1e6"], 10**6),
    (["--config.total_tokens=7B"], 7 * 10**9),
    (["--config.total_tokens", "2.4M"], 2_400_000),
    (["--config.total_tokens=9007199254740993"], 2**53 + 1),
  ],
)
def test_large_numbers_are_written_as_people_do(place, launched, words, tokens):
  assert cli.main([*train(), *words, "--config.task.options.d_model=1e2"]) == 0
  assert launched[0].total_tokens == tokens
  assert launched[0].task.options.d_model == 100


def test_run_goes_on_with_settings_that_may_change(run_dir, launched):
  argv = ["resume", "run", "--config.total_tokens=2.4M"]
  assert cli.main([*argv, "--config.programs.eval_batches=3"]) == 0
  config = config_lib.from_mapping(launched[0])
  assert config_changes.changes(process.read_config(run_dir), config) == {
    "total_tokens": (100_000, 2_400_000),
    "programs.eval_batches": (0, 3),
  }


def test_change_that_changes_nothing_says_so(run_dir, capsys):
  quorum = process.read_config(run_dir).sync.quorum
  for flags in ([], [f"--config.sync.quorum={quorum}"]):
    assert cli.main(["change", str(run_dir), *flags]) == 0
    assert "nothing changes" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flag", "told"),
  [
    ("--config.sync.codec=f32", "config.sync.codec = 'f32'"),
    ("--config.total_tokens=1.5", "--config.total_tokens=1.5"),
    ("--config.totl_tokens=5", "did you mean config.total_tokens?"),
    ("--cutt=3", "--cutt"),
    ("more", "'more'"),
  ],
)
def test_run_does_not_go_on_with_what_may_not_change(
  run_dir, capsys, place, flag, told
):
  check_refused(place, capsys, ["resume", "run", flag], told)


def test_flag_and_value_may_be_two_words(place, launched):
  argv = ["train", "--config", "config.py", "--config.seed", "7"]
  assert cli.main([*argv, "--workdir", "run"]) == 0
  assert launched[0].seed == 7


COMMANDS = {command.name: command for command in table.TABLE}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(place, capsys, name):
  before = tree_of(place)
  with pytest.raises(SystemExit) as stop:  # argparse leaves this way
    cli.main([*name.split(), "--help"])
  out, err = capsys.readouterr()
  assert (stop.value.code, err) == (0, "")
  assert f"diloco {name}" in out
  assert "json" in out
  assert re.search(r"\nexamples:\n  .*diloco ", out)
  assert tree_of(place) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_word(name):
  actions = COMMANDS[name].make_parser()._actions
  assert [a.dest for a in actions if not a.help] == []


@pytest.mark.parametrize(
  ("name", "example"),
  [(c.name, e) for c in table.TABLE for e in c.make_parser().examples],
)
def test_every_example_is_a_command_line(name, example):
  argv = shlex.split(re.sub(r"^.*<\(|\)$| > .*", "", example))
  assert argv.pop(0) == "diloco"
  assert table.find(argv).name.startswith(name)  # or one of its modes
  _, rest = COMMANDS[name].make_parser().parse_known_args(argv[1:])
  files = re.findall(r"[\w/]+\.py\b", example)
  assert [f for f in files if not (ROOT / f).is_file()] == []
  files = files or ["experiments/configs/quickstart.py"]
  config = launch.load_config(ROOT / files[0]) if rest else None
  for argument in rest:  # one of a configuration
    launch.override(config, [argument])


def test_help_of_all_commands_imports_nothing_heavy():
  code = "from diloco.commands import table\n"
  code += "for c in table.TABLE: c.make_parser().format_help()\n"
  loaded = loaded_by(code)
  assert "argparse" in loaded
  heavy = {
    "jax",
    "flax",
    "optax",
    "grain",
    "orbax",
    "matplotlib",
    "tensorstore",
  }
  assert not loaded & heavy


@pytest.mark.parametrize(
  ("typed", "offered"),
  [
    ("st", {"status"}),
    ("status --w", {"--watch"}),
    ("bench ta", {"takeover"}),
    ("simulate --bandw", {"--bandwidth"}),
    (
      "train --config.sync.gr",
      {f"--config.sync.grace{s}=" for s in ("", "_gamma")},
    ),
    ("status ru", set()),  # a file, as ever
  ],
)
def test_bash_completes(tmp_path, capsys, typed, offered):
  assert cli.main(["completion", "bash"]) == 0
  script = tmp_path / "completion"
  script.write_text(capsys.readouterr().out)
  words = typed.split()
  code = f"source {script}; COMP_WORDS=(diloco {typed}); "
  code += f"COMP_CWORD={len(words)}; _diloco; echo ${{COMPREPLY[@]}}"
  told = subprocess.run(
    ["bash", "-c", code], capture_output=True, text=True, check=True
  )
  assert (set(told.stdout.split()), told.stderr) == (offered, "")


def test_version(capsys):
  assert cli.main(["--version"]) == 0
  assert capsys.readouterr().out == f"diloco {diloco.__version__}\n"


@pytest.mark.parametrize(
  ("argv", "code"), [([], 2), (["--help"], 0), (["-h"], 0)]
)
def test_usage_names_every_command(capsys, argv, code):
  assert cli.main(argv) == code
  told, silent = capsys.readouterr()
  if code:
    told, silent = silent, told
  assert silent == ""
  assert told.startswith("usage: diloco COMMAND")
  for command in COMMANDS:
    assert f"\n  {command}" in told


@pytest.mark.parametrize(
  ("module", "argv", "code", "told"),
  [
    ("diloco", [], 2, "usage: diloco"),
    ("diloco.cli", ["report", "nowhere"], 2, "error: "),
    ("diloco.cli", train("sync.qourum=2"), 2, "config.sync.quorum?"),
    (
      "experiments.launch",
      train("sync.qourum=2")[1:],
      2,
      "config.sync.quorum?",
    ),
  ],
)
def test_real_process_refuses_in_the_same_way(place, module, argv, code, told):
  before = tree_of(place)
  result = subprocess.run(
    [sys.executable, "-m", module, *argv],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert (result.returncode, result.stdout) == (code, "")
  assert told in result.stderr
  if argv:
    assert len(result.stderr.splitlines()) == 1
  assert tree_of(place) == before


def test_interrupt_while_the_command_is_imported_is_silent():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  module, _, function = project["scripts"]["diloco"].partition(":")
  code = f"""
import signal
import sys

class Interrupted:
  def find_spec(self, name, *_):
    if name == "diloco.errors":
      try:
        signal.raise_signal(signal.SIGINT)
      except KeyboardInterrupt as error:
        raise ImportError("as NumPy does") from error

# A shell has its jobs in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
from {module} import {function}
sys.exit({function}())
"""
  result = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    check=False,
  )
  assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


def test_interrupt_is_unwound_once_something_is_held(monkeypatch):
  """Else `finally` is not reached if a module is imported then."""
  from diloco import __main__

  both = signal.SIGINT, signal.SIGTERM
  before = [signal.getsignal(number) for number in both]
  monkeypatch.setattr(cli, "main", lambda: 0)
  try:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    __main__.main()
    assert signal.getsignal(signal.SIGINT) is __main__._interrupt
    process.unwind_at_interrupts()
    for number in both:  # one ends a job
      assert signal.getsignal(number) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.unwind_at_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  finally:
    for number, handler in zip(both, before, strict=True):
      signal.signal(number, handler)


def test_reader_that_leaves_early_is_no_error(run_dir, place):
  reader, writer = os.pipe()
  os.close(reader)
  result = subprocess.run(
    [sys.executable, "-m", "diloco.cli", "status", "run", "--json"],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdout=writer,
    stderr=subprocess.PIPE,
    check=False,
  )
  os.close(writer)
  assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
  ("argv", "told"),
  [
    (["report", "run"], "report.html"),
    (["compare", "run", "--html=."], "--html=."),
    (["compare", "run", "--html=data"], "--html=data"),
    (["metrics", "run", "--format=openmetrics", "--out=data"], "data"),
    (["metrics", "run", "--format=openmetrics", "--out=no/x"], "no/x"),
  ],
)
def test_file_that_cannot_be_written_is_one_line(
  run_dir, place, capsys, argv, told
):
  summary.write_summary(run_dir)
  (run_dir / "report.html").mkdir()
  check_refused(place, capsys, argv, told)


def test_answer_is_json_that_any_reader_takes(capsys):
  facts = {"loss": math.nan, "all": [1, (math.inf, 2.5)]}
  arguments.answer(argparse.Namespace(json=True), facts)
  told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
  assert told == {"loss": None, "all": [1, [None, 2.5]]}


def test_config_json_is_what_resume_reads(run_dir):
  content = json.loads((run_dir / "config.json").read_text())
  assert content["format"] == process.FORMAT
  assert process.read_config(run_dir).to_dict() == content["config"]


def test_controller_that_left_its_roles_running_is_one_line(
  monkeypatch, capsys
):
  def train(argv):
    raise errors.DetachedError("the controller failed")

  monkeypatch.setattr(launch, "main", train)
  assert cli.main(["train"]) == process.EXIT_FAILED
  assert capsys.readouterr().err == "error: the controller failed\n"


def test_full_disk_is_told_with_what_to_do(capsys, monkeypatch):
  def train(argv):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(launch, "main", train)
  assert cli.main(["train"]) == process.EXIT_USER_ERROR
  assert capsys.readouterr().err == (
    "error: diloco train: No space left on device; make room on its disk; a"
    " run goes on with 'diloco resume'\n"
  )


def test_help_of_change_names_all_that_may_change():
  told = re.findall(r"--config\.(\w+\.\w+)", COMMANDS["change"].more)
  assert sorted(told) == sorted(config_changes.LIVE)


@pytest.mark.parametrize("field", config_changes.RESUMABLE)
def test_help_and_glossary_tell_what_a_resumed_run_may_change(field):
  assert field in COMMANDS["resume"].more
  glossary = pathlib.Path(diloco.__file__).parents[1] / "docs" / "glossary.md"
  page = glossary.read_text().partition("gone on with may change")[2]
  assert f"`{field}`" in page.partition(". While")[0]
