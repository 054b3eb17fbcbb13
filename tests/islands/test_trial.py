"""A task that cannot work is refused in one line before anything starts."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco import config as config_lib
from diloco import errors
from diloco.islands import main, step_log, trial
from diloco.islands import trainer as trainer_lib
from diloco.tasks import registry


class Stream:
  """Points on a line, from the position alone."""

  def __init__(self):
    self.position = 0

  def __next__(self):
    x = np.random.default_rng(self.position).normal(size=(4, 1))
    self.position += 1
    return {"x": x.astype(np.float32)}

  def seek(self, position):
    self.position = position

  def close(self):
    pass


class StreamWithoutSeek:
  __next__ = Stream.__next__
  close = Stream.close
  position = 0


class NanStream(Stream):
  """Points of which some are unknown."""

  def __next__(self):
    return {"x": super().__next__()["x"] * [[1], [1], [1], [np.nan]]}


def giving(batch):
  """What makes streams of this one batch."""
  kind = type("Same", (Stream,), {"__next__": lambda self: batch})
  return lambda self, split, **_: kind()


class EndedStream(Stream):
  def __next__(self):
    raise StopIteration


class DeafStream(Stream):
  def seek(self, position):
    del position


def growing(keep, wrap=lambda state: state):
  """An optimizer whose state is not what it was after a step."""
  return optax.GradientTransformation(
    lambda params: wrap(jnp.zeros(2)),
    lambda grads, state, params=None: (grads, keep(state)),
  )


class Task:
  """A line through the origin."""

  tokens_per_batch = 4

  def init(self, rng):
    return {"w": jax.random.normal(rng, (1,)), "b": jnp.zeros(())}

  def loss(self, params, batch):
    error = jnp.square(params["w"] * batch["x"] + params["b"] - 2.0)
    return jnp.mean(error), {"largest": jnp.max(error)}

  def eval_loss(self, params, batch):
    return self.loss(params, batch)[0] * 4, jnp.float32(4)

  def optimizer(self, schedule_steps):
    del schedule_steps
    return optax.sgd(0.1)

  def batches(self, split, *, share, num_shares, seed):
    del split, share, num_shares, seed
    return Stream()

  def is_embedding(self, path):
    del path
    return False


CONFIG = config_lib.from_mapping(
  {
    "total_tokens": 40,
    "task": {"name": "theirs:Task"},
    "sync": {"num_fragments": 1, "every": 1, "overlap_steps": 1},
  }
)


def raises(*_, **__):
  raise KeyError("d_modle")


BROKEN = {
  "init": (raises, ["its init raised KeyError: 'd_modle' (test_trial.py:"]),
  "init in half precision": (
    lambda self, rng: {"w": jnp.zeros((1,), jnp.float16)},
    ["'w'", "float16", "parameters are float32"],
  ),
  "init with nothing in it": (
    lambda self, rng: {"w": jnp.zeros((3, 0)), "b": jnp.zeros(())},
    [
      "the task's parameter 'w'",
      "shape (3, 0)",
      "without elements",
      "leave it out",
    ],
  ),
  "init with one name for two": (
    lambda self, rng: {"a/b": jnp.zeros(2), "a": {"b": jnp.zeros(3)}},
    ["the task's parameter 'a/b'", "another one has this name"],
  ),
  "init with no name": (
    lambda self, rng: jnp.zeros(2),
    ["the task's parameter ''", "no name for a folder", "dict"],
  ),
  "init with a name too long": (
    lambda self, rng: {"ä" * 43: jnp.zeros(2)},
    ["no name for a folder"],
  ),
  "loss of every row beside a metric of its name": (
    lambda self, params, batch: (jnp.zeros(3), {"loss": jnp.zeros(())}),
    ["its 'loss' has shape (3,)"],
  ),
  "loss": (
    lambda self, params, batch: (params["w"] @ jnp.zeros((3, 4)), {}),
    ["its loss raised", "test_trial.py:"],
  ),
  "loss of no pair": (lambda self, params, batch: params["b"], ["no pair"]),
  "loss with a list": (
    lambda self, params, batch: (params["b"], []),
    ["gives a list", "dict of scalars"],
  ),
  "loss of a vector": (
    lambda self, params, batch: (params["w"] * jnp.ones(3), {}),
    ["'loss' has shape (3,)", "sum or average"],
  ),
  "loss with a vector": (
    lambda self, params, batch: (params["b"], {"each": jnp.ones(3)}),
    ["'each' has shape (3,)"],
  ),
  "loss of whole numbers": (
    lambda self, params, batch: (jnp.int32(1), {}),
    ["its 'loss' is int32[], and must be", "float"],
  ),
  "loss with a group": (
    lambda self, params, batch: (params["b"], {"n": {"m": params["b"]}}),
    ["its 'n' is a dict, and must be a scalar"],
  ),
  "loss with a key": (
    lambda self, params, batch: (params["b"], {"n": jax.random.key(0)}),
    ["its 'n' is key<fry>[], and must be a real number"],
  ),
  "eval_loss": (raises, ["its eval_loss raised KeyError"]),
  "eval_loss of one": (
    lambda self, params, batch: (jnp.zeros(()),),
    ["its eval_loss gives no pair", "the sum", "number of tokens"],
  ),
  "eval_loss by name": (
    lambda self, params, batch: {"loss": jnp.zeros(()), "tokens": 4},
    ["its eval_loss gives no pair"],
  ),
  "optimizer": (raises, ["its optimizer", "KeyError"]),
  "optimizer whose state grows": (
    lambda self, steps: growing(lambda x: jnp.append(x, 1.0)),
    ["makes float32[3] of the float32[2] at opt_state"],
  ),
  "optimizer whose state changes its dtype": (
    lambda self, steps: growing(lambda x: x.astype(jnp.bfloat16)),
    ["makes bfloat16[2] of the float32[2]", "every shape and dtype"],
  ),
  "optimizer whose state changes its form": (
    lambda self, steps: growing(lambda x: {"m": x}),
    ["makes nothing of the float32[2] at opt_state"],
  ),
  "optimizer whose state gets more": (
    lambda self, steps: growing(
      lambda x: x | {"n": jnp.zeros(3)}, lambda state: {"m": state}
    ),
    ["makes float32[3] of the nothing at opt_state/n"],
  ),
  "optimizer with a key": (
    lambda self, steps: growing(
      lambda x: x, lambda state: {"rng": jax.random.key(0)}
    ),
    ["optimizer has key<fry>[] at 'rng'", "cannot be saved", "key_data"],
  ),
  "batches of no dict": (
    giving(np.zeros((4, 1))),
    ["its batches give a ndarray", "a dict of numpy arrays"],
  ),
  "batches of a number": (giving({"x": 3}), ["give a int at 'x'"]),
  "batches of words": (
    giving({"x": np.array(["a", "b"])}),
    ["give <U1[2] at 'x'", "numbers"],
  ),
  "batches in groups": (
    giving({"x": {"y": np.zeros(4)}}),
    ["give a dict at 'x'"],
  ),
  "batches that end at once": (
    lambda self, split, **_: EndedStream(),
    ["batches: they ended after 0", ".repeat()"],
  ),
  "batches": (raises, ["its batches raised KeyError"]),
  "batches without seek": (
    lambda self, split, **_: StreamWithoutSeek(),
    ["StreamWithoutSeek", "no seek", "BatchStream"],
  ),
  "batches deaf to seek": (
    lambda self, split, **_: DeafStream(),
    ["another first batch after seek(0)"],
  ),
  "sharding": (
    raises,
    ["its mesh_axes, batch_axes or sharding raised KeyError"],
  ),
  "sharding along no axis of the mesh": (
    lambda self, path, shape: ("fsdp",),
    ["sharding of 'b'", "'fsdp', and the mesh has data, model"],
  ),
  "is_embedding": (raises, ["its is_embedding raised"]),
}


def test_task_that_works_is_tried_and_named():
  tree = trial.check(Task(), CONFIG)
  assert [t.name for t in tree.tensors()] == ["b", "w"]


def test_parameter_may_have_the_name_of_a_group(monkeypatch):
  flat = {"w": (1,), "w/b": ()}
  init = {name: jnp.zeros(shape) for name, shape in flat.items()}
  monkeypatch.setattr(Task, "init", lambda self, rng: init)
  monkeypatch.setattr(
    Task,
    "loss",
    lambda self, params, batch: (
      jnp.mean(params["w"] * batch["x"] + params["w/b"]),
      {},
    ),
  )
  assert trial.check(Task(), CONFIG).shapes == flat


def test_programs_that_are_not_compiled_are_refused():
  with jax.disable_jit(), pytest.raises(errors.UserError, match="disable_jit"):
    trial.check(Task(), CONFIG)


@pytest.mark.parametrize(
  "guard", [jax.transfer_guard, jax.transfer_guard_host_to_device]
)
@pytest.mark.parametrize("how", ["disallow", "disallow_explicit"])
def test_transfers_that_islands_make_may_not_be_disallowed(guard, how):
  with guard(how), pytest.raises(errors.UserError, match=f"guard = '{how}'"):
    trial.check(Task(), CONFIG)
  with guard("log"):
    trial.check(Task(), CONFIG)
  with jax.transfer_guard_device_to_device(how):
    trial.check(Task(), CONFIG)


def test_batch_may_have_gaps(monkeypatch):
  monkeypatch.setattr(Task, "batches", lambda self, split, **_: NanStream())
  trial.check(Task(), CONFIG)


@pytest.mark.parametrize("what", BROKEN)
def test_task_that_cannot_work_is_refused_in_one_line(what, monkeypatch):
  function, told = BROKEN[what]
  monkeypatch.setattr(Task, what.split()[0], function, raising=False)
  with pytest.raises(errors.UserError) as caught:
    trial.check(Task(), CONFIG)
  assert "\n" not in str(caught.value)
  for text in told:
    assert text in str(caught.value)


def with_slices(*topologies):
  slices = [{"topology": topology} for topology in topologies]
  return config_lib.from_mapping(
    CONFIG.to_dict() | {"fleet": {"slices": slices}}
  )


@pytest.mark.parametrize(
  ("topologies", "heldout", "refused"),
  [
    (["2", "4", "1"], 4, ""),
    (["3", "2"], 4, "slices[0].topology = '3': a batch of 4 cannot"),
    (["2", "3"], 4, "slices[1].topology = '3': a batch of 4 cannot"),
    (["2", "4"], 6, "slices[1].topology = '4': a batch of 6 cannot"),
    (["1x3"], 4, ""),  # no axis of the batch
  ],
)
def test_every_slice_can_divide_every_batch(
  monkeypatch, topologies, heldout, refused
):
  made = []

  def batches(self, split, **which):
    size = heldout if split == "heldout" else 4
    made.append((split, which, Stream()))
    made[-1][2].__class__ = type(
      "Sized",
      (Stream,),
      {
        "__next__": lambda stream: {"x": np.zeros((size, 1), np.float32)},
        "close": lambda stream: setattr(stream, "closed", True),
      },
    )
    return made[-1][2]

  monkeypatch.setattr(Task, "batches", batches)
  if not refused:
    trial.check(Task(), with_slices(*topologies))
  else:
    with pytest.raises(errors.UserError) as caught:
      trial.check(Task(), with_slices(*topologies))
    assert refused in str(caught.value)
  # Each island's are asked for, and all are given up.
  train = {"num_shares": len(topologies), "seed": CONFIG.seed}
  assert [which for _, which, _ in made] == [
    *({"share": m, **train} for m in range(len(topologies))),
    {"share": 0, "num_shares": 1, "seed": 0},
  ]
  assert all(stream.closed for *_, stream in made)


def test_batches_of_every_island_are_looked_at(monkeypatch):
  def batches(self, split, *, share, **_):
    return StreamWithoutSeek() if share == 1 else Stream()

  monkeypatch.setattr(Task, "batches", batches)
  trial.check(Task(), with_slices("1"))
  with pytest.raises(errors.UserError, match="no seek"):
    trial.check(Task(), with_slices("1", "1"))


@pytest.mark.parametrize("tokens", [0, -4, 2.5, "4", None])
def test_step_counts_as_a_number_of_tokens(monkeypatch, tokens):
  monkeypatch.setattr(Task, "tokens_per_batch", tokens)
  with pytest.raises(errors.UserError, match="tokens_per_batch is"):
    trial.check(Task(), CONFIG)


def test_factory_that_raises_is_told_as_the_users(tmp_path, monkeypatch):
  text = "def make(options):\n  return options['d_modle']\n"
  (tmp_path / "their_factory.py").write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(errors.UserError) as caught:
    registry.make_task("their_factory:make", {})
  told = "its factory raised KeyError: 'd_modle' (their_factory.py:2)"
  assert told in str(caught.value)


def test_island_that_raises_ends_with_the_users_own_line(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(main.process, "setup_role", lambda *_: None)
  monkeypatch.setattr(main, "_run", raises)
  argv = [f"--run_dir={tmp_path}", "--island=0", "--incarnation=1", "--slice=0"]
  assert main.main(argv) == 1
  lines = capsys.readouterr().err.splitlines()
  assert lines[0].startswith("Traceback")
  assert lines[-1].startswith("error: KeyError: 'd_modle' (test_trial.py:")


class Rated(Task):
  def learning_rate(self, schedule_steps):
    return optax.linear_schedule(1.0, 0.0, schedule_steps)

  def optimizer(self, schedule_steps):
    return optax.sgd(self.learning_rate(schedule_steps))


class Injected(Task):
  def optimizer(self, schedule_steps):
    schedule = optax.linear_schedule(1.0, 0.0, schedule_steps)
    return optax.inject_hyperparams(optax.sgd)(schedule)


class Lines:
  """A metric log in memory."""

  def __init__(self):
    self.lines = []

  def record(self, **fields):
    self.lines.append(fields)


@pytest.mark.parametrize(
  ("task", "rates"),
  [(Task, [None, None]), (Rated, [1.0, 0.9]), (Injected, [1.0, 0.9])],
)
def test_all_scalars_of_a_step_are_logged_once_the_next_is_dispatched(
  task, rates
):
  made = trainer_lib.Trainer(CONFIG, task(), 0, (1,), jax.devices()[:1])
  lines = Lines()
  log = step_log.StepLog(lines, incarnation=1, tokens_per_step=4)
  for step in (1, 2):
    metrics = made.do_step(made.take_batch())
    log.dispatched(step, metrics, time.monotonic())
    assert len(lines.lines) == step - 1
  log.finish()
  made.close()
  assert [line.get("learning_rate") for line in lines.lines] == [
    pytest.approx(r, abs=1e-6) if r is not None else None for r in rates
  ]
  for line in lines.lines:
    rate = line.get("learning_rate", 0.1)
    assert line["update_norm"] == pytest.approx(rate * line["grad_norm"], 1e-5)
    assert line["task"]["largest"] >= line["loss"] > 0
