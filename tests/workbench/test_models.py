"""Parameters put to use: they write text, and are evaluated."""

import importlib
import json
import re
import sys

import jax
import numpy as np
import pytest

from diloco import cli, errors, process
from diloco import config as config_lib
from diloco.fragments import partition
from diloco.islands import bootstrap, inner_step
from diloco.snapshots import keys, records, store
from diloco.tasks import language_model, registry
from diloco.workbench import models, opened

# Its likeliest next byte is `step` further; the loss of a batch is known.
COUNTING = """
import jax
import jax.numpy as jnp
import numpy as np


class Stream:
  def __init__(self, value):
    self.value, self.position = value, 0

  def __next__(self):
    self.position += 1
    return {"x": np.full((2,), self.value * self.position, np.float32)}

  def close(self):
    pass


class Task:
  tokens_per_batch = 10
  context = 4
  heldout_sets = ("far",)

  def __init__(self, options):
    pass

  def init(self, rng):
    return {"step": jnp.ones((1,)), "rest": jnp.zeros((2, 3))}

  def logits(self, params, tokens):
    assert tokens.shape == (1, self.context)
    wanted = tokens + params["step"][0].astype(int)
    return 50.0 * jax.nn.one_hot(wanted, 256)

  def eval_loss(self, params, batch):
    return params["step"][0] * jnp.sum(batch["x"]), jnp.float32(2)

  def batches(self, split, *, share, num_shares, seed):
    assert (share, num_shares, seed) == (0, 1, 0)
    return Stream({"heldout": 1.0, "far": 10.0}[split])

  def is_embedding(self, path):
    return False

  loss = optimizer = None


class Silent(Task):
  @property
  def context(self):
    raise AttributeError
"""


def begin(run_dir, task, params=None):
  """A run of this task whose version 0 is its initial parameters, or these."""
  values = {"name": "mine", "task": task, "sync": {"num_fragments": 2}}
  config = config_lib.from_mapping(values)
  process.write_config(config, run_dir)
  made = registry.make_task(config.task.name, config.task.options)
  tree = inner_step.ParamTree(made, 0)
  plan = partition.partition(tree.tensors(), 2)
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  snapshots.write_plan(plan)
  initial = tree.flatten(params or made.init(jax.random.key(0)))
  given = {name: np.asarray(leaf) for name, leaf in initial.items()}
  bootstrap.keep_given(snapshots, plan, given)
  for fragment in range(2):
    kept = snapshots.read(keys.initial_key(fragment), records.Initial)
    snapshots.write(keys.head_key(fragment), records.Head(**kept.to_fields()))
  return run_dir


@pytest.fixture
def counting(tmp_path, monkeypatch):
  (tmp_path / "counting.py").write_text(COUNTING)
  monkeypatch.syspath_prepend(tmp_path)
  importlib.invalidate_caches()
  yield begin(tmp_path / "run", {"name": "counting:Task"})
  sys.modules.pop("counting", None)


def test_likeliest_bytes_go_on_beyond_what_the_model_sees(counting, capsys):
  argv = ["sample", str(counting), "--temperature=0", "--tokens=7"]
  assert cli.main([*argv, "--prompt=ab"]) == 0
  assert capsys.readouterr().out == "abcdefghi\n"
  assert cli.main([*argv, "--prompt=abcdef", "--json"]) == 0
  told = json.loads(capsys.readouterr().out)
  assert told == {"versions": [0, 0], "text": "ghijklm"}


def test_sample_ends_where_a_text_ends_and_harms_no_terminal(counting):
  model = models.load(opened.Run(counting))
  # 0xfd to 0xff and then 0, which lies between texts.
  prompt = b"\xfc".decode(errors="surrogateescape")
  told = models.sample(model, prompt, 9, temperature=0.0)
  assert told == "\ufffd" * 3
  assert models.sample(model, "", 3, temperature=0.0) == "\ufffd" * 3
  assert models.shown(b"\x1b[2Ja\tb\n\xc3\xa9") == "\ufffd[2Ja\tb\n\xe9"


def test_same_seed_writes_the_same(counting):
  model = models.load(opened.Run(counting))
  draws = [models.sample(model, "a", 9, 100.0, seed) for seed in (0, 0, 1)]
  assert draws[0] == draws[1] != draws[2]


def test_task_that_writes_no_text_is_refused_in_one_line(tmp_path, counting):
  run = opened.Run(begin(tmp_path / "mute", {"name": "counting:Silent"}))
  with pytest.raises(errors.UserError, match="it writes no text"):
    models.sample(models.load(run), "a")


def test_language_model_writes_its_likeliest_bytes(tmp_path):
  (tmp_path / "corpus").mkdir()
  for i in range(20):
    (tmp_path / "corpus" / f"{i}.txt").write_text("all work and no play " * 20)
  options = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16}
  options |= {"seq_len": 8, "batch_size": 2, "heldout_fraction": 0.2}
  options["data_glob"] = f"{tmp_path}/corpus/*.txt"
  task = language_model.LanguageModel(
    language_model.LanguageModelConfig(**options)
  )
  params = jax.tree.map(lambda x: 3 * x, task.init(jax.random.key(3)))
  run_dir = begin(
    tmp_path / "run", {"name": "language_model", "options": options}, params
  )
  model = models.load(opened.Run(run_dir))
  cold = models.sample(model, "all", 12, 0.0)
  tokens = np.frombuffer(b"all", np.uint8)[None]
  (likeliest,) = np.argmax(jax.jit(task.logits)(params, tokens)[:, -1], axis=-1)
  assert cold.startswith(models.shown(bytes([likeliest])))
  told = models.describe(models.evaluate(model, 2))
  assert re.fullmatch(r"held_out: .* bits a byte, over 32 bytes", told)


def test_every_held_out_set_is_measured_by_name(counting, capsys):
  argv = ["evaluate", str(counting), "--version=0", "--batches=3"]
  assert cli.main([*argv, "--json"]) == 0
  facts = json.loads(capsys.readouterr().out)
  losses = {name: found["loss"] for name, found in facts["sets"].items()}
  assert losses == {"held_out": 2.0, "far": 20.0}  # 2 (1 + 2 + 3) / 6
  assert facts["versions"] == [0, 0] and facts["batches"] == 3
  assert cli.main(argv) == 0
  first, *_ = capsys.readouterr().out.splitlines()
  assert (
    first == "held_out: 2.000000 nats, 2.885390 bits a token, over 6 tokens"
  )
  assert cli.main(["evaluate", str(counting), "--version=3"]) == 2
  assert "there are versions 0" in capsys.readouterr().err


def test_task_that_is_another_by_now_is_refused(counting, tmp_path):
  changed = COUNTING.replace("jnp.zeros((2, 3))", "jnp.zeros((3, 2))")
  # Python tells sources written in one second by their sizes.
  (tmp_path / "counting.py").write_text(changed + "\n")
  sys.modules.pop("counting", None)
  importlib.invalidate_caches()
  with pytest.raises(errors.UserError, match="'rest' is"):
    models.load(opened.Run(counting))


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_run_from_elsewhere_has_no_code_executed(
  counting, tmp_path, capsys, command
):
  counting.rename(tmp_path / "copy")
  assert cli.main([command, str(tmp_path / "copy")]) == 2
  assert "copied or moved here" in capsys.readouterr().err
