"""What a run logged, written for other programs and read back by their own."""

import json
import pathlib
import sys
import types

import numpy as np
import pytest
import run_builder
from observing import refused
from prometheus_client.openmetrics import parser

from diloco import cli, process
from diloco import config as config_lib
from diloco.report import live, openmetrics, status
from diloco.tape import events, reader
from diloco.workbench import metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run that ended, with its whole record."""
  run_dir = tmp_path_factory.mktemp("runs") / "mine"
  plan = run_builder.Plan(secs=8.0, faults=((None, 4.0),))
  run_builder.simulate(run_dir, plan)
  process.write_config(config_lib.from_mapping({"name": "mine"}), run_dir)
  return types.SimpleNamespace(dir=run_dir, record=reader.read(run_dir))


def write(run, form, out, capsys):
  argv = [f"--format={form}", f"--out={out}", "--json"]
  assert cli.main(["metrics", str(run.dir), *argv]) == 0
  return json.loads(capsys.readouterr().out)


def logged(run, island):
  return [(line["step"], line["loss"]) for line in run.record.metrics[island]]


def evaluated(run):
  return [
    line["bits_per_token"]
    for line in run.record.events
    if line["event"] == events.EVALUATED
  ]


def test_tensorboard_reads_steps_merges_and_evaluations(run, tmp_path, capsys):
  from tensorboardX import record_writer
  from tensorboardX.proto import event_pb2

  told = write(run, "tensorboard", tmp_path / "tb", capsys)
  found = {}
  for path in sorted((tmp_path / "tb").rglob("events.*")):
    for data in records_of(path, record_writer):
      event = event_pb2.Event.FromString(data)
      for value in event.summary.value:
        key = path.parent.name, value.tag
        point = event.step, value.simple_value
        found.setdefault(key, []).append(point)
  assert len(found["merges", "staleness"]) == status.status(run.dir)["merges"]
  for island in (0, 1):
    steps = found[f"island-{island}", "loss"]
    np.testing.assert_allclose(steps, logged(run, island), rtol=1e-6)
  bits = [value for _, value in found["evaluations", "bits_per_token"]]
  assert bits == pytest.approx(evaluated(run), rel=1e-6)
  assert told["points"] == sum(map(len, run.record.metrics.values())) + len(
    found["merges", "islands"]
  ) + len(bits)


def records_of(path, record_writer):
  """Records of an event file, both checksums of each verified."""
  data = path.read_bytes()
  while data:
    size = int.from_bytes(data[:8], "little")
    body, data = data[12 : 12 + size], data
    for part, at in ((data[:8], 8), (body, 12 + size)):
      crc = int.from_bytes(data[at : at + 4], "little")
      assert crc == record_writer.masked_crc32c(part)
    data = data[16 + size :]
    yield body


def test_parquet_has_a_table_of_each_series(run, tmp_path, capsys):
  from pyarrow import parquet

  write(run, "parquet", tmp_path / "tables", capsys)
  tables = {
    path.stem: parquet.read_table(path).to_pylist()
    for path in (tmp_path / "tables").iterdir()
  }
  assert set(tables) == {"steps", "merges", "evaluations"}
  for island in (0, 1):
    rows = [row for row in tables["steps"] if row["island"] == island]
    assert [(row["step"], row["loss"]) for row in rows] == logged(run, island)
  assert tables["steps"][0]["gap_secs"] is None
  assert [row["step"] for row in tables["merges"]] == list(
    range(1, 1 + status.status(run.dir)["merges"])
  )


def test_scraper_reads_the_state_of_a_run(run, tmp_path, capsys):
  out = tmp_path / "run.prom"
  for _ in range(2):  # a file is replaced
    argv = ["--format=openmetrics", f"--out={out}"]
    assert cli.main(["metrics", str(run.dir), *argv]) == 0
  assert cli.main(["metrics", str(run.dir), "--format=openmetrics"]) == 0
  assert capsys.readouterr().out == out.read_text()
  facts = status.status(run.dir)
  samples = {
    (sample.name, sample.labels.get("island")): sample.value
    for family in parser.text_string_to_metric_families(out.read_text())
    for sample in family.samples
    if sample.labels["run"] == "mine"
  }
  assert samples["diloco_run_merges_total", None] == facts["merges"]
  assert samples["diloco_run_alive", None] == 0
  for number, island in facts["islands"].items():
    assert samples["diloco_island_step", number] == island["step"]


def test_controller_writes_for_a_scraper_if_asked(run):
  view = live.LiveView(run.dir, quiet=True)
  view.tick()
  path = run.dir / openmetrics.FILE_NAME
  assert not path.exists()
  view = live.LiveView(run.dir, quiet=True, exposed_secs=60.0)
  view.tick()
  assert path.read_text().endswith("# EOF\n")
  path.unlink()
  view.tick()
  assert not path.exists()  # not due
  view.close()
  assert path.exists()


def test_points_in_pieces_are_those_of_the_whole(run):
  whole = list(metrics.Points().of(run.record))
  pieces, made = metrics.Points(), []
  for line in run.record.events:
    made += pieces.of(reader.Record([line, line], {}, []))  # told twice
  merges = [point for point in whole if point.series == "merges"]
  assert [point for point in made if point.series == "merges"] == merges


@pytest.mark.parametrize(
  ("argv", "told"),
  [
    (["nowhere", "--format=parquet"], "nowhere"),
    (["{run}", "--format=csv"], "invalid choice: 'csv'"),
    (["{run}", "--format=parquet", "--out={run}"], "it is there already"),
    (["{run}", "--format=openmetrics", "--follow"], "give --out"),
    (["{run}", "--format=parquet", "--follow=-1"], "at least 0"),
  ],
)
def test_bad_input_is_one_line(run, argv, told, capsys):
  before = sorted(pathlib.Path(run.dir).rglob("*"))
  argv = [part.format(run=run.dir) for part in argv]
  assert told in refused(capsys, ["metrics", *argv])
  assert sorted(pathlib.Path(run.dir).rglob("*")) == before


@pytest.mark.parametrize(
  ("form", "package", "extra"),
  [("tensorboard", "tensorboardX", "workbench"), ("wandb", "wandb", "wandb")],
)
def test_missing_package_is_named(
  run, tmp_path, capsys, monkeypatch, form, package, extra
):
  monkeypatch.setitem(sys.modules, package, None)
  argv = [f"--format={form}", f"--out={tmp_path / 'out'}"]
  assert cli.main(["metrics", str(run.dir), *argv]) == 2
  err = capsys.readouterr().err
  assert f"for {package}: " in err and f".[{extra}]" in err
  assert not list(tmp_path.iterdir())


def test_weights_and_biases_offline(run, tmp_path, capsys):
  pytest.importorskip("wandb")
  write(run, "wandb", tmp_path / "offline", capsys)
  (path,) = (tmp_path / "offline").rglob("run-*.wandb")
  data = path.read_bytes()
  losses = [loss for island in (0, 1) for _, loss in logged(run, island)]
  missing = sum(json.dumps(loss).encode() not in data for loss in losses)
  assert missing <= len(data) // (32 << 10)  # its blocks may cut a number
  assert b"island-1/learning_rate" not in data and b"merges/staleness" in data
