"""Configurations: every refusal on one line, and lossless round trips."""

import dataclasses
import json
import math

import hypothesis
import ml_collections
import numpy as np
import pytest
from hypothesis import strategies as st

from diloco import config as config_lib
from diloco import config_changes, errors

THREE = [{"topology": "1"}] * 3
DELAYED = {"optimizer": "delayed_nesterov", "momentum": 0.5}

# (values, what is named, the rule, the remedy)
REFUSALS = {
  "evaluator without anything to do": (
    {"programs": {"evaluator": True}},
    "config.programs.evaluator = True",
    "config.programs.eval_every_tokens = 0 leaves only the last evaluation",
    "set eval_every_tokens",
  ),
  **{
    f"evaluator in an engine of one process, {engine}": (
      {
        "engine": engine,
        "fleet": {"pace_step_secs": 0.1},
        "programs": {"evaluator": True, "eval_every_tokens": 1},
      },
      "config.programs.evaluator = True",
      f"config.engine = '{engine}' has one process for all",
      "set config.engine to 'process'",
    )
    for engine in ("inline", "virtual")
  },
  **{
    f"{field} of virtual time in real time": (
      {"virtual": {field: 0.5}},
      f"config.virtual.{field} = 0.5",
      "config.engine = 'process' is no virtual time, and nothing would come",
      "set config.engine to 'virtual', or set it to 0",
    )
    for field in ("latency_secs", "bytes_per_sec", "reconfigure_secs")
  },
  "standstill of a job that is not elastic": (
    {
      "engine": "virtual",
      "fleet": {"pace_step_secs": 0.1},
      "virtual": {"reconfigure_secs": 0.2},
    },
    "config.virtual.reconfigure_secs = 0.2",
    "config.method = 'decoupled' is no elastic job",
    "set config.method to 'elastic_data_parallel', or leave it at 0",
  ),
  "Nesterov that does not look ahead": (
    {"outer": {"optimizer": "nesterov", "nesterov": False}},
    "config.outer.nesterov = False",
    "config.outer.optimizer = 'nesterov' looks ahead",
    "set config.outer.optimizer to 'heavy_ball' or 'sgd'",
  ),
  "clip that shortens all": (
    {"sync": {"merge_clip": 0.1}},
    "config.sync.merge_clip = 0.1",
    "even contributions of one length would be shortened",
    "set it to at least 1, or to 0",
  ),
  "optimizer without its momentum": (
    {"outer": {"optimizer": "ema"}},
    "config.outer.momentum = 0.0",
    "config.outer.optimizer = 'ema' is there for its momentum",
    "set it above 0, or config.outer.optimizer to 'sgd'",
  ),
  "delay that no optimizer takes": (
    {"outer": {"delay": 0}},
    "config.outer.delay = 0",
    "at every so many-th merge",
    "set it to at least 1",
  ),
  "share of a delay that no optimizer takes": (
    {"outer": {"delay_c": 0.5}},
    "config.outer.delay_c = 0.5",
    "it must be from 0 to 0.25",
    "set config.outer.delay_c",
  ),
  "wait beyond the H of a slow island": (
    {
      "fleet": {"slices": [{}, {"relative_speed": 0.1}]},
      "sync": {
        **dict(num_fragments=1, every=24, every_by_speed=True),
        **dict(wait_after=5, wait_secs=9.0),
      },
    },
    "config.sync.wait_after = 5",
    "which the slowest island does after 2 steps",
    "lower config.sync.wait_after or raise config.sync.every",
  ),
  "wait for nothing": (
    {"sync": {"wait_after": 1}},
    "config.sync.wait_after = 1",
    "with config.sync.wait_secs = 0",
    "leave it out",
  ),
  "blend without overlap": (
    {"sync": {"adoption": "blend", "wait_secs": 9.0}},
    "config.sync.adoption = 'blend' without overlap",
    "before they do another step",
    "set config.sync.wait_after",
  ),
  "blend without overlap, by its method": (
    {"method": "streaming", "sync": {"wait_after": 0}},
    "config.sync.adoption = 'blend' without overlap",
    "before they do another step",
    "set config.sync.wait_after",
  ),
  "blend that adopts nothing": (
    {"sync": {"adoption": "blend", "blend_alpha": 1.0}},
    "config.sync.blend_alpha = 1",
    "adopt nothing",
    "set it below 1",
  ),
  "lives of less than a step": (
    {
      "engine": "virtual",
      "fleet": {"pace_step_secs": 0.1, "slices": [{"relative_speed": 0.5}]},
      "virtual": {"mtbi_secs": 0.15},
    },
    "config.virtual.mtbi_secs = 0.15",
    "takes 0.2 s",
    "set it to 0",
  ),
  "momentum over steps of many lengths": (
    {"outer": {"count_absent": True, "momentum": 0.5}},
    "config.outer.count_absent = True",
    "config.outer.momentum = 0.5",
    "leave config.outer.count_absent out",
  ),
  "own outer steps of unknown lengths": (
    {"outer": {"count_absent": True}, "sync": {"adoption": "eager"}},
    "config.outer.count_absent = True",
    "config.sync.adoption = 'eager'",
    "leave config.outer.count_absent out",
  ),
  "delayed momentum over steps of many lengths": (
    {"outer": {"count_absent": True}, "method": "async_local_sgd"},
    "config.outer.count_absent = True",
    "config.outer.momentum = 0.9",
    "leave config.outer.count_absent out",
  ),
  "more trimmed than there is": (
    {"sync": {"merge_trim": 0.6}},
    "config.sync.merge_trim = 0.6",
    "at least 0 and at most 0.5",
    "change config.sync.merge_trim",
  ),
  "weights that vanish": (
    {"sync": {"staleness_decay": 1e-150, "max_staleness": 3}},
    "config.sync.staleness_decay = 1e-150",
    "to the power of config.sync.max_staleness = 3 nothing of it is left",
    "raise staleness_decay or lower max_staleness",
  ),
  "delayed momentum without a buffer": (
    {"outer": {"delay": 0, **DELAYED}},
    "config.outer.delay = 0",
    "moves its momentum at every so many-th merge, so never",
    "set it to at least 1",
  ),
  "delayed momentum with too much of it in between": (
    {"outer": {"delay": 4, "delay_c": 0.3, **DELAYED}},
    "config.outer.delay_c = 0.3",
    "with config.outer.delay = 4 it must be from 0 to 0.25",
    "set config.outer.delay_c to at most 0.25",
  ),
  "delayed momentum with less than none in between": (
    {"outer": {"delay_c": -0.1, **DELAYED}},
    "config.outer.delay_c = -0.1",
    "it must be at least 0",
    "change config.outer.delay_c",
  ),
  "no learning rate for so many islands": (
    {
      "fleet": {"slices": THREE},
      "outer": {"learning_rate_by_islands": {"1": 0.4, "2": 0.6}},
    },
    "config.outer.learning_rate_by_islands['3'] = None",
    "the run has 3 islands",
    "give one for '3', or set config.outer.learning_rate alone",
  ),
  "misspelt group": (
    {"snyc": {}},
    "config.snyc",
    "no such field",
    "did you mean config.sync?",
  ),
  "misspelt field": (
    {"sync": {"qourum": 2}},
    "config.sync.qourum",
    "no such field",
    "did you mean config.sync.quorum?",
  ),
  "misspelt field in a list": (
    {"fleet": {"slices": [{"topolgy": "1"}]}},
    "config.fleet.slices[0].topolgy",
    "no such field",
    "did you mean config.fleet.slices[0].topology?",
  ),
  "unknown field": (
    {"outer": {"zzzzzz": 2}},
    "config.outer.zzzzzz",
    "no such field",
    "config.outer has learning_rate, momentum, nesterov",
  ),
  "name with a line break": (
    {"a\nb": 1},
    r"config.'a\nb'",
    "no such field",
    "config has",
  ),
  "name that is a number": ({3: 1}, "config.3", "no such field", "config has"),
  "group that is a number": (
    {"sync": 3},
    "config.sync = 3",
    "a group of fields",
    "ConfigDict",
  ),
  "slice that is a number": (
    {"fleet": {"slices": (1, 2)}},
    "config.fleet.slices[0] = 1",
    "a group of fields",
    "ConfigDict",
  ),
  "list that is a number": (
    {"fleet": {"slices": 3}},
    "config.fleet.slices = 3",
    "must be a list",
    "change config.fleet.slices",
  ),
  "text for int": (
    {"seed": "1.5"},
    "config.seed = '1.5'",
    "a whole number",
    "change config.seed",
  ),
  "float for int": (
    {"sync": {"every": 24.5}},
    "config.sync.every = 24.5",
    "a whole number",
    "change config.sync.every",
  ),
  "bool for int": (
    {"seed": True},
    "config.seed = True",
    "a whole number",
    "change config.seed",
  ),
  "int for bool": (
    {"sync": {"follow": 1}},
    "config.sync.follow = 1",
    "True or False",
    "change config.sync.follow",
  ),
  "number for text": (
    {"sync": {"grace": 0.5}},
    "config.sync.grace = 0.5",
    "a text",
    "change config.sync.grace",
  ),
  "None for text": ({"name": None}, "config.name = None", "a text", "change"),
  "huge int": (
    {"total_tokens": 10**30},
    "config.total_tokens = 1000",
    "below 2^63",
    "change config.total_tokens",
  ),
  "int too long to print": (
    {"outer": {"momentum": 10**5000}},
    "config.outer.momentum = an integer of 16610 bits",
    "a finite number",
    "change config.outer.momentum",
  ),
  "nan": (
    {"outer": {"learning_rate": math.nan}},
    "config.outer.learning_rate = nan",
    "a finite number",
    "change",
  ),
  "infinity": (
    {"controller": {"start_secs": math.inf}},
    "config.controller.start_secs = inf",
    "a finite number",
    "change",
  ),
  "unknown choice": (
    {"sync": {"adoption": "mix"}},
    "config.sync.adoption = 'mix'",
    "one of overwrite, blend, carry",
    "change config.sync.adoption",
  ),
  "unknown codec": (
    {"sync": {"codec": "int3"}},
    "config.sync.codec = 'int3'",
    "one of f32, bf16, int8, int4, int2",
    "change config.sync.codec",
  ),
  "no tokens": (
    {"total_tokens": 0},
    "config.total_tokens = 0",
    "at least 1",
    "change config.total_tokens",
  ),
  "negative seed": (
    {"seed": -1},
    "config.seed = -1",
    "at least 0 and at most 4294967295",
    "change config.seed",
  ),
  "negative time": (
    {"controller": {"gather_secs": -0.5}},
    "config.controller.gather_secs = -0.5",
    "at least 0",
    "change",
  ),
  "negative back-off": (
    {"controller": {"restart_max_secs": -1}},
    "config.controller.restart_max_secs = -1.0",
    "at least 0",
    "change",
  ),
  "port out of range": (
    {"controller": {"port": 70000}},
    "config.controller.port = 70000",
    "at most 65535",
    "change config.controller.port",
  ),
  "hang before a heartbeat": (
    {"controller": {"hang_secs": 1, "heartbeat_secs": 2}},
    "config.controller.hang_secs = 1.0",
    "config.controller.heartbeat_secs = 2.0",
    "raise hang_secs",
  ),
  "pace slower than a hang": (
    {
      "fleet": {"slices": [{"relative_speed": 0.1}], "pace_step_secs": 7},
    },
    "config.fleet.pace_step_secs = 7.0",
    "70 s a step",
    "raise hang_secs",
  ),
  "quorum above islands": (
    {"fleet": {"slices": THREE}, "sync": {"quorum": 4}},
    "config.sync.quorum = 4",
    "3 islands",
    "at most 3",
  ),
  "quorum above islands without spares": (
    {"fleet": {"slices": THREE, "num_islands": 2}, "sync": {"quorum": 3}},
    "config.sync.quorum = 3",
    "2 islands",
    "at most 2",
  ),
  "P above H": (
    {"sync": {"num_fragments": 9, "every": 8}},
    "config.sync.num_fragments = 9",
    "config.sync.every = 8",
    "at most 8",
  ),
  "overlap as long as H": (
    {"sync": {"num_fragments": 4, "every": 4, "overlap_steps": 4}},
    "config.sync.overlap_steps = 4",
    "config.sync.every = 4",
    "lower config.sync.overlap_steps",
  ),
  "overlap beyond H of one": (
    {"sync": {"num_fragments": 1, "every": 1, "overlap_steps": 2}},
    "config.sync.overlap_steps = 2",
    "config.sync.every = 1",
    "lower config.sync.overlap_steps",
  ),
  "more islands than slices": (
    {"fleet": {"num_islands": 2}},
    "config.fleet.num_islands = 2",
    "1 slices",
    "add slices",
  ),
  "no slices": (
    {"fleet": {"slices": []}},
    "config.fleet.slices = ()",
    "at least one slice",
    "add a slice",
  ),
  "speed of zero": (
    {"fleet": {"slices": [{"relative_speed": 0}]}},
    "config.fleet.slices[0].relative_speed = 0.0",
    "fastest",
    "above 0",
  ),
  "speed above one": (
    {"fleet": {"slices": [{"relative_speed": 1.5}]}},
    "config.fleet.slices[0].relative_speed = 1.5",
    "fastest",
    "at most 1",
  ),
  "fault at an unknown island": (
    {"faults": [{"target": "island-1", "at_fraction": 0.5}]},
    "config.faults[0].target = 'island-1'",
    "the run has island-0, syncer",
    "name one of them",
  ),
  "fault after the end": (
    {"faults": [{"target": "syncer", "at_fraction": 1.5}]},
    "config.faults[0].at_fraction = 1.5",
    "share of the token budget",
    "from 0 to 1",
  ),
  "fault of an unknown kind": (
    {"faults": [{"target": "syncer", "at_fraction": 0, "kind": "sigfoo"}]},
    "config.faults[0].kind = 'sigfoo'",
    "one of sigkill, sigstop, poison",
    "change",
  ),
  "poison for a syncer": (
    {"faults": [{"target": "syncer", "at_fraction": 0, "kind": "poison"}]},
    "config.faults[0].kind = 'poison'",
    "syncer has no values",
    "name an island",
  ),
  "missing required field": (
    {"faults": [{"target": "syncer"}]},
    "config.faults[0]",
    "at_fraction is missing",
    "set config.faults[0].at_fraction",
  ),
  "option that is no JSON": (
    {"task": {"options": {"f": {"g": [object]}}}},
    "config.task.options.f.g[0] = <class 'object'>",
    "finite numbers",
    "change",
  ),
  "option that is not finite": (
    {"task": {"options": {"lr": math.nan}}},
    "config.task.options.lr = nan",
    "finite numbers",
    "change",
  ),
  "option without a name": (
    {"task": {"options": {1: 2}}},
    "config.task.options[1]",
    "names are texts",
    "use a text",
  ),
  **{
    f"numpy's {where}": (
      values,
      f"config.{where} = ",
      "",
      "give Python's own, by .item() or .tolist()",
    )
    for where, values in {
      "total_tokens": {"total_tokens": np.int64(8)},
      "outer.learning_rate": {"outer": {"learning_rate": np.float64(0.5)}},
      "sync.follow": {"sync": {"follow": np.True_}},
      "task.options.width": {"task": {"options": {"width": np.ones(2)}}},
    }.items()
  },
  **{
    f"{field} of __main__": (
      values,
      f"config.{field} = '__main__:make'",
      "__main__ is another module there",
      "FILE.py:NAME",
    )
    for field, values in {
      "task.name": {"task": {"name": "__main__:make"}},
      "loop": {"loop": "__main__:make"},
    }.items()
  },
  **{
    f"topology {topology!r}": (
      {"fleet": {"slices": [{"topology": topology}]}},
      "config.fleet.slices[0].topology = ",
      "one to four axes",
      "'4' or '2x4'",
    )
    for topology in (
      *("", "0", "x", "2x", "x2", "2x0", "1x2x3x4x5", "-1", "2 x 2", "2X2"),
      *("1.5", "²", "9" * 5000, "2\n"),
    )
  },
  **{
    f"grace {grace!r}": (
      {"sync": {"grace": grace}},
      "config.sync.grace = ",
      "'adaptive' or a number of seconds",
      "write 'adaptive'",
    )
    for grace in ("", "soon", "-1", "nan", "inf", "1 s", "1\n2")
  },
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_value_is_refused_on_one_line(name):
  values, what, why, remedy = REFUSALS[name]
  with pytest.raises(errors.UserError) as caught:
    config_lib.from_mapping(values)
  error = caught.value
  assert what in error.what
  assert why in error.why
  assert remedy in error.remedy
  assert len(str(error).splitlines()) == 1
  assert len(str(error)) < 500


def test_nesting_without_end_is_refused():
  options: dict = {}
  options["again"] = options
  with pytest.raises(errors.UserError, match="finite numbers"):
    config_lib.from_mapping({"task": {"options": options}})


@pytest.mark.parametrize("values", [None, 3, "x", [], [("seed", 1)]])
def test_no_mapping_is_refused(values):
  with pytest.raises(errors.UserError, match="group of fields"):
    config_lib.from_mapping(values)


FULL = {
  "name": "full",
  "seed": 7,
  "total_tokens": 123,
  "task": {"name": "x:y", "options": {"a": [1, 2.5, None, {"b": "c"}]}},
  "fleet": {
    "slices": [
      {"kind": "v5p", "topology": "2x4", "relative_speed": 1},
      {"kind": "v6e", "topology": "8", "relative_speed": 0.5},
    ],
    "num_islands": 1,
  },
  "sync": {"grace": "0.25", "num_fragments": 1, "every": 1, "overlap_steps": 1},
  "outer": {"nesterov": False, "momentum": 0},
  "faults": [{"target": "syncer", "at_fraction": 0.5, "kind": "sigstop"}],
}


@pytest.mark.parametrize("values", [{}, FULL])
def test_round_trip_through_json(values):
  config = config_lib.from_mapping(values)
  text = json.dumps(config.to_dict(), allow_nan=False)
  assert config_lib.from_mapping(json.loads(text)) == config


def test_values_arrive():
  config = config_lib.from_mapping(FULL)
  assert config.fleet.slices[0].shape == (2, 4)
  assert config.fleet.slices[0].num_devices == 8
  assert config.fleet.islands == 1
  assert type(config.outer.momentum) is float
  assert config.faults[0].kind == "sigstop"
  assert config.speed_share(0) == 1.0  # the spare has no share


def test_config_dict_equals_plain_mapping():
  values = ml_collections.ConfigDict(FULL)
  assert config_lib.from_mapping(values) == config_lib.from_mapping(FULL)


def test_outer_learning_rate_can_be_given_by_the_number_of_islands():
  rates = {"1": 0.4, "3": 1, "8": 0.8}
  values = {
    "fleet": {"slices": THREE},
    "outer": {"learning_rate": 0.7, "learning_rate_by_islands": rates},
  }
  config = config_lib.from_mapping(ml_collections.ConfigDict(values))
  assert config.outer.learning_rate == 1.0
  # Looked up once: what a run in progress is changed to is not undone.
  assert config.outer.learning_rate_by_islands == {}


def test_dataclasses_are_validated_too():
  bad = config_lib.SliceConfig(topology=3)  # type: ignore[arg-type]
  with pytest.raises(errors.UserError, match="topology = 3"):
    config_lib.from_mapping({"fleet": {"slices": [bad]}})


def test_speed_shares_sum_to_one():
  speeds = [{"relative_speed": s} for s in (1.0, 0.6, 0.4)]
  config = config_lib.from_mapping({"fleet": {"slices": speeds}})
  shares = [config.speed_share(m) for m in range(3)]
  assert shares == pytest.approx([0.5, 0.3, 0.2])


CHANGES = [
  ({"seed": 8}, "seed"),
  ({"name": "other"}, "name"),
  ({"sync": {**FULL["sync"], "codec": "f32"}}, "sync.codec"),
  ({"outer": {"nesterov": True, "momentum": 0}}, "outer.nesterov"),
  ({"task": {"name": "x:y", "options": {}}}, "task.options"),
  ({"fleet": {"slices": FULL["fleet"]["slices"]}}, "fleet.num_islands"),
  ({"fleet": {"num_islands": 1}}, "fleet.slices"),
]


@pytest.mark.parametrize(("change", "field"), CHANGES)
def test_run_cannot_go_on_with_another(change, field):
  old = config_lib.from_mapping(FULL)
  new = config_lib.from_mapping({**FULL, **change})
  with pytest.raises(errors.UserError) as caught:
    config_changes.check_resumable(old, new)
  assert caught.value.what.startswith(f"config.{field} = ")
  assert field in caught.value.remedy
  assert "--workdir" in caught.value.remedy
  assert len(str(caught.value).splitlines()) == 1


RESUMABLE_CHANGES = {
  "total_tokens": 456,
  "programs": {"window_steps": 3},
  "controller": {"port": 1234},
  "faults": [],
  "ray_address": "auto",
}


@pytest.mark.parametrize("field", config_changes.RESUMABLE)
def test_run_goes_on_with_another(field):
  old = config_lib.from_mapping(FULL)
  new = config_lib.from_mapping({**FULL, field: RESUMABLE_CHANGES[field]})
  assert new != old
  config_changes.check_resumable(old, new)
  config_changes.check_resumable(old, old)


def _names(kind):
  fields = [f.name for f in dataclasses.fields(kind)]
  return st.sampled_from([*fields, "", "topolgy", "a\nb"])


GROUPS = (
  *(config_lib.RunConfig, config_lib.TaskConfig, config_lib.FleetConfig),
  *(config_lib.SyncConfig, config_lib.ControllerConfig, config_lib.FaultConfig),
  *(config_lib.OuterConfig, config_lib.ProgramConfig, config_lib.SliceConfig),
)
SCALARS = st.one_of(
  st.none(),
  st.booleans(),
  st.integers(),
  st.sampled_from([10**400, -(10**400), 2**63, 1, 24]),
  st.floats(),
  st.text(max_size=8),
  st.sampled_from(["adaptive", "1", "2x4", "bf16", "f32", "rda", "syncer"]),
  st.binary(max_size=3),
  st.just(object()),
)
JUNK = st.recursive(
  SCALARS,
  lambda inner: st.one_of(
    st.lists(inner, max_size=3),
    st.lists(inner, max_size=3).map(tuple),
    st.dictionaries(SCALARS, inner, max_size=2),
    *(st.dictionaries(_names(k), inner, max_size=3) for k in GROUPS),
  ),
  max_leaves=12,
)


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(st.dictionaries(_names(config_lib.RunConfig), JUNK) | JUNK)
def test_any_junk_builds_or_is_refused(values):
  try:
    config = config_lib.from_mapping(values)
  except errors.UserError as error:
    assert len(str(error).splitlines()) == 1
  else:
    text = json.dumps(config.to_dict(), allow_nan=False)
    assert config_lib.from_mapping(json.loads(text)) == config


@pytest.mark.parametrize(
  ("written", "tokens"),
  [
    (1e6, 10**6),
    ("2.4M", 2_400_000),
    ("7B", 7 * 10**9),
    ("1_000", 1000),
    ("0.5k", 500),
    ("9007199254740993", 2**53 + 1),
  ],
)
def test_whole_numbers_may_be_written_as_people_do(written, tokens):
  made = config_lib.from_mapping({"total_tokens": written})
  assert (made.total_tokens, type(made.total_tokens)) == (tokens, int)


@pytest.mark.parametrize(
  "written", ["", "M", "1.5", "1.2345k", "1e400", "1e99999999", "nan", "7BB"]
)
def test_what_is_no_whole_number_is_refused(written):
  with pytest.raises(errors.UserError, match="whole number"):
    config_lib.from_mapping({"total_tokens": written})


@pytest.mark.parametrize(
  ("fields", "counted"),
  [
    ({}, True),
    ({"outer": {"count_absent": False}}, False),
    ({"outer": {"momentum": 0.9}}, False),
    ({"outer": {"momentum": 0.9, "count_absent": None}}, False),
    ({"sync": {"adoption": "eager"}}, False),
    (
      {
        "method": "async_local_sgd",
        "outer": {"momentum": 0.0, "optimizer": "sgd"},
      },
      False,
    ),
  ],
)
def test_absent_islands_count_where_steps_may_be_of_many_lengths(
  fields, counted
):
  config = config_lib.from_mapping(fields)
  assert config.outer.count_absent is counted
  assert config_lib.from_mapping(config.to_dict()) == config
