"""Whatever a damaged tape says, status, summary and report are made."""

import contextlib
import copy
import functools
import itertools
import json
import operator
import random

import pytest
import run_builder

from diloco import config as config_lib
from diloco import errors, process
from diloco.report import dashboard, explain_text, html, summary, view
from diloco.report import status as status_lib
from diloco.tape import events, explain, reader
from diloco.workbench import metrics, opened

_VALUES = [
  *(None, True, -1, 0, 7, 10**9, 10**40, 1.5, float("nan"), float("inf")),
  *("", "x", "\ud800", "island-0", [], [None], ["a", 1], [[1]], {}, {"a": 1}),
  [{"island": "0"}],
  *(1e300, 10**400),
]
_KINDS = (None, True, -1, 10**400, float("nan"), "x", [None], {"a": 1})
# Lines with all that is read of them, and whose they are.
_WHOLE = {
  "tape/controller-0001.jsonl": [
    {"event": events.CONFIG_CHANGED, "changes": {"sync.every": [4, 8]}},
    {"event": events.RESTORED, "version_from": [1, 1], "version_to": [9, 9]},
  ],
  "tape/island-0-0001.jsonl": [
    {
      "event": events.STARTED,
      "step": 0,
      "tokens_per_step": 8,
      "base_versions": [0, 0],
      "base_digests": ["a", "b"],
    },
    {
      "event": events.PUBLISHED,
      "fragment": 0,
      "key": "a",
      "base_version": 0,
      "first_step": 0,
      "step": 8,
    },
    {
      "event": events.EVALUATED,
      "target": "global",
      "step": 8,
      "loss": 1.5,
      "tokens": 64,
      "bits_per_token": 2.1,
      "version": 1,
    },
  ],
  "tape/syncer-0001.jsonl": [
    {
      "event": events.DISCARDED,
      "fragment": 0,
      "key": "b",
      "island": 1,
      "island_incarnation": 1,
      "first_step": 0,
      "step": 8,
      "reason": "too_stale",
      "arrived_at": 10.0,
    },
    {
      "event": events.MERGED,
      "fragment": 0,
      "version": 1,
      "token": 1,
      "contributions": [
        {
          "key": "a",
          "island": 0,
          "incarnation": 1,
          "first_step": 0,
          "step": 8,
          "c_tokens": 64,
          "staleness": 0,
          "weight": 1.0,
          "waited_secs": 0.5,
          "arrived_at": 10.5,
        }
      ],
      "absent": [1],
      "opened_at": 10.0,
      "closed_at": 11.0,
      "quorum_secs": 0.2,
      "grace_secs": 0.5,
      "grace_spent_secs": 0.7,
      "grace_facts": {"step_secs": 0.5, "quorum_secs": 0.2, "sync_secs": 0.1},
      "merge_secs": 0.1,
      "outer_grad_norm": 0.125,
      "digest": "a",
    },
  ],
  "metrics/island-0.jsonl": [
    {
      "step": 1,
      "loss": 1.5,
      "tokens": 8,
      "grad_norm": 0.5,
      "update_norm": 0.5,
      "learning_rate": 0.5,
      "task": {"nll": 1.5},
    }
  ],
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  plan = run_builder.Plan(
    secs=5.0, faults=((0, 2.0), (None, 3.0)), restart_secs=1.0
  )
  return run_builder.simulate(tmp_path_factory.mktemp("fuzz") / "run", plan)


@pytest.fixture(scope="module")
def files(run_dir):
  """Lines of a good run by file, decoded."""
  paths = [*run_dir.glob("tape/*.jsonl"), *run_dir.glob("metrics/*.jsonl")]
  return {
    path.relative_to(run_dir): [
      json.loads(line) for line in path.read_text().splitlines()
    ]
    for path in sorted(paths)
  }


def _mutate(line, rng):
  """Gives one field, of the line or of an item in it, a strange value."""
  places = [line]
  for value in line.values():
    if isinstance(value, list):
      places += [item for item in value if isinstance(item, dict)]
  place = rng.choice(places)
  optional = ("epoch", "bytes", "secs", "led", "unsent_from_step", "key")
  name = rng.choice([*place, *optional])
  if rng.random() < 0.1:
    place.pop(name, None)
  else:
    place[name] = rng.choice(_VALUES)


def _write(run_dir, files):
  for name, lines in files.items():
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _make_everything(run_dir, pictures):
  """All that is made of a record, but pictures only where asked for."""
  facts = status_lib.status(run_dir)
  dashboard.render(facts, "run")
  json.dumps(summary.summarise(run_dir), allow_nan=False).encode()
  json.dumps(facts, allow_nan=False).encode()
  if pictures:
    html.write_report(run_dir)


@pytest.mark.parametrize("seed", range(24))
def test_nothing_raises_whatever_a_line_holds(files, tmp_path, seed):
  rng = random.Random(seed)
  damaged = copy.deepcopy(files)
  for lines in damaged.values():
    for line in rng.sample(lines, max(1, len(lines) // 8)):
      _mutate(line, rng)
  _write(tmp_path, damaged)
  _make_everything(tmp_path, pictures=seed % 8 == 0)
  record = reader.read(tmp_path)
  try:
    explain.explain(record, 0, 1)
  except ValueError as error:
    assert ";" in str(error)  # a user's error, with a remedy


def test_a_strange_value_in_any_field_is_borne(files, tmp_path):
  """One line of each event, each field in turn; no pictures."""
  samples = {}
  for name, lines in files.items():
    for line in lines:
      samples.setdefault(line.get("event", "metric"), (name, line))
  rng = random.Random(0)
  _write(tmp_path, {name: lines[:30] for name, lines in files.items()})
  for name, line in samples.values():
    path = tmp_path / name
    good = path.read_text()
    strange = []
    for field in line:
      for value in rng.sample(_VALUES, 6):
        strange.append(json.dumps({**line, field: value}) + "\n")
    path.write_text(good + "".join(strange))
    _make_everything(tmp_path, pictures=False)
    path.write_text(good)


def _strange():
  """Every line of `_WHOLE` with every field, also of its items, in turn."""
  for name, lines in _WHOLE.items():
    for number, line in enumerate(lines):
      places = [(), *((k,) for k, v in line.items() if isinstance(v, dict))]
      places += [("contributions", 0)] if "contributions" in line else []
      for path in places:
        place = functools.reduce(operator.getitem, path, line)
        for field, value in itertools.product(place, _KINDS):
          other = copy.deepcopy(line)
          functools.reduce(operator.getitem, path, other)[field] = value
          yield name, number, other


def test_a_strange_value_in_a_whole_line_is_borne_by_whoever_reads_it(
  tmp_path, monkeypatch
):
  """Rounds are explained, points are made, and versions told."""
  process.write_config(config_lib.RunConfig(), tmp_path)
  run = opened.Run(tmp_path)
  monkeypatch.setattr(opened, "_table", lambda rows, _: list(rows))
  sync = config_lib.SyncConfig()
  for name, number, line in _strange():
    lines = [*_WHOLE[name]]
    lines[number] = line
    _write(tmp_path, {**_WHOLE, name: lines})
    record = reader.read(tmp_path)
    for point in metrics.Points().of(record):
      json.dumps(point)
    run.metrics()
    run.merged_tokens([9, 9])
    run._digest(1, 1)
    with contextlib.suppress(errors.UserError):
      explain_text.render(explain.explain(record, 0, 1), sync)


def test_strange_values_in_whole_lines_are_no_end_of_a_report(tmp_path):
  files = {name: [*lines] for name, lines in _WHOLE.items()}
  for name, _, line in _strange():
    files[name].append(line)
  _write(tmp_path, files)
  _make_everything(tmp_path, pictures=True)


def test_broken_lines_of_a_file_are_one_problem_with_their_number(
  files, tmp_path
):
  _write(tmp_path, files)
  path = tmp_path / "metrics" / "island-0.jsonl"
  with open(path, "a") as file:
    file.write('{"step": "x"}\n' * 362)
  (problem,) = summary.summarise(tmp_path)["problems"]
  first = len(files[path.relative_to(tmp_path)]) + 1
  assert f"line {first} (one of 362 broken lines)" in problem
  assert "its 'step' is 'x'" in problem
  assert problem.split(":")[0] in html.write_report(tmp_path).read_text()


def test_one_file_stays_one_problem_while_it_is_followed(tmp_path):
  path = tmp_path / "metrics" / "island-0.jsonl"
  path.parent.mkdir()
  follower, seen = reader.Follower(tmp_path), view.RunView()
  for _ in range(3):
    with open(path, "a") as file:
      file.write("broken\n")
    seen.update(follower.poll())
  (problem,) = seen.problems
  assert "line 1 (one of 3 broken lines)" in problem


def test_lone_surrogate_in_a_config_does_not_break_the_report(tmp_path):
  (tmp_path / "config.json").write_text('{"name": "a\\ud800b", "sync": 3}')
  assert "a?b" in html.write_report(tmp_path).read_text()
