"""A run opened by its directory: tables, figures, parameters, reprs."""

import json
import os
import sys
import types

import numpy as np
import pytest
from cut_builder import PLAN, filled, spoil
from observing import loaded_by

from diloco import config as config_lib
from diloco import errors, process
from diloco.fragments import partition
from diloco.snapshots import (
  arrays,
  cuts,
  keys,
  portable,
  records,
  store,
  versions,
)
from diloco.tape import events, reader, recorder
from diloco.workbench import opened, session


def fills(params):
  """The one value that each leaf is filled with."""
  return {name: set(np.ravel(leaf)) for name, leaf in params.items()}


def test_params_are_those_of_the_version_asked_for(run):
  assert run.versions() == [0, 6, 7]
  assert run.cuts() == [1]
  assert fills(run.params()) == {"a": {7.0}, "b": {7.0}}
  assert fills(run.params(version=6)) == {"a": {6.0}, "b": {6.0}}
  assert fills(run.params(version=0)) == {"a": {0.0}, "b": {0.0}}
  found = run.values(cut=1)
  assert fills(found.params) == {"a": {5.0}, "b": {4.0}}
  assert found.versions == [5, 4]


def test_version_that_is_gone_names_those_that_are_there(run):
  for wanted in ({"version": 5}, {"version": 8}, {"cut": 2}):
    with pytest.raises(errors.UserError) as refused:
      run.params(**wanted)
    assert "versions 0, 6, 7 and cuts 1" in str(refused.value)
  with pytest.raises(errors.UserError, match="exclude"):
    run.params(version=6, cut=1)


def test_cut_that_nobody_can_read_hides_no_other(made, run):
  made.perform(cuts.request([0], 2))
  spoil(made, keys.cut_request_key(2))
  assert run.cuts() == [1]
  assert fills(run.params(cut=1)) == {"a": {5.0}, "b": {4.0}}
  with pytest.raises(errors.UserError, match="cuts 1"):
    run.params(cut=2)


def test_version_left_by_a_deposed_leader_is_not_taken_for_the_committed(
  made, run
):
  stray = keys.global_prefix(1, 6, "s0.stray")
  tensors = [
    arrays.Tensor.whole(t.name, filled(t, 9.0)) for t in PLAN.fragments[1]
  ]
  made.store.arrays.write(f"{stray}/params", tensors)
  assert fills(run.params(version=6)) == {"a": {6.0}, "b": {6.0}}


def test_values_other_than_those_committed_are_refused(made, run):
  for version, number in ((None, 7), (6, 6)):
    payload = keys.global_prefix(0, number, f"s1.{number}.0")
    (spec,) = PLAN.fragments[0]
    wrong = arrays.Tensor.whole(spec.name, filled(spec, 1.0))
    made.store.arrays.write(f"{payload}/params", [wrong])
    with pytest.raises(errors.CorruptSnapshotError, match="committed"):
      run.params(version=version)


def test_version_replaced_while_it_is_read_gives_way_to_the_next(
  made, run, monkeypatch
):
  read, replaced = versions.Versions._read_tensors, []

  def race(self, payload, fragment):
    if fragment == 1 and not replaced:
      replaced.append(payload)
      made.commit(1, 8, {}, value=8.0)
      made.store.delete_tree(payload)
    return read(self, payload, fragment)

  monkeypatch.setattr(versions.Versions, "_read_tensors", race)
  found = run.values()
  assert found.versions == [7, 8] and fills(found.params)["b"] == {8.0}


def test_merged_tokens_follow_a_return_to_a_cut(run):
  assert run.merged_tokens([7, 7]) == 7 * (10 + 11) // 2
  assert run.merged_tokens([0, 0]) == 0
  tape = recorder.Recorder(run.dir, "controller", 2)
  tape.record(
    events.RESTORED,
    cut=1,
    epoch=1,
    version_from=[5, 4],
    version_to=[8, 8],
    reinjected=[],
    steps={},
  )
  tape.close()
  assert run.merged_tokens([8, 8]) == (5 * 10 + 4 * 11) // 2


def test_leaves_are_put_together_from_parts():
  whole = np.arange(24, dtype=np.float32).reshape(2, 12)
  plan = partition.partition(
    [partition.Tensor("top/w", (2, 12), "rda")], 3, split=True
  )
  snapshots = store.SnapshotStore("memory://")
  snapshots.write_plan(plan)
  for fragment, tensors in enumerate(plan.fragments):
    payload = keys.global_prefix(fragment, 0, "i0.1")
    held = []
    for tensor in tensors:
      axis, start = tensor.part.axis, tensor.part.start
      cut = [slice(None)] * 2
      cut[axis] = slice(start, start + tensor.shape[axis])
      held.append((tensor.name, np.ascontiguousarray(whole[tuple(cut)])))
    snapshots.arrays.write(
      f"{payload}/params", [arrays.Tensor.whole(*pair) for pair in held]
    )
    head = records.Head(fragment, 0, 0, payload, [], {}, {})
    snapshots.write(keys.head_key(fragment), head)
  values = versions.Versions(snapshots).read()
  assert len(plan.fragments) == 3
  np.testing.assert_array_equal(values.params["top/w"], whole)
  tree = portable.nested(values.params)
  np.testing.assert_array_equal(tree["top"]["w"], whole)


def test_tables(run):
  steps = run.metrics()
  assert steps["loss"].tolist() == [3.0, 1.5, 1.0]
  assert steps["task/nll"].tolist() == [1, 2, 3]
  assert set(steps["island"]) == {0}
  merged = run.tape("merged")
  assert len(merged) == 14 and set(merged["event"]) == {"merged"}
  assert len(run.tape()) == 15
  with pytest.raises(errors.UserError, match="name one of "):
    run.tape("merge")


def test_tables_of_a_run_that_has_only_begun_have_their_columns(run):
  for folder in ("tape", "metrics"):
    for path in (run.dir / folder).iterdir():
      path.write_text("")
  steps, lines = run.metrics(), run.tape()
  assert len(steps) == len(lines) == 0
  assert {"island", "step", "loss"} <= set(steps)
  assert {"event", "role"} <= set(lines)
  assert list(steps.groupby("island")) == []


def test_tables_without_pandas_say_what_to_install(run, monkeypatch):
  monkeypatch.setitem(sys.modules, "pandas", None)
  with pytest.raises(errors.UserError, match=r"\.\[workbench\]"):
    run.metrics()


def test_configuration_is_a_copy_that_can_start_another_run(run):
  config = run.config
  config.name = "other"
  assert run.config.name == "mine"
  assert config_lib.from_mapping(config).name == "other"


def test_summary_is_the_written_one_only_while_nothing_came_after_it(run):
  path = run.dir / "summary.json"
  path.write_text(json.dumps({"status": "as written"}))
  os.utime(path, (2e9, 2e9))
  assert run.summary == {"status": "as written"}
  os.utime(path, (1e9, 1e9))
  assert run.summary["status"] == "crashed"


def test_reprs_say_what_became_of_it(run):
  assert run.state == "crashed"
  assert "state: crashed" in repr(run) and "merges: 14" in repr(run)
  html = run._repr_html_()
  assert html.startswith("<table>") and "mine (run)" in html
  assert "held-out loss: unknown" in repr(run)
  tape = recorder.Recorder(run.dir, "evaluator", 1)
  told = {"target": "global", "step": 1, "tokens": 8}
  tape.record(events.EVALUATED, **told, loss=2 * np.log(2))
  tape.close()
  unit = "byte" if run.settings.task.name == "language_model" else "token"
  assert f"held-out loss: 2.0000 bits/{unit}" in repr(run)


@pytest.fixture
def lines_read(monkeypatch):
  """Every line of the record that is read meanwhile."""
  parse, found = reader._File._parse, []
  monkeypatch.setattr(
    reader._File, "_parse", lambda *given: found.append(given) or parse(*given)
  )
  return found


def test_notebook_that_shows_a_run_reads_it_once(run, lines_read):
  shown = run._repr_mimebundle_(include=None, exclude=None)
  assert len(lines_read) == len(run.tape()) + len(run.metrics()) > 0
  assert shown == {"text/plain": repr(run), "text/html": run._repr_html_()}


def test_notebook_that_watches_a_run_reads_what_is_new(
  run, lines_read, monkeypatch
):
  drawn = []
  shell = types.SimpleNamespace(
    get_ipython=lambda: shell,
    display=types.SimpleNamespace(
      display=lambda first, display_id: drawn.append(repr(first)) or handle
    ),
  )
  handle = types.SimpleNamespace(update=lambda now: drawn.append(repr(now)))
  monkeypatch.setitem(sys.modules, "IPython", shell)

  with session.Session(run.dir)._screen() as draw:
    del lines_read[:]
    tape = recorder.Recorder(run.dir, "evaluator", 1)
    told = {"target": "global", "step": 1, "tokens": 8}
    tape.record(events.EVALUATED, **told, loss=2 * np.log(2))
    tape.close()
    draw()
    draw()
  assert len(lines_read) == 1
  assert "held-out loss: unknown" in drawn[0]
  assert drawn[1:] == [repr(run)] * 2


def test_report_can_go_elsewhere(run, tmp_path):
  path = run.report(tmp_path / "mine.html")
  assert path.read_text().startswith("<!DOCTYPE html>")
  assert not (run.dir / "report.html").exists()


def test_run_opened_by_a_relative_path_stays_that_run(
  run, tmp_path, monkeypatch
):
  monkeypatch.chdir(run.dir)
  here = opened.Run(".")
  monkeypatch.chdir(tmp_path)
  assert here.dir == run.dir and here.versions() == run.versions()


@pytest.mark.parametrize("which", [(0, "x"), ("x", 0), (0, None), (0, 1.5)])
def test_what_is_no_round_is_not_explained(run, which):
  with pytest.raises(errors.UserError, match="versions are integers"):
    run.explain(*which)


def test_no_run_is_one_line(tmp_path):
  with pytest.raises(errors.UserError, match="name the directory of a run"):
    opened.Run(tmp_path / "none")
  process.write_config(config_lib.RunConfig(), tmp_path / "young")
  with pytest.raises(errors.UserError, match="has none yet"):
    opened.Run(tmp_path / "young").params()


def test_opening_loads_neither_jax_nor_drawing_nor_tables():
  loaded = loaded_by("import diloco.workbench.opened")
  assert not {"jax", "matplotlib", "pandas"} & loaded
