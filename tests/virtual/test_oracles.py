"""Methods in virtual time, against loops of a few lines in plain optax."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco import config as config_lib
from diloco.islands import inner_step
from diloco.report import summary
from diloco.snapshots import keys, records, store
from diloco.tape import events, reader
from diloco.tasks import inner_optimizer, replicated
from diloco.virtual import fleet

M, H, ROUNDS, RATE = 3, 4, 5, 0.05


class Task:
  """Least squares of a two-layer network, on rows that a share determines."""

  tokens_per_batch = 8

  def init(self, rng):
    first, second = jax.random.split(rng)
    return {
      "w": jax.random.normal(first, (4, 6)) / 2,
      "v": jax.random.normal(second, (6, 1)) / 2,
    }

  def loss(self, params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    error = hidden @ params["v"] - batch["y"]
    return jnp.mean(jnp.square(error)), {}

  def eval_loss(self, params, batch):
    return self.loss(params, batch)[0] * 8, jnp.float32(8)

  def optimizer(self, schedule_steps):
    return optax.adamw(RATE)

  def batches(self, split, *, share, num_shares, seed):
    return Rows(share)

  def is_embedding(self, path):
    return False


class Rows:
  def __init__(self, share):
    self.position, self._share = 0, share

  def __next__(self):
    self.position += 1
    rng = np.random.default_rng([self._share, self.position])
    x = rng.standard_normal((8, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1, keepdims=True))}

  def seek(self, position):
    self.position = position

  def close(self):
    pass


class DecayingTask(Task):
  """At a rate that falls to a tenth."""

  def optimizer(self, schedule_steps):
    return optax.adamw(optax.linear_schedule(RATE, RATE / 10, schedule_steps))


class MuonTask(Task):
  """By the project's own Muon, at a rate that stays the same."""

  def optimizer(self, schedule_steps):
    options = inner_optimizer.Options(
      optimizer="muon",
      learning_rate=RATE,
      warmup_steps=0,
      final_lr_fraction=1.0,
      clip_norm=1e6,
    )
    return inner_optimizer.make(options, schedule_steps, self.is_embedding)


def train(
  folder,
  method,
  islands=M,
  steps=H * ROUNDS,
  speeds=None,
  task=None,
  **fields,
):
  """A run of the method; its last global parameters, by leaf."""
  slices = [{"relative_speed": s} for s in speeds or [1.0] * islands]
  config = config_lib.from_mapping(
    {
      "method": method,
      "engine": "virtual",
      "total_tokens": islands * steps * Task.tokens_per_batch,
      "fleet": {"slices": slices, "pace_step_secs": 0.1},
      "programs": {"checkpoint_every_steps": 0, "final_eval_batches": 1},
    }
    | {"sync": {"every": H, "codec": "f32"} | fields.pop("sync", {})}
    | fields
  )
  task = task or Task()
  if config.replicas > 1:
    task = replicated.Replicated(task, config.replicas)
  tree = inner_step.ParamTree(task, config.seed)
  plan = tree.plan(config.sync)
  outcome = fleet.Fleet(config, folder, task, plan, None).run()
  assert outcome.status == "finished"
  found = summary.summarise(folder)
  assert found["tokens_unaccounted"] == 0 and not found["violations"]
  snapshots = store.SnapshotStore((folder / "snapshots").as_uri())
  params = {}
  for fragment, tensors in enumerate(plan.fragments):
    head = snapshots.read(keys.head_key(fragment), records.Head)
    for tensor in tensors:
      name = tensor.name
      params[name] = snapshots.arrays.read(f"{head.payload}/params", name)
  return params


@jax.jit
def value_and_grad(params, batch):
  return jax.value_and_grad(lambda p: Task().loss(p, batch)[0])(params)


@jax.jit
def adamw(params, opt_state, batch, rate=RATE):
  grads = value_and_grad(params, batch)[1]
  updates, opt_state = optax.adamw(rate).update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


def inner_loop(params, opt_state, batches, rate=RATE, losses=None):
  for batch in batches:
    if losses is not None:
      losses.append(value_and_grad(params, batch)[0])
    params, opt_state = adamw(params, opt_state, batch, rate)
  return params, opt_state


def losses_of(folder, island):
  """What an island's steps have told, in order."""
  log = folder / "metrics" / f"island-{island}.jsonl"
  return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def close(found, expected):
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-6)


def test_diloco_is_the_loop_of_its_paper(tmp_path):
  params = Task().init(jax.random.key(0))
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  outer_state = outer.init(params)
  streams = [Rows(m) for m in range(M)]
  states = [optax.adamw(RATE).init(params)] * M
  losses = [[] for _ in range(M)]
  for _ in range(ROUNDS):
    ends = []
    for m in range(M):
      batches = itertools.islice(iter(streams[m].__next__, None), H)
      end, states[m] = inner_loop(params, states[m], batches, losses=losses[m])
      ends.append(end)
    grads = jax.tree.map(lambda a, *e: a - sum(e) / M, params, *ends)
    updates, outer_state = outer.update(grads, outer_state, params)
    params = optax.apply_updates(params, updates)
  close(train(tmp_path, "diloco"), params)
  for m in range(M):
    np.testing.assert_allclose(losses_of(tmp_path, m), losses[m], rtol=2e-4)


def test_eager_updates_are_the_formula_of_their_paper(tmp_path):
  """Every replica has parameters and an outer optimizer of its own."""
  start = Task().init(jax.random.key(0))
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  streams = [Rows(m) for m in range(M)]
  states = [optax.adamw(RATE).init(start)] * M
  replicas, outer_states = [start] * M, [outer.init(start)] * M
  late = [jax.tree.map(jnp.zeros_like, start)] * M  # D of the round before
  means = []
  for _ in range(ROUNDS):
    fresh = []
    for m in range(M):
      batches = itertools.islice(iter(streams[m].__next__, None), H)
      end, states[m] = inner_loop(replicas[m], states[m], batches)
      fresh.append(jax.tree.map(jnp.subtract, replicas[m], end))
    means.append(jax.tree.map(lambda *d: sum(d) / M, *fresh))
    delayed = jax.tree.map(lambda *d: sum(d) / M, *late)
    for m in range(M):
      mixed = jax.tree.map(
        lambda own, mean, old: own / M + mean - old / M,
        fresh[m],
        delayed,
        late[m],
      )
      updates, outer_states[m] = outer.update(mixed, outer_states[m])
      replicas[m] = optax.apply_updates(replicas[m], updates)
    late = fresh
  params, state = start, outer.init(start)
  for mean in means:
    updates, state = outer.update(mean, state)
    params = optax.apply_updates(params, updates)
  found = train(
    tmp_path,
    "eager",
    sync={"num_fragments": 1},
    outer={"learning_rate": 0.7, "momentum": 0.9},
  )
  close(found, params)
  started = [e for e in reader.read(tmp_path).events if e["event"] == "started"]
  assert [e["own_rate"] for e in started] == [0.7] * M


def test_data_parallel_is_one_loop_over_the_joint_batch(tmp_path):
  params = Task().init(jax.random.key(0))
  streams = [Rows(m) for m in range(M)]
  batches = []
  for _ in range(H * ROUNDS):
    rows = [next(stream) for stream in streams]
    batches.append({n: np.concatenate([r[n] for r in rows]) for n in "xy"})
  losses = []
  state = optax.adamw(RATE).init(params)
  params, _ = inner_loop(params, state, batches, losses=losses)
  close(train(tmp_path, "data_parallel"), params)
  np.testing.assert_allclose(losses_of(tmp_path, 0), losses, rtol=2e-4)


def test_elastic_data_parallel_is_one_loop_over_who_is_there(tmp_path):
  deaths = tmp_path / "deaths.csv"
  deaths.write_text(
    "secs,target,repair_secs\n0.55,island-1,0.5\n1.35,island-2,9\n"
    "1.36,island-0,9\n"
  )
  folder = tmp_path / "run"
  found = train(
    folder,
    "elastic_data_parallel",
    steps=16,
    virtual={"trace": f"{deaths}"},
    task=DecayingTask(),
  )
  lives = [
    (line["step"], line["present"])
    for line in reader.stream(folder, only_role="island-0").events
    if line["event"] == events.STARTED
  ]
  assert [present for _, present in lives] == [
    [0, 1, 2],
    [0, 2],
    [0, 1, 2],
    [1],
  ]
  assert lives[1][0] == 6  # a step that is under way counts
  params = Task().init(jax.random.key(0))
  state, streams = optax.adamw(RATE).init(params), [Rows(m) for m in range(M)]
  ends = [step for step, _ in lives[1:]]
  done = rows = 0
  for (_, present), end in zip(lives, [*ends, None], strict=True):
    # Rates are by what is trained, in steps of whoever is there.
    first, rows_before = done, rows
    while done != end and rows < 16 * M:
      scheduled = round(rows_before / len(present)) + done - first
      share = min(1, scheduled / round(16 * M / len(present)))
      rate = RATE * (1 - 0.9 * share)
      found_rows = [next(stream) for stream in streams]
      batch = {
        n: np.concatenate([found_rows[m][n] for m in present]) for n in "xy"
      }
      params, state = inner_loop(params, state, [batch], rate)
      done, rows = done + 1, rows + len(present)
  close(found, params)
  told = summary.summarise(folder)
  assert told["tokens_trained"] == told["tokens_merged"] == rows * 8
  assert told["chip_secs"]["lost"]["slices away"] > 0


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.83, 0.37), (1.0, 1.0, 0.5)])
def test_asynchronous_islands_are_delayed_nesterov_in_order_of_arrival(
  tmp_path, speeds
):
  found = train(tmp_path, "async_local_sgd", len(speeds), speeds=speeds)
  start = params = Task().init(jax.random.key(0))
  momentum = delta = jax.tree.map(jnp.zeros_like, start)
  rate, mu, delay = 0.7, 0.9, 4
  streams = [Rows(m) for m in range(len(speeds))]
  states = [optax.adamw(RATE).init(params)] * len(speeds)
  starts, done = [params] * len(speeds), [0] * len(speeds)
  # Who came when is the run's; what became of it is computed here.
  lines = reader.stream(tmp_path, only_role="syncer").events
  merges = [line for line in lines if line["event"] == events.MERGED]
  arrivals = 0
  for merged in merges:
    for told in merged["contributions"]:  # who come together come in a row
      arrivals += 1
      m, steps = told["island"], told["step"] - done[told["island"]]
      batches = itertools.islice(iter(streams[m].__next__, None), steps)
      end, states[m] = inner_loop(starts[m], states[m], batches)
      grad = jax.tree.map(jnp.subtract, starts[m], end)
      done[m] = told["step"]
      delta = jax.tree.map(jnp.add, delta, grad)
      step = jax.tree.map(lambda g: g / delay, grad)
      if arrivals % delay == 0:
        momentum = jax.tree.map(
          lambda m, d: mu * m + d / delay, momentum, delta
        )
        step = jax.tree.map(lambda s, m: s + mu * m, step, momentum)
        delta = jax.tree.map(jnp.zeros_like, delta)
      params = jax.tree.map(lambda p, s: p - rate * s, params, step)
    for told in merged["contributions"]:
      starts[told["island"]] = params  # each goes on from its own answer
  close(found, params)
  told = summary.summarise(tmp_path)
  assert told["tokens_merged"] == told["tokens_trained"] == sum(done) * 8
  assert arrivals >= ROUNDS * len(speeds) - 3


def muloco(inner, outer, every):
  """MuLoCo with one worker, arXiv 2505.23725, as an optimizer's wrapper."""

  def init(params):
    return inner.init(params), outer.init(params), params, 0

  def update(grads, state, params):
    inner_state, outer_state, start, count = state
    updates, inner_state = inner.update(grads, inner_state, params)
    if (count + 1) % every == 0:
      end = optax.apply_updates(params, updates)
      outer_grad = jax.tree.map(jnp.subtract, start, end)
      step, outer_state = outer.update(outer_grad, outer_state, start)
      start = optax.apply_updates(start, step)
      updates = jax.tree.map(jnp.subtract, start, params)
    return updates, (inner_state, outer_state, start, count + 1)

  return optax.GradientTransformation(init, update)


def jitted(made):
  return optax.GradientTransformation(made.init, jax.jit(made.update))


def test_one_island_is_an_optimizer_around_muon_step_by_step(tmp_path):
  optimizer = muloco(
    jitted(optax.contrib.muon(RATE, weight_decay=0.1, consistent_rms=0.2)),
    optax.sgd(0.7, momentum=0.6, nesterov=True),
    H,
  )
  params = Task().init(jax.random.key(0))
  state, stream, losses = optimizer.init(params), Rows(0), []
  for _ in range(H * ROUNDS):
    batch = next(stream)
    loss, grads = value_and_grad(params, batch)
    losses.append(float(loss))
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  found = train(
    tmp_path,
    "diloco",
    islands=1,
    task=MuonTask(),
    outer={"learning_rate": 0.7, "momentum": 0.6},
  )
  close(found, params)
  np.testing.assert_allclose(losses_of(tmp_path, 0), losses, rtol=2e-4)


@pytest.mark.parametrize("task", [Task(), MuonTask()])
def test_one_island_that_merges_every_step_trains_to_the_same_bits(
  tmp_path, task
):
  """Its outer step of 1 without momentum takes nothing from its own."""
  told = {}
  for name, every in (("merged", 1), ("alone", H * ROUNDS)):
    folder = tmp_path / name
    train(
      folder,
      "decoupled",
      islands=1,
      task=task,
      sync={"every": every, "num_fragments": 1, "overlap_steps": 1},
      outer={"learning_rate": 1.0, "momentum": 0.0},
    )
    told[name] = losses_of(folder, 0)
    merges = reader.stream(folder, only_role="syncer").events
    versions = [e["version"] for e in merges if e["event"] == "merged"]
    assert versions[-1] == H * ROUNDS / every
  assert told["merged"] == told["alone"] and len(told["alone"]) == H * ROUNDS


@pytest.mark.parametrize(
  ("method", "fields"),
  [
    ("decoupled", {"sync": {"num_fragments": 2}}),
    ("streaming", {"sync": {"num_fragments": 2, "overlap_steps": 1}}),
    (
      "eager",
      {
        "sync": {"num_fragments": 2},
        "outer": {"learning_rate": 0.7, "momentum": 0.0},
      },
    ),
    ("async_local_sgd", {"outer": {"momentum": 0.5}}),
    ("diloco", {"outer": {"momentum": 0.0}}),
    ("data_parallel", {}),
  ],
)
def test_every_method_learns_on_unequal_islands(tmp_path, method, fields):
  found = train(tmp_path, method, steps=80, speeds=(1.0, 0.5, 0.3), **fields)
  batch = next(Rows(99))
  before = Task().loss(Task().init(jax.random.key(0)), batch)[0]
  assert Task().loss(found, batch)[0] < 0.5 * before
