"""Held-out losses, from a store that fails and from one that lies."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cut_builder import PLAN, CutRun, filled

from diloco import config as config_lib
from diloco import errors, heartbeat, timing, workers
from diloco.islands import (
  evaluation,
  fetching,
  placement,
  runner,
)
from diloco.snapshots import arrays, keys, operations


class Task:
  """Its loss is the sum of all parameters."""

  def eval_loss(self, params, batch):
    return sum(x.sum() for x in params.values()) * len(batch["x"]), jnp.float32(
      len(batch["x"])
    )

  def batches(self, split, *, share, num_shares, seed):
    assert (split, share, num_shares, seed) == ("heldout", 0, 1, 0)
    return Stream()


class Stream:
  num_batches = 3

  def __next__(self):
    return {"x": np.zeros((2, 1), np.float32)}

  def close(self):
    pass


@pytest.fixture
def run(tmp_path):
  made = CutRun(tmp_path)
  made.commit(0, 1, {}, value=2.0)  # tensor "a", of four
  return made


@pytest.fixture
def evaluator(run):
  mesh = placement.Placement((1,), jax.devices()[:1])
  shardings = dict.fromkeys("ab", mesh.replicated())
  trainer = types.SimpleNamespace(
    plan=PLAN,
    placement=mesh,
    swap=types.SimpleNamespace(assemble=lambda tensors: tensors),
    fetcher=lambda store: fetching.Fetcher(store, PLAN, shardings),
    tree=types.SimpleNamespace(eval_fn=jax.jit(Task().eval_loss)),
  )
  waited = []
  made = evaluation.Evaluator(
    Task(),
    trainer,
    run.store,
    heartbeat.Progress(),
    timing.derive(config_lib.ControllerConfig(), 0.0),
    sleep=waited.append,
  )
  made.waited = waited
  return made


def failing(monkeypatch, run, times):
  """The store's next reads of each head fail."""
  failed = collections.Counter()
  right = run.store.read_for_update

  def read(key, kind):
    if key.startswith("heads/") and failed[key] < times:
      failed[key] += 1
      raise OSError("the snapshot store failed: unreachable")
    return right(key, kind)

  monkeypatch.setattr(run.store, "read_for_update", read)


def test_store_that_fails_for_a_moment_costs_an_evaluation_only_time(
  run, evaluator, monkeypatch
):
  failing(monkeypatch, run, times=4)
  result = evaluator.evaluate(evaluator.read(), 2)
  assert result["loss"] == 8.0
  assert (result["version"], result["newest_version"]) == (0, 1)
  assert result["tokens"] == 4
  assert len(evaluator.waited) == 2 * 4


def test_no_row_is_counted_twice(evaluator):
  assert evaluator.evaluate(evaluator.read(), 9)["tokens"] == 6


def test_loss_of_no_token_is_the_tasks_mistake():
  with pytest.raises(errors.UserError, match="eval_loss counted 0 tokens"):
    evaluation.held_out_loss(Task(), 1, lambda _: (np.float32(3), np.int32(0)))


@pytest.mark.parametrize("told", [None, 0, lambda self: 3, np.inf])
def test_num_batches_that_is_no_count_bounds_no_evaluation(
  evaluator, monkeypatch, told
):
  monkeypatch.setattr(Stream, "num_batches", told)
  assert evaluator.evaluate(evaluator.read(), 4)["tokens"] == 8


@pytest.mark.parametrize("count", [0, 2])
def test_held_out_stream_that_ends_is_used_as_far_as_it_goes(
  evaluator, monkeypatch, count
):
  left = [Stream().__next__()] * count

  def draw(self):
    if not left:
      raise StopIteration
    return left.pop()

  monkeypatch.setattr(Stream, "__next__", draw)
  if count:
    assert evaluator.evaluate(evaluator.read(), 9)["tokens"] == 4
  else:
    with pytest.raises(errors.EndedStreamError, match="after 0"):
      evaluator.evaluate(evaluator.read(), 9)


def test_last_batch_that_no_mesh_divides_is_evaluated_whole(
  evaluator, monkeypatch
):
  mesh = placement.Placement((2,), jax.devices()[:2])
  evaluator._learner.placement = mesh
  params = jax.device_put({"a": np.ones(4, np.float32)}, mesh.replicated())
  left = [{"x": np.zeros((rows, 1), np.float32)} for rows in (1, 2)]
  monkeypatch.setattr(Stream, "__next__", lambda self: left.pop())
  found = evaluation.Found(params)
  result = evaluator.evaluate(found, 2)
  assert (result["tokens"], result["loss"]) == (3, 4.0)


def test_values_other_than_those_committed_are_not_evaluated(run, evaluator):
  prefix = f"{run.head(0).payload}/params"
  wrong = filled(PLAN.fragments[0][0], 3.0)
  run.store.arrays.write(prefix, [arrays.Tensor.whole("a", wrong)])
  with pytest.raises(errors.CorruptSnapshotError, match="digest"):
    evaluator.evaluate(evaluator.read(), 2)


def test_lost_head_is_waited_for_and_then_named(run, evaluator):
  run.store.delete(keys.head_key(1))
  with pytest.raises(errors.CorruptSnapshotError, match="fragment 1 is lost"):
    evaluator.evaluate(evaluator.read(), 2)
  assert evaluator.waited


class Unhurried(workers.Threads):
  """Does once what the test has it do."""

  def once(self, name, work):
    self.work = work
    return types.SimpleNamespace(check=lambda: None)


def test_versions_are_read_beside_whoever_wants_them(run, evaluator):
  threads = Unhurried()
  reading = evaluation.Reading(evaluator, threads)
  assert not reading.done
  threads.work()
  assert reading.done
  assert evaluator.evaluate(reading.take(), 2)["loss"] == 8.0


def test_what_nobody_waits_for_any_more_is_not_tried_again(
  run, evaluator, monkeypatch
):
  failing(monkeypatch, run, times=3)
  threads = Unhurried()
  reading = evaluation.Reading(evaluator, threads)
  reading.give_up()
  threads.work()
  assert reading.done and not evaluator.waited
  with pytest.raises(OSError, match="unreachable"):
    reading.take()


@pytest.mark.parametrize(
  "failure", [OSError("no route to it"), errors.CorruptSnapshotError("torn")]
)
def test_island_that_cannot_evaluate_says_so_and_lives(failure):
  sent = []

  def evaluate(**_):
    raise failure

  programs = runner.ProgramRunner(
    types.SimpleNamespace(evaluate=evaluate),
    types.SimpleNamespace(send=sent.append),
  )
  program = {"name": "evaluate", "args": {"target": "global", "num_batches": 1}}
  result = operations.perform(programs._run_program(program), None)
  assert result == {"error": f"{type(failure).__name__}: {failure}"}
