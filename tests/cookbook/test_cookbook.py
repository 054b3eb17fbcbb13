"""The cookbook's snippets, run for real; `docs/cookbook.md` shows the regions.

One run of two island processes on a tiny model serves all tests that need a
run directory.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import diloco
from diloco import config as config_lib
from diloco import hyper, process, run
from diloco.syncer import core, grace, quorum
from diloco.tape import events as tape_events
from diloco.tape import ledger, reader
from diloco.tasks import registry, text

TEXTS = {
  f"{i}.txt": f"file {i}: the quick brown fox jumps over the lazy dog\n" * 60
  for i in range(20)
}


# region task
class Bigram:
  """Predicts a byte from the byte before it, in plain JAX."""

  def __init__(self, options):
    self._batch_size, self._seq_len = 8, 32
    self._corpus = text.load_corpus(options["data_glob"], heldout_fraction=0.2)
    self.tokens_per_batch = self._batch_size * self._seq_len

  def init(self, rng):
    keys = jax.random.split(rng, 2)
    return {
      "embedding": 0.1 * jax.random.normal(keys[0], (256, 32)),
      "output": 0.1 * jax.random.normal(keys[1], (32, 256)),
      "bias": jnp.zeros(256),
    }

  def loss(self, params, batch):
    return jnp.mean(self._nll(params, batch)), {}

  def eval_loss(self, params, batch):
    nll = self._nll(params, batch)
    return jnp.sum(nll), jnp.float32(nll.size)

  def optimizer(self, schedule_steps):
    return optax.adam(optax.cosine_decay_schedule(3e-2, schedule_steps))

  def batches(self, split, *, share, num_shares, seed):
    return text.stream(
      self._corpus.split(split),
      split,
      batch_size=self._batch_size,
      seq_len=self._seq_len,
      share=share,
      num_shares=num_shares,
      seed=seed,
    )

  def is_embedding(self, path):
    return path == "embedding"

  def _nll(self, params, batch):
    tokens = jnp.asarray(batch["tokens"])
    hidden = params["embedding"][tokens[:, :-1]]
    logits = jnp.tanh(hidden) @ params["output"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )


# endregion


def base_config(corpus):
  # region model
  config = ml_collections.ConfigDict()
  config.total_tokens = 30_000
  config.task = dict(
    name="bigram:Bigram", options=dict(data_glob=f"{corpus}/*.txt")
  )
  config.sync = dict(num_fragments=3, every=6)
  config.outer = dict(learning_rate=1.0, momentum=0.5)
  # endregion
  return config


def add_fleet(config):
  # region fleet
  config.fleet = dict(
    slices=(
      dict(kind="v6e", topology="1", relative_speed=1.0),
      dict(kind="v5p", topology="2", relative_speed=0.6),
    ),
    pace_step_secs=0.05,
  )
  # endregion


def add_faults(config):
  # region faults
  config.faults = (
    dict(target="island-1", at_fraction=0.3, kind="sigkill"),
    dict(target="syncer", at_fraction=0.5, kind="sigkill"),
  )
  config.controller = dict(restart_base_secs=0.1)
  # endregion


# region sweep
def get_sweep():
  momentum = hyper.sweep("outer.momentum", [0.0, 0.5])
  return hyper.chain(
    hyper.product(momentum, hyper.sweep("seed", [0])),
    [{"outer.momentum": 0.5, "seed": 1}],
  )


# endregion


def write_corpus(folder):
  folder.mkdir()
  for name, content in TEXTS.items():
    (folder / name).write_text(content)
  return folder


def region(name):
  """The text between two marks of this file, dedented."""
  source = pathlib.Path(__file__).read_text()
  body = re.search(
    rf"^ *# region {name}\n(.*?)^ *# endregion",
    source,
    re.DOTALL | re.MULTILINE,
  )
  assert body is not None, name
  return textwrap.dedent(body[1])


def write_modules(folder):
  """Writes the regions as a user's own files."""
  imports = "import jax\nimport jax.numpy as jnp\nimport optax\n"
  imports += "from diloco.tasks import text\n\n\n"
  (folder / "bigram.py").write_text(imports + region("task"))
  body = region("model") + region("fleet") + region("faults")
  content = "import ml_collections\n\n\ndef get_config(corpus):\n"
  content += textwrap.indent(body + "return config\n", "  ")
  (folder / "experiment.py").write_text(content)
  body = region("model") + "return config\n"
  content = "import ml_collections\nfrom diloco import hyper\n\n\n"
  content += "def get_config(corpus):\n" + textwrap.indent(body, "  ")
  (folder / "sweep.py").write_text(content + "\n\n" + region("sweep"))


@pytest.fixture
def corpus(tmp_path):
  return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A run with an island and the syncer killed, then gone on with."""
  folder = tmp_path_factory.mktemp("cookbook")
  write_modules(folder)
  corpus, workdir = write_corpus(folder / "corpus"), folder / "run"
  config = base_config(corpus)
  add_fleet(config)
  add_faults(config)
  with pytest.MonkeyPatch.context() as patch:
    root = pathlib.Path(diloco.__file__).parent.parent
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(root)]))
    patch.syspath_prepend(folder)
    patch.chdir(folder)
    # region train
    command = [sys.executable, "-m", "diloco.cli", "train", "--quiet"]
    command += [f"--config=experiment.py:{corpus}", f"--workdir={workdir}"]
    subprocess.run(command, check=True)
    # endregion
    # region resume
    config.total_tokens = 40_000
    result = run.train(config, workdir, quiet=True)
    print(result.status, result.summary["final_eval_loss"], result.report)
    # endregion
    assert result.status == "finished"
  sys.modules.pop("bigram", None)
  return workdir


def test_own_model_is_a_task(corpus, monkeypatch):
  module = types.ModuleType("bigram")
  vars(module)["Bigram"] = Bigram
  monkeypatch.setitem(sys.modules, "bigram", module)
  options = {"data_glob": f"{corpus}/*.txt"}
  task = registry.make_task("bigram:Bigram", options)
  params = task.init(jax.random.key(0))
  stream = task.batches("train", share=0, num_shares=2, seed=0)
  loss, _ = task.loss(params, next(stream))
  stream.close()
  assert abs(float(loss) - np.log(256)) < 0.5


def test_own_text(corpus):
  config = ml_collections.ConfigDict()
  # region text
  config.task = dict(
    name="language_model",
    options=dict(
      data_glob=f"{corpus}/**/*.txt",
      heldout_fraction=0.1,
      d_model=32,
      num_layers=1,
      seq_len=64,
      batch_size=4,
    ),
  )
  # endregion
  typed = config_lib.from_mapping(config)
  task = registry.make_task(typed.task.name, typed.task.options)
  stream = task.batches("train", share=0, num_shares=1, seed=0)
  row = bytes(next(stream)["tokens"][0].astype(np.uint8))
  stream.close()
  assert b"fox" in row


def test_fleet_and_faults_are_valid(corpus):
  config = base_config(corpus)
  add_fleet(config)
  add_faults(config)
  typed = config_lib.from_mapping(config)
  assert typed.fleet.islands == 2
  assert typed.fleet.slices[1].num_devices == 2
  assert [f.target for f in typed.faults] == ["island-1", "syncer"]


def test_run_was_killed_resumed_and_finished(finished):
  summary = json.loads((finished / "summary.json").read_text())
  assert summary["sessions"] == 2
  assert summary["tokens_trained"] >= 40_000
  assert summary["final_eval_loss"] < np.log(256) - 1
  assert summary["tokens_unaccounted"] == 0
  starts = reader.select(
    reader.read(finished).events, {tape_events.RUN_STARTED}
  )
  assert [start["changed"] for start in starts] == [
    {},
    {"total_tokens": [30_000, 40_000]},
  ]
  assert process.read_config(finished).total_tokens == 40_000
  injected = [fault["target"] for fault in summary["faults"]]
  assert {"island-1", "syncer"} <= set(injected)


def test_tape_is_read_in_a_notebook(finished):
  workdir = finished
  # region tape
  record = reader.read(workdir)
  merges = [e for e in record.events if e["event"] == "merged"]
  together = [len({c["island"] for c in m["contributions"]}) for m in merges]
  losses = {
    m: [s["loss"] for s in lines] for m, lines in record.metrics.items()
  }
  print(len(merges), "merges,", sum(together) / len(merges), "islands in each")

  book = ledger.compute(record)
  print(book.tokens())
  # endregion
  assert set(losses) == {0, 1}
  assert max(together) == 2
  assert book.tokens().merged > 0


@pytest.fixture
def place(tmp_path, monkeypatch):
  """A folder with the regions in it, to type commands in."""
  write_modules(tmp_path)
  root = pathlib.Path(diloco.__file__).parent.parent
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
  monkeypatch.chdir(tmp_path)


def test_sweep_is_done_and_compared(place, corpus):
  # region compare
  command = [sys.executable, "-m", "diloco.cli"]
  flags = [f"--sweep=sweep.py:{corpus}", "--workdir=momenta"]
  subprocess.run([*command, "sweep", *flags], check=True)
  command += ["compare", "momenta", "--html=momenta.html", "--json"]
  result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
  without, with_momentum = json.loads(result.stdout)["groups"]
  print(with_momentum["results"]["final_eval_bits_per_token"])
  # endregion
  assert without["fields"] == {"config.outer.momentum": 0.0}
  seeds = [run["seed"] for run in with_momentum["runs"]]
  assert (len(without["runs"]), seeds) == (1, [0, 1])
  for point in ("momentum=0.0,seed=0", "momentum=0.5,seed=1"):
    summary = json.loads(
      pathlib.Path("momenta", point, "summary.json").read_text()
    )
    assert summary["status"] == "finished"
    assert summary["final_eval_loss"] < np.log(256) - 1


def test_result_is_taken_away(finished, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(finished.parent)
  workdir, folder = finished, tmp_path
  # region open
  from diloco.workbench import opened

  trained = opened.Run(workdir)
  print(trained.state, trained.summary["final_eval_loss"])
  print(trained.versions(), trained.cuts())
  params = trained.params()  # nested dicts of numpy arrays
  steps = trained.metrics()  # a pandas table, as is trained.tape("merged")
  print(steps.groupby("island")["loss"].last())
  # endregion
  assert trained.state == "finished"
  assert {name: leaf.shape for name, leaf in params.items()} == {
    "bias": (256,),
    "embedding": (256, 32),
    "output": (32, 256),
  }
  assert set(steps["island"]) == {0, 1}
  # region evaluate
  from diloco.workbench import evaluate, loaded

  found = evaluate.evaluate(loaded.load(trained))
  print(found["sets"]["held_out"]["loss"], "nats per token")
  # endregion
  # An island has other devices, and so other orders of its sums.
  same = trained.summary["final_eval_loss"]
  assert found["sets"]["held_out"]["loss"] == pytest.approx(same, rel=1e-6)
  merged = trained.summary["tokens_merged"]
  assert found["merged_tokens"] == pytest.approx(merged, abs=1)
  config = trained.config
  # region again
  from diloco.workbench import export

  export.export(trained, "safetensors", folder / "bigram.safetensors")
  config.init_from = f"{folder}/bigram.safetensors"
  # endregion
  typed = config_lib.from_mapping(config)
  _, _, given = run.preflight(typed, tmp_path / "next")
  for name, leaf in params.items():
    np.testing.assert_array_equal(given[name], leaf)
  sys.modules.pop("bigram", None)


# region grace
class HalfStepGrace:
  """Waits half a step of the slowest live island, whatever the slack."""

  def grace_secs(self, facts: grace.GraceFacts) -> float:
    return 0.5 * facts.step_secs


# endregion


# region quorum
@dataclasses.dataclass(frozen=True)
class MajorityQuorum(quorum.MinimumQuorum):
  """More than half of the islands, and at least `minimum`."""

  islands: int

  def reached(self, present: int) -> bool:
    return super().reached(present) and 2 * present > self.islands


# endregion


class Contribution:
  """What the core needs to know of a commit record."""

  fragment, base_version, first_step, step, incarnation = 0, 0, 0, 6, 1
  c_steps, norms, epoch, cut = 6, (1.0,), 0, 0

  def __init__(self, island):
    self.island, self.key = island, f"0.{island}.1.6"


def test_policies_decide_when_a_round_closes():
  # region policy
  settings = core.Settings(
    num_fragments=1,
    quorum=MajorityQuorum(minimum=1, islands=3),
    grace=HalfStepGrace(),
    max_staleness=2,
  )
  syncer = core.SyncerCore(settings, heads=[(0, {})])
  syncer.handle(core.Membership({0: 1.0, 1: 1.0, 2: 2.0}), now=0.0)
  syncer.handle(core.Arrived([Contribution(island=0)]), now=0.0)
  syncer.handle(core.Arrived([Contribution(island=1)]), now=3.0)
  print(syncer.next_deadline())  # 4.0: a majority at 3.0, half a step more
  # endregion
  assert syncer.next_deadline() == 4.0
  assert syncer.handle(core.Tick(), now=3.9) == []
  (close,) = syncer.handle(core.Tick(), now=4.0)
  assert isinstance(close, core.Close)
  assert [c.contribution.island for c in close.chosen] == [0, 1]
  assert close.absent == (2,)
