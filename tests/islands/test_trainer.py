"""A trainer's state after steps, swaps and restarts; values by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic
from quadratic import FRAGMENT, adopt, anchor, held, publish, start_over, step
from quadratic import make_trainer as make

from diloco import errors
from diloco.islands import own, shards, trainer


def values(made):
  return held(made.state.params)


def test_trainer_begins_at_version_zero():
  made = make()
  assert made.step == 0 and values(made) == {"a": 0, "b": 1}
  for name, fragment in FRAGMENT.items():
    assert held(made.swap.anchors[fragment]) == {name: {"a": 0, "b": 1}[name]}
  found = [(t.name, t.merge) for (t,) in made.plan.fragments]
  assert found == [("b", "mean"), ("a", "rda")]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_steps_follow_the_gradient_of_their_own_batch(momentum):
  made = make(quadratic.Task(momentum))
  metrics = step(made, 3)
  change, _ = quadratic.moved(0, 3, momentum)
  assert values(made) == {"a": change, "b": 1 + change}
  assert made.step == 3 and made.state.step == 3
  before, _ = quadratic.moved(0, 2, momentum)
  assert metrics["loss"] == 3 * (2 * before + 3 * (1 + before))


def test_island_trains_its_own_share():
  made = make(island=1, islands=2)
  step(made)
  assert values(made)["a"] == -0.5 * 101


def test_compiling_takes_no_batch_and_no_step():
  made = make(adoption="carry")
  made.compile()
  assert made.step == 0 and values(made) == {"a": 0, "b": 1}
  step(made)
  assert values(made)["a"] == -0.5


def test_publication_is_of_that_very_step():
  made = make()
  step(made, 2)
  outer_grad = publish(made, "a")
  step(made, 2)
  assert held(outer_grad) == {"a": -quadratic.moved(0, 2)[0]}


ADOPTED = {
  # Published after step 2 with -1.5; after step 4 it has -5; the version is 10.
  "overwrite": 10.0,
  "blend": 0.25 * -5 + 0.75 * 10,
  "carry": -5 + (10 - -1.5),
}


@pytest.mark.parametrize("way", ADOPTED)
def test_version_is_adopted_in_the_runs_way(way):
  made = make(adoption=way, blend_alpha=0.25)
  step(made, 2)
  publish(made, "a")
  step(made, 2)
  adopt(made, "a", 10.0, 2)
  assert values(made) == {"a": ADOPTED[way], "b": -4}
  assert held(made.swap.anchors[FRAGMENT["a"]]) == {"a": 10}
  assert held(made.swap.anchors[FRAGMENT["b"]]) == {"b": 1}
  step(made)  # it trains on from there
  assert values(made) == {"a": ADOPTED[way] - 2.5, "b": -6.5}


@pytest.mark.parametrize("first", [3, 6])
def test_who_starts_over_takes_the_version_and_counts_from_there(first):
  made = make(adoption="carry")
  step(made, 3)
  start_over(made, "a", 10.0, first)
  assert values(made)["a"] == 10
  step(made)  # x is 4
  adopt(made, "a", 20.0, first)
  # What it learned since: 8 - 10.
  assert values(made)["a"] == 18


def test_who_starts_over_from_the_anchor_gives_up_what_was_learned_since():
  made = make(adoption="carry")
  adopt(made, "a", 10.0)
  step(made, 2)
  publish(made, "a")
  start_over(made, "a", 10.0, 2)
  assert values(made) == {"a": 10, "b": -0.5}
  assert held(made.snapshot().progress.references)["a"] == 10
  step(made)
  adopt(made, "a", 0.0, 2)
  assert values(made)["a"] == -1.5


def test_snapshot_is_of_its_step_whatever_comes_after():
  made = make(quadratic.Task(0.5))
  step(made, 2)
  publish(made, "b")
  step(made)
  change, velocity = quadratic.moved(0, 3, 0.5)
  taken = made.snapshot()
  step(made, 2)
  adopt(made, "b", 9.0)
  assert taken.step == 3
  assert held(taken.progress.params) == {"a": change, "b": 1 + change}
  # Last published of b, and where a began.
  published, _ = quadratic.moved(0, 2, 0.5)
  assert held(taken.progress.references) == {"a": 0, "b": 1 + published}
  moments = [x for x in jax.tree.leaves(taken.opt_state) if x.ndim]
  assert {float(x[0]) for x in moments} == {velocity}
  assert held(made.snapshot().progress.references)["b"] == 9


@pytest.mark.parametrize("on_host", [True, False])
def test_life_goes_on_from_versions_and_what_was_not_published(
  on_host, monkeypatch
):
  kind = "device" if on_host else "pinned_host"
  monkeypatch.setattr(
    shards, "in_host_memory", lambda x: x.with_memory_kind(kind)
  )
  before = make(quadratic.Task(0.5))
  step(before, 2)
  publish(before, "a")
  step(before, 2)
  saved = before.snapshot()
  made = make(quadratic.Task(0.5), adoption="carry")
  anchors = [anchor(t.name, 10.0) for (t,) in made.plan.fragments]
  made.resume(
    4,
    anchors,
    [2, 2],
    opt_state=saved.opt_state,
    saved=saved.progress,
    carried=[FRAGMENT["a"]],
  )
  learned = quadratic.moved(0, 4, 0.5)[0] - quadratic.moved(0, 2, 0.5)[0]
  assert made.step == 4 and made.state.step == 4
  assert values(made) == {"a": 10 + learned, "b": 10}
  assert held(made.snapshot().progress.references) == {"a": 10, "b": 10}
  step(made)  # with the fifth batch, and the momentum of the fourth
  change, _ = quadratic.moved(4, 5, 0.5, quadratic.moved(0, 4, 0.5)[1])
  assert values(made) == {"a": 10 + learned + change, "b": 10 + change}
  adopt(made, "a", 0.0, 2)
  assert values(made)["a"] == learned + change


def test_given_optimizer_state_is_copied_and_another_is_left_as_it_is():
  donor = make(quadratic.Task(0.5))
  step(donor, 3)
  state = donor.opt_state_copy()
  made = make(quadratic.Task(0.5))
  anchors = list(made.swap.anchors)
  made.resume(3, anchors, [3, 3], opt_state=state)
  step(made, 2)
  for leaf in jax.tree.leaves(state):
    np.asarray(leaf)  # not given away
  fresh = make(quadratic.Task(0.5))
  fresh.resume(3, anchors, [3, 3])
  step(fresh)
  assert values(fresh)["a"] == -0.5 * 4  # no momentum, the fourth batch


def spoilt(made, shape):
  """Makes the moments of this shape not finite."""
  bad = jax.tree.map(
    lambda x: x * jnp.nan if x.shape == shape else x, made.opt_state
  )
  made.state = made.state._replace(opt_state=bad)


def test_optimizer_is_mended_by_a_healthy_one_or_begins_anew():
  healthy = make(quadratic.Task(0.5))
  step(healthy, 2)
  for spare, expected in ((healthy.opt_state_copy(), 2.5), (None, 0.0)):
    made = make(quadratic.Task(0.5))
    step(made, 3)
    assert made.optimizer_is_finite() and made.mend_optimizer() == 0
    spoilt(made, (2,))
    assert not made.optimizer_is_finite()
    assert made.mend_optimizer(spare) == 1
    assert made.optimizer_is_finite()
    leaves = {
      x.shape: float(x.ravel()[0])
      for x in jax.tree.leaves(made.state.opt_state)
      if x.ndim
    }
    assert leaves == {(2,): expected, (3,): expected}
    step(made)


class Adam(quadratic.Task):
  """By Adam with a long memory, on a schedule."""

  def optimizer(self, schedule_steps):
    return optax.adam(optax.linear_schedule(1.0, 0.0, 100), b2=0.999)


@pytest.mark.parametrize("age", [0, 2])
def test_mended_moments_have_their_own_age_and_the_schedule_goes_on(age):
  healthy, made = make(Adam()), make(Adam())
  step(healthy, 2)
  step(made, 20)
  spoilt(made, (2,))
  assert made.mend_optimizer(healthy.opt_state_copy() if age else None) == 2
  counts = [int(x) for x in jax.tree.leaves(made.opt_state) if not x.ndim]
  assert counts == [age, 20]
  before = values(made)["a"]
  step(made)
  # The first step of Adam is as long as its rate; later ones here are shorter.
  assert before - 0.8001 < values(made)["a"] < before
  assert age or values(made)["a"] == pytest.approx(before - 0.8)


def test_optimizer_that_is_sound_costs_no_second_one(monkeypatch):
  made, begun = make(quadratic.Task(0.5)), []
  anew = made._initial_optimizer
  monkeypatch.setattr(
    made,
    "_initial_optimizer",
    lambda params: (begun.append(1), anew(params))[1],
  )
  assert made.mend_optimizer() == 0 and begun == []
  spoilt(made, (2,))
  assert made.mend_optimizer() == 1 and begun == [1]


def test_spare_that_is_not_finite_either_gives_a_new_one():
  made = make(quadratic.Task(0.5))
  bad = jax.tree.map(lambda x: x * jnp.nan, made.state.opt_state)
  made.state = made.state._replace(opt_state=bad)
  assert made.mend_optimizer(bad) == 2
  assert {float(x.sum()) for x in jax.tree.leaves(made.state.opt_state)} == {0}


def test_state_of_a_loop_that_nobody_can_make_anew_loses_what_is_spoilt():
  made = own.Own(
    quadratic.config(), quadratic.Task(), 0, (1,), jax.devices()[:1]
  )
  state = {"m": jnp.ones(2), "count": jnp.int32(3)}
  made.begin(state)
  spoilt(made, (2,))
  assert made.mend_optimizer() == 1
  assert made.opt_state["m"].tolist() == [0, 0] and made.opt_state["count"] == 3
  spoilt(made, (2,))
  assert made.mend_optimizer(state | {"count": jnp.int32(1)}) == 1
  assert made.opt_state["m"].tolist() == [1, 1] and made.opt_state["count"] == 1


def test_poisoned_fragment_alone_is_not_finite():
  made = make()
  made.swap.poison(made.params, FRAGMENT["b"])
  params = made.state.params
  assert np.isnan(np.asarray(params["b"])).all()
  assert np.isfinite(np.asarray(params["a"])).all()


def test_bare_loop_steps_as_the_trainer_does():
  made, other = make(), make()
  state = made.bare_loop(3, made.state)
  step(other, 3)
  assert state.params["a"][0] == values(other)["a"]


def test_schedule_ends_with_the_islands_share_of_the_tokens():
  task = quadratic.Task()
  config = quadratic.config(islands=2)
  assert (
    trainer.schedule_steps(config, task, 0) == 50
  )  # of 1000 tokens, 10 each


@pytest.mark.parametrize(
  ("batch", "told"),
  [
    (None, "batches: they ended after 2, and a stream never does"),
    (
      {"x": np.ones(2, np.float16)},
      "batch 3: it has float16[2] for the float32[2]",
    ),
    (
      {"x": np.ones(3, np.float32)},
      "batch 3: it has float32[3] for the float32[2]",
    ),
    (
      {"y": np.ones(2, np.float32)},
      "batch 3: it has nothing for the float32[2]",
    ),
  ],
)
def test_stream_that_ends_or_changes_is_told_as_such(monkeypatch, batch, told):
  def draw(self, whole=quadratic.Stream.__next__):
    if self.position < 2:
      return whole(self)
    if batch is None:
      raise StopIteration
    self.position += 1
    return batch

  monkeypatch.setattr(quadratic.Stream, "__next__", draw)
  made = make()
  step(made, 2)
  with pytest.raises(errors.UserError, match=re.escape(told)):
    step(made)


@pytest.mark.parametrize("error", [KeyError("x"), OSError("x")])
def test_stream_that_fails_is_the_users_unless_a_machine_does(
  monkeypatch, error
):
  made = make()

  def fail(*_):
    raise error

  for name in ("__next__", "seek"):
    monkeypatch.setattr(quadratic.Stream, name, fail)
  made._stream.position = 2
  for told, do in (
    ("batch 3: it raised KeyError", made.take_batch),
    ("seek(2) of the task's batches: it raised", lambda: made._seek(2)),
  ):
    with pytest.raises((errors.OwnCodeError, OSError)) as caught:
      do()
    if isinstance(error, OSError):
      assert caught.value is error
    else:
      assert told in str(caught.value)
      assert caught.value.__cause__ is error


def test_optimizer_may_choose_leaves_by_name():
  task = quadratic.Task()
  task.optimizer = lambda steps: optax.multi_transform(
    {"still": optax.set_to_zero(), "moves": optax.sgd(0.5, momentum=0.5)},
    lambda params: {
      name: "moves" if name == "a" else "still" for name in params
    },
  )
  made = make(task)
  step(made, 3)
  assert values(made) == {"a": quadratic.moved(0, 3, 0.5)[0], "b": 1}


def test_closed_trainer_closes_its_stream():
  made = make()
  made.close()
  assert made._stream.closed


class Divided(quadratic.Task):
  """The same, with leaves and moments divided among devices."""

  mesh_axes = ("data", "fsdp")
  batch_axes = ("data", "fsdp")

  def init(self, rng):
    return {"a": jnp.zeros((2, 6)), "b": jnp.ones((3,))}

  def sharding(self, path, shape):
    return (None, "fsdp") if path == "a" else None


def test_task_that_is_divided_its_own_way_learns_the_same():
  made = trainer.Trainer(
    quadratic.config(), Divided(0.5), 0, (1, 2), jax.devices()
  )
  step(made, 3)
  change, velocity = quadratic.moved(0, 3, 0.5)
  assert values(made) == {"a": change, "b": 1 + change}
  assert made.state.params["a"].sharding.shard_shape((2, 6)) == (2, 3)
  moments = {
    x.shape: x for x in jax.tree.leaves(made.state.opt_state) if x.ndim
  }
  assert moments[2, 6].sharding.shard_shape((2, 6)) == (2, 3)
  assert float(moments[2, 6][0, 0]) == velocity
  outer_grad = made.swap.publish(made.state.params, 0, made.step)
  assert outer_grad["a"].sharding.shard_shape((2, 6)) == (2, 3)
