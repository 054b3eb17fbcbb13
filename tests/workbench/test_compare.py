"""Runs against each other: groups over seeds, intervals, one page."""

import html.parser
import json
import math
import re

import pytest
import run_builder
from matplotlib import figure

from diloco import cli, process
from diloco import config as config_lib
from diloco.report import summary
from diloco.workbench import compare, compare_command, frozen, pictures

_RUNS = [(every, seed) for every in (8, 16) for seed in (0, 1, 2)]


def make(run_dir, **fields):
  """A run that ended, with the configuration of `fields`."""
  plan = run_builder.Plan(
    secs=6.0, seed=fields.get("seed", 0), eval_every_secs=1.0
  )
  run_builder.simulate(run_dir, plan)
  (run_dir / "config.json").unlink()
  process.write_config(config_lib.from_mapping(fields), run_dir)
  summary.write_summary(run_dir)
  return run_dir


@pytest.fixture(scope="module")
def six(tmp_path_factory):
  """Two settings with three seeds each."""
  folder = tmp_path_factory.mktemp("six")
  return [
    make(
      folder / f"{every}.{seed}",
      seed=seed,
      name=f"run {seed}",
      sync={"every": every, "num_fragments": 4},
    )
    for every, seed in _RUNS
  ]


def run(capsys, *args):
  code = cli.main(["compare", *map(str, args)])
  out, err = capsys.readouterr()
  return code, out, err


def set_loss(run_dir, loss, status="finished"):
  path = run_dir / summary.FILE_NAME
  facts = json.loads(path.read_text())
  facts |= {"final_eval_bits_per_token": loss, "status": status}
  path.write_text(json.dumps(facts))


def test_interval_is_that_of_student():
  # Three values: t(2, 0.975) = 4.30265, s / sqrt(3) = 1 / sqrt(3).
  found = compare.interval([1.0, 2.0, 3.0])
  assert found.mean == 2 and found.n == 3
  assert found.high - 2 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
  assert found.low == pytest.approx(4 - found.high)
  assert compare.interval([5.0]) == compare.Interval(5.0, None, None, 1)


def test_runs_that_differ_in_the_seed_alone_are_one_group(six, capsys):
  for run_dir, loss in zip(six, (2.0, 2.1, 2.2, 1.9, 2.1, 2.0), strict=True):
    set_loss(run_dir, loss)
  code, out, _ = run(capsys, *six, "--json")
  found = json.loads(out)
  assert code == 0
  assert found["differing_fields"] == ["config.sync.every"]
  assert [g["fields"] for g in found["groups"]] == [
    {"config.sync.every": 8},
    {"config.sync.every": 16},
  ]
  assert [r["seed"] for r in found["groups"][0]["runs"]] == [0, 1, 2]
  key = "final_eval_bits_per_token"
  first = found["groups"][0]["results"][key]
  assert first["mean"] == pytest.approx(2.1) and first["n"] == 3
  # Seed by seed: -0.1, 0, -0.2; apart, the intervals of both overlap.
  (difference,) = found["differences_to_first_group"][key]
  assert difference["mean"] == pytest.approx(-0.1)
  half = 4.30265 * 0.1 / math.sqrt(3)
  assert difference["high"] == pytest.approx(-0.1 + half, abs=1e-5)
  assert found["notes"] == []


@pytest.fixture
def diverged(six):
  """The same; one of the second setting came to no loss."""
  for run_dir, loss in zip(six, (2.0, 2.1, 2.2, 1.9, None, 2.0), strict=True):
    set_loss(run_dir, loss)
  yield six
  set_loss(six[4], 2.1)


def test_run_that_diverged_is_not_left_out_without_a_word(diverged, capsys):
  _, out, _ = run(capsys, *diverged, "--json")
  (note,) = json.loads(out)["notes"]
  assert "every=16: 1 of 3 runs" in note and "held-out bits per token" in note


def test_run_that_still_trains_has_not_diverged(diverged, capsys):
  set_loss(diverged[4], None, "running")
  _, out, _ = run(capsys, *diverged, "--json")
  found = json.loads(out)
  assert found["notes"] == []
  # What it has so far is in no mean.
  counts = [
    group["results"]["tokens_per_sec"]["n"] for group in found["groups"]
  ]
  assert counts == [3, 2]
  for ended in (diverged[3], diverged[5]):  # what it alone has is no figure yet
    set_loss(ended, None)
  set_loss(diverged[4], 2.0, "running")
  _, out, _ = run(capsys, *diverged, "--json")
  found = json.loads(out)
  assert "final_eval_bits_per_token" not in found["groups"][1]["results"]
  for ended, loss in ((diverged[3], 1.9), (diverged[5], 2.0)):
    set_loss(ended, loss)


def test_islands_are_counted_where_a_config_leaves_them_to_its_slices(
  tmp_path, capsys
):
  two = {"fleet": {"slices": [{}] * 2}}
  alone = {"fleet": {"slices": [{}] * 2, "num_islands": 1}}
  runs = [make(tmp_path / "two", **two), make(tmp_path / "one", **alone)]
  _, out, _ = run(capsys, *runs, "--json")
  groups = json.loads(out)["groups"]
  name = "config.fleet.num_islands"
  assert [group["fields"][name] for group in groups] == [2, 1]


def test_groups_of_other_seeds_are_told(six, capsys):
  _, out, _ = run(capsys, *six[:5], "--json")  # of the last group two of three
  (note,) = json.loads(out)["notes"]
  assert "not of the same seeds" in note


def test_run_that_diverged_has_no_place_on_the_axes(diverged):
  comparison = compare.compare(diverged)
  axes = figure.Figure().add_subplot()
  pictures.draw_parallel(axes, comparison, comparison.shown[:2])
  lines = [list(one.get_ydata()) for one in axes.lines]
  ends = [ys[-1] for ys in lines if len(ys) == 3]  # the others are axes
  assert ends == pytest.approx([1 / 3, 2 / 3, 1, 0, 1 / 3])


def test_evaluation_that_came_to_no_number_is_not_drawn(tmp_path):
  run_dir = make(tmp_path / "one")
  before = pictures.curves(run_dir)["heldout", "seconds"]
  tape = run_dir / "tape" / "island-0-0001.jsonl"
  told = tape.read_text().splitlines()
  last = [line for line in told if '"evaluated"' in line][-1]
  line = json.loads(last) | {"loss": None, "bits_per_token": None}
  tape.write_text(tape.read_text() + json.dumps(line) + "\n")
  after = pictures.curves(run_dir)["heldout", "seconds"]
  assert after.tolist() == before.tolist()


@pytest.mark.parametrize(
  ("fields", "seeds", "told"),
  [({}, (0, 1), 1), ({"seeds": 2}, (0, 1), 1), ({"seeds": 2}, (0, 2), 0)],
)
def test_simulations_that_share_seeds_have_too_narrow_an_interval(
  fields, seeds, told, tmp_path, monkeypatch
):
  entries = [
    compare.Entry(
      *(tmp_path / str(seed), compare.SIMULATION, fields, seed, "finished"),
      {"goodput.mean": 0.5 + seed / 100},
    )
    for seed in seeds
  ]
  monkeypatch.setattr(compare, "_load", lambda places: (entries, []))
  notes = compare.compare([]).notes
  assert len(notes) == told and all("seeds in common" in n for n in notes)


def test_terminal_shows_only_what_differs(six, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "200")
  code, out, err = run(capsys, *six)
  assert code == 0 and err == ""
  head = next(line for line in out.splitlines() if "runs" in line)
  assert head.split()[:2] == ["every", "runs"]
  assert "num_fragments" not in out and "95 %" in out


def test_table_is_never_folded_and_tells_paired_shares(six, capsys):
  for run_dir, loss in zip(six, (2.0, 2.1, 2.2, 1.9, 2.1, 2.0), strict=True):
    set_loss(run_dir, loss)
  _, out, _ = run(capsys, *six)  # into a file
  (row,) = (line for line in out.splitlines() if line.split()[:1] == ["16"])
  # Seed by seed -5 %, 0, -9.09 %; held to t(2, 0.975) s / sqrt(3).
  assert "-4.70 % ± 11.31 %" in row and "2.1" not in row.split("±")[0]
  (first,) = (line for line in out.splitlines() if line.split()[:1] == ["8"])
  assert "2.1 ± 0.2484" in first


def test_differences_of_a_table_are_shares_unless_one_would_be_of_0(
  six, capsys
):
  losses = [None, 2.1, 2.0, 1.9, 2.1, 1.9]  # the first run has diverged
  for head, zero, told in (
    ("against the first", 2.0, "-2.50 % ± "),
    ("minus the first", 0.0, "+0.95 ± "),
  ):
    losses[2] = zero
    for run_dir, loss in zip(six, losses, strict=True):
      set_loss(run_dir, loss)
    _, out, _ = run(capsys, *six)
    assert head in out and told in out
  for run_dir, loss in zip(six, (2.0, 2.1, 2.2, 1.9, 2.1, 2.0), strict=True):
    set_loss(run_dir, loss)


def test_narrow_terminal_has_a_paragraph_for_each_group(
  six, capsys, monkeypatch
):
  monkeypatch.setenv("COLUMNS", "60")
  monkeypatch.setattr(compare_command.console.Console, "is_terminal", True)
  _, out, _ = run(capsys, *six)
  assert [line[:9] for line in out.splitlines()[:4:2]] == [
    "every 8, ",
    "every 16,",
  ]


def test_one_seed_has_no_interval_and_says_so(six, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "200")
  code, out, _ = run(capsys, six[0], six[4], "--json")
  found = json.loads(out)
  assert code == 0
  assert found["groups"][0]["results"]["goodput"]["low"] is None
  assert found["differences_to_first_group"]["goodput"] == [None]
  assert "no interval" in found["notes"][0]
  code, out, _ = run(capsys, six[0], six[4])
  assert "no interval" in out and "no seed in common" in out


def test_directory_of_runs_stands_for_all_of_them(six, capsys, tmp_path):
  (where,) = {one.parent for one in six}
  assert run(capsys, where) == run(capsys, *sorted(six))
  old = make(tmp_path / "six" / "old")
  for path in process._config_paths(old):
    path.write_text("{")
  make(tmp_path / "six" / "new")
  code, out, err = run(capsys, tmp_path)
  assert code == 0 and "Left out: " in out + err and str(old) in out + err
  code, out, err = run(capsys, tmp_path / "six" / "new" / "tape")
  assert (code, out) == (2, "")
  assert len(err.splitlines()) == 1 and str(tmp_path) in err


def test_a_run_named_twice_counts_once(six, capsys):
  _, out, _ = run(capsys, six[0], six[0] / ".." / six[0].name, "--json")
  assert len(json.loads(out)["groups"][0]["runs"]) == 1


def test_runs_of_one_seed_are_one_value_of_their_group(tmp_path, six, capsys):
  same = make(tmp_path / "again", seed=0, sync={"every": 8, "num_fragments": 4})
  _, out, _ = run(capsys, six[0], same, "--json")
  (group,) = json.loads(out)["groups"]
  assert len(group["runs"]) == 2
  found = group["results"]["goodput"]
  assert found["n"] == 1 and found["low"] is None


class Page(html.parser.HTMLParser):
  """Refuses tags that do not match; counts the others."""

  def __init__(self, content):
    super().__init__()
    self.open, self.tags = [], []
    self.feed(content)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag not in ("meta", "br", "img"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def test_page_is_one_whole_file_without_a_network(six, capsys, tmp_path):
  path = tmp_path / "page.html"
  code, _, err = run(capsys, *six, f"--html={path}")
  assert err == f"wrote {path}\n"
  content = path.read_text()
  page = Page(content)
  assert code == 0
  # Two results and parallel coordinates; four charts of curves.
  assert page.tags.count("img") == 3
  assert content.count('src="data:image/svg+xml;base64,') == 3
  assert page.tags.count("figure") == 4
  assert not re.search(r"@import|url\((?!#)|src=\"(?!data:)", content)
  assert "every=16" in content and "num_fragments" not in content
  assert "var(--ink)" in content  # readable in light and dark


def test_what_cannot_be_compared_is_refused_in_one_line(six, capsys, tmp_path):
  other = make(tmp_path / "other", task={"name": "bigram:Bigram"})
  old = run_builder.simulate(tmp_path / "old")
  (tmp_path / "empty").mkdir()
  (tmp_path / "sweep").mkdir()
  (tmp_path / "sweep" / "sweep.json").write_text(
    '{"format": "diloco-sweep-1", "points": ["x"]}'
  )
  for args, why in (
    ([six[0], other], "of different tasks, 'language_model' and"),
    ([six[0], old], "its run has format 'diloco-run-2'"),
    ([six[0], tmp_path / "empty"], "config.json cannot be read"),
    ([tmp_path / "nowhere"], "config.json cannot be read"),
    ([tmp_path / "sweep"], "its sweep.json cannot be read"),
    ([six[0], f"--html={tmp_path}/no/page.html"], "cannot be written"),
  ):
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert why in err


def test_point_without_a_run_is_left_out_whatever_its_directory(
  capsys, tmp_path
):
  names = ["done", "failed", "about-to-begin", "damaged"]
  config = config_lib.RunConfig().to_dict()
  points = tuple(frozen.Point(name, {}, config) for name in names)
  frozen.write(tmp_path, frozen.Sweep("train", "rates.py", "", points))
  make(tmp_path / "done")
  frozen.set_outcome(tmp_path, "failed", {"status": "failed"})
  (tmp_path / "about-to-begin").mkdir()
  (make(tmp_path / "damaged") / "config.json").write_text("{")
  code, out, _ = run(capsys, tmp_path)
  assert code == 0
  assert "3 of 4 points have nothing to show and are left out" in out
  assert "Left out: " in out and "damaged" in out


@pytest.mark.parametrize("text", ['{"of": "others"}', "[" * 50_000])
def test_summary_that_is_none_is_made_again(tmp_path, text):
  run_dir = make(tmp_path / "one")
  (run_dir / "summary.json").write_text(text)
  (entry,) = compare.compare([run_dir]).groups[0].entries
  assert entry.status == "finished" and entry.results["wall_secs"] > 0


def test_fleets_of_other_sizes_are_one_field_in_words(tmp_path):
  slow = {"kind": "v5p", "topology": "2x4", "relative_speed": 0.6}
  fleets = {"small": [{}], "large": [{}, slow, slow]}
  for name, slices in fleets.items():
    make(tmp_path / name, fleet={"slices": slices})
  found = compare.compare(tmp_path / name for name in fleets)
  assert [group.fields for group in found.groups] == [
    {"config.fleet.slices": "1 x cpu"},
    {"config.fleet.slices": "1 x cpu, 2 x v5p 2x4 at 0.6"},
  ]
