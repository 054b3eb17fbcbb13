import numpy as np
import pytest

from diloco import config as config_lib
from diloco import errors, methods
from diloco.islands import step_log
from diloco.tasks import replicated
from tests.islands import quadratic


def build(method, **fields):
  slices = [{"relative_speed": s} for s in (1.0, 0.5, 0.25)]
  values = {"method": method, "fleet": {"slices": slices}}
  if method == "elastic_data_parallel":
    values |= {"engine": "virtual"}
    values["fleet"]["pace_step_secs"] = 0.1
  for name, value in fields.items():
    group, _, field = name.partition("__")
    values.setdefault(group, {})[field] = value
  return config_lib.from_mapping(values)


@pytest.mark.parametrize("method", methods.METHODS)
def test_what_a_method_says_can_be_said_again(method):
  config = build(method)
  again = config_lib.from_mapping(config.to_dict())
  assert again == config and again.method == method


@pytest.mark.parametrize(
  ("method", "field", "value"),
  [
    ("diloco", "sync__quorum", 2),
    ("diloco", "sync__num_fragments", 4),
    ("diloco", "sync__wait_after", 5),
    ("streaming", "sync__follow", True),
    ("async_local_sgd", "sync__wait_after", 5),
    ("async_local_sgd", "sync__quorum", 3),
    ("data_parallel", "outer__momentum", 0.9),
    ("data_parallel", "outer__learning_rate_by_islands", {"1": 0.5}),
    ("data_parallel", "outer__optimizer", "delayed_nesterov"),
    ("data_parallel", "sync__merge_clip", 0.5),
    ("data_parallel", "sync__down_codec", "int4"),
    ("data_parallel", "fleet__num_islands", 3),
  ],
)
def test_field_that_contradicts_its_method_is_named(method, field, value):
  name = field.replace("__", ".")
  with pytest.raises(errors.UserError) as refused:
    build(method, **{field: value})
  assert f"config.{name} = " in str(refused.value) and method in str(
    refused.value
  )


@pytest.mark.parametrize("method", methods.METHODS)
def test_fleet_that_is_none_is_refused_by_its_name(method):
  with pytest.raises(errors.UserError, match=r"config\.fleet\.slices = 3"):
    build(method, fleet__slices=3)


@pytest.mark.parametrize("method", methods.METHODS)
def test_what_was_another_methods_does_not_contradict(method):
  written = {
    "method": "decoupled",
    "fleet": {"slices": [{}] * 3, "pace_step_secs": 0.1},
    "sync": {"num_fragments": 3, "quorum": 2, "follow": True, "every": 9},
    "engine": "virtual",
  }
  config = config_lib.from_mapping(methods.exchanged(written, method))
  assert config.method == method and config.sync.every == 9
  kept = method in ("decoupled", "streaming", "eager")
  assert config.sync.num_fragments == (3 if kept else 1)
  assert config.sync.follow is (method in ("decoupled", *methods.ONE_JOB))
  assert written["sync"]["quorum"] == 2
  if method != "decoupled":  # what it is given for itself counts
    with pytest.raises(errors.UserError, match=r"config\.sync\.\w+ = "):
      config_lib.from_mapping({**written, "method": method})


def test_method_that_is_none_is_refused():
  with pytest.raises(errors.UserError, match="choose one of decoupled"):
    build("federated")


@pytest.mark.parametrize(
  ("slices", "engine", "why"),
  [
    (1, "virtual", "a single replica"),
    (2, "process", r"config\.engine = 'process' cannot take slices"),
  ],
)
def test_elastic_job_that_cannot_be_is_refused(slices, engine, why):
  values = {
    "method": "elastic_data_parallel",
    "engine": engine,
    "fleet": {"slices": [{}] * slices, "pace_step_secs": 0.1},
  }
  with pytest.raises(errors.UserError, match=why):
    config_lib.from_mapping(values)


@pytest.mark.parametrize("method", methods.ONE_JOB)
def test_one_job_is_on_slices_of_one_topology(method):
  slices = [{"topology": shape} for shape in ("1", "2x2", "1")]
  with pytest.raises(errors.UserError, match="topologies 1, 2x2, and one job"):
    build(method, fleet__slices=slices)


def test_one_job_rounds_nothing_and_paces_itself_by_its_slowest_slice():
  assert build("data_parallel").sync.codec == "f32"
  slices = [{}, {"relative_speed": 0.001}]
  with pytest.raises(errors.UserError, match="1000 s a step and be killed"):
    build("data_parallel", fleet__slices=slices, fleet__pace_step_secs=1.0)


def test_method_leaves_what_is_given():
  config = build("diloco", outer__learning_rate=0.4)
  assert config.outer.learning_rate == 0.4 and config.outer.momentum == 0.9


def test_versions_of_others_count_only_where_they_cost_no_steps():
  alone = [m for m in methods.METHODS if build(m).own_answers]
  assert alone == ["async_local_sgd"]
  one = build("async_local_sgd", fleet__slices=[{}])
  assert not one.own_answers  # there are no others


def test_slower_islands_do_fewer_steps_between_two_publications():
  config = build("async_local_sgd", sync__every=24)
  assert [config.sync_every(m) for m in range(3)] == [24, 12, 6]
  assert build("diloco", sync__every=24).sync_every(2) == 24
  slices = [{}, {"relative_speed": 0.29}]
  config = build("async_local_sgd", sync__every=100, fleet__slices=slices)
  assert config.sync_every(1) == 29  # and 100 * 0.29 is less


def test_one_job_sees_the_rows_of_all_shares():
  task = replicated.Replicated(quadratic.Task(), 3)
  assert task.tokens_per_batch == 30
  joined = task.batches("train", share=0, num_shares=1, seed=0)
  alone = [
    quadratic.Task().batches("train", share=m, num_shares=3, seed=0)
    for m in range(3)
  ]
  for _ in range(2):
    rows = np.concatenate([next(stream)["x"] for stream in alone])
    assert np.array_equal(next(joined)["x"], rows)
  joined.seek(7)
  assert next(joined)["x"].tolist() == [8, 8, 108, 108, 208, 208]
  joined.close()
  assert all(stream.closed for stream in joined._streams)
  fewer = replicated.on(task, [0, 2], lambda step: step)
  assert fewer.tokens_per_batch == 20
  left = fewer.batches("train", share=0, num_shares=1, seed=0)
  assert next(left)["x"].tolist() == [1, 1, 201, 201]


def test_one_job_is_as_slow_as_the_slowest_and_adds_its_gradients():
  config = config_lib.from_mapping(
    {
      "engine": "virtual",
      "method": "data_parallel",
      "fleet": {
        "slices": [{"relative_speed": s} for s in (1.0, 0.5)],
        "pace_step_secs": 0.1,
        "jitter": 0.3,
      },
      "virtual": {"latency_secs": 0.01, "bytes_per_sec": 1000.0},
    }
  )
  pace = step_log.Pace.of(config, 0, config.fleet.slices[0], 25)
  assert pace.step_secs == pytest.approx(0.2 + 0.02 + 0.1)
  drawn = [
    np.random.default_rng([config.seed, m, 5]).standard_normal() for m in (0, 1)
  ]
  slowest = max(0.1 * np.exp(0.3 * drawn[0]), 0.2 * np.exp(0.3 * drawn[1]))
  assert pace.next_secs(5) == pytest.approx(slowest + 0.12)
  alone = step_log.Pace.of(config, 0, config.fleet.slices[0], 25, [0])
  assert alone.step_secs == 0.1  # and adds nothing
