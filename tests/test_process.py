"""A run's configuration on disk: sealed, copied, and put back."""

import io
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from diloco import config as config_lib
from diloco import config_changes, errors, process

CONFIG = config_lib.from_mapping({"name": "mine", "seed": 3})


@pytest.fixture
def files(tmp_path):
  """config.json and its copy in the store."""
  process.write_config(CONFIG, tmp_path)
  return tmp_path / "config.json", tmp_path / "snapshots" / "config"


def change_seed(path):
  content = json.loads(path.read_text())
  content["config"]["seed"] = 4
  path.write_text(json.dumps(content))


def tear(path):
  path.write_text(path.read_text()[:40])


def lose_checksum(path):
  content = json.loads(path.read_text())
  del content["crc32"]
  path.write_text(json.dumps(content))


def delete(path):
  path.unlink()


def nest(path):
  path.write_text("[" * 100_000)


HARM = [change_seed, tear, lose_checksum, delete, nest]


def test_setting_changed_by_hand_is_refused_by_name(files, tmp_path):
  change_seed(files[0])
  with pytest.raises(errors.UserError) as refused:
    process.read_config(tmp_path)
  assert "config.seed from 3 to 4" in str(refused.value)
  assert "diloco train" in str(refused.value)


def test_change_is_refused_where_no_copy_tells_what_it_is(files, tmp_path):
  change_seed(files[0])
  tear(files[1])
  with pytest.raises(errors.UserError, match="changed by hand or damaged"):
    process.read_config(tmp_path)


def test_layout_of_the_file_is_free(files, tmp_path):
  files[0].write_text(json.dumps(json.loads(files[0].read_text())))
  assert process.read_config(tmp_path) == CONFIG


@pytest.mark.parametrize("harm", HARM)
def test_damaged_copy_harms_nobody(files, tmp_path, harm):
  harm(files[1])
  assert process.read_config(tmp_path) == CONFIG
  assert process.read_config(tmp_path, or_copy=True) == CONFIG


@pytest.mark.parametrize("harm", HARM)
def test_role_reads_the_copy_whatever_became_of_the_file(files, tmp_path, harm):
  harm(files[0])
  assert process.read_config(tmp_path, or_copy=True) == CONFIG


@pytest.mark.parametrize("harm", [tear, lose_checksum, nest])
def test_damaged_file_is_refused_and_the_copy_is_named(files, tmp_path, harm):
  harm(files[0])
  with pytest.raises(errors.UserError, match="delete it, and the copy"):
    process.read_config(tmp_path)


def test_deleted_file_is_read_from_its_copy_and_put_back(files, tmp_path):
  before = files[0].read_text()
  for lost in files:
    lost.unlink()
    assert process.holds_run(tmp_path)
    assert process.read_config(tmp_path) == CONFIG
    process.keep_config(tmp_path)
    assert [path.read_text() for path in files] == [before] * 2


def test_what_was_changed_by_hand_is_not_written_over(files, tmp_path):
  change_seed(files[0])
  changed = files[0].read_text()
  process.keep_config(tmp_path)
  assert files[0].read_text() == changed


@pytest.mark.parametrize("harm", HARM)
def test_without_either_there_is_no_run(files, tmp_path, harm):
  for path in files:
    harm(path)
  process.keep_config(tmp_path)
  for or_copy in (False, True):
    with pytest.raises(errors.UserError):
      process.read_config(tmp_path, or_copy=or_copy)


def custom(run_dir):
  config = config_lib.from_mapping({"task": {"name": "mine:Task"}})
  process.write_config(config, run_dir)
  return config


def test_own_task_of_a_run_begun_here_needs_no_word(tmp_path):
  process.check_task(custom(tmp_path), tmp_path, None)
  (tmp_path / "config.json").unlink()
  process.check_task(process.read_config(tmp_path), tmp_path, None)


def test_task_of_a_copied_run_must_be_named(tmp_path):
  config = custom(tmp_path / "run")
  copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
  with pytest.raises(errors.UserError, match="--task=mine:Task"):
    process.check_task(config, copy, None)
  process.check_task(config, copy, "mine:Task")
  process.check_task(CONFIG, copy, None)  # a task of ours


def test_files_of_a_run_are_their_owners_alone(tmp_path):
  before = os.umask(0o022)
  with process.private_files():
    process.write_config(CONFIG, tmp_path / "run")
  assert os.umask(before) == 0o022
  found = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
  assert len(found) == 4
  assert [path for path in found if path.stat().st_mode & 0o077] == []


LEAVES = [name for name, _ in process.flat(config_lib.RunConfig().to_dict())]


def _begun_without(folder, leaf):
  """A run whose version did not know a field yet."""
  fields = config_lib.from_mapping({}).to_dict()
  group = fields
  *groups, name = leaf.partition("[")[0].split(".")[1:]
  for each in groups:
    group = group[each]
  group.pop(name)
  _begun_with(folder, fields)


def _begun_with(folder, fields):
  content = {"format": process.FORMAT, "config": fields}
  content["crc32"] = process._checksum(fields)
  (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("leaf", LEAVES)
def test_run_begun_before_a_field_came_goes_on_by_its_default(tmp_path, leaf):
  _begun_without(tmp_path, leaf)
  old, new = process.read_config(tmp_path), config_lib.from_mapping({})
  if leaf != "config.outer.count_absent":
    assert old == new
    return
  assert (old.outer.count_absent, new.outer.count_absent) == (False, True)
  with pytest.raises(errors.UserError, match="go on by 'diloco resume'"):
    config_changes.check_resumable(old, new)
  config_changes.check_resumable(old, old)


def test_run_begun_with_a_field_that_is_gone_goes_on_if_it_was_off(tmp_path):
  fields = config_lib.from_mapping({}).to_dict()
  fields["sync"]["merge_align"] = False
  _begun_with(tmp_path, fields)
  assert process.read_config(tmp_path) == config_lib.from_mapping({})
  fields["sync"]["merge_align"] = True
  _begun_with(tmp_path, fields)
  with pytest.raises(errors.UserError, match=r"sync\.merge_align: there is"):
    process.read_config(tmp_path)


@pytest.mark.parametrize(
  ("engine", "method", "kept"),
  [
    ("process", "decoupled", {}),
    ("virtual", "data_parallel", {"latency_secs": 0.1, "bytes_per_sec": 0.3}),
    (
      *("virtual", "elastic_data_parallel"),
      {"latency_secs": 0.1, "bytes_per_sec": 0.3, "reconfigure_secs": 0.2},
    ),
  ],
)
def test_run_begun_with_what_nothing_came_of_can_be_read(
  tmp_path, engine, method, kept
):
  fleet = {"slices": [{}, {}], "pace_step_secs": 0.1}
  fields = config_lib.from_mapping(
    {"engine": engine, "method": method, "fleet": fleet}
  ).to_dict()
  links = {"latency_secs": 0.1, "bytes_per_sec": 0.3, "reconfigure_secs": 0.2}
  fields["virtual"] |= links | {"repair_secs": 7.0}
  _begun_with(tmp_path, fields)
  found = process.read_config(tmp_path).virtual
  assert found == config_lib.VirtualConfig(**kept, repair_secs=7.0)


def caused(cause, error=None):
  """An error that was raised from another, by default of user's code."""
  error = error or errors.OwnCodeError("batch 7", "it raised", "correct it")
  error.__cause__ = cause
  return error


@pytest.mark.parametrize(
  ("error", "code"),
  [
    (errors.EndedStreamError("a", "b", "c"), process.EXIT_NO_DATA),
    (caused(KeyError("x")), process.EXIT_MISTAKE),
    (caused(RuntimeError("x")), process.EXIT_MISTAKE),
    (caused(None), process.EXIT_MISTAKE),  # a loop that returned
    (caused(OSError("x")), process.EXIT_USER_ERROR),
    (caused(MemoryError()), process.EXIT_USER_ERROR),
    (caused(NotImplementedError()), process.EXIT_USER_ERROR),
    (
      caused(caused(OSError("y"), ValueError("x"))),
      process.EXIT_USER_ERROR,
    ),
    (errors.UserError("a", "b", "c"), process.EXIT_USER_ERROR),
    (ValueError("x"), process.EXIT_FAILED),
    (OSError("x"), process.EXIT_FAILED),
  ],
)
def test_exit_code_tells_a_mistake_of_the_users_from_a_machines(error, code):
  log = io.StringIO()
  assert process.end_with(error, log) == code
  assert log.getvalue().splitlines()[-1].startswith("error: ")


def test_what_a_callback_raises_is_told_by_its_own_words():
  def fail(x):
    raise ValueError(f"not\nfor {x}")

  made = jax.jit(
    lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)
  )
  with pytest.raises(RuntimeError) as caught:
    jax.block_until_ready(made(jnp.float32(2)))
  log = io.StringIO()
  process.end_with(caught.value, log)
  last = log.getvalue().splitlines()[-1]
  assert last.startswith("error: JaxRuntimeError: ") and "for 2.0 (" in last


# A step whose temporaries are more than a thread's own arena has room for.
_FAULTS = """
import resource
from diloco import process
process.keep_memory()
import jax
import jax.numpy as jnp
from diloco.tasks import language_model

model = language_model.LanguageModel(
  language_model.LanguageModelConfig(num_layers=2, batch_size=16)
)
params = model.init(jax.random.key(0))
batch = {"tokens": jnp.zeros((16, 129), jnp.int32)}
program = jax.jit(jax.grad(model.loss, has_aux=True)).lower(params, batch)
program = program.compile()
assert program.memory_analysis().temp_size_in_bytes > 64 << 20

def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  jax.block_until_ready(program(params, batch))
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min([faults() for _ in range(6)][1:]))
"""


def test_temporaries_of_a_step_are_not_given_back_to_the_system():
  told = subprocess.run(
    [sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True
  )
  assert int(told.stdout) < 1000  # of more than 16,384 pages
