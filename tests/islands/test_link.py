"""A loop of one's own on a real island, against steps known by hand."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from diloco import config as config_lib
from diloco import errors, own_file, process, workers
from diloco.islands import island as island_lib
from diloco.islands import link, trial
from diloco.tape import reader
from diloco.tasks import model

CONFIG = config_lib.from_mapping(
  quadratic.config().to_dict() | {"loop": "theirs.py:train"}
)


@jax.jit
def descend(params, velocity, x):
  """A step of gradient descent with momentum 0.5 on the quadratic task."""
  velocity = jax.tree.map(lambda v: 0.5 * v + x, velocity)
  moved = jax.tree.map(
    lambda p, v: p - quadratic.LEARNING_RATE * v, params, velocity
  )
  return moved, velocity


def still(params):
  return {
    "velocity": jax.tree.map(jnp.zeros_like, params),
    "count": np.int32(0),
  }


def train(island, change=lambda params, state: (params, state)):
  """Steps as the task does, counts them, and does what is asked besides."""
  params, state = island.begin(still)
  while True:
    x = jnp.float32(island.step + 1)
    params, velocity = descend(params, state["velocity"], x)
    state = {"velocity": velocity, "count": state["count"] + 1}
    params, state = change(params, state)
    metrics = {"loss": x, "count": state["count"], "grad_norm": x}
    params, state = island.exchange(params, state, metrics)


def drive(
  run_dir, loop, steps=6, incarnation=1, topology="1", close=True, fail=None
):
  """Lives a life of so many steps by a loop; returns its link."""
  hardware = config_lib.SliceConfig(topology=topology)
  spec = island_lib.Spec(
    run_dir, process.store_url(run_dir), 0, incarnation, hardware
  )
  devices = jax.devices()[1:]  # not where arrays are made by default
  island = island_lib.Island(spec, CONFIG, quadratic.Task(), devices)

  def living():
    yield from island.joining()
    yield from island.training(steps, lambda: False)
    if fail is not None:
      raise fail
    assert island.checkpoint(wait=True)["durable"]
    island.close("test")

  made = link.Link(island, living(), CONFIG, 0)
  try:
    made.run(loop)
  except BaseException:
    with contextlib.suppress(AttributeError):  # it may not have joined
      island.close("failed")
    raise
  return made


def held(made):
  params, _ = made._learner.pair
  return quadratic.held(params)


def metrics(run_dir):
  return reader.read(run_dir).metrics[0]


def test_loop_steps_as_the_tasks_own_steps_do(tmp_path):
  made = drive(tmp_path, train, steps=7)
  change, velocity = quadratic.moved(0, 7, momentum=0.5)
  assert held(made) == {"a": change, "b": 1 + change}
  _, state = made._learner.pair
  assert quadratic.held(state["velocity"]) == {"a": velocity, "b": velocity}
  lines = metrics(tmp_path)
  assert [line["step"] for line in lines] == list(range(1, 8))
  assert [line["loss"] for line in lines] == list(range(1, 8))
  assert {line["tokens"] for line in lines} == {quadratic.Task.tokens_per_batch}
  assert lines[2]["task"] == {"count": 3} and lines[2]["grad_norm"] == 3
  published = [
    e["step"] for e in reader.read(tmp_path).events if e["event"] == "submitted"
  ]
  assert len(published) >= 2


def test_next_life_goes_on_with_the_loops_own_state(tmp_path):
  drive(tmp_path, train, steps=5)
  begun = []

  def again(island):
    params, state = island.begin(still)
    begun.append((island.step, int(state["count"])))
    velocity = quadratic.moved(0, 5, momentum=0.5)[1]
    begun.append(quadratic.held(state["velocity"])["a"] == velocity)
    island.exchange(params, state, {"loss": 0.0})

  # Its begin is of the life before: it has done 5 steps.
  drive(tmp_path, again, steps=1, incarnation=2)
  assert begun == [(5, 5), True]


def test_what_comes_from_elsewhere_is_put_in_its_place(tmp_path):
  def elsewhere(params, state):
    fetched = jax.tree.map(np.asarray, (params, state))
    moved = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), params)
    return moved, fetched[1]

  made = drive(
    tmp_path, lambda island: train(island, elsewhere), topology="1x2"
  )
  change, _ = quadratic.moved(0, 6, momentum=0.5)
  assert held(made) == {"a": change, "b": 1 + change}
  for leaf in jax.tree.leaves(made._learner.state):
    assert leaf.sharding.device_set == set(made.mesh.devices.flat)


def test_state_may_begin_as_the_parameters(tmp_path):
  def loop(island):
    params, state = island.begin(lambda params: (params, params))
    double = jax.jit(
      lambda *trees: jax.tree.map(lambda x: 2 * x, trees), donate_argnums=(0, 1)
    )
    while True:
      params, state = island.exchange(*double(params, state), {"loss": 0.0})

  made = drive(tmp_path, loop, steps=2)
  assert held(made)["b"] == 4
  assert quadratic.held(made._learner.pair[1][1])["b"] == 4


def changed(change):
  return lambda island: train(island, change)


def used_up(params, state):
  for leaf in jax.tree.leaves(params):
    leaf.delete()
  return params, state


def return_early(island):
  params, state = island.begin()
  island.exchange(params, state, {"loss": 1.0})


def raise_later(params, state):
  if state["count"] == 3:
    return params["no such leaf"], state
  return params, state


MISTAKES = {
  "of shape": (
    changed(lambda p, s: (p | {"a": jnp.zeros((3,))}, s)),
    "after step 0: it raised ValueError: exchange was given float32[3] for the"
    " float32[2] at 'a' in params: keep every shape",
  ),
  "of dtype": (
    changed(lambda p, s: (jax.tree.map(lambda x: x.astype("bfloat16"), p), s)),
    "bfloat16[2] for the float32[2] at 'a' in params",
  ),
  "of name": (
    changed(lambda p, s: ({"a": p["a"]}, s)),
    "nothing for the float32[3] at 'b' in params",
  ),
  "of form": (
    changed(lambda p, s: (tuple(p.values()), s)),
    "float32[2] for the nothing at '0' in params",
  ),
  "in the state": (
    changed(lambda p, s: (p, s | {"more": jnp.zeros(())})),
    "float32[] for the nothing at 'more' in state",
  ),
  "used up": (changed(used_up), "params that a step has used up"),
  "not finite": (
    changed(lambda p, s: (p | {"a": p["a"] * jnp.nan}, s)),
    "after step 0: it raised ValueError: the first step makes 'a' not finite",
  ),
  "later": (
    changed(raise_later),
    "after step 2: it raised KeyError: 'no such leaf' (test_link.py:",
  ),
  "returned": (return_early, "after step 1: it returned, and the run goes on"),
  "not begun": (
    lambda island: island.exchange({}, (), {"loss": 0.0}),
    "exchange was called before begin",
  ),
  "begun twice": (
    lambda island: (island.begin(), island.begin()),
    "begin was called twice",
  ),
  "text in the state": (
    lambda island: island.begin(lambda params: {"name": "adam"}),
    "it raised TypeError: ",
  ),
  "key in the state": (
    lambda island: island.begin(lambda params: jax.random.key(0)),
    "keep jax.random.key_data",
  ),
  "no loss": (
    lambda island: island.exchange(*island.begin(), {"los": 0.0}),
    "metrics as a dict with the step's 'loss'",
  ),
  "loss of a vector": (
    lambda island: island.exchange(*island.begin(), {"loss": jnp.ones(3)}),
    "the metric 'loss' has shape (3,)",
  ),
  **{
    f"metric that is {value!r}": (
      lambda island, value=value: island.exchange(
        *island.begin(), {"loss": 0.0, "norm": value}
      ),
      f"the metric 'norm' is a {type(value).__name__}, and must be a number",
    )
    for value in ("1", None, 1j, {"a": 1.0}, np.complex64(1))
  },
  "exit": (lambda island: exit(3), "it raised SystemExit: 3"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistake_is_told_as_the_loops_own(what, tmp_path):
  loop, told = MISTAKES[what]
  with pytest.raises(errors.UserError) as caught:
    drive(tmp_path, loop)
  text = str(caught.value)
  assert text.startswith("config.loop = 'theirs.py:train', after step ")
  assert told in text and "\n" not in text
  assert "(test_link.py:" in text or what == "returned"


def test_what_is_not_finite_later_is_the_runs_to_mend(tmp_path):
  def poisoned(params, state):
    bad = params["a"] * jnp.nan
    return (params | {"a": bad} if state["count"] == 2 else params), state

  made = drive(tmp_path, changed(poisoned), steps=3)
  assert made.step == 3 and np.isnan(made._learner.params["a"]).all()


def swallow(kind):
  def loop(island):
    with contextlib.suppress(kind):
      train(island)

  return loop


@pytest.mark.parametrize("kind", [Exception, BaseException])
def test_loop_that_handles_everything_ends_in_order(kind, tmp_path):
  made = drive(tmp_path, swallow(kind), steps=3)
  assert made.step == 3
  with pytest.raises(link.Stopped):
    made.exchange(*made._learner.pair, {"loss": 0.0})


def test_loop_ends_with_its_own_end(tmp_path):
  told = []

  def loop(island):
    try:
      train(island)
    finally:
      told.append(island.step)

  drive(tmp_path, loop, steps=2)
  assert told == [2]


@pytest.mark.parametrize(
  "failure", [workers.WorkerError("the adopter has ended"), workers.Ended()]
)
@pytest.mark.parametrize("loop", [train, swallow(BaseException)])
def test_failure_of_the_island_is_not_told_as_the_loops(
  failure, loop, tmp_path
):
  with pytest.raises(type(failure)) as caught:
    drive(tmp_path, loop, fail=failure)
  assert caught.value is failure


LOADS = {
  "no_such_file.py:train": "there is no such file",
  "theirs.py:trian": "did you mean 'train'?",
  "theirs.py:zzz": "known are train, both",
  "theirs.py": "it names no function",
  "train": "it names no function",
  "theirs.py:": "has no function ''",
  "theirs.py:both": "it cannot be called with the island alone (missing a",
  "theirs.py:steps": "its steps begin only when somebody goes through them",
  "theirs.py:later": "its steps begin only when somebody goes through them",
  "broken.py:train": "ZeroDivisionError: division by zero (line 2)",
  "no_such_module:train": "there is no module 'no_such_module'",
  "json:NOTHING": "'json' has no function 'NOTHING'",
}


@pytest.fixture
def theirs(tmp_path, monkeypatch):
  (tmp_path / "theirs.py").write_text(
    "def train(island):\n  pass\n\n\ndef both(island, data):\n  pass\n"
    "def steps(island):\n  yield\nasync def later(island):\n  pass\n"
  )
  (tmp_path / "broken.py").write_text("import math\n1 / 0\n")
  monkeypatch.chdir(tmp_path)
  return tmp_path


def test_file_that_is_not_where_a_command_is_given_is_told_so(theirs):
  with pytest.raises(errors.UserError, match=f"no such file in {theirs};"):
    own_file.load("config.loop", "far/theirs.py:train")


@pytest.mark.parametrize("place", LOADS)
def test_what_is_no_loop_is_refused_in_one_line(place, theirs):
  with pytest.raises(errors.UserError) as caught:
    link.load(place)
  assert LOADS[place] in str(caught.value)
  assert str(caught.value).startswith(f"config.loop = {place!r}: ")
  assert "\n" not in str(caught.value)


def test_loop_is_a_file_or_of_a_module(theirs, monkeypatch):
  monkeypatch.syspath_prepend(theirs)
  for place in ("theirs.py:train", "theirs:train"):
    assert link.load(place).__name__ == "train"
  own_file.sys.modules.pop("theirs")


def make_model(**fields):
  return model.Model(
    **{
      "init": lambda key: {"w": jax.random.normal(key, (4,))},
      "eval_loss": lambda params, batch: (
        jnp.sum(jnp.square(batch["x"] @ params["w"])),
        jnp.float32(8),
      ),
      "heldout": lambda i: {"x": np.full((8, 4), i, np.float32)},
      "tokens_per_batch": 8,
      "embeddings": ("w",),
    }
    | fields
  )


def of_one_fragment():
  values = CONFIG.to_dict()
  values["sync"]["num_fragments"] = 1
  return config_lib.from_mapping(values)


def test_model_without_steps_is_enough_for_a_loop(theirs):
  tree = trial.check(make_model(), of_one_fragment())
  assert [(t.name, t.merge) for t in tree.tensors()] == [("w", "mean")]


@pytest.mark.parametrize(
  ("fields", "told"),
  [
    ({"tokens_per_batch": 0}, "its tokens_per_batch is 0"),
    ({"tokens_per_batch": 2.5}, "its tokens_per_batch is 2.5"),
    ({"heldout": lambda i: {}[i]}, "batch 1: it raised KeyError: 0 (test_link"),
    ({"eval_loss": lambda params, batch: 0}, "its eval_loss gives no"),
  ],
)
def test_model_that_cannot_work_is_refused(theirs, fields, told):
  with pytest.raises(errors.UserError) as caught:
    trial.check(make_model(**fields), of_one_fragment())
  assert told in str(caught.value)


def test_model_alone_does_no_steps():
  with pytest.raises(ValueError, match="held-out batches alone"):
    make_model().batches("train", share=0, num_shares=1, seed=0)
  config = config_lib.from_mapping(of_one_fragment().to_dict() | {"loop": ""})
  with pytest.raises(errors.UserError, match="has held-out batches alone"):
    trial.check(make_model(), config)


@pytest.mark.parametrize(
  "fields",
  [
    {"engine": "virtual"},
    {"method": "data_parallel", "fleet": {"slices": [{}, {}]}},
  ],
)
def test_run_that_no_loop_can_do_is_refused(fields):
  with pytest.raises(
    errors.UserError, match="a loop of one's own does neither"
  ):
    config_lib.from_mapping(fields | {"loop": "a:b"})


def test_first_step_alone_may_take_as_long_as_a_start(tmp_path):
  allowed = []

  def loop(island):
    def change(params, state):
      allowed.append(island._island.progress.standing[1])
      return params, state

    train(island, change)

  drive(tmp_path, loop, steps=3)
  assert allowed[0] > 0 and allowed[1:] == [0.0, 0.0]
