"""The report: one well-formed file, whatever became of the run."""

import html.parser
import json
import re

import pytest
import run_builder

from diloco import errors
from diloco.report import html as html_lib
from diloco.tape import recorder

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(html.parser.HTMLParser):
  """Refuses tags that do not match, and collects text and attributes."""

  def __init__(self):
    super().__init__(convert_charrefs=True)
    self.open, self.words, self.tags, self.links = [], [], [], []
    self.scripts = []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href")]
    if tag not in _VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href")]

  def handle_endtag(self, tag):
    assert self.open and self.open.pop() == tag, tag

  def handle_data(self, data):
    if self.open and self.open[-1] == "script":
      self.scripts.append(data)
    else:
      self.words.append(data)

  @property
  def charts(self):
    return [json.loads(text) for text in self.scripts[:-1]]


def _checked(run_dir):
  path = html_lib.write_report(run_dir)
  assert path == run_dir / "report.html"
  content = path.read_text(encoding="utf-8")
  checker = Checker()
  checker.feed(content)
  checker.close()
  assert not checker.open
  # Nothing outside this file is asked for.
  assert all(link.startswith("#") for link in checker.links)
  addresses = set(re.findall(r"https?://[^\s\"']*", content))
  assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, never loaded
  assert not re.search(r"@import|url\((?!#)|fetch\(|import\(", content)
  return checker, re.sub(r"\s+", " ", " ".join(checker.words))


def test_finished_run_shows_everything(tmp_path):
  plan = run_builder.Plan(
    islands=(run_builder.Island(0.1, "v6e", 1.0, True), run_builder.Island()),
    faults=((1, 6.0), (None, 9.0)),
  )
  checker, words = _checked(run_builder.simulate(tmp_path / "my run", plan))
  assert len(checker.charts) == 9
  assert checker.tags.count("table") == 4
  for text in (
    "my run",
    "finished",
    "Goodput",
    "Emulated speed",
    "emulated at 0.1 s a step",
    "signal SIGKILL",
    "The books balance",
    "bits per token",
    "Contributors per merge",
    "Staleness",
    "merged",
    "pending",
    "lost with island",
    "in vain",
    "Weights in merges",
    "Cosine between outer gradients",
    "2 faults injected",
  ):
    assert text.lower() in words.lower(), text


def test_speed_that_is_real_is_not_called_emulated(tmp_path):
  _, words = _checked(run_builder.simulate(tmp_path, run_builder.Plan(secs=4)))
  assert "Emulated" not in words.replace("emulated step time", "")


@pytest.mark.parametrize("secs", [0.0, 1.05, 1.2, 2.0, 7.0])
def test_crashed_run_is_reported_as_far_as_it_went(tmp_path, secs):
  plan = run_builder.Plan(finish=False, secs=secs, faults=((0, 1.8),))
  _, words = _checked(run_builder.simulate(tmp_path, plan))
  assert "crashed" in words


def test_empty_directory_gives_a_clear_message(tmp_path):
  _, words = _checked(tmp_path)
  assert "Nothing was trained" in words


def test_missing_directory_is_the_users_mistake(tmp_path):
  with pytest.raises(errors.UserError, match="no such directory"):
    html_lib.write_report(tmp_path / "nowhere")


def test_everything_that_comes_from_outside_is_escaped(tmp_path):
  evil = "<script>alert('&')</script>\""
  island = run_builder.Island(kind=evil)
  plan = run_builder.Plan(islands=(island, island), secs=5, faults=((0, 3.0),))
  run_dir = run_builder.simulate(tmp_path / "a <b> & c", plan)
  config = json.loads((run_dir / "config.json").read_text())
  config["config"] |= {"name": evil, evil: evil}
  (run_dir / "config.json").write_text(json.dumps(config))
  for role in ("controller", "syncer"):
    path = recorder.tape_path(run_dir, role, 1)
    lines = path.read_text()
    escaped = json.dumps(evil)[1:-1]
    lines = lines.replace("signal SIGKILL", escaped)
    lines = lines.replace("token budget trained", escaped)
    path.write_text(lines.replace("too_stale", escaped) + f'["{evil}\n')
  checker, words = _checked(run_dir)
  assert checker.tags.count("script") == len(checker.scripts)
  assert "b" in checker.tags and "alert('&')" in words
  assert all("alert" not in text for text in checker.scripts[-1:])
  assert any(
    evil in label for c in checker.charts for label in c.get("rows", [])
  )


def test_large_fleet_has_two_lines_of_traffic(tmp_path):
  islands = tuple(run_builder.Island(0.3) for _ in range(24))
  plan = run_builder.Plan(islands=islands, secs=4.0)
  checker, _ = _checked(run_builder.simulate(tmp_path, plan))
  names = [
    [line["name"] for line in chart["lines"]] for chart in checker.charts
  ]
  assert names[4] == ["all send", "all fetch"]
  assert (
    names[3][-1] == "island 23" and "island 23" in checker.charts[2]["rows"][23]
  )


def test_problems_are_listed(tmp_path):
  run_dir = run_builder.simulate(tmp_path, run_builder.Plan(secs=4.0))
  with open(recorder.tape_path(run_dir, "syncer", 1), "a") as file:
    file.write("broken\n")
  _, words = _checked(run_dir)
  assert "What must not happen" in words and "syncer-0001.jsonl" in words


def test_pace_the_machine_did_not_keep_is_not_claimed(tmp_path):
  slow = run_builder.Island(0.143, paced=True, asked_secs=0.09)
  kept = run_builder.Island(0.2, paced=True)
  plan = run_builder.Plan(islands=(slow, kept))
  _, words = _checked(run_builder.simulate(tmp_path, plan))
  assert "The pace was not kept by island 0 (asked 90 ms a step, seen" in words
  assert "emulated at 90 ms a step, seen 0.14" in words
  assert "emulated at 0.2 s a step " in words
  assert "were stretched to a set pace" not in words
